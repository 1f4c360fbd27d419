//! Models on a GPU through wgpu.

use std::sync::Arc;
use std::time::Duration;

use metal_attention_gguf::{GgufFile, Tensor};
use metal_attention_model::vision::{EncodedPicture, EncoderWork, Pixels, VisionModel};
use metal_attention_model::{
    DEFAULT_UBATCH, DeviceInfo, ForwardPass, LoadedAssistant, LoadedModel, ModelSpec, Session, SessionOptions,
};
use metal_attention_wgpu::wgpu::{CooperativeScalarType as Scalar, DeviceType, Features};
use metal_attention_wgpu::{
    AdapterChoice, AdapterSummary, WgpuCeilings, WgpuDevice, WgpuEncoder, WgpuError, WgpuExecutor, WgpuForwardPass,
    WgpuOptions, WgpuTuning, adapter_summaries, no_hardware,
};

use super::{
    Backend, BackendPass, CeilingEffort, DeviceCeilings, Gpu, GpuDetails, GpuError, GpuErrorKind, GpuList, Launches,
    log_memory, mib, options_beside,
};
use crate::pictures::PictureEncoderPass;
use crate::{Device, EngineOptions, Error, Model};

/// GPUs of wgpu.
pub(super) struct Wgpu;

impl Backend for Wgpu {
    fn gpus(&self) -> GpuList {
        let found = adapter_summaries();
        // The same choice as that of `WgpuDevice::open`.
        let auto = no_hardware().map_or_else(|| AdapterChoice::Hardware { bytes: 0 }.choose(&found), Err);
        GpuList {
            gpus: found.iter().enumerate().map(|(i, gpu)| describe(i, gpu)).collect(),
            why_none: found.is_empty().then(|| WgpuError::NoAdapter.to_string()),
            auto: auto.map_err(|why| why.why_the_cpu()),
        }
    }

    fn supports(&self, spec: &ModelSpec) -> Result<(), Error> {
        Ok(WgpuExecutor::supports(spec)?)
    }

    fn open(&self, model: &Model, options: &EngineOptions) -> Result<Box<dyn BackendPass>, Error> {
        Ok(Box::new(forward_pass(model, options, adapter(options))?))
    }

    fn open_auto(&self, model: &Model, options: &EngineOptions) -> Result<Option<Box<dyn BackendPass>>, Error> {
        match auto(model, options) {
            Ok(pass) => return Ok(Some(Box::new(pass))),
            Err(why @ WgpuError::Cancelled) => return Err(why.into()),
            Err(
                why @ (WgpuError::NoAdapter
                | WgpuError::NoneSuits { .. }
                | WgpuError::Option { .. }
                | WgpuError::UnsupportedPart { .. }),
            ) => tracing::info!("auto takes the CPU: {}", why.why_the_cpu()),
            Err(why) => tracing::warn!("a GPU cannot be used, so the model runs on the CPU: {why}"),
        }
        Ok(None)
    }

    fn open_encoder(&self, mmproj: &GgufFile, options: &EngineOptions) -> Result<Box<dyn PictureEncoderPass>, Error> {
        let encoder = VisionModel::from_gguf(mmproj)?.encoder;
        let (adapter, watch) = (adapter(options), options.watch.clone());
        let gpu = Arc::new(WgpuDevice::open(&WgpuOptions { adapter, watch, ..Default::default() })?);
        Ok(Box::new(WgpuEncoder::new(gpu, encoder, options.exact)?))
    }
}

