//! The start and the end of a forward pass: token embeddings; the last norm, the output head, and the highest logits
//! (`ends.cu`).

use std::sync::Arc;

use bytemuck::Zeroable;
use metal_attention_model::{AssistantWeights, ModelSpec, StateInputWeights, Weights};

use super::{CudaPerLayer, CudaStreams};
use crate::CudaError;
use crate::activations::ARGMAX_BLOCKS;
use crate::args::{ArgmaxArgs, EmbeddingArgs, LogitsArgs, MatrixArgs, NormArgs};
use crate::device::CudaBuffer;
use crate::exchange::Exchange;
use crate::kernels;
use crate::launch::LaunchGrid;
use crate::matrix::CudaMatrix;
use crate::runner::linear::{LinearInput, LinearOp, norm_args};
use crate::runner::{MicroBatch, MicroBatchSize, ModelRunner, TokenOutput};
use crate::slice::{DevicePtr, DeviceSlice};
use crate::weights::{CudaLinear, CudaNorm, CudaVector, Loader, ptr_or_null};

/// The weights that make the residual stream from token ids, before the first layer.
#[derive(Debug)]
pub(crate) struct CudaEmbedding {
    /// Token embeddings, `[n_vocab, n_embd]`; `None` if no tokens are read.
    pub(crate) table: Option<Arc<CudaMatrix>>,
    /// The embedding of token type 0, `[n_embd]`, which is added to every token.
    pub(crate) token_type: Option<CudaVector>,
    /// Position embeddings, `[n_positions, n_embd]`.
    pub(crate) positions: Option<CudaMatrix>,
    /// Norm of the sum.
    pub(crate) norm: Option<CudaNorm>,
    /// What reads states (drafters).
    pub(crate) state: Option<CudaStateInput>,
    /// What leads from the target model to an assistant and back.
    pub(crate) assistant: Option<CudaAssistantEnds>,
    /// Per-layer embeddings.
    pub(crate) per_layer: Option<CudaPerLayer>,
    /// Further residual streams.
    pub(crate) streams: Option<CudaStreams>,
}

/// The weights that read states: those of a [`StateInput`](metal_attention_model::StateInput).
#[derive(Debug)]
pub(crate) enum CudaStateInput {
    /// The normed embedding and the normed state, `proj`, `[n_embd, 2 * n_embd]`, times which is the input of the first layer.
    Joined { embedding_norm: CudaNorm, state_norm: CudaNorm, proj: CudaLinear },
    /// The normed embedding and the normed state, which attention reads beside each other.
    Attended { embedding_norm: CudaNorm, state_norm: CudaNorm, norms_residual: bool },
    /// The state, `fc`, `[n_embd, width]`, times which is the residual stream.
    Projected { norm: Option<CudaNorm>, fc: CudaLinear },
}

impl CudaStateInput {
    /// Uploads the weights.
    fn new(loader: &mut Loader<'_>, w: &StateInputWeights) -> Result<Self, CudaError> {
        Ok(match w {
            StateInputWeights::Joined { embedding_norm, state_norm, proj } => Self::Joined {
                embedding_norm: CudaNorm::new(loader, embedding_norm)?,
                state_norm: CudaNorm::new(loader, state_norm)?,
                proj: loader.linear(proj)?,
            },
            StateInputWeights::Attended { embedding_norm, state_norm, norms_residual } => Self::Attended {
                embedding_norm: CudaNorm::new(loader, embedding_norm)?,
                state_norm: CudaNorm::new(loader, state_norm)?,
                norms_residual: *norms_residual,
            },
            StateInputWeights::Projected { norm, fc } => {
                Self::Projected { norm: loader.optional_norm(norm.as_ref())?, fc: loader.linear(fc)? }
            }
        })
    }
}

/// The weights between an assistant and its target model.
#[derive(Debug)]
pub(crate) struct CudaAssistantEnds {
    /// Width of the target's residual stream.
    width: usize,
    /// From the target's embedding and the state to the input of the first layer, `[n_embd, 2 * width]`.
    pre_projection: CudaLinear,
    /// From the result of the output norm to the next state, `[width, n_embd]`.
    post_projection: CudaLinear,
}

