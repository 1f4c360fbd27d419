//! The forward pass of one micro-batch on the CPU: token embedding; per layer the mixer and the feed-forward, each with
//! its norms and its residual join; output norm and head.
//!
//! [`CpuExecutor`](crate::CpuExecutor) calls [`MicroBatchRun::forward`] for each step. Inputs are token ids with their sequence and position, the KV cache and the recurrent states; the output is a
//! row of logits or of hidden states for each output token. Each layer changes the residual stream, `x` in the formulas
//! below, `[n_tokens, n_embd]`. All activations are row-major F32, a row for each token; matrices are multiplied by
//! [`matmul`]. The files of `parts/` contain the parts of a layer. The calls:
//!
//! ```text
//! forward
//!   embed                      (ends.rs) token embedding; also per-layer inputs and residual streams (streams.rs);
//!                              in prediction heads it is joined with the tokens' states
//!   fill_rope_tables
//!   for each layer:
//!     run_layer                (`LayerOps`, forward/layer.rs) mixer and feed-forward, with their norms, each joined to x
//!       predict_streams        (streams.rs) several residual streams only
//!       normalize_x_to_normed  norm of the mixer's input
//!       laurel                 (streams.rs) several residual streams only
//!       mixer                  up to the input of its output projection; stores keys, values and states
//!       join                   the output projection, its norm and factor
//!       ...                    the feed-forward likewise
//!       finish                 corrects the streams, adds the per-layer embedding, applies the output scale
//!   normalize_output           output norm
//!   write_output               output head
//! ```
//!
//! Steps that apply to few models do nothing in the others: several residual streams and LAuReL
//! ([`ResidualStreams`](metal_attention_model::ResidualStreams) has the formulas), per-layer embeddings
//! ([`PerLayerEmbedding`](metal_attention_model::PerLayerEmbedding)), norms that a layer does not have.
//!
//! Tokens other than output tokens are evaluated for their keys, values and recurrent states only, so the last layer
//! drops their rows once it has stored these: attention before it reads the cache, other mixers at their end. A layer
//! whose feed-forward has a recurrent state (RWKV's channel mix) drops them within the feed-forward.

mod layer;

use metal_attention_model::{
    BatchToken, LayerOps, LayerTrace, ModelSpec, NormKind, NormWeights, PageTable, Position, Profiler, StepInputs,
    StepSpan, TracedTokens,
};

use self::layer::{LayerRun, NoRowsLeft};
use crate::activations::Q8Activations;
use crate::kernels::elementwise::{LayerNorm, RmsNorm};
use crate::kernels::matmul::{MatmulOp, matmul};
use crate::kv_cache::{CacheElement, SharedKvCache};
use crate::layers::{PreparedHead, PreparedLinear, PreparedWeights};
use crate::observer::{MatrixInput, Observer};
use crate::pool::ThreadPool;
use crate::shared::SharedMut;
use crate::simd::Isa;
use crate::state::SharedStateSlots;

/// The least number of elements for which a cheap elementwise kernel is spread over the threads. With fewer, the kernel
/// takes a few microseconds on one thread, less than waking the others.
pub(crate) const MIN_PARALLEL_ELEMENTS: usize = 4096;

/// The least number of recurrent-state elements, summed over the tokens, for which a recurrence is spread over the
/// threads.
pub(crate) const MIN_PARALLEL_STATE_ELEMENTS: usize = 1 << 15;

