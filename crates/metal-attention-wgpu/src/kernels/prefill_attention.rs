//! Attention of many tokens at once, by the fast kernels: in plain loops or on matrix units.

use metal_attention_model::CacheType;

use super::attention::{AttentionBuffers, AttentionShape};
use crate::arena::Bind;
use crate::device::WgpuDevice;
use crate::dispatch::{AccessRange, Dispatch, GridExtent};
use crate::error::WgpuError;
use crate::pipelines::PipelineKey;
use crate::shader::ShaderFeatures;

/// Attention of any batch, from rotated queries in `buffers.qkv` and a KV cache that holds the batch's own keys and
/// values: runs after [`rope_append`](super::rope_append). Writes `buffers.attention_out`. Computes in 32-bit floats on
/// any device, with the scores in registers.
pub fn prefill_attention(
    gpu: &WgpuDevice,
    shape: &AttentionShape,
    buffers: &AttentionBuffers<'_>,
) -> Result<Dispatch, WgpuError> {
    shape.check()?;
    dispatch(gpu, shape, buffers, &prefill_key(shape), queries(shape))
}

/// [`prefill_attention`] on matrix units. Queries are rounded to 16-bit floats, relative to their largest element, and
/// so are the weights of the softmax.
///
/// Runs on any device with subgroups of 8 to 64 lanes, but is worthwhile only if [`prefill_on_matrix_units`].
pub fn prefill_attention_cooperative(
    gpu: &WgpuDevice,
    shape: &AttentionShape,
    buffers: &AttentionBuffers<'_>,
) -> Result<Dispatch, WgpuError> {
    shape.check()?;
    dispatch(gpu, shape, buffers, &cooperative_key(shape, subgroups(shape)), SIDE)
}

fn dispatch(
    gpu: &WgpuDevice,
    shape: &AttentionShape,
    buffers: &AttentionBuffers<'_>,
    key: &PipelineKey,
    queries: usize,
) -> Result<Dispatch, WgpuError> {
    let b = buffers.bound(shape);
    let mut bound: Vec<(&dyn Bind, AccessRange)> = vec![b.qkv, b.keys, b.values, b.attention_out, b.batch, b.last_seen];
    bound.extend(b.sinks);
    let grid = [GridExtent::Fixed(shape.n_head as u32), GridExtent::Tokens(queries as u32), GridExtent::Fixed(1)];
    Dispatch::new(gpu, key, &bound, grid)
}

/// Whether [`prefill_attention_cooperative`] suits a layer: with 16-bit matrix units and an F16 cache, for heads of
/// whole unit matrices, and unless `exact`.
pub fn prefill_on_matrix_units(features: ShaderFeatures, shape: &AttentionShape, exact: bool) -> bool {
    features.cooperative_f16
        && (8..=64).contains(&features.subgroup_size)
        && !exact
        && shape.cache == CacheType::F16
        && shape.head_dim.is_multiple_of(SIDE)
        && shape.head_dim <= 128
        // Rows are read in vectors of four.
        && shape.n_trailing.is_multiple_of(4)
}

/// The side of the matrices that matrix units multiply.
const SIDE: usize = 16;

/// Subgroups of a workgroup: as many as workgroup memory allows, each with equally many elements of the values.
fn subgroups(shape: &AttentionShape) -> usize {
    let most: usize = if shape.head_dim <= 64 { 4 } else { 2 };
    most.min(1 << (shape.head_dim / SIDE).trailing_zeros())
}

/// Queries of a workgroup.
fn queries(shape: &AttentionShape) -> usize {
    if shape.head_dim <= 32 { 32 } else { 16 }
}

fn cooperative_key(shape: &AttentionShape, subgroups: usize) -> PipelineKey {
    let more = [("subgroup_count", subgroups.into()), shape.window_constant()];
    shape.key("prefill_attention_cooperative", &[&shape.score_constants(), &more])
}

fn prefill_key(shape: &AttentionShape) -> PipelineKey {
    let more = [("queries", queries(shape).into()), shape.window_constant()];
    shape.key("prefill_attention", &[&shape.score_constants(), &more])
}

pub(crate) fn catalogue() -> Vec<PipelineKey> {
    let shape = AttentionShape::EXAMPLE;
    vec![prefill_key(&shape), cooperative_key(&shape, subgroups(&shape))]
}
