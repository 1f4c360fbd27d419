//! [`ModelRunner`]: launches the kernels that take one micro-batch through the embedding, all layers and the output head.
//!
//! Called by [`CudaExecutor`](crate::CudaExecutor), which has uploaded the micro-batch before: its tokens, its page tables,
//! the rows that need output and, in prefill, its query tiles. Everything here only appends launches to the device's stream, and uploads
//! of the rows of spans and of an assistant's states; nothing is awaited. So a run without these can be recorded as a CUDA graph.
//!
//! The residual stream `x` (F32 `[n_tokens, n_embd]`) and all other intermediate results lie in [`Activations`]. The files of
//! `parts/` add the launches of one kind of part each to `impl ModelRunner`; the files below have what parts share, and the order
//! of a layer (`layer.rs`). Matrix products (`linear.rs`) use one of four paths by the number of tokens: GEMV (up to 2 or 4, or any
//! number in `exact` mode), a GEMM for few tokens (`matmul_few.rs`), a GEMM with warpgroup instructions (`matmul_wide.rs`, compute
//! capability 9.0), and a GEMM for other devices.

mod benchmark;
mod collectives;
#[cfg(test)]
mod cuda_kernels_tests;
pub(crate) mod grouped;
pub(crate) mod launcher;
pub(crate) mod layer;
pub(crate) mod linear;
mod matmul_few;
mod matmul_wide;
pub(crate) mod recurrence;
pub(crate) mod scratch;
mod top_k;

use std::sync::Arc;

use metal_attention_model::ModelSpec;

use crate::CudaError;
use crate::activations::Activations;
use crate::device::{CudaBuffer, CudaDevice};
use crate::exchange::Exchange;
use crate::ids::ChosenIds;
use crate::inputs::{QueryTiles, SpanInputs};
use crate::kernels::Kernels;
use crate::kv_cache::CudaKvCache;
use crate::profile::Timers;
use crate::recurrent_state::{CudaRecurrentStates, RunSizes};
use crate::weights::CudaWeights;

pub(crate) use linear::max_gemv_tokens;
pub(crate) use matmul_few::max_few_tokens;
pub(crate) use matmul_wide::{WideOutput, WideProduct, packed_layout, split_bytes};
pub(crate) use scratch::SCRATCH_ALIGNMENT;
pub(crate) use top_k::{TOP_K, top_k_bytes, top_k_list};

/// What is computed for each output token of a batch, that is, for each token with `BatchToken::output`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum TokenOutput {
    /// The hidden vector after the last norm, F32 `[n_embd]`.
    Hidden,
    /// All logits, F32 `[n_vocab]`.
    Logits,
    /// The [`TOP_K`] highest logits with their ids.
    TopK,
    /// The id of the highest logit. `feeds_next_step`: the device also writes it to the token buffer as the next token of the
    /// sequence, one position later, so that the next decode step needs no token from the host.
    Id { feeds_next_step: bool },
}

/// The sizes of a micro-batch. Two decode steps of equal size, without spans, launch exactly the same kernels outside the persistent kernel,
/// so that one CUDA graph serves both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct MicroBatchSize {
    /// Tokens, at most `n_ubatch`.
    pub(crate) n_tokens: usize,
    /// Tokens with output; 0 leaves out the last norm and the output head.
    pub(crate) n_outputs: usize,
    /// Query tiles of attention.
    pub(crate) query_tiles: QueryTiles,
    /// Runs of consecutive tokens of one sequence, for the recurrent layers.
    pub(crate) runs: RunSizes,
    /// Output of each output token.
    pub(crate) output: TokenOutput,
}

/// The device, the weights and the buffers that kernels are launched with.
pub(crate) struct ModelRunner {
    /// The device.
    pub(crate) gpu: Arc<CudaDevice>,
    /// Kernel handles, looked up at their first launch.
    pub(crate) kernels: Kernels,
    /// The weights of the model, or of this rank's shard.
    pub(crate) weights: CudaWeights,
    /// Buffers of the intermediate results.
    pub(crate) buffers: Activations,
    /// Ids that greedy decode steps have chosen.
    pub(crate) ids: ChosenIds,
    /// Whether products read F32 inputs for any number of tokens (GEMV kernels), instead of F16 inputs from 3 or 5 tokens on.
    pub(crate) exact: bool,
    /// Most tokens of a micro-batch whose products are GEMVs (any number in `exact` mode).
    pub(crate) max_gemv_tokens: usize,
    /// Most tokens of a micro-batch whose products use the path of `matmul_few.rs`.
    pub(crate) max_few_tokens: usize,
    /// Mailboxes of the ranks; `None` without tensor parallelism.
    pub(crate) exchange: Option<Exchange>,
    /// Kernels launched so far; those of a CUDA graph count once, when it is recorded.
    pub(crate) n_launches: u64,
    /// Present while kernels are timed for a profile.
    pub(crate) timers: Option<Timers>,
}

