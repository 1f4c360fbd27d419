//! Attention of a decode step, by the fast kernels: one new token for each sequence. Long contexts are divided into
//! splits of [`SPLIT`] positions (split-KV), which a second kernel merges.

use metal_attention_model::PAGE;

use super::attention::{AttentionBuffers, AttentionShape};
use crate::arena::Bind;
use crate::device::WgpuDevice;
use crate::dispatch::{AccessRange, Dispatch, GridExtent};
use crate::error::WgpuError;
use crate::pipelines::PipelineKey;

/// Positions of a split, the work of one workgroup of [`decode_attention`].
pub(super) const SPLIT: usize = 256;

// The kernel keeps the pages of a split in one vector of four.
const _: () = assert!(SPLIT == 4 * PAGE);

/// Number of splits, [`BatchDims::n_splits`](crate::BatchDims), of a decode step whose highest position is `pos`.
pub fn n_splits(pos: usize) -> u32 {
    (pos / SPLIT + 1) as u32
}

/// F32 elements of the partial results of a decode step, for each sequence; 0 if a context is a single split.
pub fn partial_len(shape: &AttentionShape) -> usize {
    let splits = n_splits(shape.n_ctx.saturating_sub(1)) as usize;
    if splits < 2 { 0 } else { splits * shape.n_head * (shape.head_dim + 2) }
}

/// Attention of a batch of one token for each sequence, from the projections in `buffers.qkv`: norms (if the shape has
/// a `qk_norm_eps`) and rotates queries and keys, appends keys and values to the KV cache, and attends.
///
/// With one split it writes `buffers.attention_out`; with several it writes `buffers.partial`, and
/// [`decode_attention_merge`] writes `buffers.attention_out`. `buffers.qkv` is not changed.
pub fn decode_attention(
    gpu: &WgpuDevice,
    shape: &AttentionShape,
    buffers: &AttentionBuffers<'_>,
) -> Result<Dispatch, WgpuError> {
    shape.check()?;
    let b = buffers.bound(shape);
    let mut bound: Vec<(&dyn Bind, AccessRange)> =
        vec![b.qkv, b.rope, b.batch, b.keys, b.values, b.attention_out, b.partial];
    bound.extend(b.qk_norm);
    bound.extend(b.sinks);
    let groups = shape.n_head_kv * heads_and_blocks(shape).1;
    let grid = [GridExtent::Fixed(groups as u32), GridExtent::Splits, GridExtent::Tokens(1)];
    Dispatch::new(gpu, &decode_key(shape), &bound, grid)
}

/// Merges the splits in `buffers.partial` into `buffers.attention_out`; has no work if there is one split.
pub fn decode_attention_merge(
    gpu: &WgpuDevice,
    shape: &AttentionShape,
    buffers: &AttentionBuffers<'_>,
) -> Result<Dispatch, WgpuError> {
    shape.check()?;
    let grid = [GridExtent::WhenSplit(shape.n_head as u32), GridExtent::Tokens(1), GridExtent::Fixed(1)];
    let b = buffers.bound(shape);
    let mut bound = vec![b.partial, b.attention_out, b.batch];
    bound.extend(shape.gated.then_some(b.qkv));
    Dispatch::new(gpu, &merge_key(shape), &bound, grid)
}

/// Query heads of a workgroup, and the number of such blocks of heads for each KV head.
fn heads_and_blocks(shape: &AttentionShape) -> (usize, usize) {
    let group = shape.n_head / shape.n_head_kv;
    // A thread keeps the scores of its heads in one vector of four; with the longest heads workgroup memory is enough
    // for two.
    let most = if shape.head_dim > 128 { 2 } else { 4 };
    let blocks = group.div_ceil(most);
    (group.div_ceil(blocks), blocks)
}

fn decode_key(shape: &AttentionShape) -> PipelineKey {
    let (heads, blocks) = heads_and_blocks(shape);
    let more = [("heads", heads.into()), ("blocks", blocks.into()), ("split", SPLIT.into()), shape.window_constant()];
    shape.key("decode_attention", &[&shape.rope_constants(), &shape.score_constants(), &more])
}

fn merge_key(shape: &AttentionShape) -> PipelineKey {
    let threads = shape.head_dim.next_power_of_two().clamp(32, 256);
    let more = [("split", SPLIT.into()), ("threads", threads.into()), shape.window_constant()];
    shape.key("decode_attention_merge", &[&more])
}

pub(crate) fn catalogue() -> Vec<PipelineKey> {
    vec![decode_key(&AttentionShape::EXAMPLE), merge_key(&AttentionShape::EXAMPLE)]
}
