//! Models on one or several NVIDIA GPUs through CUDA.

use std::sync::Arc;
use std::time::Duration;

use metal_attention_cuda::{
    CudaCeilings, CudaDevice, CudaEncoder, CudaError, CudaExecutor, CudaForwardPass, CudaSummary, CudaTuning,
    TensorParallelExecutor, TensorParallelPass, cuda_summaries,
};
use metal_attention_gguf::{GgufFile, Tensor};
use metal_attention_model::vision::{EncodedPicture, EncoderWork, Pixels, VisionModel};
use metal_attention_model::{
    DEFAULT_UBATCH, DeviceInfo, ForwardPass, LoadedAssistant, LoadedModel, ModelSpec, Session, SessionOptions,
};

use super::{
    Backend, BackendPass, CeilingEffort, DeviceCeilings, Gpu, GpuDetails, GpuError, GpuErrorKind, GpuList, Launches,
    log_memory, mib, options_beside,
};
use crate::pictures::PictureEncoderPass;
use crate::{Device, EngineOptions, Error, Model};

/// NVIDIA GPUs.
pub(super) struct Cuda;

impl Backend for Cuda {
    fn gpus(&self) -> GpuList {
        let found = match cuda_summaries() {
            Ok(found) => found,
            Err(why) => {
                let why = why.to_string();
                return GpuList { gpus: Vec::new(), why_none: Some(why.clone()), auto: Err(why) };
            }
        };
        let auto = found.iter().position(CudaSummary::is_new_enough);
        GpuList {
            gpus: found.into_iter().map(describe).collect(),
            why_none: None,
            auto: auto.ok_or_else(|| "the kernels run on no NVIDIA GPU of this machine".into()),
        }
    }

    fn supports(&self, spec: &ModelSpec) -> Result<(), Error> {
        Ok(CudaExecutor::supports(spec)?)
    }

    fn open(&self, model: &Model, options: &EngineOptions) -> Result<Box<dyn BackendPass>, Error> {
        let ordinal = ordinal(options);
        if options.n_ranks > 1 {
            return Ok(Box::new(ranks(model, options, ordinal)?));
        }
        Ok(Box::new(forward_pass(model, options, ordinal)?))
    }

    fn open_auto(&self, model: &Model, options: &EngineOptions) -> Result<Option<Box<dyn BackendPass>>, Error> {
        Ok(auto(model, options)?.map(|pass| Box::new(pass) as Box<dyn BackendPass>))
    }

    fn open_encoder(&self, mmproj: &GgufFile, options: &EngineOptions) -> Result<Box<dyn PictureEncoderPass>, Error> {
        let encoder = VisionModel::from_gguf(mmproj)?.encoder;
        let gpu = Arc::new(CudaDevice::open(ordinal(options), options.watch.clone())?);
        Ok(Box::new(CudaEncoder::new(gpu, encoder, options.exact)?))
    }
}

