//! Where a model runs, and with how much memory and how many threads.

use std::fmt;
use std::str::FromStr;

use metal_attention_cpu::{CacheType, CpuForwardPass, CpuOptions, physical_cores};
use metal_attention_model::ForwardPass;

use crate::{Error, Model};

/// Context length where neither the caller nor the model asks for less.
const DEFAULT_N_CTX: usize = 4096;

/// What runs the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Device {
    /// The fastest device there is.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Auto => "auto",
            Self::Cpu => "cpu",
        })
    }
}

impl FromStr for Device {
    type Err = Error;

    /// Reads `"auto"` or `"cpu"`; every other name is [`Error::DeviceUnavailable`].
    fn from_str(s: &str) -> Result<Self, Error> {
        match s {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            _ => Err(Error::DeviceUnavailable { device: s.to_owned() }),
        }
    }
}

/// How a [`ForwardPass`] is set up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineOptions {
    /// What runs the model.
    pub device: Device,
    /// Tokens each sequence has room for. `None`: the context of the training, at most 4096.
    pub n_ctx: Option<usize>,
    /// Sequences the KV cache holds.
    pub n_seq: usize,
    /// Threads that compute. `None`: one for each physical core.
    pub n_threads: Option<usize>,
    /// Number format of the KV cache.
    pub cache_type: CacheType,
    /// Keep activations in F32 instead of quantising them to 8 bits: slower, and as exact as the weights allow.
    pub exact: bool,
    /// Most tokens of a prompt that go through the layers at once.
    pub n_ubatch: usize,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            device: Device::Auto,
            n_ctx: None,
            n_seq: 1,
            n_threads: None,
            cache_type: CacheType::F16,
            exact: false,
            n_ubatch: 512,
        }
    }
}

impl EngineOptions {
    /// Sets `model` up on the device these options name.
    pub(crate) fn forward_pass(&self, model: &Model) -> Result<Box<dyn ForwardPass>, Error> {
        let n_ctx_train = model.spec().n_ctx_train;
        let n_ctx = self.n_ctx.unwrap_or(n_ctx_train.min(DEFAULT_N_CTX));
        if n_ctx > n_ctx_train {
            tracing::warn!("a context of {n_ctx} tokens is longer than the {n_ctx_train} of the model's training");
        }
        let options = CpuOptions {
            n_ctx,
            n_seq: self.n_seq,
            n_threads: self.n_threads.unwrap_or_else(physical_cores),
            cache_type: self.cache_type,
            exact: self.exact,
            n_ubatch: self.n_ubatch,
            ..Default::default()
        };
        match self.device {
            Device::Auto | Device::Cpu => {
                let pass = CpuForwardPass::new(model.spec().clone(), model.weights(), &options)?;
                log(model, &pass);
                Ok(Box::new(pass))
            }
        }
    }
}

/// Logs what runs the model and the memory it takes.
fn log(model: &Model, pass: &CpuForwardPass) {
    let mib = |bytes: usize| format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20));
    let memory = pass.memory_use();
    tracing::info!("device: CPU, {}, threads: {}", pass.isa().name(), pass.n_threads());
    tracing::info!("weights: {} in the file", mib(model.gguf().tensor_bytes() as usize));
    tracing::info!("repacked weights: {}", mib(memory.weights));
    tracing::info!("KV cache: {} for {} tokens", mib(memory.kv_cache), pass.n_ctx() * pass.n_seq());
    tracing::info!("scratch: {}", mib(memory.scratch));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::CpuError;

    #[test]
    fn device_names_read_back() {
        for device in [Device::Auto, Device::Cpu] {
            assert_eq!(device.to_string().parse::<Device>().unwrap(), device);
        }
        let error = "gpu".parse::<Device>().unwrap_err();
        assert!(matches!(&error, Error::DeviceUnavailable { device } if device == "gpu"), "{error}");
    }

    #[test]
    fn zero_is_refused_where_it_cannot_work() {
        let model = Model::built_in().unwrap();
        for options in [
            EngineOptions { n_ctx: Some(0), ..Default::default() },
            EngineOptions { n_seq: 0, ..Default::default() },
            EngineOptions { n_threads: Some(0), ..Default::default() },
            EngineOptions { n_ubatch: 0, ..Default::default() },
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
