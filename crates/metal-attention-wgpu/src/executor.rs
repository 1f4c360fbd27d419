//! [`WgpuExecutor`]: evaluates the steps of a session on one GPU.
//!
//! For each step the tokens and the page tables of their sequences are written to the GPU, the dispatches of the
//! [plan](crate::plan) for its kind of batch are recorded and submitted, and the results of the *output tokens* (those
//! with `BatchToken::output`) are copied to a buffer that the CPU maps and reads. Greedy decode steps are queued ahead of
//! the CPU by `lookahead.rs`.

mod set_up;
mod snapshot;

use std::ops::Range;
use std::sync::Arc;

use metal_attention_gguf::Tensor;
use metal_attention_model::{
    BatchKind, BatchToken, CacheBlock, CacheGroups, CacheLayout, DeviceInfo, Executor, FewLimits, ForwardError,
    LayerTrace, MemoryUse, ModelSpec, PageCopy, PageTable, Profiler, Session, Step, StepLimits, StepResults,
};
use wgpu::{Buffer, CommandBuffer, CommandEncoder, ComputePassDescriptor, SubmissionIndex};

use crate::activations::Activations;
use crate::kernels::{self, MAX_TOP_K};
use crate::kv_cache::WgpuKvCache;
use crate::lookahead::InFlightStep;
use crate::parts::supports;
use crate::persistent_layers::{PersistentLayers, UntestedLayers};
use crate::plan::{DispatchPlan, MAX_GEMV_TOKENS};
use crate::profile;
use crate::spans::{Spans, n_deepstack};
use crate::state::WgpuStates;
use crate::waker::Waker;
use crate::{BatchBuffer, BatchDims, Dispatch, Readback, WgpuDevice, WgpuError, WgpuMatrix};

/// Length of the lists of highest logits that are computed on the GPU.
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
    /// Number of the first layers after which rows of spans are added to the residual stream.
    pub(super) n_deepstack: usize,
    /// Whether the tokens are context rows, of which keys and values are stored and nothing else is computed.
    pub(super) is_context: bool,
}

/// The commands of a batch of one token, recorded before its token is known.
pub(super) struct PreparedStep {
    /// The shape that the commands were recorded for.
    shape: BatchShape,
    /// The commands, finished.
    commands: CommandBuffer,
}

/// A forward pass through wgpu.
pub type WgpuForwardPass = Session<WgpuExecutor>;

/// One model on one GPU. A decode step is one submission, a prefill step a few.
pub struct WgpuExecutor {
    /// The GPU that it runs on.
    pub(super) gpu: Arc<WgpuDevice>,
    /// The model's description.
    pub(super) spec: ModelSpec,
    /// Scratch buffers between the kernels.
    pub(super) scratch: Activations,
    /// Which layers share page numbers.
    groups: CacheGroups,
    /// Keys and values of all sequences.
    pub(super) cache: WgpuKvCache,
    /// Recurrent states of all sequences.
    pub(super) states: WgpuStates,
    /// Spans of embedding rows.
    pub(super) spans: Spans,
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
    /// Receives rows of the residual stream before traced layers, `[n_layers, n_rows, n_embd]`; made when a trace is first
    /// requested.
    trace: Option<Readback>,
    /// One word, not 0 after a workgroup of the persistent kernel timed out. `None` where that kernel is not used.
    pub(super) persistent_timed_out: Option<Buffer>,
    /// Bytes on the GPU after loading.
    memory: MemoryUse,
    /// Keeps the clocks of an idle discrete GPU up.
    waker: Waker,
    /// The persistent kernels while they are still being compiled; see `adopt_compiled_layers`.
    compiling_layers: Option<UntestedLayers>,
    /// The embedding table and the output head, each with its tensor: a second model may share them.
    ends: Vec<(Tensor, WgpuMatrix)>,
}

impl WgpuExecutor {
    /// Checks that kernels exist for every part of `spec`. The error names the part without one.
    pub fn supports(spec: &ModelSpec) -> Result<(), WgpuError> {
        supports(spec)
    }

