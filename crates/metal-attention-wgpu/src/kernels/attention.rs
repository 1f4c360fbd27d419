//! Sizes and buffers of the fast attention kernels (`rope_append`, `prefill_attention`, `decode_attention`), and their
//! scalar twin.

use half::f16;
use metal_attention_model::{BatchToken, CacheType, PAGE, RopeLayout};

use crate::arena::Bind;
use crate::dispatch::AccessRange;
use crate::error::WgpuError;
use crate::pipelines::PipelineKey;
use crate::shader::Constant;

/// Most elements of a head: more do not fit the workgroups' memory.
pub const MAX_FAST_HEAD_DIM: usize = 256;

/// Most positions: with more, indices would not fit 32 bits.
const MAX_CONTEXT: usize = 1 << 31;

/// The sizes of an attention layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionShape {
    /// Query heads.
    pub n_head: usize,
    /// KV heads; divides `n_head`.
    pub n_head_kv: usize,
    /// Elements of a head, at most [`MAX_FAST_HEAD_DIM`].
    pub head_dim: usize,
    /// Factor on the scores.
    pub scale: f32,
    /// Scores become `cap * tanh(score / cap)`.
    pub soft_cap: Option<f32>,
    /// Whether each head has a sink: one more score in the softmax, without a value. Not together with `qk_norm_eps`.
    pub sinks: bool,
    /// Positions that a token attends to, its own included; `None`: all.
    pub window: Option<usize>,
    /// Positions of a sequence at most.
    pub n_ctx: usize,
    /// The cache group of the layer; see [`BatchBuffer`](crate::BatchBuffer).
    pub group: usize,
    /// Rotated elements at the start of each head; even, above 0, at most `head_dim`.
    pub n_rot: usize,
    /// Which elements form a pair that is rotated.
    pub rope_layout: RopeLayout,
    /// Epsilon of the RMSNorm of each query and key head before RoPE, if there is one.
    pub qk_norm_eps: Option<f32>,
    /// Whether each query head has a gate of `head_dim` elements, whose sigmoid multiplies the head's result.
    pub gated: bool,
    /// Element type of the KV cache.
    pub cache: CacheType,
    /// Elements behind Q, K and V in a token's row: gates, or the inputs of the mixer that runs in parallel with attention.
    pub n_trailing: usize,
}

impl AttentionShape {
    /// Elements of a token's gates (if any), Q, K and V.
    pub fn qkv_len(&self) -> usize {
        (self.n_gate() + self.n_head + 2 * self.n_head_kv) * self.head_dim
    }

    /// Number of heads of gates before the first query head.
    fn n_gate(&self) -> usize {
        if self.gated { self.n_head } else { 0 }
    }

    /// An error if heads have gates, for kernels that do not support them.
    pub(crate) fn check_ungated(&self) -> Result<(), WgpuError> {
        if self.gated {
            let why = "heads have gates, which this kernel does not know".to_owned();
            return Err(WgpuError::Mismatch { what: "attention".into(), why });
        }
        Ok(())
    }

    /// Elements from one token's row of `qkv` to the next.
    pub fn qkv_row(&self) -> usize {
        self.qkv_len() + self.n_trailing
    }

    /// Elements of a token's result.
    pub fn att_len(&self) -> usize {
        self.n_head * self.head_dim
    }

    /// Elements of a row of the KV cache: `head_dim` rounded up to a multiple of 4.
    pub fn padded_head_dim(&self) -> usize {
        self.head_dim.next_multiple_of(4)
    }

    /// Bytes of the keys of `n_pages` pages, and likewise of the values: `[n_pages, n_head_kv, PAGE, padded head_dim]`.
    pub fn cache_bytes(&self, n_pages: usize) -> u64 {
        [self.n_head_kv, PAGE, self.padded_head_dim(), self.cache.bytes()]
            .iter()
            .fold(n_pages as u64, |bytes, &n| bytes.saturating_mul(n as u64))
    }

    /// Index of the first cached element for position `pos` of a sequence, which is on `page`.
    pub fn cache_row(&self, page: u32, kv_head: usize, pos: usize) -> usize {
        ((page as usize * self.n_head_kv + kv_head) * PAGE + pos % PAGE) * self.padded_head_dim()
    }

    /// Positions that a token at `pos` attends to.
    pub fn seen(&self, pos: usize) -> std::ops::RangeInclusive<usize> {
        self.window.map_or(0, |w| (pos + 1).saturating_sub(w))..=pos
    }

