//! The forward pass on the CPU, in the order of the paper: embedding; per layer mixer and feed-forward, each with its norms
//! and its way into the residual stream; output head.

mod attention;
mod channel_mix;
mod delta_rule;
mod experts;
mod feed_forward;
mod latent_attention;
mod mamba;
mod mamba2;
mod per_layer;
mod rwkv6;
mod rwkv7;
mod short_conv;
mod streams;
mod token_shift;

use metal_attention_model::{
    BatchToken, LayerSpec, LayerTrace, LayerWeights, Mixer, MixerWeights, ModelSpec, Norm, NormKind, NormWeights,
    PageTable, Profiler, Residual,
};

use crate::activations::Q8Activations;
use crate::kernels::elementwise::{LayerNorm, RmsNorm};
use crate::kernels::matmul::{MatmulOp, embedding, matmul};
use crate::kv_cache::{CacheElement, SharedKvCache};
use crate::layers::{PreparedLinear, PreparedWeights};
use crate::observer::{MatrixInput, Observer};
use crate::pool::ThreadPool;
use crate::shared::SharedMut;
use crate::simd::Isa;
use crate::state::SharedStateSlots;

/// Elements that are worth spreading over threads where little is done with each: a few microseconds.
const MIN_ELEMENTS: usize = 4096;

/// Elements of states, over all tokens, whose steps are worth spreading over threads.
const MIN_STEPS: usize = 1 << 15;

/// Activations of one run through the layers; buffers grow to the largest batch
/// and are kept.
#[derive(Default)]
pub(crate) struct Scratch {
    /// Residual stream, `[n_tokens, n_embd]`.
    x: Vec<f32>,
    /// Normalised input of a mixer or feed-forward, `[n_tokens, n_embd]`.
    normed: Vec<f32>,
    /// What a mixer or feed-forward gives, where it is not added to `x` at once, `[n_tokens, n_embd]`.
    branch_out: Vec<f32>,
    /// `[n_tokens, n_head * head_dim]`
    q: Vec<f32>,
    /// `[n_tokens, n_head_kv * head_dim]`
    k: Vec<f32>,
    /// `[n_tokens, n_head_kv * head_dim]`
    v: Vec<f32>,
    /// Queries of attention with the gate of each head after it, `[n_tokens, n_head * 2 * head_dim]`.
    q_and_gate: Vec<f32>,
    /// Attention's result, `[n_tokens, n_head * head_dim]`.
    mixer_out: Vec<f32>,
    /// `[n_tokens, n_ff]`
    gate: Vec<f32>,
    /// `[n_tokens, n_ff]`
    up: Vec<f32>,
    /// The input of the next product in 8 bits.
    q8: Q8Activations,
    /// Cosines and sines of the angles of each rotation, `[n_tokens, n_rot / 2]` each.
    rope_tables: Vec<RopeTable>,
    /// Splits of attention before they are joined.
    partial: Vec<f32>,
    max_sum: Vec<[f32; 2]>,
    experts: experts::ExpertScratch,
    latent: latent_attention::LatentScratch,
    /// Inputs of every layer's own embedding, `[n_tokens, n_layer * width]`.
    per_layer: Vec<f32>,
    streams: streams::StreamScratch,
    delta: delta_rule::DeltaScratch,
    mamba: mamba::MambaScratch,
    rwkv: token_shift::RwkvScratch,
}

