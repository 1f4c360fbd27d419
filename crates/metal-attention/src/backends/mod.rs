//! The backends of this build: [`CPU`], [`CUDA`] and [`WGPU`]. What a backend offers the rest of the workspace is
//! [`Backend`] and, once it has set up a model, [`BackendPass`]. This is the one place where the Cargo features `cuda` and
//! `wgpu` decide anything; a backend that is not compiled in is an `Unavailable`.

mod ceilings;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod gpu_error;
mod unavailable;
#[cfg(feature = "wgpu")]
mod wgpu;

use metal_attention_gguf::GgufFile;
use metal_attention_model::{ForwardPass, LoadedAssistant, LoadedModel, MemoryUse, ModelSpec, PageUse, SessionOptions};

pub use self::ceilings::{CeilingEffort, DeviceCeilings, Launches};
pub use self::gpu_error::{GpuError, GpuErrorKind};
use crate::pictures::PictureEncoderPass;
use crate::{CpuForwardPass, Device, EngineOptions, Error, Model};

/// The CPU.
pub static CPU: &dyn Backend = &cpu::Cpu;

/// NVIDIA GPUs through CUDA.
#[cfg(feature = "cuda")]
pub static CUDA: &dyn Backend = &cuda::Cuda;
/// NVIDIA GPUs, which this build cannot use.
#[cfg(not(feature = "cuda"))]
pub static CUDA: &dyn Backend = &unavailable::CUDA;

/// GPUs through wgpu.
#[cfg(feature = "wgpu")]
pub static WGPU: &dyn Backend = &wgpu::Wgpu;
/// GPUs through wgpu, which this build cannot use.
#[cfg(not(feature = "wgpu"))]
pub static WGPU: &dyn Backend = &unavailable::WGPU;

/// All backends, in the order in which [`Device::Auto`] tries them. The last one takes every model.
pub fn all() -> [&'static dyn Backend; 3] {
    [CUDA, WGPU, CPU]
}

/// A way to run models, as the rest of the workspace sees it.
pub trait Backend: Sync {
    /// Whether it is part of this build.
    fn is_compiled(&self) -> bool {
        true
    }

    /// Its GPUs; none for the CPU.
    fn gpus(&self) -> GpuList;

    /// An error if a part of the model has no kernels.
    fn supports(&self, spec: &ModelSpec) -> Result<(), Error>;

    /// Sets up `model` on the device that `options` name, one of this backend's.
    fn open(&self, model: &Model, options: &EngineOptions) -> Result<Box<dyn BackendPass>, Error>;

    /// Sets up `model` on the first of its devices with enough memory. `None`, with the reason in the log, if there is none.
    fn open_auto(&self, model: &Model, options: &EngineOptions) -> Result<Option<Box<dyn BackendPass>>, Error>;

    /// Sets up the picture encoder of an `mmproj` file on the device that `options` name, or else on the first of its devices.
    fn open_encoder(&self, mmproj: &GgufFile, options: &EngineOptions) -> Result<Box<dyn PictureEncoderPass>, Error>;
}

/// A forward pass, with what its backend alone knows: launches, and the limits of its device.
pub trait BackendPass: ForwardPass {
    /// The CPU's forward pass; `None` if it runs on another device.
    fn cpu(&mut self) -> Option<&mut CpuForwardPass> {
        None
    }

    /// The device's driver, with the graphics interface through which it is used; `None` for a CPU.
    fn driver(&self) -> Option<String> {
        self.device().driver
    }

    /// Kernels, or parallel regions of the CPU's threads, launched so far. 0 if they are not counted.
    fn n_launches(&self) -> u64 {
        0
    }

    /// The launches of `n_tokens` tokens in micro-batches of `n_ubatch`, if they are known without counting.
    fn launches_of(&self, n_tokens: usize, n_ubatch: usize) -> Option<u64> {
        let _ = (n_tokens, n_ubatch);
        None
    }

    /// Sets up a second model on the same device, with as many sequences of the same length and as many KV pages, for instance a prediction head. The
    /// embedding table and the output head are shared where they are the same tensors. `options`: the rest, such as the watch.
    /// An error if several devices share this model.
    fn beside(&self, model: &LoadedModel, options: &EngineOptions) -> Result<Box<dyn BackendPass>, Error>;

    /// Attaches an assistant of this model, so that [`forward_assistant`](ForwardPass::forward_assistant) drafts. `options`: as for
    /// [`beside`](Self::beside). An error if several devices share this model.
    fn attach_assistant(&mut self, assistant: &LoadedAssistant, options: &EngineOptions) -> Result<(), Error>;

    /// Measures the limits of the device; `exact`: of products with [`EngineOptions::exact`]. `None` for several devices.
    fn ceilings(&mut self, effort: CeilingEffort, exact: bool) -> Result<Option<Box<dyn DeviceCeilings + '_>>, Error>;
}

