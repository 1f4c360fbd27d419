//! [`CudaForwardPass`]: one model on one NVIDIA GPU.
//!
//! Input: a batch of tokens ([`BatchToken`]: id, sequence, position, whether its output is needed). Output, for each token that
//! needs it: logits, the highest logits, the id of the highest, or the hidden vector. Side effect: the KV cache and the recurrent
//! states hold the batch's tokens afterwards.
//!
//! A batch is evaluated in micro-batches of at most `n_ubatch` tokens. For each one the host assigns KV pages, uploads tokens, page
//! tables and state slots, launches the kernels ([`ModelRunner`]), and waits for the results. A decode step, one token of each of
//! `n` sequences, is launched in one of three ways:
//! - by the persistent kernel (`decode.rs`), which takes a single sequence through all layers in one launch, possibly for several
//!   tokens, each the highest logit of the one before;
//! - by a CUDA graph, from the second step of that size on;
//! - kernel by kernel: the warm-up step, which loads the kernels, and all steps while a profile is recorded.
//!
//! Greedy decode steps are also launched before the host knows their input ids (`lookahead.rs`).
//!
//! Under tensor parallelism ([`TensorParallelPass`](crate::TensorParallelPass)) each rank has one `CudaForwardPass` with a shard of the
//! weights, and all ranks evaluate the same batches.

use std::collections::HashMap;
use std::sync::Arc;

use metal_attention_gguf::{Tensor, TensorType};
use metal_attention_model::{
    BatchToken, CacheGroups, DeviceInfo, ForwardError, ForwardPass, LayerTrace, Logits, Lookahead, MemoryUse,
    ModelSpec, PageUse, Phase, Profile, Profiler, SequenceCache, TopK, Weights, check_outputs, highest, is_decode,
    micro_batches, one_run_per_sequence,
};

use crate::activations::{Activations, Widths};
use crate::args::{QueryTileArgs, TokenArgs};
use crate::decode::DecodeKernel;
use crate::device::{Kernels, Readback};
use crate::exchange::{AbortFlag, Exchange};
use crate::ids::ChosenIds;
use crate::kv_cache::CudaKvCache;
use crate::launch::CudaGraph;
use crate::profile::{self, Timers};
use crate::recurrent_state::{CudaRecurrentStates, RunSizes};
use crate::runner::{MicroBatchSize, ModelRunner, TOP_K, TokenOutput, few_tokens, top_k_list};
use crate::sharding::Shard;
use crate::support::supports;
use crate::weights::CudaWeights;
use crate::{CudaDevice, CudaError, CudaForwardPassOptions};

/// Queries of one sequence that a block of `prefill_attention.cu` processes.
const QUERY_TILE: usize = 64;

/// Output head products that [`ForwardPass::wake`] launches to raise the clock: a millisecond or two of work.
const WAKE_PRODUCTS: usize = 16;

/// Runs a model, or one rank's shard of it, on an NVIDIA GPU.
pub struct CudaForwardPass {
    /// The model; under tensor parallelism, this rank's shard of it.
    pub(crate) spec: ModelSpec,
    /// The KV cache and the page tables.
    pub(crate) cache: CudaKvCache,
    /// The recurrent states.
    pub(crate) recurrent: CudaRecurrentStates,
    /// Launches kernels; has the device, the weights and the buffers.
    pub(crate) runner: ModelRunner,
    /// The persistent decode kernel, where it supports the model and the device.
    decode: Option<DecodeKernel>,
    /// CUDA graphs of decode steps, by number of sequences and output. `None`: the warm-up step has run, and the next step is
    /// recorded.
    graphs: HashMap<(usize, TokenOutput), Option<CudaGraph>>,
    /// Greedy decode steps in flight, by step number (see [`ChosenIds`]).
    pub(crate) lookahead: Lookahead<u32>,
    /// Pinned host memory for the results of a micro-batch.
    readback: Readback,
    /// Pinned host memory for blocks of the caches that are read for a snapshot; allocated at the first one.
    pub(crate) blocks: Option<Readback>,
    /// Logits of the last batch, `[n_outputs, n_vocab]`.
    logits: Vec<f32>,
    /// Bytes allocated on the GPU.
    memory: MemoryUse,
    /// Positions of a sequence, at most.
    n_ctx: usize,
    /// Collects kernel times, while a profile is recorded.
    profiler: Option<Profiler>,
}

