//! The plain residual join.

use crate::device::WgpuDevice;
use crate::dispatch::{AccessRange, Dispatch, GridExtent};
use crate::error::WgpuError;
use crate::pipelines::PipelineKey;

/// `x[t] += y[t]` for each token. Both are `[n_tokens, n]`.
pub fn residual_add(gpu: &WgpuDevice, n: usize, x: &wgpu::Buffer, y: &wgpu::Buffer) -> Result<Dispatch, WgpuError> {
    let columns = GridExtent::Fixed(n.div_ceil(256) as u32);
    let row = AccessRange::Tokens(4 * n as u64);
    Dispatch::new(gpu, &key(n), &[(x, row), (y, row)], [columns, GridExtent::Tokens(1), GridExtent::Fixed(1)])
}

/// The scalar twin.
pub fn residual_add_twin(x: &[f32], y: &[f32]) -> Vec<f32> {
    x.iter().zip(y).map(|(x, y)| x + y).collect()
}

fn key(n: usize) -> PipelineKey {
    PipelineKey::new("residual_add", [("n", n.into())])
}

pub(crate) fn catalogue() -> Vec<PipelineKey> {
    vec![key(576)]
}
