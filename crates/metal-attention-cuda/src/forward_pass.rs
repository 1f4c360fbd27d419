//! [`CudaForwardPass`]: one model on one NVIDIA GPU.
//!
//! Input: a batch of tokens ([`BatchToken`]: id, sequence, position, whether it is an output token). Output, for each
//! output token: logits, the highest logits, the id of the highest, or the hidden vector. Side effect: the KV cache and
//! the recurrent states hold the batch's tokens afterwards.
//!
//! A batch is evaluated in micro-batches of at most `n_ubatch` tokens. For each one the host assigns KV pages, uploads
//! tokens, page tables and state slots, launches the kernels ([`ModelRunner`]), and waits for the results. The calls:
//!
//! ```text
//! forward, forward_traced, forward_hidden, forward_top_k, forward_greedy      the trait's methods, for one batch
//!   evaluate                     checks the batch; after an error, retracts its tokens
//!     evaluate_micro_batches     divides the batch
//!       evaluate_micro_batch     assigns pages, uploads, launches, reads the results
//!         launch_decode_steps    (decode_steps.rs) for a decode step without a trace
//!         ModelRunner::run       for all other micro-batches: kernel by kernel
//! forward_greedy, for a decode step (see below)
//!   decode_greedy                (lookahead.rs) submits the step and further ones, before it reads the step's ids
//!     launch_decode_steps
//! ```
//!
//! `forward_greedy` calls `decode_greedy` if the batch is a decode step, has no more tokens than the logits buffer has
//! rows, and no profile is recorded; otherwise `evaluate`.
//!
//! Terms:
//! - A *decode step* evaluates a batch with one token of each of `n` sequences, all of them output tokens
//!   ([`is_decode_step`]). [`Phase::Decode`] requires less: one token of each sequence, with output or without.
//! - *Step numbers* number the micro-batches that choose ids (decode steps, and others with output tokens) in the order
//!   of their launches. The device writes chosen ids to host memory together with the step number, and the host reads
//!   them by that number ([`ChosenIds`]).
//! - A step is *in flight* from its launch until its ids are read or it is discarded. Only `decode_greedy` leaves steps
//!   in flight when it returns; all other evaluations first discard them. The device still runs discarded steps. All
//!   uploads and launches are in the order of one stream, so that uploads for a later step cannot change what an
//!   earlier one reads.
//! - A *run* is the consecutive tokens of one sequence in a micro-batch. Recurrent layers divide it into *segments*, at
//!   positions whose state is kept.
//! - The *watch* of the device carries cancellation to the pass, and progress from it: each micro-batch adds the number
//!   of its tokens times that of the layers.
//!
//! Under tensor parallelism ([`TensorParallelPass`](crate::TensorParallelPass)) each rank has one `CudaForwardPass`
//! with a shard of the weights, and all ranks evaluate the same batches. The *exchange* adds the ranks' partial sums
//! and gathers their logits: each rank writes to the others' *mailboxes*, buffers in device memory. Results are
//! returned by rank 0. On the other ranks the methods return no rows, except that ids are read on every rank, for its
//! next steps.

use std::collections::HashMap;
use std::sync::Arc;

use metal_attention_gguf::{Tensor, TensorType};
use metal_attention_model::{
    BatchToken, CacheGroups, DeviceInfo, ForwardError, ForwardPass, LayerTrace, Logits, Lookahead, MemoryUse,
    ModelSpec, PageUse, Phase, Profile, Profiler, SequenceCache, TopK, Weights, check_outputs, highest, is_decode_step,
    micro_batches, one_run_per_sequence,
};

use crate::activations::{Activations, Widths};
use crate::args::{QueryTileArgs, TokenArgs};
use crate::decode::DecodeKernel;
use crate::decode_steps::DecodeGraph;
use crate::device::{Kernels, Readback};
use crate::exchange::{AbortFlag, Exchange};
use crate::ids::ChosenIds;
use crate::kv_cache::CudaKvCache;
use crate::profile::{self, Timers};
use crate::recurrent_state::{CudaRecurrentStates, RunSizes};
use crate::runner::{MicroBatchSize, ModelRunner, TOP_K, TokenOutput, max_few_tokens, top_k_list};
use crate::sharding::Shard;
use crate::support::supports;
use crate::weights::CudaWeights;
use crate::{CudaDevice, CudaError, CudaForwardPassOptions};

