//! [`CudaForwardPassOptions`], and the device memory that a model needs with them.

use metal_attention_model::{
    CacheGroups, CacheType, Capacity, DEFAULT_UBATCH, LayerSpec, Mask, MemoryUse, ModelSpec, Rope, Weights,
};

use crate::activations::{Activations, Widths};
use crate::device::CudaSummary;
use crate::matrix::packed_bytes;

/// The options of a [`CudaForwardPass`](crate::CudaForwardPass).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CudaForwardPassOptions {
    /// Positions of a sequence, at most.
    pub n_ctx: usize,
    /// Sequences that the KV cache holds at the same time.
    pub n_seq: usize,
    /// Positions that the KV cache holds, over all sequences. `None`: `n_ctx` for each sequence.
    pub n_cache: Option<usize>,
    /// Sequences that can have sliding-window pages at the same time. `None`: all.
    pub n_windows: Option<usize>,
    /// Bytes for recurrent states at earlier positions, to which sequences can be taken back, in addition to their current states.
    pub state_cache: usize,
    /// Tokens of a micro-batch, at most.
    pub n_ubatch: usize,
    /// Element type of the KV cache.
    pub cache_type: CacheType,
    /// Multiply F32 inputs always, instead of inputs rounded to F16 from 5 tokens on.
    pub exact: bool,
    /// The number of positions, from 0 on, at which decode steps of a single sequence run in the persistent kernel, where it
    /// supports the model. `None`: all positions; 0: none.
    pub persistent_kernel_positions: Option<usize>,
}

impl Default for CudaForwardPassOptions {
    fn default() -> Self {
        Self {
            n_ctx: 4096,
            n_seq: 1,
            n_cache: None,
            n_windows: None,
            state_cache: 256 << 20,
            n_ubatch: DEFAULT_UBATCH,
            cache_type: CacheType::default(),
            exact: false,
            persistent_kernel_positions: None,
        }
    }
}

/// The default of `n_ubatch` with warpgroup instructions (H100, H200). Measured with a 7B model: 2048 tokens take 8 to 25 %
/// less time than four times 512, and two ranks are 1.64 times as fast as one instead of 1.45 times.
const WIDE_UBATCH: usize = 2048;

impl CudaForwardPassOptions {
    /// The default of [`n_ubatch`](Self::n_ubatch) for a model on a device: 512, or 2048 with warpgroup instructions. It stays
    /// at 512 for sliding windows, since each sequence keeps pages for a window and a micro-batch.
    pub fn best_ubatch(gpu: &CudaSummary, spec: &ModelSpec) -> usize {
        let keeps_window = |layer: &LayerSpec| match layer.mixer.attention().map(|attention| attention.mask) {
            Some(Mask::Window(_) | Mask::Chunk(_)) => true,
            Some(Mask::Causal | Mask::Full | Mask::SymmetricWindow(_)) | None => false,
        };
        if gpu.has_wgmma() && !spec.layers.iter().any(keeps_window) { WIDE_UBATCH } else { DEFAULT_UBATCH }
    }

    /// The capacity of the caches for a model.
    pub(crate) fn capacity(&self, spec: &ModelSpec) -> Capacity {
        let Self { n_seq, n_cache, n_windows, state_cache, n_ubatch, .. } = *self;
        let n_ctx = Capacity::n_ctx_of(spec, self.n_ctx);
        Capacity { n_ctx, n_seq, n_cache, n_windows, state_cache, n_ubatch }
    }

    /// An estimate of the device memory that a model takes, within a few percent, without tensor parallelism.
    pub fn memory_needed(&self, spec: &ModelSpec, weights: &Weights) -> MemoryUse {
        let capacity = self.capacity(spec);
        let groups = CacheGroups::new(spec, capacity);
        let tensors: u64 = weights.tensors().into_iter().map(packed_bytes).sum();
        let rope_bytes = distinct_ropes(spec).iter().map(|rope| 4 * rope.n_rot as u64).sum::<u64>();
        let rope = rope_bytes.saturating_mul(capacity.n_positions() as u64);
        MemoryUse {
            weights: tensors.saturating_add(rope),
            kv_cache: groups
                .n_elements(spec)
                .saturating_mul(self.cache_type.bytes() as u64)
                .saturating_add(groups.states().map_or(0, |states| states.bytes())),
            scratch: match capacity.n_tokens(spec) {
                // More tokens than any device has memory for: the sizes would overflow.
                n if u32::try_from(n).is_err() => u64::MAX,
                n => Activations::bytes(&Widths::new(spec, n), n),
            },
        }
    }
}

/// The different RoPE parameters of the layers, without repetition. Each has a cos/sin table.
pub(crate) fn distinct_ropes(spec: &ModelSpec) -> Vec<Rope> {
    let mut ropes = Vec::new();
    for rope in spec.layers.iter().filter_map(|layer| layer.mixer.rope()) {
        if !ropes.contains(rope) {
            ropes.push(*rope);
        }
    }
    ropes
}
