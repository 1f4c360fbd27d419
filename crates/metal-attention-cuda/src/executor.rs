//! [`CudaExecutor`]: evaluates the steps of a session on one NVIDIA GPU.
//!
//! Input: a step, that is, tokens ([`BatchToken`](metal_attention_model::BatchToken): id, sequence, index, whether it is an
//! output token) with the page table, and spans of embedding rows in the place of some tokens. Output, for each output token: logits, the highest logits, the id of the highest, or the hidden vector. Side
//! effect: the KV cache and the recurrent states hold the step's tokens afterwards.
//!
//! For each step the host uploads tokens (`inputs.rs`), page tables and state slots, launches the kernels ([`ModelRunner`]), and waits
//! for the results. The calls:
//!
//! ```text
//! run                          one step
//!   evaluate                   uploads, launches, reads the results
//!     launch_decode_steps      (decode_steps.rs) for a decode step without a trace
//!     launch_micro_batch       (decode_steps.rs) for other small micro-batches, which may be CUDA graphs
//!     ModelRunner::run         for all others: kernel by kernel
//! submit                       (lookahead.rs) greedy decode steps, whose ids are read later
//!   launch_decode_steps
//! read                         waits for the ids of a submitted step
//! ```
//!
//! Terms:
//! - A *decode step* has one token of each of `n` sequences, all of them output tokens ([`is_decode_step`]).
//!   [`Phase::Decode`] requires less: one token of each sequence, with output or without.
//! - A *step number* numbers the steps that choose ids, in the order of their launches. The device writes chosen ids to
//!   host memory together with the step's number, and the host reads them by that number ([`ChosenIds`]).
//! - A step is *in flight* from its submission until its ids are read or it is discarded. The device still runs discarded
//!   steps. All uploads and launches are in the order of one stream, so uploads for a later step cannot change what an
//!   earlier one reads.
//! - A *run* is the consecutive tokens of one sequence in a step. Recurrent layers divide it into *segments*, at
//!   positions whose state is kept.
//! - The *watch* of the device carries cancellation to the executor, and progress from it: each step adds its tokens
//!   times the layers.
//!
//! Under tensor parallelism ([`TensorParallelExecutor`](crate::TensorParallelExecutor)) each rank has one `CudaExecutor`
//! with a shard of the weights, and all ranks evaluate the same steps. The *exchange* adds the ranks' partial sums and
//! gathers their logits: each rank writes to the others' *mailboxes*, buffers in device memory. Rank 0 returns the
//! results.

use std::collections::HashMap;
use std::io::Write;
use std::ops::Range;
use std::sync::Arc;

use metal_attention_gguf::{Tensor, TensorType};
use metal_attention_model::{
    CacheBlock, CacheGroups, CacheLayout, DeviceInfo, Executor, ForwardError, LayerTrace, LoadedAssistant, LoadedModel,
    MemoryUse, ModelSpec, PageCopy, Phase, Profiler, Session, SessionOptions, SnapshotError, Step, StepLimits,
    StepResults, is_decode_step,
};

use crate::activations::{Activations, Widths};
use crate::decode::DecodeKernel;
use crate::decode_steps::{StepGraph, StepGraphKey};
use crate::device::Readback;
use crate::exchange::{AbortFlag, Exchange};
use crate::ids::ChosenIds;
use crate::inputs::{QueryTiles, SpanInputs, upload_query_tiles};
use crate::kernels::Kernels;
use crate::kv_cache::CudaKvCache;
use crate::matrix::packed_bytes;
use crate::profile::{self, Timers};
use crate::recurrent_state::{CudaRecurrentStates, RunSizes};
use crate::runner::{
    MicroBatch, MicroBatchSize, ModelRunner, TOP_K, TokenOutput, max_few_tokens, max_gemv_tokens, top_k_list,
};
use crate::sharding::Shard;
use crate::support::supports;
use crate::trace::TraceReader;
use crate::weights::CudaWeights;
use crate::{CudaDevice, CudaError, CudaTuning};

/// Number of output head products that [`Executor::wake`] launches to raise the clock: a millisecond or two of work.
const WAKE_PRODUCTS: usize = 16;

/// A forward pass on one NVIDIA GPU.
pub type CudaForwardPass = Session<CudaExecutor>;

