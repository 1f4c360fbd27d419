//! [`WgpuForwardPass`]: the submissions of a step.

mod set_up;
mod snapshot;

use std::sync::Arc;

use metal_attention_model::{
    BatchKind, BatchToken, DeviceInfo, FewLimits, ForwardError, ForwardPass, LayerTrace, Logits, Lookahead, MemoryUse,
    ModelSpec, PageUse, Phase, Profile, Profiler, SequenceCache, TopK, check_outputs, highest, is_decode,
    micro_batches, one_run_per_sequence,
};
use wgpu::{Buffer, CommandBuffer, CommandEncoder, ComputePassDescriptor, SubmissionIndex};

use crate::activations::Activations;
use crate::at_once::{LayersAtOnce, Untried};
use crate::kernels::{self, MAX_TOP_K};
use crate::kv_cache::WgpuKvCache;
use crate::parts::supports;
use crate::plan::{FEW, Plan};
use crate::profile;
use crate::state::WgpuStates;
use crate::waker::Waker;
use crate::{BatchBuffer, Dispatch, Readback, StepSize, WgpuDevice, WgpuError};

/// Candidates of a short list.
const TOP_K: usize = MAX_TOP_K;

/// Bytes that follow the results: whether the layers at once gave up.
pub(super) const STATE: u64 = 4;

/// Dispatches of a prompt that are submitted first: a power of two.
const FIRST_BUNCH: usize = 16;

/// What comes back of each wanted token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Output {
    /// Its state after the last norm.
    Hidden,
    /// All its logits.
    Logits,
    /// The id of the largest.
    Id,
    /// The [`TOP_K`] largest with their ids.
    TopK,
}

/// What a step consists of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Step {
    pub(super) kind: BatchKind,
    pub(super) size: StepSize,
    pub(super) output: Output,
    /// Whether the pages of the one sequence lie one after the other.
    pub(super) in_order: bool,
}

/// A recorded step over one token.
pub(super) struct Prepared {
    step: Step,
    commands: CommandBuffer,
}

/// Runs a model on a GPU: every step is one submission, that of a prompt a few.
pub struct WgpuForwardPass {
    pub(super) gpu: Arc<WgpuDevice>,
    pub(super) spec: ModelSpec,
    pub(super) s: Activations,
    pub(super) cache: WgpuKvCache,
    pub(super) states: WgpuStates,
    pub(super) one: Plan,
    sequences: Plan,
    few: Plan,
    many: Plan,
    /// For which batches `sequences` and `few` are.
    pub(super) few_are: FewLimits,
    /// The batch of [`one`](Self::one), which steps on the GPU move on by themselves, and that of the others.
    batch_of_one: BatchBuffer,
    batch: BatchBuffer,
    /// The ids that argmax chose, `[n_wanted]`.
    pub(super) ids: Buffer,
    /// The largest logits, `[n_wanted, TOP_K, 2]`.
    top_k: Buffer,
    /// Greedy steps that run ahead of the CPU, by where their ids will arrive.
    pub(super) lookahead: Lookahead<Readback>,
    /// Where those of steps to come can arrive.
    pub(super) free: Vec<Readback>,
    readback: Readback,
    /// Where blocks of the cache arrive that are read.
    blocks: Option<Readback>,
    /// The step after the last one, recorded while that ran, for as long as nothing it relies on changes.
    pub(super) prepared: Option<Prepared>,
    /// The last step of which nothing comes back, which nobody has waited for.
    unread: Option<SubmissionIndex>,
    trace: Option<(Buffer, Readback)>,
    /// Whether a workgroup gave up, in a word, where a kernel runs all layers of a token at once.
    pub(super) at_once: Option<Buffer>,
    logits: Vec<f32>,
    memory: MemoryUse,
    n_ctx: usize,
    pub(super) profiler: Option<Profiler>,
    waker: Waker,
    /// The kernels of all layers at once, while they are being compiled.
    late: Option<Untried>,
}

impl WgpuForwardPass {
    /// Whether there are kernels for every part of `spec`; otherwise an error that names the part that lacks them.
    pub fn supports(spec: &ModelSpec) -> Result<(), WgpuError> {
        supports(spec)
    }

    /// The GPU it runs on.
    pub fn gpu(&self) -> &Arc<WgpuDevice> {
        &self.gpu
    }

    /// Bytes it holds on the GPU.
    pub fn memory_use(&self) -> MemoryUse {
        self.memory
    }

