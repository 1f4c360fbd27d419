//! The CPU backend: set-up of a model, and the [`Executor`] of its steps.
//!
//! [`CpuExecutor`] owns everything that outlives a step, except the page table: the prepared weights, the KV pages and recurrent
//! states, the scratch buffers and the thread pool. [`MicroBatchRun`] evaluates a step.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use half::f16;
use metal_attention_gguf::GgufFile;
use metal_attention_model::{
    BatchToken, CacheBlock, CacheGroups, CacheLayout, DeviceInfo, Executor, ForwardError, LayerTrace, LoadedAssistant,
    LoadedModel, MemoryUse, ModelSpec, PageCopy, Profiler, Session, SessionOptions, Step, StepLimits, StepResults,
    Watch,
};

use crate::cores::physical_cores;
use crate::error::CpuError;
use crate::forward::{MicroBatchOutput, MicroBatchRun, Scratch};
use crate::kv_cache::{CacheElement, CacheType, LayerKvCache, PageLayout, SharedKvCache};
use crate::layers::PreparedWeights;
use crate::observer::Observer;
use crate::pool::ThreadPool;
use crate::sequence_parallel::SequenceParallel;
use crate::simd::Isa;
use crate::state::StateSlots;
use crate::turns::StepTurn;

/// The largest number of threads that is accepted: more than any machine has cores.
const MAX_THREADS: usize = 4096;

/// Where a [`CpuExecutor`] runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CpuOptions {
    /// The number of threads that compute, the caller's included.
    pub n_threads: usize,
    /// The instruction set of the kernels. `None`: the best one that the CPU has.
    pub isa: Option<Isa>,
    /// Cancels the set-up and each forward pass, and counts their progress.
    pub watch: Watch,
}

impl Default for CpuOptions {
    fn default() -> Self {
        Self { n_threads: physical_cores(), isa: None, watch: Watch::default() }
    }
}

/// A forward pass on the CPU.
pub type CpuForwardPass = Session<CpuExecutor>;

/// A model on the CPU: its weights, the KV cache and the recurrent states of its sequences.
pub struct CpuExecutor {
    spec: ModelSpec,
    groups: CacheGroups,
    weights: PreparedWeights,
    /// Shared with the executor of an assistant, which reads it. The session runs one of them at a time.
    cache: Arc<Mutex<KvCache>>,
    states: StateSlots,
    scratch: Scratch,
    /// Buffers for evaluating the sequences of a small model in parallel; `None` where that does not pay.
    sequence_parallel: Option<SequenceParallel>,
    pool: ThreadPool,
    isa: Isa,
    n_ubatch: usize,
    /// Receives the input of every matrix.
    observer: Option<Observer>,
}

/// The KV cache of each layer; `None` for layers without attention and for those that share another layer's memory.
enum KvCache {
    F16(Vec<Option<LayerKvCache<f16>>>),
    F32(Vec<Option<LayerKvCache<f32>>>),
}

impl CpuExecutor {
    /// A session with the model of `file`, whose weights stay mapped: see [`new`](Self::new).
    pub fn session_of_file(
        cpu: &CpuOptions,
        file: &GgufFile,
        options: &SessionOptions,
    ) -> Result<CpuForwardPass, CpuError> {
        Self::session(cpu, &LoadedModel::load(file)?, options)
    }

    /// A session with a model: see [`new`](Self::new).
    pub fn session(
        cpu: &CpuOptions,
        model: &LoadedModel,
        options: &SessionOptions,
    ) -> Result<CpuForwardPass, CpuError> {
        Ok(Session::new(Self::new(cpu, model, options)?))
    }

    /// Sets up a model: starts the threads, allocates the KV cache and the recurrent states, and repacks the weights. With
    /// `exact` quantised weights are not repacked but read from the mapped file, dequantised in each product and multiplied
    /// by F32 activations: slow, and as close to the file's weights as F32 arithmetic gets.
    ///
    /// # Errors
    ///
    /// An option out of its range, threads or memory that the system refuses,
    /// or a cancelled `watch`.
    pub fn new(cpu: &CpuOptions, model: &LoadedModel, options: &SessionOptions) -> Result<Self, CpuError> {
        Self::with_first(cpu, model, options, None)
    }

    /// [`new`](Self::new), for a model that was [loaded beside](LoadedModel::load_beside) that of `first`: the output head is
    /// not repacked again if it is that of `first`, with equal `exact`, and its memory is not counted.
    pub fn beside(
        first: &Self,
        cpu: &CpuOptions,
        model: &LoadedModel,
        options: &SessionOptions,
    ) -> Result<Self, CpuError> {
        Self::with_first(cpu, model, options, Some(&first.weights))
    }

