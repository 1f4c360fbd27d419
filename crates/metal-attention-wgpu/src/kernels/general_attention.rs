//! General attention over the KV cache: any mask, slopes (`ALiBi`), sinks, caps, and different lengths of keys and
//! values.

use metal_attention_model::{BatchToken, CacheType, Mask, PAGE, QueryTemperature};

use super::decode_attention::{SPLIT, n_splits};
use crate::arena::Bind;
use crate::device::WgpuDevice;
use crate::dispatch::{AccessRange, Dispatch, GridExtent};
use crate::error::WgpuError;
use crate::pipelines::PipelineKey;

/// Most elements of a value: a workgroup has a thread for each.
const MAX_VALUE_DIM: usize = 512;

/// Most elements of a key: more do not fit the workgroups' memory.
const MAX_KEY_DIM: usize = 1024;

/// The sizes and variants of an attention layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GeneralAttention {
    /// Query heads.
    pub n_head: usize,
    /// KV heads; divides `n_head`.
    pub n_head_kv: usize,
    /// Elements of a query or key.
    pub key_dim: usize,
    /// Elements of a value.
    pub value_dim: usize,
    /// Factor on the scores.
    pub scale: f32,
    /// Which positions a token attends to. If it attends to later ones, a batch has whole sequences.
    pub mask: Mask,
    /// Scores become `cap * tanh(score / cap)`.
    pub soft_cap: Option<f32>,
    /// Whether each head has a sink: one more score in the softmax, without a value.
    pub sinks: bool,
    /// Whether scores fall with the distance, by a slope for each head (`ALiBi`).
    pub slopes: bool,
    /// A factor on queries that grows with their position, if any.
    pub temperature: Option<QueryTemperature>,
    /// Positions of a sequence at most.
    pub n_ctx: usize,
    /// The cache group of the layer; see [`BatchBuffer`](crate::BatchBuffer).
    pub group: usize,
    /// Element type of the KV cache.
    pub cache: CacheType,
}

impl GeneralAttention {
    /// Bytes of a page of keys, `[n_head_kv, PAGE, padded key_dim]`, and of values.
    pub fn page_bytes(&self) -> [u64; 2] {
        [self.key_dim, self.value_dim]
            .map(|n| (self.n_head_kv * PAGE * n.next_multiple_of(4) * self.cache.bytes()) as u64)
    }

    /// F32 elements of the partial results of a decode step, for each sequence; 0 if a context is a single split.
    pub fn partial_len(&self) -> usize {
        let splits = n_splits(self.n_ctx.saturating_sub(1)) as usize;
        if splits < 2 { 0 } else { splits * self.n_head * (self.value_dim + 2) }
    }

    /// An error if the kernel does not support these sizes.
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