    /// Names of the kernels that a step over `n_tokens` tokens of one sequence dispatches, in order: embedding, each
    /// layer, head and argmax. Those that join a split context run only where it is split.
    pub fn dispatches(&self, n_tokens: usize) -> Vec<&str> {
        let size = StepSize { n_tokens: n_tokens as u32, n_wanted: 1, n_runs: 1, n_splits: 1 };
        self.plan(BatchKind::of_n_tokens(n_tokens, self.few_are)).greedy(size).map(Dispatch::kernel).collect()
    }

    pub(super) fn plan(&self, kind: BatchKind) -> &Plan {
        match kind {
            BatchKind::One => &self.one,
            BatchKind::Sequences => &self.sequences,
            BatchKind::Few => &self.few,
            BatchKind::Many => &self.many,
        }
    }

    /// Sends a batch to the GPU, which the next submission evaluates.
    pub(super) fn write_batch(&self, batch: &[BatchToken]) {
        let buffer = if batch.len() == 1 { &self.batch_of_one } else { &self.batch };
        buffer.write_tokens(&self.gpu, batch);
    }

    /// Sends the pages of a batch's sequences to the GPU, as far as they have changed.
    pub(super) fn write_pages(&mut self, batch: &[BatchToken]) {
        let buffer = if batch.len() == 1 { &mut self.batch_of_one } else { &mut self.batch };
        for tokens in batch.chunk_by(|a, b| a.seq == b.seq) {
            let seq = tokens[0].seq;
            for group in 0..self.cache.pages.n_groups() {
                buffer.write_pages(&self.gpu, group, seq, self.cache.pages.pages(group, seq));
            }
        }
    }

