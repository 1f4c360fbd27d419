//! [`WgpuForwardPass`]: a batch of tokens in, logits, token ids or hidden states out.
//!
//! Every batch is cut into micro-batches that fit the scratch buffers. For each one the tokens and the page tables of
//! their sequences are written to the GPU, the dispatches of the [plan](crate::plan) for its kind of batch are recorded
//! and submitted, and the results of the *output tokens* (those with `BatchToken::output`) are copied to a buffer that
//! the CPU maps and reads. Greedy decode steps are queued ahead of the CPU by `lookahead.rs`.

mod set_up;
mod snapshot;

use std::sync::Arc;

use metal_attention_model::{
    BatchKind, BatchToken, DeviceInfo, FewLimits, ForwardError, ForwardPass, LayerTrace, Logits, Lookahead, MemoryUse,
    ModelSpec, PageUse, Phase, Profile, Profiler, SequenceCache, TopK, check_outputs, highest, is_decode_step,
    micro_batches, one_run_per_sequence,
};
use wgpu::{Buffer, CommandBuffer, CommandEncoder, ComputePassDescriptor, SubmissionIndex};

use crate::activations::Activations;
use crate::kernels::{self, MAX_TOP_K};
use crate::kv_cache::WgpuKvCache;
use crate::parts::supports;
use crate::persistent_layers::{PersistentLayers, UntestedLayers};
use crate::plan::{DispatchPlan, MAX_GEMV_TOKENS};
use crate::profile;
use crate::state::WgpuStates;
use crate::waker::Waker;
use crate::{BatchBuffer, BatchDims, Dispatch, Readback, WgpuDevice, WgpuError};

/// The largest `k` of [`ForwardPass::forward_top_k`] that is computed on the GPU; larger ones read all logits.
const TOP_K: usize = MAX_TOP_K;

/// Bytes of the flag behind the results in a readback buffer: not 0 when the persistent kernel timed out.
pub(super) const FLAG_BYTES: u64 = 4;

/// Dispatches of the first submission of a prefill micro-batch, a power of two. Each later one doubles their number.
const FIRST_SUBMISSION: usize = 16;

/// Which result of each output token the CPU reads back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ResultKind {
    /// Its hidden vector after the last norm, F32 `[n_embd]`.
    Hidden,
    /// All its logits, F32 `[n_vocab]`.
    Logits,
    /// The id of its largest logit, one u32.
    Id,
    /// Its [`TOP_K`] largest logits with their token ids, `[TOP_K, 2]` words; see [`kernels::top_k_list`].
    TopK,
}

/// Everything that the recorded commands of a micro-batch depend on, except the contents of buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BatchShape {
    /// Which plan is recorded.
    pub(super) kind: BatchKind,
    /// Numbers of tokens, sequences and KV splits, which set the dispatches' grids.
    pub(super) size: BatchDims,
    /// Which results are copied to the readback buffer.
    pub(super) output: ResultKind,
    /// Whether the KV pages of a one-token batch's sequence are consecutive; the persistent kernel requires it.
    pub(super) consecutive_pages: bool,
}

/// The commands of a batch of one token, recorded before its token is known.
pub(super) struct PreparedStep {
    /// The shape that the commands were recorded for.
    shape: BatchShape,
    /// The commands, finished.
    commands: CommandBuffer,
}