impl CudaForwardPass {
    /// Sets a model up on `gpu`: uploads its weights, and allocates the KV cache and all buffers for micro-batches.
    ///
    /// # Errors
    /// For options out of range, parts of the model without kernels ([`supports`](Self::supports)), too little free memory, or a
    /// failure of the driver.
    pub fn new(
        gpu: Arc<CudaDevice>,
        spec: ModelSpec,
        weights: &Weights,
        options: &CudaForwardPassOptions,
    ) -> Result<Self, CudaError> {
        Self::with_shard(gpu, spec, weights, options, None)
    }

    /// Sets up one rank of a model that several ranks share, or the whole model (`shard` is `None`). `whole` and `weights` are those
    /// of the whole model in both cases. The rank's mailboxes still have to be connected with those of the others.
    pub(crate) fn with_shard(
        gpu: Arc<CudaDevice>,
        whole: ModelSpec,
        weights: &Weights,
        options: &CudaForwardPassOptions,
        shard: Option<(&Shard, &Arc<AbortFlag>)>,
    ) -> Result<Self, CudaError> {
        let (spec, whole) = match shard {
            None => (whole, None),
            Some((shard, _)) => (shard.spec(&whole, weights), Some(whole)),
        };
        let capacity = options.capacity(&spec);
        if let Some((option, max)) = capacity.out_of_range() {
            return Err(CudaError::Option { option, max });
        }
        supports(&spec)?;
        let n_tokens = capacity.n_tokens(&spec);
        let memory = options.memory_needed(&spec, weights).total();
        let needed = shard.map_or(memory, |(shard, _)| {
            let mailbox = Exchange::bytes(&shard.plan, spec.n_vocab, n_tokens * spec.n_embd);
            (memory + mailbox).saturating_sub(shard.saved_bytes(weights))
        });
        let available = gpu.free_memory()?;
        if needed > available {
            return Err(CudaError::ModelTooLarge { needed, available });
        }
        let groups = CacheGroups::new(&spec, capacity);
        let before = gpu.allocated_bytes();
        let cache = CudaKvCache::new(&gpu, &spec, &groups, options.cache_type)?;
        let recurrent = CudaRecurrentStates::new(&gpu, &spec, &groups, n_tokens)?;
        let buffers = Activations::new(&gpu, &Widths::new(&spec, n_tokens), n_tokens)?;
        let kv_cache = cache.bytes() + recurrent.bytes();
        let exchange =
            shard.map(|(shard, ended)| Exchange::new(&gpu, shard, (spec.n_vocab, n_tokens * spec.n_embd), ended));
        let exchange = exchange.transpose()?;
        let scratch = gpu.allocated_bytes() - before - kv_cache;
        let shard = shard.map(|(shard, _)| shard);
        let positions = (capacity.n_ctx, capacity.n_positions());
        let cuda_weights = CudaWeights::new(&gpu, &spec, weights, shard.zip(whole.as_ref()), positions)?;
        let ids = ChosenIds::new(&gpu, buffers.n_outputs)?;
        let limit = options.persistent_kernel_limit;
        let decode = DecodeKernel::new(&gpu, &spec, &cuda_weights, &cache, &buffers, &ids, shard, limit)?;
        let memory = MemoryUse { weights: gpu.allocated_bytes() - before - kv_cache - scratch, kv_cache, scratch };
        // A model that is mostly F32 is small, or is meant to be exact. A few F32 tensors, which many files have, do not count.
        let elements = |selects: &dyn Fn(TensorType) -> bool| -> usize {
            weights.tensors().into_iter().filter(|tensor| selects(tensor.ty())).map(Tensor::n_elements).sum()
        };
        let is_f32 = 2 * elements(&|ty| ty == TensorType::F32) > elements(&|_| true);
        let readback = Readback::new(&gpu, 4 * spec.n_vocab as u64)?;
        let few_tokens = few_tokens(gpu.summary(), spec.n_embd);
        let runner = ModelRunner {
            gpu,
            few_tokens,
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
            recurrent,
            runner,
            decode,
            graphs: HashMap::new(),
            lookahead: Lookahead::default(),
            readback,
            blocks: None,
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

    /// Bytes that are allocated on the GPU.
    pub fn memory_use(&self) -> MemoryUse {
        self.memory
    }

    /// The logits of the last batch that was evaluated for logits.
    pub(crate) fn last_logits(&self) -> Logits<'_> {
        Logits::new(&self.logits, self.spec.n_vocab)
    }

    /// Kernels launched so far. Kernels of a CUDA graph count in the warm-up step and when the graph is recorded, but not when it
    /// is launched.
    pub fn launches(&self) -> u64 {
        self.runner.n_launches
    }

    /// Whether a decode step of one sequence at position `pos` is one launch of the persistent kernel.
    pub fn uses_persistent_kernel(&self, pos: usize) -> bool {
        self.tokens_at_once(pos) > 0
    }

    /// How many decode steps of a single sequence, the first at position `pos`, one launch of the persistent kernel takes, each with
    /// the id that the one before has chosen. 0: the kernel does not support that position.
    pub(crate) fn tokens_at_once(&self, pos: usize) -> usize {
        self.decode.as_ref().map_or(0, |decode| decode.tokens_at_once(pos))
    }

    /// Limits [`tokens_at_once`](Self::tokens_at_once) to `n`, on all ranks alike; 0 disables the persistent kernel.
    pub(crate) fn limit_tokens_per_launch(&mut self, n: usize) {
        match &mut self.decode {
            Some(decode) if n > 0 => decode.limit(n),
            Some(_) | None => self.decode = None,
        }
    }

    /// Uploads the tokens of a micro-batch and the rows of those that need output. The kernels launched next read them.
    pub(crate) fn write_batch(&self, batch: &[BatchToken]) -> Result<(), CudaError> {
        let sequences = batch.chunk_by(|a, b| a.seq == b.seq);
        let tokens = sequences.flat_map(|tokens| {
            let last = tokens.last().map_or(0, |t| t.pos as u32);
            tokens.iter().map(move |t| TokenArgs { id: t.id, seq: t.seq as u32, pos: t.pos as u32, last })
        });
        let tokens: Vec<_> = tokens.collect();
        let output_rows = batch.iter().enumerate().filter(|(_, t)| t.output).map(|(i, _)| i as u32);
        let output_rows: Vec<u32> = output_rows.collect();
        self.runner.buffers.tokens.write(0, bytemuck::cast_slice(&tokens))?;
        self.runner.buffers.output_rows.write(0, bytemuck::cast_slice(&output_rows))
    }

    /// Cuts the tokens of a micro-batch into query tiles for prefill attention, each of up to [`QUERY_TILE`] consecutive tokens of one
    /// sequence, and uploads them. Returns their number.
    fn write_query_tiles(&self, batch: &[BatchToken]) -> Result<usize, CudaError> {
        let mut tiles = Vec::new();
        let mut token = 0;
        for run in batch.chunk_by(|a, b| a.seq == b.seq && a.pos + 1 == b.pos) {
            let last = run[run.len() - 1].pos as u32;
            for tile in run.chunks(QUERY_TILE) {
                let (n, seq, pos) = (tile.len() as u32, tile[0].seq as u32, tile[0].pos as u32);
                tiles.push(QueryTileArgs { token, n, seq, pos, last });
                token += n;
            }
        }
        self.runner.buffers.query_tiles.write(0, bytemuck::cast_slice(&tiles))?;
        Ok(tiles.len())
    }

    /// Launches decode steps: one token of each of `n` sequences, all with output. `pos` is the position of the first sequence's
    /// token.
    ///
    /// Before the call the device has to hold the tokens ([`write_batch`](Self::write_batch), or the ids that an earlier step has
    /// written with `TokenOutput::Id { advance: true }`), the page tables up to the last step's position (`CudaKvCache::write_pages`)
    /// and the state slots (`CudaRecurrentStates::write`).
    ///
    /// Returns the number of steps launched. It is more than one only for a single sequence in the persistent kernel, where each step
    /// takes the id that the one before has chosen; then it is at most `max_steps`. With `max_steps` 0 one step runs, too, and not in
    /// the persistent kernel. Does not wait for the device.
    pub(crate) fn launch(
        &mut self,
        n: usize,
        pos: usize,
        max_steps: usize,
        output: TokenOutput,
    ) -> Result<usize, CudaError> {
        let gpu = Arc::clone(&self.runner.gpu);
        gpu.bind()?;
        let persistent = n == 1 && output != TokenOutput::Hidden;
        let n_steps = if persistent { self.tokens_at_once(pos).min(max_steps) } else { 0 };
        if let Some(decode) = self.decode.as_mut().filter(|_| n_steps > 0) {
            let number = match output {
                TokenOutput::Id { advance: _ } => self.runner.ids.number_steps(n_steps),
                // No ids are chosen, so no step number is read.
                TokenOutput::Hidden | TokenOutput::Logits | TokenOutput::TopK => 0,
            };
            let exchange = self.runner.exchange.as_ref();
            let mut launch = || decode.launch(&gpu, exchange, output, n_steps, number);
            match &mut self.runner.timers {
                None => launch()?,
                Some(timers) => timers.around("decode", launch)?,
            }
            self.runner.n_launches += 1;
            self.runner.finish_persistent(self.spec.n_vocab, output)?;
            return Ok(n_steps);
        }
        let size = MicroBatchSize { n_tokens: n, n_outputs: n, n_query_tiles: 0, runs: RunSizes::of_decode(n), output };
        self.with_step_number(size, |pass| pass.launch_decode_step(&gpu, size))?;
        Ok(1)
    }

    /// Calls `submit`, which launches a micro-batch. Where the micro-batch chooses ids, assigns the step number under which they are
    /// read later ([`ChosenIds`]).
    fn with_step_number(
        &mut self,
        size: MicroBatchSize,
        submit: impl FnOnce(&mut Self) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        let n = match size.output {
            TokenOutput::Id { advance: _ } => size.n_outputs,
            TokenOutput::Hidden | TokenOutput::Logits | TokenOutput::TopK => 0,
        };
        if n > 0 {
            self.runner.ids.begin_counted(n)?;
        }
        submit(self)?;
        if n > 0 {
            self.runner.ids.mark_submitted(n);
        }
        Ok(())
    }

    /// Launches a decode step kernel by kernel or as a CUDA graph: the first step of a size is the warm-up, the second one records the
    /// graph and launches it, later ones launch it. Steps that are timed never use a graph.
    fn launch_decode_step(&mut self, gpu: &Arc<CudaDevice>, size: MicroBatchSize) -> Result<(), CudaError> {
        let key = (size.n_tokens, size.output);
        if self.runner.timers.is_some() {
            return self.runner.run(&self.spec, (&self.cache, &self.recurrent), size, |_, _| Ok(()));
        }
        let graph = match self.graphs.remove(&key) {
            // Kernels are loaded at their first launch, which is not possible while a graph is recorded.
            None => {
                self.runner.run(&self.spec, (&self.cache, &self.recurrent), size, |_, _| Ok(()))?;
                self.graphs.insert(key, None);
                return Ok(());
            }
            Some(Some(graph)) => graph,
            Some(None) => {
                gpu.record(|| self.runner.run(&self.spec, (&self.cache, &self.recurrent), size, |_, _| Ok(())))?
            }
        };
        graph.launch()?;
        self.graphs.insert(key, Some(graph));
        Ok(())
    }

    /// Evaluates a batch and passes the results of each micro-batch to `results`, as the bytes of its rows in the order of the output
    /// tokens.
    ///
    /// On an error all tokens of the batch are taken back from the page tables, and its sequences have their previous recurrent
    /// states again: these are held from `begin` on, and no kernel overwrites a held state. `results` may have been called
    /// for earlier micro-batches.
    fn evaluate(
        &mut self,
        batch: &[BatchToken],
        output: TokenOutput,
        trace: Option<LayerTrace<'_>>,
        results: impl FnMut(&[u8]),
    ) -> Result<(), ForwardError> {
        check_outputs(&self.spec, batch, &|seq| self.n_past(seq), output != TokenOutput::Hidden)?;
        self.clear_lookahead();
        self.cache.pages.check(batch, self.spec.n_vocab)?;
        self.cache.pages.begin_batch(batch);
        let outcome = self.evaluate_micro_batches(batch, output, trace, results);
        if outcome.is_err() {
            self.cache.pages.retract(batch);
        }
        Ok(outcome?)
    }

    /// Cuts a batch into micro-batches and evaluates them one after the other. The caller takes their tokens back on an error.
    fn evaluate_micro_batches(
        &mut self,
        batch: &[BatchToken],
        output: TokenOutput,
        mut trace: Option<LayerTrace<'_>>,
        mut results: impl FnMut(&[u8]),
    ) -> Result<(), CudaError> {
        let gpu = Arc::clone(&self.runner.gpu);
        gpu.bind()?;
        let max_outputs = match output {
            TokenOutput::Hidden => self.runner.buffers.n_tokens,
            TokenOutput::Logits | TokenOutput::TopK | TokenOutput::Id { advance: _ } => self.runner.buffers.n_outputs,
        };
        let micro_batches = micro_batches(&self.spec, batch, self.runner.buffers.n_tokens, max_outputs);
        let micro_batches: Vec<_> = if self.recurrent.is_empty() {
            micro_batches
        } else {
            // Kernels of recurrent layers process all runs at the same time, so a sequence may have one run only.
            micro_batches.into_iter().flat_map(one_run_per_sequence).collect()
        };
        for micro_batch in micro_batches {
            self.evaluate_micro_batch(&gpu, micro_batch, output, &mut trace, &mut results)?;
        }
        Ok(())
    }

    /// Evaluates one micro-batch: assigns pages, uploads, launches, and waits for the results.
    fn evaluate_micro_batch(
        &mut self,
        gpu: &Arc<CudaDevice>,
        micro_batch: &[BatchToken],
        output: TokenOutput,
        trace: &mut Option<LayerTrace<'_>>,
        results: &mut impl FnMut(&[u8]),
    ) -> Result<(), CudaError> {
        gpu.check_watch()?;
        self.cache.append(micro_batch)?;
        self.cache.write_pages(micro_batch)?;
        self.write_batch(micro_batch)?;
        let runs = self.recurrent.write(self.cache.pages.segments(micro_batch))?;
        let n_outputs = micro_batch.iter().filter(|t| t.output).count();
        let is_decode_step = Phase::of(micro_batch) == Phase::Decode;
        if self.profiler.is_some() {
            self.runner.timers = Some(Timers::new(gpu));
        }
        if is_decode_step && trace.is_none() && n_outputs == micro_batch.len() {
            self.launch(micro_batch.len(), micro_batch[0].pos, 1, output)?;
        } else {
            let n_query_tiles = if is_decode_step { 0 } else { self.write_query_tiles(micro_batch)? };
            let size = MicroBatchSize { n_tokens: micro_batch.len(), n_outputs, n_query_tiles, runs, output };
            let bytes = 4 * (micro_batch.len() * self.spec.n_embd) as u64;
            self.with_step_number(size, |pass| {
                pass.runner.run(&pass.spec, (&pass.cache, &pass.recurrent), size, |i, x| {
                    let Some(trace) = trace.as_deref_mut() else { return Ok(()) };
                    let mut readback = Readback::new(gpu, bytes)?;
                    readback.copy(x, bytes)?;
                    trace(i, &bytemuck::pod_collect_to_vec::<u8, f32>(readback.read(bytes)?));
                    Ok(())
                })
            })?;
        }
        self.read_results(n_outputs, output, results)?;
        if let (Some(timers), Some(profiler)) = (self.runner.timers.take(), &mut self.profiler) {
            profiler.add_step(timers.step(Phase::of(micro_batch), micro_batch.len())?);
        }
        gpu.watch().advance((micro_batch.len() * self.spec.n_layer()) as u64);
        Ok(())
    }

    /// Waits for the micro-batch that was launched last, and passes its `n_outputs` rows to `results`.
    fn read_results(
        &mut self,
        n_outputs: usize,
        output: TokenOutput,
        results: &mut impl FnMut(&[u8]),
    ) -> Result<(), CudaError> {
        let buffers = &self.runner.buffers;
        let (source, row_bytes) = match output {
            TokenOutput::Hidden => (&buffers.hidden, 4 * self.spec.n_embd as u64),
            TokenOutput::Logits => (&buffers.logits, 4 * self.spec.n_vocab as u64),
            TokenOutput::TopK => (&buffers.top_k, 8 * TOP_K as u64),
            // The kernel writes ids to host memory itself.
            TokenOutput::Id { advance: _ } => (&buffers.logits, 0),
        };
        // All ranks have the same results, so only rank 0 copies them. Every rank needs the ids, for its next steps.
        let bytes = if self.runner.follows() { 0 } else { row_bytes * n_outputs as u64 };
        if self.readback.bytes() < bytes {
            self.readback = Readback::new(&self.runner.gpu, bytes)?;
        }
        // Waits even for no bytes, so that the host is never more than one micro-batch ahead of the device: progress reports and
        // cancellation depend on that.
        self.readback.copy(source, bytes)?;
        let read = self.readback.read(bytes)?;
        self.runner.check_together()?;
        match output {
            TokenOutput::Hidden | TokenOutput::Logits | TokenOutput::TopK => results(read),
            TokenOutput::Id { advance: _ } if n_outputs == 0 => {}
            TokenOutput::Id { advance: _ } => results(bytemuck::cast_slice(&self.runner.ids.last(n_outputs)?)),
        }
        Ok(())
    }

    /// Launches products of the output head on stale data and waits for them, so that the device raises its clock. The logits buffer
    /// is overwritten; the next step with output computes it anew.
    fn run_idle_products(&mut self) -> Result<(), CudaError> {
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
        (self.cache.bytes() + self.recurrent.bytes()) as usize
    }

    fn cache(&mut self) -> &mut dyn SequenceCache {
        self
    }

    fn forward_traced(
        &mut self,
        batch: &[BatchToken],
        trace: Option<LayerTrace<'_>>,
    ) -> Result<Logits<'_>, ForwardError> {
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
        check_outputs(&self.spec, batch, &|seq| self.n_past(seq), true)?;
        if self.profiler.is_none() && batch.len() <= self.runner.buffers.n_outputs && is_decode(batch) {
            return self.decode_greedy(batch);
        }
        let mut ids = Vec::new();
        self.evaluate(batch, TokenOutput::Id { advance: false }, None, |bytes| {
            ids.extend_from_slice(bytemuck::cast_slice(bytes));
        })?;
        let output_tokens: Vec<_> = batch.iter().filter(|t| t.output).copied().collect();
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

    fn wake(&mut self) -> bool {
        self.spec.output.head.is_some() && self.runner.timers.is_none() && self.run_idle_products().is_ok()
    }

    fn take_profile(&mut self) -> Option<Profile> {
        self.profiler.take().map(Profiler::finish)
    }
}