impl PictureEncoderPass for CudaEncoder {
    fn encode(&mut self, pictures: &[Pixels<'_>]) -> Result<Vec<EncodedPicture>, Error> {
        Ok(CudaEncoder::encode(self, pictures)?)
    }

    fn work(&self, pictures: &[[usize; 2]]) -> EncoderWork {
        CudaEncoder::work(self, pictures)
    }

    fn time_products(&mut self, pictures: &[[usize; 2]]) -> Result<Duration, Error> {
        Ok(CudaEncoder::time_products(self, pictures)?)
    }

    fn device(&self) -> DeviceInfo {
        CudaEncoder::device(self)
    }
}

/// The ordinal of the GPU that `options` name, or of the first one.
fn ordinal(options: &EngineOptions) -> usize {
    match options.device {
        Device::Cuda(ordinal) => ordinal,
        Device::Auto | Device::Cpu | Device::Wgpu | Device::WgpuIndex(_) | Device::WgpuName(_) => 0,
    }
}

/// The description of a GPU.
fn describe(gpu: CudaSummary) -> Gpu {
    Gpu {
        device: format!("cuda:{}", gpu.ordinal),
        is_usable: gpu.is_new_enough(),
        name: gpu.name,
        driver: format!("{}.{}", gpu.driver / 1000, gpu.driver % 1000 / 10),
        memory: Some(gpu.memory),
        details: GpuDetails::Cuda { ordinal: gpu.ordinal, capability: gpu.capability, n_sm: gpu.n_sm },
    }
}

/// Sets up `model` on the GPU with ordinal `ordinal`.
fn forward_pass(model: &Model, options: &EngineOptions, ordinal: usize) -> Result<CudaForwardPass, CudaError> {
    CudaExecutor::supports(model.spec())?;
    let gpu = Arc::new(CudaDevice::open(ordinal, options.watch.clone())?);
    let options = pass_options(options, model, gpu.summary(), gpu.free_memory()?);
    let pass = CudaExecutor::session(gpu, model.loaded(), &options)?;
    log_device(pass.gpu());
    log_memory("weights", pass.memory_use(), pass.cache_pages());
    Ok(pass)
}

/// Sets up `model` on `options.n_ranks` GPUs that share it (tensor parallelism), from ordinal `first` on.
fn ranks(model: &Model, options: &EngineOptions, first: usize) -> Result<TensorParallelPass, CudaError> {
    CudaExecutor::supports(model.spec())?;
    let open = |ordinal| {
        let gpu = Arc::new(CudaDevice::open(ordinal, options.watch.clone())?);
        log_device(&gpu);
        Ok(gpu)
    };
    let gpus = (first..first.saturating_add(options.n_ranks)).map(open).collect::<Result<Vec<_>, CudaError>>()?;
    let Some(gpu) = gpus.first() else { return Err(CudaError::Indivisible { n_ranks: 0 }) };
    let free = gpus.iter().map(|gpu| gpu.free_memory()).sum::<Result<u64, CudaError>>()?;
    let options = pass_options(options, model, gpu.summary(), free);
    let pass = TensorParallelExecutor::session(&gpus, model.loaded(), &options)?;
    tracing::info!("the model is shared out: {}", pass.shared());
    log_memory("weights", pass.memory_use(), pass.cache_pages());
    Ok(pass)
}

/// Sets up `model` on the first GPU with enough memory, of which a tenth stays free. `None`, with the reason in the
/// log, if CUDA cannot run it here.
fn auto(model: &Model, options: &EngineOptions) -> Result<Option<CudaForwardPass>, CudaError> {
    match first_with_capacity(model, options) {
        Ok(pass) => return Ok(Some(pass)),
        Err(CudaError::Cancelled) => return Err(CudaError::Cancelled),
        Err(why @ CudaError::Driver { .. }) => tracing::warn!("CUDA cannot be used: {why}"),
        Err(why) => tracing::info!("auto does not take CUDA: {}", why.why_not()),
    }
    Ok(None)
}

/// The same, with the reason as an error.
fn first_with_capacity(model: &Model, options: &EngineOptions) -> Result<CudaForwardPass, CudaError> {
    let gpus = cuda_summaries()?;
    CudaExecutor::supports(model.spec())?;
    let mut why = CudaError::NoDevice { ordinal: 0, n_devices: 0 };
    for gpu in gpus {
        let available = gpu.memory - gpu.memory / 10;
        let options_here = pass_options(options, model, &gpu, available);
        let drafter = options.drafter_bytes(options_here.n_ctx, options_here.n_cache);
        let needed = CudaExecutor::memory_needed(model.loaded(), &options_here).total().saturating_add(drafter);
        let outcome = if needed > available {
            Err(CudaError::ModelTooLarge { needed, available })
        } else {
            forward_pass(model, options, gpu.ordinal)
        };
        match outcome {
            Ok(pass) => {
                tracing::info!("auto takes CUDA: {} has room for {}", gpu.name, mib(needed));
                return Ok(pass);
            }
            Err(CudaError::Cancelled) => return Err(CudaError::Cancelled),
            Err(other) => why = other,
        }
    }
    Err(why)
}

/// The options of a forward pass of `model` on GPUs like `gpu` with `available` bytes in total. If the caller sets no
/// micro-batch, it is the GPU's best one if that fits, otherwise the default.
fn pass_options(options: &EngineOptions, model: &Model, gpu: &CudaSummary, available: u64) -> SessionOptions {
    let options = &sized(options, model, gpu, available);
    let with = |n_ubatch| options.session_options(options.n_ctx_of(model), n_ubatch);
    if let Some(n_ubatch) = options.n_ubatch {
        return with(n_ubatch);
    }
    let best = with(CudaExecutor::best_ubatch(gpu, model.spec()));
    let mut needed = CudaExecutor::memory_needed(model.loaded(), &best);
    // Each rank has its own scratch buffers.
    needed.scratch = needed.scratch.saturating_mul(options.n_ranks as u64);
    if needed.total() > available { with(DEFAULT_UBATCH) } else { best }
}

/// `options` with a context length that fits `available` bytes, if that is left to the device.
fn sized(options: &EngineOptions, model: &Model, gpu: &CudaSummary, available: u64) -> EngineOptions {
    let n_ubatch = options.n_ubatch.unwrap_or_else(|| CudaExecutor::best_ubatch(gpu, model.spec()));
    let smallest = SessionOptions { n_ubatch, n_ctx: options.n_ctx_of(model), ..Default::default() };
    let needed = CudaExecutor::memory_needed(model.loaded(), &smallest);
    let scratch = needed.scratch.saturating_mul(options.n_ranks as u64);
    options.sized(model.spec(), Some(available), needed.weights.saturating_add(scratch))
}

/// Logs the GPU.
fn log_device(gpu: &CudaDevice) {
    let gpu = gpu.summary();
    let (major, minor) = gpu.capability;
    tracing::info!("device: CUDA, {}, compute capability {major}.{minor}", gpu.name);
    tracing::info!("GPU memory: {}", mib(gpu.memory));
}

impl From<CudaError> for Error {
    fn from(error: CudaError) -> Self {
        let kind = match error {
            CudaError::Cancelled => GpuErrorKind::Cancelled,
            CudaError::Option { .. } => GpuErrorKind::Option,
            CudaError::OutOfMemory { .. } | CudaError::ModelTooLarge { .. } => GpuErrorKind::OutOfMemory,
            _ => GpuErrorKind::Device,
        };
        Self::Gpu(GpuError::new(kind, error))
    }
}

impl BackendPass for CudaForwardPass {
    fn beside(&self, model: &LoadedModel, options: &EngineOptions) -> Result<Box<dyn BackendPass>, Error> {
        let session = options_beside(self, options);
        Ok(Box::new(Session::new(CudaExecutor::beside(self, model, &session, &CudaTuning::default())?)))
    }

