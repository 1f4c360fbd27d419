//! Setting up a forward pass: the options of all backends, and the choice of a device.

use metal_attention_cpu::{CacheType, CpuError, CpuExecutor, CpuForwardPass, CpuOptions, physical_cores};
use metal_attention_model::{DEFAULT_UBATCH, ForwardPass, PageUse, SessionOptions, Watch};

use crate::memory::available_memory;
#[cfg(feature = "cuda")]
use crate::{CudaForwardPass, TensorParallelPass, cuda_engine};
use crate::{Device, Error, Model};
#[cfg(feature = "wgpu")]
use crate::{WgpuForwardPass, wgpu_engine};

/// Context length if neither the caller nor the model's training is shorter.
pub(crate) const DEFAULT_N_CTX: usize = 4096;

/// Default of [`EngineOptions::state_cache`], in bytes.
const DEFAULT_STATE_CACHE: usize = 256 << 20;

/// Options of a [`ForwardPass`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineOptions {
    /// The device that runs the model.
    pub device: Device,
    /// Ranks of tensor parallelism: NVIDIA GPUs that share the model. `device` is the first one, through CUDA; the
    /// others follow it.
    pub n_ranks: usize,
    /// Maximum tokens of a sequence. `None`: the context length of the model's training, at max 4096 unless
    /// [`long_context`](Self::long_context) is set.
    pub n_ctx: Option<usize>,
    /// If `n_ctx` is `None`, `Some(n)` selects the context length of the training, as far as one such sequence fits in
    /// half of the memory that the weights leave, when `n` forward passes share the device. `n_cache` is then raised to
    /// at least that, within the same memory. If the device does not report its memory, the context is as with `None`:
    /// at most 4096 tokens.
    pub long_context: Option<usize>,
    /// Number of sequences in the KV cache.
    pub n_seq: usize,
    /// Capacity of the KV cache in tokens, all sequences together. `None`: `n_ctx` for each sequence.
    pub n_cache: Option<usize>,
    /// Number of sequences whose sliding windows fit, in layers that keep only a window. A batch may be refused for
    /// want of a window ([`ForwardError::OutOfPages`](crate::ForwardError::OutOfPages)). `None`: all sequences.
    pub n_windows: Option<usize>,
    /// Bytes for checkpoints of recurrent states, to which sequences can be cut back, in addition to the state that
    /// each sequence continues from. Only in models with recurrent layers.
    pub state_cache: usize,
    /// CPU threads that compute. `None`: one for each physical core.
    pub n_threads: Option<usize>,
    /// Element type of the KV cache.
    pub cache_type: CacheType,
    /// Compute in F32 instead of quantising activations to 8 bits (CPU) or rounding them to the 16 bits of matrix units
    /// (GPU). Slower, and as exact as the weights.
    pub exact: bool,
    /// Tokens of a micro-batch: prompts go through the layers in pieces of at most this many tokens. `None`: the
    /// device's default, which [`ForwardPass::n_ubatch`](crate::ForwardPass::n_ubatch) returns: 512, or 2048 on an H100
    /// or H200 through CUDA if no layer has a window.
    pub n_ubatch: Option<usize>,
    /// Cancels the set-up and each forward pass from another thread, and reports their progress.
    pub watch: Watch,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            device: Device::Auto,
            n_ranks: 1,
            n_ctx: None,
            long_context: None,
            n_seq: 1,
            n_cache: None,
            n_windows: None,
            state_cache: DEFAULT_STATE_CACHE,
            n_threads: None,
            cache_type: CacheType::F16,
            exact: false,
            n_ubatch: None,
            watch: Watch::default(),
        }
    }
}

/// A forward pass with the type of its backend, for what [`ForwardPass`] does not offer.
#[allow(clippy::large_enum_variant)] // a program has one or two
pub enum Backend {
    /// On the CPU.
    Cpu(CpuForwardPass),
    /// On an NVIDIA GPU, through CUDA.
    #[cfg(feature = "cuda")]
    Cuda(CudaForwardPass),
    /// On several NVIDIA GPUs that share the model.
    #[cfg(feature = "cuda")]
    TensorParallel(TensorParallelPass),
    /// On a GPU, through wgpu.
    #[cfg(feature = "wgpu")]
    Wgpu(WgpuForwardPass),
}

