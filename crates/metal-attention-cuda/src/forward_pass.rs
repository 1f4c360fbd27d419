//! [`CudaForwardPass`]: set-up, and the submissions of a step.

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
use crate::decode::Decode;
use crate::device::{Kernels, Readback};
use crate::division::Share;
use crate::exchange::{Ended, Exchange};
use crate::ids::Ids;
use crate::kv_cache::CudaKvCache;
use crate::launch::Graph;
use crate::parts::supports;
use crate::profile::{self, Timers};
use crate::state::{CudaStates, RunSizes};
use crate::step::{StepSize, Steps, TOP_K, Wanted, few_tokens, top_k_list};
use crate::weights::CudaWeights;
use crate::{CudaDevice, CudaError, CudaForwardPassOptions};

/// Queries of a tile of `prefill_attention.cu`.
const QUERY_TILE: usize = 64;

/// Products of a bunch of work that nobody needs: a millisecond or two.
const WAKING_PRODUCTS: usize = 16;

/// Runs a model on an NVIDIA GPU.
pub struct CudaForwardPass {
    pub(crate) spec: ModelSpec,
    pub(crate) cache: CudaKvCache,
    pub(crate) states: CudaStates,
    pub(crate) steps: Steps,
    /// Single tokens in one launch, where there is a kernel for that.
    decode: Option<Decode>,
    /// Steps that decode so many sequences, as they are sent from the second time on.
    graphs: HashMap<(usize, Wanted), Option<Graph>>,
    /// Greedy steps that run ahead of the CPU, by their numbers.
    pub(crate) lookahead: Lookahead<u32>,
    readback: Readback,
    /// Where blocks of the cache arrive that are read.
    pub(crate) blocks: Option<Readback>,
    logits: Vec<f32>,
    memory: MemoryUse,
    n_ctx: usize,
    profiler: Option<Profiler>,
}

impl CudaForwardPass {
    /// Sets a model up on `gpu`: uploads its weights, makes the KV cache and every buffer that steps need.
    pub fn new(
        gpu: Arc<CudaDevice>,
        spec: ModelSpec,
        weights: &Weights,
        options: &CudaForwardPassOptions,
    ) -> Result<Self, CudaError> {
        Self::with_share(gpu, spec, weights, options, None)
    }