    /// Sets up an assistant of the model of `target`, to be [attached](Session::attach_assistant) to its session: it reads the
    /// KV cache of `target`, and has none.
    ///
    /// # Errors
    ///
    /// As of [`new`](Self::new).
    pub fn assistant(
        target: &Self,
        cpu: &CpuOptions,
        assistant: &LoadedAssistant,
        options: &SessionOptions,
    ) -> Result<Self, CpuError> {
        let groups = target.groups.of_assistant(assistant.spec());
        let cache = Arc::clone(&target.cache);
        Self::over_cache(cpu, assistant.as_model(), options, Some(&target.weights), groups, cache)
    }

    /// [`new`](Self::new), or [`beside`](Self::beside) a model with the weights `first`.
    fn with_first(
        cpu: &CpuOptions,
        model: &LoadedModel,
        options: &SessionOptions,
        first: Option<&PreparedWeights>,
    ) -> Result<Self, CpuError> {
        let spec = model.spec();
        let capacity = options.capacity(spec);
        if let Some((option, max)) = capacity.out_of_range() {
            return Err(CpuError::Option { option, max });
        }
        let groups = CacheGroups::new(spec, capacity);
        let cache = match options.cache_type {
            CacheType::F16 => KvCache::F16(layer_caches(spec, &groups)?),
            CacheType::F32 => KvCache::F32(layer_caches(spec, &groups)?),
        };
        Self::over_cache(cpu, model, options, first, groups, Arc::new(Mutex::new(cache)))
    }

    /// An executor over the KV cache `cache`, whose layers `groups` name.
    fn over_cache(
        cpu: &CpuOptions,
        model: &LoadedModel,
        options: &SessionOptions,
        first: Option<&PreparedWeights>,
        groups: CacheGroups,
        cache: Arc<Mutex<KvCache>>,
    ) -> Result<Self, CpuError> {
        let (spec, n_threads) = (model.spec().clone(), cpu.n_threads);
        let capacity = options.capacity(&spec);
        if let Some((option, max)) = capacity.out_of_range() {
            return Err(CpuError::Option { option, max });
        }
        if n_threads == 0 || n_threads > MAX_THREADS {
            return Err(CpuError::Option { option: "the number of threads", max: MAX_THREADS });
        }
        let state_bytes = groups.states().map_or(0, |states| states.bytes());
        let states = StateSlots::new(&spec, &groups)
            .ok_or(CpuError::OutOfMemory { what: "the recurrent states", bytes: state_bytes })?;
        let no_threads = |source| CpuError::Threads { n_threads, source };
        let pool = ThreadPool::new(n_threads).map_err(no_threads)?.watched(cpu.watch.clone());
        let isa = cpu.isa.unwrap_or_else(Isa::best);
        let weights = PreparedWeights::new(&pool, model, capacity.n_ctx, options.exact, first)?;
        let sequence_parallel = SequenceParallel::new(weights.bytes(), &pool).map_err(no_threads)?;
        Ok(Self {
            weights,
            cache,
            states,
            groups,
            scratch: Scratch::default(),
            sequence_parallel,
            pool,
            isa,
            n_ubatch: capacity.n_ubatch,
            observer: None,
            spec,
        })
    }

    /// Sets the observer that receives the input of every matrix in each forward pass; `None` removes it.
    pub fn observe(&mut self, observer: Option<Observer>) {
        self.observer = observer;
    }

    /// The instruction set of the kernels.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// The number of parallel regions that the threads have entered since the set-up; 0 with one thread. Wraps around.
    pub fn regions(&self) -> u32 {
        self.pool.regions()
    }

    /// The number of threads that compute, the caller's included.
    pub fn n_threads(&self) -> usize {
        self.pool.n_threads()
    }
}

/// Allocates the KV cache of each layer that has memory of its own ([`CacheGroups::memory_of_layer`]).
fn layer_caches<E: CacheElement>(
    spec: &ModelSpec,
    groups: &CacheGroups,
) -> Result<Vec<Option<LayerKvCache<E>>>, CpuError> {
    let mut bytes = 0u64;
    let mut layers = Vec::with_capacity(spec.n_layer());
    for (i, layer) in spec.layers.iter().enumerate() {
        let own = groups.memory_of_layer(i) == Some(i);
        let Some(cached) = layer.mixer.kv_shape().filter(|_| own) else {
            layers.push(None);
            continue;
        };
        let (group, n_pages) = (groups.of_layer(i), groups.n_pages(i));
        let per_page = PageLayout::page_bytes(cached, size_of::<E>()) as u64;
        bytes = (n_pages as u64).saturating_mul(per_page).saturating_add(bytes);
        let cache =
            LayerKvCache::new(group, n_pages, cached).ok_or(CpuError::OutOfMemory { what: "the KV cache", bytes })?;
        layers.push(Some(cache));
    }
    Ok(layers)
}

