//! The norm of what comes of a recurrence's heads, or of groups of them, and the gate behind it.

use metal_attention_model::NormKind;

use super::OutputGate;
use super::bindings::{self, Access, Bindings, RowsAt};
use crate::arena::Bind;
use crate::device::WgpuDevice;
use crate::dispatch::{Dispatch, Extent};
use crate::error::WgpuError;
use crate::pso::PsoKey;

/// What [`group_norm`] computes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GroupNormShape {
    /// Elements of a group.
    pub n: usize,
    /// Groups of a token.
    pub groups: usize,
    /// The norm.
    pub kind: NormKind,
    /// Added to the mean of the squares.
    pub eps: f32,
    /// Whether each group has its own weights, `[groups, n]`; else all have the same, `[n]`.
    pub of_groups: bool,
    /// Whether as many biases are added.
    pub bias: bool,
    /// `[groups, n]`
    pub x: RowsAt,
    /// What multiplies the result, of rows `[groups, n]`.
    pub gate: Option<(OutputGate, RowsAt)>,
    /// `[groups, n]`
    pub out: RowsAt,
}

/// The buffers of [`group_norm`].
#[derive(Debug, Clone, Copy)]
pub struct GroupNormBuffers<'a> {
    /// Rows to be normed.
    pub x: &'a dyn Bind,
    /// As [`GroupNormShape::of_groups`] says.
    pub weight: &'a dyn Bind,
    /// As many, where there are any.
    pub bias: Option<&'a dyn Bind>,
    /// Rows with the gates, where there are any.
    pub gate: Option<&'a dyn Bind>,
    /// Rows with the results, another buffer.
    pub out: &'a dyn Bind,
}

impl GroupNormShape {
    fn bindings(&self) -> Bindings {
        let (n, n_weights) = (self.groups * self.n, if self.of_groups { self.groups * self.n } else { self.n });
        let mut bindings = vec![
            ("x", Access::Rows(self.x, n)),
            ("weight", Access::Floats(n_weights)),
            ("out", Access::Results(self.out, n)),
        ];
        if self.bias {
            bindings.push(("bias", Access::Floats(n_weights)));
        }
        if let Some((_, gate)) = self.gate {
            bindings.push(("gate", Access::Rows(gate, n)));
        }
        bindings
    }

    fn key(&self) -> PsoKey {
        let gate = match self.gate {
            None => "none",
            Some((OutputGate::Silu, _)) => "silu",
            Some((OutputGate::Sigmoid, _)) => "sigmoid",
        };
        let constants = vec![
            ("n", self.n.into()),
            ("layer", (self.kind == NormKind::Layer).into()),
            ("eps", self.eps.into()),
            ("of_groups", self.of_groups.into()),
            ("bias", self.bias.into()),
            ("gate", gate.into()),
            ("threads", self.n.next_power_of_two().clamp(32, 256).into()),
        ];
        bindings::key("recurrent/group_norm", &self.bindings(), constants)
    }
}

/// `out[t][g] = norm(x[t][g]) * weight + bias`, times the gate.
pub fn group_norm(gpu: &WgpuDevice, of: &GroupNormShape, b: &GroupNormBuffers<'_>) -> Result<Dispatch, WgpuError> {
    if of.bias != b.bias.is_some() || of.gate.is_some() != b.gate.is_some() {
        return Err(WgpuError::Mismatch { what: "a norm of groups".into(), why: format!("{of:?} with {b:?}") });
    }
    let mut buffers = vec![b.x, b.weight, b.out];
    buffers.extend(b.bias);
    buffers.extend(b.gate);
    let grid = [Extent::Fixed(of.groups as u32), Extent::Tokens(1), Extent::Fixed(1)];
    bindings::dispatch(gpu, &of.key(), &of.bindings(), &buffers, grid)
}

/// The scalar twin of one group.
pub fn group_norm_twin(of: &GroupNormShape, x: &[f64], weight: &[f64], bias: Option<&[f64]>, gate: &[f64]) -> Vec<f64> {
    let n = x.len() as f64;
    let mean = match of.kind {
        NormKind::Layer => x.iter().sum::<f64>() / n,
        NormKind::Rms => 0.0,
    };
    let squares = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n;
    let factor = 1.0 / (squares + f64::from(of.eps)).sqrt();
    let opened = |i: usize| {
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        match of.gate {
            None => 1.0,
            Some((OutputGate::Silu, _)) => gate[i] * sigmoid(gate[i]),
            Some((OutputGate::Sigmoid, _)) => sigmoid(gate[i]),
        }
    };
    let element = |i: usize| ((x[i] - mean) * factor * weight[i] + bias.map_or(0.0, |bias| bias[i])) * opened(i);
    (0..x.len()).map(element).collect()
}

pub(crate) fn catalogue() -> Vec<PsoKey> {
    let rows = RowsAt::whole(16 * 128);
    let (kind, gate) = (NormKind::Rms, Some((OutputGate::Silu, rows)));
    let of =
        GroupNormShape { n: 128, groups: 16, kind, eps: 1e-6, of_groups: false, bias: true, x: rows, gate, out: rows };
    vec![of.key()]
}