    /// The same of a card that has a share of the model.
    pub(crate) fn with_share(
        gpu: Arc<CudaDevice>,
        whole: ModelSpec,
        weights: &Weights,
        options: &CudaForwardPassOptions,
        share: Option<(&Share, &Arc<Ended>)>,
    ) -> Result<Self, CudaError> {
        let (spec, whole) = match share {
            None => (whole, None),
            Some((share, _)) => (share.spec(&whole, weights), Some(whole)),
        };
        let room = options.capacity(&spec);
        if let Some((option, max)) = room.out_of_range() {
            return Err(CudaError::Option { option, max });
        }
        supports(&spec)?;
        let n_tokens = room.n_tokens(&spec);
        let memory = options.memory_needed(&spec, weights).total();
        let needed = share.map_or(memory, |(share, _)| {
            let mailbox = Exchange::bytes(&share.division, spec.n_vocab, n_tokens * spec.n_embd);
            (memory + mailbox).saturating_sub(share.saved_bytes(weights))
        });
        let available = gpu.free_memory()?;
        if needed > available {
            return Err(CudaError::ModelTooLarge { needed, available });
        }
        let groups = CacheGroups::new(&spec, room);
        let before = gpu.allocated_bytes();
        let cache = CudaKvCache::new(&gpu, &spec, &groups, options.cache_type)?;
        let states = CudaStates::new(&gpu, &spec, &groups, n_tokens)?;
        let s = Activations::new(&gpu, &Widths::new(&spec, n_tokens), n_tokens)?;
        let kv_cache = cache.bytes() + states.bytes();
        let exchange =
            share.map(|(share, ended)| Exchange::new(&gpu, share, (spec.n_vocab, n_tokens * spec.n_embd), ended));
        let exchange = exchange.transpose()?;
        let scratch = gpu.allocated_bytes() - before - kv_cache;
        let own = share.map(|(share, _)| share).zip(whole.as_ref());
        let cuda_weights = CudaWeights::new(&gpu, &spec, weights, own, (room.n_ctx, room.n_positions()))?;
        let ids = Ids::new(&gpu, s.n_wanted)?;
        let on_cards = share.map(|(share, _)| share);
        let decode = Decode::new(&gpu, &spec, &cuda_weights, &cache, &s, &ids, on_cards, options.one_launch)?;
        let memory = MemoryUse { weights: gpu.allocated_bytes() - before - kv_cache - scratch, kv_cache, scratch };
        // Matrices in F32 are those of small models and of whoever wants them exact; a few of them are in every second file.
        let elements = |of: &dyn Fn(TensorType) -> bool| -> usize {
            weights.tensors().into_iter().filter(|tensor| of(tensor.ty())).map(Tensor::n_elements).sum()
        };
        let is_f32 = 2 * elements(&|ty| ty == TensorType::F32) > elements(&|_| true);
        let readback = Readback::new(&gpu, 4 * spec.n_vocab as u64)?;
        let few_tokens = few_tokens(gpu.summary(), spec.n_embd);
        let steps = Steps {
            gpu,
            few_tokens,
            kernels: Kernels::default(),
            weights: cuda_weights,
            s,
            ids,
            exact: options.exact || is_f32,
            exchange,
            n_launches: 0,
            timers: None,
        };
        Ok(Self {
            spec,
            cache,
            states,
            steps,
            decode,
            graphs: HashMap::new(),
            lookahead: Lookahead::default(),
            readback,
            blocks: None,
            logits: Vec::new(),
            memory,
            n_ctx: room.n_ctx,
            profiler: None,
        })
    }

    /// Whether there are kernels for every part of `spec`; otherwise an error that names the part that lacks them.
    pub fn supports(spec: &ModelSpec) -> Result<(), CudaError> {
        supports(spec)
    }

    /// The GPU it runs on.
    pub fn gpu(&self) -> &Arc<CudaDevice> {
        &self.steps.gpu
    }

    /// Bytes it holds on the GPU.
    pub fn memory_use(&self) -> MemoryUse {
        self.memory
    }

