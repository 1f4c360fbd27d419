//! The CPU backend as callers see it: set-up, KV cache bookkeeping, and the
//! [`ForwardPass`] trait.

use half::f16;
use metal_attention_gguf::GgufFile;
use metal_attention_model::{
    BatchToken, CacheBlock, CacheGroups, CacheLayout, Capacity, DEFAULT_UBATCH, DeviceInfo, ForwardError, ForwardPass,
    LayerTrace, Logits, MemoryUse, ModelSpec, PageTable, PageUse, Phase, Profile, Profiler, SequenceCache,
    SequenceExtent, SnapshotError, Watch, Weights, check_outputs, micro_batches,
};

use crate::cores::physical_cores;
use crate::error::CpuError;
use crate::forward::{Run, Scratch, Wanted};
use crate::kv_cache::{CacheType, Element, LayerCache, Places, SharedCache};
use crate::layers::PreparedWeights;
use crate::observer::Observer;
use crate::pool::ThreadPool;
use crate::side_by_side::SideBySide;
use crate::simd::Isa;
use crate::state::States;

/// More threads than any machine has cores for.
const MAX_THREADS: usize = 4096;

/// How a [`CpuForwardPass`] is set up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CpuOptions {
    /// Positions each sequence has room for.
    pub n_ctx: usize,
    /// Sequences that the KV cache holds.
    pub n_seq: usize,
    /// Positions that the KV cache has room for, all sequences together, rounded up to whole pages. `None`: `n_ctx` for
    /// each sequence.
    pub n_cache: Option<usize>,
    /// Sequences whose windows there is room for, in layers that keep no more of them; a batch may be refused for want of a
    /// window. `None`: all.
    pub n_windows: Option<usize>,
    /// Bytes for recurrent states that texts can be cut back to, besides those that they go on from.
    pub state_cache: usize,
    /// Threads to compute with.
    pub n_threads: usize,
    /// Element type of the KV cache.
    pub cache_type: CacheType,
    /// Multiply quantised weights by F32 activations, dequantised on the fly:
    /// slow, and as close to the file's weights as F32 arithmetic gets.
    pub exact: bool,
    /// Tokens that go through the layers at once; longer batches are cut.
    pub n_ubatch: usize,
    /// Instruction set of the kernels; `None` takes the CPU's best.
    pub isa: Option<Isa>,
    /// Ends the set-up and each forward pass, and counts what they have done.
    pub watch: Watch,
}

impl Default for CpuOptions {
    fn default() -> Self {
        Self {
            n_ctx: 4096,
            n_seq: 1,
            n_cache: None,
            n_windows: None,
            state_cache: 256 << 20,
            n_threads: physical_cores(),
            cache_type: CacheType::default(),
            exact: false,
            n_ubatch: DEFAULT_UBATCH,
            isa: None,
            watch: Watch::default(),
        }
    }
}

/// Runs a model on the CPU.
pub struct CpuForwardPass {
    spec: ModelSpec,
    weights: PreparedWeights,
    cache: Cache,
    states: States,
    /// Which page of the cache holds what.
    pages: PageTable,
    scratch: Scratch,
    side_by_side: Option<SideBySide>,
    /// What is wanted of the last batch: logits or states.
    wanted: Vec<f32>,
    pool: ThreadPool,
    isa: Isa,
    n_ctx: usize,
    n_ubatch: usize,
    profiler: Option<Profiler>,
    observer: Option<Observer>,
}

/// The KV cache of all layers; none of those that read another's.
enum Cache {
    F16(Vec<Option<LayerCache<f16>>>),
    F32(Vec<Option<LayerCache<f32>>>),
}

impl CpuForwardPass {
    /// Sets up the model of `file`.
    pub fn from_gguf(file: &GgufFile, options: &CpuOptions) -> Result<Self, CpuError> {
        let spec = ModelSpec::from_gguf(file)?;
        let weights = Weights::load(file, &spec)?;
        Self::new(spec, &weights, options)
    }

