//! Attention without a mask and without a KV cache: rows of queries to rows of keys and values.

use metal_attention_model::vision::AttentionSegment;

use super::elementwise::{all, n_elements};
use crate::arena::Bind;
use crate::device::WgpuDevice;
use crate::dispatch::{AccessRange, Dispatch, GridExtent};
use crate::error::WgpuError;
use crate::pipelines::PipelineKey;

/// Most elements of a head: the lanes of a query hold no more in registers.
const MAX_HEAD_DIM: usize = 256;

/// The heads of [`segment_attention`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SegmentAttentionShape {
    /// Query heads.
    pub n_head: usize,
    /// KV heads; divides `n_head`. Neighbouring query heads share one.
    pub n_head_kv: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Factor on the scores.
    pub scale: f32,
}

impl SegmentAttentionShape {
    /// Queries of a workgroup.
    fn queries(self) -> usize {
        if self.head_dim <= 32 { 32 } else { 16 }
    }

    fn key(self) -> PipelineKey {
        PipelineKey::new(
            "segment_attention",
            [
                ("n_head", self.n_head.into()),
                ("n_head_kv", self.n_head_kv.into()),
                ("head_dim", self.head_dim.into()),
                ("queries", self.queries().into()),
                ("scale", self.scale.into()),
            ],
        )
    }

    /// An error if the kernel does not support these sizes, or a segment lies outside so many rows.
    fn check(self, segments: &[AttentionSegment], n_queries: usize, n_keys: usize) -> Result<(), WgpuError> {
        let Self { n_head, n_head_kv, head_dim, .. } = self;
        let outside = |segment: &&AttentionSegment| {
            let AttentionSegment { queries, keys } = segment;
            queries.end > n_queries || keys.end > n_keys || (queries.start < queries.end && keys.start >= keys.end)
        };
        let why = if head_dim > MAX_HEAD_DIM {
            format!("heads have {head_dim} elements, and the kernel holds {MAX_HEAD_DIM}; use --device cpu")
        } else if head_dim == 0 || n_head_kv == 0 || !n_head.is_multiple_of(n_head_kv) {
            format!("{n_head} heads of {head_dim} elements cannot share {n_head_kv} KV heads")
        } else if let Some(segment) = segments.iter().find(outside) {
            format!("{segment:?} of {n_queries} queries and {n_keys} keys")
        } else {
            return Ok(());
        };
        Err(WgpuError::Mismatch { what: "attention".into(), why })
    }

    /// The words of the tiles: first query, end of the queries, first key, end of the keys.
    fn tiles(self, segments: &[AttentionSegment]) -> Vec<[u32; 4]> {
        let tiles = segments.iter().flat_map(|AttentionSegment { queries, keys }| {
            queries.clone().step_by(self.queries()).map(move |first| {
                [first, queries.end.min(first + self.queries()), keys.start, keys.end].map(|row| row as u32)
            })
        });
        tiles.collect()
    }
}

/// `result = softmax(scale * q k^T) v` for each segment: `q` and `result` are `[n_queries, n_head, head_dim]`, `k` and `v`
/// `[n_keys, n_head_kv, head_dim]`. Rows of no segment stay as they are.
pub fn segment_attention(
    gpu: &WgpuDevice,
    shape: SegmentAttentionShape,
    segments: &[AttentionSegment],
    q: &dyn Bind,
    k: &dyn Bind,
    v: &dyn Bind,
    result: &dyn Bind,
) -> Result<Dispatch, WgpuError> {
    let (row, kv_row) = (shape.n_head * shape.head_dim, shape.n_head_kv * shape.head_dim);
    let n_keys = n_elements(k).min(n_elements(v)) / kv_row.max(1);
    shape.check(segments, n_elements(q).min(n_elements(result)) / row.max(1), n_keys)?;
    let tiles = shape.tiles(segments);
    let tiles_buffer = gpu.upload("tiles of attention", &tiles)?;
    let tiles_range = AccessRange::floats(4 * tiles.len());
    let buffers = [all(q), all(k), all(v), all(result), (&tiles_buffer as &dyn Bind, tiles_range)];
    let grid = [shape.n_head, tiles.len(), 1].map(|n| GridExtent::Fixed(n as u32));
    Dispatch::new(gpu, &shape.key(), &buffers, grid)
}

/// The scalar twin: one head of a segment, with its queries, keys and values, `[n, head_dim]`.
pub fn segment_attention_twin(head_dim: usize, scale: f32, q: &[f32], k: &[f32], v: &[f32]) -> Vec<f32> {
    let of_query = |q: &[f32]| -> Vec<f32> {
        let dot = |k: &[f32]| q.iter().zip(k).map(|(&q, &k)| f64::from(q) * f64::from(k)).sum::<f64>();
        let scores: Vec<f64> = k.chunks_exact(head_dim).map(|k| f64::from(scale) * dot(k)).collect();
        let largest = scores.iter().fold(f64::NEG_INFINITY, |a, &b| a.max(b));
        let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
        let total: f64 = weights.iter().sum();
        let sum = |i: usize| -> f64 {
            weights.iter().zip(v.chunks_exact(head_dim)).map(|(weight, v)| weight * f64::from(v[i])).sum()
        };
        (0..head_dim).map(|i| (sum(i) / total) as f32).collect()
    };
    q.chunks_exact(head_dim).flat_map(of_query).collect()
}

pub(crate) fn catalogue() -> Vec<PipelineKey> {
    vec![SegmentAttentionShape { n_head: 16, n_head_kv: 16, head_dim: 72, scale: 0.125 }.key()]
}
