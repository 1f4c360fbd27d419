//! The CPU backend as callers see it: set-up, KV cache bookkeeping, and the
//! [`ForwardPass`] trait.

use half::f16;
use metal_attention_gguf::GgufFile;
use metal_attention_model::{
    BatchToken, DeviceInfo, ForwardError, ForwardPass, LayerTrace, Logits, MAX_SEQUENCES, Mixer, ModelSpec, PAGE,
    PageTable, PageUse, Phase, Profile, Profiler, Watch, Weights,
};

use crate::cores::physical_cores;
use crate::error::CpuError;
use crate::forward::{Run, Scratch};
use crate::kv_cache::{CacheType, Element, LayerCache, padded};
use crate::layers::PreparedWeights;
use crate::observer::Observer;
use crate::pool::ThreadPool;
use crate::side_by_side::SideBySide;
use crate::simd::Isa;

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
            n_threads: physical_cores(),
            cache_type: CacheType::default(),
            exact: false,
            n_ubatch: 512,
            isa: None,
            watch: Watch::default(),
        }
    }
}

/// Bytes that a [`CpuForwardPass`] holds, besides the mapped file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryUse {
    /// Repacked weight matrices.
    pub weights: usize,
    /// KV cache of all sequences; pages count as they are filled.
    pub kv_cache: usize,
    /// Activations and logits.
    pub scratch: usize,
}

/// Runs a model on the CPU.
pub struct CpuForwardPass {
    spec: ModelSpec,
    weights: PreparedWeights,
    cache: Cache,
    /// Which page of the cache holds what.
    pages: PageTable,
    scratch: Scratch,
    side_by_side: Option<SideBySide>,
    logits: Vec<f32>,
    pool: ThreadPool,
    isa: Isa,
    n_ctx: usize,
    n_ubatch: usize,
    profiler: Option<Profiler>,
    observer: Option<Observer>,
}

/// The KV cache of all layers.
enum Cache {
    F16(Vec<LayerCache<f16>>),
    F32(Vec<LayerCache<f32>>),
}

impl CpuForwardPass {
    /// Sets up the model of `file`.
    pub fn from_gguf(file: &GgufFile, options: &CpuOptions) -> Result<Self, CpuError> {
        let spec = ModelSpec::from_metadata(file.metadata())?;
        let weights = Weights::load(file, &spec)?;
        Self::new(spec, &weights, options)
    }

    /// Sets up a model: allocates the KV cache and, unless `exact`, repacks the
    /// quantised weights.
    pub fn new(spec: ModelSpec, weights: &Weights, options: &CpuOptions) -> Result<Self, CpuError> {
        let ranges = [
            ("the context length", options.n_ctx, usize::MAX),
            ("the number of sequences", options.n_seq, MAX_SEQUENCES),
            ("the size of the KV cache", options.n_cache.unwrap_or(1), usize::MAX),
            ("the number of threads", options.n_threads, MAX_THREADS),
            ("the ubatch size", options.n_ubatch, usize::MAX),
        ];
        if let Some(&(option, _, max)) = ranges.iter().find(|(_, n, max)| *n == 0 || n > max) {
            return Err(CpuError::Option { option, max });
        }
        let n_pages = PageTable::n_pages(options.n_cache, options.n_ctx, options.n_seq).unwrap_or(usize::MAX);
        let cache = match options.cache_type {
            CacheType::F16 => Cache::F16(layer_caches(&spec, n_pages)?),
            CacheType::F32 => Cache::F32(layer_caches(&spec, n_pages)?),
        };
        let n_threads = options.n_threads;
        let no_threads = |source| CpuError::Threads { n_threads, source };
        let pool = ThreadPool::new(n_threads).map_err(no_threads)?.watched(options.watch.clone());
        let isa = options.isa.unwrap_or_else(Isa::best);
        let weights = PreparedWeights::new(&pool, weights, options.exact)?;
        let side_by_side = SideBySide::new(weights.bytes(), &pool).map_err(no_threads)?;
        Ok(Self {
            weights,
            cache,
            pages: PageTable::new(n_pages, options.n_ctx, options.n_seq),
            scratch: Scratch::default(),
            side_by_side,
            logits: Vec::new(),
            pool,
            isa,
            n_ctx: options.n_ctx,
            n_ubatch: options.n_ubatch,
            profiler: None,
            observer: None,
            spec,
        })
    }