/// The activations of one micro-batch. Buffers grow to the largest micro-batch and are kept for the next one of the
/// same model; their old contents are overwritten.
///
/// Only `x`, `rope_tables`, `per_layer`, `streams` and RWKV-7's `rwkv.first_value` outlive a layer. The other buffers
/// are written and read within one layer; several of them serve different kinds of layer, as their comments list.
#[derive(Default)]
pub(crate) struct Scratch {
    /// The residual stream, `[n_tokens, n_embd]`.
    pub(crate) x: Vec<f32>,
    /// The normalised residual stream: the input of the mixer, then of the feed-forward, `[n_tokens, n_embd]`.
    pub(crate) normed: Vec<f32>,
    /// The output of a branch, `[n_tokens, n_embd]`, if it is normalised or scaled before it joins `x`, or joins it
    /// only after the next branch is computed ([`Residual::Parallel`](metal_attention_model::Residual::Parallel)).
    /// Outputs that are added as they are go to `x` directly.
    pub(crate) branch_out: Vec<f32>,
    /// Queries, `[n_tokens, n_head * head_dim]`; of latent attention `[n_tokens, n_head * (kv_rank + shared_dim)]`.
    /// Also the queries of the delta rule, `[n_tokens, width of all key heads]`, the receptances of RWKV, `[n_tokens,
    /// width]`, and the input projection of a short convolution, `[n_tokens, 3 * width]`.
    pub(crate) q: Vec<f32>,
    /// Keys of the micro-batch, `[n_tokens, n_head_kv * head_dim]`, before they are copied to the KV cache; of latent
    /// attention the compressed rows and shared keys, `[n_tokens, kv_rank + shared_dim]`. Also the keys of RWKV and of
    /// the delta rule, as wide as their queries.
    pub(crate) k: Vec<f32>,
    /// Values of the micro-batch, `[n_tokens, n_head_kv * head_dim]`, before they are copied to the KV cache. Also the
    /// values of RWKV, `[n_tokens, width]`, and of the delta rule, `[n_tokens, width of all value heads]`.
    pub(crate) v: Vec<f32>,
    /// The query projection of attention that also has its gate: of each head the query, then its gate,
    /// `[n_tokens, n_head * 2 * head_dim]`.
    pub(crate) q_and_gate: Vec<f32>,
    /// The product of an attention gate with a tensor of its own, `[n_tokens, n_head * head_dim]` or `[n_tokens, n_head]`.
    pub(crate) attention_gate: Vec<f32>,
    /// The output of every kind of mixer before its output projection; for attention `[n_tokens, n_head * head_dim]`.
    pub(crate) mixer_out: Vec<f32>,
    /// The gate projection of a feed-forward, in whose place its activated hidden vector is written,
    /// `[n_tokens, n_ff]`; of experts a row for each token and chosen expert. The same of a channel mix, whose gate
    /// projection is called key, and of a per-layer embedding, `[n_tokens, width]`. Also the output gate of the delta
    /// rule, as wide as its values.
    pub(crate) gate_or_hidden: Vec<f32>,
    /// The up projection of a feed-forward, in the shape of `gate_or_hidden`; also the receptances of a channel mix,
    /// `[n_tokens, n_embd]`.
    pub(crate) up: Vec<f32>,
    /// The input of the current product, quantised to 8 bits in blocks of 32 (see [`Q8Activations`]).
    pub(crate) q8: Q8Activations,
    /// The RoPE cos/sin tables of the micro-batch, one for each different rotation of the model.
    pub(crate) rope_tables: Vec<RopeTable>,
    /// Partial results of split-KV attention, before they are merged: of each query head of the tokens that are
    /// evaluated at a time, `[n_splits, value_dim]`, with rows padded to whole vectors.
    pub(crate) partial: Vec<f32>,
    /// Of each row of `partial` the highest score, and the sum of `exp(score - highest)`.
    pub(crate) max_sum: Vec<[f32; 2]>,
    /// Buffers of a mixture of experts.
    pub(crate) experts: crate::parts::experts::ExpertScratch,
    /// Buffers of latent attention.
    pub(crate) latent: crate::parts::latent_attention::LatentScratch,
    /// The per-layer embeddings of each token (Gemma 3n, Gemma 4), `[n_tokens, n_layer * width]`.
    pub(crate) per_layer: Vec<f32>,
    /// The residual streams of AltUp (Gemma 3n).
    pub(crate) streams: crate::parts::streams::StreamScratch,
    /// Buffers of the delta rule.
    pub(crate) delta: crate::parts::delta_rule::DeltaScratch,
    /// Buffers of Mamba and Mamba-2.
    pub(crate) mamba: crate::parts::mamba::MambaScratch,
    /// Buffers of RWKV.
    pub(crate) rwkv: crate::parts::rwkv::RwkvScratch,
    /// Buffers of convolutions within blocks.
    pub(crate) block_conv: crate::parts::block_conv::BlockConvScratch,
}

/// The RoPE cos/sin table of one rotation: a row for each token of the micro-batch, at the token's position.
#[derive(Default)]
pub(crate) struct RopeTable {
    /// Cosines, `[n_tokens, n_rot / 2]`, times the rotation's magnitude.
    pub(crate) cos: Vec<f32>,
    /// Sines, `[n_tokens, n_rot / 2]`, times the rotation's magnitude.
    pub(crate) sin: Vec<f32>,
}