    /// Records one step. The layers of a prompt are submitted on the way, in bunches that double, so that the GPU need not
    /// wait for the CPU to have recorded them all, and count as done as they run. What is left is returned.
    pub(super) fn record(&self, step: Step, trace: bool) -> CommandEncoder {
        let Step { kind, size, output, in_order } = step;
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
                    encoder.copy_buffer_to_buffer(&self.s.x, 0, buffer, i as u64 * bytes, Some(bytes));
                    pass = encoder.begin_compute_pass(&descriptor);
                }
            }
        } else {
            let last_bunch = last_bunch(kind, plan.n_dispatches());
            for (i, dispatch) in (1..).zip(plan.layers(size, in_order)) {
                dispatch.record(&self.gpu, &mut pass, size);
                if i <= last_bunch && i >= FIRST_BUNCH && usize::is_power_of_two(i) {
                    drop(pass);
                    self.gpu.submit(std::mem::replace(&mut encoder, self.gpu.encoder()));
                    let before = if i > FIRST_BUNCH { i / 2 } else { 0 };
                    self.gpu.advance_when_done(plan.work(size, i) - plan.work(size, before));
                    pass = encoder.begin_compute_pass(&descriptor);
                }
            }
        }
        if size.n_wanted > 0 {
            for dispatch in plan.results(output) {
                dispatch.record(&self.gpu, &mut pass, size);
            }
        }
        drop(pass);
        encoder
    }

    /// The step over `batch`, or the one `ahead` tokens later, with the pages that its sequences have now.
    pub(super) fn step_of(&self, batch: &[BatchToken], ahead: usize, output: Output) -> Step {
        let longest = batch.iter().map(|t| t.pos + ahead).max().unwrap_or(0);
        let size = StepSize {
            n_tokens: batch.len() as u32,
            n_wanted: batch.iter().filter(|t| t.logits).count() as u32,
            n_runs: batch.chunk_by(|a, b| a.seq == b.seq).count() as u32,
            n_splits: kernels::n_splits(longest),
        };
        // A sequence alone in the cache always lies in order: see `PageTable`.
        let in_order = batch.len() == 1 && self.cache.pages.pages_are_contiguous(batch[0].seq);
        Step { kind: BatchKind::of(batch, self.few_are), size, output, in_order }
    }

    /// Cuts a batch so that each part fits the activations and what comes back; where a token sees those after it, into whole
    /// texts; where layers keep recurrent states, so that no sequence comes twice.
    fn parts<'b>(&self, batch: &'b [BatchToken], output: Output) -> Vec<&'b [BatchToken]> {
        let most_wanted = match output {
            Output::Hidden => self.s.n_tokens,
            Output::Logits | Output::Id | Output::TopK => self.s.n_wanted,
        };
        let parts = micro_batches(&self.spec, batch, self.s.n_tokens, most_wanted);
        if self.states.is_empty() { parts } else { parts.into_iter().flat_map(one_run_per_sequence).collect() }
    }

    /// Evaluates a batch and hands `results` the bytes of what comes back of each part. On an error the cache is as it was.
    fn evaluate(
        &mut self,
        batch: &[BatchToken],
        output: Output,
        trace: Option<LayerTrace<'_>>,
        results: impl FnMut(&[u8]),
    ) -> Result<(), ForwardError> {
        check_outputs(&self.spec, batch, &|seq| self.n_past(seq), output != Output::Hidden)?;
        self.clear_lookahead();
        self.cache.pages.check(batch, self.spec.n_vocab)?;
        self.cache.pages.begin_batch(batch);
        let outcome = self.evaluate_parts(batch, output, trace, results);
        if outcome.is_err() {
            self.cache.pages.retract(batch);
        }
        Ok(outcome?)
    }

    /// Takes the kernels of all layers at once, where they have been compiled since.
    pub(super) fn take_late_kernels(&mut self) {
        let Some(late) = self.late.take_if(|late| late.is_ready(&self.gpu)) else { return };
        match late.untested(&self.gpu) {
            Ok(layers) => {
                log_layers_at_once(&layers);
                self.clear_lookahead();
                self.prepared = None;
                self.one.layers_at_once = Some(layers.dispatches);
                self.at_once = Some(layers.gave_up);
                self.gpu.pso().save();
            }
            Err(e) => tracing::info!("a token goes through the layers in many dispatches: {e}"),
        }
    }

    fn evaluate_parts(
        &mut self,
        batch: &[BatchToken],
        output: Output,
        mut trace: Option<LayerTrace<'_>>,
        mut results: impl FnMut(&[u8]),
    ) -> Result<(), WgpuError> {
        self.gpu.check()?;
        self.take_late_kernels();
        for part in self.parts(batch, output) {
            // Pages that windows give up here may still be read: what was submitted before runs before.
            self.cache.append(&self.gpu, part);
            if self.profiler.is_some() {
                self.profile_step(Phase::of(batch), part, output)?;
            }
            while !self.step(part, output, &mut trace, &mut results)? {
                self.leave_at_once();
            }
        }
        self.gpu.check()
    }

    /// Evaluates one part of a batch; false, and nothing for `results`, where a workgroup of the layers at once gave up.
    fn step(
        &mut self,
        part: &[BatchToken],
        output: Output,
        trace: &mut Option<LayerTrace<'_>>,
        results: &mut impl FnMut(&[u8]),
    ) -> Result<bool, WgpuError> {
        let step = self.step_of(part, 0, output);
        let bytes = u64::from(step.size.n_wanted) * self.output(output).1;
        if self.readback.bytes() < bytes + STATE {
            self.prepared = None;
            self.readback = Readback::new(&self.gpu, bytes + STATE)?;
        }
        if trace.is_some() {
            self.trace = reserve_trace(&self.gpu, self.trace.take(), &self.spec, part.len())?;
        }
        self.write_pages(part);
        self.write_batch(part);
        self.states.write(&self.gpu, self.cache.pages.segments(part));
        let traced = 4 * (part.len() * self.spec.n_embd * self.spec.n_layer()) as u64;
        let prepared = self.prepared.take().filter(|p| p.step == step && trace.is_none());
        let commands = match prepared {
            Some(prepared) => prepared.commands,
            None => self.encode(step, trace.is_some().then_some(traced)),
        };
        // What a prompt has submitted on the way is all that a cancelled one leaves to the GPU.
        self.gpu.check()?;
        let submission = self.gpu.submit_commands(commands);
        let plan = self.plan(step.kind);
        let on_the_way = if trace.is_some() { 0 } else { last_bunch(step.kind, plan.n_dispatches()) };
        self.gpu.advance_when_done(plan.work(step.size, plan.n_dispatches()) - plan.work(step.size, on_the_way));
        if part.len() == 1 && output != Output::Id && trace.is_none() {
            // A caller that chooses tokens itself comes back with one: its step is recorded while this one runs.
            let step = self.step_of(part, 1, output);
            self.prepared = Some(Prepared { step, commands: self.encode(step, None) });
        }
        if let (Some((_, readback)), Some(trace)) = (&mut self.trace, trace.as_deref_mut()) {
            readback.map(submission.clone());
            let states: Vec<f32> = readback.read(&self.gpu, traced, bytemuck::pod_collect_to_vec)?;
            for (i, state) in states.chunks_exact(part.len() * self.spec.n_embd).enumerate() {
                trace(i, state);
            }
        }
        if bytes == 0 {
            // One more part is under way at most: whoever ends the work, or watches it, is not far behind the GPU.
            let before = self.unread.replace(submission);
            return before.map_or(Ok(()), |before| self.gpu.wait(Some(before))).map(|()| true);
        }
        self.readback.map(submission);
        let at_once = self.at_once.is_some() && part.len() == 1 && trace.is_none();
        self.readback.read(&self.gpu, bytes + STATE, |view| {
            let (view, state) = view.split_at(bytes as usize);
            let done = !at_once || state == [0; 4];
            if done {
                results(view);
            }
            done
        })
    }

    /// Records a step and the copies of what comes back; `traced`: the bytes of the hidden states, where they do.
    fn encode(&mut self, step: Step, traced: Option<u64>) -> CommandBuffer {
        let mut encoder = self.record(step, traced.is_some());
        let (source, row) = self.output(step.output);
        let bytes = u64::from(step.size.n_wanted) * row;
        if bytes > 0 {
            self.readback.copy(&mut encoder, &source, bytes);
            if let Some(gave_up) = &self.at_once {
                self.readback.copy_after(&mut encoder, gave_up, 0..4, bytes);
            }
        }
        if let (Some((buffer, readback)), Some(traced)) = (self.trace.as_mut(), traced) {
            readback.copy(&mut encoder, buffer, traced);
        }
        encoder.finish()
    }

    /// The buffer of what comes back of wanted tokens, and the bytes of one of them.
    fn output(&self, output: Output) -> (Buffer, u64) {
        match output {
            Output::Hidden => (self.s.h.clone(), 4 * self.spec.n_embd as u64),
            Output::Logits => (self.s.logits.clone(), 4 * self.spec.n_vocab as u64),
            Output::Id => (self.ids.clone(), 4),
            Output::TopK => (self.top_k.clone(), 8 * TOP_K as u64),
        }
    }
}

