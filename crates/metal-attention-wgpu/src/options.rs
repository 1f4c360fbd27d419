//! Options of the wgpu forward pass, and an estimate of the memory that a model takes with them.

use metal_attention_model::{CacheGroups, CacheType, Capacity, DEFAULT_UBATCH, MemoryUse, ModelSpec, Rope, Weights};

use crate::activations::{ActivationWidths, Activations, experts_bytes};
use crate::kv_cache::{cache_bytes, copy_bytes};
use crate::parts::{MixerKernels, UNROTATED_ELEMENTS};
use crate::state::{state_bytes, within_bindings};

/// Options of a [`WgpuForwardPass`](super::WgpuForwardPass).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WgpuForwardPassOptions {
    /// Positions of each sequence at most.
    pub n_ctx: usize,
    /// Number of sequences in the KV cache.
    pub n_seq: usize,
    /// Positions in the KV cache, of all sequences together, rounded up to whole pages. `None`: `n_ctx` for each
    /// sequence.
    pub n_cache: Option<usize>,
    /// Sequences whose sliding windows fit, in layers that keep no more than a window. A batch that needs another
    /// window is refused. `None`: those of all sequences.
    pub n_windows: Option<usize>,
    /// Bytes for copies of recurrent states at earlier positions, which sequences can be cut back to. The states that
    /// sequences are at come on top.
    pub state_cache: usize,
    /// Most tokens of a micro-batch.
    pub n_ubatch: usize,
    /// Element type of the KV cache.
    pub cache_type: CacheType,
    /// Whether products keep 32-bit floats throughout. Otherwise matrix units may round to 16 bits.
    pub exact: bool,
    /// Workgroups of the persistent kernel, which runs all layers of one token in one dispatch. The GPU has to run all
    /// of them at the same time; if it does not, the kernel times out and is no longer used. 0: a dispatch for each
    /// kernel instead. `None`: what suits the GPU.
    pub persistent_workgroups: Option<usize>,
    /// Most layers whose weights share a buffer, and so a dispatch of the persistent kernel. A buffer is never larger
    /// than one binding, some 4 GiB.
    pub layers_in_a_buffer: usize,
}

impl Default for WgpuForwardPassOptions {
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
            persistent_workgroups: None,
            layers_in_a_buffer: usize::MAX,
        }
    }
}

impl WgpuForwardPassOptions {
    /// The capacity of cache and batches for `spec` with these options, on a GPU whose largest binding is `max_binding`
    /// bytes.
    pub(super) fn capacity(&self, spec: &ModelSpec, max_binding: u64) -> Capacity {
        let Self { n_seq, n_cache, n_windows, state_cache, n_ubatch, .. } = *self;
        let n_ctx = Capacity::n_ctx_of(spec, self.n_ctx);
        within_bindings(Capacity { n_ctx, n_seq, n_cache, n_windows, state_cache, n_ubatch }, spec, max_binding)
    }

    /// The memory that `spec` takes on a GPU whose largest binding is `max_binding` bytes, within a few percent.
    pub fn memory_needed(&self, spec: &ModelSpec, weights: &Weights, max_binding: u64) -> MemoryUse {
        let cache_capacity = self.capacity(spec, max_binding);
        let groups = CacheGroups::new(spec, cache_capacity);
        let mixers = MixerKernels::of_layers(spec, weights, &groups, self.cache_type);
        let widths = ActivationWidths::new(spec, &mixers);
        let capacity = Activations::capacity(max_binding, &widths, cache_capacity.n_tokens(spec));
        let n_rot = |rope: &Option<Rope>| rope.map_or(UNROTATED_ELEMENTS, |rope| rope.n_rot);
        let rope = distinct_ropes(spec).iter().map(|rope| 4 * n_rot(rope) as u64).sum::<u64>();
        let tensors = weights.tensors().into_iter().map(|tensor| tensor.bytes().len() as u64);
        MemoryUse {
            weights: tensors.fold(rope.saturating_mul(cache_capacity.n_positions() as u64), u64::saturating_add),
            kv_cache: cache_bytes(&mixers, &groups).saturating_add(state_bytes(&groups)),
            scratch: Activations::bytes(&widths, capacity)
                + experts_bytes(spec, capacity.0)
                + copy_bytes(&mixers, self.n_seq),
        }
    }
}

/// The different rotations (RoPE) of the layers; `None` stands for layers without RoPE.
pub(super) fn distinct_ropes(spec: &ModelSpec) -> Vec<Option<Rope>> {
    let mut ropes = Vec::new();
    for layer in &spec.layers {
        let rope = layer.mixer.rope().copied();
        if !ropes.contains(&rope) {
            ropes.push(rope);
        }
    }
    ropes
}