/// The forward pass of one model on one GPU. A decode micro-batch is one submission, a prefill one a few.
pub struct WgpuForwardPass {
    /// The GPU that it runs on.
    pub(super) gpu: Arc<WgpuDevice>,
    /// The model's description.
    pub(super) spec: ModelSpec,
    /// Scratch buffers between the kernels.
    pub(super) scratch: Activations,
    /// Keys and values of all sequences, with their page tables.
    pub(super) cache: WgpuKvCache,
    /// Recurrent states of all sequences.
    pub(super) states: WgpuStates,
    /// Dispatches of one token; see [`BatchKind`].
    pub(super) plan_one: DispatchPlan,
    /// Dispatches of a decode step of several sequences.
    plan_sequences: DispatchPlan,
    /// Dispatches of a few tokens in any other arrangement.
    plan_few: DispatchPlan,
    /// Dispatches of many tokens.
    plan_many: DispatchPlan,
    /// The largest batches that `plan_sequences` and `plan_few` accept.
    pub(super) few_limits: FewLimits,
    /// Tokens and page tables of one-token batches. Argmax replaces its tokens for steps that are queued ahead.
    batch_of_one: BatchBuffer,
    /// Tokens and page tables of all other batches, used in the same way.
    batch: BatchBuffer,
    /// Token ids that argmax chose, `[n_outputs]`.
    pub(super) ids: Buffer,
    /// Pairs of sort key and token id, `[n_outputs, TOP_K, 2]` words; see [`kernels::top_k_list`].
    top_k: Buffer,
    /// Greedy decode steps in flight, each with the readback buffer that receives its ids.
    pub(super) lookahead: Lookahead<Readback>,
    /// Readback buffers that no step in flight uses.
    pub(super) free: Vec<Readback>,
    /// Receives the results of batches that are not queued ahead.
    readback: Readback,
    /// Receives blocks of the KV cache for snapshots; made when first needed.
    blocks: Option<Readback>,
    /// The commands of the decode step after the last one, recorded while that ran. Dropped when anything they depend
    /// on changes.
    pub(super) prepared: Option<PreparedStep>,
    /// The last submission without results, which the CPU has not waited for yet.
    unread: Option<SubmissionIndex>,
    /// Hidden vectors after every layer, `[n_layer, n_tokens, n_embd]`, and the buffer they are read through; made when
    /// a trace is first requested.
    trace: Option<(Buffer, Readback)>,
    /// One word, not 0 after a workgroup of the persistent kernel timed out. `None` where that kernel is not used.
    pub(super) persistent_timed_out: Option<Buffer>,
    /// Logits of the last call of `forward_traced`.
    logits: Vec<f32>,
    /// Bytes on the GPU.
    memory: MemoryUse,
    /// Positions of one sequence at most.
    n_ctx: usize,
    /// Collects kernel times while a profile runs.
    pub(super) profiler: Option<Profiler>,
    /// Keeps the clocks of an idle discrete GPU up.
    waker: Waker,
    /// The persistent kernels while they are still being compiled; see `adopt_compiled_layers`.
    compiling_layers: Option<UntestedLayers>,
}

impl WgpuForwardPass {
    /// Checks that kernels exist for every part of `spec`. The error names the part without one.
    pub fn supports(spec: &ModelSpec) -> Result<(), WgpuError> {
        supports(spec)
    }

    /// The GPU that the model runs on.
    pub fn gpu(&self) -> &Arc<WgpuDevice> {
        &self.gpu
    }

    /// Bytes of weights, KV cache with recurrent states, and scratch buffers on the GPU.
    pub fn memory_use(&self) -> MemoryUse {
        self.memory
    }

    /// The names of the kernels that a greedy step over `n_tokens` tokens of one sequence dispatches, in order:
    /// embedding, each layer, output head, argmax. Includes the merge kernels of split-KV attention, which run on long
    /// contexts only. layer, head and argmax. Those that join a split context run only where it is split.
    pub fn dispatches(&self, n_tokens: usize) -> Vec<&str> {
        let size = BatchDims { n_tokens: n_tokens as u32, n_outputs: 1, n_runs: 1, n_splits: 1 };
        self.plan(BatchKind::of_n_tokens(n_tokens, self.few_limits)).greedy_step(size).map(Dispatch::kernel).collect()
    }

    pub(super) fn plan(&self, kind: BatchKind) -> &DispatchPlan {
        match kind {
            BatchKind::One => &self.plan_one,
            BatchKind::Sequences => &self.plan_sequences,
            BatchKind::Few => &self.plan_few,
            BatchKind::Many => &self.plan_many,
        }
    }

    /// Writes the tokens of `batch` to the GPU, for the next submission.
    pub(super) fn write_batch(&self, batch: &[BatchToken]) {
        let buffer = if batch.len() == 1 { &self.batch_of_one } else { &self.batch };
        buffer.write_tokens(&self.gpu, batch);
    }