/// The cache that each of `n_layer` layers reads: its own, that of the layer whose memory it shares, or `None` without attention.
fn read_by_layers<'c, 'm, E>(
    groups: &CacheGroups,
    n_layer: usize,
    owned: &'c [Option<SharedKvCache<'m, E>>],
) -> Vec<Option<&'c SharedKvCache<'m, E>>> {
    (0..n_layer).map(|i| owned[groups.memory_of_layer(i)?].as_ref()).collect()
}

/// Evaluates the micro-batch `tokens`: its sequences in parallel where the model is small and `tokens` can be divided,
/// otherwise all tokens together, with every kernel spread over the threads.
fn forward<E: CacheElement>(
    groups: &CacheGroups,
    layers: &mut [Option<LayerKvCache<E>>],
    mut run: MicroBatchRun<'_>,
    sequence_parallel: &mut Option<SequenceParallel>,
    tokens: &[BatchToken],
    output: MicroBatchOutput<'_>,
    trace: Option<LayerTrace<'_>>,
) {
    let owned: Vec<_> = layers.iter_mut().map(|layer| layer.as_mut().map(LayerKvCache::shared)).collect();
    let caches = read_by_layers(groups, run.spec.n_layer(), &owned);
    match (sequence_parallel, output) {
        // A trace or an observer is passed all tokens of the micro-batch together; spans and context rows are rare.
        (Some(sequence_parallel), MicroBatchOutput::Logits { head, logits })
            if trace.is_none() && run.observer.is_none() && run.inputs.is_none() && run.context.is_none() =>
        {
            if !sequence_parallel.forward(&mut run, &caches, tokens, head, logits) {
                run.forward(&caches, tokens, MicroBatchOutput::Logits { head, logits }, trace);
            }
        }
        (_, output) => run.forward(&caches, tokens, output, trace),
    }
}

/// Locks a cache. A thread that panicked while it held the lock may have left keys and values undefined, as any failed step does.
fn lock(cache: &Mutex<KvCache>) -> MutexGuard<'_, KvCache> {
    cache.lock().unwrap_or_else(PoisonError::into_inner)
}

impl KvCache {
    fn cache_type(&self) -> CacheType {
        match self {
            Self::F16(_) => CacheType::F16,
            Self::F32(_) => CacheType::F32,
        }
    }
}

/// Bytes of one page of a cache group, over all layers of the group.
fn page_bytes<E: CacheElement>(layers: &[Option<LayerKvCache<E>>], group: usize) -> u64 {
    let of_group = layers.iter().flatten().filter(|layer| layer.group() == group);
    of_group.map(|layer| layer.page_bytes() as u64).sum()
}

/// Copies page `page` of a cache group to `bytes`: keys, then values, of each layer of the group in order.
fn read_page<E: CacheElement>(layers: &[Option<LayerKvCache<E>>], group: usize, page: u32, mut bytes: &mut [u8]) {
    for layer in layers.iter().flatten().filter(|layer| layer.group() == group) {
        let (of_layer, rest) = bytes.split_at_mut(layer.page_bytes());
        layer.read_page(page, of_layer);
        bytes = rest;
    }
}

/// Copies `bytes`, as written by [`read_page`], to page `page` of a cache group.
fn write_page<E: CacheElement>(layers: &mut [Option<LayerKvCache<E>>], group: usize, page: u32, mut bytes: &[u8]) {
    for layer in layers.iter_mut().flatten().filter(|layer| layer.group() == group) {
        let (of_layer, rest) = bytes.split_at(layer.page_bytes());
        layer.write_page(page, of_layer);
        bytes = rest;
    }
}

impl Executor for CpuExecutor {
    /// No step is submitted ahead.
    type InFlight = std::convert::Infallible;

    fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    fn device(&self) -> DeviceInfo {
        DeviceInfo { kind: "cpu", name: self.isa.name().to_owned(), driver: None, n_threads: self.n_threads() }
    }

    fn cache_groups(&self) -> &CacheGroups {
        &self.groups
    }

    fn limits(&self) -> StepLimits {
        StepLimits {
            n_tokens: self.n_ubatch,
            n_outputs: usize::MAX,
            one_run_per_sequence: false,
            chooses_ids: false,
            max_top_k: 0,
            n_ahead: 0,
        }
    }

    /// Only repacked weights count; the others are pages of the mapped file.
    fn memory_use(&self, results: usize) -> MemoryUse {
        let sequence_parallel = self.sequence_parallel.as_ref().map_or(0, SequenceParallel::bytes);
        MemoryUse {
            weights: self.weights.packed_bytes() as u64,
            kv_cache: self.cache_bytes() as u64,
            scratch: (self.scratch.bytes() + sequence_parallel + results) as u64,
        }
    }