    /// Bytes held at this moment.
    pub fn memory_use(&self) -> MemoryUse {
        MemoryUse {
            weights: self.weights.packed_bytes(),
            kv_cache: self.kv_cache_bytes(),
            scratch: self.scratch.bytes()
                + self.side_by_side.as_ref().map_or(0, SideBySide::bytes)
                + 4 * self.logits.capacity(),
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

fn layer_caches<E: Element>(spec: &ModelSpec, n_pages: usize) -> Result<Vec<LayerCache<E>>, CpuError> {
    let mut bytes = 0;
    let layers: Option<Vec<_>> = spec
        .layers
        .iter()
        .map(|layer| {
            let Mixer::Attention(a) = &layer.mixer else { return None };
            let per_page = (PAGE * a.n_head_kv * (a.head_dim + padded(a.head_dim)) * size_of::<E>()) as u64;
            bytes = (n_pages as u64).saturating_mul(per_page).saturating_add(bytes);
            LayerCache::new(n_pages, a.n_head_kv, a.head_dim)
        })
        .collect();
    layers.ok_or(CpuError::OutOfMemory { what: "the KV cache", bytes })
}

/// Evaluates `tokens`, side by side where that can be.
fn forward<E: Element>(
    layers: &mut [LayerCache<E>],
    mut run: Run<'_>,
    side_by_side: &mut Option<SideBySide>,
    tokens: &[BatchToken],
    logits: &mut [f32],
    trace: Option<LayerTrace<'_>>,
) {
    let caches: Vec<_> = layers.iter_mut().map(LayerCache::shared).collect();
    // Who watches the layers, or their matrices, sees all tokens together.
    let done = match side_by_side {
        Some(side_by_side) if trace.is_none() && run.observer.is_none() => {
            side_by_side.forward(&mut run, &caches, tokens, logits)
        }
        _ => false,
    };
    if !done {
        run.forward(&caches, tokens, logits, trace);
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

    fn n_past(&self, seq: usize) -> usize {
        self.pages.n_past(seq)
    }

    fn truncate_seq(&mut self, seq: usize, n: usize) {
        self.pages.truncate(seq, n);
    }

    fn share_prefix(&mut self, from: usize, to: usize, n: usize) -> Result<(), ForwardError> {
        self.pages.share(from, to, n)
    }

    fn cache_pages(&self) -> PageUse {
        self.pages.usage()
    }

    fn kv_cache_bytes(&self) -> usize {
        match &self.cache {
            Cache::F16(layers) => layers.iter().map(LayerCache::bytes).sum(),
            Cache::F32(layers) => layers.iter().map(LayerCache::bytes).sum(),
        }
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
        mut trace: Option<LayerTrace<'_>>,
    ) -> Result<Logits<'_>, ForwardError> {
        let n_vocab = self.spec.n_vocab;
        let n_logits = batch.iter().filter(|t| t.logits).count() * n_vocab;
        if self.logits.len() < n_logits {
            let more = n_logits - self.logits.len();
            self.logits
                .try_reserve_exact(more)
                .map_err(|_| ForwardError::OutOfMemory { what: "the logits", bytes: 4 * n_logits })?;
            self.logits.resize(n_logits, 0.0);
        }
        self.pool.begin();
        for copy in self.pages.append(batch, n_vocab)? {
            match &mut self.cache {
                Cache::F16(layers) => layers.iter_mut().for_each(|layer| layer.copy(copy)),
                Cache::F32(layers) => layers.iter_mut().for_each(|layer| layer.copy(copy)),
            }
        }
        let mut done = 0;
        for tokens in batch.chunks(self.n_ubatch) {
            let n = tokens.iter().filter(|t| t.logits).count() * n_vocab;
            let logits = &mut self.logits[done..done + n];
            if let Some(profiler) = &mut self.profiler {
                profiler.begin_step(Phase::of(batch), tokens.len());
            }
            let run = Run {
                spec: &self.spec,
                weights: &self.weights,
                pool: &self.pool,
                isa: self.isa,
                pages: &self.pages,
                s: &mut self.scratch,
                profiler: self.profiler.as_mut(),
                observer: self.observer.as_mut(),
            };
            let trace: Option<LayerTrace<'_>> = match &mut trace {
                Some(trace) => Some(&mut **trace),
                None => None,
            };
            match &mut self.cache {
                Cache::F16(layers) => forward(layers, run, &mut self.side_by_side, tokens, logits, trace),
                Cache::F32(layers) => forward(layers, run, &mut self.side_by_side, tokens, logits, trace),
            }
            if self.pool.is_cancelled() {
                self.pages.retract(batch);
                return Err(ForwardError::Cancelled);
            }
            done += n;
        }
        Ok(Logits::new(&self.logits[..n_logits], n_vocab))
    }
}
