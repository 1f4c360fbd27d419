//! [`WgpuDevice`]: an open GPU, with its buffers, submissions, waiting and error reports.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use metal_attention_model::{DeviceInfo, Watch};

use crate::adapter::{AdapterChoice, AdapterSummary, adapters, no_hardware};
use crate::arena::Slice;
use crate::disk_cache;
use crate::error::WgpuError;
use crate::pipelines::PipelineCache;
use crate::readback::Readback;
use crate::shader::ShaderFeatures;

/// Options for opening a [`WgpuDevice`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools)] // independent switches
pub struct WgpuOptions {
    /// Which GPU to open.
    pub adapter: AdapterChoice,
    /// Whether kernels may use subgroup operations, if the device has them.
    pub subgroups: bool,
    /// Hides the device's subgroup size from kernels, except that it is at least this. For tests of devices whose
    /// subgroups differ in size on devices whose subgroups do not.
    pub least_subgroup: Option<u32>,
    /// Whether kernels may use 16-bit floats, if the device has them.
    pub f16: bool,
    /// Whether kernels may use integer dot products of four bytes, if the device has them.
    pub integer_dot: bool,
    /// Whether kernels may use matrix units, if the device has them.
    pub cooperative_matrices: bool,
    /// Whether shaders check every buffer access and bound every loop. By default in debug builds only.
    pub checked: bool,
    /// The folder that keeps the driver's compiled pipelines between runs; `None`: they are not kept. By default the
    /// one in the environment variable `METAL_ATTENTION_CACHE` (`off`: none), else `metal-attention` in the user's
    /// cache folder.
    pub pipeline_cache: Option<PathBuf>,
    /// Cancels uploads, compilations and every wait for the device, and receives their progress.
    pub watch: Watch,
}

impl Default for WgpuOptions {
    fn default() -> Self {
        Self {
            adapter: AdapterChoice::Best,
            subgroups: true,
            least_subgroup: None,
            f16: true,
            integer_dot: true,
            cooperative_matrices: true,
            checked: cfg!(debug_assertions),
            pipeline_cache: disk_cache::default_folder(),
            watch: Watch::default(),
        }
    }
}

/// The interval at which a thread that waits for the device checks whether it was cancelled.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// An open GPU.
#[derive(Debug)]
pub struct WgpuDevice {
    /// The device.
    device: wgpu::Device,
    /// Its queue.
    queue: wgpu::Queue,
    /// Properties of the adapter.
    summary: AdapterSummary,
    /// The features that kernels may use.
    features: ShaderFeatures,
    /// Whether shaders check accesses.
    checked: bool,
    /// Compiled pipelines.
    pipelines: PipelineCache,
    /// Cancels work, and receives progress.
    watch: Watch,
    /// Held in write mode to poll the device or to unmap a buffer, in read mode to submit, which polls as well. Works
    /// around wgpu: it panics if a poll that times out coincides with another thread's that finds the queue empty, and
    /// it refuses to unmap a buffer whose mapping is just being completed.
    poll_lock: Arc<RwLock<()>>,
    /// The first error that the driver reported asynchronously.
    fault: Arc<Mutex<Option<WgpuError>>>,
    /// Submissions so far.
    submissions: AtomicU64,
    /// Dispatches recorded so far.
    dispatches: AtomicU64,
    /// Buffers made so far.
    allocations: AtomicU64,
    /// Bytes of all buffers made so far.
    allocated_bytes: AtomicU64,
}

