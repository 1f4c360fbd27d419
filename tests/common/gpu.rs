//! What the tests of whole models on the GPU share.

// Each test file that takes this in uses a part of it.
#![allow(dead_code)]

use std::sync::Arc;

use metal_attention::gguf::GgufFile;
use metal_attention::kernels::{GpuDevice, GpuError, GpuOptions};
use metal_attention::{GpuForwardPass, GpuForwardPassOptions, ModelSpec, Watch, Weights};

/// The GPU, with every access checked: a device for each test, as a software GPU runs what comes to one device in turn. `None`,
/// with a message, on a machine that has none; in CI that is a failure.
pub fn gpu() -> Option<Arc<GpuDevice>> {
    gpu_with(&Watch::default())
}

/// The same, whose work `watch` ends.
pub fn gpu_with(watch: &Watch) -> Option<Arc<GpuDevice>> {
    open(&GpuOptions { checked: true, watch: watch.clone(), ..Default::default() })
}

/// The same, whose kernels know of subgroups that they have four lanes or more.
pub fn gpu_of_any_subgroups() -> Option<Arc<GpuDevice>> {
    open(&GpuOptions { checked: true, least_subgroup: Some(4), ..Default::default() })
}

fn open(options: &GpuOptions) -> Option<Arc<GpuDevice>> {
    match GpuDevice::open(options) {
        Ok(gpu) => Some(Arc::new(gpu)),
        Err(GpuError::NoAdapter) if std::env::var_os("CI").is_none() => {
            eprintln!("skipped: this machine has no GPU");
            None
        }
        Err(e) => panic!("{e}"),
    }
}

/// The model of `file` on `gpu`.
pub fn start(gpu: &Arc<GpuDevice>, file: &GgufFile, options: &GpuForwardPassOptions) -> GpuForwardPass {
    let spec = ModelSpec::from_metadata(file.metadata()).unwrap();
    let weights = Weights::load(file, &spec).unwrap();
    GpuForwardPass::new(Arc::clone(gpu), spec, &weights, options).unwrap()
}