/// Most tokens of a query tile: the queries of one sequence that a block of `prefill_attention.cu` processes.
const QUERY_TILE_TOKENS: usize = 64;

/// Number of output head products that [`ForwardPass::wake`] launches to raise the clock: a millisecond or two of work.
const WAKE_PRODUCTS: usize = 16;

/// Runs a model, or one rank's shard of it, on an NVIDIA GPU.
pub struct CudaForwardPass {
    /// The model; under tensor parallelism, this rank's shard of it.
    pub(crate) spec: ModelSpec,
    /// The KV cache and the page tables.
    pub(crate) cache: CudaKvCache,
    /// The recurrent states.
    pub(crate) recurrent_states: CudaRecurrentStates,
    /// Launches kernels; has the device, the weights and the buffers.
    pub(crate) runner: ModelRunner,
    /// The persistent decode kernel, where it supports the model and the device.
    pub(crate) persistent_kernel: Option<DecodeKernel>,
    /// CUDA graphs of decode steps, by number of sequences and output: the first step of a size runs kernel by kernel,
    /// the next one is recorded.
    pub(crate) graphs: HashMap<(usize, TokenOutput), DecodeGraph>,
    /// Greedy decode steps in flight, by step number (see [`ChosenIds`]), and the batch that would continue what was
    /// chosen last, by which the continuing step is recognised.
    pub(crate) lookahead: Lookahead<u32>,
    /// Pinned host memory for the results of a micro-batch.
    readback: Readback,
    /// Pinned host memory for the pages and states that are read for a snapshot; allocated at the first one.
    pub(crate) snapshot_readback: Option<Readback>,
    /// Logits of the last batch that was evaluated for logits, `[n_outputs, n_vocab]`. On ranks other than 0 empty;
    /// after an error those of the micro-batches before it.
    logits: Vec<f32>,
    /// Bytes that were allocated on the GPU when the model was set up.
    memory: MemoryUse,
    /// Positions of a sequence, at most: the context length.
    n_ctx: usize,
    /// Collects kernel times, while a profile is recorded.
    profiler: Option<Profiler>,
}

impl CudaForwardPass {
    /// Sets a model up on `gpu`: uploads its weights, and allocates the KV cache and all buffers for micro-batches.
    ///
    /// # Errors
    /// For options out of range, parts of the model without kernels ([`supports`](Self::supports)), too little free
    /// memory, or a failure of the driver.
    pub fn new(
        gpu: Arc<CudaDevice>,
        spec: ModelSpec,
        weights: &Weights,
        options: &CudaForwardPassOptions,
    ) -> Result<Self, CudaError> {
        Self::with_shard(gpu, spec, weights, options, None)
    }