/// The micro-batch that is evaluated, with the model and the caches it reads and writes.
#[derive(Clone, Copy)]
pub(crate) struct MicroBatch<'a> {
    /// The model, or this rank's shard of it.
    pub(crate) spec: &'a ModelSpec,
    /// The KV cache, with the page tables of the sequences.
    pub(crate) cache: &'a CudaKvCache,
    /// The recurrent states, with the runs of the micro-batch.
    pub(crate) recurrent: &'a CudaRecurrentStates,
    /// The sizes.
    pub(crate) size: MicroBatchSize,
    /// The spans of embedding rows; `None`: all inputs are token ids, and all layers read the tokens that were uploaded for the
    /// micro-batch.
    pub(crate) spans: Option<&'a SpanInputs>,
    /// The state of each token of an assistant, `[n_tokens, target_width]`; those of other drafters are uploaded before
    /// ([`upload_states`](ModelRunner::upload_states)).
    pub(crate) states: &'a [f32],
    /// The context rows of a block drafter in the place of all tokens, `[n_tokens, n_embd]`; `None` in all other steps.
    pub(crate) context: Option<&'a [f32]>,
}

impl ModelRunner {
    /// Completes a token that the persistent kernel (`decode.rs`) took through all layers and the output head: gathers the logits
    /// of all ranks and finds the highest ones, where `output` needs that. The kernel itself has chosen an id.
    pub(crate) fn finish_persistent(&mut self, n_vocab: usize, output: TokenOutput) -> Result<(), CudaError> {
        match output {
            TokenOutput::Hidden | TokenOutput::Id { feeds_next_step: _ } => return Ok(()),
            TokenOutput::Logits | TokenOutput::TopK => {}
        }
        if let Some(exchange) = &mut self.exchange {
            // The persistent kernel has counted its own exchanges.
            exchange.begin_step();
        }
        self.gather_logits(1, n_vocab)?;
        if output == TokenOutput::TopK {
            self.top_k(n_vocab, 1)?;
        }
        self.count_exchanges()
    }

    /// Launches all kernels of a micro-batch. Calls `before_layer` before the launches of each layer, with the layer's index and
    /// the residual stream, and with the number of layers after those of the last one; with `traces_norm` also with 1 more and the
    /// result of the output norm; in an assistant with 2 more and the states for the next drafts. The device has written these rows only when its stream reaches that point.
    pub(crate) fn run(
        &mut self,
        mut batch: MicroBatch<'_>,
        traces_norm: bool,
        mut before_layer: impl FnMut(usize, &CudaBuffer) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        if let Some(exchange) = &mut self.exchange {
            exchange.begin_step();
        }
        let (spec, size) = (batch.spec, batch.size);
        match batch.context {
            Some(rows) => self.buffers.x.write(0, bytemuck::cast_slice(rows))?,
            None => self.embedding(batch)?,
        }
        let mut list = 0;
        for i in 0..spec.n_layer() {
            before_layer(i, &self.buffers.x)?;
            if let Some(spans) = batch.spans.filter(|spans| spans.list_of(i) != list) {
                list = spans.list_of(i);
                batch.size.query_tiles = spans.upload_list(list, batch.size.query_tiles, &self.buffers)?;
            }
            // Moved out, since a layer's weights are read while `self` is borrowed mutably for launches.
            let layers = std::mem::take(&mut self.weights.layers);
            let outcome = self.layer(batch, i, &layers[i]);
            self.weights.layers = layers;
            outcome?;
            self.add_deepstack_rows(batch, i)?;
        }
        before_layer(spec.n_layer(), &self.buffers.x)?;
        if traces_norm || size.n_outputs > 0 {
            self.merge_streams(spec, size.n_tokens)?;
        }
        if traces_norm {
            self.output_norm_of_all(spec, size.n_tokens)?;
            before_layer(spec.n_layer() + 1, &self.buffers.h)?;
        }
        if self.next_states(batch)? {
            before_layer(spec.n_layer() + 2, &self.buffers.rows)?;
        }
        if size.n_outputs > 0 {
            self.output_head(spec, size)?;
        }
        self.count_exchanges()
    }
}