    /// Sets up a model: allocates the KV cache and, unless `exact`, repacks the
    /// quantised weights.
    pub fn new(spec: ModelSpec, weights: &Weights, options: &CpuOptions) -> Result<Self, CpuError> {
        let &CpuOptions { n_seq, n_cache, n_windows, state_cache, n_threads, n_ubatch, .. } = options;
        let n_ctx = Capacity::n_ctx_of(&spec, options.n_ctx);
        let capacity = Capacity { n_ctx, n_seq, n_cache, n_windows, state_cache, n_ubatch };
        if let Some((option, max)) = capacity.out_of_range() {
            return Err(CpuError::Option { option, max });
        }
        if n_threads == 0 || n_threads > MAX_THREADS {
            return Err(CpuError::Option { option: "the number of threads", max: MAX_THREADS });
        }
        let groups = CacheGroups::new(&spec, capacity);
        let cache = match options.cache_type {
            CacheType::F16 => Cache::F16(layer_caches(&spec, &groups)?),
            CacheType::F32 => Cache::F32(layer_caches(&spec, &groups)?),
        };
        let state_bytes = groups.states().map_or(0, |room| room.bytes());
        let states = States::new(&spec, &groups)
            .ok_or(CpuError::OutOfMemory { what: "the recurrent states", bytes: state_bytes })?;
        let no_threads = |source| CpuError::Threads { n_threads, source };
        let pool = ThreadPool::new(n_threads).map_err(no_threads)?.watched(options.watch.clone());
        let isa = options.isa.unwrap_or_else(Isa::best);
        let weights = PreparedWeights::new(&pool, &spec, weights, n_ctx, options.exact)?;
        let side_by_side = SideBySide::new(weights.bytes(), &pool).map_err(no_threads)?;
        Ok(Self {
            weights,
            cache,
            states,
            pages: PageTable::new(&groups),
            scratch: Scratch::default(),
            side_by_side,
            wanted: Vec::new(),
            pool,
            isa,
            n_ctx,
            n_ubatch,
            profiler: None,
            observer: None,
            spec,
        })
    }

    /// Bytes held at this moment. Of the weights those that were repacked count; the others are in the mapped file.
    pub fn memory_use(&self) -> MemoryUse {
        let side_by_side = self.side_by_side.as_ref().map_or(0, SideBySide::bytes);
        let scratch = self.scratch.bytes() + side_by_side + 4 * self.wanted.capacity();
        MemoryUse {
            weights: self.weights.packed_bytes() as u64,
            kv_cache: self.kv_cache_bytes() as u64,
            scratch: scratch as u64,
        }
    }

    /// From now on `observer` sees the input of every matrix, and `None` nothing.
    pub fn observe(&mut self, observer: Option<Observer>) {
        self.observer = observer;
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Parallel regions that its threads entered so far; with one thread there are none. Wraps around.
    pub fn regions(&self) -> u32 {
        self.pool.regions()
    }

    /// Threads in use.
    pub fn n_threads(&self) -> usize {
        self.pool.n_threads()
    }
}

fn layer_caches<E: Element>(spec: &ModelSpec, groups: &CacheGroups) -> Result<Vec<Option<LayerCache<E>>>, CpuError> {
    let mut bytes = 0u64;
    let mut layers = Vec::with_capacity(spec.n_layer());
    for (i, layer) in spec.layers.iter().enumerate() {
        let Some(cached) = layer.mixer.kv_shape() else {
            layers.push(None);
            continue;
        };
        let (group, n_pages) = (groups.of_layer(i), groups.n_pages(i));
        let per_page = Places::page_bytes(cached, size_of::<E>()) as u64;
        bytes = (n_pages as u64).saturating_mul(per_page).saturating_add(bytes);
        let cache =
            LayerCache::new(group, n_pages, cached).ok_or(CpuError::OutOfMemory { what: "the KV cache", bytes })?;
        layers.push(Some(cache));
    }
    Ok(layers)
}

/// The cache that each layer reads: its own, another's, or none.
fn read_by_layers<'c, 'm, E>(
    spec: &ModelSpec,
    own: &'c [Option<SharedCache<'m, E>>],
) -> Vec<Option<&'c SharedCache<'m, E>>> {
    let sources = spec.layers.iter().enumerate().map(|(i, layer)| layer.mixer.cache_of(i));
    sources.map(|source| own[source?].as_ref()).collect()
}

/// Evaluates `tokens`, side by side where that can be.
fn forward<E: Element>(
    layers: &mut [Option<LayerCache<E>>],
    mut run: Run<'_>,
    side_by_side: &mut Option<SideBySide>,
    tokens: &[BatchToken],
    wanted: Wanted<'_>,
    trace: Option<LayerTrace<'_>>,
) {
    let own: Vec<_> = layers.iter_mut().map(|layer| layer.as_mut().map(LayerCache::shared)).collect();
    let caches = read_by_layers(run.spec, &own);
    match (side_by_side, wanted) {
        // Who watches the layers, or their matrices, sees all tokens together.
        (Some(side_by_side), Wanted::Logits(logits)) if trace.is_none() && run.observer.is_none() => {
            if !side_by_side.forward(&mut run, &caches, tokens, logits) {
                run.forward(&caches, tokens, Wanted::Logits(logits), trace);
            }
        }
        (_, wanted) => run.forward(&caches, tokens, wanted, trace),
    }
}

