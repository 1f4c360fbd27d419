//! Where a model runs, with how much memory and how many threads.

use metal_attention_cpu::{CacheType, CpuError, CpuForwardPass, CpuOptions, physical_cores};
use metal_attention_model::{ForwardPass, PageUse, Watch};

use crate::memory::available_memory;
#[cfg(feature = "cuda")]
use crate::{CudaCards, CudaForwardPass, cuda_engine};
use crate::{Device, Error, Model};
#[cfg(feature = "wgpu")]
use crate::{WgpuForwardPass, wgpu_engine};

/// Context length where neither the caller nor the model asks for less.
pub(crate) const DEFAULT_N_CTX: usize = 4096;

/// Bytes for recurrent states to cut texts back to, where nobody asks for more or less.
const DEFAULT_STATE_CACHE: usize = 256 << 20;

/// How a [`ForwardPass`] is set up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineOptions {
    /// What runs the model.
    pub device: Device,
    /// NVIDIA GPUs that share the model out among themselves (tensor parallelism): `device`, which is then one of CUDA's, and those
    /// that follow it.
    pub n_ranks: usize,
    /// Tokens each sequence has room for. `None`: the context of the training, at most 4096 unless
    /// [`long_context`](Self::long_context) says otherwise.
    pub n_ctx: Option<usize>,
    /// What a context that nobody gives (`n_ctx` is `None`) comes to. `Some(n)`: that of the training, as far as half of the
    /// memory that the weights leave has room for one such sequence, where `n` forward passes share the device. `n_cache` is
    /// then wanted at least, within the same memory. Where the device does not tell its memory it is as with `None`: at most
    /// 4096 tokens.
    pub long_context: Option<usize>,
    /// Sequences the KV cache holds.
    pub n_seq: usize,
    /// Tokens the KV cache has room for, all sequences together. `None`: `n_ctx` for each sequence.
    pub n_cache: Option<usize>,
    /// Sequences whose windows there is room for, in layers that keep no more of them; a batch may be refused for want of a
    /// window ([`ForwardError::OutOfPages`](crate::ForwardError::OutOfPages)). `None`: all.
    pub n_windows: Option<usize>,
    /// Bytes for recurrent states that texts can be cut back to, besides those that they go on from: in models whose layers
    /// keep such states in the place of keys and values.
    pub state_cache: usize,
    /// Threads that compute on the CPU. `None`: one for each physical core.
    pub n_threads: Option<usize>,
    /// Number format of the KV cache.
    pub cache_type: CacheType,
    /// Compute in F32 instead of quantising activations to 8 bits (CPU) or rounding to the 16 bits of matrix units
    /// (GPU): slower, and as exact as the weights allow.
    pub exact: bool,
    /// Most tokens of a prompt that go through the layers at once. `None`: as many as suit the device, which
    /// [`ForwardPass::n_ubatch`](crate::ForwardPass::n_ubatch) tells: 512, and 2048 on an H100 or H200 through CUDA where no layer keeps a window.
    pub n_ubatch: Option<usize>,
    /// Ends the set-up and each forward pass from another thread, and tells how far they are.
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

/// A forward pass as its backend has it, for what a [`ForwardPass`] does not tell.
#[allow(clippy::large_enum_variant)] // there are one or two of them
pub enum Backend {
    /// On the CPU.
    Cpu(CpuForwardPass),
    /// On an NVIDIA GPU, through CUDA.
    #[cfg(feature = "cuda")]
    Cuda(CudaForwardPass),
    /// On several of them, which share the model.
    #[cfg(feature = "cuda")]
    CudaCards(CudaCards),
    /// On a GPU.
    #[cfg(feature = "wgpu")]
    Wgpu(WgpuForwardPass),
}

impl Backend {
    /// The forward pass on the CPU, where it is one.
    pub fn cpu(&mut self) -> Option<&mut CpuForwardPass> {
        match self {
            Self::Cpu(pass) => Some(pass),
            #[cfg(feature = "cuda")]
            Self::Cuda(_) | Self::CudaCards(_) => None,
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
            Self::CudaCards(pass) => pass,
            #[cfg(feature = "wgpu")]
            Self::Wgpu(pass) => pass,
        }
    }

