//! Copying keys and values into the KV cache, without norm and RoPE.

use half::f16;
use metal_attention_model::CacheType;

use super::attention::{AttentionBuffers, AttentionShape};
use crate::device::WgpuDevice;
use crate::dispatch::{Dispatch, GridExtent};
use crate::error::WgpuError;
use crate::pipelines::PipelineKey;

const THREADS: usize = 64;

/// Appends the keys and values in `buffers.qkv` of every token to the KV cache, at its position in its sequence:
/// unchanged in an F32 cache, rounded to nearest (ties to even) in an F16 one.
pub fn kv_cache_copy(
    gpu: &WgpuDevice,
    shape: &AttentionShape,
    buffers: &AttentionBuffers<'_>,
) -> Result<Dispatch, WgpuError> {
    let units = 2 * shape.n_head_kv * shape.padded_head_dim() / 4;
    let grid = [GridExtent::Fixed(units.div_ceil(THREADS) as u32), GridExtent::Tokens(1), GridExtent::Fixed(1)];
    shape.check()?;
    shape.check_ungated()?;
    let b = buffers.bound(shape);
    Dispatch::new(gpu, &key(shape), &[b.qkv, b.keys, b.values, b.batch], grid)
}

fn key(shape: &AttentionShape) -> PipelineKey {
    shape.key("kv_cache_copy", &[&[("threads", THREADS.into())]])
}

pub(crate) fn catalogue() -> Vec<PipelineKey> {
    vec![key(&AttentionShape::EXAMPLE)]
}

/// The scalar twin of [`kv_cache_copy`]: the bytes of one head in the cache, with zeros as padding.
pub fn kv_cache_copy_twin(shape: &AttentionShape, head: &[f32]) -> Vec<u8> {
    let mut bytes: Vec<u8> = match shape.cache {
        CacheType::F16 => head.iter().flat_map(|&v| f16::from_f32(v).to_le_bytes()).collect(),
        CacheType::F32 => head.iter().flat_map(|v| v.to_le_bytes()).collect(),
    };
    bytes.resize(shape.padded_head_dim() * shape.cache.bytes(), 0);
    bytes
}