impl WgpuDevice {
    /// Opens a GPU with all its limits and the optional features that kernels use. Errors: there is none, none matches
    /// the choice, or the driver cannot open it.
    pub fn open(options: &WgpuOptions) -> Result<Self, WgpuError> {
        if let (AdapterChoice::Hardware { .. }, Some(why)) = (&options.adapter, no_hardware()) {
            return Err(why);
        }
        let found = adapters();
        let (adapter, summary) = options.adapter.pick(found)?;
        let name = summary.name.clone();
        let wanted = wgpu::Features::SUBGROUP
            | wgpu::Features::SHADER_F16
            | wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX
            | wgpu::Features::PIPELINE_CACHE
            | wgpu::Features::TIMESTAMP_QUERY;
        let required_features = adapter.features() & wanted;
        let descriptor = wgpu::DeviceDescriptor {
            label: Some("metal-attention"),
            required_features,
            required_limits: adapter.limits(),
            // SAFETY: cooperative matrices are the only experimental feature that is requested; each kernel that uses
            // them is tested against its scalar twin.
            experimental_features: unsafe { wgpu::ExperimentalFeatures::enabled() },
            memory_hints: wgpu::MemoryHints::Performance,
            trace: wgpu::Trace::Off,
        };
        let (device, queue) = pollster::block_on(adapter.request_device(&descriptor))
            .map_err(|e| WgpuError::Open { name: name.clone(), why: e.to_string() })?;

        let fault = Arc::new(Mutex::new(None));
        let note = |fault: &Mutex<Option<WgpuError>>, error: WgpuError| {
            fault.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        };
        let on_error = Arc::clone(&fault);
        device.on_uncaptured_error(Arc::new(move |error: wgpu::Error| {
            let error = match &error {
                wgpu::Error::OutOfMemory { .. } => WgpuError::OutOfMemory { what: "a step".into(), bytes: None },
                _ => WgpuError::Rejected { what: "a step".into(), why: error.to_string() },
            };
            note(&on_error, error);
        }));
        let on_loss = Arc::clone(&fault);
        device.set_device_lost_callback(move |_reason, why| note(&on_loss, WgpuError::Lost { why }));

        let has = |feature| device.features().contains(feature);
        let coop = |m: u32, ab, cr| {
            options.cooperative_matrices
                && has(wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX)
                && summary
                    .cooperative_matrices
                    .iter()
                    .any(|p| (p.m_size, p.n_size, p.k_size, p.ab_type, p.cr_type) == (m, m, m, ab, cr))
        };
        let subgroups = options.subgroups && has(wgpu::Features::SUBGROUP);
        let (min, max) = summary.subgroup_sizes;
        let min = options.least_subgroup.map_or(min, |least| least.min(min));
        let limits = device.limits();
        let features = ShaderFeatures {
            subgroups,
            subgroup_size: if subgroups && min == max { min } else { 0 },
            neighbours: if subgroups && min >= 4 { min } else { 0 },
            f16: options.f16 && has(wgpu::Features::SHADER_F16),
            // No feature reports this. Metal has no such instruction. A device with less workgroup memory or fewer
            // threads is too small for the kernels.
            integer_dot: options.integer_dot
                && summary.backend != "metal"
                && limits.max_compute_workgroup_storage_size >= 32 << 10
                && limits.max_compute_invocations_per_workgroup >= 512,
            cooperative_f16: options.f16
                && subgroups
                && coop(16, wgpu::CooperativeScalarType::F16, wgpu::CooperativeScalarType::F32),
            cooperative_f32: subgroups && coop(8, wgpu::CooperativeScalarType::F32, wgpu::CooperativeScalarType::F32),
        };
        let pipelines = PipelineCache::new(&device, &summary, options.pipeline_cache.as_deref());
        Ok(Self {
            device,
            queue,
            summary,
            features,
            checked: options.checked,
            pipelines,
            watch: options.watch.clone(),
            poll_lock: Arc::default(),
            fault,
            submissions: AtomicU64::new(0),
            dispatches: AtomicU64::new(0),
            allocations: AtomicU64::new(0),
            allocated_bytes: AtomicU64::new(0),
        })
    }

    /// Properties of the adapter that was opened.
    pub fn summary(&self) -> &AdapterSummary {
        &self.summary
    }

    /// The GPU as the device of a forward pass or of an encoder.
    pub(crate) fn info(&self) -> DeviceInfo {
        let AdapterSummary { name, driver, .. } = &self.summary;
        DeviceInfo { kind: "gpu", name: name.clone(), driver: Some(driver.clone()), n_threads: 1 }
    }

    /// The device's features that kernels may use.
    pub fn features(&self) -> ShaderFeatures {
        self.features
    }

    /// Whether shaders check every access.
    pub(crate) fn checked(&self) -> bool {
        self.checked
    }

    /// Cancels the work on the device, and receives its progress.
    pub fn watch(&self) -> &Watch {
        &self.watch
    }

    /// Adds `work` to the progress once all submissions so far are done.
    pub fn advance_when_done(&self, work: u64) {
        let watch = self.watch.clone();
        self.queue.on_submitted_work_done(move || watch.advance(work));
    }

