//! Softmax attention: from `normed` to `mixer_out`, `[n_tokens, n_head * head_dim]`.
//!
//! First the projections of all tokens, the norms of queries and keys and RoPE; keys and values go to the KV cache
//! (`project_and_cache`). Then split-KV attention over the cache: the positions of a sequence are divided into splits of
//! [`SPLIT`], the queries of a tile of tokens that share a KV head take each split in a task of its own, and the partial results are
//! merged (`attend`). Latent attention uses `attend`, too.

use metal_attention_model::{
    AttentionGate, AttentionSpec, AttentionWeights, BatchToken, GateActivation, KvSource, Mask, NormOver, NormWeights,
    Positions, alibi_slopes,
};

use crate::forward::{MIN_PARALLEL_ELEMENTS, MicroBatchRun, ProductInput, add_bias, normalize_row, resize};
use crate::kernels::attention::{self, Attention, Query, SPLIT};
use crate::kernels::elementwise::{ApplyGate, RmsNorm, rope_apply};
use crate::kernels::matmul::{MIN_WORK, MatmulOp, matmul};
use crate::kv_cache::{CacheElement, SharedKvCache, StoreKeyValue, padded};
use crate::layers::PreparedLinear;
use crate::shared::SharedMut;
use crate::simd::Isa;

/// The parameters of `softmax(q K^T) V`, of plain or latent attention.
pub(crate) struct AttentionParams<'a> {
    /// Query heads.
    pub(crate) n_head: usize,
    /// KV heads; `n_head / n_head_kv` query heads share one.
    pub(crate) n_head_kv: usize,
    /// Elements of a query and of a key.
    pub(crate) key_dim: usize,
    /// Elements of a value and of a head's result.
    pub(crate) value_dim: usize,
    /// The positions that a token attends to.
    pub(crate) mask: Mask,
    /// Scores become `cap * tanh(score / cap)`.
    pub(crate) soft_cap: Option<f32>,
    /// ALiBi: what is subtracted from a score for each position of distance, `[n_head]`; empty without ALiBi.
    pub(crate) slopes: Vec<f32>,
    /// Attention sinks: of each head a score without a value, `[n_head]`.
    pub(crate) sinks: Option<&'a [f32]>,
}

impl<'a> AttentionParams<'a> {
    /// The parameters of attention with an ordinary KV cache.
    pub(crate) fn new(w: &'a AttentionWeights<PreparedLinear>) -> Self {
        let a = &w.spec;
        let slopes = match a.positions {
            Positions::None | Positions::Rope(_) => Vec::new(),
            Positions::Alibi { max_bias } => alibi_slopes(a.n_head, max_bias),
        };
        Self {
            n_head: a.n_head,
            n_head_kv: a.n_head_kv,
            key_dim: a.head_dim,
            value_dim: a.head_dim,
            mask: a.mask,
            soft_cap: a.soft_cap,
            slopes,
            sinks: w.sinks.as_deref(),
        }
    }
}