fn log_layers_at_once(layers: &LayersAtOnce) {
    let n = layers.dispatches.len();
    tracing::info!("a token goes through all layers in {n} dispatch(es), one for each buffer of weights");
}

/// How many of the dispatches of the layers have been submitted when all are recorded; see [`WgpuForwardPass::record`].
fn last_bunch(kind: BatchKind, n_dispatches: usize) -> usize {
    let prompt = matches!(kind, BatchKind::Few | BatchKind::Many);
    if prompt && n_dispatches >= FIRST_BUNCH { 1 << n_dispatches.ilog2() } else { 0 }
}

/// Room for the hidden states of `n_tokens` tokens after every layer: what there is, or more.
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
    /// A driver that is in the middle of a pipeline when the process ends may take it amiss.
    fn drop(&mut self) {
        if self.late.is_some() {
            self.gpu.pso().stop_building();
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
        self.s.n_tokens
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
        // Pages that steps in flight write to are not shared.
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
        let outcome = self.evaluate(batch, Output::Logits, trace, |bytes| {
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
        self.evaluate(batch, Output::Hidden, None, |bytes| {
            states.extend(bytemuck::pod_collect_to_vec::<u8, f32>(bytes));
        })?;
        Ok(states)
    }

    fn forward_greedy(&mut self, batch: &[BatchToken]) -> Result<Vec<u32>, ForwardError> {
        // Steps that are queued ahead do not pass through `evaluate`, which checks the others.
        check_outputs(&self.spec, batch, &|seq| self.n_past(seq), true)?;
        let ahead = self.profiler.is_none() && batch.len() <= FEW.min(self.s.n_wanted) && is_decode(batch);
        if ahead {
            return self.decode_greedy(batch);
        }
        let mut ids = Vec::new();
        self.evaluate(batch, Output::Id, None, |bytes| {
            ids.extend(bytemuck::pod_collect_to_vec::<u8, u32>(bytes));
        })?;
        let wanted: Vec<_> = batch.iter().filter(|t| t.logits).copied().collect();
        self.lookahead.advance(&wanted, &ids);
        Ok(ids)
    }

    fn forward_top_k(&mut self, batch: &[BatchToken], k: usize) -> Result<Vec<TopK>, ForwardError> {
        if k > TOP_K {
            let logits = self.forward(batch)?;
            return Ok((0..logits.n_rows()).map(|i| highest(logits.row(i), k)).collect());
        }
        let mut lists = Vec::new();
        self.evaluate(batch, Output::TopK, None, |bytes| {
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
        self.waker.wake(&self.gpu, &self.one)
    }
}

#[cfg(test)]
mod tests;
