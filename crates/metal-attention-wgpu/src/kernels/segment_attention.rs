//! Attention without a mask and without a KV cache: rows of queries to rows of keys and values, in plain loops or on matrix units.

use metal_attention_model::vision::AttentionSegment;

use super::elementwise::{all, n_elements};
use crate::arena::Bind;
use crate::device::WgpuDevice;
use crate::dispatch::{AccessRange, Dispatch, GridExtent};
use crate::error::WgpuError;
use crate::pipelines::PipelineKey;
use crate::shader::{Constant, ShaderFeatures};

/// Most elements of a head: the lanes of a query hold no more in registers.
const MAX_HEAD_DIM: usize = 256;
/// Most elements of a head on matrix units.
const MAX_UNIT_HEAD_DIM: usize = 128;
/// The side of the matrices that matrix units multiply.
const SIDE: usize = 16;

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

    fn constants(self, last: (&'static str, Constant)) -> [(&'static str, Constant); 5] {
        let Self { n_head, n_head_kv, head_dim, scale } = self;
        let heads = [("n_head", n_head.into()), ("n_head_kv", n_head_kv.into()), ("head_dim", head_dim.into())];
        let [a, b, c] = heads;
        [a, b, c, ("scale", scale.into()), last]
    }

    fn key(self) -> PipelineKey {
        PipelineKey::new("segment_attention", self.constants(("queries", self.queries().into())))
    }

    fn cooperative_key(self, subgroups: usize) -> PipelineKey {
        PipelineKey::new("segment_attention_cooperative", self.constants(("subgroup_count", subgroups.into())))
    }

    /// Whether the kernel on matrix units has these heads.
    fn fits_matrix_units(self) -> bool {
        self.head_dim.is_multiple_of(4) && self.head_dim <= MAX_UNIT_HEAD_DIM
    }

    /// Subgroups of a workgroup on matrix units: as many as its memory of so many bytes allows, up to four. `None` if that are fewer
    /// threads than queries.
    fn subgroups(self, features: ShaderFeatures, memory: usize) -> Option<usize> {
        let scalar = if features.cooperative_f16 { 2 } else { 4 };
        let padded = self.head_dim.next_multiple_of(SIDE);
        let bytes = |subgroups: usize| {
            let keys = SIDE * subgroups;
            scalar * ((SIDE + 2 * keys) * (padded + 8) + SIDE * (keys + 8)) + 4 * SIDE * (keys.max(padded) + 4)
        };
        let suits = |&n: &usize| bytes(n) <= memory && n * features.subgroup_size as usize >= SIDE;
        [4, 2, 1].into_iter().find(suits)
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

    /// The words of tiles of so many queries: first query, end of the queries, first key, end of the keys.
    fn tiles(segments: &[AttentionSegment], n: usize) -> Vec<[u32; 4]> {
        let tiles = segments.iter().flat_map(|AttentionSegment { queries, keys }| {
            let firsts = queries.clone().step_by(n);
            firsts.map(move |first| [first, queries.end.min(first + n), keys.start, keys.end].map(|row| row as u32))
        });
        tiles.collect()
    }
}

/// The rows of [`segment_attention`].
#[derive(Debug, Clone, Copy)]
pub struct SegmentAttentionRows<'a> {
    /// Queries, `[n_queries, n_head, head_dim]`.
    pub q: &'a dyn Bind,
    /// Keys, `[n_keys, n_head_kv, head_dim]`.
    pub k: &'a dyn Bind,
    /// Values, `[n_keys, n_head_kv, head_dim]`.
    pub v: &'a dyn Bind,
    /// Results, `[n_queries, n_head, head_dim]`.
    pub result: &'a dyn Bind,
}

/// `result = softmax(scale * q k^T) v` for each segment. Rows of no segment stay as they are. Computes in 32-bit floats on any
/// device.
pub fn segment_attention(
    gpu: &WgpuDevice,
    shape: SegmentAttentionShape,
    segments: &[AttentionSegment],
    rows: SegmentAttentionRows<'_>,
) -> Result<Dispatch, WgpuError> {
    dispatch(gpu, shape, segments, rows, &shape.key(), shape.queries())
}

/// [`segment_attention`] on matrix units, for heads of whole vectors of four and at most 128 elements. Queries are rounded to 16-bit
/// floats relative to their largest element, and so are keys, values and the weights of the softmax.
///
/// Runs on any device with subgroups of 8 to 64 lanes, but is worthwhile only if [`segments_on_matrix_units`].
pub fn segment_attention_cooperative(
    gpu: &WgpuDevice,
    shape: SegmentAttentionShape,
    segments: &[AttentionSegment],
    rows: SegmentAttentionRows<'_>,
) -> Result<Dispatch, WgpuError> {
    let memory = gpu.wgpu().limits().max_compute_workgroup_storage_size as usize;
    let subgroups = shape.subgroups(gpu.features(), memory).filter(|_| shape.fits_matrix_units());
    let subgroups = subgroups.ok_or_else(|| {
        let why = format!("heads of {} elements do not fit the matrix units of this GPU", shape.head_dim);
        WgpuError::Mismatch { what: "attention".into(), why }
    })?;
    dispatch(gpu, shape, segments, rows, &shape.cooperative_key(subgroups), SIDE)
}

/// Whether [`segment_attention_cooperative`] suits: with 16-bit matrix units, for heads that fit them, and unless `exact`.
pub fn segments_on_matrix_units(gpu: &WgpuDevice, shape: SegmentAttentionShape, exact: bool) -> bool {
    let (features, memory) = (gpu.features(), gpu.wgpu().limits().max_compute_workgroup_storage_size as usize);
    let has_units = features.cooperative_f16 && (8..=64).contains(&features.subgroup_size);
    has_units && !exact && shape.fits_matrix_units() && shape.subgroups(features, memory).is_some()
}

fn dispatch(
    gpu: &WgpuDevice,
    shape: SegmentAttentionShape,
    segments: &[AttentionSegment],
    SegmentAttentionRows { q, k, v, result }: SegmentAttentionRows<'_>,
    key: &PipelineKey,
    queries_of_tile: usize,
) -> Result<Dispatch, WgpuError> {
    let (row, kv_row) = (shape.n_head * shape.head_dim, shape.n_head_kv * shape.head_dim);
    let n_keys = n_elements(k).min(n_elements(v)) / kv_row.max(1);
    shape.check(segments, n_elements(q).min(n_elements(result)) / row.max(1), n_keys)?;
    let tiles = SegmentAttentionShape::tiles(segments, queries_of_tile);
    let tiles_buffer = gpu.upload("tiles of attention", &tiles)?;
    let tiles_range = AccessRange::floats(4 * tiles.len());
    let buffers = [all(q), all(k), all(v), all(result), (&tiles_buffer as &dyn Bind, tiles_range)];
    let grid = [shape.n_head, tiles.len(), 1].map(|n| GridExtent::Fixed(n as u32));
    Dispatch::new(gpu, key, &buffers, grid)
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
    let shape = SegmentAttentionShape { n_head: 16, n_head_kv: 16, head_dim: 72, scale: 0.125 };
    vec![shape.key(), shape.cooperative_key(4)]
}
