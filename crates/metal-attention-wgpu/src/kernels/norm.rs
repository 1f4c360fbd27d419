//! Norms of any kind over rows, with the scale and sum that join a result to the residual stream.

use metal_attention_model::NormKind;

use crate::arena::Bind;
use crate::device::WgpuDevice;
use crate::dispatch::{AccessRange, Dispatch, GridExtent};
use crate::error::WgpuError;
use crate::pipelines::PipelineKey;

/// The sizes of [`norm`], and what it computes.
#[derive(Debug, Clone, Copy, PartialEq)]
#[expect(clippy::struct_excessive_bools, reason = "each is an option of its own")]
pub struct NormShape {
    /// Elements of a row.
    pub n: usize,
    /// Rows of each token.
    pub rows: usize,
    /// The norm; `None`: rows are copied, scaled or added without one.
    pub kind: Option<NormKind>,
    /// Epsilon, added to the mean of the squares or the variance.
    pub eps: f32,
    /// Whether the norm has a weight.
    pub weight: bool,
    /// Whether the norm has a bias.
    pub bias: bool,
    /// Factor on the result.
    pub scale: f32,
    /// Whether the result is added to `y` instead of replacing it.
    pub accumulate: bool,
    /// Whether only the rows of output tokens are computed; they are stored one after the other, `[n_outputs, rows,
    /// n]`.
    pub outputs_only: bool,
    /// Where the results of a token lie in a longer row of `y`. `None`: they are the row.
    pub columns: Option<NormColumns>,
}

/// The columns of rows of `y` that [`norm`] writes; the others stay as they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NormColumns {
    /// The first one.
    pub at: usize,
    /// Elements of a row of `y`.
    pub y_width: usize,
}

impl NormShape {
    /// One row of `n` elements for each token, without a norm.
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
            outputs_only: false,
            columns: None,
        }
    }

    /// The columns of the results.
    fn columns(&self) -> NormColumns {
        self.columns.unwrap_or(NormColumns { at: 0, y_width: self.n * self.rows })
    }

    fn key(&self, in_place: bool) -> PipelineKey {
        let kind = match self.kind {
            None => "none",
            Some(NormKind::Rms) => "rms",
            Some(NormKind::Layer) => "layer",
        };
        let NormColumns { at, y_width } = self.columns();
        PipelineKey::new(
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
                ("outputs_only", self.outputs_only.into()),
                ("in_place", in_place.into()),
                ("y_at", at.into()),
                ("y_width", y_width.into()),
                ("threads", self.n.next_power_of_two().clamp(32, 256).into()),
            ],
        )
    }
}

/// `y[t][r] = scale * norm(x[t][r])`, or `y[t][r] += `, for each row of each token. `x` is `[n_tokens, rows, n]`;
/// `None`: `y` is normed in place. `y` is `[n_tokens or n_outputs, rows, n]`, or these are some columns of its rows. `weights`
/// holds the weight `[n]`, then the bias `[n]`, as far as the shape has them.
pub fn norm(
    gpu: &WgpuDevice,
    shape: NormShape,
    x: Option<&dyn Bind>,
    weights: Option<&wgpu::Buffer>,
    y: &dyn Bind,
    batch: &wgpu::Buffer,
) -> Result<Dispatch, WgpuError> {
    let bytes = 4 * (shape.n * shape.rows) as u64;
    let NormColumns { at, y_width } = shape.columns();
    if at + shape.n * shape.rows > y_width || (x.is_none() && shape.columns.is_some()) {
        let why = format!("columns {at} on of rows of {y_width} elements");
        return Err(WgpuError::Mismatch { what: "a norm".into(), why });
    }
    let (extent, result) = if shape.outputs_only {
        (GridExtent::Outputs(1), AccessRange::Outputs(4 * y_width as u64))
    } else {
        (GridExtent::Tokens(1), AccessRange::Tokens(4 * y_width as u64))
    };
    let mut buffers: Vec<(&dyn Bind, AccessRange)> = Vec::new();
    buffers.extend(x.map(|x| (x, AccessRange::Tokens(bytes))));
    buffers.push((y, result));
    let n_weights = shape.n * (usize::from(shape.weight) + usize::from(shape.bias));
    buffers.extend(weights.filter(|_| n_weights > 0).map(|w| (w as &dyn Bind, AccessRange::floats(n_weights))));
    if shape.outputs_only {
        buffers.push((batch, AccessRange::Batch));
    }
    Dispatch::new(
        gpu,
        &shape.key(x.is_none()),
        &buffers,
        [GridExtent::Fixed(shape.rows as u32), extent, GridExtent::Fixed(1)],
    )
}

/// The scalar twin for one row, with `y` before the call.
pub fn norm_twin(shape: NormShape, x: &[f32], weights: &[f32], y: &[f32]) -> Vec<f32> {
    let n = x.len() as f64;
    let mean = match shape.kind {
        Some(NormKind::Layer) => x.iter().map(|&v| f64::from(v)).sum::<f64>() / n,
        None | Some(NormKind::Rms) => 0.0,
    };
    let squares = x.iter().map(|&v| (f64::from(v) - mean).powi(2)).sum::<f64>() / n;
    let factor = shape.kind.map_or(1.0, |_| 1.0 / (squares + f64::from(shape.eps)).sqrt());
    let (weight, bias) = weights.split_at(if shape.weight { x.len() } else { 0 });
    (0..x.len())
        .map(|i| {
            let v = (f64::from(x[i]) - mean) * factor * weight.get(i).map_or(1.0, |&w| f64::from(w));
            let v = (v + bias.get(i).map_or(0.0, |&b| f64::from(b))) * f64::from(shape.scale);
            (v + if shape.accumulate { f64::from(y[i]) } else { 0.0 }) as f32
        })
        .collect()
}

pub(crate) fn catalogue() -> Vec<PipelineKey> {
    let shape =
        NormShape { kind: Some(NormKind::Layer), eps: 1e-5, weight: true, bias: true, ..NormShape::of_row(576) };
    vec![shape.key(false)]
}
