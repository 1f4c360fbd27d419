//! A gate for whole rows: that of the shared expert of Qwen2 `MoE`.

use crate::device::WgpuDevice;
use crate::dispatch::{AccessRange, Dispatch, GridExtent};
use crate::error::WgpuError;
use crate::pipelines::PipelineKey;

/// `y[t] *= sigmoid(dot(x[t], gate))`. `x` and `y` are `[n_tokens, n]`, `gate` is `[n]`.
pub fn row_gate(
    gpu: &WgpuDevice,
    n: usize,
    x: &wgpu::Buffer,
    gate: &wgpu::Buffer,
    y: &wgpu::Buffer,
) -> Result<Dispatch, WgpuError> {
    let rows = AccessRange::Tokens(4 * n as u64);
    let grid = [GridExtent::Tokens(1), GridExtent::Fixed(1), GridExtent::Fixed(1)];
    Dispatch::new(gpu, &key(n), &[(x, rows), (gate, AccessRange::floats(n)), (y, rows)], grid)
}

fn key(n: usize) -> PipelineKey {
    PipelineKey::new("row_gate", [("n", n.into())])
}

/// The scalar twin for one row.
pub fn row_gate_twin(x: &[f32], gate: &[f32], y: &[f32]) -> Vec<f32> {
    let dot: f64 = x.iter().zip(gate).map(|(&x, &g)| f64::from(x) * f64::from(g)).sum();
    y.iter().map(|&y| (f64::from(y) / (1.0 + (-dot).exp())) as f32).collect()
}

pub(crate) fn catalogue() -> Vec<PipelineKey> {
    vec![key(2048)]
}