    fn key(&self, split: usize) -> PipelineKey {
        let within_context = |n: usize| n.min(self.n_ctx);
        let (mask, reach) = match self.mask {
            Mask::Causal => ("causal", 0),
            Mask::Window(n) => ("window", within_context(n)),
            Mask::Chunk(n) => ("chunk", within_context(n)),
            Mask::Full => ("full", 0),
            Mask::SymmetricWindow(n) => ("near", within_context(n)),
        };
        let (growth, length, offset) = self.temperature.map_or((0.0, 1, 0), |t| (t.scale, t.length, t.offset));
        PipelineKey::new(
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

    fn merge_key(&self) -> PipelineKey {
        let threads = self.value_dim.next_power_of_two().clamp(32, 256);
        PipelineKey::new(
            "decode_attention_merge",
            [
                ("n_head", self.n_head.into()),
                ("gated", false.into()),
                ("head_dim", self.value_dim.into()),
                ("n_ctx", self.n_ctx.into()),
                ("split", SPLIT.into()),
                ("threads", threads.into()),
                // Windows need no constant here: splits without positions that are attended to have weight zero.
                ("window", 0_usize.into()),
            ],
        )
        .named("general_attention_merge")
    }
}

/// The buffers of [`general_attention`].
#[derive(Debug, Clone, Copy)]
pub struct GeneralAttentionBuffers<'a> {
    /// F32 `[n_tokens, n_head, key_dim]`: queries, as [`attention_inputs`](super::attention_inputs) writes them.
    pub queries: &'a wgpu::Buffer,
    /// Cached keys, `[n_pages, n_head_kv, PAGE, padded key_dim]`, which include the batch's own.
    pub keys: &'a dyn Bind,
    /// Cached values, `[n_pages, n_head_kv, PAGE, padded value_dim]`.
    pub values: &'a dyn Bind,
    /// F32 `[n_head, 2]`: the sink's score and the slope of each head. `Some` exactly if the shape has either.
    pub sinks_and_slopes: Option<&'a wgpu::Buffer>,
    /// F32 `[n_tokens, n_head, value_dim]`: the result.
    pub attention_out: &'a wgpu::Buffer,
    /// Partial results of splits, [`GeneralAttention::partial_len`] elements for each token.
    pub partial: &'a wgpu::Buffer,
    /// As [`AttentionBuffers::last_seen`](super::AttentionBuffers::last_seen). Read neither with splits nor without a causal
    /// mask.
    pub last_seen: &'a dyn Bind,
    /// The batch, with page tables.
    pub batch: &'a wgpu::Buffer,
}

/// Attention of every token over its sequence's KV cache, to `attention_out`. `split`, for decode steps: the positions
/// are divided into the step's splits; if there are several, the results go to `partial` and
/// [`general_attention_merge`] writes `attention_out`.
pub fn general_attention(
    gpu: &WgpuDevice,
    shape: &GeneralAttention,
    split: bool,
    b: &GeneralAttentionBuffers<'_>,
) -> Result<Dispatch, WgpuError> {
    shape.check()?;
    let row = |n: usize| AccessRange::Tokens(4 * (shape.n_head * n) as u64);
    let [key_page, value_page] = shape.page_bytes();
    let mut buffers: Vec<(&dyn Bind, AccessRange)> = vec![
        (b.queries, row(shape.key_dim)),
        (b.keys, AccessRange::Fixed(key_page)),
        (b.values, AccessRange::Fixed(value_page)),
        (b.attention_out, row(shape.value_dim)),
        (b.batch, AccessRange::Batch),
    ];
    if split {
        buffers.push((b.partial, AccessRange::Splits(4 * (shape.n_head * (shape.value_dim + 2)) as u64)));
    }
    if !split && shape.mask.is_causal() {
        buffers.push((b.last_seen, AccessRange::Tokens(4)));
    }
    if shape.sinks || shape.slopes {
        buffers.extend(b.sinks_and_slopes.map(|heads| (heads as &dyn Bind, AccessRange::floats(2 * shape.n_head))));
    }
    let splits = if split { GridExtent::Splits } else { GridExtent::Fixed(1) };
    let key = shape.key(if split { SPLIT } else { 0 });
    Dispatch::new(gpu, &key, &buffers, [GridExtent::Fixed(shape.n_head as u32), GridExtent::Tokens(1), splits])
}

/// Merges the partial results of several splits into `attention_out`; has no work if there is one.
pub fn general_attention_merge(
    gpu: &WgpuDevice,
    shape: &GeneralAttention,
    b: &GeneralAttentionBuffers<'_>,
) -> Result<Dispatch, WgpuError> {
    shape.check()?;
    let partial = AccessRange::Splits(4 * (shape.n_head * (shape.value_dim + 2)) as u64);
    let attention_out = AccessRange::Tokens(4 * (shape.n_head * shape.value_dim) as u64);
    let buffers: [(&dyn Bind, AccessRange); 3] =
        [(b.partial, partial), (b.attention_out, attention_out), (b.batch, AccessRange::Batch)];
    let grid = [GridExtent::WhenSplit(shape.n_head as u32), GridExtent::Tokens(1), GridExtent::Fixed(1)];
    Dispatch::new(gpu, &shape.merge_key(), &buffers, grid)
}

/// The scalar twin for one head of one token: its result `[value_dim]`. `position`: of the token, whose slot is its `pos`;
/// `last_seen`: as in [`GeneralAttentionBuffers`]; `q`: the query; `of_head`: the sink's score and the slope; `keys` and
/// `values`: those of the KV head at every slot of the sequence.
pub fn general_attention_twin(
    shape: &GeneralAttention,
    token: BatchToken,
    (position, last_seen): (usize, usize),
    q: &[f32],
    of_head: [f32; 2],
    keys: &[Vec<f32>],
    values: &[Vec<f32>],
) -> Vec<f32> {
    let growth = shape.temperature.map_or(1.0, |temperature| f64::from(temperature.factor(position)));
    let mut seen = shape.mask.seen(token.pos, keys.len());
    if shape.mask.is_causal() {
        seen.end = seen.end.max(last_seen + 1);
    }
    let scores = seen.clone().map(|pos| {
        let product: f64 = q.iter().zip(&keys[pos]).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
        let mut score = product * f64::from(shape.scale) * growth;
        if let Some(cap) = shape.soft_cap {
            score = f64::from(cap) * (score / f64::from(cap)).tanh();
        }
        if shape.slopes {
            score -= f64::from(of_head[1]) * pos.abs_diff(token.pos) as f64;
        }
        score
    });
    let scores: Vec<f64> = scores.collect();
    let sink = shape.sinks.then_some(f64::from(of_head[0]));
    let max = scores.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
    let total = weights.iter().sum::<f64>() + sink.map_or(0.0, |sink| (sink - max).exp());
    let value = |e: usize| weights.iter().zip(&values[seen.clone()]).map(|(w, v)| w * f64::from(v[e])).sum::<f64>();
    (0..shape.value_dim).map(|e| (value(e) / total) as f32).collect()
}

pub(crate) fn catalogue() -> Vec<PipelineKey> {
    let shape = GeneralAttention {
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
    vec![shape.key(SPLIT), shape.merge_key()]
}
