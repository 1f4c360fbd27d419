//! Compiled pipelines (pipeline state objects), each built once.

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

/// A kernel and its constants: on a given device, one pipeline.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PipelineKey {
    /// The kernel's name, e.g. `matvec_q4_0_accumulate`.
    pub name: String,
    /// Its file in `shaders/`, without the extension.
    pub file: &'static str,
    /// Values of the template's constants.
    pub constants: Vec<(&'static str, Constant)>,
}

impl PipelineKey {
    /// The kernel of `file` with `constants`, named after the file.
    pub fn new<const N: usize>(file: &'static str, constants: [(&'static str, Constant); N]) -> Self {
        Self { name: file.to_owned(), file, constants: constants.into() }
    }

    /// The same kernel under a name of its own.
    #[must_use]
    pub fn named(self, name: impl Into<String>) -> Self {
        Self { name: name.into(), ..self }
    }
}

type PipelineCell = Arc<OnceLock<Result<wgpu::ComputePipeline, WgpuError>>>;

/// Pipelines by their key.
#[derive(Debug)]
pub struct PipelineCache {
    cells: Mutex<HashMap<PipelineKey, PipelineCell>>,
    queue: Mutex<BuildQueue>,
    changed: Condvar,
    disk: Option<DiskCache>,
}

/// Pipelines that are to be built beside other work.
#[derive(Debug, Default)]
struct BuildQueue {
    keys: VecDeque<PipelineKey>,
    /// How many [`PipelineBuilders`] there are.
    n_clients: usize,
    /// How many are being built.
    building: usize,
}

/// Most threads that build pipelines.
const MAX_BUILDERS: usize = 16;

impl PipelineCache {
    /// No pipelines yet; what the driver keeps of them between runs is in `folder`.
    pub(crate) fn new(device: &wgpu::Device, adapter: &AdapterSummary, folder: Option<&Path>) -> Self {
        let disk = folder.and_then(|folder| DiskCache::open(device, &adapter.info, folder));
        Self { cells: Mutex::default(), queue: Mutex::default(), changed: Condvar::new(), disk }
    }

    /// Number of pipelines.
    pub fn len(&self) -> usize {
        self.cells.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Whether there is no pipeline yet.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The pipeline of `key`, built now when it is not there yet. Threads that ask for different keys build in
    /// parallel.
    pub fn get(&self, gpu: &WgpuDevice, key: &PipelineKey) -> Result<wgpu::ComputePipeline, WgpuError> {
        gpu.check()?;
        let cell = {
            let mut cells = self.cells.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(cells.entry(key.clone()).or_default())
        };
        cell.get_or_init(|| compile(gpu, key, self.disk.as_ref().map(DiskCache::driver_cache))).clone()
    }

    /// Starts threads that build the pipelines of dispatches beside other work. Such a dispatch is made at once, and
    /// [`Dispatch::ready`](crate::Dispatch::ready) tells whether its pipeline could be built.
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

    /// Has the pipeline of `key` built beside the work that is under way; false where nobody would do it.
    pub(crate) fn enqueue(&self, key: &PipelineKey) -> bool {
        let mut queue = self.queue();
        if queue.n_clients == 0 {
            return false;
        }
        // Of a key that was asked for before there is a cell.
        if !self.cells.lock().unwrap_or_else(PoisonError::into_inner).contains_key(key) && !queue.keys.contains(key) {
            queue.keys.push_back(key.clone());
            self.changed.notify_one();
        }
        true
    }

    /// Builds no more of what was asked for, and waits until what is being built is done.
    pub(crate) fn stop_building(&self) {
        let mut queue = self.queue();
        queue.keys.clear();
        while queue.building > 0 {
            queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Whether the pipeline of `key` was built, or could not be.
    pub(crate) fn is_built(&self, key: &PipelineKey) -> bool {
        let cells = self.cells.lock().unwrap_or_else(PoisonError::into_inner);
        cells.get(key).is_some_and(|cell| cell.get().is_some())
    }

    fn queue(&self) -> MutexGuard<'_, BuildQueue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Builds what is asked for, in that order, as long as somebody may ask.
    fn build_queued(&self, gpu: &WgpuDevice) {
        let mut queue = self.queue();
        loop {
            if let Some(key) = queue.keys.pop_front() {
                queue.building += 1;
                drop(queue);
                // Whoever needs it hears of an error.
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

    /// Keeps the compiled pipelines on disk for the next start, where the device can. A folder that cannot be written
    /// costs only that time.
    pub fn save(&self) {
        if let Some(Err(e)) = self.disk.as_ref().map(DiskCache::save) {
            tracing::info!("compiled pipelines are not kept for the next start: {e}");
        }
    }
}

/// Threads that build pipelines, for as long as somebody may ask for some. Where this is dropped they build no more.
#[derive(Debug)]
pub(crate) struct PipelineBuilders {
    gpu: Arc<WgpuDevice>,
    /// The system gave threads for it.
    has_threads: bool,
    finish: bool,
}

impl PipelineBuilders {
    /// Lets the threads build what they were asked for, and end then.
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
        // SAFETY: every file of `shaders/` says at `Bounds:` why its accesses lie within its buffers and its loops end.
        // What that rests on is checked when a dispatch is made (`Dispatch::new`, with how much of each buffer the
        // kernel reaches, and `AttentionShape::check`), when its grid is known (`Dispatch::record`), and when numbers
        // that shaders index by are sent (`BatchBuffer`). Tests run every kernel with all checks on.
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
    let (text, module, compiled) = (ms(begin, written), ms(written, parsed), ms(parsed, Instant::now()));
    tracing::debug!(kernel = key.name, bytes, text, module, compiled, "a pipeline, in ms");
    match pollster::block_on(scope.pop()) {
        None => Ok(pipeline),
        Some(e) => Err(WgpuError::Rejected { what: format!("the kernel {}", key.name), why: e.to_string() }),
    }
}
