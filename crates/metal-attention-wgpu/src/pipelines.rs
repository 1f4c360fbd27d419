//! The cache of compiled pipelines: each kernel with its constants is compiled once for a device, when it is first
//! needed or ahead of that by builder threads. [`disk_cache`](crate::disk_cache) keeps the driver's binaries between
//! runs.

use std::collections::{HashMap, VecDeque};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::Instant;

use crate::adapter::AdapterSummary;
use crate::device::WgpuDevice;
use crate::disk_cache::DiskCache;
use crate::error::WgpuError;
use crate::shader::{Constant, wgsl};

/// A kernel with its constants. On one device it identifies one pipeline.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PipelineKey {
    /// The kernel's name in profiles and messages, e.g. `matvec_q4_0_accumulate`.
    pub name: String,
    /// Its file in `shaders/`, without the extension.
    pub file: &'static str,
    /// Names and values of the template's constants.
    pub constants: Vec<(&'static str, Constant)>,
}

impl PipelineKey {
    /// The kernel of `file` with `constants`, named after the file.
    pub fn new<const N: usize>(file: &'static str, constants: [(&'static str, Constant); N]) -> Self {
        Self { name: file.to_owned(), file, constants: constants.into() }
    }

    /// This kernel under another name.
    #[must_use]
    pub fn named(self, name: impl Into<String>) -> Self {
        Self { name: name.into(), ..self }
    }
}

/// A pipeline or the error of its compilation, once either is there.
type PipelineCell = Arc<OnceLock<Result<wgpu::ComputePipeline, WgpuError>>>;

/// All pipelines of one device, by their key.
#[derive(Debug)]
pub struct PipelineCache {
    /// Pipelines that are compiled or being compiled.
    cells: Mutex<HashMap<PipelineKey, PipelineCell>>,
    /// Pipelines that builder threads are to compile.
    queue: Mutex<BuildQueue>,
    /// Notified whenever `queue` changes.
    changed: Condvar,
    /// The driver's cache on disk, if it has one.
    disk: Option<DiskCache>,
}

/// The work of the builder threads.
#[derive(Debug, Default)]
struct BuildQueue {
    /// Keys that wait to be compiled, in order.
    keys: VecDeque<PipelineKey>,
    /// Live [`PipelineBuilders`]. While there are none, nothing is queued.
    n_clients: usize,
    /// Pipelines being compiled.
    building: usize,
}

/// Most builder threads.
const MAX_BUILDERS: usize = 16;

impl PipelineCache {
    /// An empty cache. `folder`: where the driver's binaries are kept between runs; `None`: nowhere.
    pub(crate) fn new(device: &wgpu::Device, adapter: &AdapterSummary, folder: Option<&Path>) -> Self {
        let disk = folder.and_then(|folder| DiskCache::open(device, &adapter.info, folder));
        Self { cells: Mutex::default(), queue: Mutex::default(), changed: Condvar::new(), disk }
    }