    fn n_launches(&self) -> u64 {
        self.launches()
    }

    /// A persistent kernel is one launch.
    fn launches_of(&self, n_tokens: usize, _n_ubatch: usize) -> Option<u64> {
        (n_tokens == 1 && self.uses_persistent_kernel(0)).then_some(1)
    }

    fn attach_assistant(&mut self, assistant: &LoadedAssistant, options: &EngineOptions) -> Result<(), Error> {
        let session = options_beside(self, options);
        let executor = CudaExecutor::assistant(self, assistant, &session, &CudaTuning::default())?;
        Session::attach_assistant(self, executor);
        Ok(())
    }

    fn ceilings(&mut self, effort: CeilingEffort, _: bool) -> Result<Option<Box<dyn DeviceCeilings + '_>>, Error> {
        let cuda = CudaCeilings::new(self.gpu(), effort.time);
        Ok(Some(Box::new(Measured { pass: self, cuda, bytes: effort.gpu_bytes })))
    }
}

impl BackendPass for TensorParallelPass {
    fn beside(&self, _: &LoadedModel, _: &EngineOptions) -> Result<Box<dyn BackendPass>, Error> {
        Err(Error::BesideTensorParallelism)
    }

    fn attach_assistant(&mut self, _: &LoadedAssistant, _: &EngineOptions) -> Result<(), Error> {
        Err(Error::BesideTensorParallelism)
    }

    fn ceilings(&mut self, _: CeilingEffort, _: bool) -> Result<Option<Box<dyn DeviceCeilings + '_>>, Error> {
        Ok(None)
    }
}

/// The limits of a GPU.
struct Measured<'p> {
    /// Launches the products.
    pass: &'p mut CudaForwardPass,
    cuda: CudaCeilings,
    /// Bytes that are read or copied.
    bytes: u64,
}

impl DeviceCeilings for Measured<'_> {
    fn read_bandwidth(&self) -> Result<f64, Error> {
        Ok(self.cuda.read_bandwidth(self.bytes)?)
    }

    fn copy_bandwidth(&self) -> Result<f64, Error> {
        Ok(self.cuda.copy_bandwidth(self.bytes)?)
    }

    fn matrix_rate(&self) -> Result<Option<(f64, &'static str)>, Error> {
        Ok(Some((self.cuda.matrix_rate()?, "half")))
    }

    fn f32_rate(&self) -> Result<f64, Error> {
        Ok(self.cuda.f32_rate()?)
    }

    fn launches(&self) -> Result<Launches, Error> {
        let costs = self.cuda.launch_costs()?;
        Ok(Launches::Cuda {
            kernel_in_graph_us: 1e6 * costs.in_graph,
            kernel_us: 1e6 * costs.without_graph,
            round_trip_us: 1e6 * costs.round_trip,
            graph_us: 1e6 * costs.graph,
        })
    }

    fn products(&mut self, matrices: &[&Tensor], n_tokens: &[usize]) -> Result<Vec<f64>, Error> {
        Ok(self.cuda.products(self.pass, matrices, n_tokens)?)
    }
}
