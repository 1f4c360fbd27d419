//! [`GpuForwardPass`]: set-up, and the submissions of a step.

use std::sync::Arc;

use metal_attention_kernels::kernels::{self, AttentionShape, MAX_TOP_K};
use metal_attention_kernels::wgpu::{Buffer, CommandBuffer, CommandEncoder, ComputePassDescriptor};
use metal_attention_kernels::{Dispatch, GpuDevice, GpuError, Readback, StepSize, batch_words};
use metal_attention_model::{
    BatchToken, DeviceInfo, ForwardError, ForwardPass, LayerSpec, LayerTrace, Logits, Mixer, ModelSpec, PageUse, Phase,
    Profile, Profiler, TopK, Weights, check_batch, check_share, highest,
};

use super::activations::{Activations, Widths};
use super::at_once::{LayersAtOnceBuilder, groups_to_try};
use super::kv_cache::GpuKvCache;
use super::lookahead::{DEPTH, Lookahead, is_decode};
use super::options::{GpuForwardPassOptions, GpuMemory, attention_shapes, distinct_ropes};
use super::plan::{BatchKind, FEW, Plan, PlanBuilder};
use super::weights::GpuWeights;

/// Candidates of a short list.
const TOP_K: usize = MAX_TOP_K;

/// Bytes that follow the results: whether the layers at once gave up.
const STATE: u64 = 4;

/// Dispatches of a prompt that are submitted first: a power of two.
const FIRST_BUNCH: usize = 16;

/// What comes back of each token whose logits are wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Output {
    /// All its logits.
    Logits,
    /// The id of the largest.
    Id,
    /// The [`TOP_K`] largest with their ids.
    TopK,
}

/// A recorded step over one token.
struct Prepared {
    size: StepSize,
    output: Output,
    commands: CommandBuffer,
}

/// Runs a model on a GPU: every step is one submission, that of a prompt a few.
pub struct GpuForwardPass {
    pub(super) gpu: Arc<GpuDevice>,
    pub(super) spec: ModelSpec,
    pub(super) s: Activations,
    pub(super) cache: GpuKvCache,
    /// The shape of each layer's attention.
    shapes: Vec<AttentionShape>,
    one: Plan,
    sequences: Plan,
    few: Plan,
    many: Plan,
    /// Most tokens of [`few`](Self::few).
    pub(super) most_few: usize,
    /// The batch of [`one`](Self::one), which steps on the GPU move on by themselves, and that of the others.
    batch_of_one: Buffer,
    batch: Buffer,
    /// The ids that argmax chose, `[n_wanted]`.
    ids: Buffer,
    /// The largest logits, `[n_wanted, TOP_K, 2]`.
    top_k: Buffer,
    pub(super) lookahead: Lookahead,
    readback: Readback,
    /// The step after the last one, recorded while that ran, for as long as nothing it relies on changes.
    prepared: Option<Prepared>,
    trace: Option<(Buffer, Readback)>,
    /// The state of the kernel that runs all layers of a token at once, where there is one.
    at_once: Option<Buffer>,
    logits: Vec<f32>,
    memory: GpuMemory,
    pub(super) n_ctx: usize,
    pub(super) profiler: Option<Profiler>,
}