    /// An error if the kernels do not support these sizes. The bounds of their accesses rely on this check.
    pub(crate) fn check(&self) -> Result<(), WgpuError> {
        let n = self.head_dim;
        let why = if n > MAX_FAST_HEAD_DIM {
            format!(
                "heads have {n} elements, and the kernels hold {MAX_FAST_HEAD_DIM}; run on the CPU with --device cpu"
            )
        } else if n == 0 || self.n_head_kv == 0 || !self.n_head.is_multiple_of(self.n_head_kv) {
            format!("{} heads of {n} elements cannot share {} KV heads", self.n_head, self.n_head_kv)
        } else if self.n_rot > n || !self.n_rot.is_multiple_of(2) {
            format!("RoPE cannot turn {} elements of {n} in pairs", self.n_rot)
        } else if self.sinks && self.qk_norm_eps.is_some() {
            "heads have a norm and sinks, for which a kernel has too few bindings".to_owned()
        } else if self.n_ctx > MAX_CONTEXT {
            format!("a context has {} positions, and the kernels count {MAX_CONTEXT}", self.n_ctx)
        } else {
            return Ok(());
        };
        Err(WgpuError::Mismatch { what: "attention".into(), why })
    }

    fn constants(&self) -> Vec<(&'static str, Constant)> {
        vec![
            ("n_head", self.n_head.into()),
            ("n_head_kv", self.n_head_kv.into()),
            ("head_dim", self.head_dim.into()),
            ("gated", self.gated.into()),
            ("n_ctx", self.n_ctx.into()),
            ("page", PAGE.into()),
            ("group", self.group.into()),
            ("cache_f16", (self.cache == CacheType::F16).into()),
            ("qkv_row", self.qkv_row().into()),
        ]
    }

    pub(crate) fn window_constant(&self) -> (&'static str, Constant) {
        // A window as long as the context has no effect.
        ("window", self.window.filter(|&w| w < self.n_ctx).unwrap_or(0).into())
    }

    /// The constants of what happens to a score: its factor, the cap, the sink.
    pub(crate) fn score_constants(&self) -> Vec<(&'static str, Constant)> {
        vec![
            ("scale", self.scale.into()),
            ("cap", self.soft_cap.is_some().into()),
            ("soft_cap", self.soft_cap.unwrap_or(0.0).into()),
            ("sinks", self.sinks.into()),
        ]
    }

    pub(crate) fn rope_constants(&self) -> Vec<(&'static str, Constant)> {
        vec![
            ("n_rot", self.n_rot.into()),
            ("halves", (self.rope_layout == RopeLayout::Halves).into()),
            ("qk_norm", self.qk_norm_eps.is_some().into()),
            ("eps", self.qk_norm_eps.unwrap_or(0.0).into()),
        ]
    }

    /// The key of a kernel of this shape with `more` constants.
    pub(crate) fn key(&self, file: &'static str, more: &[&[(&'static str, Constant)]]) -> PipelineKey {
        let mut key = PipelineKey::new(file, []);
        key.constants = self.constants();
        key.constants.extend(more.iter().copied().flatten().cloned());
        key
    }

    /// The attention of SmolLM-135M, for [`catalogue`](super::catalogue).
    pub(crate) const EXAMPLE: Self = Self {
        n_head: 9,
        n_head_kv: 3,
        head_dim: 64,
        scale: 0.125,
        soft_cap: None,
        sinks: false,
        window: None,
        n_ctx: 2048,
        group: 0,
        n_rot: 64,
        rope_layout: RopeLayout::Interleaved,
        qk_norm_eps: None,
        gated: false,
        cache: CacheType::F16,
        n_trailing: 0,
    };
}

