//! [`WgpuTuning`], and an estimate of the memory that a model takes.

use metal_attention_model::{CacheGroups, Capacity, LoadedModel, MemoryUse, ModelSpec, SessionOptions};

use crate::WgpuExecutor;
use crate::activations::{ActivationWidths, Activations};
use crate::kv_cache::{cache_bytes, copy_bytes};
use crate::parts::{LayerPages, page_bytes};
use crate::rope_tables::RopeTables;
use crate::spans::last_seen_bytes;
use crate::state::{state_bytes, within_bindings};

/// Choices of a [`WgpuExecutor`] that the GPU otherwise decides.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WgpuTuning {
    /// Workgroups of the persistent kernel, which runs all layers of one token in one dispatch. The GPU has to run all
    /// of them at the same time; if it does not, the kernel times out and is no longer used. 0: a dispatch for each
    /// kernel instead. `None`: what suits the GPU.
    pub persistent_workgroups: Option<usize>,
    /// Most layers whose weights share a buffer, and so a dispatch of the persistent kernel. A buffer is never larger
    /// than one binding, some 4 GiB.
    pub layers_in_a_buffer: usize,
}

impl Default for WgpuTuning {
    fn default() -> Self {
        Self { persistent_workgroups: None, layers_in_a_buffer: usize::MAX }
    }
}

/// The capacity of cache and batches for `spec`, on a GPU whose largest binding is `max_binding` bytes.
pub(super) fn capacity(options: &SessionOptions, spec: &ModelSpec, max_binding: u64) -> Capacity {
    within_bindings(options.capacity(spec), spec, max_binding)
}

impl WgpuExecutor {
    /// The memory that `spec` takes on a GPU whose largest binding is `max_binding` bytes, within a few percent.
    pub fn memory_needed(model: &LoadedModel, options: &SessionOptions, max_binding: u64) -> MemoryUse {
        let (spec, weights) = (model.spec(), model.weights());
        let cache_capacity = capacity(options, spec, max_binding);
        let groups = CacheGroups::new(spec, cache_capacity);
        let pages = LayerPages::of_layers(&groups, spec.n_layer(), options.cache_type);
        let page_bytes = page_bytes(weights, &pages, &groups);
        let widths = ActivationWidths::new(spec, weights, &pages);
        let capacity = Activations::capacity(max_binding, &widths, cache_capacity.n_tokens(spec));
        let rope = RopeTables::bytes(spec, cache_capacity, capacity.0);
        let tensors = weights.tensors().into_iter().map(|tensor| tensor.bytes().len() as u64);
        MemoryUse {
            weights: tensors.fold(rope, u64::saturating_add),
            kv_cache: cache_bytes(&page_bytes, &groups).saturating_add(state_bytes(&groups)),
            scratch: Activations::bytes(&widths, capacity)
                + widths.experts_bytes(capacity.0)
                + last_seen_bytes(spec, capacity.0)
                + copy_bytes(&page_bytes, options.n_seq),
        }
    }
}