impl GpuForwardPass {
    /// Sets a model up on `gpu`: uploads its weights, makes the KV cache and every buffer and pipeline that steps need.
    pub fn new(
        gpu: Arc<GpuDevice>,
        spec: ModelSpec,
        weights: &Weights,
        options: &GpuForwardPassOptions,
    ) -> Result<Self, GpuError> {
        let positive = [
            ("context length", options.n_ctx),
            ("number of sequences", options.n_seq),
            ("ubatch size", options.n_ubatch),
        ];
        if let Some(&(option, _)) = positive.iter().find(|(_, n)| *n == 0) {
            return Err(GpuError::Option { option });
        }
        let needed = GpuMemory::needed(&spec, weights, options, gpu.summary().max_binding);
        if let Some(available) = gpu.summary().memory.filter(|&m| needed.total() > m) {
            return Err(GpuError::ModelTooLarge {
                name: gpu.summary().name.clone(),
                needed: needed.total(),
                available,
            });
        }
        let shapes = attention_shapes(&spec, options);
        let before = gpu.allocated_bytes();
        // First, as it is what a context too long makes too large.
        let cache = GpuKvCache::new(&gpu, &shapes, options.n_seq)?;
        let gpu_weights = GpuWeights::new(&gpu, weights)?;
        let rope = rope_tables(&gpu, &spec, weights.rope_freqs.as_deref(), options.n_ctx)?;
        let weight_bytes = gpu.allocated_bytes() - before - cache.bytes();
        let widths = Widths::new(&spec);
        let s = Activations::new(
            &gpu,
            &widths,
            &shapes,
            Activations::capacity(gpu.summary().max_binding, &widths, options.n_ubatch()),
            options.n_seq.min(FEW),
        )?;
        let batch_of_one = gpu.buffer("a batch", 32)?;
        let batch = gpu.buffer("a batch", 16 * (1 + s.n_tokens as u64))?;
        let ids = gpu.buffer("ids", 4 * s.n_wanted as u64)?;
        let top_k = gpu.buffer("short lists", 8 * (TOP_K * s.n_wanted) as u64)?;
        // One thread each: most of the time goes into compiling pipelines.
        let (mut one, sequences, few, many) = std::thread::scope(|scope| {
            let plan = |kind, batch| {
                let builder = PlanBuilder {
                    gpu: &gpu,
                    spec: &spec,
                    weights: &gpu_weights,
                    s: &s,
                    cache: &cache,
                    shapes: &shapes,
                    rope: &rope,
                    batch,
                    ids: &ids,
                    top_k: &top_k,
                    exact: options.exact,
                    kind,
                };
                scope.spawn(move || builder.build())
            };
            let plans = [
                plan(BatchKind::One, &batch_of_one),
                plan(BatchKind::Sequences, &batch),
                plan(BatchKind::Few, &batch),
                plan(BatchKind::Many, &batch),
            ];
            let [one, sequences, few, many] = plans.map(|plan| plan.join().expect("building a plan does not panic"));
            Ok::<_, GpuError>((one?, sequences?, few?, many?))
        })?;
        let at_once = LayersAtOnceBuilder {
            gpu: &gpu,
            spec: &spec,
            file_weights: weights,
            weights: &gpu_weights,
            shapes: &shapes,
            cache: &cache.layers,
            rope: &rope,
            x: &s.x,
            batch: &batch_of_one,
        };
        let groups = options.layers_at_once.as_ref().map_or(groups_to_try(&gpu), std::slice::from_ref);
        let at_once = at_once.build(if groups == [0] { &[] } else { groups })?.map(|layers| {
            one.layers_at_once = Some(layers.dispatch);
            layers.state
        });
        gpu.pso().save();
        let readback = Readback::new(&gpu, 8 * TOP_K as u64 + STATE)?;
        let memory = GpuMemory {
            weights: weight_bytes,
            kv_cache: cache.bytes(),
            scratch: gpu.allocated_bytes() - before - weight_bytes - cache.bytes(),
        };
        Ok(Self {
            most_few: BatchKind::most_few(&gpu, options.exact),
            gpu,
            spec,
            s,
            cache,
            shapes,
            one,
            sequences,
            few,
            many,
            batch_of_one,
            batch,
            ids,
            top_k,
            lookahead: Lookahead::default(),
            readback,
            prepared: None,
            trace: None,
            at_once,
            logits: Vec::new(),
            memory,
            n_ctx: options.n_ctx,
            profiler: None,
        })
    }

    /// The GPU it runs on.
    pub fn gpu(&self) -> &Arc<GpuDevice> {
        &self.gpu
    }

    /// Bytes it holds on the GPU.
    pub fn memory_use(&self) -> GpuMemory {
        self.memory
    }

    /// Names of the kernels that a step over `n_tokens` tokens of one sequence dispatches, in order: embedding, each
    /// layer, head and argmax. Those that join a split context run only where it is split.
    pub fn dispatches(&self, n_tokens: usize) -> Vec<&str> {
        let size = StepSize { n_tokens: n_tokens as u32, n_wanted: 1, n_splits: 1 };
        self.plan(BatchKind::of_text(n_tokens, self.most_few)).greedy(size).map(Dispatch::kernel).collect()
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
        self.gpu.write(buffer, &batch_words(batch));
    }