    /// Sets up one rank of a model that several ranks share, or the whole model (`shard` is `None`). `model_spec` and
    /// `weights` are those of the whole model in both cases. The rank's mailbox still has to be connected with those of
    /// the others.
    ///
    /// # Errors
    /// See [`new`](Self::new).
    pub(crate) fn with_shard(
        gpu: Arc<CudaDevice>,
        model_spec: ModelSpec,
        weights: &Weights,
        options: &CudaForwardPassOptions,
        shard: Option<(&Shard, &Arc<AbortFlag>)>,
    ) -> Result<Self, CudaError> {
        // `spec`: what this rank evaluates. `whole_spec`: the whole model, if this rank has a shard of it only.
        let (spec, whole_spec) = match shard {
            None => (model_spec, None),
            Some((shard, _)) => (shard.spec(&model_spec, weights), Some(model_spec)),
        };
        let capacity = options.capacity(&spec);
        if let Some((option, max)) = capacity.out_of_range() {
            return Err(CudaError::Option { option, max });
        }
        supports(&spec)?;
        // Tokens of the largest micro-batch.
        let n_ubatch = capacity.n_tokens(&spec);
        // Elements of the longest vector that ranks exchange: the hidden vectors of a micro-batch.
        let max_exchanged = n_ubatch * spec.n_embd;
        // `memory_needed` counts the rank's caches and buffers, as `spec` is the rank's, but the weights of the whole
        // model. What other ranks hold of these is subtracted.
        let needed_with_all_weights = options.memory_needed(&spec, weights).total();
        let needed = shard.map_or(needed_with_all_weights, |(shard, _)| {
            let mailbox = Exchange::bytes(&shard.plan, spec.n_vocab, max_exchanged);
            (needed_with_all_weights + mailbox).saturating_sub(shard.saved_bytes(weights))
        });
        let available = gpu.free_memory()?;
        if needed > available {
            return Err(CudaError::ModelTooLarge { needed, available });
        }
        let groups = CacheGroups::new(&spec, capacity);
        // The use of memory is measured: the device counts allocated bytes. First caches and scratch are allocated,
        // then weights, among which the small buffers of ids and of the persistent kernel are counted.
        let allocated_before = gpu.allocated_bytes();
        let cache = CudaKvCache::new(&gpu, &spec, &groups, options.cache_type)?;
        let recurrent_states = CudaRecurrentStates::new(&gpu, &spec, &groups, n_ubatch)?;
        let buffers = Activations::new(&gpu, &Widths::new(&spec, n_ubatch), n_ubatch)?;
        let kv_cache = cache.bytes() + recurrent_states.bytes();
        // `spec.n_vocab` is the whole vocabulary, also of a shard: ranks gather all logits.
        let exchange =
            shard.map(|(shard, abort)| Exchange::new(&gpu, shard, (spec.n_vocab, max_exchanged), abort)).transpose()?;
        let scratch = gpu.allocated_bytes() - allocated_before - kv_cache;
        let shard = shard.map(|(shard, _)| shard);
        // The context length, on which some RoPE scalings depend; and the positions of the RoPE tables, those that a
        // sequence can reach: the context's, or those of all pages if these are fewer.
        let rope_sizes = (capacity.n_ctx, capacity.n_positions());
        let cuda_weights = CudaWeights::new(&gpu, &spec, weights, shard.zip(whole_spec.as_ref()), rope_sizes)?;
        let ids = ChosenIds::new(&gpu, buffers.n_outputs)?;
        let persistent_kernel = DecodeKernel::new(
            &gpu,
            &spec,
            &cuda_weights,
            &cache,
            &buffers,
            &ids,
            shard,
            options.persistent_kernel_positions,
        )?;
        let weight_bytes = gpu.allocated_bytes() - allocated_before - kv_cache - scratch;
        let memory = MemoryUse { weights: weight_bytes, kv_cache, scratch };
        // `exact`: all products read F32 inputs (GEMV), so that the number of tokens of a batch does not change any bit
        // of a result. Otherwise products of more than four tokens read inputs rounded to F16 (GEMM). A model that is
        // mostly F32 is small, or is meant to be exact. A few F32 tensors, which many files have, do not count.
        let elements = |selects: &dyn Fn(TensorType) -> bool| -> usize {
            weights.tensors().into_iter().filter(|tensor| selects(tensor.ty())).map(Tensor::n_elements).sum()
        };
        let is_f32 = 2 * elements(&|ty| ty == TensorType::F32) > elements(&|_| true);
        let readback = Readback::new(&gpu, 4 * spec.n_vocab as u64)?;
        let runner = ModelRunner {
            max_few_tokens: max_few_tokens(gpu.summary(), spec.n_embd),
            gpu,
            kernels: Kernels::default(),
            weights: cuda_weights,
            buffers,
            ids,
            exact: options.exact || is_f32,
            exchange,
            n_launches: 0,
            timers: None,
        };
        Ok(Self {
            spec,
            cache,
            recurrent_states,
            runner,
            persistent_kernel,
            graphs: HashMap::new(),
            lookahead: Lookahead::default(),
            readback,
            snapshot_readback: None,
            logits: Vec::new(),
            memory,
            n_ctx: capacity.n_ctx,
            profiler: None,
        })
    }

    /// Checks that there are kernels for every part of `spec`. The error names the first part without kernels.
    pub fn supports(spec: &ModelSpec) -> Result<(), CudaError> {
        supports(spec)
    }

    /// The GPU that the model runs on.
    pub fn gpu(&self) -> &Arc<CudaDevice> {
        &self.runner.gpu
    }

    /// Bytes that were allocated on the GPU when the model was set up.
    pub fn memory_use(&self) -> MemoryUse {
        self.memory
    }