    /// Writes the page tables of the batch's sequences to the GPU, as far as they have changed since the last write.
    pub(super) fn write_pages(&mut self, batch: &[BatchToken]) {
        let buffer = if batch.len() == 1 { &mut self.batch_of_one } else { &mut self.batch };
        for tokens in batch.chunk_by(|a, b| a.seq == b.seq) {
            let seq = tokens[0].seq;
            for group in 0..self.cache.pages.n_groups() {
                buffer.write_pages(&self.gpu, group, seq, self.cache.pages.pages(group, seq));
            }
        }
    }

    /// Records the commands of a micro-batch and returns those that are not submitted yet. `trace`: copy `x` after
    /// every layer to the trace buffer.
    ///
    /// The layers of a prefill are submitted while they are recorded, in submissions whose sizes double, so that the
    /// GPU starts before the CPU has recorded all of them. Each one advances the device's
    /// [`Watch`](metal_attention_model::Watch) when it is done.
    pub(super) fn record(&self, shape: BatchShape, trace: bool) -> CommandEncoder {
        let BatchShape { kind, size, output, consecutive_pages } = shape;
        let plan = self.plan(kind);
        let mut encoder = self.gpu.encoder();
        let descriptor = ComputePassDescriptor::default();
        let mut pass = encoder.begin_compute_pass(&descriptor);
        for dispatch in &plan.embedding {
            dispatch.record(&self.gpu, &mut pass, size);
        }
        if trace {
            for (i, layer) in plan.layers.iter().enumerate() {
                for dispatch in layer {
                    dispatch.record(&self.gpu, &mut pass, size);
                }
                if let Some((buffer, _)) = &self.trace {
                    drop(pass);
                    let bytes = 4 * u64::from(size.n_tokens) * self.spec.n_embd as u64;
                    encoder.copy_buffer_to_buffer(&self.scratch.x, 0, buffer, i as u64 * bytes, Some(bytes));
                    pass = encoder.begin_compute_pass(&descriptor);
                }
            }
        } else {
            let n_submitted = submitted_while_recording(kind, plan.n_dispatches());
            for (i, dispatch) in (1..).zip(plan.layers(size, consecutive_pages)) {
                dispatch.record(&self.gpu, &mut pass, size);
                if i <= n_submitted && i >= FIRST_SUBMISSION && usize::is_power_of_two(i) {
                    drop(pass);
                    self.gpu.submit(std::mem::replace(&mut encoder, self.gpu.encoder()));
                    let before = if i > FIRST_SUBMISSION { i / 2 } else { 0 };
                    self.gpu.advance_when_done(plan.work(size, i) - plan.work(size, before));
                    pass = encoder.begin_compute_pass(&descriptor);
                }
            }
        }
        if size.n_outputs > 0 {
            for dispatch in plan.result_dispatches(output) {
                dispatch.record(&self.gpu, &mut pass, size);
            }
        }
        drop(pass);
        encoder
    }

    /// The shape of the micro-batch `batch`, or of the decode step `ahead` tokens later, given its sequences' present
    /// pages.
    pub(super) fn batch_shape(&self, batch: &[BatchToken], ahead: usize, output: ResultKind) -> BatchShape {
        let longest = batch.iter().map(|t| t.pos + ahead).max().unwrap_or(0);
        let size = BatchDims {
            n_tokens: batch.len() as u32,
            n_outputs: batch.iter().filter(|t| t.output).count() as u32,
            n_runs: batch.chunk_by(|a, b| a.seq == b.seq).count() as u32,
            n_splits: kernels::n_splits(longest),
        };
        // The page table of a sequence that is alone in the cache is always consecutive: see `PageTable`.
        let consecutive_pages = batch.len() == 1 && self.cache.pages.pages_are_contiguous(batch[0].seq);
        BatchShape { kind: BatchKind::of(batch, self.few_limits), size, output, consecutive_pages }
    }