/// The options of a model beside that of `pass`.
fn options_beside(pass: &dyn ForwardPass, options: &EngineOptions) -> SessionOptions {
    SessionOptions {
        n_seq: pass.n_seq(),
        n_cache: Some(pass.cache_pages().n_positions()),
        ..options.session_options(pass.n_ctx(), pass.n_ubatch())
    }
}

/// The GPUs that a backend finds.
#[derive(Debug)]
pub struct GpuList {
    /// The GPUs, in the backend's order.
    pub gpus: Vec<Gpu>,
    /// Why there are none; `None` if there are some, or if the driver lists no device.
    pub why_none: Option<String>,
    /// The index in `gpus` of the one that [`Device::Auto`] takes for models that fit in its memory, or why it takes none.
    pub auto: Result<usize, String>,
}

/// A GPU.
#[derive(Debug)]
pub struct Gpu {
    /// Its name for [`Device`].
    pub device: String,
    /// The name that its driver gives.
    pub name: String,
    /// The driver's name or version.
    pub driver: String,
    /// Memory in bytes; `None`: not known.
    pub memory: Option<u64>,
    /// Whether the kernels run on it.
    pub is_usable: bool,
    /// What only its backend reports.
    pub details: GpuDetails,
}

/// What only one backend reports of a GPU.
#[derive(Debug)]
pub enum GpuDetails {
    /// Through CUDA.
    Cuda {
        /// Its number in the driver's order.
        ordinal: usize,
        /// Compute capability, major and minor.
        capability: (i32, i32),
        /// Streaming multiprocessors.
        n_sm: usize,
    },
    /// Through wgpu.
    Wgpu {
        /// Its number in wgpu's order.
        index: usize,
        /// The graphics interface: vulkan, metal, ...
        backend: &'static str,
        /// discrete, integrated, virtual, software or other.
        kind: &'static str,
        /// The largest buffer that a kernel can use, in bytes.
        max_binding: u64,
        /// Whether kernels can use subgroups.
        subgroups: bool,
        /// The smallest and the largest number of lanes of a subgroup.
        subgroup_sizes: (u32, u32),
        /// Whether kernels can use 16-bit floats.
        f16: bool,
        /// The shapes of matrix units: `MxNxK`, the type of the factors, the type of the sum.
        cooperative_matrices: Vec<String>,
    },
}

impl EngineOptions {
    /// Sets up `model` on the device of these options.
    pub(crate) fn open(&self, model: &Model) -> Result<Box<dyn BackendPass>, Error> {
        let n_ctx_train = model.spec().n_ctx_train;
        let n_ctx = self.n_ctx_of(model);
        if n_ctx > n_ctx_train {
            tracing::warn!("a context of {n_ctx} tokens is longer than the {n_ctx_train} of the model's training");
        }
        match &self.device {
            Device::Auto | Device::Cpu | Device::Wgpu | Device::WgpuIndex(_) | Device::WgpuName(_)
                if self.n_ranks > 1 =>
            {
                Err(Error::TensorParallelWithoutCuda { device: self.device.clone(), n_ranks: self.n_ranks })
            }
            Device::Cpu => CPU.open(model, self),
            Device::Cuda(_) => CUDA.open(model, self),
            Device::Wgpu | Device::WgpuIndex(_) | Device::WgpuName(_) => WGPU.open(model, self),
            Device::Auto => {
                for backend in all() {
                    if let Some(pass) = backend.open_auto(model, self)? {
                        return Ok(pass);
                    }
                }
                CPU.open(model, self)
            }
        }
    }

    /// Sets up the picture encoder of an `mmproj` file on the device of these options.
    pub(crate) fn open_encoder(&self, mmproj: &GgufFile) -> Result<Box<dyn PictureEncoderPass>, Error> {
        match &self.device {
            Device::Cpu => CPU.open_encoder(mmproj, self),
            Device::Cuda(_) => CUDA.open_encoder(mmproj, self),
            Device::Wgpu | Device::WgpuIndex(_) | Device::WgpuName(_) => WGPU.open_encoder(mmproj, self),
            Device::Auto => {
                for backend in all().into_iter().filter(|backend| backend.gpus().auto.is_ok()) {
                    match backend.open_encoder(mmproj, self) {
                        Err(error) if error.is_cancelled() => return Err(error),
                        Err(why) => tracing::warn!("a GPU cannot be used, so pictures are encoded elsewhere: {why}"),
                        encoder => return encoder,
                    }
                }
                CPU.open_encoder(mmproj, self)
            }
        }
    }
}

/// A number of bytes in MiB, for logs.
fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

/// Logs the memory of a forward pass; `weights` is the name of what it has as weights.
fn log_memory(weights: &str, memory: MemoryUse, pages: PageUse) {
    let states = match pages.states.total {
        0 => String::new(),
        n => format!(" and {n} recurrent states"),
    };
    tracing::info!("{weights}: {}", mib(memory.weights));
    tracing::info!("KV cache: {} for {} tokens{states}", mib(memory.kv_cache), pages.total * pages.page_len);
    tracing::info!("scratch: {}", mib(memory.scratch));
}