impl MicroBatchRun<'_> {
    /// Computes Q, K and V of all tokens from `normed`: projections with biases, norms, RoPE, and the scale of the scores,
    /// which Q is multiplied by; of context rows K and V alone. Q stays in `q`, its gates in `q_and_gate` or `attention_gate`; K and V are stored in `cache`
    /// where the layer owns it. A layer that shares another layer's cache computes Q and gates only.
    pub(crate) fn project_and_cache<E: CacheElement>(
        &mut self,
        layer: usize,
        w: &AttentionWeights<PreparedLinear>,
        cache: &SharedKvCache<'_, E>,
        tokens: &[BatchToken],
    ) {
        let (a, n_tokens) = (&w.spec, tokens.len());
        // Context rows have no queries.
        let (dim, n_q) = (a.head_dim, if self.context.is_some() { 0 } else { a.n_head * a.head_dim });
        let n_kv = if a.owns_cache() { a.n_head_kv * dim } else { 0 };
        let gate_in_q = a.gate == Some(AttentionGate::InQueries);
        let linears: Vec<_> = [Some(&w.q), w.k.as_ref(), w.v.as_ref(), w.gate.as_ref()].into_iter().flatten().collect();
        self.observe(&linears, ProductInput::Normed);
        let s = &mut *self.scratch;
        resize(&mut s.q, n_tokens * n_q);
        resize(&mut s.q_and_gate, if gate_in_q { n_tokens * 2 * n_q } else { 0 });
        resize(&mut s.attention_gate, n_tokens * a.gate_rows().unwrap_or(0));
        resize(&mut s.k, n_tokens * n_kv);
        resize(&mut s.v, n_tokens * n_kv);
        let y = if gate_in_q { &mut s.q_and_gate } else { &mut s.q };
        let of_queries = [(Some(&w.q), y), (w.gate.as_ref(), &mut s.attention_gate)];
        let of_keys = [(w.k.as_ref(), &mut s.k), (w.v.as_ref(), &mut s.v)];
        let all = of_queries.into_iter().filter(|_| self.context.is_none()).chain(of_keys);
        let mut products = Vec::with_capacity(4);
        for (linear, y) in all {
            if let Some(linear) = linear {
                products.push(MatmulOp { matrix: &linear.weight, rows: 0..n_tokens, y, accumulate: false });
            }
        }
        matmul(self.pool, self.isa, &s.normed, &mut s.q8, &mut products);
        self.record_time("matmul_qkv");

        // Only a temperature needs these; `RoPE` has its table.
        let positions: Vec<usize> = match a.temperature {
            Some(_) => tokens.iter().map(|token| self.position(token).0[0] as usize).collect(),
            None => vec![0; n_tokens],
        };
        let s = &mut *self.scratch;
        let (isa, pages) = (self.isa, self.pages);
        let (q, k, v) = (SharedMut::new(&mut s.q), SharedMut::new(&mut s.k), SharedMut::new(&mut s.v));
        let q_and_gate = SharedMut::new(&mut s.q_and_gate);
        let rope_table = self.weights.rotation_of[layer].map(|i| &s.rope_tables[i]);
        self.pool.for_each_if(n_tokens * (n_q + 2 * n_kv) >= MIN_PARALLEL_ELEMENTS, n_tokens, &|t| {
            // SAFETY: each token owns its rows.
            let (q, k, v) = unsafe { (q.slice(t * n_q, n_q), k.slice(t * n_kv, n_kv), v.slice(t * n_kv, n_kv)) };
            if gate_in_q {
                // SAFETY: each token owns its row.
                let both = unsafe { q_and_gate.slice(t * 2 * n_q, 2 * n_q) };
                add_bias(both, &w.q);
                for (q, both) in q.chunks_exact_mut(dim).zip(both.chunks_exact(2 * dim)) {
                    q.copy_from_slice(&both[..dim]);
                }
            } else {
                add_bias(q, &w.q);
            }
            if let Some(linear) = &w.k {
                add_bias(k, linear);
            }
            match (&w.v, a.kv) {
                (Some(linear), _) => add_bias(v, linear),
                (None, KvSource::KeysAsValues) => v.copy_from_slice(k),
                (None, KvSource::Own | KvSource::Layer(_) | KvSource::Target(_)) => {}
            }
            if let Some(clamp) = a.clamp_qkv {
                [&mut *q, &mut *k, &mut *v].into_iter().flatten().for_each(|x| *x = x.clamp(-clamp, clamp));
            }
            for (row, weights) in [(&mut *q, &w.q_norm), (&mut *k, &w.k_norm)] {
                if row.is_empty() {
                    continue;
                }
                let norm = a.qk_norm.zip(weights.as_ref());
                if let Some((norm, weights)) = norm.filter(|(norm, _)| !norm.after_rope) {
                    normalize_heads(isa, norm.over, weights, dim, row);
                }
                if let (Positions::Rope(rope), Some(rope_table)) = (&a.positions, rope_table) {
                    let half = rope.n_rot / 2;
                    let (cos, sin) = (&rope_table.cos[t * half..][..half], &rope_table.sin[t * half..][..half]);
                    for head in row.chunks_exact_mut(dim) {
                        rope_apply(rope.layout, head, cos, sin);
                    }
                }
                if let Some((norm, weights)) = norm.filter(|(norm, _)| norm.after_rope) {
                    normalize_heads(isa, norm.over, weights, dim, row);
                }
            }
            if let Some(eps) = a.value_norm {
                let ones = vec![1.0; dim];
                for head in v.chunks_exact_mut(dim) {
                    let x = head.to_vec();
                    isa.run(RmsNorm { x: &x, weight: &ones, eps, out: head });
                }
            }
            let BatchToken { seq, pos, .. } = tokens[t];
            let scale = a.scale * a.temperature.map_or(1.0, |temperature| temperature.factor(positions[t]));
            for x in q {
                *x *= scale;
            }
            if a.owns_cache() {
                let page = pages.page(cache.group, seq, pos);
                for h in 0..a.n_head_kv {
                    let (key, value) = (&k[h * dim..][..dim], &v[h * dim..][..dim]);
                    // SAFETY: each token owns its lane of the cached keys and its row of the cached values.
                    isa.run(unsafe { StoreKeyValue::new(cache, page, h, pos, key, value) });
                }
            }
        });
        self.record_time("rope_kv_append");
    }

    /// Attention of the queries `q`, `[n_tokens, n_head * key_dim]`, over the cache, to `mixer_out`,
    /// `[n_tokens, n_head * value_dim]`. `tokens` are those of the rows of `q`; their keys and values are in the cache. `layer`: the
    /// layer's index.
    pub(crate) fn attend<E: CacheElement>(
        &mut self,
        layer: usize,
        a: &AttentionParams<'_>,
        cache: &SharedKvCache<'_, E>,
        tokens: &[BatchToken],
    ) {
        /// The most tokens of one task: enough to reuse keys and values from L1.
        const TILE_TOKENS: usize = 8;
        /// The most floats of partial results in memory at a time, unless a single tile has more; longer work is done in several
        /// rounds.
        const MAX_PARTIAL: usize = 1 << 20;
        /// Consecutive tokens of one sequence, and the splits with positions that one of them attends to.
        #[derive(Clone, Copy)]
        struct QueryTile {
            first_token: usize,
            n_tokens: usize,
            first_split: usize,
            n_splits: usize,
        }
        /// The work of one task: the queries of a tile that share a KV head, against one split.
        struct SplitTask {
            tile: QueryTile,
            /// The KV head.
            head: usize,
            /// The split, counted from the tile's first one.
            split: usize,
            /// The index of the first partial result of this tile and head; `[n_tokens * group, n_splits]` of them follow.
            base: usize,
        }

        let (key_dim, dim, group, pages) = (a.key_dim, a.value_dim, a.n_head / a.n_head_kv, self.pages);
        let len = padded(dim);
        let s = &mut *self.scratch;
        resize(&mut s.mixer_out, tokens.len() * a.n_head * dim);
        let inputs = self.inputs;
        // The first token of each sequence, with which its block begins.
        let is_block = self.spec.takes_context;
        let firsts: Vec<_> =
            tokens.chunk_by(|t, u| t.seq == u.seq).filter(|_| is_block).map(|block| block[0]).collect();
        let seen = |t: &BatchToken| {
            let mut seen = a.mask.seen(t.pos, pages.n_past(t.seq));
            if let Some(first) = firsts.iter().find(|first| first.seq == t.seq) {
                return seen.start.min(first.pos)..pages.n_past(t.seq);
            }
            // With bidirectional attention within a span, its inputs attend to later ones, too. Other masks than causal ones say
            // themselves how far.
            let span = inputs.and_then(|inputs| inputs.of_token(t)).map(|(span, _)| span);
            if let Some(span) = span.filter(|span| a.mask.is_causal() && span.is_bidirectional_in(layer)) {
                seen.end = seen.end.max(span.indices.end);
            }
            seen
        };
        let mut tiles = Vec::new();
        let mut start = 0;
        for run in tokens.chunk_by(|t, u| t.seq == u.seq) {
            for tile in run.chunks(TILE_TOKENS) {
                let first = tile.iter().map(|t| seen(t).start).min().unwrap_or(0) / SPLIT;
                let last = tile.iter().map(|t| seen(t).end.max(1) - 1).max().unwrap_or(0) / SPLIT;
                let n_splits = last - first + 1;
                tiles.push(QueryTile { first_token: start, n_tokens: tile.len(), first_split: first, n_splits });
                start += tile.len();
            }
        }
        let work = tokens.iter().map(|t| seen(t).len()).sum::<usize>() * a.n_head * dim;
        let widest = tiles.iter().map(|t| t.n_tokens * t.n_splits).max().unwrap_or(0) * group * a.n_head_kv * len;
        let tiles_at_once = (MAX_PARTIAL / widest.max(1)).max(1);
        for tiles in tiles.chunks(tiles_at_once) {
            let mut tasks = Vec::new();
            let mut base = 0;
            for &tile in tiles {
                for head in 0..a.n_head_kv {
                    tasks.extend((0..tile.n_splits).map(|split| SplitTask { tile, head, split, base }));
                    base += tile.n_tokens * group * tile.n_splits;
                }
            }
            resize(&mut s.partial, base * len);
            s.max_sum.resize(base, [0.0; 2]);
            let (partial, max_sum) = (SharedMut::new(&mut s.partial), SharedMut::new(&mut s.max_sum));
            let att = SharedMut::new(&mut s.mixer_out);
            let merge =
                |&SplitTask { tile: QueryTile { first_token, n_tokens, n_splits, .. }, head, base, .. }: &SplitTask| {
                    for row in 0..n_tokens * group {
                        let (t, h) = (first_token + row / group, head * group + row % group);
                        let at = base + row * n_splits;
                        let sink = a.sinks.map(|sinks| sinks[h]);
                        // SAFETY: each (token, head) is merged once, after all of its splits.
                        unsafe {
                            let out = att.slice((t * a.n_head + h) * dim, dim);
                            let partial = partial.slice(at * len, n_splits * len);
                            attention::merge(partial, max_sum.slice(at, n_splits), sink, out);
                        }
                    }
                };
            let (q, isa) = (&s.q, self.isa);
            let attend = |i: usize| {
                let SplitTask { tile: QueryTile { first_token, n_tokens, first_split, n_splits }, head, split, base } =
                    tasks[i];
                let queries: Vec<Query> = (0..n_tokens * group)
                    .map(|row| {
                        let (t, h) = (first_token + row / group, head * group + row % group);
                        let at = base + row * n_splits + split;
                        let seen = seen(&tokens[t]);
                        Query {
                            q: q[(t * a.n_head + h) * key_dim..][..key_dim].as_ptr(),
                            first: seen.start,
                            end: seen.end,
                            pos: tokens[t].pos,
                            slope: a.slopes.get(h).copied().unwrap_or(0.0),
                            out: partial.at(at * len),
                            max_sum: max_sum.at(at),
                        }
                    })
                    .collect();
                let (seq, start) = (tokens[first_token].seq, (first_split + split) * SPLIT);
                // SAFETY: no other task writes these queries' results; the cache contains every position that they see.
                isa.run(unsafe {
                    Attention::new(cache, head, pages.pages(cache.group, seq), &queries, a.soft_cap, start)
                });
                // With one split there is nothing to wait for; otherwise the merges are a parallel region of their own.
                if n_splits == 1 {
                    merge(&tasks[i]);
                }
            };
            self.pool.for_each_if(work >= MIN_WORK, tasks.len(), &attend);
            let merges: Vec<_> = tasks.iter().filter(|task| task.tile.n_splits > 1 && task.split == 0).collect();
            self.pool.for_each_if(tokens.len() > 1, merges.len(), &|i| merge(merges[i]));
        }
        self.record_time("attention");
    }
}