/// Cosines and sines of the angles of a batch's tokens.
#[derive(Default)]
struct RopeTable {
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl Scratch {
    pub(crate) fn bytes(&self) -> usize {
        let floats = [
            &self.x,
            &self.normed,
            &self.branch_out,
            &self.q,
            &self.k,
            &self.v,
            &self.q_and_gate,
            &self.mixer_out,
            &self.gate,
            &self.up,
            &self.partial,
            &self.per_layer,
        ];
        let rope_tables = self.rope_tables.iter().map(|t| 4 * (t.cos.capacity() + t.sin.capacity())).sum::<usize>();
        let own = floats.iter().map(|v| 4 * v.capacity()).sum::<usize>() + 8 * self.max_sum.capacity() + rope_tables;
        own + self.q8.bytes()
            + self.experts.bytes()
            + self.latent.bytes()
            + self.streams.bytes()
            + self.delta.bytes()
            + self.mamba.bytes()
            + self.rwkv.bytes()
    }
}

/// What a run leaves of each token that is wanted.
pub(crate) enum RequestedOutput<'a> {
    /// Logits, `[n_wanted, n_vocab]`.
    Logits(&'a mut [f32]),
    /// States after the last norm, `[n_wanted, n_embd]`.
    Hidden(&'a mut [f32]),
}

/// One run of a few tokens through all layers. Runs may go on side by side, with tokens of different sequences.
pub(crate) struct MicroBatchRun<'a> {
    pub(crate) spec: &'a ModelSpec,
    pub(crate) weights: &'a PreparedWeights,
    pub(crate) pool: &'a ThreadPool,
    pub(crate) isa: Isa,
    /// Where the tokens lie in the KV cache, those of the batch included.
    pub(crate) pages: &'a PageTable,
    /// The recurrent states of their sequences, and those that come of them.
    pub(crate) states: &'a SharedStateSlots<'a>,
    pub(crate) scratch: &'a mut Scratch,
    /// Takes a lap after every kernel, where somebody asked for a profile.
    pub(crate) profiler: Option<&'a mut Profiler>,
    /// Sees the input of every matrix, where somebody asked for it.
    pub(crate) observer: Option<&'a mut Observer>,
}

impl MicroBatchRun<'_> {
    /// Evaluates `tokens` and writes what is wanted; nothing of use where the work of the pool was cancelled. `caches`: of
    /// each layer its own or that of the layer whose keys and values it reads, where it reads any.
    pub(crate) fn forward<E: CacheElement>(
        mut self,
        caches: &[Option<&SharedKvCache<'_, E>>],
        tokens: &[BatchToken],
        wanted: RequestedOutput<'_>,
        mut trace: Option<LayerTrace<'_>>,
    ) {
        let (spec, weights) = (self.spec, self.weights);
        let mut tokens = tokens.to_vec();
        let n_tokens = tokens.len() as u64;
        self.embed(&tokens);
        self.fill_rope_tables(&tokens);
        for (i, ((layer, w), cache)) in spec.layers.iter().zip(&weights.layers).zip(caches).enumerate() {
            let last = i + 1 == spec.n_layer() && trace.is_none();
            // Rows that nobody asked for go as early as can be: a feed-forward with a state needs them still.
            let drops = last && layer.feed_forward.state_elements() == 0;
            self.predict_streams(w);
            self.normalize_input(layer.mixer_norm.as_ref(), w.mixer_norm.as_ref());
            self.laurel(w);
            match (&layer.mixer, &w.mixer, cache) {
                (Mixer::Attention(a), MixerWeights::Attention(w), Some(cache)) => {
                    self.project_and_cache(i, a, w, cache, &tokens);
                    if drops {
                        self.drop_unrequested_rows(&mut tokens);
                    }
                    if !tokens.is_empty() {
                        self.attend(&attention::AttentionParams::new(a, w), cache, &tokens);
                        self.gate_heads(a);
                    }
                }
                (Mixer::LatentAttention(a), MixerWeights::LatentAttention(w), Some(cache)) => {
                    self.compress_and_cache(i, a, w, cache, &tokens);
                    if drops {
                        self.drop_unrequested_rows(&mut tokens);
                    }
                    if !tokens.is_empty() {
                        self.attend_latent(a, w, cache, &tokens);
                    }
                }
                (Mixer::ShortConv(conv), MixerWeights::ShortConv(w), None) => self.short_conv(i, *conv, w, &tokens),
                (Mixer::Mamba(m), MixerWeights::Mamba(w), None) => self.mamba(i, m, w, &tokens),
                (Mixer::Mamba2(m), MixerWeights::Mamba2(w), None) => self.mamba2(i, m, w, &tokens),
                (Mixer::AttentionAndMamba2(both), MixerWeights::AttentionAndMamba2(w), Some(cache)) => {
                    self.mamba2(i, &both.mamba2, &w.mamba2, &tokens);
                    std::mem::swap(&mut self.scratch.mixer_out, &mut self.scratch.mamba.parallel_out);
                    self.project_and_cache(i, &both.attention, &w.attention, cache, &tokens);
                    if last {
                        self.drop_unrequested_rows(&mut tokens);
                    }
                    if !tokens.is_empty() {
                        self.attend(&attention::AttentionParams::new(&both.attention, &w.attention), cache, &tokens);
                    }
                }
                (Mixer::DeltaRule(spec), MixerWeights::DeltaRule(w), None) => self.delta_rule(i, spec, w, &tokens),
                (Mixer::Rwkv6(spec), MixerWeights::Rwkv6(w), None) => self.rwkv6(i, spec, w, &tokens),
                (Mixer::Rwkv7(spec), MixerWeights::Rwkv7(w), None) => self.rwkv7(i, spec, w, &tokens),
                (Mixer::None, MixerWeights::None, None) => {}
                (
                    Mixer::Attention(_)
                    | Mixer::LatentAttention(_)
                    | Mixer::ShortConv(_)
                    | Mixer::Mamba(_)
                    | Mixer::Mamba2(_)
                    | Mixer::AttentionAndMamba2(_)
                    | Mixer::DeltaRule(_)
                    | Mixer::Rwkv6(_)
                    | Mixer::Rwkv7(_)
                    | Mixer::None,
                    _,
                    _,
                ) => {
                    panic!("the weights are those of the layers: both were made from one description")
                }
            }
            // What attends has dropped the rows that nobody asked for before it did.
            if drops && tokens.iter().any(|t| !t.logits) {
                self.drop_unrequested_rows(&mut tokens);
            }
            if tokens.is_empty() {
                self.pool.watch().advance(n_tokens);
                return;
            }
            self.finish_layer(i, layer, w, &mut tokens, last);
            if self.pool.is_cancelled() {
                return;
            }
            self.pool.watch().advance(n_tokens);
            if tokens.is_empty() {
                return;
            }
            if let Some(trace) = trace.as_deref_mut() {
                trace(i, &self.scratch.x);
            }
        }
        if trace.is_some() {
            self.drop_unrequested_rows(&mut tokens);
        }
        if !tokens.is_empty() {
            self.output(wanted);
        }
    }

    /// `kernel` has run since the last lap.
    fn lap(&mut self, kernel: &'static str) {
        if let Some(profiler) = &mut self.profiler {
            profiler.lap(kernel);
        }
    }

    /// `x = norm(scale * table[id] + types[0] + positions[pos])`, and what comes of it before the first layer.
    fn embed(&mut self, tokens: &[BatchToken]) {
        let (spec, weights, n_embd) = (self.spec, self.weights, self.spec.n_embd);
        let mut position = vec![0.0; if weights.positions.is_some() { n_embd } else { 0 }];
        resize(&mut self.scratch.x, tokens.len() * n_embd);
        for (token, row) in tokens.iter().zip(self.scratch.x.chunks_exact_mut(n_embd)) {
            embedding(&weights.token_embd, token.id as usize, row);
            if spec.embedding.scale != 1.0 {
                scale_by(row, spec.embedding.scale);
            }
            if let Some(token_type) = &weights.token_type {
                add(row, token_type);
            }
            if let Some(table) = &weights.positions {
                embedding(table, token.pos, &mut position);
                add(row, &position);
            }
        }
        if let (Some(norm), Some(w)) = (&spec.embedding.norm, &weights.embedding_norm) {
            self.normalize_input(Some(norm), Some(w));
            std::mem::swap(&mut self.scratch.x, &mut self.scratch.normed);
        }
        self.lap("embedding");
        self.compute_per_layer_inputs(tokens);
        self.init_streams();
    }

    /// Cosines and sines of every token's angles, of each rotation, with its factor on both.
    fn fill_rope_tables(&mut self, tokens: &[BatchToken]) {
        self.scratch.rope_tables.resize_with(self.weights.rotations.len(), RopeTable::default);
        for (rope_tables, rotation) in self.scratch.rope_tables.iter_mut().zip(&self.weights.rotations) {
            rope_tables.cos.clear();
            rope_tables.sin.clear();
            for token in tokens {
                for f in &rotation.frequencies {
                    // In f64: at position 100 000 an f32 angle is off by a hundredth.
                    let (sin, cos) = (token.pos as f64 * f).sin_cos();
                    rope_tables.cos.push((cos * rotation.length) as f32);
                    rope_tables.sin.push((sin * rotation.length) as f32);
                }
            }
        }
        if !self.weights.rotations.is_empty() {
            self.lap("rope_table");
        }
    }

    /// The mixer's way back into the residual stream, from attention's result on, the feed-forward, and what else the layer
    /// does. In the last layer a feed-forward with a state leaves only the tokens that are wanted.
    fn finish_layer(
        &mut self,
        i: usize,
        layer: &LayerSpec,
        w: &LayerWeights<PreparedLinear>,
        tokens: &mut Vec<BatchToken>,
        last: bool,
    ) {
        let scale = match layer.residual {
            Residual::Sequential { scale } => scale,
            Residual::Parallel | Residual::PostNorm { .. } => 1.0,
        };
        let parallel = layer.residual == Residual::Parallel;
        let mixer_post = layer.mixer_post_norm.as_ref().zip(w.mixer_post_norm.as_ref());
        let straight = scale == 1.0 && mixer_post.is_none() && !(parallel && layer.feed_forward_norm.is_some());
        if let Some(out) = w.mixer.out() {
            self.product(out, ProductInput::MixerOut, straight);
            self.lap("matmul_attn_output");
        }
        if let MixerWeights::AttentionAndMamba2(both) = &w.mixer {
            self.add_product(&both.mamba2.out, ProductInput::ParallelOut, straight);
            self.lap("matmul_ssm_out");
        }
        // Side by side: what the feed-forward reads does not have it yet.
        let waits = (!straight && parallel).then(|| std::mem::take(&mut self.scratch.branch_out));
        if w.mixer.out().is_some() && !straight && !parallel {
            self.add_branch_out(mixer_post, scale);
        }
        self.add_laurel();
        if let (Residual::PostNorm { mixer, .. }, Some([norm, _])) = (&layer.residual, &w.sum_norms) {
            self.normalize_input(Some(mixer), Some(norm));
            std::mem::swap(&mut self.scratch.x, &mut self.scratch.normed);
        }
        if layer.feed_forward_norm.is_some() || !parallel {
            self.normalize_input(layer.feed_forward_norm.as_ref(), w.feed_forward_norm.as_ref());
        }
        let post = layer.feed_forward_post_norm.as_ref().zip(w.feed_forward_post_norm.as_ref());
        let straight = scale == 1.0 && post.is_none();
        let context = channel_mix::LayerContext { layer: i, state_start: layer.mixer.state_elements(), last };
        let something = self.feed_forward(&context, &layer.feed_forward, &w.feed_forward, tokens, straight);
        if something && !straight {
            self.add_branch_out(post, scale);
        }
        if let Some(mixer) = waits {
            self.scratch.branch_out = mixer;
            self.add_branch_out(mixer_post, scale);
        }
        if let (Residual::PostNorm { feed_forward, .. }, Some([_, norm])) = (&layer.residual, &w.sum_norms) {
            self.normalize_input(Some(feed_forward), Some(norm));
            std::mem::swap(&mut self.scratch.x, &mut self.scratch.normed);
        }
        self.add_per_layer_embedding(i, w);
        if w.output_scale != 1.0 {
            scale_by(&mut self.scratch.x, w.output_scale);
        }
    }

    /// Drops the rows of tokens that nobody asked for.
    fn drop_unrequested_rows(&mut self, tokens: &mut Vec<BatchToken>) {
        let s = &mut *self.scratch;
        let n_streams = self.spec.embedding.streams.map_or(0, |streams| streams.n);
        let mut buffers = vec![
            &mut s.x,
            &mut s.normed,
            &mut s.q,
            &mut s.q_and_gate,
            &mut s.mixer_out,
            &mut s.mamba.parallel_out,
            &mut s.per_layer,
        ];
        buffers.extend(s.streams.rows(n_streams));
        for rows in buffers {
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

    /// What is wanted of the tokens that are left.
    fn output(&mut self, wanted: RequestedOutput<'_>) {
        self.merge_streams();
        self.normalize_input(self.spec.output.norm.as_ref(), self.weights.output_norm.as_ref());
        match (wanted, &self.weights.output, self.spec.output.head) {
            (RequestedOutput::Hidden(out), _, _) => out.copy_from_slice(&self.scratch.normed),
            (RequestedOutput::Logits(logits), Some(linear), Some(head)) => {
                self.observe(&[linear], ProductInput::Normed);
                let rows = 0..self.scratch.normed.len() / self.spec.n_embd;
                let mut products = [MatmulOp { matrix: &linear.weight, rows, y: logits, accumulate: false }];
                matmul(self.pool, self.isa, &self.scratch.normed, &mut self.scratch.q8, &mut products);
                for row in logits.chunks_exact_mut(self.spec.n_vocab) {
                    add_bias(row, linear);
                    if head.scale != 1.0 {
                        scale_by(row, head.scale);
                    }
                    if let Some(cap) = head.soft_cap {
                        for x in row.iter_mut() {
                            *x = cap * (*x / cap).tanh();
                        }
                    }
                }
                self.lap("matmul_output");
            }
            (RequestedOutput::Logits(_), _, _) => {
                panic!("logits were asked of a model that has none: batches are checked for it")
            }
        }
    }

    /// Shows the observer what the matrices are multiplied by.
    fn observe(&mut self, linears: &[&PreparedLinear], input: ProductInput) {
        let Some(observer) = &mut self.observer else { return };
        let x = match input {
            ProductInput::Normed => &self.scratch.normed,
            ProductInput::MixerOut => &self.scratch.mixer_out,
            ProductInput::ParallelOut => &self.scratch.mamba.parallel_out,
            ProductInput::Gate => &self.scratch.gate,
        };
        for linear in linears {
            observer(MatrixInput { matrix: &linear.name, sub_matrix: None, x, n_in: linear.weight.n_in() });
        }
    }

    /// `h = norm(x)`, row by row; without a norm `x` as it is.
    fn normalize_input(&mut self, norm: Option<&Norm>, weights: Option<&NormWeights>) {
        let s = &mut *self.scratch;
        resize(&mut s.normed, s.x.len());
        match norm.zip(weights) {
            Some(norm) => normalize(self.pool, self.isa, norm, &s.x, &mut s.normed),
            None => s.normed.copy_from_slice(&s.x),
        }
        if norm.is_some() {
            self.lap("norm");
        }
    }

    /// `x += scale * norm(result)`; `h` is overwritten.
    fn add_branch_out(&mut self, norm: Option<(&Norm, &NormWeights)>, scale: f32) {
        let (n_embd, isa) = (self.spec.n_embd, self.isa);
        let s = &mut *self.scratch;
        resize(&mut s.normed, s.x.len());
        let (result, x, h) = (&s.branch_out, SharedMut::new(&mut s.x), SharedMut::new(&mut s.normed));
        self.pool.for_each_if(result.len() >= MIN_ELEMENTS, result.len() / n_embd, &|t| {
            // SAFETY: each token owns its rows.
            let (x, h) = unsafe { (x.slice(t * n_embd, n_embd), h.slice(t * n_embd, n_embd)) };
            let mut more = &result[t * n_embd..][..n_embd];
            if let Some((norm, weights)) = norm {
                normalize_row(isa, norm.kind, norm.eps, weights, more, h);
                more = h;
            }
            for (x, r) in x.iter_mut().zip(more) {
                *x += scale * r;
            }
        });
        self.lap("residual_add");
    }

    /// `W input + b`, added to `x`, or instead of what `result` was.
    fn product(&mut self, linear: &PreparedLinear, input: ProductInput, to_stream: bool) {
        self.product_onto(linear, input, to_stream, to_stream);
    }

    /// `W input + b`, added to `x`, or to `result`.
    fn add_product(&mut self, linear: &PreparedLinear, input: ProductInput, to_stream: bool) {
        self.product_onto(linear, input, to_stream, true);
    }

    fn product_onto(&mut self, linear: &PreparedLinear, input: ProductInput, to_stream: bool, accumulate: bool) {
        self.observe(&[linear], input);
        let s = &mut *self.scratch;
        let n_embd = self.spec.n_embd;
        let rows = 0..s.x.len() / n_embd;
        let x = match input {
            ProductInput::Normed => &s.normed,
            ProductInput::MixerOut => &s.mixer_out,
            ProductInput::ParallelOut => &s.mamba.parallel_out,
            ProductInput::Gate => &s.gate,
        };
        let y = if to_stream { &mut s.x } else { &mut s.branch_out };
        resize(y, rows.len() * n_embd);
        let mut products = [MatmulOp { matrix: &linear.weight, rows, y, accumulate }];
        matmul(self.pool, self.isa, x, &mut s.q8, &mut products);
        for row in y.chunks_exact_mut(n_embd) {
            add_bias(row, linear);
        }
    }
}

/// Which buffer a matrix is multiplied by.
#[derive(Clone, Copy)]
enum ProductInput {
    Normed,
    MixerOut,
    ParallelOut,
    Gate,
}

/// `out = norm(x)`, rows as long as the norm's weight.
fn normalize(pool: &ThreadPool, isa: Isa, (norm, weights): (&Norm, &NormWeights), x: &[f32], out: &mut [f32]) {
    let n = weights.weight.len();
    let out = SharedMut::new(out);
    pool.for_each_if(x.len() >= MIN_ELEMENTS, x.len() / n, &|t| {
        // SAFETY: each token owns its row.
        let out = unsafe { out.slice(t * n, n) };
        normalize_row(isa, norm.kind, norm.eps, weights, &x[t * n..][..n], out);
    });
}

fn normalize_row(isa: Isa, kind: NormKind, eps: f32, weights: &NormWeights, x: &[f32], out: &mut [f32]) {
    let (weight, bias) = (&weights.weight, weights.bias.as_deref());
    match kind {
        NormKind::Rms => {
            isa.run(RmsNorm { x, weight, eps, out });
            if let Some(bias) = bias {
                add(out, bias);
            }
        }
        NormKind::Layer => isa.run(LayerNorm { x, weight, bias, eps, out }),
    }
}

fn add_bias(row: &mut [f32], linear: &PreparedLinear) {
    if let Some(bias) = &linear.bias {
        add(row, bias);
    }
}

fn add(row: &mut [f32], more: &[f32]) {
    for (x, b) in row.iter_mut().zip(more) {
        *x += b;
    }
}

fn scale_by(row: &mut [f32], factor: f32) {
    for x in row {
        *x *= factor;
    }
}

/// Sets the length; what was there stays as it is, to be overwritten.
fn resize(v: &mut Vec<f32>, len: usize) {
    v.resize(len, 0.0);
}