    /// The compiled pipelines.
    pub fn pipelines(&self) -> &PipelineCache {
        &self.pipelines
    }

    pub(crate) fn wgpu(&self) -> &wgpu::Device {
        &self.device
    }

    /// Makes a buffer for shaders and copies, `bytes` long and zero. `what` names it in errors.
    pub fn buffer(&self, what: &str, bytes: u64) -> Result<wgpu::Buffer, WgpuError> {
        use wgpu::BufferUsages as Usage;
        self.create(what, bytes, Usage::STORAGE | Usage::COPY_SRC | Usage::COPY_DST, None)
    }

    /// Makes a buffer like [`buffer`](Self::buffer) with `contents`.
    pub fn upload<T: bytemuck::NoUninit>(&self, what: &str, contents: &[T]) -> Result<wgpu::Buffer, WgpuError> {
        use wgpu::BufferUsages as Usage;
        let contents: &[u8] = bytemuck::cast_slice(contents);
        let usage = Usage::STORAGE | Usage::COPY_SRC | Usage::COPY_DST;
        self.create(what, contents.len() as u64, usage, Some(contents))
    }

    /// Makes a buffer that the CPU can read, `bytes` long.
    pub(crate) fn readback_buffer(&self, what: &str, bytes: u64) -> Result<wgpu::Buffer, WgpuError> {
        self.create(what, bytes, wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST, None)
    }

    fn create(
        &self,
        what: &str,
        bytes: u64,
        usage: wgpu::BufferUsages,
        contents: Option<&[u8]>,
    ) -> Result<wgpu::Buffer, WgpuError> {
        let max = self.summary.max_binding;
        if bytes > max {
            return Err(WgpuError::TooLarge { what: what.to_owned(), bytes, max });
        }
        // Bindings are whole vectors of four words.
        let size = bytes.max(16).next_multiple_of(16);
        let scope = self.device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
        let descriptor = wgpu::BufferDescriptor { label: Some(what), size, usage, mapped_at_creation: false };
        let buffer = self.device.create_buffer(&descriptor);
        if pollster::block_on(scope.pop()).is_some() {
            return Err(WgpuError::OutOfMemory { what: what.to_owned(), bytes: Some(bytes) });
        }
        self.check()?;
        // Not with `mapped_at_creation`: wgpu panics if such a buffer could not be made.
        if let Some(contents) = contents {
            let (words, rest) = contents.as_chunks::<4>();
            self.queue.write_buffer(&buffer, 0, words.as_flattened());
            if !rest.is_empty() {
                let mut word = [0; 4];
                word[..rest.len()].copy_from_slice(rest);
                self.queue.write_buffer(&buffer, 4 * words.len() as u64, &word);
            }
        }
        self.allocations.fetch_add(1, Ordering::Relaxed);
        self.allocated_bytes.fetch_add(size, Ordering::Relaxed);
        Ok(buffer)
    }

    /// Overwrites the start of `buffer` before the next submission runs. The length is a multiple of four bytes.
    pub fn write<T: bytemuck::NoUninit>(&self, buffer: &wgpu::Buffer, contents: &[T]) {
        self.queue.write_buffer(buffer, 0, bytemuck::cast_slice(contents));
    }

    /// Overwrites `buffer` from byte `offset` on, like [`write`](Self::write).
    pub(crate) fn write_at(&self, buffer: &wgpu::Buffer, offset: u64, words: &[u32]) {
        self.queue.write_buffer(buffer, offset, bytemuck::cast_slice(words));
    }

    /// Calls `write` to fill the first `bytes` bytes (one or more) of `to`, before the next submission runs.
    pub(crate) fn write_with(&self, to: &Slice, bytes: u64, write: impl FnOnce(&mut wgpu::QueueWriteBufferView)) {
        let size = wgpu::BufferSize::new(bytes);
        if let Some(mut view) = size.and_then(|size| self.queue.write_buffer_with(to.buffer(), to.offset(), size)) {
            write(&mut view);
        }
    }

    /// An encoder for the commands of one submission.
    pub fn encoder(&self) -> wgpu::CommandEncoder {
        self.device.create_command_encoder(&wgpu::CommandEncoderDescriptor { label: None })
    }