impl MicroBatchRun<'_> {
    /// Multiplies attention's result in `mixer_out` by the activation of its gates; nothing where the layer has none.
    pub(crate) fn gate_heads(&mut self, a: &AttentionSpec) {
        let Some(gate) = a.gate else { return };
        let (isa, dim, s) = (self.isa, a.head_dim, &mut *self.scratch);
        let len = a.n_head * dim;
        let (worth, n_tokens) = (s.mixer_out.len() >= MIN_PARALLEL_ELEMENTS, s.mixer_out.len() / len);
        let (both, gates, n_gate) = (&s.q_and_gate, &s.attention_gate, a.gate_rows().unwrap_or(0));
        let att = SharedMut::new(&mut s.mixer_out);
        self.pool.for_each_if(worth, n_tokens, &|t| {
            // SAFETY: each token owns its row.
            let row = unsafe { att.slice(t * len, len) };
            match gate {
                AttentionGate::InQueries => {
                    let both = &both[t * 2 * len..][..2 * len];
                    for (x, both) in row.chunks_exact_mut(dim).zip(both.chunks_exact(2 * dim)) {
                        isa.run(ApplyGate { x, gate: &both[dim..], activation: GateActivation::Sigmoid });
                    }
                }
                AttentionGate::Tensor { width: _, activation } => {
                    isa.run(ApplyGate { x: row, gate: &gates[t * n_gate..][..n_gate], activation });
                }
            }
        });
        self.record_time("attention_gate");
    }
}

/// Normalises one token's row of queries or keys, whose heads have `dim` elements, in place.
fn normalize_heads(isa: Isa, over: NormOver, norm: &NormWeights, dim: usize, row: &mut [f32]) {
    match over {
        // One norm over all heads together.
        NormOver::Row => {
            let x = row.to_vec();
            normalize_row(isa, norm, &x, row);
        }
        // A norm of each head, with the same weights for all.
        NormOver::Head | NormOver::Unweighted => {
            for head in row.chunks_exact_mut(dim) {
                let x = head.to_vec();
                normalize_row(isa, norm, &x, head);
            }
        }
        // A norm of each head, with weights of its own.
        NormOver::EachHead => {
            for (h, head) in row.chunks_exact_mut(dim).enumerate() {
                let of_head = |all: &[f32]| all[h * dim..][..dim].to_vec();
                let (weight, bias) = (of_head(&norm.weight), norm.bias.as_deref().map(of_head));
                let x = head.to_vec();
                normalize_row(isa, &NormWeights { weight, bias, ..*norm }, &x, head);
            }
        }
    }
}