/// What is to come back of the wanted tokens.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Logits,
    Hidden,
}

impl CpuForwardPass {
    /// Evaluates `batch` into `wanted` and returns the length of what is there.
    fn evaluate(
        &mut self,
        batch: &[BatchToken],
        kind: Kind,
        mut trace: Option<LayerTrace<'_>>,
    ) -> Result<usize, ForwardError> {
        let width = match kind {
            Kind::Logits => self.spec.n_vocab,
            Kind::Hidden => self.spec.n_embd,
        };
        let n_wanted = batch.iter().filter(|t| t.logits).count() * width;
        if self.wanted.len() < n_wanted {
            let more = n_wanted - self.wanted.len();
            self.wanted
                .try_reserve_exact(more)
                .map_err(|_| ForwardError::OutOfMemory { what: "the logits", bytes: 4 * n_wanted })?;
            self.wanted.resize(n_wanted, 0.0);
        }
        self.pool.begin();
        check_outputs(&self.spec, batch, &|seq| self.pages.n_past(seq), kind == Kind::Logits)?;
        self.pages.check(batch, self.spec.n_vocab)?;
        self.pages.begin_batch(batch);
        let states = self.states.shared();
        let mut done = 0;
        for tokens in micro_batches(&self.spec, batch, self.n_ubatch, usize::MAX) {
            for copy in self.pages.append(tokens) {
                match &mut self.cache {
                    Cache::F16(layers) => layers.iter_mut().flatten().for_each(|layer| layer.copy(copy)),
                    Cache::F32(layers) => layers.iter_mut().flatten().for_each(|layer| layer.copy(copy)),
                }
            }
            let n = tokens.iter().filter(|t| t.logits).count() * width;
            let wanted = &mut self.wanted[done..done + n];
            let wanted = match kind {
                Kind::Logits => Wanted::Logits(wanted),
                Kind::Hidden => Wanted::Hidden(wanted),
            };
            if let Some(profiler) = &mut self.profiler {
                profiler.begin_step(Phase::of(batch), tokens.len());
            }
            let run = Run {
                spec: &self.spec,
                weights: &self.weights,
                pool: &self.pool,
                isa: self.isa,
                pages: &self.pages,
                states: &states,
                s: &mut self.scratch,
                profiler: self.profiler.as_mut(),
                observer: self.observer.as_mut(),
            };
            let trace: Option<LayerTrace<'_>> = match &mut trace {
                Some(trace) => Some(&mut **trace),
                None => None,
            };
            match &mut self.cache {
                Cache::F16(layers) => forward(layers, run, &mut self.side_by_side, tokens, wanted, trace),
                Cache::F32(layers) => forward(layers, run, &mut self.side_by_side, tokens, wanted, trace),
            }
            if self.pool.is_cancelled() {
                self.pages.retract(batch);
                return Err(ForwardError::Cancelled);
            }
            done += n;
        }
        Ok(n_wanted)
    }
}

impl Cache {
    fn cache_type(&self) -> CacheType {
        match self {
            Self::F16(_) => CacheType::F16,
            Self::F32(_) => CacheType::F32,
        }
    }
}

/// Bytes of a page of `group`, over all its layers.
fn page_bytes<E: Element>(layers: &[Option<LayerCache<E>>], group: usize) -> u64 {
    let of_group = layers.iter().flatten().filter(|layer| layer.group() == group);
    of_group.map(|layer| layer.page_bytes() as u64).sum()
}

fn read_page<E: Element>(layers: &[Option<LayerCache<E>>], group: usize, page: u32, mut bytes: &mut [u8]) {
    for layer in layers.iter().flatten().filter(|layer| layer.group() == group) {
        let (own, rest) = bytes.split_at_mut(layer.page_bytes());
        layer.read_page(page, own);
        bytes = rest;
    }
}

fn write_page<E: Element>(layers: &mut [Option<LayerCache<E>>], group: usize, page: u32, mut bytes: &[u8]) {
    for layer in layers.iter_mut().flatten().filter(|layer| layer.group() == group) {
        let (own, rest) = bytes.split_at(layer.page_bytes());
        layer.write_page(page, own);
        bytes = rest;
    }
}