    /// Submits what `encoder` recorded. Does not wait.
    pub fn submit(&self, encoder: wgpu::CommandEncoder) -> wgpu::SubmissionIndex {
        self.submit_commands(encoder.finish())
    }

    /// Submits commands that were recorded earlier. Does not wait.
    pub fn submit_commands(&self, commands: wgpu::CommandBuffer) -> wgpu::SubmissionIndex {
        self.submissions.fetch_add(1, Ordering::Relaxed);
        let _looking = self.poll_lock.read().unwrap_or_else(PoisonError::into_inner);
        self.queue.submit([commands])
    }

    pub(crate) fn count_dispatch(&self) {
        self.dispatches.fetch_add(1, Ordering::Relaxed);
    }

    /// Number of submissions so far.
    pub fn submissions(&self) -> u64 {
        self.submissions.load(Ordering::Relaxed)
    }

    /// Number of dispatches recorded so far.
    pub fn dispatches(&self) -> u64 {
        self.dispatches.load(Ordering::Relaxed)
    }

    /// Number of buffers made so far.
    pub fn allocations(&self) -> u64 {
        self.allocations.load(Ordering::Relaxed)
    }

    /// Bytes of all buffers made so far.
    pub fn allocated_bytes(&self) -> u64 {
        self.allocated_bytes.load(Ordering::Relaxed)
    }

    /// Returns [`WgpuError::Cancelled`] if the [watch](Self::watch) is cancelled, else the first error that the driver
    /// reported asynchronously, such as a lost device or a rejected submission. The error stays.
    pub fn check(&self) -> Result<(), WgpuError> {
        if self.watch.is_cancelled() {
            return Err(WgpuError::Cancelled);
        }
        match &*self.fault.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }

    /// Keeps the first error for the next [`check`](Self::check). A cancellation is not kept, as the watch reports it.
    pub(crate) fn record_error(&self, error: WgpuError) {
        if !matches!(error, WgpuError::Cancelled) {
            self.fault.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        }
    }

    /// Destroys the device as if it were unplugged. Once the work in flight has ended, [`wait`](Self::wait) and
    /// everything after it return [`WgpuError::Lost`].
    pub fn destroy(&self) {
        self.device.destroy();
    }

    /// The device, and the nanoseconds of a tick of its clock, for timestamp queries. An error if it has no timestamps.
    pub fn clock(&self) -> Result<(&wgpu::Device, f32), WgpuError> {
        if !self.device.features().contains(wgpu::Features::TIMESTAMP_QUERY) {
            return Err(WgpuError::NoClock { name: self.summary.name.clone() });
        }
        Ok((&self.device, self.queue.get_timestamp_period()))
    }

    /// Waits until `submission` is done; `None`: all submissions. Returns early with an error if the work is cancelled
    /// or the device reports an error.
    pub fn wait(&self, submission: Option<wgpu::SubmissionIndex>) -> Result<(), WgpuError> {
        let until = wgpu::PollType::Wait { submission_index: submission, timeout: Some(POLL_INTERVAL) };
        loop {
            let outcome = {
                let _alone = self.poll_lock.write().unwrap_or_else(PoisonError::into_inner);
                self.device.poll(until.clone())
            };
            self.check()?;
            match outcome {
                Ok(_) => return Ok(()),
                Err(wgpu::PollError::Timeout) => {}
                Err(e) => return Err(WgpuError::Lost { why: e.to_string() }),
            }
        }
    }

    /// The lock for polling the device and for unmapping buffers.
    pub(crate) fn poll_lock(&self) -> Arc<RwLock<()>> {
        Arc::clone(&self.poll_lock)
    }

    /// Reads the first `n` values (one or more) of a GPU buffer: copies them, submits, waits. For tests and profiles;
    /// the forward pass keeps its readback buffers.
    pub fn read<T: bytemuck::Pod>(&self, buffer: &wgpu::Buffer, n: usize) -> Result<Vec<T>, WgpuError> {
        let bytes = n * size_of::<T>();
        // Copies and mapped ranges are multiples of four bytes.
        let copied = (bytes as u64).next_multiple_of(4);
        let mut readback = Readback::new(self, copied)?;
        let mut encoder = self.encoder();
        readback.copy(&mut encoder, buffer, copied);
        readback.map(self.submit(encoder));
        readback.read(self, copied, |view| bytemuck::pod_collect_to_vec(&view[..bytes]))
    }
}
