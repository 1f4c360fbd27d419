//! RoPE (rotary position embedding, arXiv 2104.09864), with the RMSNorm of each head that some models compute before
//! it.

use metal_attention_model::RopeLayout;

use super::attention::{AttentionBuffers, AttentionShape};
use crate::device::WgpuDevice;
use crate::dispatch::{AccessRange, Dispatch, GridExtent};
use crate::error::WgpuError;
use crate::pipelines::PipelineKey;

/// The sizes of [`rope_apply`].
#[derive(Debug, Clone, Copy)]
pub struct RopeShape {
    /// Heads of a token.
    pub n_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Rotated elements at the start of each head; even, above 0, at most `head_dim`.
    pub n_rot: usize,
    /// Which elements form a pair that is rotated.
    pub layout: RopeLayout,
    /// Positions in the table.
    pub n_ctx: usize,
}

/// Rotates `x`, `[n_tokens, n_heads, head_dim]`, in place, each token by its row of `rope`, a RoPE
/// cos/sin table ([`Rotation::table`](metal_attention_model::Rotation::table)).
pub fn rope_apply(
    gpu: &WgpuDevice,
    shape: RopeShape,
    x: &wgpu::Buffer,
    rope: &wgpu::Buffer,
    batch: &wgpu::Buffer,
) -> Result<Dispatch, WgpuError> {
    let row = AccessRange::Tokens(4 * (shape.n_heads * shape.head_dim) as u64);
    let angles = AccessRange::floats(shape.n_ctx * shape.n_rot);
    Dispatch::new(
        gpu,
        &rope_apply_key(shape),
        &[(x, row), (rope, angles), (batch, AccessRange::Batch)],
        grid(shape.n_heads),
    )
}

/// Norms (if the shape has a `qk_norm_eps`) and rotates the queries and keys in `buffers.qkv`, in place.
pub fn rope_apply_dual(
    gpu: &WgpuDevice,
    shape: &AttentionShape,
    buffers: &AttentionBuffers<'_>,
) -> Result<Dispatch, WgpuError> {
    shape.check()?;
    shape.check_ungated()?;
    let b = buffers.bound(shape);
    let mut bound = vec![b.qkv, b.rope, b.batch];
    bound.extend(b.qk_norm);
    Dispatch::new(gpu, &rope_apply_dual_key(shape), &bound, grid(shape.n_head + shape.n_head_kv))
}

/// [`rope_apply_dual`] and [`kv_cache_copy`](super::kv_cache_copy) in one dispatch. Queries are normed and rotated in
/// place; keys only in the KV cache, not in `buffers.qkv`.
pub fn rope_append(
    gpu: &WgpuDevice,
    shape: &AttentionShape,
    buffers: &AttentionBuffers<'_>,
) -> Result<Dispatch, WgpuError> {
    shape.check()?;
    let b = buffers.bound(shape);
    let mut bound = vec![b.qkv, b.rope, b.keys, b.values, b.batch];
    bound.extend(b.qk_norm);
    Dispatch::new(gpu, &rope_append_key(shape), &bound, grid(shape.n_head + 2 * shape.n_head_kv))
}

fn grid(n_heads: usize) -> [GridExtent; 3] {
    [GridExtent::Fixed(n_heads as u32), GridExtent::Tokens(1), GridExtent::Fixed(1)]
}

fn threads(pairs: usize) -> usize {
    pairs.next_power_of_two().clamp(32, 256)
}

fn rope_apply_key(shape: RopeShape) -> PipelineKey {
    PipelineKey::new(
        "rope_apply",
        [
            ("row", (shape.n_heads * shape.head_dim).into()),
            ("head_dim", shape.head_dim.into()),
            ("n_rot", shape.n_rot.into()),
            ("halves", (shape.layout == RopeLayout::Halves).into()),
            ("n_ctx", shape.n_ctx.into()),
            ("qk_norm", false.into()),
            ("threads", threads(shape.n_rot / 2).into()),
        ],
    )
}

fn rope_apply_dual_key(shape: &AttentionShape) -> PipelineKey {
    let pairs = if shape.qk_norm_eps.is_some() { shape.head_dim.div_ceil(2) } else { shape.n_rot / 2 };
    let more = [("row", shape.qkv_row().into()), ("threads", threads(pairs).into())];
    shape.key("rope_apply", &[&shape.rope_constants(), &more]).named("rope_apply_dual")
}

fn rope_append_key(shape: &AttentionShape) -> PipelineKey {
    let more = [("threads", threads(shape.head_dim.div_ceil(2)).into())];
    shape.key("rope_append", &[&shape.rope_constants(), &more])
}

pub(crate) fn catalogue() -> Vec<PipelineKey> {
    let example = AttentionShape::EXAMPLE;
    let shape = RopeShape {
        n_heads: example.n_head,
        head_dim: example.head_dim,
        n_rot: example.n_rot,
        layout: example.rope_layout,
        n_ctx: example.n_ctx,
    };
    vec![rope_apply_key(shape), rope_apply_dual_key(&example), rope_append_key(&example)]
}

/// The scalar twin of [`rope_apply`] for one head. `angles`: the row of its position in the table.
pub fn rope_twin(layout: RopeLayout, head: &[f32], angles: &[f32]) -> Vec<f32> {
    let mut x: Vec<f64> = head.iter().map(|&v| f64::from(v)).collect();
    rotate_twin(layout, &mut x, angles);
    x.into_iter().map(|v| v as f32).collect()
}

/// The scalar twin of [`rope_apply_dual`] for one head, with weight and epsilon of its norm.
pub fn norm_rope_twin(layout: RopeLayout, head: &[f32], angles: &[f32], weight: &[f32], eps: f32) -> Vec<f32> {
    let mut x: Vec<f64> = head.iter().map(|&v| f64::from(v)).collect();
    norm_twin(&mut x, weight, eps);
    rotate_twin(layout, &mut x, angles);
    x.into_iter().map(|v| v as f32).collect()
}

pub(super) fn norm_twin(x: &mut [f64], weight: &[f32], eps: f32) {
    let mean = x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64;
    let scale = 1.0 / (mean + f64::from(eps)).sqrt();
    for (v, &w) in x.iter_mut().zip(weight) {
        *v *= scale * f64::from(w);
    }
}

pub(super) fn rotate_twin(layout: RopeLayout, x: &mut [f64], angles: &[f32]) {
    let half = angles.len() / 2;
    for (i, angle) in angles.chunks_exact(2).enumerate() {
        let (a, b) = match layout {
            RopeLayout::Interleaved => (2 * i, 2 * i + 1),
            RopeLayout::Halves => (i, i + half),
        };
        let (cos, sin) = (f64::from(angle[0]), f64::from(angle[1]));
        (x[a], x[b]) = (x[a] * cos - x[b] * sin, x[a] * sin + x[b] * cos);
    }
}