/// The buffers of the fast attention kernels.
#[derive(Debug, Clone, Copy)]
pub struct AttentionBuffers<'a> {
    /// F32 `[n_tokens, qkv_row]`: in each row gates of heads (if any), query heads, key heads, value heads, and the
    /// inputs of the mixer that runs in parallel with attention.
    pub qkv: &'a wgpu::Buffer,
    /// F32 `[n_ctx or more, n_rot / 2, 2]`: the RoPE cos/sin table.
    pub rope: &'a wgpu::Buffer,
    /// F32 `[2, head_dim]`: weights of the RMSNorm of query heads, then of key heads. `Some` exactly if the shape has a
    /// `qk_norm_eps`.
    pub qk_norm: Option<&'a wgpu::Buffer>,
    /// F32 `[n_head, 2]`, of which the first is the sink's score. `Some` exactly if the shape has sinks.
    pub sinks_and_slopes: Option<&'a wgpu::Buffer>,
    /// Cached keys, [`AttentionShape::cache_bytes`] long.
    pub keys: &'a dyn Bind,
    /// Cached values, equally long.
    pub values: &'a dyn Bind,
    /// F32 `[n_tokens, n_head, head_dim]`: the result.
    pub attention_out: &'a wgpu::Buffer,
    /// Partial results of split-KV attention, [`partial_len`](super::partial_len) elements for each token.
    pub partial: &'a wgpu::Buffer,
    /// U32 `[n_tokens]`: the index of the last token that each token attends to if that is behind its own, as in a
    /// bidirectional span; else any number up to it. Only prefill attention reads it.
    pub last_seen: &'a dyn Bind,
    /// The batch; a [`BatchBuffer`](crate::BatchBuffer), with page tables, for kernels that access the KV cache.
    pub batch: &'a wgpu::Buffer,
}

