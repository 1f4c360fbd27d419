//! Setting a model up on a GPU.

use std::sync::Arc;

use metal_attention_model::ForwardPass;
use metal_attention_wgpu::{AdapterChoice, GpuDevice, GpuError, GpuForwardPass, GpuForwardPassOptions, GpuOptions};

use crate::engine::{mib, room};
use crate::{EngineOptions, Model};

/// Sets `model` up on the GPU that `adapter` names.
pub(crate) fn forward_pass(
    model: &Model,
    options: &EngineOptions,
    n_ctx: usize,
    adapter: AdapterChoice,
) -> Result<GpuForwardPass, GpuError> {
    let watch = options.watch.clone();
    let gpu = Arc::new(GpuDevice::open(&GpuOptions { adapter, watch, ..Default::default() })?);
    let options = pass_options(options, n_ctx);
    let pass = GpuForwardPass::new(gpu, model.spec().clone(), model.weights(), &options)?;
    log(&pass);
    Ok(pass)
}

/// Sets `model` up on a GPU that is no software and has room for it. An error says why there is none.
pub(crate) fn auto(model: &Model, options: &EngineOptions, n_ctx: usize) -> Result<GpuForwardPass, GpuError> {
    GpuForwardPass::supports(model.spec())?;
    // No GPU binds more; where a binding can be smaller, less is held at once.
    let max_binding = u64::from(u32::MAX);
    let needed = pass_options(options, n_ctx).memory_needed(model.spec(), model.weights(), max_binding);
    let pass = forward_pass(model, options, n_ctx, AdapterChoice::Hardware { bytes: needed.total() })?;
    tracing::info!("auto takes the GPU: it has room for {}", mib(needed.total()));
    Ok(pass)
}

fn pass_options(options: &EngineOptions, n_ctx: usize) -> GpuForwardPassOptions {
    let defaults = GpuForwardPassOptions::default();
    GpuForwardPassOptions {
        n_ctx,
        n_seq: options.n_seq,
        n_cache: options.n_cache,
        n_windows: options.n_windows,
        state_cache: options.state_cache,
        n_ubatch: options.n_ubatch.unwrap_or(defaults.n_ubatch),
        cache_type: options.cache_type,
        exact: options.exact,
        layers_at_once: None,
        layers_in_a_buffer: usize::MAX,
    }
}

/// Logs what runs the model and the memory it takes.
fn log(pass: &GpuForwardPass) {
    let (gpu, memory) = (pass.gpu(), pass.memory_use());
    let summary = gpu.summary();
    tracing::info!("device: GPU, {} ({}, driver {})", summary.name, summary.backend, summary.driver);
    if let Some(bytes) = summary.memory {
        tracing::info!("GPU memory: {}", mib(bytes));
    }
    tracing::info!("weights: {}", mib(memory.weights));
    let pages = pass.cache_pages();
    tracing::info!("KV cache: {} for {}", mib(memory.kv_cache), room(pages));
    tracing::info!("scratch: {}", mib(memory.scratch));
    tracing::info!("pipelines: {}", gpu.pso().len());
}