    /// The logits of the last batch that was evaluated for logits.
    pub(crate) fn last_logits(&self) -> Logits<'_> {
        Logits::new(&self.logits, self.spec.n_vocab)
    }

    /// Kernels launched so far. Kernels of a CUDA graph count in the warm-up step and when the graph is recorded, but
    /// not when it is launched.
    pub fn launches(&self) -> u64 {
        self.runner.n_launches
    }

    /// Uploads the tokens of a micro-batch and the rows of its output tokens, in the order of the stream: kernels that
    /// are launched next read them, kernels in flight still read the old ones.
    pub(crate) fn upload_batch(&self, batch: &[BatchToken]) -> Result<(), CudaError> {
        let runs = batch.chunk_by(|a, b| a.seq == b.seq);
        let tokens = runs.flat_map(|run| {
            // The last position of the run: masks that are not causal see up to there. Batches of models with such
            // masks have each sequence in one run.
            let last = run.last().map_or(0, |t| t.pos as u32);
            run.iter().map(move |t| TokenArgs { id: t.id, seq: t.seq as u32, pos: t.pos as u32, last })
        });
        let tokens: Vec<_> = tokens.collect();
        let output_rows = batch.iter().enumerate().filter(|(_, t)| t.output).map(|(i, _)| i as u32);
        let output_rows: Vec<u32> = output_rows.collect();
        self.runner.buffers.tokens.write(0, bytemuck::cast_slice(&tokens))?;
        self.runner.buffers.output_rows.write(0, bytemuck::cast_slice(&output_rows))
    }

    /// Cuts the runs of a micro-batch into query tiles for prefill attention, each of up to [`QUERY_TILE_TOKENS`]
    /// tokens, and uploads them, in the order of the stream. Returns their number.
    fn upload_query_tiles(&self, batch: &[BatchToken]) -> Result<usize, CudaError> {
        let mut tiles = Vec::new();
        let mut token = 0;
        // A sequence may have several runs, with tokens of other sequences in between.
        for run in batch.chunk_by(|a, b| a.seq == b.seq && a.pos + 1 == b.pos) {
            // Masks that are not causal see up to here. Batches of such models have each sequence in one run.
            let last = run[run.len() - 1].pos as u32;
            for tile in run.chunks(QUERY_TILE_TOKENS) {
                let (n, seq, pos) = (tile.len() as u32, tile[0].seq as u32, tile[0].pos as u32);
                tiles.push(QueryTileArgs { token, n, seq, pos, last });
                token += n;
            }
        }
        self.runner.buffers.query_tiles.write(0, bytemuck::cast_slice(&tiles))?;
        Ok(tiles.len())
    }

    /// Evaluates a batch. After each micro-batch, passes the rows of its output tokens to `take_rows`, in the order of
    /// the tokens, without padding. A row is:
    ///
    /// ```text
    /// output    elements of a row   type
    /// Hidden    n_embd              f32
    /// Logits    n_vocab             f32
    /// TopK      TOP_K               u64, keys that `top_k_list` reads
    /// Id        1                   u32
    /// ```
    ///
    /// The bytes lie in host memory that is aligned for the type. There are none on ranks other than 0, except for
    /// `Id`. For a micro-batch without output tokens there are none either, or, for `Id`, `take_rows` is not called.
    ///
    /// # Errors
    /// - The batch is invalid ([`check_outputs`], `check_batch` of the model crate): empty, an id, a sequence or a
    ///   position out of range, logits of a model without a head, a part of a sequence for a model without a causal
    ///   mask.
    /// - [`ForwardError::OutOfPages`], [`ForwardError::OutOfStates`]: the caches have no room for the batch.
    /// - The watch is cancelled, another rank has aborted the step, or the driver fails.
    ///
    /// Errors of the first two kinds come before anything has changed, except that steps in flight may be discarded.
    /// After the others all tokens of the batch are taken back from the page tables, and its sequences have their
    /// previous recurrent states again. These are still in their slots: `begin_batch` holds these slots, so that new
    /// states go to others. `take_rows` may have been called for earlier micro-batches.
    fn evaluate(
        &mut self,
        batch: &[BatchToken],
        output: TokenOutput,
        trace: Option<LayerTrace<'_>>,
        take_rows: impl FnMut(&[u8]),
    ) -> Result<(), ForwardError> {
        let needs_head = output != TokenOutput::Hidden;
        // `n_past` does not count steps in flight.
        check_outputs(&self.spec, batch, &|seq| self.n_past(seq), needs_head)?;
        self.clear_lookahead();
        self.cache.pages.check(batch, self.spec.n_vocab)?;
        self.cache.pages.begin_batch(batch);
        let outcome = self.evaluate_micro_batches(batch, output, trace, take_rows);
        if outcome.is_err() {
            // Timers of the micro-batch that failed would have later decode steps timed, kernel by kernel.
            self.runner.timers = None;
            self.cache.pages.retract(batch);
        }
        Ok(outcome?)
    }

    /// Cuts a batch into micro-batches and evaluates them one after the other. The caller takes their tokens back on an
    /// error.
    fn evaluate_micro_batches(
        &mut self,
        batch: &[BatchToken],
        output: TokenOutput,
        mut trace: Option<LayerTrace<'_>>,
        mut take_rows: impl FnMut(&[u8]),
    ) -> Result<(), CudaError> {
        let gpu = Arc::clone(&self.runner.gpu);
        gpu.bind()?;
        let max_outputs = match output {
            TokenOutput::Hidden => self.runner.buffers.n_tokens,
            TokenOutput::Logits | TokenOutput::TopK | TokenOutput::Id { feeds_next_step: _ } => {
                self.runner.buffers.n_outputs
            }
        };
        let of_size = micro_batches(&self.spec, batch, self.runner.buffers.n_tokens, max_outputs);
        let micro_batches: Vec<_> = if self.recurrent_states.is_empty() {
            of_size
        } else {
            // Kernels of recurrent layers process all runs at the same time, so a sequence may have one run only.
            of_size.into_iter().flat_map(one_run_per_sequence).collect()
        };
        for micro_batch in micro_batches {
            self.evaluate_micro_batch(&gpu, micro_batch, output, &mut trace, &mut take_rows)?;
        }
        Ok(())
    }

    /// Evaluates one micro-batch: assigns pages, uploads, launches, and waits for the results. `trace` gets the
    /// residual stream after each layer, `[n_tokens, n_embd]`. Preconditions: the device's context is bound to this
    /// thread, and no step is in flight.
    fn evaluate_micro_batch(
        &mut self,
        gpu: &Arc<CudaDevice>,
        micro_batch: &[BatchToken],
        output: TokenOutput,
        trace: &mut Option<LayerTrace<'_>>,
        take_rows: &mut impl FnMut(&[u8]),
    ) -> Result<(), CudaError> {
        // An error if the caller has cancelled.
        gpu.check_watch()?;
        // There are pages and slots: `check` has counted those of the whole batch.
        self.cache.append(micro_batch)?;
        self.cache.write_pages(micro_batch)?;
        self.upload_batch(micro_batch)?;
        // Uploads the runs and their state slots, and returns the number of runs and the length of the longest.
        let runs = self.recurrent_states.write(self.cache.pages.segments(micro_batch))?;
        let n_outputs = micro_batch.iter().filter(|t| t.output).count();
        // Taken below, or after an error by `evaluate`.
        self.runner.timers = self.profiler.is_some().then(|| Timers::new(gpu));
        if is_decode_step(micro_batch) && trace.is_none() {
            // The position matters only to the persistent kernel, which evaluates steps of a single sequence.
            let (n_sequences, pos) = (micro_batch.len(), micro_batch[0].pos);
            self.launch_decode_steps(n_sequences, pos, /* max_steps */ 1, output)?;
        } else {
            // With one token of each sequence, attention has the kernels of decode steps, which need no query tiles.
            let is_decode_phase = Phase::of(micro_batch) == Phase::Decode;
            let n_query_tiles = if is_decode_phase { 0 } else { self.upload_query_tiles(micro_batch)? };
            let size = MicroBatchSize { n_tokens: micro_batch.len(), n_outputs, n_query_tiles, runs, output };
            let trace_bytes = 4 * (micro_batch.len() * self.spec.n_embd) as u64;
            // A micro-batch that chooses ids gets a step number, under which `read_results` reads them.
            self.with_step_number(size, |pass| {
                pass.runner.run(&pass.spec, (&pass.cache, &pass.recurrent_states), size, |layer, residual_stream| {
                    let Some(trace) = trace.as_deref_mut() else { return Ok(()) };
                    let mut readback = Readback::new(gpu, trace_bytes)?;
                    readback.copy(residual_stream, trace_bytes)?;
                    trace(layer, &bytemuck::pod_collect_to_vec::<u8, f32>(readback.read(trace_bytes)?));
                    Ok(())
                })
            })?;
        }
        self.read_results(n_outputs, output, take_rows)?;
        if let (Some(timers), Some(profiler)) = (self.runner.timers.take(), &mut self.profiler) {
            profiler.add_step(timers.step(Phase::of(micro_batch), micro_batch.len())?);
        }
        gpu.watch().advance((micro_batch.len() * self.spec.n_layer()) as u64);
        Ok(())
    }

    /// Waits for the micro-batch that was launched last, and passes its `n_outputs` rows to `take_rows`
    /// (see [`evaluate`](Self::evaluate)).
    fn read_results(
        &mut self,
        n_outputs: usize,
        output: TokenOutput,
        take_rows: &mut impl FnMut(&[u8]),
    ) -> Result<(), CudaError> {
        let buffers = &self.runner.buffers;
        let (source, row_bytes) = match output {
            TokenOutput::Hidden => (&buffers.hidden, 4 * self.spec.n_embd as u64),
            TokenOutput::Logits => (&buffers.logits, 4 * self.spec.n_vocab as u64),
            TokenOutput::TopK => (&buffers.top_k, 8 * TOP_K as u64),
            // The kernel writes ids to host memory itself. No bytes are copied, whatever the buffer.
            TokenOutput::Id { feeds_next_step: _ } => (&buffers.logits, 0),
        };
        // All ranks have the same results, so only rank 0 copies them. Every rank needs the ids, for its next steps.
        let bytes = if self.runner.returns_results() { row_bytes * n_outputs as u64 } else { 0 };
        if self.readback.bytes() < bytes {
            self.readback = Readback::new(&self.runner.gpu, bytes)?;
        }
        // Waits even for no bytes, so that the host is never more than one micro-batch ahead of the device: progress
        // reports and cancellation depend on that.
        self.readback.copy(source, bytes)?;
        let read = self.readback.read(bytes)?;
        // An error if any rank has aborted an exchange of the micro-batch: the results are invalid then.
        self.runner.check_not_aborted()?;
        match output {
            TokenOutput::Hidden | TokenOutput::Logits | TokenOutput::TopK => take_rows(read),
            TokenOutput::Id { feeds_next_step: _ } if n_outputs == 0 => {}
            TokenOutput::Id { feeds_next_step: _ } => {
                take_rows(bytemuck::cast_slice(&self.runner.ids.last(n_outputs)?));
            }
        }
        Ok(())
    }

    /// Launches products of the output head on stale data and waits for them, and for steps in flight, so that the
    /// device raises its clock. The logits buffer is overwritten; each step computes it anew before it reads it. Under
    /// tensor parallelism all ranks have to call it together.
    fn raise_clock(&mut self) -> Result<(), CudaError> {
        let gpu = Arc::clone(&self.runner.gpu);
        gpu.bind()?;
        gpu.check_watch()?;
        let runs = RunSizes::of_decode(1);
        let size = MicroBatchSize { n_tokens: 1, n_outputs: 1, n_query_tiles: 0, runs, output: TokenOutput::Logits };
        for _ in 0..WAKE_PRODUCTS {
            self.runner.output_head(&self.spec, size)?;
        }
        gpu.wait()
    }
}

