//! Norms of any kind over rows, and how their results join the residual stream.

use metal_attention_model::NormKind;

use crate::arena::Bind;
use crate::device::WgpuDevice;
use crate::dispatch::{Dispatch, Extent, Reach};
use crate::error::WgpuError;
use crate::pso::PsoKey;

/// What [`norm`] computes.
#[derive(Debug, Clone, Copy, PartialEq)]
#[expect(clippy::struct_excessive_bools, reason = "each is an option of its own")]
pub struct NormShape {
    /// Elements of a row.
    pub n: usize,
    /// Rows of a token.
    pub rows: usize,
    /// The norm; `None`: rows are taken as they are.
    pub kind: Option<NormKind>,
    /// Added to the mean of the squares.
    pub eps: f32,
    /// Whether elements have factors.
    pub weight: bool,
    /// Whether something is added to each element, of a norm.
    pub bias: bool,
    /// Factor on the result.
    pub scale: f32,
    /// Whether the result is added to what is there.
    pub accumulate: bool,
    /// Only the rows of tokens whose logits are wanted; their results lie next to one another.
    pub wanted_only: bool,
}

impl NormShape {
    /// A row a token of `n` elements, as they are.
    pub fn of_row(n: usize) -> Self {
        Self {
            n,
            rows: 1,
            kind: None,
            eps: 0.0,
            weight: false,
            bias: false,
            scale: 1.0,
            accumulate: false,
            wanted_only: false,
        }
    }

    fn key(&self, in_place: bool) -> PsoKey {
        let kind = match self.kind {
            None => "none",
            Some(NormKind::Rms) => "rms",
            Some(NormKind::Layer) => "layer",
        };
        PsoKey::new(
            "norm",
            [
                ("n", self.n.into()),
                ("rows", self.rows.into()),
                ("kind", kind.into()),
                ("eps", self.eps.into()),
                ("weight", self.weight.into()),
                ("bias", self.bias.into()),
                ("scale", self.scale.into()),
                ("accumulate", self.accumulate.into()),
                ("wanted_only", self.wanted_only.into()),
                ("in_place", in_place.into()),
                ("threads", self.n.next_power_of_two().clamp(32, 256).into()),
            ],
        )
    }
}

/// `y[t][r] = scale * norm(x[t][r])` for each row of each token, or `+=`: `x` `[n_tokens, rows, n]`, or `None` where `y` is its
/// own input, `y` `[n_tokens or n_wanted, rows, n]`, `weights` `[n]` factors, then `[n]` to be added, as far as there are any.
pub fn norm(
    gpu: &WgpuDevice,
    of: NormShape,
    x: Option<&wgpu::Buffer>,
    weights: Option<&wgpu::Buffer>,
    y: &wgpu::Buffer,
    batch: &wgpu::Buffer,
) -> Result<Dispatch, WgpuError> {
    let bytes = 4 * (of.n * of.rows) as u64;
    let (extent, result) = if of.wanted_only {
        (Extent::Wanted(1), Reach::Wanted(bytes))
    } else {
        (Extent::Tokens(1), Reach::Tokens(bytes))
    };
    let mut buffers: Vec<(&dyn Bind, Reach)> = Vec::new();
    buffers.extend(x.map(|x| (x as &dyn Bind, Reach::Tokens(bytes))));
    buffers.push((y, result));
    let n_weights = of.n * (usize::from(of.weight) + usize::from(of.bias));
    buffers.extend(weights.filter(|_| n_weights > 0).map(|w| (w as &dyn Bind, Reach::floats(n_weights))));
    if of.wanted_only {
        buffers.push((batch, Reach::Batch));
    }
    Dispatch::new(gpu, &of.key(x.is_none()), &buffers, [Extent::Fixed(of.rows as u32), extent, Extent::Fixed(1)])
}

/// The scalar twin: what one row becomes, of `y` as it was.
pub fn norm_twin(of: NormShape, x: &[f32], weights: &[f32], y: &[f32]) -> Vec<f32> {
    let n = x.len() as f64;
    let mean = match of.kind {
        Some(NormKind::Layer) => x.iter().map(|&v| f64::from(v)).sum::<f64>() / n,
        None | Some(NormKind::Rms) => 0.0,
    };
    let squares = x.iter().map(|&v| (f64::from(v) - mean).powi(2)).sum::<f64>() / n;
    let factor = of.kind.map_or(1.0, |_| 1.0 / (squares + f64::from(of.eps)).sqrt());
    let (weight, bias) = weights.split_at(if of.weight { x.len() } else { 0 });
    (0..x.len())
        .map(|i| {
            let v = (f64::from(x[i]) - mean) * factor * weight.get(i).map_or(1.0, |&w| f64::from(w));
            let v = (v + bias.get(i).map_or(0.0, |&b| f64::from(b))) * f64::from(of.scale);
            (v + if of.accumulate { f64::from(y[i]) } else { 0.0 }) as f32
        })
        .collect()
}

pub(crate) fn catalogue() -> Vec<PsoKey> {
    let of = NormShape { kind: Some(NormKind::Layer), eps: 1e-5, weight: true, bias: true, ..NormShape::of_row(576) };
    vec![of.key(false)]
}
