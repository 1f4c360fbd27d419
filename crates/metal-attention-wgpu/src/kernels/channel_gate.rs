//! The gate of RWKV-6's channel mix.

use crate::device::WgpuDevice;
use crate::dispatch::{AccessRange, Dispatch, GridExtent};
use crate::error::WgpuError;
use crate::pipelines::PipelineKey;

const THREADS: usize = 256;

/// `y[t][i] = sigmoid(gate[t][i]) * x[t][i]`, or `y[t][i] += ` with `accumulate`. All are `[n_tokens, n]`.
pub fn channel_gate(
    gpu: &WgpuDevice,
    n: usize,
    accumulate: bool,
    gate: &wgpu::Buffer,
    x: &wgpu::Buffer,
    y: &wgpu::Buffer,
) -> Result<Dispatch, WgpuError> {
    let rows = AccessRange::Tokens(4 * n as u64);
    let grid = [GridExtent::Fixed(n.div_ceil(THREADS) as u32), GridExtent::Tokens(1), GridExtent::Fixed(1)];
    Dispatch::new(gpu, &key(n, accumulate), &[(gate, rows), (x, rows), (y, rows)], grid)
}

fn key(n: usize, accumulate: bool) -> PipelineKey {
    PipelineKey::new("channel_gate", [("n", n.into()), ("accumulate", accumulate.into()), ("threads", THREADS.into())])
}

/// The scalar twin for one element, with `y` before the call.
pub fn channel_gate_twin(accumulate: bool, gate: f32, x: f32, y: f32) -> f32 {
    let before = if accumulate { f64::from(y) } else { 0.0 };
    (before + f64::from(x) / (1.0 + (-f64::from(gate)).exp())) as f32
}

pub(crate) fn catalogue() -> Vec<PipelineKey> {
    vec![key(2048, true)]
}