/// The contracts are those of the trait.
impl ForwardPass for CudaForwardPass {
    fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    fn device(&self) -> DeviceInfo {
        let gpu = self.runner.gpu.summary();
        let driver = format!("CUDA {}.{}", gpu.driver / 1000, gpu.driver % 1000 / 10);
        DeviceInfo { kind: "cuda", name: gpu.name.clone(), driver: Some(driver), n_threads: 1 }
    }

    fn n_ctx(&self) -> usize {
        self.n_ctx
    }

    fn n_seq(&self) -> usize {
        self.cache.pages.n_seq()
    }

    fn n_ubatch(&self) -> usize {
        self.runner.buffers.n_tokens
    }

    fn n_past(&self, seq: usize) -> usize {
        self.cache.pages.n_past(seq)
    }

    fn rewind(&mut self, seq: usize, n: usize) -> usize {
        if n < self.n_past(seq) {
            self.stop_lookahead_of(seq);
        }
        self.cache.pages.rewind(seq, n)
    }

    fn reachable(&self, seq: usize, n: usize) -> usize {
        self.cache.pages.reachable(seq, n)
    }

    fn share_prefix(&mut self, from: usize, to: usize, n: usize) -> Result<usize, ForwardError> {
        // Decode steps in flight may still write to pages that would be shared.
        self.stop_lookahead_of(from);
        self.stop_lookahead_of(to);
        self.cache.pages.share(from, to, n)
    }