impl Backend {
    /// The CPU's forward pass; `None` if it runs on another device.
    pub fn cpu(&mut self) -> Option<&mut CpuForwardPass> {
        match self {
            Self::Cpu(pass) => Some(pass),
            #[cfg(feature = "cuda")]
            Self::Cuda(_) | Self::TensorParallel(_) => None,
            #[cfg(feature = "wgpu")]
            Self::Wgpu(_) => None,
        }
    }

    /// The forward pass.
    pub fn pass(&mut self) -> &mut dyn ForwardPass {
        match self {
            Self::Cpu(pass) => pass,
            #[cfg(feature = "cuda")]
            Self::Cuda(pass) => pass,
            #[cfg(feature = "cuda")]
            Self::TensorParallel(pass) => pass,
            #[cfg(feature = "wgpu")]
            Self::Wgpu(pass) => pass,
        }
    }

    /// The forward pass behind its trait.
    pub(crate) fn boxed(self) -> Box<dyn ForwardPass> {
        match self {
            Self::Cpu(pass) => Box::new(pass),
            #[cfg(feature = "cuda")]
            Self::Cuda(pass) => Box::new(pass),
            #[cfg(feature = "cuda")]
            Self::TensorParallel(pass) => Box::new(pass),
            #[cfg(feature = "wgpu")]
            Self::Wgpu(pass) => Box::new(pass),
        }
    }
}

impl EngineOptions {
    /// The context length of `model` with these options, before any adjustment to a device's memory.
    pub fn n_ctx_of(&self, model: &Model) -> usize {
        self.n_ctx.unwrap_or(model.spec().n_ctx_train.min(DEFAULT_N_CTX))
    }

    /// The options of a session with a context of `n_ctx` tokens and micro-batches of `n_ubatch`.
    pub(crate) fn session_options(&self, n_ctx: usize, n_ubatch: usize) -> SessionOptions {
        SessionOptions {
            n_ctx,
            n_seq: self.n_seq,
            n_cache: self.n_cache,
            n_windows: self.n_windows,
            state_cache: self.state_cache,
            n_ubatch,
            cache_type: self.cache_type,
            exact: self.exact,
        }
    }

