//! Queries and compressed rows of latent attention (`DeepSeek-V2`, arXiv 2405.04434, section 2.1), on their way to the cache.

use metal_attention_model::{CacheType, PAGE, RopeLayout};

use crate::arena::Bind;
use crate::device::GpuDevice;
use crate::dispatch::{Dispatch, Extent, Reach};
use crate::error::GpuError;
use crate::pso::PsoKey;

/// Elements of a key for which workgroups' memory suffices.
const MAX_KEY_DIM: usize = 1024;

/// What [`latent_inputs`] does.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LatentShape {
    /// Query heads.
    pub n_head: usize,
    /// Elements of a query head that are not rotated.
    pub n_nope: usize,
    /// Elements that are: of queries, and of the key that all heads share.
    pub n_rot: usize,
    /// Which of them pair up.
    pub layout: RopeLayout,
    /// Elements of a compressed row.
    pub rank: usize,
    /// Epsilon of its RMSNorm.
    pub eps: f32,
    /// Positions that a sequence has room for.
    pub n_ctx: usize,
    /// The group of layers whose pages it is in; see [`BatchBuffer`](crate::BatchBuffer).
    pub group: usize,
    /// Element type of the KV cache.
    pub cache: CacheType,
}

impl LatentShape {
    fn key(&self) -> PsoKey {
        PsoKey::new(
            "latent_inputs",
            [
                ("n_head", self.n_head.into()),
                ("n_head_kv", 1_usize.into()),
                ("n_nope", self.n_nope.into()),
                ("n_rot", self.n_rot.into()),
                ("halves", (self.layout == RopeLayout::Halves).into()),
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

/// Buffers of [`latent_inputs`].
#[derive(Debug, Clone, Copy)]
pub struct LatentBuffers<'a> {
    /// F32 `[n_tokens, n_head, n_nope + n_rot]`: queries.
    pub q: &'a wgpu::Buffer,
    /// F32 `[n_tokens, rank + n_rot]`: the compressed row and the shared key.
    pub kv: &'a wgpu::Buffer,
    /// F32 `[rank]`: weight of the row's norm.
    pub norm: &'a wgpu::Buffer,
    /// F32 `[n_tokens, n_head, rank + n_rot]`: what is compared with cached keys, of which the last `n_rot` are written.
    pub queries: &'a wgpu::Buffer,
    /// Cached keys, `[n_pages, 1, PAGE, padded rank + n_rot]`.
    pub keys: &'a dyn Bind,
    /// Cached values, `[n_pages, 1, PAGE, padded rank]`.
    pub values: &'a dyn Bind,
    /// F32 `[n_ctx, n_rot / 2, 2]`: cosine and sine of each angle.
    pub rope: &'a wgpu::Buffer,
    /// The batch, with the pages of its sequences.
    pub batch: &'a wgpu::Buffer,
}

/// Rotates the end of every query into `queries`, and appends the normalised row with the rotated key to the cache: as key
/// all of it, as value the row.
pub fn latent_inputs(gpu: &GpuDevice, of: &LatentShape, b: &LatentBuffers<'_>) -> Result<Dispatch, GpuError> {
    let key_dim = of.rank + of.n_rot;
    if key_dim > MAX_KEY_DIM || of.rank == 0 || of.n_rot == 0 || !of.n_rot.is_multiple_of(2) {
        let why = format!("rows of {} elements, {} of them rotated, of {MAX_KEY_DIM} at most", key_dim, of.n_rot);
        return Err(GpuError::Mismatch { what: "latent attention".into(), why });
    }
    let row = |n: usize| Reach::Tokens(4 * n as u64);
    let page = |n: usize| Reach::Fixed((PAGE * n.next_multiple_of(4) * of.cache.bytes()) as u64);
    let buffers: [(&dyn Bind, Reach); 8] = [
        (b.q, row(of.n_head * (of.n_nope + of.n_rot))),
        (b.kv, row(key_dim)),
        (b.norm, Reach::floats(of.rank)),
        (b.queries, row(of.n_head * key_dim)),
        (b.keys, page(key_dim)),
        (b.values, page(of.rank)),
        (b.rope, Reach::floats(of.n_ctx * of.n_rot)),
        (b.batch, Reach::Batch),
    ];
    let grid = [Extent::Fixed(of.n_head as u32 + 1), Extent::Tokens(1), Extent::Fixed(1)];
    Dispatch::new(gpu, &of.key(), &buffers, grid)
}

/// The scalar twin: of one token the rotated end of each query, `[n_head, n_rot]`, and the cached key, `[rank + n_rot]`.
pub fn latent_inputs_twin(
    of: &LatentShape,
    q: &[f32],
    kv: &[f32],
    norm: &[f32],
    angles: &[f32],
) -> (Vec<f32>, Vec<f32>) {
    let turned = |x: &[f32]| super::rope::rope_twin(of.layout, x, angles);
    let ends = q.chunks_exact(of.n_nope + of.n_rot).flat_map(|head| turned(&head[of.n_nope..])).collect();
    let (row, key) = kv.split_at(of.rank);
    let mut cached = super::rmsnorm::rmsnorm_twin(row, norm, of.eps);
    cached.extend(turned(key));
    (ends, cached)
}

pub(crate) fn catalogue() -> Vec<PsoKey> {
    let of = LatentShape {
        n_head: 16,
        n_nope: 128,
        n_rot: 64,
        layout: RopeLayout::Interleaved,
        rank: 512,
        eps: 1e-6,
        n_ctx: 2048,
        group: 0,
        cache: CacheType::F16,
    };
    vec![of.key()]
}