impl SequenceCache for CpuForwardPass {
    fn layout(&self) -> CacheLayout {
        let of_group = |group| match &self.cache {
            Cache::F16(layers) => page_bytes(layers, group),
            Cache::F32(layers) => page_bytes(layers, group),
        };
        CacheLayout {
            format: format!("cpu {}", self.cache.cache_type()),
            page_bytes: (0..self.pages.n_groups()).map(of_group).collect(),
            state_bytes: self.states.slot_bytes() as u64,
        }
    }

    fn pages(&self) -> &PageTable {
        &self.pages
    }

    fn discard_lookahead(&mut self) {}

    fn allocate(&mut self, seq: usize, extent: &SequenceExtent) -> Result<Vec<Option<CacheBlock>>, SnapshotError> {
        self.pages.allocate(seq, extent)
    }

    fn read_block(&mut self, block: CacheBlock, bytes: &mut [u8]) -> Result<(), ForwardError> {
        match (block, &self.cache) {
            (CacheBlock::Page { group, page }, Cache::F16(layers)) => read_page(layers, group, page, bytes),
            (CacheBlock::Page { group, page }, Cache::F32(layers)) => read_page(layers, group, page, bytes),
            (CacheBlock::State { slot }, _) => bytes.copy_from_slice(self.states.slot(slot)),
        }
        Ok(())
    }

    fn write_block(&mut self, block: CacheBlock, bytes: &[u8]) -> Result<(), ForwardError> {
        match (block, &mut self.cache) {
            (CacheBlock::Page { group, page }, Cache::F16(layers)) => write_page(layers, group, page, bytes),
            (CacheBlock::Page { group, page }, Cache::F32(layers)) => write_page(layers, group, page, bytes),
            (CacheBlock::State { slot }, _) => self.states.slot_mut(slot).copy_from_slice(bytes),
        }
        Ok(())
    }
}

impl ForwardPass for CpuForwardPass {
    fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    fn device(&self) -> DeviceInfo {
        DeviceInfo { kind: "cpu", name: self.isa.name().to_owned(), driver: None, n_threads: self.n_threads() }
    }

    fn n_ctx(&self) -> usize {
        self.n_ctx
    }

    fn n_seq(&self) -> usize {
        self.pages.n_seq()
    }

    fn n_ubatch(&self) -> usize {
        self.n_ubatch
    }

    fn n_past(&self, seq: usize) -> usize {
        self.pages.n_past(seq)
    }

    fn rewind(&mut self, seq: usize, n: usize) -> usize {
        self.pages.rewind(seq, n)
    }

    fn reachable(&self, seq: usize, n: usize) -> usize {
        self.pages.reachable(seq, n)
    }

    fn share_prefix(&mut self, from: usize, to: usize, n: usize) -> Result<usize, ForwardError> {
        self.pages.share(from, to, n)
    }

    fn cache_pages(&self) -> PageUse {
        self.pages.usage()
    }

    fn pages_held(&self, sequences: &[usize]) -> usize {
        self.pages.pages_held(sequences)
    }

    fn kv_cache_bytes(&self) -> usize {
        let keys_and_values: usize = match &self.cache {
            Cache::F16(layers) => layers.iter().flatten().map(LayerCache::bytes).sum(),
            Cache::F32(layers) => layers.iter().flatten().map(LayerCache::bytes).sum(),
        };
        keys_and_values + self.states.bytes()
    }

    fn cache(&mut self) -> &mut dyn SequenceCache {
        self
    }

    fn start_profile(&mut self) -> Result<(), ForwardError> {
        let device = format!("CPU, {}, threads: {}", self.isa.name(), self.n_threads());
        self.profiler = Some(Profiler::new(device));
        Ok(())
    }

    fn take_profile(&mut self) -> Option<Profile> {
        self.profiler.take().map(Profiler::finish)
    }

    fn forward_traced(
        &mut self,
        batch: &[BatchToken],
        trace: Option<LayerTrace<'_>>,
    ) -> Result<Logits<'_>, ForwardError> {
        let n = self.evaluate(batch, Kind::Logits, trace)?;
        Ok(Logits::new(&self.wanted[..n], self.spec.n_vocab))
    }

    fn forward_hidden(&mut self, batch: &[BatchToken]) -> Result<Vec<f32>, ForwardError> {
        let n = self.evaluate(batch, Kind::Hidden, None)?;
        Ok(self.wanted[..n].to_vec())
    }
}