    /// Cuts a batch into micro-batches that fit the scratch buffers and the readback of output tokens. Prompts of
    /// models without causal masks stay whole. In models with recurrent states a sequence occurs once in each
    /// micro-batch.
    fn micro_batches<'b>(&self, batch: &'b [BatchToken], output: ResultKind) -> Vec<&'b [BatchToken]> {
        let max_outputs = match output {
            ResultKind::Hidden => self.scratch.n_tokens,
            ResultKind::Logits | ResultKind::Id | ResultKind::TopK => self.scratch.n_outputs,
        };
        let micro_batches = micro_batches(&self.spec, batch, self.scratch.n_tokens, max_outputs);
        if self.states.is_empty() {
            micro_batches
        } else {
            micro_batches.into_iter().flat_map(one_run_per_sequence).collect()
        }
    }

    /// Evaluates a batch and calls `results` with the results of each micro-batch, in order. After an error the page
    /// tables are as before the call; positions that were evaluated again hold undefined values.
    fn evaluate(
        &mut self,
        batch: &[BatchToken],
        output: ResultKind,
        trace: Option<LayerTrace<'_>>,
        results: impl FnMut(&[u8]),
    ) -> Result<(), ForwardError> {
        check_outputs(&self.spec, batch, &|seq| self.n_past(seq), output != ResultKind::Hidden)?;
        self.clear_lookahead();
        self.cache.pages.check(batch, self.spec.n_vocab)?;
        self.cache.pages.begin_batch(batch);
        let outcome = self.evaluate_micro_batches(batch, output, trace, results);
        if outcome.is_err() {
            self.cache.pages.retract(batch);
        }
        Ok(outcome?)
    }

    /// Starts to use the persistent kernels if their compilation has finished since the last call. Steps in flight and
    /// the prepared step are dropped, as they were recorded without them.
    pub(super) fn adopt_compiled_layers(&mut self) {
        let Some(layers) = self.compiling_layers.take_if(|compiling_layers| compiling_layers.is_ready(&self.gpu))
        else {
            return;
        };
        match layers.untested(&self.gpu) {
            Ok(layers) => {
                log_persistent_layers(&layers);
                self.clear_lookahead();
                self.prepared = None;
                self.plan_one.persistent_layers = Some(layers.dispatches);
                self.persistent_timed_out = Some(layers.timed_out);
                self.gpu.pipelines().save();
            }
            Err(e) => tracing::info!("a token goes through the layers in many dispatches: {e}"),
        }
    }

    /// Evaluates the micro-batches of `batch`, whose pages are reserved.
    fn evaluate_micro_batches(
        &mut self,
        batch: &[BatchToken],
        output: ResultKind,
        mut trace: Option<LayerTrace<'_>>,
        mut results: impl FnMut(&[u8]),
    ) -> Result<(), WgpuError> {
        self.gpu.check()?;
        self.adopt_compiled_layers();
        for micro_batch in self.micro_batches(batch, output) {
            // A page that leaves a sliding window is freed here, although a submission in flight may still read it.
            // Submissions run in order, so the page is overwritten only after that read.
            self.cache.append(&self.gpu, micro_batch);
            if self.profiler.is_some() {
                self.profile_step(Phase::of(batch), micro_batch, output)?;
            }
            while !self.evaluate_micro_batch(micro_batch, output, &mut trace, &mut results)? {
                self.disable_persistent_layers();
            }
        }
        self.gpu.check()
    }

    /// Evaluates one micro-batch and calls `results` with its results. Returns false, without that call, if the
    /// persistent kernel timed out: the micro-batch is then to be evaluated again without it.
    fn evaluate_micro_batch(
        &mut self,
        micro_batch: &[BatchToken],
        output: ResultKind,
        trace: &mut Option<LayerTrace<'_>>,
        results: &mut impl FnMut(&[u8]),
    ) -> Result<bool, WgpuError> {
        let shape = self.batch_shape(micro_batch, 0, output);
        let bytes = u64::from(shape.size.n_outputs) * self.output(output).1;
        if self.readback.bytes() < bytes + FLAG_BYTES {
            self.prepared = None;
            self.readback = Readback::new(&self.gpu, bytes + FLAG_BYTES)?;
        }
        if trace.is_some() {
            self.trace = reserve_trace(&self.gpu, self.trace.take(), &self.spec, micro_batch.len())?;
        }
        self.write_pages(micro_batch);
        self.write_batch(micro_batch);
        self.states.write(&self.gpu, self.cache.pages.segments(micro_batch));
        let traced = 4 * (micro_batch.len() * self.spec.n_embd * self.spec.n_layer()) as u64;
        let prepared = self.prepared.take().filter(|p| p.shape == shape && trace.is_none());
        let commands = match prepared {
            Some(prepared) => prepared.commands,
            None => self.encode(shape, trace.is_some().then_some(traced)),
        };
        // The submissions made while recording are all that a cancelled prefill leaves to the GPU.
        self.gpu.check()?;
        let submission = self.gpu.submit_commands(commands);
        let plan = self.plan(shape.kind);
        let submitted = if trace.is_some() { 0 } else { submitted_while_recording(shape.kind, plan.n_dispatches()) };
        self.gpu.advance_when_done(plan.work(shape.size, plan.n_dispatches()) - plan.work(shape.size, submitted));
        if micro_batch.len() == 1 && output != ResultKind::Id && trace.is_none() {
            // A caller that samples from the logits sends the next token soon: the next step is recorded while this one
            // runs.
            let shape = self.batch_shape(micro_batch, 1, output);
            self.prepared = Some(PreparedStep { shape, commands: self.encode(shape, None) });
        }
        if let (Some((_, readback)), Some(trace)) = (&mut self.trace, trace.as_deref_mut()) {
            readback.map(submission.clone());
            let states: Vec<f32> = readback.read(&self.gpu, traced, bytemuck::pod_collect_to_vec)?;
            for (i, state) in states.chunks_exact(micro_batch.len() * self.spec.n_embd).enumerate() {
                trace(i, state);
            }
        }
        if bytes == 0 {
            // Wait for the submission before this one. At most one micro-batch is then in flight, so that cancelling
            // and progress reports stay close to what the GPU does.
            let before = self.unread.replace(submission);
            return before.map_or(Ok(()), |before| self.gpu.wait(Some(before))).map(|()| true);
        }
        self.readback.map(submission);
        let is_persistent = self.persistent_timed_out.is_some() && micro_batch.len() == 1 && trace.is_none();
        self.readback.read(&self.gpu, bytes + FLAG_BYTES, |view| {
            let (view, state) = view.split_at(bytes as usize);
            let done = !is_persistent || state == [0; 4];
            if done {
                results(view);
            }
            done
        })
    }

    /// Records a micro-batch and the copies of its results. `traced`: the bytes of all layers' hidden vectors, when
    /// they are read as well.
    fn encode(&mut self, shape: BatchShape, traced: Option<u64>) -> CommandBuffer {
        let mut encoder = self.record(shape, traced.is_some());
        let (source, row) = self.output(shape.output);
        let bytes = u64::from(shape.size.n_outputs) * row;
        if bytes > 0 {
            self.readback.copy(&mut encoder, &source, bytes);
            if let Some(timed_out) = &self.persistent_timed_out {
                self.readback.copy_after(&mut encoder, timed_out, 0..4, bytes);
            }
        }
        if let (Some((buffer, readback)), Some(traced)) = (self.trace.as_mut(), traced) {
            readback.copy(&mut encoder, buffer, traced);
        }
        encoder.finish()
    }

    /// The buffer with the results of output tokens, and the bytes of each one.
    fn output(&self, output: ResultKind) -> (Buffer, u64) {
        match output {
            ResultKind::Hidden => (self.scratch.normed.clone(), 4 * self.spec.n_embd as u64),
            ResultKind::Logits => (self.scratch.logits.clone(), 4 * self.spec.n_vocab as u64),
            ResultKind::Id => (self.ids.clone(), 4),
            ResultKind::TopK => (self.top_k.clone(), 8 * TOP_K as u64),
        }
    }
}

