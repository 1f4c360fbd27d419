//! The gated activation of a feed-forward network (SwiGLU, arXiv 2002.05202).

use crate::arena::Bind;
use crate::device::WgpuDevice;
use crate::dispatch::{AccessRange, Dispatch, GridExtent};
use crate::error::WgpuError;
use crate::pipelines::PipelineKey;

/// `hidden[t][i] = silu(gate[t][i]) * up[t][i]` with `silu(v) = v / (1 + exp(-v))`. `gate_up` is `[n_tokens, 2 n_ff]`,
/// gate `i` at `2i` and up `i` at `2i + 1`; `hidden` is `[n_tokens, n_ff]`.
pub fn ffn_silu(
    gpu: &WgpuDevice,
    n_ff: usize,
    gate_up: &wgpu::Buffer,
    hidden: &wgpu::Buffer,
) -> Result<Dispatch, WgpuError> {
    let columns = GridExtent::Fixed(n_ff.div_ceil(256) as u32);
    let bytes = 4 * n_ff as u64;
    let buffers: [(&dyn Bind, AccessRange); 2] =
        [(gate_up, AccessRange::Tokens(2 * bytes)), (hidden, AccessRange::Tokens(bytes))];
    Dispatch::new(gpu, &key(n_ff), &buffers, [columns, GridExtent::Tokens(1), GridExtent::Fixed(1)])
}

/// The scalar twin for any number of rows.
pub fn ffn_silu_twin(gate_up: &[f32]) -> Vec<f32> {
    let (pairs, _) = gate_up.as_chunks::<2>();
    pairs.iter().map(|&[gate, up]| (f64::from(gate) / (1.0 + f64::from(-gate).exp()) * f64::from(up)) as f32).collect()
}

fn key(n_ff: usize) -> PipelineKey {
    PipelineKey::new("ffn_silu", [("n_ff", n_ff.into())])
}

pub(crate) fn catalogue() -> Vec<PipelineKey> {
    vec![key(1536)]
}