    /// The GPU that the model runs on.
    pub fn gpu(&self) -> &Arc<WgpuDevice> {
        &self.gpu
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

    /// Writes the tokens, states and spans of `step` to the GPU, for the next submission.
    pub(super) fn write_batch(&mut self, step: &Step) -> Result<(), WgpuError> {
        let buffer = if step.tokens.len() == 1 { &self.batch_of_one } else { &self.batch };
        buffer.write_tokens_at(&self.gpu, &step.tokens, |i| self.spans.place(step, i));
        if let Some(states) = &step.states {
            self.gpu.write(&self.scratch.states, states);
        }
        self.spans.write(&self.gpu, &self.spec, &self.scratch, step)
    }

    /// Writes the page tables of the batch's sequences to the GPU, as far as they have changed since the last write.
    pub(super) fn write_pages(&mut self, batch: &[BatchToken], pages: &PageTable) {
        let buffer = if batch.len() == 1 { &mut self.batch_of_one } else { &mut self.batch };
        for tokens in batch.chunk_by(|a, b| a.seq == b.seq) {
            let seq = tokens[0].seq;
            for group in 0..pages.n_groups() {
                buffer.write_pages(&self.gpu, group, seq, pages.pages(group, seq));
            }
        }
    }

    /// Records the commands of a micro-batch and returns those that are not submitted yet. `traced`: copy rows of `x` before
    /// these layers to the trace buffer.
    ///
    /// The layers of a prefill are submitted while they are recorded, in submissions whose sizes double, so that the
    /// GPU starts before the CPU has recorded all of them. Each one advances the device's
    /// [`Watch`](metal_attention_model::Watch) when it is done.
    pub(super) fn record(&self, shape: BatchShape, traced: Option<&TracedRows>) -> CommandEncoder {
        let BatchShape { kind, size, output, consecutive_pages, n_deepstack, is_context } = shape;
        let (plan, deepstack) = (self.plan(kind), self.spans.deepstack(n_deepstack));
        let mut encoder = self.gpu.encoder();
        let descriptor = ComputePassDescriptor::default();
        let mut pass = encoder.begin_compute_pass(&descriptor);
        if is_context {
            for dispatch in &plan.context {
                dispatch.record(&self.gpu, &mut pass, size);
            }
            drop(pass);
            return encoder;
        }
        for dispatch in &plan.embedding {
            dispatch.record(&self.gpu, &mut pass, size);
        }
        if let Some((traced, readback)) = traced.zip(self.trace.as_ref()) {
            for i in 0..=plan.layers.len() {
                if traced.before.contains(&i) {
                    drop(pass);
                    traced.copy(i, &mut encoder, &self.scratch.x, readback);
                    pass = encoder.begin_compute_pass(&descriptor);
                }
                if i < plan.layers.len() {
                    for dispatch in plan.layer_of_step(i, deepstack) {
                        dispatch.record(&self.gpu, &mut pass, size);
                    }
                }
            }
        } else {
            let n_submitted = submitted_while_recording(kind, plan.n_dispatches());
            for (i, dispatch) in (1..).zip(plan.layers(size, consecutive_pages, deepstack)) {
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
        let n_layer = plan.layers.len();
        let next_states = traced.filter(|traced| traced.before.contains(&(n_layer + 2))).zip(self.trace.as_ref());
        let norms = traced.filter(|traced| traced.before.contains(&(n_layer + 1))).zip(self.trace.as_ref());
        if size.n_outputs > 0 || norms.is_some() {
            for dispatch in &plan.merge_streams {
                dispatch.record(&self.gpu, &mut pass, size);
            }
        }
        if let Some((traced, readback)) = norms {
            for dispatch in &plan.hidden_of_all {
                dispatch.record(&self.gpu, &mut pass, size);
            }
            drop(pass);
            traced.copy(n_layer + 1, &mut encoder, &self.scratch.normed, readback);
            pass = encoder.begin_compute_pass(&descriptor);
        }
        if let Some((traced, readback)) = next_states {
            for dispatch in &plan.next_states {
                dispatch.record(&self.gpu, &mut pass, size);
            }
            drop(pass);
            traced.copy(n_layer + 2, &mut encoder, &self.scratch.target_rows, readback);
            pass = encoder.begin_compute_pass(&descriptor);
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
    /// pages. Without deepstack rows, and not of context rows.
    pub(super) fn batch_shape(
        &self,
        batch: &[BatchToken],
        pages: &PageTable,
        ahead: usize,
        output: ResultKind,
    ) -> BatchShape {
        let longest = batch.iter().map(|t| t.pos + ahead).max().unwrap_or(0);
        let size = BatchDims {
            n_tokens: batch.len() as u32,
            n_outputs: batch.iter().filter(|t| t.output).count() as u32,
            n_runs: batch.chunk_by(|a, b| a.seq == b.seq).count() as u32,
            n_splits: kernels::n_splits(longest),
        };
        // The page table of a sequence that is alone in the cache is always consecutive: see `PageTable`.
        let consecutive_pages = batch.len() == 1 && pages.pages_are_contiguous(batch[0].seq);
        let kind = BatchKind::of(batch, self.few_limits);
        BatchShape { kind, size, output, consecutive_pages, n_deepstack: 0, is_context: false }
    }

    /// The shape of `step`.
    pub(super) fn step_shape(&self, step: &Step, output: ResultKind) -> BatchShape {
        let shape = self.batch_shape(&step.tokens, &step.pages, 0, output);
        BatchShape { n_deepstack: n_deepstack(step), is_context: step.context.is_some(), ..shape }
    }

    /// Starts to use the persistent kernels if their compilation has finished since the last call. The prepared step is
    /// dropped, as it was recorded without them.
    pub(super) fn adopt_compiled_layers(&mut self) {
        let Some(layers) = self.compiling_layers.take_if(|compiling_layers| compiling_layers.is_ready(&self.gpu))
        else {
            return;
        };
        match layers.untested(&self.gpu) {
            Ok(layers) => {
                log_persistent_layers(&layers);
                self.prepared = None;
                self.plan_one.persistent_layers = Some(layers.dispatches);
                self.persistent_timed_out = Some(layers.timed_out);
                self.gpu.pipelines().save();
            }
            Err(e) => tracing::info!("a token goes through the layers in many dispatches: {e}"),
        }
    }

    /// Evaluates a step once and writes its results. False, without results, if the persistent kernel timed out: the step
    /// is then to be evaluated again without it.
    fn evaluate(
        &mut self,
        step: &Step,
        results: &mut StepResults<'_>,
        trace: &mut Option<LayerTrace<'_>>,
    ) -> Result<bool, WgpuError> {
        let (tokens, output) = (&step.tokens[..], ResultKind::of(results));
        let shape = self.step_shape(step, output);
        let bytes = u64::from(shape.size.n_outputs) * self.output(output).1;
        if self.readback.bytes() < bytes + FLAG_BYTES {
            self.prepared = None;
            self.readback = Readback::new(&self.gpu, bytes + FLAG_BYTES)?;
        }
        let traced = trace.as_ref().map(|trace| TracedRows::new(trace, tokens, self.traced_width(trace)));
        if let Some(traced) = &traced {
            match &mut self.trace {
                Some(readback) if readback.bytes() >= traced.bytes() => readback.forget(),
                _ => self.trace = Some(Readback::new(&self.gpu, traced.bytes().max(4))?),
            }
        }
        self.write_pages(tokens, &step.pages);
        self.write_batch(step)?;
        self.states.write(&self.gpu, step.pages.segments(tokens));
        let prepared = self.prepared.take().filter(|p| p.shape == shape && trace.is_none());
        let commands = match prepared {
            Some(prepared) => prepared.commands,
            None => self.encode(shape, traced.as_ref()),
        };
        // The submissions made while recording are all that a cancelled prefill leaves to the GPU.
        self.gpu.check()?;
        let submission = self.gpu.submit_commands(commands);
        let plan = self.plan(shape.kind);
        let at_once = trace.is_some() || shape.is_context;
        let submitted = if at_once { 0 } else { submitted_while_recording(shape.kind, plan.n_dispatches()) };
        self.gpu.advance_when_done(plan.work(shape.size, plan.n_dispatches()) - plan.work(shape.size, submitted));
        if tokens.len() == 1 && output != ResultKind::Id && trace.is_none() && !self.spec.takes_context {
            // A caller that samples from the logits sends the next token soon: the next step is recorded while this one
            // runs.
            let shape = self.batch_shape(tokens, &step.pages, 1, output);
            self.prepared = Some(PreparedStep { shape, commands: self.encode(shape, None) });
        }
        if let (Some(readback), Some(traced), Some(trace)) = (&mut self.trace, &traced, trace.as_mut())
            && traced.bytes() > 0
        {
            readback.map(submission.clone());
            let rows: Vec<f32> = readback.read(&self.gpu, traced.bytes(), bytemuck::pod_collect_to_vec)?;
            for (&layer, rows) in trace.before.iter().zip(rows.chunks_exact(rows.len() / trace.before.len())) {
                (trace.rows)(layer, rows);
            }
        }
        if bytes == 0 {
            // Wait for the submission before this one. At most one step is then in flight, so that cancelling and
            // progress reports stay close to what the GPU does.
            let before = self.unread.replace(submission);
            return before.map_or(Ok(()), |before| self.gpu.wait(Some(before))).map(|()| true);
        }
        self.readback.map(submission);
        let is_persistent = self.persistent_timed_out.is_some() && tokens.len() == 1 && trace.is_none();
        self.readback.read(&self.gpu, bytes + FLAG_BYTES, |view| {
            let (view, state) = view.split_at(bytes as usize);
            let done = !is_persistent || state == [0; 4];
            if done {
                write_results(results, view);
            }
            done
        })
    }

    /// Elements of a traced row: of an assistant's next states as many as its target's residual stream is wide.
    fn traced_width(&self, trace: &LayerTrace<'_>) -> usize {
        let assistant = self.spec.embedding.assistant.filter(|_| trace.before == [self.spec.n_layer() + 2]);
        assistant.map_or(self.spec.n_embd, |assistant| assistant.target_width)
    }

    /// Records a micro-batch and the copies of its results, and of `traced`.
    fn encode(&mut self, shape: BatchShape, traced: Option<&TracedRows>) -> CommandBuffer {
        let mut encoder = self.record(shape, traced);
        let (source, row) = self.output(shape.output);
        let bytes = u64::from(shape.size.n_outputs) * row;
        if bytes > 0 {
            self.readback.copy(&mut encoder, &source, bytes);
            if let Some(timed_out) = &self.persistent_timed_out {
                self.readback.copy_after(&mut encoder, timed_out, 0..4, bytes);
            }
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

impl ResultKind {
    /// The kind of `results`.
    fn of(results: &StepResults<'_>) -> Self {
        match results {
            StepResults::Hidden(_) => Self::Hidden,
            StepResults::Logits(_) => Self::Logits,
            StepResults::Ids(_) => Self::Id,
            StepResults::TopK(_) => Self::TopK,
        }
    }
}

/// Writes the results of all output tokens from the bytes that the GPU returned.
fn write_results(results: &mut StepResults<'_>, bytes: &[u8]) {
    match results {
        StepResults::Hidden(rows) | StepResults::Logits(rows) => {
            bytemuck::cast_slice_mut(rows).copy_from_slice(bytes);
        }
        StepResults::Ids(ids) => bytemuck::cast_slice_mut(ids).copy_from_slice(bytes),
        StepResults::TopK(lists) => {
            let pairs: Vec<[u32; 2]> = bytemuck::pod_collect_to_vec(bytes);
            for (list, pairs) in lists.iter_mut().zip(pairs.chunks_exact(TOP_K)) {
                *list = kernels::top_k_list(pairs);
            }
        }
    }
}

fn log_persistent_layers(layers: &PersistentLayers) {
    let n = layers.dispatches.len();
    tracing::info!("a token goes through all layers in {n} dispatch(es), one for each buffer of weights");
}

/// The number of a micro-batch's layer dispatches that [`WgpuExecutor::record`] submits itself: the largest power of
/// two for a prefill with enough of them, else 0.
fn submitted_while_recording(kind: BatchKind, n_dispatches: usize) -> usize {
    let prompt = matches!(kind, BatchKind::Few | BatchKind::Many);
    if prompt && n_dispatches >= FIRST_SUBMISSION { 1 << n_dispatches.ilog2() } else { 0 }
}

/// The rows of the residual stream that a step copies before some layers.
pub(super) struct TracedRows {
    /// The layers.
    before: Vec<usize>,
    /// The bytes of the rows in the residual stream, `[n_tokens, width]`.
    ranges: Vec<Range<u64>>,
}

impl TracedRows {
    fn new(trace: &LayerTrace<'_>, tokens: &[BatchToken], width: usize) -> Self {
        let bytes = |row: usize| 4 * (row * width) as u64;
        let ranges = trace.tokens.rows(tokens).into_iter().map(|rows| bytes(rows.start)..bytes(rows.end));
        Self { before: trace.before.to_vec(), ranges: ranges.collect() }
    }

    /// Bytes of the rows before one layer.
    fn bytes_of_layer(&self) -> u64 {
        self.ranges.iter().map(|range| range.end - range.start).sum()
    }

    /// Bytes of the rows before all layers.
    fn bytes(&self) -> u64 {
        self.bytes_of_layer() * self.before.len() as u64
    }

    /// Records the copies of the rows in `x` before `layer`, to their place in `readback`.
    fn copy(&self, layer: usize, encoder: &mut CommandEncoder, x: &Buffer, readback: &Readback) {
        let n_before = self.before.iter().take_while(|&&before| before < layer).count() as u64;
        let mut at = n_before * self.bytes_of_layer();
        for range in &self.ranges {
            readback.copy_after(encoder, x, range.clone(), at);
            at += range.end - range.start;
        }
    }
}

impl Drop for WgpuExecutor {
    /// Some drivers crash when the process exits in the middle of a compilation: cancels the queued ones and waits for
    /// those in progress.
    fn drop(&mut self) {
        if self.compiling_layers.is_some() {
            self.gpu.pipelines().stop_building();
        }
    }
}

impl Executor for WgpuExecutor {
    type InFlight = InFlightStep;

    fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    fn device(&self) -> DeviceInfo {
        self.gpu().info()
    }

    fn cache_groups(&self) -> &CacheGroups {
        &self.groups
    }

    fn limits(&self) -> StepLimits {
        StepLimits {
            n_tokens: self.scratch.n_tokens,
            n_outputs: self.scratch.n_outputs,
            one_run_per_sequence: !self.states.is_empty(),
            chooses_ids: true,
            max_top_k: TOP_K,
            n_ahead: MAX_GEMV_TOKENS.min(self.scratch.n_outputs),
        }
    }

    /// The weights, the KV cache with recurrent states, and the scratch buffers on the GPU.
    fn memory_use(&self, _results: usize) -> MemoryUse {
        MemoryUse { scratch: self.memory.scratch + self.spans.bytes_of_deepstack(), ..self.memory }
    }

    fn begin_batch(&mut self) -> Result<(), ForwardError> {
        self.gpu.check()?;
        self.adopt_compiled_layers();
        Ok(())
    }

    /// A page that leaves a sliding window may be overwritten although a submission in flight still reads it: submissions
    /// run in order.
    fn copy_page(&mut self, copy: PageCopy) -> Result<(), ForwardError> {
        self.cache.copy_page(&self.gpu, copy);
        Ok(())
    }

    fn run(
        &mut self,
        step: &Step,
        mut results: StepResults<'_>,
        mut trace: Option<LayerTrace<'_>>,
        profiler: Option<&mut Profiler>,
    ) -> Result<(), ForwardError> {
        step.check_windows_hold_blocks(&self.spec)?;
        if let Some(profiler) = profiler {
            self.profile_step(step, ResultKind::of(&results), profiler)?;
        }
        while !self.evaluate(step, &mut results, &mut trace)? {
            self.disable_persistent_layers();
        }
        Ok(self.gpu.check()?)
    }

    fn submit(&mut self, step: &Step, ahead: Range<usize>) -> Result<Vec<InFlightStep>, ForwardError> {
        Ok(ahead.map(|n| self.submit_decode(step, n)).collect::<Result<_, _>>()?)
    }

    fn read(&mut self, step: InFlightStep, ids: &mut [u32]) -> Result<bool, ForwardError> {
        Ok(self.read_decode(step, ids)?)
    }

    fn discard(&mut self, steps: Vec<InFlightStep>) {
        for step in steps {
            self.forget_decode(step);
        }
    }

    fn cache_layout(&self) -> CacheLayout {
        CacheLayout {
            format: format!("wgpu {}", self.cache.cache_type),
            page_bytes: (0..self.groups.groups().len()).map(|group| self.cache.page_bytes(group)).collect(),
            state_bytes: self.states.slot_bytes(),
        }
    }

    fn cache_bytes(&self) -> usize {
        (self.cache.bytes() + self.states.bytes()) as usize
    }

    fn read_block(&mut self, block: CacheBlock, bytes: &mut [u8]) -> Result<(), ForwardError> {
        let parts = self.parts_of(block);
        Ok(self.read_parts(&parts, bytes)?)
    }

    fn write_block(&mut self, block: CacheBlock, bytes: &[u8]) -> Result<(), ForwardError> {
        let parts = self.parts_of(block);
        Ok(self.write_parts(&parts, bytes)?)
    }

    fn profiler(&self) -> Result<Profiler, ForwardError> {
        self.gpu.clock()?;
        Ok(Profiler::new(format!("GPU, {}", self.gpu.summary().name)).with_note(profile::NOTE))
    }

    fn wake(&mut self) -> bool {
        self.waker.wake(&self.gpu, &self.plan_one)
    }
}

#[cfg(test)]
mod tests;
