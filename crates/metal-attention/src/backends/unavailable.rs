//! Backends that are not part of this build.

use metal_attention_gguf::GgufFile;
use metal_attention_model::ModelSpec;

use super::{Backend, BackendPass, GpuList};
use crate::pictures::PictureEncoderPass;
use crate::{EngineOptions, Error, Model};

/// A backend that is not compiled in.
pub(super) struct Unavailable {
    /// Why it has no devices.
    why: &'static str,
    /// The device that an error names.
    device: crate::Device,
}

/// CUDA.
#[allow(dead_code, reason = "builds with CUDA have its backend")]
pub(super) static CUDA: Unavailable = Unavailable {
    why: "this program was built without CUDA (the Cargo feature \"cuda\")",
    device: crate::Device::Cuda(0),
};

/// wgpu.
#[allow(dead_code, reason = "builds with wgpu have its backend")]
pub(super) static WGPU: Unavailable = Unavailable {
    why: "this program was built without GPUs (the Cargo feature \"wgpu\")",
    device: crate::Device::Wgpu,
};

impl Backend for Unavailable {
    fn is_compiled(&self) -> bool {
        false
    }

    fn gpus(&self) -> GpuList {
        GpuList { gpus: Vec::new(), why_none: Some(self.why.into()), auto: Err(self.why.into()) }
    }

    fn supports(&self, _: &ModelSpec) -> Result<(), Error> {
        Err(Error::DeviceUnavailable { device: self.device.clone() })
    }

    fn open(&self, _: &Model, options: &EngineOptions) -> Result<Box<dyn BackendPass>, Error> {
        Err(Error::DeviceUnavailable { device: options.device.clone() })
    }

    fn open_auto(&self, _: &Model, _: &EngineOptions) -> Result<Option<Box<dyn BackendPass>>, Error> {
        Ok(None)
    }

    fn open_encoder(&self, _: &GgufFile, options: &EngineOptions) -> Result<Box<dyn PictureEncoderPass>, Error> {
        Err(Error::DeviceUnavailable { device: options.device.clone() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Device;

    #[test]
    fn a_backend_that_is_not_compiled_in_takes_no_model_and_says_why() {
        let model = Model::built_in().unwrap();
        for (backend, device, feature) in [(&CUDA, Device::Cuda(3), "cuda"), (&WGPU, Device::WgpuIndex(1), "wgpu")] {
            let options = EngineOptions { device: device.clone(), ..Default::default() };
            let error = backend.open(&model, &options).err().unwrap();
            assert!(matches!(&error, Error::DeviceUnavailable { device: named } if *named == device), "{error}");
            assert!(backend.open_auto(&model, &EngineOptions::default()).unwrap().is_none());
            assert!(!backend.is_compiled() && backend.supports(model.spec()).is_err());
            let list = backend.gpus();
            assert!(list.gpus.is_empty() && list.why_none.as_ref().unwrap().contains(feature));
            assert_eq!(list.auto.unwrap_err(), list.why_none.unwrap());
        }
    }
}
