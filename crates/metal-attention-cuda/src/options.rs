//! [`CudaTuning`], the best size of micro-batches, and the device memory that a model needs.

use metal_attention_model::{
    CacheGroups, DEFAULT_UBATCH, LayerSpec, LoadedModel, Mask, MemoryUse, ModelSpec, SessionOptions, Weights,
};

use crate::CudaExecutor;
use crate::activations::{Activations, Widths};
use crate::device::CudaSummary;
use crate::matrix::packed_bytes;
use crate::rope::RopeTables;

/// Choices of a [`CudaExecutor`] that the GPU otherwise decides.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CudaTuning {
    /// The number of positions, from 0 on, at which decode steps of a single sequence run in the persistent kernel, where it
    /// supports the model. `None`: all positions; 0: none.
    pub persistent_kernel_positions: Option<usize>,
}

/// The default of `n_ubatch` with warpgroup instructions (H100, H200). Measured with a 7B model: 2048 tokens take 8 to 25 %
/// less time than four times 512, and two ranks are 1.64 times as fast as one instead of 1.45 times.
const WIDE_UBATCH: usize = 2048;

impl CudaExecutor {
    /// The default of [`n_ubatch`](SessionOptions::n_ubatch) for a model on a device: 512, or 2048 with warpgroup instructions.
    /// It stays at 512 for sliding windows, since each sequence keeps pages for a window and a micro-batch.
    pub fn best_ubatch(gpu: &CudaSummary, spec: &ModelSpec) -> usize {
        let keeps_window = |layer: &LayerSpec| match layer.mixer.attention().map(|attention| attention.mask) {
            Some(Mask::Window(_) | Mask::Chunk(_)) => true,
            Some(Mask::Causal | Mask::Full | Mask::SymmetricWindow(_)) | None => false,
        };
        if gpu.has_wgmma() && !spec.layers.iter().any(keeps_window) { WIDE_UBATCH } else { DEFAULT_UBATCH }
    }

    /// An estimate of the device memory that a model takes, within a few percent, without tensor parallelism.
    pub fn memory_needed(model: &LoadedModel, options: &SessionOptions) -> MemoryUse {
        Self::memory_needed_for(model.spec(), model.weights(), options)
    }

    /// [`memory_needed`](Self::memory_needed), for the caches and buffers of `spec` and all of `weights`.
    pub(crate) fn memory_needed_for(spec: &ModelSpec, weights: &Weights, options: &SessionOptions) -> MemoryUse {
        let capacity = options.capacity(spec);
        let groups = CacheGroups::new(spec, capacity);
        let tensors: u64 = weights.tensors().into_iter().map(packed_bytes).sum();
        let rope = RopeTables::bytes(spec, capacity.n_positions(), capacity.n_tokens(spec));
        MemoryUse {
            weights: tensors.saturating_add(rope),
            kv_cache: groups
                .n_elements(spec)
                .saturating_mul(options.cache_type.bytes() as u64)
                .saturating_add(groups.states().map_or(0, |states| states.bytes())),
            scratch: match capacity.n_tokens(spec) {
                // More tokens than any device has memory for: the sizes would overflow.
                n if u32::try_from(n).is_err() => u64::MAX,
                n => Activations::bytes(&Widths::new(spec, n)),
            },
        }
    }
}