impl PictureEncoderPass for WgpuEncoder {
    fn encode(&mut self, pictures: &[Pixels<'_>]) -> Result<Vec<EncodedPicture>, Error> {
        Ok(WgpuEncoder::encode(self, pictures)?)
    }

    fn work(&self, pictures: &[[usize; 2]]) -> EncoderWork {
        WgpuEncoder::work(self, pictures)
    }

    fn time_products(&mut self, pictures: &[[usize; 2]]) -> Result<Duration, Error> {
        Ok(WgpuEncoder::time_products(self, pictures)?)
    }

    fn device(&self) -> DeviceInfo {
        WgpuEncoder::device(self)
    }
}

/// The adapter that `options` name.
fn adapter(options: &EngineOptions) -> AdapterChoice {
    match &options.device {
        Device::WgpuIndex(i) => AdapterChoice::Index(*i),
        Device::WgpuName(name) => AdapterChoice::Name(name.clone()),
        Device::Auto | Device::Cpu | Device::Cuda(_) | Device::Wgpu => AdapterChoice::Best,
    }
}

/// The description of the GPU at `index`.
fn describe(index: usize, gpu: &AdapterSummary) -> Gpu {
    let scalar = |ty| match ty {
        Scalar::F32 => "f32",
        Scalar::F16 => "f16",
        Scalar::I32 => "i32",
        Scalar::U32 => "u32",
    };
    let matrices = gpu.cooperative_matrices.iter().map(|p| {
        let (ab, cr) = (scalar(p.ab_type), scalar(p.cr_type));
        format!("{}x{}x{} {ab} {cr}", p.m_size, p.n_size, p.k_size)
    });
    Gpu {
        device: format!("gpu:{index}"),
        name: gpu.name.clone(),
        driver: gpu.driver.clone(),
        memory: gpu.memory,
        is_usable: true,
        details: GpuDetails::Wgpu {
            index,
            backend: gpu.backend,
            kind: match gpu.kind {
                DeviceType::DiscreteGpu => "discrete",
                DeviceType::IntegratedGpu => "integrated",
                DeviceType::VirtualGpu => "virtual",
                DeviceType::Cpu => "software",
                DeviceType::Other => "other",
            },
            max_binding: gpu.max_binding,
            subgroups: gpu.features.contains(Features::SUBGROUP),
            subgroup_sizes: gpu.subgroup_sizes,
            f16: gpu.features.contains(Features::SHADER_F16),
            cooperative_matrices: matrices.collect(),
        },
    }
}

/// Sets up `model` on the GPU that `adapter` selects. If a long context does not fit after all, it tries again with the
/// shortest.
fn forward_pass(model: &Model, options: &EngineOptions, adapter: AdapterChoice) -> Result<WgpuForwardPass, WgpuError> {
    let watch = options.watch.clone();
    let gpu = Arc::new(WgpuDevice::open(&WgpuOptions { adapter, watch, ..Default::default() })?);
    // A tenth is left for other programs.
    let free = gpu.summary().memory.map(|memory| memory - memory / 10);
    let sized = options.sized(model.spec(), free, model.gguf().tensor_bytes());
    let set_up = |options: &EngineOptions| {
        let options = pass_options(model, options);
        WgpuExecutor::session(Arc::clone(&gpu), model.loaded(), &options)
    };
    let pass = match set_up(&sized) {
        // Other programs may use more of the memory, or the device may not allow a buffer of that size.
        Err(WgpuError::OutOfMemory { .. } | WgpuError::TooLarge { .. } | WgpuError::ModelTooLarge { .. })
            if sized != *options =>
        {
            set_up(options)?
        }
        pass => pass?,
    };
    log(&pass);
    Ok(pass)
}

/// Sets up `model` on a hardware GPU with enough memory. The error says why there is none.
fn auto(model: &Model, options: &EngineOptions) -> Result<WgpuForwardPass, WgpuError> {
    WgpuExecutor::supports(model.spec())?;
    // The upper bound of a binding's size: devices with a smaller one need less memory at a time.
    let max_binding = u64::from(u32::MAX);
    let session = pass_options(model, options);
    let needed = WgpuExecutor::memory_needed(model.loaded(), &session, max_binding);
    let pass = forward_pass(model, options, AdapterChoice::Hardware { bytes: needed.total() })?;
    tracing::info!("auto takes the GPU: it has room for {}", mib(needed.total()));
    Ok(pass)
}

/// The options of a session with `model`.
fn pass_options(model: &Model, options: &EngineOptions) -> SessionOptions {
    options.session_options(options.n_ctx_of(model), options.n_ubatch.unwrap_or(DEFAULT_UBATCH))
}

/// Logs the GPU and the memory of a forward pass.
fn log(pass: &WgpuForwardPass) {
    let (gpu, memory) = (pass.gpu(), pass.memory_use());
    let summary = gpu.summary();
    tracing::info!("device: GPU, {} ({}, driver {})", summary.name, summary.backend, summary.driver);
    if let Some(bytes) = summary.memory {
        tracing::info!("GPU memory: {}", mib(bytes));
    }
    log_memory("weights", memory, pass.cache_pages());
    tracing::info!("pipelines: {}", gpu.pipelines().len());
}

impl From<WgpuError> for Error {
    fn from(error: WgpuError) -> Self {
        let kind = match error {
            WgpuError::Cancelled => GpuErrorKind::Cancelled,
            WgpuError::Option { .. } => GpuErrorKind::Option,
            WgpuError::OutOfMemory { .. } | WgpuError::TooLarge { .. } | WgpuError::ModelTooLarge { .. } => {
                GpuErrorKind::OutOfMemory
            }
            _ => GpuErrorKind::Device,
        };
        Self::Gpu(GpuError::new(kind, error))
    }
}

impl BackendPass for WgpuForwardPass {
    fn driver(&self) -> Option<String> {
        let gpu = self.gpu().summary();
        Some(format!("{}, {}", gpu.backend, gpu.driver))
    }