    fn cache_pages(&self) -> PageUse {
        self.cache.pages.usage()
    }

    fn pages_held(&self, sequences: &[usize]) -> usize {
        self.cache.pages.pages_held(sequences)
    }

    fn kv_cache_bytes(&self) -> usize {
        (self.cache.bytes() + self.recurrent_states.bytes()) as usize
    }

    fn cache(&mut self) -> &mut dyn SequenceCache {
        self
    }

    fn forward_traced(
        &mut self,
        batch: &[BatchToken],
        trace: Option<LayerTrace<'_>>,
    ) -> Result<Logits<'_>, ForwardError> {
        // Taken out of `self`, which `evaluate` borrows.
        let mut logits = std::mem::take(&mut self.logits);
        logits.clear();
        let outcome = self.evaluate(batch, TokenOutput::Logits, trace, |bytes| {
            logits.extend_from_slice(bytemuck::cast_slice(bytes));
        });
        self.logits = logits;
        outcome?;
        Ok(Logits::new(&self.logits, self.spec.n_vocab))
    }

    fn forward_hidden(&mut self, batch: &[BatchToken]) -> Result<Vec<f32>, ForwardError> {
        let mut hidden = Vec::new();
        self.evaluate(batch, TokenOutput::Hidden, None, |bytes| hidden.extend_from_slice(bytemuck::cast_slice(bytes)))?;
        Ok(hidden)
    }

    fn forward_greedy(&mut self, batch: &[BatchToken]) -> Result<Vec<u32>, ForwardError> {
        // `decode_greedy` does not go through `evaluate`, which makes this check for the other paths.
        check_outputs(&self.spec, batch, &|seq| self.n_past(seq), /* needs_head */ true)?;
        if self.profiler.is_none() && batch.len() <= self.runner.buffers.n_outputs && is_decode_step(batch) {
            return self.decode_greedy(batch);
        }
        let mut ids = Vec::new();
        self.evaluate(batch, TokenOutput::Id { feeds_next_step: false }, None, |bytes| {
            ids.extend_from_slice(bytemuck::cast_slice(bytes));
        })?;
        let output_tokens: Vec<_> = batch.iter().filter(|t| t.output).copied().collect();
        // No step is in flight. If the next batch is the decode step that continues these ids, `decode_greedy`
        // recognises it by this entry, and submits steps ahead at once.
        self.lookahead.advance(&output_tokens, &ids);
        Ok(ids)
    }

    fn forward_top_k(&mut self, batch: &[BatchToken], k: usize) -> Result<Vec<TopK>, ForwardError> {
        if k > TOP_K {
            let logits = self.forward(batch)?;
            return Ok((0..logits.n_rows()).map(|i| highest(logits.row(i), k)).collect());
        }
        let mut lists = Vec::new();
        self.evaluate(batch, TokenOutput::TopK, None, |bytes| {
            let keys: &[u64] = bytemuck::cast_slice(bytes);
            lists.extend(keys.chunks_exact(TOP_K).map(top_k_list));
        })?;
        for list in &mut lists {
            list.truncate(k);
        }
        Ok(lists)
    }

    fn max_top_k(&self) -> usize {
        TOP_K
    }

    fn start_profile(&mut self) -> Result<(), ForwardError> {
        self.profiler =
            Some(Profiler::new(format!("CUDA, {}", self.runner.gpu.summary().name)).with_note(profile::NOTE));
        Ok(())
    }

    fn take_profile(&mut self) -> Option<Profile> {
        self.profiler.take().map(Profiler::finish)
    }

    /// True if the products were launched and have ended; any error is `false`. A profile does not record them.
    fn wake(&mut self) -> bool {
        self.spec.output.head.is_some() && self.raise_clock().is_ok()
    }
}