/// [`AttentionBuffers`] with the ranges that the kernels access.
pub(super) struct BoundAttention<'a> {
    pub(super) qkv: (&'a dyn Bind, AccessRange),
    pub(super) rope: (&'a dyn Bind, AccessRange),
    pub(super) qk_norm: Option<(&'a dyn Bind, AccessRange)>,
    pub(super) sinks: Option<(&'a dyn Bind, AccessRange)>,
    pub(super) keys: (&'a dyn Bind, AccessRange),
    pub(super) values: (&'a dyn Bind, AccessRange),
    pub(super) attention_out: (&'a dyn Bind, AccessRange),
    pub(super) partial: (&'a dyn Bind, AccessRange),
    pub(super) last_seen: (&'a dyn Bind, AccessRange),
    pub(super) batch: (&'a dyn Bind, AccessRange),
}

impl<'a> AttentionBuffers<'a> {
    pub(super) fn bound(&self, shape: &AttentionShape) -> BoundAttention<'a> {
        let floats = |n: usize| 4 * n as u64;
        // Kernels access only the KV pages in the page tables, which `BatchBuffer` checks.
        let cache = AccessRange::Fixed(shape.cache_bytes(1));
        BoundAttention {
            qkv: (self.qkv, AccessRange::Tokens(floats(shape.qkv_row()))),
            rope: (self.rope, AccessRange::floats(shape.n_ctx * shape.n_rot)),
            qk_norm: self.qk_norm.map(|norm| (norm as &dyn Bind, AccessRange::floats(2 * shape.head_dim))),
            sinks: self
                .sinks_and_slopes
                .filter(|_| shape.sinks)
                .map(|heads| (heads as &dyn Bind, AccessRange::floats(2 * shape.n_head))),
            keys: (self.keys, cache),
            values: (self.values, cache),
            attention_out: (self.attention_out, AccessRange::Tokens(floats(shape.att_len()))),
            partial: (self.partial, AccessRange::Splits(floats(shape.n_head * (shape.head_dim + 2)))),
            last_seen: (self.last_seen, AccessRange::Tokens(4)),
            batch: (self.batch, AccessRange::Batch),
        }
    }
}

/// The scalar twin of the attention kernels, in 64-bit floats. Keeps keys and values of all sequences.
#[derive(Debug, Clone)]
pub struct AttentionTwin {
    /// The sizes.
    shape: AttentionShape,
    /// The RoPE cos/sin table, as [`AttentionBuffers::rope`].
    rope: Vec<f32>,
    /// Weights of the head norms, as [`AttentionBuffers::qk_norm`]; empty without.
    qk_norm: Vec<f32>,
    /// Sinks, as [`AttentionBuffers::sinks_and_slopes`]; empty without.
    sinks_and_slopes: Vec<f32>,
    /// Keys of each row, `[n_seq, n_head_kv, n_ctx]` rows of `head_dim`.
    keys: Vec<Vec<f64>>,
    /// Values of each row.
    values: Vec<Vec<f64>>,
}

impl AttentionTwin {
    /// A twin with an empty cache of `n_seq` sequences.
    pub fn new(shape: AttentionShape, n_seq: usize, rope: &[f32], qk_norm: &[f32], sinks_and_slopes: &[f32]) -> Self {
        let rows = n_seq * shape.n_head_kv * shape.n_ctx;
        Self {
            shape,
            rope: rope.to_vec(),
            qk_norm: qk_norm.to_vec(),
            sinks_and_slopes: sinks_and_slopes.to_vec(),
            keys: vec![Vec::new(); rows],
            values: vec![Vec::new(); rows],
        }
    }

    fn row(&self, seq: usize, kv_head: usize, pos: usize) -> usize {
        (seq * self.shape.n_head_kv + kv_head) * self.shape.n_ctx + pos
    }

    /// `x` as the KV cache stores it.
    fn rounded(&self, x: f64) -> f64 {
        match self.shape.cache {
            CacheType::F16 => f16::from_f64(x).to_f64(),
            CacheType::F32 => x,
        }
    }

    /// Appends `tokens` to their sequences and returns their results. `qkv` and the result are as in
    /// [`AttentionBuffers`].
    pub fn step(&mut self, tokens: &[BatchToken], qkv: &[f32]) -> Vec<f32> {
        self.step_ahead(tokens, qkv, &vec![0; tokens.len()])
    }

    /// [`step`](Self::step) of prefill attention. `last_seen` as in [`AttentionBuffers`].
    pub fn step_ahead(&mut self, tokens: &[BatchToken], qkv: &[f32], last_seen: &[u32]) -> Vec<f32> {
        let n_head = self.shape.n_head;
        let (dim, row) = (self.shape.head_dim, self.shape.qkv_len());
        let queries = self.append(tokens, qkv);
        let heads = queries.iter().enumerate().flat_map(|(i, q)| {
            let mut result = self.attend(tokens[i / n_head], last_seen[i / n_head] as usize, i % n_head, q);
            if self.shape.gated {
                let gates = &qkv[i / n_head * row + i % n_head * dim..][..dim];
                for (x, gate) in result.iter_mut().zip(gates) {
                    *x /= 1.0 + (-f64::from(*gate)).exp();
                }
            }
            result.into_iter().map(|x| x as f32)
        });
        heads.collect()
    }

    /// Appends `tokens` to their sequences and returns their queries.
    pub fn append(&mut self, tokens: &[BatchToken], qkv: &[f32]) -> Vec<Vec<f64>> {
        let shape = self.shape;
        let mut queries = Vec::new();
        for (token, row) in tokens.iter().zip(qkv.chunks_exact(shape.qkv_row())) {
            for (h, head) in row[..shape.qkv_len()].chunks_exact(shape.head_dim).skip(shape.n_gate()).enumerate() {
                let mut x: Vec<f64> = head.iter().map(|&v| f64::from(v)).collect();
                if h < shape.n_head + shape.n_head_kv {
                    if let Some(eps) = shape.qk_norm_eps {
                        let (q, k) = self.qk_norm.split_at(shape.head_dim);
                        super::rope::norm_twin(&mut x, if h < shape.n_head { q } else { k }, eps);
                    }
                    let angles = &self.rope[token.pos * shape.n_rot..][..shape.n_rot];
                    super::rope::rotate_twin(shape.rope_layout, &mut x, angles);
                }
                if h < shape.n_head {
                    queries.push(x);
                } else {
                    let x = x.into_iter().map(|v| self.rounded(v)).collect();
                    let kv = h - shape.n_head;
                    let at = self.row(token.seq, kv % shape.n_head_kv, token.pos);
                    if kv < shape.n_head_kv { self.keys[at] = x } else { self.values[at] = x }
                }
            }
        }
        queries
    }

    fn attend(&self, token: BatchToken, last_seen: usize, head: usize, q: &[f64]) -> Vec<f64> {
        let shape = self.shape;
        let kv_head = head / (shape.n_head / shape.n_head_kv);
        let seen = shape.seen(token.pos);
        let rows: Vec<usize> =
            (*seen.start()..=last_seen.max(*seen.end())).map(|pos| self.row(token.seq, kv_head, pos)).collect();
        let scores: Vec<f64> = rows
            .iter()
            .map(|&r| q.iter().zip(&self.keys[r]).map(|(a, b)| a * b).sum::<f64>() * f64::from(shape.scale))
            .map(|score| shape.soft_cap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh()))
            .collect();
        let sink = shape.sinks.then(|| f64::from(self.sinks_and_slopes[2 * head]));
        let max = scores.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
        let total = weights.iter().sum::<f64>() + sink.map_or(0.0, |sink| (sink - max).exp());
        (0..shape.head_dim)
            .map(|e| rows.iter().zip(&weights).map(|(&r, w)| w * self.values[r][e]).sum::<f64>() / total)
            .collect()
    }
}
