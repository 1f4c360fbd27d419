//! Setting a model up on an NVIDIA GPU.

use std::sync::Arc;

use metal_attention_cuda::{CudaDevice, CudaError, CudaForwardPass, CudaForwardPassOptions};
use metal_attention_model::ForwardPass;

use crate::engine::{mib, room};
use crate::{EngineOptions, Model};

/// Sets `model` up on device `ordinal`.
pub(crate) fn forward_pass(
    model: &Model,
    options: &EngineOptions,
    n_ctx: usize,
    ordinal: usize,
) -> Result<CudaForwardPass, CudaError> {
    CudaForwardPass::supports(model.spec())?;
    let gpu = Arc::new(CudaDevice::open(ordinal, options.watch.clone())?);
    let options = CudaForwardPassOptions {
        n_ctx,
        n_seq: options.n_seq,
        n_cache: options.n_cache,
        n_windows: options.n_windows,
        state_cache: options.state_cache,
        n_ubatch: options.n_ubatch,
        cache_type: options.cache_type,
        exact: options.exact,
        one_launch: None,
    };
    let pass = CudaForwardPass::new(gpu, model.spec().clone(), model.weights(), &options)?;
    log(&pass);
    Ok(pass)
}

/// Logs what runs the model and the memory it takes.
fn log(pass: &CudaForwardPass) {
    let (gpu, memory) = (pass.gpu().summary(), pass.memory_use());
    let (major, minor) = gpu.capability;
    tracing::info!("device: CUDA, {}, compute capability {major}.{minor}", gpu.name);
    tracing::info!("GPU memory: {}", mib(gpu.memory));
    tracing::info!("weights: {}", mib(memory.weights));
    tracing::info!("KV cache: {} for {}", mib(memory.kv_cache), room(pass.cache_pages()));
    tracing::info!("scratch: {}", mib(memory.scratch));
}
