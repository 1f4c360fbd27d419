//! The forward pass on the CPU, in the order of the paper: embedding; per layer
//! attention and feed-forward, each with its norm and residual; output head.

use metal_attention_model::{
    AttentionSpec, BatchToken, FeedForward, LayerTrace, Mixer, ModelSpec, PageTable, Profiler, Rope,
};

use crate::activations::Q8Activations;
use crate::kernels::attention::{self, Attention, Query, SPLIT};
use crate::kernels::elementwise::{FfnSilu, RmsNorm, rope_apply};
use crate::kernels::matmul::{MIN_WORK, Product, embedding, matmul};
use crate::kv_cache::{Element, SharedCache, StoreKeyValue, padded};
use crate::layers::{PreparedLayer, PreparedLinear, PreparedWeights};
use crate::observer::{MatrixInput, Observer};
use crate::pool::ThreadPool;
use crate::shared::SharedMut;
use crate::simd::Isa;

/// Elements that are worth spreading over threads where little is done with each: a few microseconds.
const MIN_ELEMENTS: usize = 4096;

/// Activations of one run through the layers; buffers grow to the largest batch
/// and are kept.
#[derive(Default)]
pub(crate) struct Scratch {
    /// Residual stream, `[n_tokens, n_embd]`.
    x: Vec<f32>,
    /// Normalised input of a mixer or feed-forward, `[n_tokens, n_embd]`.
    h: Vec<f32>,
    /// `[n_tokens, n_head * head_dim]`
    q: Vec<f32>,
    /// `[n_tokens, n_head_kv * head_dim]`
    k: Vec<f32>,
    /// `[n_tokens, n_head_kv * head_dim]`
    v: Vec<f32>,
    /// Attention's result, `[n_tokens, n_head * head_dim]`.
    att: Vec<f32>,
    /// `[n_tokens, n_ff]`
    gate: Vec<f32>,
    /// `[n_tokens, n_ff]`
    up: Vec<f32>,
    /// The input of the next product in 8 bits.
    q8: Q8Activations,
    /// Cosines and sines of the RoPE angles, `[n_tokens, n_rot / 2]` each.
    cos: Vec<f32>,
    sin: Vec<f32>,
    /// Splits of attention before they are joined.
    partial: Vec<f32>,
    max_sum: Vec<[f32; 2]>,
}

impl Scratch {
    pub(crate) fn bytes(&self) -> usize {
        let floats = [
            &self.x,
            &self.h,
            &self.q,
            &self.k,
            &self.v,
            &self.att,
            &self.gate,
            &self.up,
            &self.cos,
            &self.sin,
            &self.partial,
        ];
        floats.iter().map(|v| 4 * v.capacity()).sum::<usize>() + 8 * self.max_sum.capacity() + self.q8.bytes()
    }
}

/// One run of a few tokens through all layers. Runs may go on side by side, with tokens of different sequences.
pub(crate) struct Run<'a> {
    pub(crate) spec: &'a ModelSpec,
    pub(crate) weights: &'a PreparedWeights,
    pub(crate) pool: &'a ThreadPool,
    pub(crate) isa: Isa,
    /// Where the tokens lie in the KV cache, those of the batch included.
    pub(crate) pages: &'a PageTable,
    pub(crate) s: &'a mut Scratch,
    /// Takes a lap after every kernel, where somebody asked for a profile.
    pub(crate) profiler: Option<&'a mut Profiler>,
    /// Sees the input of every matrix, where somebody asked for it.
    pub(crate) observer: Option<&'a mut Observer>,
}