    /// The logits of the last step.
    pub(crate) fn last_logits(&self) -> Logits<'_> {
        Logits::new(&self.logits, self.spec.n_vocab)
    }

    /// Kernels that were launched so far, those of a step that decodes the first two times alone: then it is a graph.
    pub fn launches(&self) -> u64 {
        self.steps.n_launches
    }

    /// Whether the token at position `pos` of a text goes through all layers in one launch when it goes alone.
    pub fn has_one_launch(&self, pos: usize) -> bool {
        self.tokens_at_once(pos) > 0
    }

    /// How many tokens of a text, the first at position `pos`, take one launch where they go alone and each is chosen by the one before; 0: none.
    pub(crate) fn tokens_at_once(&self, pos: usize) -> usize {
        self.decode.as_ref().map_or(0, |decode| decode.tokens_at_once(pos))
    }

    /// No more than `n` do.
    pub(crate) fn limit_at_once(&mut self, n: usize) {
        match &mut self.decode {
            Some(decode) if n > 0 => decode.limit(n),
            Some(_) | None => self.decode = None,
        }
    }

    /// Sends a batch to the GPU, which the next step evaluates.
    pub(crate) fn write_batch(&self, batch: &[BatchToken]) -> Result<(), CudaError> {
        let texts = batch.chunk_by(|a, b| a.seq == b.seq);
        let tokens = texts.flat_map(|text| {
            let last = text.last().map_or(0, |t| t.pos as u32);
            text.iter().map(move |t| TokenArgs { id: t.id, seq: t.seq as u32, pos: t.pos as u32, last })
        });
        let tokens: Vec<_> = tokens.collect();
        let wanted = batch.iter().enumerate().filter(|(_, t)| t.logits).map(|(i, _)| i as u32);
        let wanted: Vec<u32> = wanted.collect();
        self.steps.s.tokens.write(0, bytemuck::cast_slice(&tokens))?;
        self.steps.s.wanted.write(0, bytemuck::cast_slice(&wanted))
    }

    /// Sends the tiles of queries of a batch in which sequences have several tokens; how many they are.
    fn write_query_tiles(&self, batch: &[BatchToken]) -> Result<usize, CudaError> {
        let mut tiles = Vec::new();
        let mut token = 0;
        for run in batch.chunk_by(|a, b| a.seq == b.seq && a.pos + 1 == b.pos) {
            let last = run[run.len() - 1].pos as u32;
            for part in run.chunks(QUERY_TILE) {
                let (n, seq, pos) = (part.len() as u32, part[0].seq as u32, part[0].pos as u32);
                tiles.push(QueryTileArgs { token, n, seq, pos, last });
                token += n;
            }
        }
        self.steps.s.query_tiles.write(0, bytemuck::cast_slice(&tiles))?;
        Ok(tiles.len())
    }

    /// Runs the step over the token each of `n` sequences that the GPU has, the first at position `pos` of its text; of each of them
    /// something is wanted. Where tokens go on with what they choose, up to `at_most` steps one after the other; how many.
    pub(crate) fn launch(&mut self, n: usize, pos: usize, at_most: usize, wanted: Wanted) -> Result<usize, CudaError> {
        let gpu = Arc::clone(&self.steps.gpu);
        gpu.bind()?;
        let in_one = if n == 1 && wanted != Wanted::Hidden { self.tokens_at_once(pos).min(at_most) } else { 0 };
        if let Some(decode) = self.decode.as_mut().filter(|_| in_one > 0) {
            let number = match wanted {
                Wanted::Id { advance: _ } => self.steps.ids.number(in_one),
                // Nobody looks for it.
                Wanted::Hidden | Wanted::Logits | Wanted::TopK => 0,
            };
            let exchange = self.steps.exchange.as_ref();
            let mut launch = || decode.launch(&gpu, exchange, wanted, in_one, number);
            match &mut self.steps.timers {
                None => launch()?,
                Some(timers) => timers.around("decode", launch)?,
            }
            self.steps.n_launches += 1;
            self.steps.after_one_launch(self.spec.n_vocab, wanted)?;
            return Ok(in_one);
        }
        self.launch_kernels(&gpu, n, wanted)?;
        Ok(1)
    }

    /// The same, a step by kernels for each of its parts.
    fn launch_kernels(&mut self, gpu: &Arc<CudaDevice>, n: usize, wanted: Wanted) -> Result<(), CudaError> {
        let size = StepSize { n_tokens: n, n_wanted: n, n_query_tiles: 0, runs: RunSizes::of_decode(n), wanted };
        self.numbered(size, |pass| pass.run_graph(gpu, size))
    }

    /// Submits a step, which has a number where it chooses ids.
    fn numbered(
        &mut self,
        size: StepSize,
        submit: impl FnOnce(&mut Self) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        let n = match size.wanted {
            Wanted::Id { advance: _ } => size.n_wanted,
            Wanted::Hidden | Wanted::Logits | Wanted::TopK => 0,
        };
        if n > 0 {
            self.steps.ids.next_counted(n)?;
        }
        submit(self)?;
        if n > 0 {
            self.steps.ids.is_submitted(n);
        }
        Ok(())
    }

    /// A step of single tokens, from the second time on as a graph.
    fn run_graph(&mut self, gpu: &Arc<CudaDevice>, size: StepSize) -> Result<(), CudaError> {
        let (n, wanted) = (size.n_tokens, size.wanted);
        if self.steps.timers.is_some() {
            return self.steps.run(&self.spec, (&self.cache, &self.states), size, |_, _| Ok(()));
        }
        let graph = match self.graphs.remove(&(n, wanted)) {
            // The first time loads the kernels, which a graph cannot.
            None => {
                self.steps.run(&self.spec, (&self.cache, &self.states), size, |_, _| Ok(()))?;
                self.graphs.insert((n, wanted), None);
                return Ok(());
            }
            Some(Some(graph)) => graph,
            Some(None) => {
                gpu.record(|| self.steps.run(&self.spec, (&self.cache, &self.states), size, |_, _| Ok(())))?
            }
        };
        graph.launch()?;
        self.graphs.insert((n, wanted), Some(graph));
        Ok(())
    }

    /// Evaluates a batch and hands `results` the bytes of what comes back of each part. On an error the cache is as it was.
    fn evaluate(
        &mut self,
        batch: &[BatchToken],
        wanted: Wanted,
        trace: Option<LayerTrace<'_>>,
        results: impl FnMut(&[u8]),
    ) -> Result<(), ForwardError> {
        check_outputs(&self.spec, batch, &|seq| self.n_past(seq), wanted != Wanted::Hidden)?;
        self.clear_lookahead();
        self.cache.pages.check(batch, self.spec.n_vocab)?;
        self.cache.pages.begin_batch(batch);
        let outcome = self.evaluate_parts(batch, wanted, trace, results);
        if outcome.is_err() {
            self.cache.pages.retract(batch);
        }
        Ok(outcome?)
    }

    fn evaluate_parts(
        &mut self,
        batch: &[BatchToken],
        wanted: Wanted,
        mut trace: Option<LayerTrace<'_>>,
        mut results: impl FnMut(&[u8]),
    ) -> Result<(), CudaError> {
        let gpu = Arc::clone(&self.steps.gpu);
        gpu.bind()?;
        let most_wanted = match wanted {
            Wanted::Hidden => self.steps.s.n_tokens,
            Wanted::Logits | Wanted::TopK | Wanted::Id { advance: _ } => self.steps.s.n_wanted,
        };
        let parts = micro_batches(&self.spec, batch, self.steps.s.n_tokens, most_wanted);
        let parts: Vec<_> =
            if self.states.is_empty() { parts } else { parts.into_iter().flat_map(one_run_per_sequence).collect() };
        for part in parts {
            gpu.check_watch()?;
            self.cache.append(part)?;
            self.cache.write_pages(part)?;
            self.write_batch(part)?;
            let runs = self.states.write(self.cache.pages.segments(part))?;
            let n_wanted = part.iter().filter(|t| t.logits).count();
            let alone = Phase::of(part) == Phase::Decode;
            if self.profiler.is_some() {
                self.steps.timers = Some(Timers::new(&gpu));
            }
            if alone && trace.is_none() && n_wanted == part.len() {
                self.launch(part.len(), part[0].pos, 1, wanted)?;
            } else {
                let n_query_tiles = if alone { 0 } else { self.write_query_tiles(part)? };
                let size = StepSize { n_tokens: part.len(), n_wanted, n_query_tiles, runs, wanted };
                let n = part.len() * self.spec.n_embd;
                self.numbered(size, |pass| {
                    pass.steps.run(&pass.spec, (&pass.cache, &pass.states), size, |i, x| {
                        let Some(trace) = trace.as_deref_mut() else { return Ok(()) };
                        let mut state = Readback::new(&gpu, 4 * n as u64)?;
                        state.copy(x, 4 * n as u64)?;
                        trace(i, &bytemuck::pod_collect_to_vec::<u8, f32>(state.read(4 * n as u64)?));
                        Ok(())
                    })
                })?;
            }
            let s = &self.steps.s;
            let (source, row) = match wanted {
                Wanted::Hidden => (&s.hidden, 4 * self.spec.n_embd as u64),
                Wanted::Logits => (&s.logits, 4 * self.spec.n_vocab as u64),
                Wanted::TopK => (&s.top_k, 8 * TOP_K as u64),
                // They come by themselves.
                Wanted::Id { advance: _ } => (&s.logits, 0),
            };
            // What a card that follows gives is known, but for the ids, with which its steps go on.
            let bytes = if self.steps.follows() { 0 } else { row * n_wanted as u64 };
            if self.readback.bytes() < bytes {
                self.readback = Readback::new(&gpu, bytes)?;
            }
            // Also where nothing is wanted: whoever ends the work, or watches it, is a part behind the GPU at most.
            self.readback.copy(source, bytes)?;
            let read = self.readback.read(bytes)?;
            self.steps.check_together()?;
            match wanted {
                Wanted::Hidden | Wanted::Logits | Wanted::TopK => results(read),
                Wanted::Id { advance: _ } if n_wanted == 0 => {}
                Wanted::Id { advance: _ } => results(bytemuck::cast_slice(&self.steps.ids.last(n_wanted)?)),
            }
            if let (Some(timers), Some(profiler)) = (self.steps.timers.take(), &mut self.profiler) {
                profiler.add_step(timers.step(Phase::of(part), part.len())?);
            }
            gpu.watch().advance((part.len() * self.spec.n_layer()) as u64);
        }
        Ok(())
    }
}

