//! The norm of a recurrence's results by heads or groups of heads, with the gate that follows it.

use metal_attention_model::NormKind;

use super::GateActivation;
use super::bindings::{self, Bindings, ColumnRange, RecurrentBinding};
use crate::arena::Bind;
use crate::device::WgpuDevice;
use crate::dispatch::{Dispatch, GridExtent};
use crate::error::WgpuError;
use crate::pipelines::PipelineKey;

/// The sizes of [`group_norm`], and where its rows are.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GroupNormShape {
    /// Elements of a group.
    pub n: usize,
    /// Groups of each token.
    pub groups: usize,
    /// The norm.
    pub kind: NormKind,
    /// Epsilon, added to the mean of the squares or the variance.
    pub eps: f32,
    /// Whether each group has its own weights, `[groups, n]`; otherwise all share `[n]`.
    pub of_groups: bool,
    /// Whether the norm has a bias, shaped like the weights.
    pub bias: bool,
    /// Inputs, `[groups, n]`.
    pub x: ColumnRange,
    /// The gate that multiplies the result, `[groups, n]`, and its activation.
    pub gate: Option<(GateActivation, ColumnRange)>,
    /// Results, `[groups, n]`.
    pub out: ColumnRange,
}

/// The buffers of [`group_norm`].
#[derive(Debug, Clone, Copy)]
pub struct GroupNormBuffers<'a> {
    /// Inputs.
    pub x: &'a dyn Bind,
    /// Weights, shaped as [`GroupNormShape::of_groups`] states.
    pub weight: &'a dyn Bind,
    /// Biases, shaped like the weights, if there are some.
    pub bias: Option<&'a dyn Bind>,
    /// Gates, if there are some.
    pub gate: Option<&'a dyn Bind>,
    /// Receives the results; another buffer than `x`.
    pub out: &'a dyn Bind,
}

impl GroupNormShape {
    fn bindings(&self) -> Bindings {
        let (n, n_weights) = (self.groups * self.n, if self.of_groups { self.groups * self.n } else { self.n });
        let mut bindings = vec![
            ("x", RecurrentBinding::Rows(self.x, n)),
            ("weight", RecurrentBinding::Floats(n_weights)),
            ("out", RecurrentBinding::Results(self.out, n)),
        ];
        if self.bias {
            bindings.push(("bias", RecurrentBinding::Floats(n_weights)));
        }
        if let Some((_, gate)) = self.gate {
            bindings.push(("gate", RecurrentBinding::Rows(gate, n)));
        }
        bindings
    }

    fn key(&self) -> PipelineKey {
        let gate = match self.gate {
            None => "none",
            Some((GateActivation::Silu, _)) => "silu",
            Some((GateActivation::Sigmoid, _)) => "sigmoid",
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

/// `out[t][g] = norm(x[t][g]) * weight + bias`, times the gate, for each token and group.
pub fn group_norm(gpu: &WgpuDevice, shape: &GroupNormShape, b: &GroupNormBuffers<'_>) -> Result<Dispatch, WgpuError> {
    if shape.bias != b.bias.is_some() || shape.gate.is_some() != b.gate.is_some() {
        return Err(WgpuError::Mismatch { what: "a norm of groups".into(), why: format!("{shape:?} with {b:?}") });
    }
    let mut buffers = vec![b.x, b.weight, b.out];
    buffers.extend(b.bias);
    buffers.extend(b.gate);
    let grid = [GridExtent::Fixed(shape.groups as u32), GridExtent::Tokens(1), GridExtent::Fixed(1)];
    bindings::dispatch(gpu, &shape.key(), &shape.bindings(), &buffers, grid)
}

/// The scalar twin for one group.
pub fn group_norm_twin(
    shape: &GroupNormShape,
    x: &[f64],
    weight: &[f64],
    bias: Option<&[f64]>,
    gate: &[f64],
) -> Vec<f64> {
    let n = x.len() as f64;
    let mean = match shape.kind {
        NormKind::Layer => x.iter().sum::<f64>() / n,
        NormKind::Rms => 0.0,
    };
    let squares = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n;
    let factor = 1.0 / (squares + f64::from(shape.eps)).sqrt();
    let opened = |i: usize| {
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        match shape.gate {
            None => 1.0,
            Some((GateActivation::Silu, _)) => gate[i] * sigmoid(gate[i]),
            Some((GateActivation::Sigmoid, _)) => sigmoid(gate[i]),
        }
    };
    let element = |i: usize| ((x[i] - mean) * factor * weight[i] + bias.map_or(0.0, |bias| bias[i])) * opened(i);
    (0..x.len()).map(element).collect()
}

pub(crate) fn catalogue() -> Vec<PipelineKey> {
    let rows = ColumnRange::whole(16 * 128);
    let (kind, gate) = (NormKind::Rms, Some((GateActivation::Silu, rows)));
    let shape =
        GroupNormShape { n: 128, groups: 16, kind, eps: 1e-6, of_groups: false, bias: true, x: rows, gate, out: rows };
    vec![shape.key()]
}