impl CudaAssistantEnds {
    /// Uploads the weights.
    fn new(loader: &mut Loader<'_>, w: &AssistantWeights) -> Result<Self, CudaError> {
        let AssistantWeights { spec, pre_projection, post_projection } = w;
        Ok(Self {
            width: spec.target_width,
            pre_projection: loader.linear(pre_projection)?,
            post_projection: loader.linear(post_projection)?,
        })
    }
}

impl CudaEmbedding {
    /// Uploads the weights, except `table`, that of the token embeddings.
    pub(crate) fn new(loader: &mut Loader<'_>, w: &Weights, table: Option<Arc<CudaMatrix>>) -> Result<Self, CudaError> {
        Ok(Self {
            per_layer: w.per_layer.as_ref().map(|tables| CudaPerLayer::new(loader, tables)).transpose()?,
            streams: w.streams.as_ref().map(|streams| CudaStreams::new(loader, streams)).transpose()?,
            state: w.state.as_ref().map(|state| CudaStateInput::new(loader, state)).transpose()?,
            assistant: w.assistant.as_ref().map(|ends| CudaAssistantEnds::new(loader, ends)).transpose()?,
            table,
            token_type: loader.optional(w.token_type.as_deref())?,
            positions: w.positions.as_ref().map(|table| loader.matrix(table)).transpose()?,
            norm: loader.optional_norm(w.embedding_norm.as_ref())?,
        })
    }
}

impl ModelRunner {
    /// Launches the embedding: `x = norm(scale * table[id] + types[0] + positions[position])`, with the rows of spans in the place
    /// of `scale * table[id]`; then per-layer embeddings and further residual streams where the model has them.
    pub(crate) fn embedding(&mut self, batch: MicroBatch<'_>) -> Result<(), CudaError> {
        let w = Arc::clone(&self.weights.embedding);
        let (spec, n_tokens) = (batch.spec, batch.size.n_tokens);
        let (x, n_embd) = (self.buffers.x.slice(), spec.n_embd);
        if let (Some(assistant), Some(table)) = (&w.assistant, &w.table) {
            return self.embedding_of_assistant(batch, table, assistant);
        }
        if let Some(table) = &w.table {
            let args = EmbeddingArgs {
                types: ptr_or_null(w.token_type.as_ref()),
                positions: w.positions.as_ref().map_or_else(MatrixArgs::zeroed, |table| table.args(0)),
                ..self.embedding_args(table, spec.embedding.scale, x)
            };
            self.launch_embedding(&args, n_tokens)?;
            let tokens = self.buffers.tokens.slice();
            for (first, span) in batch.spans.iter().flat_map(|spans| spans.iter()) {
                let rows = self.upload_rows(first, &span.rows, n_embd)?;
                let tokens = tokens.skip(first).ptr();
                let args = EmbeddingArgs { rows: rows.ptr(), tokens, x: x.skip(first * n_embd).ptr(), ..args };
                self.launch_embedding(&args, rows.len() / n_embd)?;
            }
        }
        if let Some(norm) = &w.norm {
            self.norm(NormArgs { out: x.ptr(), ..norm_args(Some(norm), x, n_embd) }, n_tokens)?;
        }
        if let Some(state) = &w.state {
            self.read_states(batch, state)?;
        }
        if let Some(per_layer) = &w.per_layer {
            self.per_layer_embeddings(spec, per_layer, n_tokens)?;
        }
        self.spread_over_streams(spec, w.streams.as_ref(), n_tokens)
    }

    /// Launches `x = pre_projection * [scale * target_table[id] | state]`, in assistants. The states are uploaded in the place of the
    /// embeddings.
    fn embedding_of_assistant(
        &mut self,
        batch: MicroBatch<'_>,
        table: &CudaMatrix,
        w: &CudaAssistantEnds,
    ) -> Result<(), CudaError> {
        let (n, width, x) = (batch.size.n_tokens, w.width, self.buffers.x.slice());
        debug_assert_eq!(batch.states.len(), n * width, "a session checks that each token has a state");
        let [rows, joined] = self.scratch_rows(batch, [width, 2 * width]);
        self.look_up(table, batch.spec.embedding.scale, rows, n)?;
        self.stretch(width, (rows, width), None, (joined, 2 * width), n)?;
        self.buffers.rows.write(0, bytemuck::cast_slice(batch.states))?;
        self.stretch(width, (rows, width), None, (joined.skip(width), 2 * width), n)?;
        let input = self.rows_input(batch, joined, 2 * width, None)?;
        self.store_all(batch, "state", [&w.pre_projection], input, x)
    }

