//! What the tests of whole models on the GPU share.

// Each test file that takes this in uses a part of it.
#![allow(dead_code)]

use std::ops::Deref;
use std::sync::{Arc, Mutex};

use metal_attention::gguf::GgufFile;
use metal_attention::kernels::{WgpuDevice, WgpuError, WgpuOptions};
use metal_attention::{ModelSpec, Watch, Weights, WgpuForwardPass, WgpuForwardPassOptions};

/// Devices that no test uses now.
static IDLE: Mutex<Vec<Arc<WgpuDevice>>> = Mutex::new(Vec::new());

/// A device that goes back to the idle ones at the end of its test, with its compiled pipelines: building these takes most of the
/// time on a software GPU.
pub struct PooledGpu(Arc<WgpuDevice>);

impl Deref for PooledGpu {
    type Target = Arc<WgpuDevice>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl Drop for PooledGpu {
    fn drop(&mut self) {
        // What a failed test left of a device is not for the next one.
        if !std::thread::panicking() {
            IDLE.lock().unwrap().push(Arc::clone(&self.0));
        }
    }
}

/// The GPU, with every access checked: a device for this test alone while it runs, as a software GPU executes the work of a device
/// one after the other. `None`, with a message, on a machine that has no GPU; in CI that is a failure.
pub fn gpu() -> Option<PooledGpu> {
    let idle = IDLE.lock().unwrap().pop();
    idle.or_else(fresh_gpu).map(PooledGpu)
}

/// The same, but a device that no test has used.
pub fn fresh_gpu() -> Option<Arc<WgpuDevice>> {
    gpu_with(&Watch::default())
}

/// A device whose work `watch` cancels.
pub fn gpu_with(watch: &Watch) -> Option<Arc<WgpuDevice>> {
    open(&WgpuOptions { checked: true, watch: watch.clone(), ..Default::default() })
}

/// A device whose kernels assume no more of subgroups than four lanes.
pub fn gpu_of_any_subgroups() -> Option<Arc<WgpuDevice>> {
    open(&WgpuOptions { checked: true, least_subgroup: Some(4), ..Default::default() })
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
pub fn start(gpu: &Arc<WgpuDevice>, file: &GgufFile, options: &WgpuForwardPassOptions) -> WgpuForwardPass {
    let spec = ModelSpec::from_metadata(file.metadata()).unwrap();
    let weights = Weights::load(file, &spec).unwrap();
    WgpuForwardPass::new(Arc::clone(gpu), spec, &weights, options).unwrap()
}
