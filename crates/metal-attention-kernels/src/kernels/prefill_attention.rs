//! Attention of many tokens at once.

use super::attention::{AttentionBuffers, AttentionShape};
use crate::device::GpuDevice;
use crate::dispatch::{Dispatch, Extent};
use crate::error::GpuError;
use crate::pso::PsoKey;

/// Attention of any batch, of one or more sequences, from rotated queries in `buffers.qkv` and a cache that holds the
/// batch's own keys and values: after [`rope_apply_dual`](super::rope_apply_dual) and
/// [`kv_cache_copy`](super::kv_cache_copy). Writes `buffers.att`. The scores stay in registers.
pub fn prefill_attention(
    gpu: &GpuDevice,
    shape: &AttentionShape,
    buffers: &AttentionBuffers<'_>,
) -> Result<Dispatch, GpuError> {
    shape.check()?;
    let AttentionBuffers { qkv, keys, values, att, batch, .. } = *buffers;
    let grid = [Extent::Fixed(shape.n_head as u32), Extent::Tokens(queries(shape) as u32), Extent::Fixed(1)];
    Dispatch::new(gpu, &prefill_key(shape), &[qkv, keys, values, att, batch], grid)
}

/// Tokens of a workgroup.
fn queries(shape: &AttentionShape) -> usize {
    if shape.head_dim <= 32 { 32 } else { 16 }
}

fn prefill_key(shape: &AttentionShape) -> PsoKey {
    let more = [("queries", queries(shape).into()), ("scale", shape.scale.into()), shape.window_constant()];
    shape.key("prefill_attention", &[&more])
}

pub(crate) fn catalogue() -> Vec<PsoKey> {
    vec![prefill_key(&AttentionShape::EXAMPLE)]
}