impl Scratch {
    /// Bytes of all buffers.
    pub(crate) fn bytes(&self) -> usize {
        let floats = [
            &self.x,
            &self.normed,
            &self.branch_out,
            &self.q,
            &self.k,
            &self.v,
            &self.q_and_gate,
            &self.attention_gate,
            &self.mixer_out,
            &self.gate_or_hidden,
            &self.up,
            &self.partial,
            &self.per_layer,
        ];
        let floats = floats.iter().map(|v| 4 * v.capacity()).sum::<usize>();
        let rope_tables = self.rope_tables.iter().map(|t| 4 * (t.cos.capacity() + t.sin.capacity())).sum::<usize>();
        floats
            + 8 * self.max_sum.capacity()
            + rope_tables
            + self.q8.bytes()
            + self.experts.bytes()
            + self.latent.bytes()
            + self.streams.bytes()
            + self.delta.bytes()
            + self.mamba.bytes()
            + self.rwkv.bytes()
            + self.block_conv.bytes()
    }
}

/// The buffer for the output of the output tokens, in the order of the micro-batch.
pub(crate) enum MicroBatchOutput<'a> {
    /// Logits.
    Logits {
        /// The head that computes them.
        head: &'a PreparedHead,
        /// The rows, `[n_outputs, n_vocab]`.
        logits: &'a mut [f32],
    },
    /// Hidden states after the output norm, `[n_outputs, n_embd]`.
    Hidden(&'a mut [f32]),
}

/// The evaluation of one micro-batch through all layers. Several may run at the same time, each with a `scratch` of its
/// own, if no sequence has tokens in two of them: they share the KV cache and the states, and each writes only to the
/// pages and state slots of its sequences.
pub(crate) struct MicroBatchRun<'a> {
    /// The model's description.
    pub(crate) spec: &'a ModelSpec,
    /// The model's weights, in the form that the kernels read.
    pub(crate) weights: &'a PreparedWeights,
    /// The threads that compute. The pool's [`Watch`](metal_attention_model::Watch) cancels the work (it is checked
    /// before each parallel task and after each layer), and counts it: each layer adds the tokens of the micro-batch.
    pub(crate) pool: &'a ThreadPool,
    /// The instruction set of the kernels.
    pub(crate) isa: Isa,
    /// The KV pages of all sequences; the positions of this micro-batch have pages already.
    pub(crate) pages: &'a PageTable,
    /// Those inputs that are rows of embeddings; `None`: all are tokens.
    pub(crate) inputs: Option<&'a StepInputs>,
    /// The state of each token that a prediction head reads, `[n_tokens, n_embd]`, or an assistant, `[n_tokens, target_width]`; empty
    /// for other models.
    pub(crate) token_states: &'a [f32],
    /// Whether it is a step of an assistant ([`Step::is_of_assistant`](metal_attention_model::Step::is_of_assistant)).
    pub(crate) is_of_assistant: bool,
    /// The context rows of a block drafter in the place of all tokens, `[n_tokens, n_embd]`; `None` in all other steps.
    pub(crate) context: Option<&'a [f32]>,
    /// The recurrent states: of each sequence the slot that is read and the slot that is written.
    pub(crate) states: &'a SharedStateSlots<'a>,
    /// The activations; no other run uses them at the same time.
    pub(crate) scratch: &'a mut Scratch,
    /// Records the time of every kernel; `None`: no profile.
    pub(crate) profiler: Option<&'a mut Profiler>,
    /// Receives the input of every matrix, from which importance matrices are computed; `None`: nothing does.
    pub(crate) observer: Option<&'a mut Observer>,
}

