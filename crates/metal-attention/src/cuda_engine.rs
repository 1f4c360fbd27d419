//! Setting up a model on one or several NVIDIA GPUs through CUDA.

use std::sync::Arc;

use metal_attention_cuda::{
    CudaDevice, CudaError, CudaExecutor, CudaForwardPass, CudaSummary, TensorParallelExecutor, TensorParallelPass,
    cuda_summaries,
};
use metal_attention_model::{DEFAULT_UBATCH, ForwardPass, MemoryUse, PageUse, SessionOptions};

use crate::engine::{capacity, mib};
use crate::{EngineOptions, Model};

/// Sets up `model` on the GPU with ordinal `ordinal`.
pub(crate) fn forward_pass(
    model: &Model,
    options: &EngineOptions,
    ordinal: usize,
) -> Result<CudaForwardPass, CudaError> {
    CudaExecutor::supports(model.spec())?;
    let gpu = Arc::new(CudaDevice::open(ordinal, options.watch.clone())?);
    let options = pass_options(options, model, gpu.summary(), gpu.free_memory()?);
    let pass = CudaExecutor::session(gpu, model.spec().clone(), model.weights(), &options)?;
    log_device(pass.gpu());
    log_memory(pass.memory_use(), pass.cache_pages());
    Ok(pass)
}

/// Sets up `model` on `options.n_ranks` GPUs that share it (tensor parallelism), from ordinal `first` on.
pub(crate) fn ranks(model: &Model, options: &EngineOptions, first: usize) -> Result<TensorParallelPass, CudaError> {
    CudaExecutor::supports(model.spec())?;
    let open = |ordinal| {
        let gpu = Arc::new(CudaDevice::open(ordinal, options.watch.clone())?);
        log_device(&gpu);
        Ok(gpu)
    };
    let gpus = (first..first.saturating_add(options.n_ranks)).map(open).collect::<Result<Vec<_>, CudaError>>()?;
    let Some(gpu) = gpus.first() else { return Err(CudaError::Indivisible { n_ranks: 0 }) };
    let free = gpus.iter().map(|gpu| gpu.free_memory()).sum::<Result<u64, CudaError>>()?;
    let options = pass_options(options, model, gpu.summary(), free);
    let pass = TensorParallelExecutor::session(&gpus, model.spec(), model.weights(), &options)?;
    tracing::info!("the model is shared out: {}", pass.shared());
    log_memory(pass.memory_use(), pass.cache_pages());
    Ok(pass)
}

/// Sets up `model` on the first GPU with enough memory, of which a tenth stays free. `None`, with the reason in the
/// log, if CUDA cannot run it here.
pub(crate) fn auto(model: &Model, options: &EngineOptions) -> Result<Option<CudaForwardPass>, CudaError> {
    match first_with_capacity(model, options) {
        Ok(pass) => return Ok(Some(pass)),
        Err(CudaError::Cancelled) => return Err(CudaError::Cancelled),
        Err(why @ CudaError::Driver { .. }) => tracing::warn!("CUDA cannot be used: {why}"),
        Err(why) => tracing::info!("auto does not take CUDA: {}", why.why_not()),
    }
    Ok(None)
}

/// The same, with the reason as an error.
fn first_with_capacity(model: &Model, options: &EngineOptions) -> Result<CudaForwardPass, CudaError> {
    let gpus = cuda_summaries()?;
    CudaExecutor::supports(model.spec())?;
    let mut why = CudaError::NoDevice { ordinal: 0, n_devices: 0 };
    for gpu in gpus {
        let available = gpu.memory - gpu.memory / 10;
        let options_here = pass_options(options, model, &gpu, available);
        let needed = CudaExecutor::memory_needed(model.spec(), model.weights(), &options_here).total();
        let outcome = if needed > available {
            Err(CudaError::ModelTooLarge { needed, available })
        } else {
            forward_pass(model, options, gpu.ordinal)
        };
        match outcome {
            Ok(pass) => {
                tracing::info!("auto takes CUDA: {} has room for {}", gpu.name, mib(needed));
                return Ok(pass);
            }
            Err(CudaError::Cancelled) => return Err(CudaError::Cancelled),
            Err(other) => why = other,
        }
    }
    Err(why)
}

/// The options of a forward pass of `model` on GPUs like `gpu` with `available` bytes in total. If the caller sets no
/// micro-batch, it is the GPU's best one if that fits, otherwise the default.
fn pass_options(options: &EngineOptions, model: &Model, gpu: &CudaSummary, available: u64) -> SessionOptions {
    let options = &sized(options, model, gpu, available);
    let with = |n_ubatch| options.session_options(options.n_ctx_of(model), n_ubatch);
    if let Some(n_ubatch) = options.n_ubatch {
        return with(n_ubatch);
    }
    let best = with(CudaExecutor::best_ubatch(gpu, model.spec()));
    let mut needed = CudaExecutor::memory_needed(model.spec(), model.weights(), &best);
    // Each rank has its own scratch buffers.
    needed.scratch = needed.scratch.saturating_mul(options.n_ranks as u64);
    if needed.total() > available { with(DEFAULT_UBATCH) } else { best }
}

/// `options` with a context length that fits `available` bytes, if that is left to the device.
fn sized(options: &EngineOptions, model: &Model, gpu: &CudaSummary, available: u64) -> EngineOptions {
    let n_ubatch = options.n_ubatch.unwrap_or_else(|| CudaExecutor::best_ubatch(gpu, model.spec()));
    let smallest = SessionOptions { n_ubatch, n_ctx: options.n_ctx_of(model), ..Default::default() };
    let needed = CudaExecutor::memory_needed(model.spec(), model.weights(), &smallest);
    let scratch = needed.scratch.saturating_mul(options.n_ranks as u64);
    options.sized(model.spec(), Some(available), needed.weights.saturating_add(scratch))
}

/// Logs the GPU.
fn log_device(gpu: &CudaDevice) {
    let gpu = gpu.summary();
    let (major, minor) = gpu.capability;
    tracing::info!("device: CUDA, {}, compute capability {major}.{minor}", gpu.name);
    tracing::info!("GPU memory: {}", mib(gpu.memory));
}

/// Logs the memory of a forward pass.
fn log_memory(memory: MemoryUse, pages: PageUse) {
    tracing::info!("weights: {}", mib(memory.weights));
    tracing::info!("KV cache: {} for {}", mib(memory.kv_cache), capacity(pages));
    tracing::info!("scratch: {}", mib(memory.scratch));
}