    pub(crate) fn boxed(self) -> Box<dyn ForwardPass> {
        match self {
            Self::Cpu(pass) => Box::new(pass),
            #[cfg(feature = "cuda")]
            Self::Cuda(pass) => Box::new(pass),
            #[cfg(feature = "cuda")]
            Self::CudaCards(pass) => Box::new(pass),
            #[cfg(feature = "wgpu")]
            Self::Wgpu(pass) => Box::new(pass),
        }
    }
}

impl EngineOptions {
    /// Tokens each sequence has room for where `model` runs with these options.
    pub fn n_ctx_of(&self, model: &Model) -> usize {
        self.n_ctx.unwrap_or(model.spec().n_ctx_train.min(DEFAULT_N_CTX))
    }

    /// Sets `model` up on the device these options name.
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

    fn cpu_pass(&self, model: &Model) -> Result<Backend, Error> {
        let sized = self.sized(model.spec(), available_memory(), model.gguf().tensor_bytes());
        match sized.cpu_pass_of_size(model) {
            // A limit that the system does not tell, as that of the address space.
            Err(Error::Cpu(CpuError::OutOfMemory { .. })) if sized != *self => self.cpu_pass_of_size(model),
            pass => pass,
        }
    }

    fn cpu_pass_of_size(&self, model: &Model) -> Result<Backend, Error> {
        let n_ctx = self.n_ctx_of(model);
        let defaults = CpuOptions::default();
        let options = CpuOptions {
            n_ctx,
            n_seq: self.n_seq,
            n_cache: self.n_cache,
            n_windows: self.n_windows,
            state_cache: self.state_cache,
            n_threads: self.n_threads.unwrap_or_else(physical_cores),
            cache_type: self.cache_type,
            exact: self.exact,
            n_ubatch: self.n_ubatch.unwrap_or(defaults.n_ubatch),
            watch: self.watch.clone(),
            ..defaults
        };
        let pass = CpuForwardPass::new(model.spec().clone(), model.weights(), &options)?;
        log(model, &pass);
        Ok(Backend::Cpu(pass))
    }

    #[cfg(feature = "cuda")]
    fn cuda_pass(&self, model: &Model, ordinal: usize) -> Result<Backend, Error> {
        if self.n_ranks > 1 {
            return Ok(Backend::CudaCards(cuda_engine::cards(model, self, ordinal)?));
        }
        Ok(Backend::Cuda(cuda_engine::forward_pass(model, self, ordinal)?))
    }

    #[cfg(not(feature = "cuda"))]
    fn cuda_pass(&self, _: &Model, _: usize) -> Result<Backend, Error> {
        Err(Error::DeviceUnavailable { device: self.device.clone() })
    }

    /// Through CUDA, else on another GPU, else on the CPU.
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

/// Bytes as people read them.
pub(crate) fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

/// What a KV cache has room for.
pub(crate) fn room(pages: PageUse) -> String {
    let states = match pages.states.total {
        0 => String::new(),
        n => format!(" and {n} recurrent states"),
    };
    format!("{} tokens{states}", pages.total * pages.page_len)
}

/// Logs what runs the model and the memory it takes.
fn log(model: &Model, pass: &CpuForwardPass) {
    let memory = pass.memory_use();
    tracing::info!("device: CPU, {}, threads: {}", pass.isa().name(), pass.n_threads());
    tracing::info!("weights: {} in the file", mib(model.gguf().tensor_bytes()));
    tracing::info!("repacked weights: {}", mib(memory.weights));
    let pages = pass.cache_pages();
    tracing::info!("KV cache: {} for {}", mib(memory.kv_cache), room(pages));
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
    fn the_context_defaults_to_that_of_the_training() {
        let pass = Model::built_in().unwrap().forward_pass(&EngineOptions::default()).unwrap();
        assert_eq!(pass.n_ctx(), 512);
    }
}