    fn begin_batch(&mut self) -> Result<(), ForwardError> {
        self.pool.begin();
        Ok(())
    }

    fn copy_page(&mut self, copy: PageCopy) -> Result<(), ForwardError> {
        match &mut *lock(&self.cache) {
            KvCache::F16(layers) => layers.iter_mut().flatten().for_each(|layer| layer.copy(copy)),
            KvCache::F32(layers) => layers.iter_mut().flatten().for_each(|layer| layer.copy(copy)),
        }
        Ok(())
    }

    fn run(
        &mut self,
        step: &Step,
        results: StepResults<'_>,
        trace: Option<LayerTrace<'_>>,
        mut profiler: Option<&mut Profiler>,
    ) -> Result<(), ForwardError> {
        let _turn = StepTurn::begin();
        let output = match (results, &self.weights.output) {
            (StepResults::Logits(logits), Some(head)) => MicroBatchOutput::Logits { head, logits },
            // Without output tokens there are no rows of either kind.
            (StepResults::Logits(rows), None) if rows.is_empty() => MicroBatchOutput::Hidden(rows),
            (StepResults::Logits(_), None) => return Err(ForwardError::NoLogits),
            (StepResults::Hidden(rows), _) => MicroBatchOutput::Hidden(rows),
            (StepResults::Ids(_) | StepResults::TopK(_), _) => {
                return Err(ForwardError::Device { why: "the CPU returns logits alone".into() });
            }
        };
        if let Some(profiler) = &mut profiler {
            profiler.begin_step(step.phase, step.tokens.len());
        }
        let states = self.states.shared();
        let run = MicroBatchRun {
            spec: &self.spec,
            weights: &self.weights,
            pool: &self.pool,
            isa: self.isa,
            pages: &step.pages,
            inputs: step.inputs.as_deref(),
            token_states: step.states.as_deref().unwrap_or_default(),
            is_of_assistant: step.is_of_assistant,
            context: step.context.as_deref(),
            states: &states,
            scratch: &mut self.scratch,
            profiler,
            observer: self.observer.as_mut(),
        };
        match &mut *lock(&self.cache) {
            KvCache::F16(layers) => {
                forward(&self.groups, layers, run, &mut self.sequence_parallel, &step.tokens, output, trace);
            }
            KvCache::F32(layers) => {
                forward(&self.groups, layers, run, &mut self.sequence_parallel, &step.tokens, output, trace);
            }
        }
        if self.pool.is_cancelled() { Err(ForwardError::Cancelled) } else { Ok(()) }
    }

    fn cache_layout(&self) -> CacheLayout {
        let of_group = |group| match &*lock(&self.cache) {
            KvCache::F16(layers) => page_bytes(layers, group),
            KvCache::F32(layers) => page_bytes(layers, group),
        };
        CacheLayout {
            format: format!("cpu {}", lock(&self.cache).cache_type()),
            page_bytes: (0..self.groups.groups().len()).map(of_group).collect(),
            state_bytes: self.states.slot_bytes() as u64,
        }
    }

    fn cache_bytes(&self) -> usize {
        let keys_and_values: usize = match &*lock(&self.cache) {
            KvCache::F16(layers) => layers.iter().flatten().map(LayerKvCache::bytes).sum(),
            KvCache::F32(layers) => layers.iter().flatten().map(LayerKvCache::bytes).sum(),
        };
        keys_and_values + self.states.bytes()
    }

    fn read_block(&mut self, block: CacheBlock, bytes: &mut [u8]) -> Result<(), ForwardError> {
        match (block, &*lock(&self.cache)) {
            (CacheBlock::Page { group, page }, KvCache::F16(layers)) => read_page(layers, group, page, bytes),
            (CacheBlock::Page { group, page }, KvCache::F32(layers)) => read_page(layers, group, page, bytes),
            (CacheBlock::State { slot }, _) => bytes.copy_from_slice(self.states.slot(slot)),
        }
        Ok(())
    }

    fn write_block(&mut self, block: CacheBlock, bytes: &[u8]) -> Result<(), ForwardError> {
        match (block, &mut *lock(&self.cache)) {
            (CacheBlock::Page { group, page }, KvCache::F16(layers)) => write_page(layers, group, page, bytes),
            (CacheBlock::Page { group, page }, KvCache::F32(layers)) => write_page(layers, group, page, bytes),
            (CacheBlock::State { slot }, _) => self.states.slot_mut(slot).copy_from_slice(bytes),
        }
        Ok(())
    }

    fn profiler(&self) -> Result<Profiler, ForwardError> {
        Ok(Profiler::new(format!("CPU, {}, threads: {}", self.isa.name(), self.n_threads())))
    }
}