    /// Number of pipelines, those being compiled included.
    pub fn len(&self) -> usize {
        self.cells.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Whether there is no pipeline.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The pipeline of `key`, compiled by the calling thread if it is not there. Threads with different keys compile in
    /// parallel; those with the same key wait for the first. An error is kept, and returned again for the same key.
    pub fn get(&self, gpu: &WgpuDevice, key: &PipelineKey) -> Result<wgpu::ComputePipeline, WgpuError> {
        gpu.check()?;
        let cell = {
            let mut cells = self.cells.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(cells.entry(key.clone()).or_default())
        };
        cell.get_or_init(|| compile(gpu, key, self.disk.as_ref().map(DiskCache::driver_cache))).clone()
    }

    /// Starts builder threads. Until the result is dropped, [`Dispatch::new`](crate::Dispatch::new) queues its pipeline
    /// and returns at once; [`Dispatch::wait_ready`](crate::Dispatch::wait_ready) waits for it.
    pub(crate) fn start_builders(gpu: &Arc<WgpuDevice>) -> PipelineBuilders {
        let n_threads = thread::available_parallelism().map_or(1, usize::from).min(MAX_BUILDERS);
        // A builder thread ends when `n_clients` is 0 and the queue is empty.
        gpu.pipelines().queue().n_clients += 1;
        let begin = |gpu: Arc<WgpuDevice>| thread::Builder::new().spawn(move || gpu.pipelines().build_queued(&gpu));
        let threads = (0..n_threads).map_while(|_| begin(Arc::clone(gpu)).ok());
        let has_threads = threads.count() > 0;
        if !has_threads {
            gpu.pipelines().queue().n_clients -= 1;
        }
        PipelineBuilders { gpu: Arc::clone(gpu), has_threads, finish: false }
    }

    /// Queues the pipeline of `key` for the builder threads. False if there are none.
    pub(crate) fn enqueue(&self, key: &PipelineKey) -> bool {
        let mut queue = self.queue();
        if queue.n_clients == 0 {
            return false;
        }
        // A key that was compiled, or is being compiled, has a cell.
        if !self.cells.lock().unwrap_or_else(PoisonError::into_inner).contains_key(key) && !queue.keys.contains(key) {
            queue.keys.push_back(key.clone());
            self.changed.notify_one();
        }
        true
    }

    /// Empties the queue, and waits for the compilations in progress.
    pub(crate) fn stop_building(&self) {
        let mut queue = self.queue();
        queue.keys.clear();
        while queue.building > 0 {
            queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Whether the pipeline of `key` is compiled, or could not be.
    pub(crate) fn is_built(&self, key: &PipelineKey) -> bool {
        let cells = self.cells.lock().unwrap_or_else(PoisonError::into_inner);
        cells.get(key).is_some_and(|cell| cell.get().is_some())
    }

    fn queue(&self) -> MutexGuard<'_, BuildQueue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The body of a builder thread: compiles queued pipelines in order, until the queue is empty and has no clients.
    fn build_queued(&self, gpu: &WgpuDevice) {
        let mut queue = self.queue();
        loop {
            if let Some(key) = queue.keys.pop_front() {
                queue.building += 1;
                drop(queue);
                // The cell keeps the error for the dispatch that needs this pipeline.
                let _ = self.get(gpu, &key);
                queue = self.queue();
                queue.building -= 1;
                self.changed.notify_all();
            } else if queue.n_clients == 0 {
                return;
            } else {
                queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    /// Writes the driver's pipeline cache to disk, if the device has one. An error costs the next start its time for
    /// compilation, and is only logged.
    pub fn save(&self) {
        if let Some(Err(e)) = self.disk.as_ref().map(DiskCache::save) {
            tracing::info!("compiled pipelines are not kept for the next start: {e}");
        }
    }
}

/// Keeps the builder threads alive. Dropping it empties the queue and waits for the compilations in progress, unless
/// [`finish`](Self::finish) was called.
#[derive(Debug)]
pub(crate) struct PipelineBuilders {
    /// The device.
    gpu: Arc<WgpuDevice>,
    /// Whether the system could start any thread.
    has_threads: bool,
    /// Whether the queue is to be completed.
    finish: bool,
}

impl PipelineBuilders {
    /// Lets the threads compile all that is queued and then end. Returns at once.
    pub(crate) fn finish(mut self) {
        self.finish = true;
    }
}

impl Drop for PipelineBuilders {
    fn drop(&mut self) {
        if !self.has_threads {
            return;
        }
        let cache = self.gpu.pipelines();
        cache.queue().n_clients -= 1;
        cache.changed.notify_all();
        if !self.finish {
            cache.stop_building();
        }
    }
}

fn compile(
    gpu: &WgpuDevice,
    key: &PipelineKey,
    cache: Option<&wgpu::PipelineCache>,
) -> Result<wgpu::ComputePipeline, WgpuError> {
    let device = gpu.wgpu();
    let begin = Instant::now();
    let source = wgsl(key.file, &key.constants, gpu.features());
    let (written, bytes) = (Instant::now(), source.len());
    let scope = device.push_error_scope(wgpu::ErrorFilter::Validation);
    let descriptor =
        wgpu::ShaderModuleDescriptor { label: Some(&key.name), source: wgpu::ShaderSource::Wgsl(source.into()) };
    let module = if gpu.checked() {
        device.create_shader_module(descriptor)
    } else {
        // SAFETY: every file of `shaders/` states at `Bounds:` why its accesses lie within its buffers and its loops
        // end. The premises are checked when a dispatch is made (`Dispatch::new`, by the range of each buffer that the
        // kernel accesses, and `AttentionShape::check`), when its grid is known (`Dispatch::record`), and when numbers
        // that shaders use as indices are written (`BatchBuffer`). Tests run every kernel with all runtime checks.
        unsafe { device.create_shader_module_trusted(descriptor, wgpu::ShaderRuntimeChecks::unchecked()) }
    };
    let parsed = Instant::now();
    let pipeline = device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
        label: Some(&key.name),
        layout: None,
        module: &module,
        entry_point: Some("main"),
        compilation_options: wgpu::PipelineCompilationOptions {
            constants: &[],
            zero_initialize_workgroup_memory: false,
        },
        cache,
    });
    let ms = |from: Instant, to: Instant| (1e4 * to.duration_since(from).as_secs_f64()).round() / 10.0;
    let (source, module, compiled) = (ms(begin, written), ms(written, parsed), ms(parsed, Instant::now()));
    tracing::debug!(kernel = key.name, bytes, text = source, module, compiled, "a pipeline, in ms");
    match pollster::block_on(scope.pop()) {
        None => Ok(pipeline),
        Some(e) => Err(WgpuError::Rejected { what: format!("the kernel {}", key.name), why: e.to_string() }),
    }
}