/// Runs a model, or one rank's shard of it, on an NVIDIA GPU.
pub struct CudaExecutor {
    /// The model; under tensor parallelism, this rank's shard of it.
    pub(crate) spec: ModelSpec,
    /// The cache groups: which layers share page numbers.
    groups: CacheGroups,
    /// The KV cache.
    pub(crate) cache: CudaKvCache,
    /// The recurrent states.
    pub(crate) recurrent_states: CudaRecurrentStates,
    /// Launches kernels; has the device, the weights and the buffers.
    pub(crate) runner: ModelRunner,
    /// The persistent decode kernel, where it supports the model and the device.
    pub(crate) persistent_kernel: Option<DecodeKernel>,
    /// CUDA graphs of decode steps and of other small micro-batches.
    pub(crate) graphs: HashMap<StepGraphKey, StepGraph>,
    /// Pinned host memory for the results of a micro-batch.
    readback: Readback,
    /// Pinned host memory for rows of a trace; allocated at the first one.
    trace_readback: Option<Readback>,
    /// Pinned host memory for the pages and states that are read for a snapshot; allocated at the first one.
    pub(crate) snapshot_readback: Option<Readback>,
    /// Bytes that were allocated on the GPU when the model was set up.
    memory: MemoryUse,
}

/// The executor of another model on the same GPU.
#[derive(Clone, Copy)]
pub(crate) struct First<'f> {
    /// The executor, whose ends are shared where they are the same.
    executor: &'f CudaExecutor,
    /// Whether the model is an assistant of that one, whose KV cache it reads.
    is_target: bool,
}

impl CudaExecutor {
    /// A session with a model, tuned by the GPU: see [`new`](Self::new).
    pub fn session(
        gpu: Arc<CudaDevice>,
        model: &LoadedModel,
        options: &SessionOptions,
    ) -> Result<CudaForwardPass, CudaError> {
        Self::tuned_session(gpu, model, options, &CudaTuning::default())
    }

    /// A session with a model: see [`new`](Self::new).
    pub fn tuned_session(
        gpu: Arc<CudaDevice>,
        model: &LoadedModel,
        options: &SessionOptions,
        tuning: &CudaTuning,
    ) -> Result<CudaForwardPass, CudaError> {
        Ok(Session::new(Self::new(gpu, model, options, tuning)?))
    }

    /// Sets a model up on `gpu`: uploads its weights, and allocates the KV cache and all buffers for micro-batches.
    ///
    /// # Errors
    /// For options out of range, parts of the model without kernels ([`supports`](Self::supports)), too little free
    /// memory, or a failure of the driver.
    pub fn new(
        gpu: Arc<CudaDevice>,
        model: &LoadedModel,
        options: &SessionOptions,
        tuning: &CudaTuning,
    ) -> Result<Self, CudaError> {
        Self::with_shard(gpu, model, (options, tuning), None, None)
    }

    /// [`new`](Self::new) on the GPU of `first`, for a model that was [loaded beside](LoadedModel::load_beside) that of `first`:
    /// an embedding table and an output head that are those of `first` are not uploaded again, and their memory is not counted.
    pub fn beside(
        first: &Self,
        model: &LoadedModel,
        options: &SessionOptions,
        tuning: &CudaTuning,
    ) -> Result<Self, CudaError> {
        let first_model = First { executor: first, is_target: false };
        Self::with_shard(Arc::clone(first.gpu()), model, (options, tuning), None, Some(first_model))
    }

    /// Sets up an assistant of the model of `target`, to be [attached](Session::attach_assistant) to its session: it reads the
    /// KV cache of `target`, and has none.
    ///
    /// # Errors
    /// As of [`new`](Self::new).
    pub fn assistant(
        target: &Self,
        assistant: &LoadedAssistant,
        options: &SessionOptions,
        tuning: &CudaTuning,
    ) -> Result<Self, CudaError> {
        let first = First { executor: target, is_target: true };
        Self::with_shard(Arc::clone(target.gpu()), assistant.as_model(), (options, tuning), None, Some(first))
    }

