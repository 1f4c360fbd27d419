//! How a model is set up, and the memory that takes.

use metal_attention_model::{
    CacheGroups, CacheType, Capacity, DEFAULT_UBATCH, LayerSpec, Mask, MemoryUse, ModelSpec, Rope, Weights,
};

use crate::activations::{Activations, Widths};
use crate::device::CudaSummary;
use crate::matrix::packed_bytes;

/// How a [`CudaForwardPass`](crate::CudaForwardPass) is set up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CudaForwardPassOptions {
    /// Positions each sequence has room for.
    pub n_ctx: usize,
    /// Sequences the KV cache holds.
    pub n_seq: usize,
    /// Positions that the KV cache has room for, all sequences together. `None`: `n_ctx` for each sequence.
    pub n_cache: Option<usize>,
    /// Sequences whose windows there is room for. `None`: all.
    pub n_windows: Option<usize>,
    /// Bytes for recurrent states that texts can be cut back to, besides those that they go on from.
    pub state_cache: usize,
    /// Tokens that go through the layers at once.
    pub n_ubatch: usize,
    /// Element type of the KV cache.
    pub cache_type: CacheType,
    /// Multiply with F32 inputs throughout, where prompts would have them rounded to F16.
    pub exact: bool,
    /// Single tokens go through all layers in one launch, where there is a kernel for that, as long as their text has this many
    /// tokens at most; 0: never. `None`: at any length.
    pub one_launch: Option<usize>,
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
            one_launch: None,
        }
    }
}

/// Tokens that go through the layers at once on the H100 and H200: 2048 of a 7B take 8 to 25 % less time than four times 512, and two cards are 1.64 times as
/// fast as one instead of 1.45.
const WIDE_UBATCH: usize = 2048;

impl CudaForwardPassOptions {
    /// Tokens of `spec` that go through the layers at once best: [`n_ubatch`](Self::n_ubatch) for who has no other reason. No more than 512 where layers keep
    /// windows: of these there is room for a window, and as much, for each sequence.
    pub fn best_ubatch(gpu: &CudaSummary, spec: &ModelSpec) -> usize {
        let keeps_window = |layer: &LayerSpec| match layer.mixer.attention().map(|of| of.mask) {
            Some(Mask::Window(_) | Mask::Chunk(_)) => true,
            Some(Mask::Causal | Mask::Full | Mask::SymmetricWindow(_)) | None => false,
        };
        if gpu.has_wide() && !spec.layers.iter().any(keeps_window) { WIDE_UBATCH } else { DEFAULT_UBATCH }
    }

    /// What they have room for where `spec` runs.
    pub(crate) fn capacity(&self, spec: &ModelSpec) -> Capacity {
        let Self { n_seq, n_cache, n_windows, state_cache, n_ubatch, .. } = *self;
        let n_ctx = Capacity::n_ctx_of(spec, self.n_ctx);
        Capacity { n_ctx, n_seq, n_cache, n_windows, state_cache, n_ubatch }
    }

    /// What `spec` will take, to a few percent.
    pub fn memory_needed(&self, spec: &ModelSpec, weights: &Weights) -> MemoryUse {
        let room = self.capacity(spec);
        let groups = CacheGroups::new(spec, room);
        let tensors: u64 = weights.tensors().into_iter().map(packed_bytes).sum();
        let widths = distinct_ropes(spec).iter().map(|rope| 4 * rope.n_rot as u64).sum::<u64>();
        let rope = widths.saturating_mul(room.n_positions() as u64);
        MemoryUse {
            weights: tensors.saturating_add(rope),
            kv_cache: groups
                .n_elements(spec)
                .saturating_mul(self.cache_type.bytes() as u64)
                .saturating_add(groups.states().map_or(0, |room| room.bytes())),
            scratch: match room.n_tokens(spec) {
                // More than any device has room for, and than can be counted.
                n if u32::try_from(n).is_err() => u64::MAX,
                n => Activations::bytes(&Widths::new(spec, n), n),
            },
        }
    }
}

/// The rotations of the layers, without repetitions.
pub(crate) fn distinct_ropes(spec: &ModelSpec) -> Vec<Rope> {
    let mut ropes = Vec::new();
    for rope in spec.layers.iter().filter_map(|layer| layer.mixer.rope()) {
        if !ropes.contains(rope) {
            ropes.push(*rope);
        }
    }
    ropes
}
