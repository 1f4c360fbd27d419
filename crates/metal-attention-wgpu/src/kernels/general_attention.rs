//! Attention of any kind over the KV cache.

use metal_attention_model::{BatchToken, CacheType, Mask, PAGE, QueryTemperature};

use super::decode_attention::{SPLIT, n_splits};
use crate::arena::Bind;
use crate::device::WgpuDevice;
use crate::dispatch::{Dispatch, Extent, Reach};
use crate::error::WgpuError;
use crate::pso::PsoKey;

/// Elements of a value for which a workgroup has threads.
const MAX_VALUE_DIM: usize = 512;

/// Elements of a key for which workgroups' memory suffices.
const MAX_KEY_DIM: usize = 1024;

/// Sizes and parts of attention.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GeneralAttention {
    /// Query heads.
    pub n_head: usize,
    /// Key and value heads; divides `n_head`.
    pub n_head_kv: usize,
    /// Elements of a query or key.
    pub key_dim: usize,
    /// Elements of a value.
    pub value_dim: usize,
    /// Factor on the scores.
    pub scale: f32,
    /// Which tokens see which. Where one sees those after it, a batch has whole texts.
    pub mask: Mask,
    /// Scores become `cap * tanh(score / cap)`.
    pub soft_cap: Option<f32>,
    /// Whether each head has a score of its own, without a value.
    pub sinks: bool,
    /// Whether scores fall with the distance, by a slope of each head.
    pub slopes: bool,
    /// Queries grow with their position.
    pub temperature: Option<QueryTemperature>,
    /// Positions that a sequence has room for.
    pub n_ctx: usize,
    /// The group of layers whose pages it is in; see [`BatchBuffer`](crate::BatchBuffer).
    pub group: usize,
    /// Element type of the KV cache.
    pub cache: CacheType,
}

impl GeneralAttention {
    /// Bytes of a page of the cache of keys, `[n_head_kv, PAGE, padded key_dim]`, and of values.
    pub fn page_bytes(&self) -> [u64; 2] {
        [self.key_dim, self.value_dim]
            .map(|n| (self.n_head_kv * PAGE * n.next_multiple_of(4) * self.cache.bytes()) as u64)
    }

    /// Bytes of scratch for `n_tokens` tokens of sequences that are decoded; none where a context is one part.
    pub fn partial_bytes(&self, n_tokens: usize) -> u64 {
        let splits = u64::from(n_splits(self.n_ctx.saturating_sub(1)));
        if splits < 2 { 0 } else { splits * 4 * (n_tokens * self.n_head * (self.value_dim + 2)) as u64 }
    }

    /// Refuses what the kernel cannot hold.
    fn check(&self) -> Result<(), WgpuError> {
        let (k, v) = (self.key_dim, self.value_dim);
        let why = if k > MAX_KEY_DIM || v > MAX_VALUE_DIM {
            format!(
                "heads have {k} and {v} elements, and the kernels hold {MAX_KEY_DIM} and {MAX_VALUE_DIM}; run on the CPU \
                 with --device cpu"
            )
        } else if k == 0 || v == 0 || self.n_head_kv == 0 || !self.n_head.is_multiple_of(self.n_head_kv) {
            format!("{} heads of {k} and {v} elements cannot share {} KV heads", self.n_head, self.n_head_kv)
        } else if self.n_ctx == 0 || self.n_ctx > 1 << 31 {
            format!("a context has {} positions, and the kernels count {}", self.n_ctx, 1_u32 << 31)
        } else {
            return Ok(());
        };
        Err(WgpuError::Mismatch { what: "attention".into(), why })
    }

    fn key(&self, split: usize) -> PsoKey {
        let reach = |n: usize| n.min(self.n_ctx);
        let (mask, reach) = match self.mask {
            Mask::Causal => ("causal", 0),
            Mask::Window(n) => ("window", reach(n)),
            Mask::Chunk(n) => ("chunk", reach(n)),
            Mask::Full => ("full", 0),
            Mask::SymmetricWindow(n) => ("near", reach(n)),
        };
        let (growth, length, offset) = self.temperature.map_or((0.0, 1, 0), |t| (t.scale, t.length, t.offset));
        PsoKey::new(
            "general_attention",
            [
                ("n_head", self.n_head.into()),
                ("n_head_kv", self.n_head_kv.into()),
                ("key_dim", self.key_dim.into()),
                ("value_dim", self.value_dim.into()),
                ("lanes", self.value_dim.div_ceil(4).next_power_of_two().into()),
                ("scale", self.scale.into()),
                ("mask", mask.into()),
                ("reach", reach.into()),
                ("cap", self.soft_cap.is_some().into()),
                ("soft_cap", self.soft_cap.unwrap_or(0.0).into()),
                ("sinks", self.sinks.into()),
                ("slopes", self.slopes.into()),
                ("per_head", (self.sinks || self.slopes).into()),
                ("temperature", self.temperature.is_some().into()),
                ("growth", growth.into()),
                ("growth_length", length.into()),
                ("growth_offset", offset.into()),
                ("split", split.into()),
                ("n_ctx", self.n_ctx.into()),
                ("page", PAGE.into()),
                ("group", self.group.into()),
                ("cache_f16", (self.cache == CacheType::F16).into()),
            ],
        )
    }

    fn merge_key(&self) -> PsoKey {
        let threads = self.value_dim.next_power_of_two().clamp(32, 256);
        PsoKey::new(
            "decode_attention_merge",
            [
                ("n_head", self.n_head.into()),
                ("gated", false.into()),
                ("head_dim", self.value_dim.into()),
                ("n_ctx", self.n_ctx.into()),
                ("split", SPLIT.into()),
                ("threads", threads.into()),
                // Parts that are not seen count for nothing.
                ("window", 0_usize.into()),
            ],
        )
        .named("general_attention_merge")
    }
}