    fn launches_of(&self, n_tokens: usize, n_ubatch: usize) -> Option<u64> {
        let whole = (n_tokens / n_ubatch * self.launches(n_ubatch, n_ubatch - 1)) as u64;
        let rest = n_tokens % n_ubatch;
        Some(whole + if rest > 0 { self.launches(rest, n_tokens - 1) as u64 } else { 0 })
    }

    fn beside(&self, model: &LoadedModel, options: &EngineOptions) -> Result<Box<dyn BackendPass>, Error> {
        let session = options_beside(self, options);
        Ok(Box::new(Session::new(WgpuExecutor::beside(self, model, &session, &WgpuTuning::default())?)))
    }

    fn attach_assistant(&mut self, assistant: &LoadedAssistant, options: &EngineOptions) -> Result<(), Error> {
        let session = options_beside(self, options);
        let executor = WgpuExecutor::assistant(self, assistant, &session, &WgpuTuning::default())?;
        Session::attach_assistant(self, executor);
        Ok(())
    }

    fn ceilings(&mut self, effort: CeilingEffort, _: bool) -> Result<Option<Box<dyn DeviceCeilings + '_>>, Error> {
        let gpu = self.gpu();
        let bytes = if gpu.summary().is_software() { effort.software_bytes } else { effort.gpu_bytes };
        Ok(Some(Box::new(Measured { wgpu: WgpuCeilings::new(gpu, effort.time), bytes })))
    }
}

/// The limits of a GPU.
struct Measured<'p> {
    wgpu: WgpuCeilings<'p>,
    /// Bytes that are read or copied.
    bytes: u64,
}

impl DeviceCeilings for Measured<'_> {
    fn read_bandwidth(&self) -> Result<f64, Error> {
        Ok(self.wgpu.read_bandwidth(self.bytes)?)
    }

    fn copy_bandwidth(&self) -> Result<f64, Error> {
        Ok(self.wgpu.copy_bandwidth(self.bytes)?)
    }

    fn matrix_rate(&self) -> Result<Option<(f64, &'static str)>, Error> {
        Ok(self.wgpu.matrix_rate()?.map(|rate| (rate, "half")))
    }

    fn f32_rate(&self) -> Result<f64, Error> {
        Ok(self.wgpu.f32_rate()?)
    }

    fn launches(&self) -> Result<Launches, Error> {
        let costs = self.wgpu.launch_costs()?;
        Ok(Launches::Wgpu {
            dispatch_us: 1e6 * costs.dispatch,
            dispatch_queued_us: 1e6 * costs.dispatch_queued,
            submission_us: 1e6 * costs.submission,
            submission_queued_us: 1e6 * costs.submission_queued,
        })
    }

    fn products(&mut self, matrices: &[&Tensor], n_tokens: &[usize]) -> Result<Vec<f64>, Error> {
        Ok(self.wgpu.products(matrices, n_tokens)?)
    }
}