impl CudaForwardPass {
    /// Multiplies the output head with what happens to lie there, into logits that the next step makes anew.
    fn multiply_for_nobody(&mut self) -> Result<(), CudaError> {
        let gpu = Arc::clone(&self.steps.gpu);
        gpu.bind()?;
        gpu.check_watch()?;
        let runs = RunSizes::of_decode(1);
        let size = StepSize { n_tokens: 1, n_wanted: 1, n_query_tiles: 0, runs, wanted: Wanted::Logits };
        for _ in 0..WAKING_PRODUCTS {
            self.steps.results(&self.spec, size)?;
        }
        gpu.wait()
    }
}

impl ForwardPass for CudaForwardPass {
    fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    fn device(&self) -> DeviceInfo {
        let gpu = self.steps.gpu.summary();
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
        self.steps.s.n_tokens
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
        let outcome = self.evaluate(batch, Wanted::Logits, trace, |bytes| {
            logits.extend_from_slice(bytemuck::cast_slice(bytes));
        });
        self.logits = logits;
        outcome?;
        Ok(Logits::new(&self.logits, self.spec.n_vocab))
    }

    fn forward_hidden(&mut self, batch: &[BatchToken]) -> Result<Vec<f32>, ForwardError> {
        let mut states = Vec::new();
        self.evaluate(batch, Wanted::Hidden, None, |bytes| states.extend_from_slice(bytemuck::cast_slice(bytes)))?;
        Ok(states)
    }