    /// Launches `post_projection * output_norm(x)` for all tokens of an assistant, to the first scratch rows, `[n_tokens, width]`.
    /// False, without a launch, for other models.
    pub(crate) fn next_states(&mut self, batch: MicroBatch<'_>) -> Result<bool, CudaError> {
        let embedding = Arc::clone(&self.weights.embedding);
        let Some(w) = &embedding.assistant else { return Ok(false) };
        self.output_norm_of_all(batch.spec, batch.size.n_tokens)?;
        let [states] = self.scratch_rows(batch, [w.width]);
        let input = self.rows_input(batch, self.buffers.h.slice(), batch.spec.n_embd, None)?;
        self.store_all(batch, "state", [&w.post_projection], input, states)?;
        Ok(true)
    }

    /// Uploads the states of the micro-batch that is launched next, to where [`read_states`](Self::read_states) reads them: to `result` as rows of
    /// spans, which no kernel in flight needs later, or to the first scratch rows. Returns whether its launches can be recorded as a CUDA graph: an
    /// assistant uploads between them.
    pub(crate) fn upload_states(&self, states: &[f32]) -> Result<bool, CudaError> {
        let states = bytemuck::cast_slice(states);
        match &self.weights.embedding.state {
            Some(CudaStateInput::Joined { .. } | CudaStateInput::Attended { .. }) => {
                self.buffers.result.write(0, states)?;
            }
            Some(CudaStateInput::Projected { norm: _, fc: _ }) => self.buffers.rows.write(0, states)?,
            None => return Ok(self.weights.embedding.assistant.is_none()),
        }
        Ok(true)
    }

    /// Launches what reads the states: `x` as [`StateInput`](metal_attention_model::StateInput) says, and in the first scratch rows
    /// what attention reads beside each other ([`states_input`](Self::states_input)).
    fn read_states(&mut self, batch: MicroBatch<'_>, w: &CudaStateInput) -> Result<(), CudaError> {
        let (n, n_embd, x) = (batch.size.n_tokens, batch.spec.n_embd, self.buffers.x.slice());
        match w {
            CudaStateInput::Joined { embedding_norm, state_norm, proj } => {
                self.norm_pairs(batch, embedding_norm, state_norm)?;
                let input = self.states_input(batch)?;
                self.store_all(batch, "state", [proj], input, x)
            }
            CudaStateInput::Attended { embedding_norm, state_norm, norms_residual } => {
                self.norm_pairs(batch, embedding_norm, state_norm)?;
                let norm = norms_residual.then_some(state_norm);
                self.norm(NormArgs { out: x.ptr(), ..norm_args(norm, self.buffers.result.slice(), n_embd) }, n)
            }
            CudaStateInput::Projected { norm, fc } => {
                let width = batch.spec.state_width();
                let [rows] = self.scratch_rows(batch, [width]);
                let input = self.rows_input(batch, rows, width, norm.as_ref())?;
                self.store_all(batch, "state", [fc], input, x)
            }
        }
    }

    /// Launches `[embedding_norm(x) | state_norm(state)]` to the first scratch rows, `[n_tokens, 2 * n_embd]`.
    fn norm_pairs(
        &mut self,
        batch: MicroBatch<'_>,
        embedding_norm: &CudaNorm,
        state_norm: &CudaNorm,
    ) -> Result<(), CudaError> {
        let (n, n_embd) = (batch.size.n_tokens, batch.spec.n_embd);
        let [joined] = self.scratch_rows(batch, [2 * n_embd]);
        let (x, states, h) = (self.buffers.x.slice(), self.buffers.result.slice(), self.buffers.h.slice());
        for (norm, rows, at) in [(embedding_norm, x, 0), (state_norm, states, n_embd)] {
            self.norm_rows(batch, rows, n_embd, norm, h)?;
            self.stretch(n_embd, (h, n_embd), None, (joined.skip(at), 2 * n_embd), n)?;
        }
        Ok(())
    }