    /// Records one step. The layers of a prompt are submitted on the way, in bunches that double, so that the GPU need not
    /// wait for the CPU to have recorded them all; what is left is returned.
    fn record(&self, kind: BatchKind, size: StepSize, output: Output, trace: bool) -> CommandEncoder {
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
            let prompt = matches!(kind, BatchKind::Few | BatchKind::Many);
            for (i, dispatch) in (1..).zip(plan.layers(size)) {
                dispatch.record(&self.gpu, &mut pass, size);
                if prompt && i >= FIRST_BUNCH && usize::is_power_of_two(i) {
                    drop(pass);
                    self.gpu.submit(std::mem::replace(&mut encoder, self.gpu.encoder()));
                    pass = encoder.begin_compute_pass(&descriptor);
                }
            }
        }
        if size.n_wanted > 0 {
            for dispatch in plan.head.iter().chain(plan.choice(output)) {
                dispatch.record(&self.gpu, &mut pass, size);
            }
        }
        drop(pass);
        encoder
    }

    /// The sizes of the step over `batch`, or of the one `ahead` tokens later.
    pub(super) fn size(batch: &[BatchToken], ahead: usize) -> StepSize {
        let longest = batch.iter().map(|t| t.pos + ahead).max().unwrap_or(0);
        StepSize {
            n_tokens: batch.len() as u32,
            n_wanted: batch.iter().filter(|t| t.logits).count() as u32,
            n_splits: kernels::n_splits(longest),
        }
    }

    /// Cuts a batch so that each part fits the activations and the logits.
    fn parts<'b>(&self, batch: &'b [BatchToken]) -> Vec<&'b [BatchToken]> {
        let mut parts = Vec::new();
        let mut rest = batch;
        while !rest.is_empty() {
            let mut wanted = 0;
            let fits = rest.iter().take(self.s.n_tokens).take_while(|t| {
                wanted += usize::from(t.logits);
                wanted <= self.s.n_wanted
            });
            let (part, after) = rest.split_at(fits.count());
            parts.push(part);
            rest = after;
        }
        parts
    }

    /// Evaluates a checked batch and hands `results` the bytes of what comes back of each part.
    fn evaluate(
        &mut self,
        batch: &[BatchToken],
        output: Output,
        mut trace: Option<LayerTrace<'_>>,
        mut results: impl FnMut(&[u8]),
    ) -> Result<(), GpuError> {
        self.gpu.check()?;
        self.lookahead.clear();
        for part in self.parts(batch) {
            if self.profiler.is_some() {
                let size = Self::size(part, 0);
                self.profile_step(Phase::of(batch), part, size, output)?;
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
    ) -> Result<bool, GpuError> {
        let (kind, size) = (BatchKind::of(part, self.most_few), Self::size(part, 0));
        let bytes = u64::from(size.n_wanted) * self.output(output).1;
        if self.readback.bytes() < bytes + STATE {
            self.prepared = None;
            self.readback = Readback::new(&self.gpu, bytes + STATE)?;
        }
        if trace.is_some() {
            self.trace = reserve_trace(&self.gpu, self.trace.take(), &self.spec, part.len())?;
        }
        self.write_batch(part);
        let traced = 4 * (part.len() * self.spec.n_embd * self.spec.n_layer()) as u64;
        let prepared = self.prepared.take().filter(|p| (p.size, p.output) == (size, output) && trace.is_none());
        let commands = match prepared {
            Some(prepared) => prepared.commands,
            None => self.encode(kind, size, output, trace.is_some().then_some(traced)),
        };
        let submission = self.gpu.submit_commands(commands);
        if part.len() == 1 && output != Output::Id && trace.is_none() {
            // A caller that chooses tokens itself comes back with one: its step is recorded while this one runs.
            let size = Self::size(part, 1);
            self.prepared = Some(Prepared { size, output, commands: self.encode(kind, size, output, None) });
        }
        if let (Some((_, readback)), Some(trace)) = (&mut self.trace, trace.as_deref_mut()) {
            readback.map(submission.clone());
            let states: Vec<f32> = readback.read(&self.gpu, traced, bytemuck::pod_collect_to_vec)?;
            for (i, state) in states.chunks_exact(part.len() * self.spec.n_embd).enumerate() {
                trace(i, state);
            }
        }
        if bytes == 0 {
            return Ok(true);
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
    fn encode(&mut self, kind: BatchKind, size: StepSize, output: Output, traced: Option<u64>) -> CommandBuffer {
        let mut encoder = self.record(kind, size, output, traced.is_some());
        let (source, row) = self.output(output);
        let bytes = u64::from(size.n_wanted) * row;
        if bytes > 0 {
            self.readback.copy(&mut encoder, &source, bytes);
            if let Some(state) = &self.at_once {
                self.readback.copy_after(&mut encoder, state, 4..8, bytes);
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
            Output::Logits => (self.s.logits.clone(), 4 * self.spec.n_vocab as u64),
            Output::Id => (self.ids.clone(), 4),
            Output::TopK => (self.top_k.clone(), 8 * TOP_K as u64),
        }
    }

    /// One greedy step of sequences that each go on by one token, and the steps that are expected to follow it.
    fn decode_greedy(&mut self, batch: &[BatchToken]) -> Result<Vec<u32>, GpuError> {
        self.gpu.check()?;
        let continues = self.lookahead.continues(batch);
        if !continues {
            self.lookahead.clear();
        }
        if self.lookahead.in_flight.is_empty() {
            self.write_batch(batch);
            self.submit_decode(batch, 0)?;
        }
        // A caller that gives back what it was given will do so again.
        while continues && self.lookahead.in_flight.len() < DEPTH {
            let ahead = self.lookahead.in_flight.len();
            if batch.iter().any(|t| t.pos + ahead >= self.n_ctx) {
                break;
            }
            self.submit_decode(batch, ahead)?;
        }
        let mut readback = self.lookahead.in_flight.pop_front().expect("at least one step was submitted");
        let bytes = 4 * batch.len() as u64 + STATE;
        let mut ids = readback.read(&self.gpu, bytes, bytemuck::pod_collect_to_vec::<u8, u32>)?;
        let given_up = ids.pop() != Some(0) && self.at_once.is_some() && batch.len() == 1;
        self.lookahead.free.push(readback);
        if given_up {
            self.leave_at_once();
            return self.decode_greedy(batch);
        }
        self.lookahead.advance(batch, &ids);
        Ok(ids)
    }

    /// Goes back to layers dispatched one by one, after a workgroup gave up waiting for another.
    fn leave_at_once(&mut self) {
        tracing::warn!(
            "the GPU did not run all workgroups side by side: decode goes on with a dispatch for each kernel"
        );
        self.lookahead.clear();
        self.prepared = None;
        self.one.layers_at_once = None;
        self.at_once = None;
    }

    /// Submits the greedy step `ahead` tokens after `batch`.
    fn submit_decode(&mut self, batch: &[BatchToken], ahead: usize) -> Result<(), GpuError> {
        let bytes = 4 * batch.len() as u64;
        let mut readback = match self.lookahead.free.pop().filter(|r| r.bytes() >= bytes + STATE) {
            Some(readback) => readback,
            None => Readback::new(&self.gpu, bytes + STATE)?,
        };
        let kind = BatchKind::of(batch, self.most_few);
        let mut encoder = self.record(kind, Self::size(batch, ahead), Output::Id, false);
        readback.copy(&mut encoder, &self.ids, bytes);
        if let Some(state) = &self.at_once {
            readback.copy_after(&mut encoder, state, 4..8, bytes);
        }
        readback.map(self.gpu.submit(encoder));
        self.lookahead.in_flight.push_back(readback);
        Ok(())
    }
}

/// Room for the hidden states of `n_tokens` tokens after every layer: what there is, or more.
fn reserve_trace(
    gpu: &GpuDevice,
    trace: Option<(Buffer, Readback)>,
    spec: &ModelSpec,
    n_tokens: usize,
) -> Result<Option<(Buffer, Readback)>, GpuError> {
    let bytes = 4 * (n_tokens * spec.n_embd * spec.n_layer()) as u64;
    Ok(Some(match trace.filter(|(_, readback)| readback.bytes() >= bytes) {
        Some(trace) => trace,
        None => (gpu.buffer("the hidden states", bytes)?, Readback::new(gpu, bytes)?),
    }))
}

/// Cosines and sines of every position, `[n_ctx, n_rot / 2]` pairs, for each layer; layers with equal RoPE share a table.
fn rope_tables(
    gpu: &GpuDevice,
    spec: &ModelSpec,
    factors: Option<&[f32]>,
    n_ctx: usize,
) -> Result<Vec<Buffer>, GpuError> {
    let made = distinct_ropes(spec)
        .into_iter()
        .map(|rope| Ok((rope, gpu.upload("the RoPE table", &kernels::rope_table(&rope, factors, n_ctx))?)))
        .collect::<Result<Vec<_>, GpuError>>()?;
    let table = |layer: &LayerSpec| {
        let Mixer::Attention(a) = &layer.mixer else { return None };
        made.iter().find(|(rope, _)| *rope == a.rope).map(|(_, buffer)| buffer.clone())
    };
    Ok(spec.layers.iter().filter_map(table).collect())
}

impl ForwardPass for GpuForwardPass {
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
        self.cache.n_past.len()
    }

    fn n_past(&self, seq: usize) -> usize {
        self.cache.n_past.get(seq).copied().unwrap_or(0)
    }

    fn truncate_seq(&mut self, seq: usize, n: usize) {
        if let Some(n_past) = self.cache.n_past.get_mut(seq) {
            *n_past = n.min(*n_past);
        }
    }

    fn share_prefix(&mut self, from: usize, to: usize, n: usize) -> Result<(), ForwardError> {
        check_share(from, to, n, &self.cache.n_past)?;
        Ok(self.cache.share(&self.gpu, &self.shapes, (from, to, n))?)
    }

    fn cache_pages(&self) -> PageUse {
        self.cache.usage(self.n_ctx)
    }

    fn kv_cache_bytes(&self) -> usize {
        self.cache.bytes() as usize
    }

    fn forward_traced(
        &mut self,
        batch: &[BatchToken],
        trace: Option<LayerTrace<'_>>,
    ) -> Result<Logits<'_>, ForwardError> {
        check_batch(batch, self.spec.n_vocab, self.n_ctx, &self.cache.n_past)?;
        let mut logits = std::mem::take(&mut self.logits);
        logits.clear();
        let outcome = self.evaluate(batch, Output::Logits, trace, |bytes| {
            let start = logits.len();
            logits.resize(start + bytes.len() / 4, 0.0);
            bytemuck::cast_slice_mut(&mut logits[start..]).copy_from_slice(bytes);
        });
        self.logits = logits;
        outcome?;
        self.cache.append(batch);
        Ok(Logits::new(&self.logits, self.spec.n_vocab))
    }

    fn forward_greedy(&mut self, batch: &[BatchToken]) -> Result<Vec<u32>, ForwardError> {
        check_batch(batch, self.spec.n_vocab, self.n_ctx, &self.cache.n_past)?;
        let ahead = self.profiler.is_none() && batch.len() <= FEW.min(self.s.n_wanted) && is_decode(batch);
        let ids = if ahead {
            self.decode_greedy(batch)?
        } else {
            let mut ids = Vec::new();
            self.evaluate(batch, Output::Id, None, |bytes| {
                ids.extend(bytemuck::pod_collect_to_vec::<u8, u32>(bytes));
            })?;
            let wanted: Vec<_> = batch.iter().filter(|t| t.logits).copied().collect();
            self.lookahead.advance(&wanted, &ids);
            ids
        };
        self.cache.append(batch);
        Ok(ids)
    }

    fn forward_top_k(&mut self, batch: &[BatchToken], k: usize) -> Result<Vec<TopK>, ForwardError> {
        if k > TOP_K {
            let logits = self.forward(batch)?;
            return Ok((0..logits.n_rows()).map(|i| highest(logits.row(i), k)).collect());
        }
        check_batch(batch, self.spec.n_vocab, self.n_ctx, &self.cache.n_past)?;
        let mut lists = Vec::new();
        self.evaluate(batch, Output::TopK, None, |bytes| {
            let pairs: Vec<[u32; 2]> = bytemuck::pod_collect_to_vec(bytes);
            lists.extend(pairs.chunks_exact(TOP_K).map(kernels::top_k_list));
        })?;
        for list in &mut lists {
            list.truncate(k);
        }
        self.cache.append(batch);
        Ok(lists)
    }

    fn start_profile(&mut self) -> Result<(), ForwardError> {
        self.gpu.clock()?;
        self.profiler = Some(Profiler::new(format!("GPU, {}", self.gpu.summary().name)));
        Ok(())
    }

    fn take_profile(&mut self) -> Option<Profile> {
        self.profiler.take().map(Profiler::finish)
    }

    fn max_top_k(&self) -> usize {
        TOP_K
    }
}

#[cfg(test)]
mod tests;