impl MicroBatchRun<'_> {
    /// Evaluates `tokens`, at least one, stores their keys, values and recurrent states, and writes the results of the
    /// output tokens to `output`, whose slice has exactly their rows. Preconditions: `PageTable::check` has checked the
    /// tokens (ids within the vocabulary, positions within the context), the pages of their positions exist, and
    /// `caches` has an entry for each layer.
    ///
    /// `caches`: the KV cache that each layer reads, its own or that of the layer whose keys and values it shares, with
    /// elements `E`; `None` for a layer without attention. `trace` is called with the residual stream after each layer
    /// (of several streams, the active one). It needs all rows, so with it none are dropped before the output norm.
    ///
    /// Returns early when the pool's work is cancelled; `output`, the new positions of the KV cache and the new states
    /// are then incomplete, and the caller takes positions and states back (`PageTable::retract`).
    pub(crate) fn forward<E: CacheElement>(
        mut self,
        caches: &[Option<&SharedKvCache<'_, E>>],
        tokens: &[BatchToken],
        output: MicroBatchOutput<'_>,
        mut trace: Option<LayerTrace<'_>>,
    ) {
        let (spec, weights) = (self.spec, self.weights);
        debug_assert_eq!(caches.len(), spec.n_layer());
        let mut tokens = tokens.to_vec();
        let n_tokens = tokens.len() as u64;
        if let Some(rows) = self.context {
            return self.store_context(caches, rows, &mut tokens);
        }
        let traces_all = trace.as_ref().is_some_and(|trace| trace.tokens == TracedTokens::All);
        // Convolutions after the last layer's mixer and feed-forward read the rows of all tokens of a block.
        let keeps_rows = traces_all || spec.takes_context;
        self.embed(&tokens);
        self.fill_rope_tables(&tokens);
        for (i, (layer, cache)) in weights.layers.iter().zip(caches).enumerate() {
            if let Some(trace) = &mut trace {
                trace.copy(i, &tokens, &self.scratch.x);
            }
            let may_drop_rows = i + 1 == spec.n_layer() && !keeps_rows;
            let mut run = LayerRun { run: &mut self, i, cache: *cache, tokens: &mut tokens, may_drop_rows };
            let outcome = run.run_layer(layer);
            self.add_deepstack(i, &tokens);
            if self.pool.is_cancelled() {
                return;
            }
            // Without an output token, too, the layer counts all tokens of the micro-batch as progress.
            self.pool.watch().advance(n_tokens);
            if let Err(NoRowsLeft) = outcome {
                return;
            }
        }
        let n_layer = spec.n_layer();
        if let Some(trace) = &mut trace {
            trace.copy(n_layer, &tokens, &self.scratch.x);
        }
        // The norms of all rows only if they are traced.
        let traces_all_norms = traces_all && trace.as_ref().is_some_and(|trace| trace.before.contains(&(n_layer + 1)));
        // Where there are no layers none has dropped them.
        if (keeps_rows || spec.layers.is_empty()) && !traces_all_norms && !tokens.is_empty() {
            self.drop_rows_without_output(&mut tokens);
        }
        if tokens.is_empty() {
            return;
        }
        self.normalize_output();
        if let Some(trace) = &mut trace {
            trace.copy(n_layer + 1, &tokens, &self.scratch.normed);
            if let Some(states) = self.next_states(trace) {
                trace.copy(n_layer + 2, &tokens, &states);
            }
        }
        if traces_all_norms {
            self.drop_rows_without_output(&mut tokens);
        }
        if !tokens.is_empty() {
            self.write_output(output);
        }
    }

    /// Stores the keys and values of the context rows `rows` in each layer.
    fn store_context<E: CacheElement>(
        &mut self,
        caches: &[Option<&SharedKvCache<'_, E>>],
        rows: &[f32],
        tokens: &mut Vec<BatchToken>,
    ) {
        rows.clone_into(&mut self.scratch.x);
        self.fill_rope_tables(tokens);
        let weights = self.weights;
        for (i, (layer, cache)) in weights.layers.iter().zip(caches).enumerate() {
            let mut run = LayerRun { run: self, i, cache: *cache, tokens, may_drop_rows: false };
            let Ok(()) = run.store_context(layer) else { return };
            if self.pool.is_cancelled() {
                return;
            }
            self.pool.watch().advance(tokens.len() as u64);
        }
    }

    /// The span that has `token`, and the token's index in it; `None` for a token of text.
    pub(crate) fn span_of(&self, token: &BatchToken) -> Option<(&StepSpan, usize)> {
        self.inputs?.of_token(token)
    }

    /// The position by which RoPE rotates `token`.
    pub(crate) fn position(&self, token: &BatchToken) -> Position {
        let of_text = || {
            let index = token.pos + usize::from(self.is_of_assistant);
            self.pages.text_position(&BatchToken { pos: index, ..*token })
        };
        self.span_of(token).map_or_else(of_text, |(span, i)| span.positions[i])
    }

    /// Records the time since the end of the previous interval of the profiler as the time of `kernel`.
    pub(crate) fn record_time(&mut self, kernel: &'static str) {
        if let Some(profiler) = &mut self.profiler {
            profiler.lap(kernel);
        }
    }

    /// Removes the rows of all but the output tokens from `tokens`, which is not empty, and from every buffer that a
    /// later part of the last layer may read. Keys, values, latent rows and RoPE tables are not among these: they are
    /// used up when keys and values are in the KV cache and the queries are rotated.
    ///
    /// A buffer whose contents are still needed has a row for each token. Another one may hold rows of an earlier
    /// micro-batch, of any number; truncating it is harmless, as it is overwritten before it is read.
    pub(crate) fn drop_rows_without_output(&mut self, tokens: &mut Vec<BatchToken>) {
        debug_assert!(!tokens.is_empty());
        let s = &mut *self.scratch;
        let n_streams = self.spec.embedding.streams.map_or(0, |streams| streams.n);
        let mut buffers = vec![
            &mut s.x,
            &mut s.normed,
            &mut s.q,
            &mut s.q_and_gate,
            &mut s.attention_gate,
            &mut s.mixer_out,
            &mut s.mamba.parallel_out,
            &mut s.per_layer,
        ];
        buffers.extend(s.streams.rows(n_streams));
        for rows in buffers {
            // Rounded down, so that the rows of a buffer that is not needed are within it, too.
            let row_len = rows.len() / tokens.len();
            let mut n_kept = 0;
            for (i, _) in tokens.iter().enumerate().filter(|(_, t)| t.output) {
                rows.copy_within(i * row_len..(i + 1) * row_len, n_kept * row_len);
                n_kept += 1;
            }
            rows.truncate(n_kept * row_len);
        }
        tokens.retain(|t| t.output);
    }

    /// Reports to the observer that each matrix of `linears` is multiplied by `input`.
    pub(crate) fn observe(&mut self, linears: &[&PreparedLinear], input: ProductInput) {
        let Some(observer) = &mut self.observer else { return };
        let x = input.buffer(self.scratch);
        for linear in linears {
            observer(MatrixInput { matrix: &linear.name, sub_matrix: None, x, n_in: linear.weight.n_in() });
        }
    }

    /// `normed = norm(x)`, row by row; a copy of `x` where there is no norm.
    pub(crate) fn normalize_x_to_normed(&mut self, norm: Option<&NormWeights>) {
        let s = &mut *self.scratch;
        resize(&mut s.normed, s.x.len());
        match norm {
            Some(norm) => normalize(self.pool, self.isa, norm, &s.x, &mut s.normed),
            None => s.normed.copy_from_slice(&s.x),
        }
        if norm.is_some() {
            self.record_time("norm");
        }
    }

    /// `x = norm(x)`, row by row; `normed` gets the old `x`.
    pub(crate) fn normalize_x(&mut self, norm: &NormWeights) {
        self.normalize_x_to_normed(Some(norm));
        std::mem::swap(&mut self.scratch.x, &mut self.scratch.normed);
    }

    /// `x += scale * norm(branch_out)`; `branch_out` and `x` have the same shape. Overwrites `normed`.
    pub(crate) fn add_branch_out(&mut self, norm: Option<&NormWeights>, scale: f32) {
        let (n_embd, isa) = (self.spec.n_embd, self.isa);
        let s = &mut *self.scratch;
        resize(&mut s.normed, s.x.len());
        let (branch_out, x, normed) = (&s.branch_out, SharedMut::new(&mut s.x), SharedMut::new(&mut s.normed));
        self.pool.for_each_if(branch_out.len() >= MIN_PARALLEL_ELEMENTS, branch_out.len() / n_embd, &|t| {
            // SAFETY: each token owns its rows.
            let (x, normed) = unsafe { (x.slice(t * n_embd, n_embd), normed.slice(t * n_embd, n_embd)) };
            let mut addend = &branch_out[t * n_embd..][..n_embd];
            if let Some(norm) = norm {
                normalize_row(isa, norm, addend, normed);
                addend = normed;
            }
            for (x, a) in x.iter_mut().zip(addend) {
                *x += scale * a;
            }
        });
        self.record_time("residual_add");
    }

    /// `W * input + b`, to `output`. `linear` is `[n_embd, n_in]`, the input `[n_tokens, n_in]`, with the `n_tokens` of
    /// `x`. Passes the input to the observer; the caller records the time.
    pub(crate) fn project(&mut self, linear: &PreparedLinear, input: ProductInput, output: ProductOutput) {
        self.observe(&[linear], input);
        let s = &mut *self.scratch;
        let n_embd = self.spec.n_embd;
        let token_rows = 0..s.x.len() / n_embd;
        // Not `ProductInput::buffer`, which would borrow all of `s`.
        let x = match input {
            ProductInput::Normed => &s.normed,
            ProductInput::MixerOut => &s.mixer_out,
            ProductInput::ParallelOut => &s.mamba.parallel_out,
            ProductInput::Hidden => &s.gate_or_hidden,
        };
        let (y, accumulate) = match output {
            ProductOutput::AddToX => (&mut s.x, true),
            ProductOutput::ReplaceX => (&mut s.x, false),
            ProductOutput::AddToBranchOut => (&mut s.branch_out, true),
            ProductOutput::ReplaceBranchOut => (&mut s.branch_out, false),
        };
        // Only a `branch_out` that is replaced may have another length.
        resize(y, token_rows.len() * n_embd);
        let mut products = [MatmulOp { matrix: &linear.weight, rows: token_rows, y, accumulate }];
        matmul(self.pool, self.isa, x, &mut s.q8, &mut products);
        for row in y.chunks_exact_mut(n_embd) {
            add_bias(row, linear);
        }
    }
}

/// The scratch buffer that a matrix is multiplied by.
#[derive(Clone, Copy)]
pub(crate) enum ProductInput {
    /// [`Scratch::normed`].
    Normed,
    /// [`Scratch::mixer_out`].
    MixerOut,
    /// `mamba.parallel_out`: the output of Mamba-2 in parallel with attention.
    ParallelOut,
    /// [`Scratch::gate_or_hidden`], when it has the activated hidden vector of a feed-forward.
    Hidden,
}

impl ProductInput {
    /// The buffer in `scratch`.
    pub(crate) fn buffer(self, scratch: &Scratch) -> &[f32] {
        match self {
            Self::Normed => &scratch.normed,
            Self::MixerOut => &scratch.mixer_out,
            Self::ParallelOut => &scratch.mamba.parallel_out,
            Self::Hidden => &scratch.gate_or_hidden,
        }
    }
}

/// Where the result `[n_tokens, n_embd]` of a product goes, [`Scratch::x`] or [`Scratch::branch_out`].
#[derive(Clone, Copy)]
pub(crate) enum ProductOutput {
    /// It is added to `x`.
    AddToX,
    /// It replaces `x`.
    ReplaceX,
    /// It is added to `branch_out`, which has its shape already.
    AddToBranchOut,
    /// It replaces `branch_out`.
    ReplaceBranchOut,
}

/// `out = norm(x)`, in rows as long as the norm's weight (a token's row, or one layer's part of it); `x` and `out`
/// have the same shape.
pub(crate) fn normalize(pool: &ThreadPool, isa: Isa, norm: &NormWeights, x: &[f32], out: &mut [f32]) {
    let n = norm.weight.len();
    let out = SharedMut::new(out);
    pool.for_each_if(x.len() >= MIN_PARALLEL_ELEMENTS, x.len() / n, &|row| {
        // SAFETY: each task writes only its own row.
        let out = unsafe { out.slice(row * n, n) };
        normalize_row(isa, norm, &x[row * n..][..n], out);
    });
}

/// `out = norm(x)` of one row; see [`NormKind`] for the formulas.
pub(crate) fn normalize_row(isa: Isa, norm: &NormWeights, x: &[f32], out: &mut [f32]) {
    let (weight, bias, eps) = (&norm.weight, norm.bias.as_deref(), norm.eps);
    match norm.kind {
        NormKind::Rms => {
            isa.run(RmsNorm { x, weight, eps, out });
            if let Some(bias) = bias {
                add(out, bias);
            }
        }
        NormKind::Layer => isa.run(LayerNorm { x, weight, bias, eps, out }),
    }
}

/// Adds the bias of `linear`, where it has one.
pub(crate) fn add_bias(row: &mut [f32], linear: &PreparedLinear) {
    if let Some(bias) = &linear.bias {
        add(row, bias);
    }
}

/// `row += addend`
pub(crate) fn add(row: &mut [f32], addend: &[f32]) {
    for (x, a) in row.iter_mut().zip(addend) {
        *x += a;
    }
}

/// `row *= factor`
pub(crate) fn scale_by(row: &mut [f32], factor: f32) {
    for x in row {
        *x *= factor;
    }
}

/// Sets the length of a scratch buffer. Old elements keep their values, new ones are 0: the caller must overwrite all,
/// unless it accumulates into them.
pub(crate) fn resize(v: &mut Vec<f32>, len: usize) {
    v.resize(len, 0.0);
}