/// Buffers of [`general_attention`].
#[derive(Debug, Clone, Copy)]
pub struct GeneralBuffers<'a> {
    /// F32 `[n_tokens, n_head, key_dim]`: queries as [`attention_inputs`](super::attention_inputs) made them.
    pub queries: &'a wgpu::Buffer,
    /// Cached keys, `[n_pages, n_head_kv, PAGE, padded key_dim]`, those of the batch included.
    pub keys: &'a dyn Bind,
    /// Cached values, `[n_pages, n_head_kv, PAGE, padded value_dim]`.
    pub values: &'a dyn Bind,
    /// F32 `[n_head, 2]`: of each head the sink's score and the slope; there exactly where the shape has either.
    pub of_heads: Option<&'a wgpu::Buffer>,
    /// F32 `[n_tokens, n_head, value_dim]`: the result.
    pub att: &'a wgpu::Buffer,
    /// Scratch where the context is cut, [`GeneralAttention::partial_bytes`] long.
    pub partial: &'a wgpu::Buffer,
    /// The batch, with the pages of its sequences.
    pub batch: &'a wgpu::Buffer,
}

/// Attention of every token's queries over the cache. Where `split`, for sequences that are decoded, the context is cut into
/// the step's parts, which [`general_attention_merge`] joins.
pub fn general_attention(
    gpu: &WgpuDevice,
    of: &GeneralAttention,
    split: bool,
    b: &GeneralBuffers<'_>,
) -> Result<Dispatch, WgpuError> {
    of.check()?;
    let row = |n: usize| Reach::Tokens(4 * (of.n_head * n) as u64);
    let [key_page, value_page] = of.page_bytes();
    let mut buffers: Vec<(&dyn Bind, Reach)> = vec![
        (b.queries, row(of.key_dim)),
        (b.keys, Reach::Fixed(key_page)),
        (b.values, Reach::Fixed(value_page)),
        (b.att, row(of.value_dim)),
        (b.batch, Reach::Batch),
    ];
    if split {
        buffers.push((b.partial, Reach::Splits(4 * (of.n_head * (of.value_dim + 2)) as u64)));
    }
    if of.sinks || of.slopes {
        buffers.extend(b.of_heads.map(|heads| (heads as &dyn Bind, Reach::floats(2 * of.n_head))));
    }
    let splits = if split { Extent::Splits } else { Extent::Fixed(1) };
    let key = of.key(if split { SPLIT } else { 0 });
    Dispatch::new(gpu, &key, &buffers, [Extent::Fixed(of.n_head as u32), Extent::Tokens(1), splits])
}

/// Joins the parts that [`general_attention`] left; does nothing in a step of one.
pub fn general_attention_merge(
    gpu: &WgpuDevice,
    of: &GeneralAttention,
    b: &GeneralBuffers<'_>,
) -> Result<Dispatch, WgpuError> {
    of.check()?;
    let partial = Reach::Splits(4 * (of.n_head * (of.value_dim + 2)) as u64);
    let att = Reach::Tokens(4 * (of.n_head * of.value_dim) as u64);
    let buffers: [(&dyn Bind, Reach); 3] = [(b.partial, partial), (b.att, att), (b.batch, Reach::Batch)];
    let grid = [Extent::WhenSplit(of.n_head as u32), Extent::Tokens(1), Extent::Fixed(1)];
    Dispatch::new(gpu, &of.merge_key(), &buffers, grid)
}

/// The scalar twin: the result of one head of a token, `[value_dim]`. `q`: its query; `of_head`: the sink's score and the
/// slope; `keys` and `values`: those of the KV head by position, of the whole text.
pub fn general_attention_twin(
    of: &GeneralAttention,
    token: BatchToken,
    q: &[f32],
    of_head: [f32; 2],
    keys: &[Vec<f32>],
    values: &[Vec<f32>],
) -> Vec<f32> {
    let growth = of.temperature.map_or(1.0, |temperature| f64::from(temperature.factor(token.pos)));
    let seen = of.mask.seen(token.pos, keys.len());
    let scores = seen.clone().map(|pos| {
        let product: f64 = q.iter().zip(&keys[pos]).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
        let mut score = product * f64::from(of.scale) * growth;
        if let Some(cap) = of.soft_cap {
            score = f64::from(cap) * (score / f64::from(cap)).tanh();
        }
        if of.slopes {
            score -= f64::from(of_head[1]) * pos.abs_diff(token.pos) as f64;
        }
        score
    });
    let scores: Vec<f64> = scores.collect();
    let sink = of.sinks.then_some(f64::from(of_head[0]));
    let max = scores.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
    let total = weights.iter().sum::<f64>() + sink.map_or(0.0, |sink| (sink - max).exp());
    let value = |e: usize| weights.iter().zip(&values[seen.clone()]).map(|(w, v)| w * f64::from(v[e])).sum::<f64>();
    (0..of.value_dim).map(|e| (value(e) / total) as f32).collect()
}

pub(crate) fn catalogue() -> Vec<PsoKey> {
    let of = GeneralAttention {
        n_head: 9,
        n_head_kv: 3,
        key_dim: 64,
        value_dim: 64,
        scale: 0.125,
        mask: Mask::Window(1024),
        soft_cap: Some(50.0),
        sinks: true,
        slopes: false,
        temperature: None,
        n_ctx: 2048,
        group: 0,
        cache: CacheType::F16,
    };
    vec![of.key(SPLIT), of.merge_key()]
}