impl Run<'_> {
    /// Evaluates `tokens` and writes the logits of those that want them; nothing of use where the work of the pool was
    /// cancelled.
    pub(crate) fn forward<E: Element>(
        mut self,
        caches: &[SharedCache<'_, E>],
        tokens: &[BatchToken],
        logits: &mut [f32],
        mut trace: Option<LayerTrace<'_>>,
    ) {
        let (spec, weights) = (self.spec, self.weights);
        let n_embd = spec.n_embd;
        let mut tokens = tokens.to_vec();
        let n_tokens = tokens.len() as u64;

        resize(&mut self.s.x, tokens.len() * n_embd);
        for (token, row) in tokens.iter().zip(self.s.x.chunks_exact_mut(n_embd)) {
            embedding(&weights.token_embd, token.id as usize, row);
        }
        self.lap("embedding");
        let mut rope = None;
        for (i, ((layer, w), cache)) in spec.layers.iter().zip(&weights.layers).zip(caches).enumerate() {
            let Mixer::Attention(a) = &layer.mixer else { unreachable!("set-up accepted attention only") };
            if rope != Some(a.rope) {
                self.fill_rope_table(&a.rope, &tokens);
                rope = Some(a.rope);
                self.lap("rope_table");
            }
            self.project_and_cache(a, w, cache, &tokens);
            if i + 1 == spec.n_layer() && trace.is_none() {
                // What follows concerns only the tokens whose logits are wanted.
                self.keep_wanted_rows(&mut tokens);
            }
            if tokens.is_empty() {
                self.pool.watch().advance(n_tokens);
                return;
            }
            self.attend(a, cache, &tokens);
            self.lap("attention");
            self.add_product(&w.out, Input::Att);
            self.lap("matmul_attn_output");
            self.feed_forward(&layer.feed_forward, w);
            if self.pool.is_cancelled() {
                return;
            }
            self.pool.watch().advance(n_tokens);
            if let Some(trace) = trace.as_deref_mut() {
                trace(i, &self.s.x);
            }
        }
        if trace.is_some() {
            self.keep_wanted_rows(&mut tokens);
        }
        if !tokens.is_empty() {
            self.output_head(logits);
        }
    }

    /// `kernel` has run since the last lap.
    fn lap(&mut self, kernel: &'static str) {
        if let Some(profiler) = &mut self.profiler {
            profiler.lap(kernel);
        }
    }

    /// Cosines and sines of every token's RoPE angles, with YaRN's factor on both.
    fn fill_rope_table(&mut self, rope: &Rope, tokens: &[BatchToken]) {
        let (frequencies, length) = rope.frequencies(self.weights.rope_freqs.as_deref());
        self.s.cos.clear();
        self.s.sin.clear();
        for token in tokens {
            for f in &frequencies {
                // In f64: at position 100 000 an f32 angle is off by a hundredth.
                let (sin, cos) = (token.pos as f64 * f).sin_cos();
                self.s.cos.push((cos * length) as f32);
                self.s.sin.push((sin * length) as f32);
            }
        }
    }

    /// Q, K and V of all tokens; K and V go to the cache.
    fn project_and_cache<E: Element>(
        &mut self,
        a: &AttentionSpec,
        w: &PreparedLayer,
        cache: &SharedCache<'_, E>,
        tokens: &[BatchToken],
    ) {
        let n_tokens = tokens.len();
        let (dim, n_q, n_kv) = (a.head_dim, a.n_head * a.head_dim, a.n_head_kv * a.head_dim);
        self.norm(&w.mixer_norm);
        self.lap("rmsnorm");
        self.show(&[&w.q, &w.k, &w.v], Input::Normed);
        let s = &mut *self.s;
        resize(&mut s.q, n_tokens * n_q);
        resize(&mut s.k, n_tokens * n_kv);
        resize(&mut s.v, n_tokens * n_kv);
        let mut products = [
            Product { matrix: &w.q.weight, y: &mut s.q, accumulate: false },
            Product { matrix: &w.k.weight, y: &mut s.k, accumulate: false },
            Product { matrix: &w.v.weight, y: &mut s.v, accumulate: false },
        ];
        matmul(self.pool, self.isa, &s.h, &mut s.q8, &mut products);
        self.lap("matmul_qkv");

        let s = &mut *self.s;
        let (eps, isa, half) = (self.spec.norm_eps, self.isa, a.rope.n_rot / 2);
        let pages = self.pages;
        let (q, k, v) = (SharedMut::new(&mut s.q), SharedMut::new(&mut s.k), SharedMut::new(&mut s.v));
        let (cos, sin) = (&s.cos, &s.sin);
        self.pool.for_each_if(n_tokens * (n_q + 2 * n_kv) >= MIN_ELEMENTS, n_tokens, &|t| {
            // SAFETY: each token owns its rows.
            let (q, k, v) = unsafe { (q.slice(t * n_q, n_q), k.slice(t * n_kv, n_kv), v.slice(t * n_kv, n_kv)) };
            for (row, linear) in [(&mut *q, &w.q), (&mut *k, &w.k), (&mut *v, &w.v)] {
                add_bias(row, linear);
            }
            let (cos, sin) = (&cos[t * half..][..half], &sin[t * half..][..half]);
            for (row, norm) in [(&mut *q, &w.q_norm), (&mut *k, &w.k_norm)] {
                for head in row.chunks_exact_mut(dim) {
                    if let Some(weight) = norm {
                        let x = head.to_vec();
                        isa.run(RmsNorm { x: &x, weight, eps, out: head });
                    }
                    rope_apply(a.rope.layout, head, cos, sin);
                }
            }
            for x in q {
                *x *= a.scale;
            }
            let BatchToken { seq, pos, .. } = tokens[t];
            let page = pages.page(seq, pos);
            for h in 0..a.n_head_kv {
                let (key, value) = (&k[h * dim..][..dim], &v[h * dim..][..dim]);
                // SAFETY: each token owns its lane of the keys and its row of the values.
                isa.run(unsafe { StoreKeyValue::new(cache, page, h, pos, key, value) });
            }
        });
        self.lap("rope_kv_append");
    }

    /// Drops the rows of tokens whose logits nobody asked for.
    fn keep_wanted_rows(&mut self, tokens: &mut Vec<BatchToken>) {
        for rows in [&mut self.s.x, &mut self.s.q] {
            let len = rows.len() / tokens.len();
            let mut kept = 0;
            for (i, _) in tokens.iter().enumerate().filter(|(_, t)| t.logits) {
                rows.copy_within(i * len..(i + 1) * len, kept * len);
                kept += 1;
            }
            rows.truncate(kept * len);
        }
        tokens.retain(|t| t.logits);
    }

    /// Attention of all tokens' queries over the cache.
    fn attend<E: Element>(&mut self, a: &AttentionSpec, cache: &SharedCache<'_, E>, tokens: &[BatchToken]) {
        /// Tokens of one task at most: enough to reuse keys and values from L1.
        const TILE: usize = 8;
        /// Floats of split results held at once.
        const PARTIAL: usize = 1 << 20;
        /// Some neighbouring tokens of one sequence, and the splits that these see.
        #[derive(Clone, Copy)]
        struct Tile {
            first_token: usize,
            n_tokens: usize,
            first_split: usize,
            n_splits: usize,
        }
        /// A tile, KV head and split. The tile's results for the head are at `base`, rows of `n_splits` parts.
        struct Task {
            tile: Tile,
            head: usize,
            split: usize,
            base: usize,
        }

        let (dim, group, pages) = (a.head_dim, a.n_head / a.n_head_kv, self.pages);
        let len = padded(dim);
        let s = &mut *self.s;
        resize(&mut s.att, tokens.len() * a.n_head * dim);
        let mut tiles = Vec::new();
        let mut start = 0;
        for run in tokens.chunk_by(|t, u| t.seq == u.seq) {
            for tile in run.chunks(TILE) {
                let first = tile.iter().map(|t| first_seen(a, t.pos)).min().unwrap_or(0) / SPLIT;
                let last = tile.iter().map(|t| t.pos).max().unwrap_or(0) / SPLIT;
                let n_splits = last - first + 1;
                tiles.push(Tile { first_token: start, n_tokens: tile.len(), first_split: first, n_splits });
                start += tile.len();
            }
        }
        let seen: usize = tokens.iter().map(|t| t.pos + 1 - first_seen(a, t.pos)).sum();
        let work = seen * a.n_head * dim;
        let widest = tiles.iter().map(|t| t.n_tokens * t.n_splits).max().unwrap_or(0) * group * a.n_head_kv * len;
        let tiles_at_once = (PARTIAL / widest.max(1)).max(1);
        for tiles in tiles.chunks(tiles_at_once) {
            let mut tasks = Vec::new();
            let mut base = 0;
            for &tile in tiles {
                for head in 0..a.n_head_kv {
                    tasks.extend((0..tile.n_splits).map(|split| Task { tile, head, split, base }));
                    base += tile.n_tokens * group * tile.n_splits;
                }
            }
            resize(&mut s.partial, base * len);
            s.max_sum.resize(base, [0.0; 2]);
            let (partial, max_sum) = (SharedMut::new(&mut s.partial), SharedMut::new(&mut s.max_sum));
            let att = SharedMut::new(&mut s.att);
            let join = |&Task { tile: Tile { first_token, n_tokens, n_splits, .. }, head, base, .. }: &Task| {
                for row in 0..n_tokens * group {
                    let (t, h) = (first_token + row / group, head * group + row % group);
                    let at = base + row * n_splits;
                    // SAFETY: each (token, head) is joined once, after all of its splits.
                    unsafe {
                        let out = att.slice((t * a.n_head + h) * dim, dim);
                        attention::merge(partial.slice(at * len, n_splits * len), max_sum.slice(at, n_splits), out);
                    }
                }
            };
            let (q, isa) = (&s.q, self.isa);
            let attend = |i: usize| {
                let Task { tile: Tile { first_token, n_tokens, first_split, n_splits }, head, split, base } = tasks[i];
                let queries: Vec<Query> = (0..n_tokens * group)
                    .map(|row| {
                        let (t, h) = (first_token + row / group, head * group + row % group);
                        let at = base + row * n_splits + split;
                        Query {
                            q: q[(t * a.n_head + h) * dim..][..dim].as_ptr(),
                            first: first_seen(a, tokens[t].pos),
                            end: tokens[t].pos + 1,
                            out: partial.at(at * len),
                            max_sum: max_sum.at(at),
                        }
                    })
                    .collect();
                let (seq, start) = (tokens[first_token].seq, (first_split + split) * SPLIT);
                // SAFETY: the queries' results are this task's own; the cache holds every position below `end`.
                isa.run(unsafe { Attention::new(cache, head, pages.pages(seq), &queries, start) });
                if n_splits == 1 {
                    join(&tasks[i]);
                }
            };
            self.pool.for_each_if(work >= MIN_WORK, tasks.len(), &attend);
            let heads: Vec<_> = tasks.iter().filter(|task| task.tile.n_splits > 1 && task.split == 0).collect();
            self.pool.for_each_if(tokens.len() > 1, heads.len(), &|i| join(heads[i]));
        }
    }

    /// `x += down(activation(gate(norm(x))) * up(norm(x)))`
    fn feed_forward(&mut self, spec: &FeedForward, w: &PreparedLayer) {
        let FeedForward::Gated { n_ff, .. } = *spec else { unreachable!("set-up accepted gated feed-forward only") };
        self.norm(&w.feed_forward_norm);
        self.lap("rmsnorm");
        self.show(&[&w.gate, &w.up], Input::Normed);
        let s = &mut *self.s;
        let n_tokens = s.x.len() / self.spec.n_embd;
        resize(&mut s.gate, n_tokens * n_ff);
        resize(&mut s.up, n_tokens * n_ff);
        let mut products = [
            Product { matrix: &w.gate.weight, y: &mut s.gate, accumulate: false },
            Product { matrix: &w.up.weight, y: &mut s.up, accumulate: false },
        ];
        matmul(self.pool, self.isa, &s.h, &mut s.q8, &mut products);
        self.lap("matmul_gate_up");
        let s = &mut *self.s;
        let (isa, gate, up) = (self.isa, SharedMut::new(&mut s.gate), SharedMut::new(&mut s.up));
        self.pool.for_each_if(n_tokens * n_ff >= MIN_ELEMENTS, n_tokens, &|t| {
            // SAFETY: each token owns its rows.
            let (gate, up) = unsafe { (gate.slice(t * n_ff, n_ff), up.slice(t * n_ff, n_ff)) };
            add_bias(gate, &w.gate);
            add_bias(up, &w.up);
            isa.run(FfnSilu { gate, up });
        });
        self.lap("ffn_silu");
        self.add_product(&w.down, Input::Gate);
        self.lap("matmul_down");
    }

    /// Logits of the tokens that are left.
    fn output_head(&mut self, logits: &mut [f32]) {
        let head = &self.weights.output;
        self.norm(&self.weights.output_norm);
        self.lap("rmsnorm");
        self.show(&[head], Input::Normed);
        let mut products = [Product { matrix: &head.weight, y: logits, accumulate: false }];
        matmul(self.pool, self.isa, &self.s.h, &mut self.s.q8, &mut products);
        self.lap("matmul_output");
    }

    /// Shows the observer what the matrices are multiplied by.
    fn show(&mut self, linears: &[&PreparedLinear], input: Input) {
        let Some(observer) = &mut self.observer else { return };
        let x = match input {
            Input::Normed => &self.s.h,
            Input::Att => &self.s.att,
            Input::Gate => &self.s.gate,
        };
        for linear in linears {
            observer(MatrixInput { matrix: &linear.name, x, n_in: linear.weight.n_in() });
        }
    }

    /// `h = RMSNorm(x) * weight`, row by row.
    fn norm(&mut self, weight: &[f32]) {
        let (n_embd, eps, isa) = (self.spec.n_embd, self.spec.norm_eps, self.isa);
        let s = &mut *self.s;
        resize(&mut s.h, s.x.len());
        let (x, h) = (&s.x, SharedMut::new(&mut s.h));
        self.pool.for_each_if(x.len() >= MIN_ELEMENTS, x.len() / n_embd, &|t| {
            // SAFETY: each token owns its row.
            let out = unsafe { h.slice(t * n_embd, n_embd) };
            isa.run(RmsNorm { x: &x[t * n_embd..][..n_embd], weight, eps, out });
        });
    }

    /// `x += W input + b`, the way back into the residual stream.
    fn add_product(&mut self, linear: &PreparedLinear, input: Input) {
        self.show(&[linear], input);
        let s = &mut *self.s;
        let x = match input {
            Input::Normed => &s.h,
            Input::Att => &s.att,
            Input::Gate => &s.gate,
        };
        let mut products = [Product { matrix: &linear.weight, y: &mut s.x, accumulate: true }];
        matmul(self.pool, self.isa, x, &mut s.q8, &mut products);
        for row in s.x.chunks_exact_mut(self.spec.n_embd) {
            add_bias(row, linear);
        }
    }
}

/// Which buffer a matrix is multiplied by.
#[derive(Clone, Copy)]
enum Input {
    Normed,
    Att,
    Gate,
}

/// First position that a token at `pos` sees.
fn first_seen(a: &AttentionSpec, pos: usize) -> usize {
    a.window.map_or(0, |window| (pos + 1).saturating_sub(window))
}

fn add_bias(row: &mut [f32], linear: &PreparedLinear) {
    if let Some(bias) = &linear.bias {
        for (x, b) in row.iter_mut().zip(bias) {
            *x += b;
        }
    }
}

/// Sets the length; what was there stays as it is, to be overwritten.
fn resize(v: &mut Vec<f32>, len: usize) {
    v.resize(len, 0.0);
}
