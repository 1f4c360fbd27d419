//! What the tests of whole models on the GPU share.

use std::sync::{Arc, OnceLock};

use metal_attention::gguf::GgufFile;
use metal_attention::kernels::{GpuDevice, GpuError, GpuOptions};
use metal_attention::{GpuForwardPass, GpuForwardPassOptions, ModelSpec, Weights};

/// The GPU of these tests, with every shader check on.
pub fn gpu() -> Option<Arc<GpuDevice>> {
    static GPU: OnceLock<Option<Arc<GpuDevice>>> = OnceLock::new();
    GPU.get_or_init(|| match GpuDevice::open(&GpuOptions { checked: true, ..Default::default() }) {
        Ok(gpu) => Some(Arc::new(gpu)),
        Err(GpuError::NoAdapter) if std::env::var_os("CI").is_none() => {
            eprintln!("skipped: this machine has no GPU");
            None
        }
        Err(e) => panic!("{e}"),
    })
    .clone()
}

/// The model of `file` on `gpu`.
pub fn start(gpu: &Arc<GpuDevice>, file: &GgufFile, options: &GpuForwardPassOptions) -> GpuForwardPass {
    let spec = ModelSpec::from_metadata(file.metadata()).unwrap();
    let weights = Weights::load(file, &spec).unwrap();
    GpuForwardPass::new(Arc::clone(gpu), spec, &weights, options).unwrap()
}