fn log_persistent_layers(layers: &PersistentLayers) {
    let n = layers.dispatches.len();
    tracing::info!("a token goes through all layers in {n} dispatch(es), one for each buffer of weights");
}

/// The number of a micro-batch's layer dispatches that [`WgpuForwardPass::record`] submits itself: the largest power of
/// two for a prefill with enough of them, else 0.
fn submitted_while_recording(kind: BatchKind, n_dispatches: usize) -> usize {
    let prompt = matches!(kind, BatchKind::Few | BatchKind::Many);
    if prompt && n_dispatches >= FIRST_SUBMISSION { 1 << n_dispatches.ilog2() } else { 0 }
}

/// The trace buffers for `n_tokens` tokens: the present ones if they are large enough, else new ones.
fn reserve_trace(
    gpu: &WgpuDevice,
    trace: Option<(Buffer, Readback)>,
    spec: &ModelSpec,
    n_tokens: usize,
) -> Result<Option<(Buffer, Readback)>, WgpuError> {
    let bytes = 4 * (n_tokens * spec.n_embd * spec.n_layer()) as u64;
    Ok(Some(match trace.filter(|(_, readback)| readback.bytes() >= bytes) {
        Some(trace) => trace,
        None => (gpu.buffer("the hidden states", bytes)?, Readback::new(gpu, bytes)?),
    }))
}

