//! Models on the CPU.

use std::time::Duration;

use metal_attention_cpu::{CpuCeilings, CpuEncoder, CpuError, CpuExecutor, CpuForwardPass, CpuOptions, physical_cores};
use metal_attention_gguf::{GgufFile, Tensor};
use metal_attention_model::vision::{EncodedPicture, EncoderWork, Pixels, VisionModel};
use metal_attention_model::{
    DEFAULT_UBATCH, DeviceInfo, ForwardPass, LoadedAssistant, LoadedModel, ModelSpec, Session,
};

use super::{Backend, BackendPass, CeilingEffort, DeviceCeilings, GpuList, Launches, log_memory, mib, options_beside};
use crate::memory::available_memory;
use crate::pictures::PictureEncoderPass;
use crate::{EngineOptions, Error, Model};

/// The CPU. It runs every model.
pub(super) struct Cpu;

impl Backend for Cpu {
    fn gpus(&self) -> GpuList {
        GpuList { gpus: Vec::new(), why_none: None, auto: Err("it is the CPU".into()) }
    }

    fn supports(&self, _: &ModelSpec) -> Result<(), Error> {
        Ok(())
    }

    /// With a context that fits the available memory.
    fn open(&self, model: &Model, options: &EngineOptions) -> Result<Box<dyn BackendPass>, Error> {
        let sized = options.sized(model.spec(), available_memory(), model.gguf().tensor_bytes());
        let pass = match forward_pass(model, &sized) {
            // The system reports less than all limits, for instance none of the address space: without the longer
            // context it may fit.
            Err(CpuError::OutOfMemory { .. }) if sized != *options => forward_pass(model, options)?,
            pass => pass?,
        };
        Ok(Box::new(pass))
    }

    fn open_auto(&self, model: &Model, options: &EngineOptions) -> Result<Option<Box<dyn BackendPass>>, Error> {
        self.open(model, options).map(Some)
    }

    fn open_encoder(&self, mmproj: &GgufFile, options: &EngineOptions) -> Result<Box<dyn PictureEncoderPass>, Error> {
        let encoder = VisionModel::from_gguf(mmproj)?.encoder;
        Ok(Box::new(CpuEncoder::new(&cpu_options(options), encoder, options.exact)?))
    }
}

impl PictureEncoderPass for CpuEncoder {
    fn encode(&mut self, pictures: &[Pixels<'_>]) -> Result<Vec<EncodedPicture>, Error> {
        Ok(CpuEncoder::encode(self, pictures)?)
    }

    fn work(&self, pictures: &[[usize; 2]]) -> EncoderWork {
        CpuEncoder::work(self, pictures)
    }

    fn time_products(&mut self, pictures: &[[usize; 2]]) -> Result<Duration, Error> {
        Ok(CpuEncoder::time_products(self, pictures)?)
    }

    fn device(&self) -> DeviceInfo {
        CpuEncoder::device(self)
    }
}

/// The threads and the watch of `options`.
fn cpu_options(options: &EngineOptions) -> CpuOptions {
    CpuOptions {
        n_threads: options.n_threads.unwrap_or_else(physical_cores),
        watch: options.watch.clone(),
        ..Default::default()
    }
}

/// A forward pass with exactly these options.
fn forward_pass(model: &Model, options: &EngineOptions) -> Result<CpuForwardPass, CpuError> {
    let cpu = cpu_options(options);
    let session = options.session_options(options.n_ctx_of(model), options.n_ubatch.unwrap_or(DEFAULT_UBATCH));
    let pass = CpuExecutor::session(&cpu, model.loaded(), &session)?;
    tracing::info!("device: CPU, {}, threads: {}", pass.isa().name(), pass.n_threads());
    tracing::info!("weights: {} in the file", mib(model.gguf().tensor_bytes()));
    log_memory("repacked weights", pass.memory_use(), pass.cache_pages());
    Ok(pass)
}

impl BackendPass for CpuForwardPass {
    fn cpu(&mut self) -> Option<&mut CpuForwardPass> {
        Some(self)
    }

    fn n_launches(&self) -> u64 {
        u64::from(self.regions())
    }

    fn beside(&self, model: &LoadedModel, options: &EngineOptions) -> Result<Box<dyn BackendPass>, Error> {
        let second = CpuExecutor::beside(self, &cpu_options(options), model, &options_beside(self, options))?;
        Ok(Box::new(Session::new(second)))
    }

    fn attach_assistant(&mut self, assistant: &LoadedAssistant, options: &EngineOptions) -> Result<(), Error> {
        let executor = CpuExecutor::assistant(self, &cpu_options(options), assistant, &options_beside(self, options))?;
        Session::attach_assistant(self, executor);
        Ok(())
    }

    fn ceilings(&mut self, effort: CeilingEffort, exact: bool) -> Result<Option<Box<dyn DeviceCeilings + '_>>, Error> {
        Ok(Some(Box::new(Measured { cpu: CpuCeilings::new(self.n_threads())?, effort, exact })))
    }
}

/// The limits of the CPU.
struct Measured {
    cpu: CpuCeilings,
    effort: CeilingEffort,
    exact: bool,
}

impl DeviceCeilings for Measured {
    fn read_bandwidth(&self) -> Result<f64, Error> {
        Ok(self.cpu.read_bandwidth(self.effort.cpu_bytes, self.effort.time)?)
    }

    fn copy_bandwidth(&self) -> Result<f64, Error> {
        Ok(self.cpu.copy_bandwidth(self.effort.cpu_bytes, self.effort.time)?)
    }

    fn matrix_rate(&self) -> Result<Option<(f64, &'static str)>, Error> {
        Ok(Some((self.cpu.int8_rate(self.effort.time), "int8")))
    }

    fn f32_rate(&self) -> Result<f64, Error> {
        Ok(self.cpu.f32_rate(self.effort.time))
    }

    fn launches(&self) -> Result<Launches, Error> {
        Ok(Launches::Cpu { region_us: 1e6 * self.cpu.region(self.effort.time) })
    }

    fn products(&mut self, matrices: &[&Tensor], n_tokens: &[usize]) -> Result<Vec<f64>, Error> {
        Ok(self.cpu.products(matrices, n_tokens, self.exact, self.effort.time)?)
    }
}