    fn forward_greedy(&mut self, batch: &[BatchToken]) -> Result<Vec<u32>, ForwardError> {
        // Steps that are queued ahead do not pass through `evaluate`, which checks the others.
        check_outputs(&self.spec, batch, &|seq| self.n_past(seq), true)?;
        if self.profiler.is_none() && batch.len() <= self.steps.s.n_wanted && is_decode(batch) {
            return self.decode_greedy(batch);
        }
        let mut ids = Vec::new();
        self.evaluate(batch, Wanted::Id { advance: false }, None, |bytes| {
            ids.extend_from_slice(bytemuck::cast_slice(bytes));
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
        self.evaluate(batch, Wanted::TopK, None, |bytes| {
            let ranks: &[u64] = bytemuck::cast_slice(bytes);
            lists.extend(ranks.chunks_exact(TOP_K).map(top_k_list));
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
            Some(Profiler::new(format!("CUDA, {}", self.steps.gpu.summary().name)).with_note(profile::NOTE));
        Ok(())
    }

    fn wake(&mut self) -> bool {
        self.spec.output.head.is_some() && self.steps.timers.is_none() && self.multiply_for_nobody().is_ok()
    }

    fn take_profile(&mut self) -> Option<Profile> {
        self.profiler.take().map(Profiler::finish)
    }
}
