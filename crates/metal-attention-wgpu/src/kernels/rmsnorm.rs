//! RMSNorm (root mean square, arXiv 1910.07467) of the residual stream.

use crate::arena::Bind;
use crate::device::WgpuDevice;
use crate::dispatch::{AccessRange, Dispatch, GridExtent};
use crate::error::WgpuError;
use crate::pipelines::PipelineKey;

/// Sizes of [`rmsnorm`].
#[derive(Debug, Clone, Copy)]
pub struct RmsNormShape {
    /// Elements of a row.
    pub n: usize,
    /// Epsilon, added to the mean of the squares.
    pub eps: f32,
    /// Whether only the rows of output tokens are computed; they are stored one after the other.
    pub outputs_only: bool,
}

/// `y[t] = x[t] / sqrt(mean(x[t]^2) + eps) * weight` for each token. `x` is `[n_tokens, n]`, `weight` `[n]`, `y`
/// `[n_tokens, n]` or, for output tokens only, `[n_outputs, n]`.
pub fn rmsnorm(
    gpu: &WgpuDevice,
    shape: RmsNormShape,
    x: &wgpu::Buffer,
    weight: &wgpu::Buffer,
    y: &wgpu::Buffer,
    batch: &wgpu::Buffer,
) -> Result<Dispatch, WgpuError> {
    let key = PipelineKey::new(
        "rmsnorm",
        [("n", shape.n.into()), ("eps", shape.eps.into()), ("outputs_only", shape.outputs_only.into())],
    );
    let bytes = 4 * shape.n as u64;
    let (rows, result) = if shape.outputs_only {
        (GridExtent::Outputs(1), AccessRange::Outputs(bytes))
    } else {
        (GridExtent::Tokens(1), AccessRange::Tokens(bytes))
    };
    let buffers: [(&dyn Bind, AccessRange); 4] = [
        (x, AccessRange::Tokens(bytes)),
        (weight, AccessRange::Fixed(bytes)),
        (y, result),
        (batch, AccessRange::Batch),
    ];
    Dispatch::new(gpu, &key, &buffers, [rows, GridExtent::Fixed(1), GridExtent::Fixed(1)])
}

/// The scalar twin for one row.
pub fn rmsnorm_twin(x: &[f32], weight: &[f32], eps: f32) -> Vec<f32> {
    let mean = x.iter().map(|&v| f64::from(v) * f64::from(v)).sum::<f64>() / x.len() as f64;
    let scale = 1.0 / (mean + f64::from(eps)).sqrt();
    x.iter().zip(weight).map(|(&v, &w)| (f64::from(v) * scale * f64::from(w)) as f32).collect()
}

pub(crate) fn catalogue() -> Vec<PipelineKey> {
    vec![PipelineKey::new("rmsnorm", [("n", 576usize.into()), ("eps", 1e-5f32.into()), ("outputs_only", false.into())])]
}