    /// Sets up one rank of a model that several ranks share, or the whole model (`shard` is `None`). `model` is the
    /// whole model in both cases. The rank's mailbox still has to be connected with those of
    /// the others. `first`: the executor of another model on `gpu`; `None` with a shard.
    ///
    /// # Errors
    /// See [`new`](Self::new).
    pub(crate) fn with_shard(
        gpu: Arc<CudaDevice>,
        model: &LoadedModel,
        (options, tuning): (&SessionOptions, &CudaTuning),
        shard: Option<(&Shard, &Arc<AbortFlag>)>,
        first: Option<First<'_>>,
    ) -> Result<Self, CudaError> {
        let weights = model.weights();
        let target = first.filter(|first| first.is_target).map(|first| first.executor);
        let first = first.map_or(&[][..], |first| &first.executor.runner.weights.ends);
        // What this rank evaluates.
        let spec = match shard {
            None => model.spec().clone(),
            Some((shard, _)) => shard.spec(model),
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
        // `memory_needed_for` counts the rank's caches and buffers, as `spec` is the rank's, but the weights of the whole
        // model. What other ranks hold of these is subtracted.
        let is_shared = |tensor: &&Tensor| first.iter().any(|(of_first, _)| of_first.is_same(tensor));
        let shared: u64 = weights.tensors().into_iter().filter(is_shared).map(packed_bytes).sum();
        let needed_with_all_weights = Self::memory_needed_for(&spec, weights, options).total().saturating_sub(shared);
        let needed = shard.map_or(needed_with_all_weights, |(shard, _)| {
            let mailbox = Exchange::bytes(&shard.plan, spec.n_vocab, max_exchanged);
            (needed_with_all_weights + mailbox).saturating_sub(shard.saved_bytes(weights))
        });
        let available = gpu.free_memory()?;
        if needed > available {
            return Err(CudaError::ModelTooLarge { needed, available });
        }
        let groups = match target {
            Some(target) => target.groups.of_assistant(&spec),
            None => CacheGroups::new(&spec, capacity),
        };
        let capacity = target.map_or(capacity, |target| target.groups.capacity());
        // The use of memory is measured: the device counts allocated bytes. First caches and scratch are allocated,
        // then weights, among which the small buffers of ids and of the persistent kernel are counted.
        let allocated_before = gpu.allocated_bytes();
        let cache = match target {
            Some(target) => CudaKvCache::of_assistant(&gpu, &target.cache, &spec, &groups)?,
            None => CudaKvCache::new(&gpu, &spec, &groups, options.cache_type)?,
        };
        let recurrent_states = CudaRecurrentStates::new(&gpu, &spec, &groups, n_ubatch)?;
        let buffers = Activations::new(&gpu, &Widths::new(&spec, n_ubatch))?;
        let kv_cache = cache.bytes() + recurrent_states.bytes();
        // `spec.n_vocab` is the whole vocabulary, also of a shard: ranks gather all logits.
        let exchange =
            shard.map(|(shard, abort)| Exchange::new(&gpu, shard, (spec.n_vocab, max_exchanged), abort)).transpose()?;
        let scratch = gpu.allocated_bytes() - allocated_before - kv_cache;
        let shard = shard.map(|(shard, _)| shard);
        let rope_sizes = [capacity.n_ctx, capacity.n_positions(), n_ubatch];
        let cuda_weights = CudaWeights::new(&gpu, &spec, weights, shard, rope_sizes, first)?;
        let ids = ChosenIds::new(&gpu, buffers.n_outputs)?;
        let persistent_kernel = DecodeKernel::new(
            &gpu,
            &spec,
            &cuda_weights,
            &cache,
            &buffers,
            &ids,
            shard,
            tuning.persistent_kernel_positions,
        )?;
        let weight_bytes = gpu.allocated_bytes() - allocated_before - kv_cache - scratch;
        let memory = MemoryUse { weights: weight_bytes, kv_cache, scratch };
        // `exact`: all products read F32 inputs (GEMV), so that the number of tokens of a batch does not change any bit
        // of a result. Otherwise products of more than two or four tokens read inputs rounded to F16 (GEMM). A model that is
        // mostly F32 is small, or is meant to be exact. A few F32 tensors, which many files have, do not count.
        let elements = |selects: &dyn Fn(TensorType) -> bool| -> usize {
            weights.tensors().into_iter().filter(|tensor| selects(tensor.ty())).map(Tensor::n_elements).sum()
        };
        let is_f32 = 2 * elements(&|ty| ty == TensorType::F32) > elements(&|_| true);
        let readback = Readback::new(&gpu, 4 * spec.n_vocab as u64)?;
        let runner = ModelRunner {
            max_gemv_tokens: max_gemv_tokens(&spec),
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
            readback,
            trace_readback: None,
            snapshot_readback: None,
            groups,
            memory,
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

    /// Kernels launched so far. Kernels of a CUDA graph count in the warm-up step and when the graph is recorded, but
    /// not when it is launched.
    pub fn launches(&self) -> u64 {
        self.runner.n_launches
    }

    /// Evaluates a step: uploads, launches, and waits for the results. On ranks other than 0 `results` is `None`. `trace`
    /// copies rows of the residual stream. Precondition: no step is in flight.
    ///
    /// # Errors
    /// The watch is cancelled, another rank has aborted the step, or the driver fails.
    pub(crate) fn run_step(
        &mut self,
        step: &Step,
        output: TokenOutput,
        results: Option<StepResults<'_>>,
        trace: Option<LayerTrace<'_>>,
        profiler: Option<&mut Profiler>,
    ) -> Result<(), CudaError> {
        let outcome = self.evaluate(step, output, results, trace, profiler);
        if outcome.is_err() {
            // Timers that are left would make later decode steps run kernel by kernel, with timing.
            self.runner.timers = None;
        }
        outcome
    }

    /// [`run_step`](Self::run_step), which drops the timers after an error.
    fn evaluate(
        &mut self,
        step: &Step,
        output: TokenOutput,
        results: Option<StepResults<'_>>,
        trace: Option<LayerTrace<'_>>,
        profiler: Option<&mut Profiler>,
    ) -> Result<(), CudaError> {
        let gpu = Arc::clone(&self.runner.gpu);
        gpu.bind()?;
        // An error if the caller has cancelled.
        gpu.check_watch()?;
        let tokens = &step.tokens[..];
        self.cache.write_pages(tokens, &step.pages)?;
        let (seen, lists) = self.upload_tokens(step)?;
        // Uploads the runs and their state slots, and returns the number of runs and the length of the longest.
        let runs = self.recurrent_states.write(step.pages.segments(tokens))?;
        let n_outputs = step.n_outputs();
        // Taken below, or after an error by `run_step`.
        self.runner.timers = profiler.is_some().then(|| Timers::new(&gpu));
        let is_plain = trace.is_none() && step.inputs.is_none() && step.states.is_none() && !self.spec.takes_context;
        if is_decode_step(tokens) && is_plain {
            // The position matters only to the persistent kernel, which evaluates steps of a single sequence.
            self.launch_decode_steps(tokens.len(), tokens[0].pos, /* max_steps */ 1, output)?;
        } else {
            // With one token of each sequence, attention has the kernels of decode steps, which need no query tiles.
            let is_decode_phase = Phase::of(tokens) == Phase::Decode;
            let query_tiles = if is_decode_phase {
                QueryTiles::default()
            } else {
                upload_query_tiles(&lists[0], &self.runner.buffers)?
            };
            let spans = SpanInputs::new(step, seen, lists);
            let size = MicroBatchSize { n_tokens: tokens.len(), n_outputs, query_tiles, runs, output };
            let traced = trace.as_ref().map_or(&[][..], |trace| trace.before);
            let traces_norm = traced.contains(&(self.spec.n_layer() + 1));
            let mut reader = match trace {
                Some(trace) => {
                    let width = self.traced_width(&trace);
                    TraceReader::new(&gpu, &mut self.trace_readback, trace, tokens, width)?
                }
                None => None,
            };
            // Rows before a layer are copied between the launches; those after the last layer are still there at their end, unless streams were
            // merged in their place.
            let [last, normed] = [self.spec.n_layer(), self.spec.n_layer() + 1];
            let has_streams = self.runner.weights.embedding.streams.is_some();
            let is_traced_at_end = traced.iter().all(|&layer| layer == normed || layer == last && !has_streams);
            let is_small = tokens.len() <= self.runner.max_few_tokens;
            let states_are_uploaded = self.runner.upload_states(step.states.as_deref().unwrap_or_default())?;
            let is_plain = spans.is_none() && states_are_uploaded && !self.spec.takes_context;
            let may_be_graph = is_small && is_plain && is_traced_at_end;
            // A step that chooses ids gets a step number, under which `read_results` reads them.
            self.with_step_number(size, |this| {
                if may_be_graph {
                    this.launch_micro_batch(StepGraphKey { size, traces_norm })?;
                    let buffers = &this.runner.buffers;
                    let mut copy =
                        |layer, rows| reader.as_mut().map_or(Ok(()), |reader| reader.before_layer(layer, rows));
                    copy(last, &buffers.x)?;
                    return copy(normed, &buffers.h);
                }
                let batch = MicroBatch {
                    spec: &this.spec,
                    cache: &this.cache,
                    recurrent: &this.recurrent_states,
                    size,
                    spans: spans.as_ref(),
                    states: step.states.as_deref().unwrap_or_default(),
                    context: step.context.as_deref(),
                };
                this.runner.run(batch, traces_norm, |layer, residual_stream| {
                    reader.as_mut().map_or(Ok(()), |reader| reader.before_layer(layer, residual_stream))
                })
            })?;
            if let Some(reader) = reader {
                self.trace_readback = Some(reader.finish()?);
            }
        }
        self.read_results(n_outputs, output, results)?;
        if let (Some(timers), Some(profiler)) = (self.runner.timers.take(), profiler) {
            profiler.add_step(timers.begin, timers.step(step.phase, tokens.len())?);
        }
        gpu.watch().advance((tokens.len() * self.spec.n_layer()) as u64);
        Ok(())
    }

    /// Elements of a traced row: of an assistant's next states as many as its target's residual stream is wide.
    fn traced_width(&self, trace: &LayerTrace<'_>) -> usize {
        let assistant = self.spec.embedding.assistant.filter(|_| trace.before == [self.spec.n_layer() + 2]);
        assistant.map_or(self.spec.n_embd, |assistant| assistant.target_width)
    }

    /// Waits for the step that was launched last, and writes the results of its `n_outputs` output tokens.
    fn read_results(
        &mut self,
        n_outputs: usize,
        output: TokenOutput,
        results: Option<StepResults<'_>>,
    ) -> Result<(), CudaError> {
        let buffers = &self.runner.buffers;
        let (source, row_bytes) = match output {
            TokenOutput::Hidden => (&buffers.hidden, 4 * self.spec.n_embd as u64),
            TokenOutput::Logits => (&buffers.logits, 4 * self.spec.n_vocab as u64),
            TokenOutput::TopK => (&buffers.top_k, 8 * TOP_K as u64),
            // The kernel writes ids to host memory itself. No bytes are copied, whatever the buffer.
            TokenOutput::Id { feeds_next_step: _ } => (&buffers.logits, 0),
        };
        // All ranks have the same results, so only rank 0 copies them.
        let bytes = if results.is_some() { row_bytes * n_outputs as u64 } else { 0 };
        if self.readback.bytes() < bytes {
            self.readback = Readback::new(&self.runner.gpu, bytes)?;
        }
        // Waits even for no bytes, so that steps of `run` are never more than one ahead of the device: progress reports and
        // cancellation depend on that.
        self.readback.copy(source, bytes)?;
        let read = self.readback.read(bytes)?;
        // An error if any rank has aborted an exchange of the step: the results are invalid then.
        self.runner.check_not_aborted()?;
        match results {
            Some(StepResults::Hidden(rows) | StepResults::Logits(rows)) => {
                rows.copy_from_slice(bytemuck::cast_slice(read));
            }
            Some(StepResults::TopK(lists)) => {
                let keys: &[u64] = bytemuck::cast_slice(read);
                lists.iter_mut().zip(keys.chunks_exact(TOP_K)).for_each(|(list, keys)| *list = top_k_list(keys));
            }
            Some(StepResults::Ids(ids)) if !ids.is_empty() => {
                ids.copy_from_slice(&self.runner.ids.last(n_outputs)?);
            }
            Some(StepResults::Ids(_)) | None => {}
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
        let query_tiles = QueryTiles::default();
        let size = MicroBatchSize { n_tokens: 1, n_outputs: 1, query_tiles, runs, output: TokenOutput::Logits };
        for _ in 0..WAKE_PRODUCTS {
            self.runner.output_head(&self.spec, size)?;
        }
        gpu.wait()
    }
}

/// The kernels' kind of output for `results`.
pub(crate) fn output_of(results: &StepResults<'_>) -> TokenOutput {
    match results {
        StepResults::Hidden(_) => TokenOutput::Hidden,
        StepResults::Logits(_) => TokenOutput::Logits,
        StepResults::TopK(_) => TokenOutput::TopK,
        // Only submitted steps write the ids to the device's tokens.
        StepResults::Ids(_) => TokenOutput::Id { feeds_next_step: false },
    }
}

/// The contracts are those of the trait.
impl Executor for CudaExecutor {
    /// The step's number.
    type InFlight = u32;

    fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    fn device(&self) -> DeviceInfo {
        self.runner.gpu.info()
    }

    fn cache_groups(&self) -> &CacheGroups {
        &self.groups
    }

    fn limits(&self) -> StepLimits {
        let buffers = &self.runner.buffers;
        StepLimits {
            n_tokens: buffers.n_tokens,
            n_outputs: buffers.n_outputs,
            // Kernels of recurrent layers process all runs at the same time.
            one_run_per_sequence: !self.recurrent_states.is_empty(),
            chooses_ids: true,
            max_top_k: TOP_K,
            n_ahead: buffers.n_outputs,
        }
    }

    /// Bytes that were allocated on the GPU when the model was set up.
    fn memory_use(&self, _results: usize) -> MemoryUse {
        self.memory
    }

    fn begin_batch(&mut self) -> Result<(), ForwardError> {
        self.runner.gpu.bind()?;
        Ok(self.runner.gpu.check_watch()?)
    }

    fn copy_page(&mut self, copy: PageCopy) -> Result<(), ForwardError> {
        self.runner.gpu.bind()?;
        Ok(self.cache.copy_page(copy)?)
    }

    fn run(
        &mut self,
        step: &Step,
        results: StepResults<'_>,
        trace: Option<LayerTrace<'_>>,
        profiler: Option<&mut Profiler>,
    ) -> Result<(), ForwardError> {
        step.check_windows_hold_blocks(&self.spec)?;
        Ok(self.run_step(step, output_of(&results), Some(results), trace, profiler)?)
    }

    fn n_at_once(&self, pos: usize) -> usize {
        self.steps_per_launch(pos).max(1)
    }

    fn submit(&mut self, step: &Step, ahead: Range<usize>) -> Result<Vec<u32>, ForwardError> {
        Ok(self.submit_decode(step, ahead)?)
    }

    fn read(&mut self, number: u32, ids: &mut [u32]) -> Result<bool, ForwardError> {
        self.read_decode(number, ids)?;
        Ok(true)
    }

    fn cache_layout(&self) -> CacheLayout {
        CacheLayout {
            format: format!("cuda {}", self.cache.cache_type),
            page_bytes: (0..self.groups.groups().len()).map(|group| self.cache.page_bytes(group)).collect(),
            state_bytes: self.recurrent_states.slot_bytes(),
        }
    }

    fn cache_bytes(&self) -> usize {
        (self.cache.bytes() + self.recurrent_states.bytes()) as usize
    }

    fn read_block(&mut self, block: CacheBlock, bytes: &mut [u8]) -> Result<(), ForwardError> {
        bytes.copy_from_slice(self.read_some(&[block])?.1);
        Ok(())
    }

    fn read_blocks(&mut self, mut blocks: &[CacheBlock], out: &mut dyn Write) -> Result<(), SnapshotError> {
        while !blocks.is_empty() {
            let (n, bytes) = self.read_some(blocks).map_err(ForwardError::from)?;
            out.write_all(bytes).map_err(SnapshotError::Write)?;
            blocks = &blocks[n..];
        }
        Ok(())
    }

    fn write_block(&mut self, block: CacheBlock, bytes: &[u8]) -> Result<(), ForwardError> {
        Ok(self.write_block_parts(block, bytes)?)
    }

    fn profiler(&self) -> Result<Profiler, ForwardError> {
        Ok(Profiler::new(format!("CUDA, {}", self.runner.gpu.summary().name)).with_note(profile::NOTE))
    }

    /// True if the products were launched and have ended; any error is `false`.
    fn wake(&mut self) -> bool {
        self.spec.output.head.is_some() && self.raise_clock().is_ok()
    }
}
