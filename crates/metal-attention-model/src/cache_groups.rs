//! Cache groups: layers that attend equally far back, and the KV pages that they need.

use crate::{Capacity, KvShape, LayerSpec, Mask, Mixer, ModelSpec, PAGE, StateLayout};

/// A cache group: the layers that keep the same positions of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheGroup {
    /// The positions that a token attends to: [`Mask::Causal`], a window or a chunk.
    pub mask: Mask,
    /// Pages for all sequences.
    pub n_pages: usize,
    /// Maximum pages of one sequence; beyond that, each new page takes the place of the oldest.
    pub max_pages_per_sequence: usize,
}

/// The cache groups of a model; each has its own pages.
///
/// Group 0 keeps all positions. It exists even if no layer needs it, as it decides whether a sequence fits. The others
/// keep a window or a chunk, if that is less.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheGroups {
    /// The capacity they were made for, with the tokens of a micro-batch of the model.
    capacity: Capacity,
    /// All groups.
    groups: Vec<CacheGroup>,
    /// The group of each layer.
    group_of_layer: Vec<usize>,
    /// For each layer, [`memory_of_layer`](Self::memory_of_layer).
    memory_of_layer: Vec<Option<usize>>,
    /// [`outlive_steps`](Self::outlive_steps).
    outlive_steps: bool,
    /// Capacity for recurrent states; `None` if no layer keeps one.
    states: Option<StateCapacity>,
}

/// The number of recurrent states that fit in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateCapacity {
    /// F32 elements of one sequence's state, over all layers.
    pub n_elements: usize,
    /// Number of states, without the all-zero state of the empty sequence.
    pub n_states: usize,
}

impl StateCapacity {
    /// The capacity for states of `n_elements` elements; `None` if that is 0.
    fn new(capacity: &Capacity, n_elements: usize) -> Option<Self> {
        let bytes = n_elements.saturating_mul(size_of::<f32>());
        // More than one checkpoint for each page would never be used.
        let more = capacity.state_cache.checked_div(bytes)?.min(capacity.n_pages());
        let running = capacity.n_windows.unwrap_or(capacity.n_seq).min(capacity.n_seq);
        let n_states = running.saturating_mul(3).saturating_add(more).min(u32::MAX as usize - 1);
        Some(Self { n_elements, n_states })
    }

    /// Bytes of all states, the empty one included.
    pub fn bytes(&self) -> u64 {
        let elements = (self.n_states as u64 + 1).saturating_mul(self.n_elements as u64);
        elements.saturating_mul(size_of::<f32>() as u64)
    }
}

impl CacheGroups {
    /// The groups of `spec`, in a cache of `capacity`.
    pub fn new(spec: &ModelSpec, capacity: Capacity) -> Self {
        let capacity = Capacity { n_ubatch: capacity.n_tokens(spec), ..capacity };
        let of_layer = |i: usize| match spec.layers[i].mixer.attention() {
            // Without a causal mask, sequences are evaluated whole and may be longer than a micro-batch: all positions
            // are kept.
            Some(a) if spec.is_causal() => a.mask,
            Some(_) | None => Mask::Causal,
        };
        let read_by = |i: usize| spec.layers[i].mixer.kv_cache_layer(i);
        // The mask of all layers that read a layer's cache; if they differ, all positions are kept.
        let of_cache = |cache: usize| {
            let alike = (0..spec.n_layer()).all(|i| read_by(i) != Some(cache) || of_layer(i) == of_layer(cache));
            if alike { of_layer(cache) } else { Mask::Causal }
        };
        let masks = (0..spec.n_layer()).map(|i| read_by(i).map_or(Mask::Causal, of_cache));
        let states = StateCapacity::new(&capacity, StateLayout::new(spec).n_elements());
        Self {
            states,
            memory_of_layer: memory_of_layers(spec),
            outlive_steps: spec.is_causal(),
            ..Self::of_masks(capacity, masks)
        }
    }

    /// The groups of an assistant that reads the KV cache of these groups' model, its target: the same groups and pages. For each
    /// of its layers [`of_layer`](Self::of_layer) is the group of the target's layer that it reads, and
    /// [`memory_of_layer`](Self::memory_of_layer) that layer of the target.
    #[must_use]
    pub fn of_assistant(&self, assistant: &ModelSpec) -> Self {
        let read: Vec<_> = assistant.layers.iter().map(|layer| layer.mixer.target_layer()).collect();
        Self {
            capacity: self.capacity,
            groups: self.groups.clone(),
            group_of_layer: read.iter().map(|layer| layer.map_or(0, |layer| self.of_layer(layer))).collect(),
            memory_of_layer: read.iter().map(|layer| self.memory_of_layer((*layer)?)).collect(),
            outlive_steps: self.outlive_steps,
            states: None,
        }
    }