    /// Sets up `model` on the device of these options.
    pub(crate) fn backend(&self, model: &Model) -> Result<Backend, Error> {
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
            Device::Cpu => self.cpu_pass(model),
            Device::Cuda(ordinal) => self.cuda_pass(model, *ordinal),
            Device::Auto => self.auto_pass(model),
            Device::Wgpu | Device::WgpuIndex(_) | Device::WgpuName(_) => self.wgpu_pass(model),
        }
    }

    /// A forward pass on the CPU, with a context that fits the available memory.
    fn cpu_pass(&self, model: &Model) -> Result<Backend, Error> {
        let sized = self.sized(model.spec(), available_memory(), model.gguf().tensor_bytes());
        match sized.cpu_pass_of_size(model) {
            // The system reports less than all limits, for instance none of the address space: without the longer
            // context it may fit.
            Err(Error::Cpu(CpuError::OutOfMemory { .. })) if sized != *self => self.cpu_pass_of_size(model),
            pass => pass,
        }
    }

    /// A forward pass on the CPU with exactly these options.
    fn cpu_pass_of_size(&self, model: &Model) -> Result<Backend, Error> {
        let cpu = CpuOptions {
            n_threads: self.n_threads.unwrap_or_else(physical_cores),
            watch: self.watch.clone(),
            ..Default::default()
        };
        let options = self.session_options(self.n_ctx_of(model), self.n_ubatch.unwrap_or(DEFAULT_UBATCH));
        let pass = CpuExecutor::session(&cpu, model.spec().clone(), model.weights(), &options)?;
        log(model, &pass);
        Ok(Backend::Cpu(pass))
    }

    #[cfg(feature = "cuda")]
    fn cuda_pass(&self, model: &Model, ordinal: usize) -> Result<Backend, Error> {
        if self.n_ranks > 1 {
            return Ok(Backend::TensorParallel(cuda_engine::ranks(model, self, ordinal)?));
        }
        Ok(Backend::Cuda(cuda_engine::forward_pass(model, self, ordinal)?))
    }

    #[cfg(not(feature = "cuda"))]
    fn cuda_pass(&self, _: &Model, _: usize) -> Result<Backend, Error> {
        Err(Error::DeviceUnavailable { device: self.device.clone() })
    }

    /// Tries CUDA, then another GPU, then the CPU.
    fn auto_pass(&self, model: &Model) -> Result<Backend, Error> {
        #[cfg(feature = "cuda")]
        if let Some(pass) = cuda_engine::auto(model, self)? {
            return Ok(Backend::Cuda(pass));
        }
        self.auto_pass_without_cuda(model)
    }

    #[cfg(feature = "wgpu")]
    fn auto_pass_without_cuda(&self, model: &Model) -> Result<Backend, Error> {
        use metal_attention_wgpu::WgpuError;
        match wgpu_engine::auto(model, self) {
            Ok(pass) => return Ok(Backend::Wgpu(pass)),
            Err(
                why @ (WgpuError::NoAdapter
                | WgpuError::NoneSuits { .. }
                | WgpuError::Option { .. }
                | WgpuError::UnsupportedPart { .. }),
            ) => {
                tracing::info!("auto takes the CPU: {}", why.why_the_cpu());
            }
            Err(why @ WgpuError::Cancelled) => return Err(why.into()),
            Err(why) => tracing::warn!("a GPU cannot be used, so the model runs on the CPU: {why}"),
        }
        self.cpu_pass(model)
    }

    #[cfg(not(feature = "wgpu"))]
    fn auto_pass_without_cuda(&self, model: &Model) -> Result<Backend, Error> {
        self.cpu_pass(model)
    }

    #[cfg(feature = "wgpu")]
    fn wgpu_pass(&self, model: &Model) -> Result<Backend, Error> {
        use metal_attention_wgpu::AdapterChoice;
        let adapter = match &self.device {
            Device::WgpuIndex(i) => AdapterChoice::Index(*i),
            Device::WgpuName(name) => AdapterChoice::Name(name.clone()),
            _ => AdapterChoice::Best,
        };
        Ok(Backend::Wgpu(wgpu_engine::forward_pass(model, self, adapter)?))
    }

    #[cfg(not(feature = "wgpu"))]
    fn wgpu_pass(&self, _: &Model) -> Result<Backend, Error> {
        Err(Error::DeviceUnavailable { device: self.device.clone() })
    }
}

/// A number of bytes in MiB, for logs.
pub(crate) fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

/// The capacity of a KV cache, for logs.
pub(crate) fn capacity(pages: PageUse) -> String {
    let states = match pages.states.total {
        0 => String::new(),
        n => format!(" and {n} recurrent states"),
    };
    format!("{} tokens{states}", pages.total * pages.page_len)
}

/// Logs the device and the memory of a forward pass on the CPU.
fn log(model: &Model, pass: &CpuForwardPass) {
    let memory = pass.memory_use();
    tracing::info!("device: CPU, {}, threads: {}", pass.isa().name(), pass.n_threads());
    tracing::info!("weights: {} in the file", mib(model.gguf().tensor_bytes()));
    tracing::info!("repacked weights: {}", mib(memory.weights));
    let pages = pass.cache_pages();
    tracing::info!("KV cache: {} for {}", mib(memory.kv_cache), capacity(pages));
    tracing::info!("scratch: {}", mib(memory.scratch));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zero_is_refused_where_it_cannot_work() {
        let model = Model::built_in().unwrap();
        let cpu = EngineOptions { device: Device::Cpu, ..Default::default() };
        for options in [
            EngineOptions { n_ctx: Some(0), ..cpu.clone() },
            EngineOptions { n_seq: 0, ..cpu.clone() },
            EngineOptions { n_cache: Some(0), ..cpu.clone() },
            EngineOptions { n_threads: Some(0), ..cpu.clone() },
            EngineOptions { n_ubatch: Some(0), ..cpu.clone() },
        ] {
            let error = model.forward_pass(&options).err().unwrap();
            assert!(matches!(error, Error::Cpu(CpuError::Option { .. })), "{error}");
        }
    }

    #[test]
    fn the_context_defaults_to_the_training_context() {
        let pass = Model::built_in().unwrap().forward_pass(&EngineOptions::default()).unwrap();
        assert_eq!(pass.n_ctx(), 512);
    }
}