    /// The normed embeddings and states beside each other, which [`read_states`](Self::read_states) left in the first scratch rows.
    pub(crate) fn states_input(&mut self, batch: MicroBatch<'_>) -> Result<LinearInput, CudaError> {
        let width = 2 * batch.spec.n_embd;
        let [joined] = self.scratch_rows(batch, [width]);
        self.rows_input(batch, joined, width, None)
    }

    /// Uploads rows of a span whose first input has index `first` in the micro-batch, to `result`, which no kernel in flight needs
    /// later: at the start and between layers it is free.
    fn upload_rows(&self, first: usize, rows: &[f32], n_embd: usize) -> Result<DeviceSlice<f32>, CudaError> {
        self.buffers.result.write(4 * (first * n_embd) as u64, bytemuck::cast_slice(rows))?;
        Ok(self.buffers.result.slice().skip(first * n_embd).take(rows.len()))
    }

    /// Adds the deepstack rows of spans to the residual stream after layer `layer`.
    pub(crate) fn add_deepstack_rows(&mut self, batch: MicroBatch<'_>, layer: usize) -> Result<(), CudaError> {
        let (x, n_embd) = (self.buffers.x.slice::<f32>(), batch.spec.n_embd);
        for (first, span) in batch.spans.iter().flat_map(|spans| spans.iter()) {
            if let Some(rows) = span.deepstack.get(layer) {
                let rows = self.upload_rows(first, rows, n_embd)?;
                let out = x.skip(first * n_embd).ptr();
                self.norm(NormArgs { out, accumulate: 1, ..norm_args(None, rows, n_embd) }, rows.len() / n_embd)?;
            }
        }
        Ok(())
    }

    /// Launches `y = scale * table[id]` for each token, `[n_tokens, table.n_in]`.
    pub(crate) fn look_up(
        &mut self,
        table: &CudaMatrix,
        scale: f32,
        y: DeviceSlice<f32>,
        n_tokens: usize,
    ) -> Result<(), CudaError> {
        self.launch_embedding(&self.embedding_args(table, scale, y), n_tokens)
    }

    /// Arguments for rows of `table` alone, stored to `y`.
    fn embedding_args(&self, table: &CudaMatrix, scale: f32, y: DeviceSlice<f32>) -> EmbeddingArgs {
        EmbeddingArgs {
            table: table.args(0),
            positions: MatrixArgs::zeroed(),
            types: DevicePtr::NULL,
            rows: DevicePtr::NULL,
            tokens: self.buffers.tokens.ptr(),
            x: y.ptr(),
            scale,
            n_embd: table.n_in as u32,
        }
    }

    /// Launches the embedding kernel for `n_tokens` tokens.
    fn launch_embedding(&mut self, args: &EmbeddingArgs, n_tokens: usize) -> Result<(), CudaError> {
        let blocks = (args.n_embd as usize).div_ceil(256);
        self.launch(kernels::EMBEDDING, "", LaunchGrid { blocks: [blocks, n_tokens, 1], threads: 256, shared: 0 }, args)
    }

    /// Launches what makes the last norm's input of several residual streams; nothing in most models.
    pub(crate) fn merge_streams(&mut self, spec: &ModelSpec, n_tokens: usize) -> Result<(), CudaError> {
        let embedding = Arc::clone(&self.weights.embedding);
        self.join_streams(spec, embedding.streams.as_ref(), n_tokens)
    }

    /// Launches the last norm for all tokens, to `h`.
    pub(crate) fn output_norm_of_all(&mut self, spec: &ModelSpec, n_tokens: usize) -> Result<(), CudaError> {
        let (norm, h) = (self.weights.output_norm.clone(), self.buffers.h.slice());
        let args = norm_args(norm.as_deref(), self.buffers.x.slice(), spec.n_embd);
        self.norm(NormArgs { out: h.ptr(), ..args }, n_tokens)
    }