    /// The groups of layers whose caches, one for each layer, are read through these masks, without recurrent states.
    pub(crate) fn of_masks(capacity: Capacity, masks: impl Iterator<Item = Mask>) -> Self {
        let n_context_pages = capacity.n_positions().div_ceil(PAGE);
        let all_positions = CacheGroup {
            mask: Mask::Causal,
            n_pages: capacity.n_pages(),
            // Enough for the whole context: group 0 never drops a page.
            max_pages_per_sequence: capacity.n_ctx.div_ceil(PAGE),
        };
        let mut groups = vec![all_positions];
        let of_mask = |mask: Mask| {
            let reach = match mask {
                Mask::Window(n) | Mask::Chunk(n) => n,
                Mask::Causal | Mask::Full | Mask::SymmetricWindow(_) => return 0,
            };
            // The positions that one append needs: its tokens, and what the first of them attends to before itself.
            let max_pages = reach.saturating_add(capacity.step()).saturating_sub(2).div_ceil(PAGE).saturating_add(1);
            if max_pages >= n_context_pages {
                return 0;
            }
            let n_windows = capacity.n_windows.unwrap_or(capacity.n_seq);
            let n_pages = max_pages.saturating_mul(n_windows).min(capacity.n_pages());
            let group = CacheGroup { mask, n_pages, max_pages_per_sequence: max_pages };
            groups.iter().position(|known| *known == group).unwrap_or_else(|| {
                groups.push(group);
                groups.len() - 1
            })
        };
        let group_of_layer: Vec<_> = masks.map(of_mask).collect();
        let memory_of_layer = (0..group_of_layer.len()).map(Some).collect();
        Self { capacity, groups, group_of_layer, memory_of_layer, outlive_steps: true, states: None }
    }

    /// The capacity they were made for, with the tokens of a micro-batch of the model ([`Capacity::n_tokens`]).
    pub fn capacity(&self) -> Capacity {
        self.capacity
    }

    /// All groups.
    pub fn groups(&self) -> &[CacheGroup] {
        &self.groups
    }

    /// Capacity for recurrent states; `None` if no layer keeps one.
    pub fn states(&self) -> Option<StateCapacity> {
        self.states
    }

    /// These groups with states of `n_elements`.
    #[cfg(test)]
    pub(crate) fn with_states(self, n_elements: usize) -> Self {
        Self { states: StateCapacity::new(&self.capacity, n_elements), ..self }
    }

    /// The group of the cache that layer `i` reads.
    pub fn of_layer(&self, i: usize) -> usize {
        self.group_of_layer[i]
    }

    /// Pages of the cache that layer `i` reads.
    pub fn n_pages(&self, i: usize) -> usize {
        self.groups[self.group_of_layer[i]].n_pages
    }

    /// The layer whose memory has the pages of layer `i`; backends allocate memory for the layers that are their own.
    /// `None`: layer `i` reads no keys and values.
    ///
    /// It is the layer whose keys and values layer `i` reads, with one exception. Without a causal mask a step evaluates
    /// whole sequences, layer by layer, so that no layer reads keys and values after the next layer has written its own.
    /// There, layers with equal [`KvShape`]s have the memory of the first of them, unless a layer reads the keys and values
    /// of another. Layers with other shapes do not share it: a device may evaluate the sequences of a step in parallel, each
    /// in another layer, and pages of different sizes would overlap.
    pub fn memory_of_layer(&self, i: usize) -> Option<usize> {
        self.memory_of_layer[i]
    }

    /// Whether later steps read the pages that a step has written. Not so without a causal mask: there a sequence is
    /// evaluated whole, in one step, and cannot be continued.
    pub fn outlive_steps(&self) -> bool {
        self.outlive_steps
    }

    /// Elements of the memory for keys and values of all layers of `spec`, the model of these groups.
    pub fn n_elements(&self, spec: &ModelSpec) -> u64 {
        let of_layer = |(i, layer): (usize, &LayerSpec)| {
            if self.memory_of_layer(i) != Some(i) {
                return None;
            }
            let KvShape { n_head_kv, key_dim, value_dim } = layer.mixer.kv_shape()?;
            Some(((PAGE * n_head_kv * (key_dim + value_dim)) as u64).saturating_mul(self.n_pages(i) as u64))
        };
        spec.layers.iter().enumerate().filter_map(of_layer).fold(0, u64::saturating_add)
    }
}

/// [`CacheGroups::memory_of_layer`] of each layer of `spec`.
fn memory_of_layers(spec: &ModelSpec) -> Vec<Option<usize>> {
    let mixers = || spec.layers.iter().map(|layer| &layer.mixer).enumerate();
    let owns_or_has_none = |(i, mixer): (usize, &Mixer)| mixer.kv_cache_layer(i).is_none_or(|read| read == i);
    if spec.is_causal() || !mixers().all(owns_or_has_none) {
        return mixers().map(|(i, mixer)| mixer.kv_cache_layer(i)).collect();
    }
    let shapes: Vec<_> = mixers().map(|(_, mixer)| mixer.kv_shape()).collect();
    shapes.iter().map(|shape| shape.and_then(|_| shapes.iter().position(|first| first == shape))).collect()
}
