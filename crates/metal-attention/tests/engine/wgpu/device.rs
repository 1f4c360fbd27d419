//! What the tests of whole models on the GPU share.

// Each test file that takes this in uses a part of it.
#![allow(dead_code)]

use std::sync::Arc;

use metal_attention::gguf::GgufFile;
use metal_attention::wgpu::{WgpuDevice, WgpuError, WgpuOptions};
use metal_attention::{LoadedModel, SessionOptions, Watch, WgpuExecutor, WgpuForwardPass};

/// The GPU, a device for each test, as a software GPU runs what comes to one device in turn. `None`, with a message, on a
/// machine that has none; in CI that is a failure. Shaders have no runtime checks, as in release builds: the tests of single
/// kernels have them, and the program that other tests run.
pub fn gpu() -> Option<Arc<WgpuDevice>> {
    gpu_with(&Watch::default())
}

/// A device whose work `watch` cancels.
pub fn gpu_with(watch: &Watch) -> Option<Arc<WgpuDevice>> {
    open(&WgpuOptions { checked: false, watch: watch.clone(), ..Default::default() })
}

/// A device whose kernels assume no more of subgroups than four lanes.
pub fn gpu_of_any_subgroups() -> Option<Arc<WgpuDevice>> {
    open(&WgpuOptions { checked: false, least_subgroup: Some(4), ..Default::default() })
}

/// Whether tests on `gpu` run a part of their cases.
pub fn takes_fewer_cases(gpu: &WgpuDevice) -> bool {
    metal_attention_testing::takes_fewer_cases(gpu.summary().is_software())
}

fn open(options: &WgpuOptions) -> Option<Arc<WgpuDevice>> {
    match WgpuDevice::open(options) {
        Ok(gpu) => Some(Arc::new(gpu)),
        Err(WgpuError::NoAdapter) if std::env::var_os("CI").is_none() => {
            metal_attention_testing::skip("this machine has no GPU");
            None
        }
        Err(e) => panic!("{e}"),
    }
}

/// The model of `file` on `gpu`.
pub fn start(gpu: &Arc<WgpuDevice>, file: &GgufFile, options: &SessionOptions) -> WgpuForwardPass {
    let model = LoadedModel::load(file).unwrap();
    WgpuExecutor::session(Arc::clone(gpu), &model, options).unwrap()
}