    /// Launches the last norm and the output head for the output tokens, and what `size.output` requires after it. Only the
    /// norm for [`TokenOutput::Hidden`].
    pub(crate) fn output_head(&mut self, spec: &ModelSpec, size: MicroBatchSize) -> Result<(), CudaError> {
        let (n, n_embd) = (size.n_outputs, spec.n_embd);
        let norm = self.weights.output_norm.clone();
        let (output_rows, hidden) = (self.buffers.output_rows.slice(), self.buffers.hidden.slice());
        let x = self.buffers.x.slice();
        let args = NormArgs { rows: output_rows.ptr(), ..norm_args(norm.as_deref(), x, n_embd) };
        if size.output == TokenOutput::Hidden {
            return self.norm(NormArgs { out: hidden.ptr(), ..args }, n);
        }
        let Some((head, bias)) =
            self.weights.output.as_ref().map(|(head, bias)| (Arc::clone(head), bias.as_ref().map(CudaBuffer::ptr)))
        else {
            return Ok(());
        };
        // Under tensor parallelism the rank's rows of the output head are some of the columns of the logits.
        let first = self.exchange.as_ref().map_or(0, Exchange::first_row);
        let product = LinearOp {
            matrices: vec![(&head, first)],
            n_out: spec.n_vocab,
            bias: bias.unwrap_or(DevicePtr::NULL),
            y: self.buffers.logits.slice(),
            ..LinearOp::stored("logits", &head)
        };
        if !self.uses_f32_inputs(n) {
            let packed = self.buffers.packed_x.slice();
            self.norm(NormArgs { packed: packed.ptr(), ..args }, n)?;
            self.gemm(&product, packed, n)?;
        } else if norm.as_ref().is_none_or(|norm| norm.fuses_with_product()) {
            let tokens = self.gemv_tokens(&[head.layout].into_iter(), n_embd);
            for first in (0..n).step_by(tokens) {
                let (rows, y) = (output_rows.skip(first).ptr(), product.y.skip(first * spec.n_vocab));
                let n = (n - first).min(tokens);
                self.launcher().gemv(&product, x, args.weight, args.eps, rows, y, n_embd, n)?;
            }
        } else {
            self.norm(NormArgs { out: hidden.ptr(), ..args }, n)?;
            self.product(&product, LinearInput::rows(hidden), n_embd, n)?;
        }
        self.gather_logits(n, spec.n_vocab)?;
        let (scale, soft_cap) = spec.output.head.map_or((1.0, None), |head| (head.scale, head.soft_cap));
        if scale != 1.0 || soft_cap.is_some() {
            let args = LogitsArgs {
                logits: self.buffers.logits.ptr(),
                n: (n * spec.n_vocab) as u32,
                scale,
                soft_cap: soft_cap.unwrap_or(0.0),
                unused: 0,
            };
            self.launch(kernels::SCALE_LOGITS, "", LaunchGrid { blocks: [256, 1, 1], threads: 256, shared: 0 }, &args)?;
        }
        match size.output {
            TokenOutput::Hidden | TokenOutput::Logits => Ok(()),
            TokenOutput::TopK => self.top_k(spec.n_vocab, n),
            TokenOutput::Id { feeds_next_step } => self.argmax(spec.n_vocab, n, feeds_next_step),
        }
    }

    /// Launches argmax over `n` rows of logits: each id goes to [`ChosenIds`](crate::ids::ChosenIds). `advance`: it is also
    /// written to the token buffer as the sequence's next token.
    fn argmax(&mut self, n_vocab: usize, n: usize, advance: bool) -> Result<(), CudaError> {
        let args = ArgmaxArgs {
            logits: self.buffers.logits.ptr(),
            n_vocab: n_vocab as u32,
            advance: u32::from(advance),
            best: self.buffers.best.ptr(),
            tickets: self.buffers.argmax_tickets.ptr(),
            ids: self.ids.ptr(),
            tokens: self.buffers.tokens.ptr(),
            numbers: self.ids.numbers_of_rows(),
        };
        // A few logits for each thread: as many blocks as run at the same time, and as `best` has space for.
        let blocks = (8 * self.gpu.summary().n_sm / n).clamp(ARGMAX_BLOCKS / 4, ARGMAX_BLOCKS);
        self.launch(kernels::ARGMAX, "", LaunchGrid { blocks: [blocks, n, 1], threads: 256, shared: 0 }, &args)
    }
}
