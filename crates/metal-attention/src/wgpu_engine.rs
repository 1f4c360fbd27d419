//! Setting up a model on a GPU through wgpu.

use std::sync::Arc;

use metal_attention_model::{DEFAULT_UBATCH, ForwardPass, SessionOptions};
use metal_attention_wgpu::{AdapterChoice, WgpuDevice, WgpuError, WgpuExecutor, WgpuForwardPass, WgpuOptions};

use crate::engine::{capacity, mib};
use crate::{EngineOptions, Model};

/// Sets up `model` on the GPU that `adapter` selects. If a long context does not fit after all, it tries again with the
/// shortest.
pub(crate) fn forward_pass(
    model: &Model,
    options: &EngineOptions,
    adapter: AdapterChoice,
) -> Result<WgpuForwardPass, WgpuError> {
    let watch = options.watch.clone();
    let gpu = Arc::new(WgpuDevice::open(&WgpuOptions { adapter, watch, ..Default::default() })?);
    // A tenth is left for other programs.
    let free = gpu.summary().memory.map(|memory| memory - memory / 10);
    let sized = options.sized(model.spec(), free, model.gguf().tensor_bytes());
    let set_up = |options: &EngineOptions| {
        let options = pass_options(model, options);
        WgpuExecutor::session(Arc::clone(&gpu), model.spec().clone(), model.weights(), &options)
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
pub(crate) fn auto(model: &Model, options: &EngineOptions) -> Result<WgpuForwardPass, WgpuError> {
    WgpuExecutor::supports(model.spec())?;
    // The upper bound of a binding's size: devices with a smaller one need less memory at a time.
    let max_binding = u64::from(u32::MAX);
    let session = pass_options(model, options);
    let needed = WgpuExecutor::memory_needed(model.spec(), model.weights(), &session, max_binding);
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
    tracing::info!("weights: {}", mib(memory.weights));
    let pages = pass.cache_pages();
    tracing::info!("KV cache: {} for {}", mib(memory.kv_cache), capacity(pages));
    tracing::info!("scratch: {}", mib(memory.scratch));
    tracing::info!("pipelines: {}", gpu.pipelines().len());
}
