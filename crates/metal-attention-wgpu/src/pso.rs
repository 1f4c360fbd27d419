//! Compiled pipelines (pipeline state objects), each built once.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use crate::adapter::AdapterSummary;
use crate::device::GpuDevice;
use crate::disk_cache::DiskCache;
use crate::error::GpuError;
use crate::shader::{Constant, wgsl};

/// A kernel and its constants: on a given device, one pipeline.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PsoKey {
    /// The kernel's name, e.g. `matvec_q4_0_accumulate`.
    pub name: String,
    /// Its file in `shaders/`, without the extension.
    pub file: &'static str,
    /// Values of the template's constants.
    pub constants: Vec<(&'static str, Constant)>,
}

impl PsoKey {
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

type Slot = Arc<OnceLock<Result<wgpu::ComputePipeline, GpuError>>>;

/// Pipelines by their key.
#[derive(Debug)]
pub struct PsoCache {
    slots: Mutex<HashMap<PsoKey, Slot>>,
    disk: Option<DiskCache>,
}

impl PsoCache {
    /// No pipelines yet; what the driver keeps of them between runs is in `folder`.
    pub(crate) fn new(device: &wgpu::Device, adapter: &AdapterSummary, folder: Option<&Path>) -> Self {
        let disk = folder.and_then(|folder| DiskCache::open(device, &adapter.info, folder));
        Self { slots: Mutex::default(), disk }
    }

    /// Number of pipelines.
    pub fn len(&self) -> usize {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Whether there is no pipeline yet.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The pipeline of `key`, built now when it is not there yet. Threads that ask for different keys build in
    /// parallel.
    pub fn get(&self, gpu: &GpuDevice, key: &PsoKey) -> Result<wgpu::ComputePipeline, GpuError> {
        gpu.check()?;
        let slot = {
            let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(slots.entry(key.clone()).or_default())
        };
        slot.get_or_init(|| build(gpu, key, self.disk.as_ref().map(DiskCache::pipelines))).clone()
    }

    /// Keeps the compiled pipelines on disk for the next start, where the device can. A folder that cannot be written
    /// costs only that time.
    pub fn save(&self) {
        if let Some(Err(e)) = self.disk.as_ref().map(DiskCache::save) {
            tracing::info!("compiled pipelines are not kept for the next start: {e}");
        }
    }
}

fn build(
    gpu: &GpuDevice,
    key: &PsoKey,
    cache: Option<&wgpu::PipelineCache>,
) -> Result<wgpu::ComputePipeline, GpuError> {
    let device = gpu.wgpu();
    let source = wgsl(key.file, &key.constants, gpu.features());
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
    match pollster::block_on(scope.pop()) {
        None => Ok(pipeline),
        Some(e) => Err(GpuError::Rejected { what: format!("the kernel {}", key.name), why: e.to_string() }),
    }
}
