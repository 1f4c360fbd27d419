//! How a model is set up on a GPU, and the memory that takes.

use metal_attention_model::{CacheGroups, CacheType, Capacity, DEFAULT_UBATCH, MemoryUse, ModelSpec, Rope, Weights};

use crate::activations::{ActivationWidths, Activations, experts_bytes};
use crate::kv_cache::{cache_bytes, copy_bytes};
use crate::parts::{MixerKernels, UNROTATED_ELEMENTS};
use crate::state::{state_bytes, within_bindings};

/// How a [`WgpuForwardPass`](super::WgpuForwardPass) is set up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WgpuForwardPassOptions {
    /// Positions each sequence has room for.
    pub n_ctx: usize,
    /// Sequences the KV cache holds.
    pub n_seq: usize,
    /// Positions that the KV cache has room for, all sequences together, rounded up to whole pages. `None`: `n_ctx` for
    /// each sequence.
    pub n_cache: Option<usize>,
    /// Sequences whose windows there is room for, in layers that keep no more of them; a batch may be refused for want of a
    /// window. `None`: all.
    pub n_windows: Option<usize>,
    /// Bytes for recurrent states that texts can be cut back to, besides those that they go on from.
    pub state_cache: usize,
    /// Tokens that go through the layers at once; longer batches are cut.
    pub n_ubatch: usize,
    /// Element type of the KV cache.
    pub cache_type: CacheType,
    /// Multiply in 32-bit floats throughout, where matrix units would round to 16 bits.
    pub exact: bool,
    /// Workgroups of the kernel that runs all layers of a token in one dispatch, all of which the GPU has to run side
    /// by side; 0: the layers are dispatched kernel by kernel. `None`: what suits the GPU.
    pub persistent_workgroups: Option<usize>,
    /// Most layers whose weights share a buffer, and with it that kernel. A buffer is at most as large as a binding, some 4 GiB,
    /// whatever this says.
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
    /// What they have room for where `spec` runs, on a GPU whose largest binding is `max_binding` bytes.
    pub(super) fn capacity(&self, spec: &ModelSpec, max_binding: u64) -> Capacity {
        let Self { n_seq, n_cache, n_windows, state_cache, n_ubatch, .. } = *self;
        let n_ctx = Capacity::n_ctx_of(spec, self.n_ctx);
        within_bindings(Capacity { n_ctx, n_seq, n_cache, n_windows, state_cache, n_ubatch }, spec, max_binding)
    }

    /// What `spec` will take on a GPU whose largest binding is `max_binding` bytes, to a few percent.
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

/// The rotations of the layers, without repetitions; `None` where layers have none.
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
