//! The inputs of latent attention (`DeepSeek-V2`, arXiv 2405.04434, section 2.1): norms the compressed row, rotates the
//! ends of queries and the key that heads share, and appends both to the KV cache.

use metal_attention_model::{CacheType, PAGE, RopeLayout};

use crate::arena::Bind;
use crate::device::WgpuDevice;
use crate::dispatch::{AccessRange, Dispatch, GridExtent};
use crate::error::WgpuError;
use crate::pipelines::PipelineKey;

/// Most elements of a key: more do not fit the workgroups' memory.
const MAX_KEY_DIM: usize = 1024;

/// The sizes of [`latent_inputs`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LatentInputsShape {
    /// Query heads.
    pub n_head: usize,
    /// Elements of a query head without position, which are compared with the compressed row.
    pub n_nope: usize,
    /// Rotated elements of a query head, and of the key that all heads share.
    pub shared_dim: usize,
    /// Which of these form pairs that are rotated; `None`: no RoPE.
    pub layout: Option<RopeLayout>,
    /// Elements of a compressed row (`kv_rank`).
    pub rank: usize,
    /// Epsilon of the compressed row's RMSNorm.
    pub eps: f32,
    /// Positions of a sequence at most.
    pub n_ctx: usize,
    /// The cache group of the layer; see [`BatchBuffer`](crate::BatchBuffer).
    pub group: usize,
    /// Element type of the KV cache.
    pub cache: CacheType,
}

impl LatentInputsShape {
    fn key(&self) -> PipelineKey {
        PipelineKey::new(
            "latent_inputs",
            [
                ("n_head", self.n_head.into()),
                ("n_head_kv", 1_usize.into()),
                ("n_nope", self.n_nope.into()),
                ("n_rot", self.shared_dim.into()),
                ("turned", self.layout.is_some().into()),
                ("halves", (self.layout == Some(RopeLayout::Halves)).into()),
                ("rank", self.rank.into()),
                ("eps", self.eps.into()),
                ("n_ctx", self.n_ctx.into()),
                ("page", PAGE.into()),
                ("group", self.group.into()),
                ("cache_f16", (self.cache == CacheType::F16).into()),
            ],
        )
    }
}

/// The buffers of [`latent_inputs`].
#[derive(Debug, Clone, Copy)]
pub struct LatentInputsBuffers<'a> {
    /// F32 `[n_tokens, n_head, n_nope + shared_dim]`: projected queries.
    pub q: &'a wgpu::Buffer,
    /// F32 `[n_tokens, rank + shared_dim]`: the compressed row and the shared key.
    pub kv: &'a wgpu::Buffer,
    /// F32 `[rank]`: weight of the compressed row's norm.
    pub norm: &'a wgpu::Buffer,
    /// F32 `[n_tokens, n_head, rank + shared_dim]`: queries of attention, of which the last `shared_dim` are written.
    pub queries: &'a wgpu::Buffer,
    /// Cached keys, `[n_pages, 1, PAGE, padded rank + shared_dim]`.
    pub keys: &'a dyn Bind,
    /// Cached values, `[n_pages, 1, PAGE, padded rank]`.
    pub values: &'a dyn Bind,
    /// F32 `[n_ctx or more, shared_dim / 2, 2]`: the RoPE cos/sin table, if there is RoPE.
    pub rope: &'a wgpu::Buffer,
    /// The batch, with page tables.
    pub batch: &'a wgpu::Buffer,
}

/// Writes the rotated end of every query to `queries`, and appends the normed compressed row with the rotated shared
/// key to the KV cache: all of it as key, the row alone as value.
pub fn latent_inputs(
    gpu: &WgpuDevice,
    shape: &LatentInputsShape,
    b: &LatentInputsBuffers<'_>,
) -> Result<Dispatch, WgpuError> {
    let (key_dim, shared_dim) = (shape.rank + shape.shared_dim, shape.shared_dim);
    let pairs = shape.layout.is_none() || shared_dim.is_multiple_of(2);
    if key_dim > MAX_KEY_DIM || shape.rank == 0 || shared_dim == 0 || !pairs {
        let why = format!("rows of {key_dim} elements, {shared_dim} of them shared, of {MAX_KEY_DIM} at most");
        return Err(WgpuError::Mismatch { what: "latent attention".into(), why });
    }
    let row = |n: usize| AccessRange::Tokens(4 * n as u64);
    let page = |n: usize| AccessRange::Fixed((PAGE * n.next_multiple_of(4) * shape.cache.bytes()) as u64);
    let mut buffers: Vec<(&dyn Bind, AccessRange)> = vec![
        (b.q, row(shape.n_head * (shape.n_nope + shared_dim))),
        (b.kv, row(key_dim)),
        (b.norm, AccessRange::floats(shape.rank)),
        (b.queries, row(shape.n_head * key_dim)),
        (b.keys, page(key_dim)),
        (b.values, page(shape.rank)),
        (b.batch, AccessRange::Batch),
    ];
    buffers.extend(shape.layout.map(|_| (b.rope as &dyn Bind, AccessRange::floats(shape.n_ctx * shared_dim))));
    let grid = [GridExtent::Fixed(shape.n_head as u32 + 1), GridExtent::Tokens(1), GridExtent::Fixed(1)];
    Dispatch::new(gpu, &shape.key(), &buffers, grid)
}

/// The scalar twin for one token: the rotated end of each query, `[n_head, shared_dim]`, and the cached key,
/// `[rank + shared_dim]`.
pub fn latent_inputs_twin(
    shape: &LatentInputsShape,
    q: &[f32],
    kv: &[f32],
    norm: &[f32],
    angles: &[f32],
) -> (Vec<f32>, Vec<f32>) {
    let rotated = |x: &[f32]| shape.layout.map_or(x.to_vec(), |layout| super::rope::rope_twin(layout, x, angles));
    let ends =
        q.chunks_exact(shape.n_nope + shape.shared_dim).flat_map(|head| rotated(&head[shape.n_nope..])).collect();
    let (row, key) = kv.split_at(shape.rank);
    let mut cached = super::rmsnorm::rmsnorm_twin(row, norm, shape.eps);
    cached.extend(rotated(key));
    (ends, cached)
}

pub(crate) fn catalogue() -> Vec<PipelineKey> {
    let shape = LatentInputsShape {
        n_head: 16,
        n_nope: 128,
        shared_dim: 64,
        layout: Some(RopeLayout::Interleaved),
        rank: 512,
        eps: 1e-6,
        n_ctx: 2048,
        group: 0,
        cache: CacheType::F16,
    };
    vec![shape.key(), LatentInputsShape { layout: None, ..shape }.key().named("latent_inputs_unturned")]
}