impl Drop for WgpuForwardPass {
    /// Some drivers crash when the process exits in the middle of a compilation: cancels the queued ones and waits for
    /// those in progress.
    fn drop(&mut self) {
        if self.compiling_layers.is_some() {
            self.gpu.pipelines().stop_building();
        }
    }
}

impl ForwardPass for WgpuForwardPass {
    fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    fn device(&self) -> DeviceInfo {
        let gpu = self.gpu().summary();
        DeviceInfo { kind: "gpu", name: gpu.name.clone(), driver: Some(gpu.driver.clone()), n_threads: 1 }
    }

    fn n_ctx(&self) -> usize {
        self.n_ctx
    }

    fn n_seq(&self) -> usize {
        self.cache.pages.n_seq()
    }

    fn n_ubatch(&self) -> usize {
        self.scratch.n_tokens
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
        // Steps in flight still write to the sequences' last pages, which must not be shared meanwhile.
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
        (self.cache.bytes() + self.states.bytes()) as usize
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
        let outcome = self.evaluate(batch, ResultKind::Logits, trace, |bytes| {
            let start = logits.len();
            logits.resize(start + bytes.len() / 4, 0.0);
            bytemuck::cast_slice_mut(&mut logits[start..]).copy_from_slice(bytes);
        });
        self.logits = logits;
        outcome?;
        Ok(Logits::new(&self.logits, self.spec.n_vocab))
    }

    fn forward_hidden(&mut self, batch: &[BatchToken]) -> Result<Vec<f32>, ForwardError> {
        let mut states = Vec::new();
        self.evaluate(batch, ResultKind::Hidden, None, |bytes| {
            states.extend(bytemuck::pod_collect_to_vec::<u8, f32>(bytes));
        })?;
        Ok(states)
    }

    fn forward_greedy(&mut self, batch: &[BatchToken]) -> Result<Vec<u32>, ForwardError> {
        // `evaluate` checks this for other batches; decode steps that are queued ahead do not pass through it.
        check_outputs(&self.spec, batch, &|seq| self.n_past(seq), true)?;
        let ahead = self.profiler.is_none()
            && batch.len() <= MAX_GEMV_TOKENS.min(self.scratch.n_outputs)
            && is_decode_step(batch);
        if ahead {
            return self.decode_greedy(batch);
        }
        let mut ids = Vec::new();
        self.evaluate(batch, ResultKind::Id, None, |bytes| {
            ids.extend(bytemuck::pod_collect_to_vec::<u8, u32>(bytes));
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
        self.evaluate(batch, ResultKind::TopK, None, |bytes| {
            let pairs: Vec<[u32; 2]> = bytemuck::pod_collect_to_vec(bytes);
            lists.extend(pairs.chunks_exact(TOP_K).map(kernels::top_k_list));
        })?;
        for list in &mut lists {
            list.truncate(k);
        }
        Ok(lists)
    }

    fn start_profile(&mut self) -> Result<(), ForwardError> {
        self.gpu.clock()?;
        self.profiler = Some(Profiler::new(format!("GPU, {}", self.gpu.summary().name)).with_note(profile::NOTE));
        Ok(())
    }

    fn take_profile(&mut self) -> Option<Profile> {
        self.profiler.take().map(Profiler::finish)
    }

    fn max_top_k(&self) -> usize {
        TOP_K
    }

    fn wake(&mut self) -> bool {
        self.waker.wake(&self.gpu, &self.plan_one)
    }
}

#[cfg(test)]
mod tests;
