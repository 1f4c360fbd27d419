//! How far back the layers of a model look, and so how many pages of keys and values they need.

use crate::{Capacity, KvShape, LayerSpec, Mask, ModelSpec, PAGE, StateLayout};

/// Layers that look equally far back, and so need the same positions of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheGroup {
    /// What a token sees: [`Mask::Causal`], a window or a chunk.
    pub mask: Mask,
    /// Pages for all sequences.
    pub n_pages: usize,
    /// Most pages of one sequence; from then on the first one goes for each that comes.
    pub max_pages_per_sequence: usize,
}

/// The layers of a model by what they need of a sequence: each group has pages of its own.
///
/// The first group has all positions, and is there even where no layer needs them: it says which texts have room. The
/// others have those of a window or a chunk, as far as that saves any.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheGroups {
    capacity: Capacity,
    groups: Vec<CacheGroup>,
    /// The group of each layer.
    of_layers: Vec<usize>,
    /// Room for recurrent states, where layers keep some.
    states: Option<StateCapacity>,
}

/// How many recurrent states there is room for.
///
/// A sequence that is evaluated has three: the one that it goes on from, the one that it comes to, and that before its last
/// token. The others are there to cut texts back to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateCapacity {
    /// F32 elements of a text's state, over all layers.
    pub n_elements: usize,
    /// States, besides that of the empty text, which is zeros.
    pub n_states: usize,
}

impl StateCapacity {
    /// That of `room` for states of so many elements; `None` where they have none.
    fn new(capacity: &Capacity, n_elements: usize) -> Option<Self> {
        let bytes = n_elements.saturating_mul(size_of::<f32>());
        // More than one for each page would never be used.
        let more = capacity.state_cache.checked_div(bytes)?.min(capacity.n_pages());
        let running = capacity.n_windows.unwrap_or(capacity.n_seq).min(capacity.n_seq);
        let n_states = running.saturating_mul(3).saturating_add(more).min(u32::MAX as usize - 1);
        Some(Self { n_elements, n_states })
    }

    /// Bytes of all of them.
    pub fn bytes(&self) -> u64 {
        let elements = (self.n_states as u64 + 1).saturating_mul(self.n_elements as u64);
        elements.saturating_mul(size_of::<f32>() as u64)
    }
}

impl CacheGroups {
    /// Those of `spec`, in a cache that has room for so much.
    pub fn new(spec: &ModelSpec, capacity: Capacity) -> Self {
        let capacity = Capacity { n_ubatch: capacity.n_tokens(spec), ..capacity };
        let of_layer = |i: usize| match spec.layers[i].mixer.attention() {
            // Texts that are evaluated whole may be longer than a micro-batch.
            Some(a) if spec.is_causal() => a.mask,
            Some(_) | None => Mask::Causal,
        };
        let read_by = |i: usize| spec.layers[i].mixer.cache_of(i);
        // Of all layers that read a cache.
        let of_cache = |cache: usize| {
            let alike = (0..spec.n_layer()).all(|i| read_by(i) != Some(cache) || of_layer(i) == of_layer(cache));
            if alike { of_layer(cache) } else { Mask::Causal }
        };
        let masks = (0..spec.n_layer()).map(|i| read_by(i).map_or(Mask::Causal, of_cache));
        let states = StateCapacity::new(&capacity, StateLayout::new(spec).n_elements());
        Self { states, ..Self::of_masks(capacity, masks) }
    }

    /// Those of layers with caches that are seen through these masks, and without recurrent states.
    pub(crate) fn of_masks(capacity: Capacity, masks: impl Iterator<Item = Mask>) -> Self {
        let all = capacity.n_positions().div_ceil(PAGE);
        let whole = CacheGroup {
            mask: Mask::Causal,
            n_pages: capacity.n_pages(),
            // Never less: nothing of it is given back.
            max_pages_per_sequence: capacity.n_ctx.div_ceil(PAGE),
        };
        let mut groups = vec![whole];
        let of_mask = |mask: Mask| {
            let reach = match mask {
                Mask::Window(n) | Mask::Chunk(n) => n,
                Mask::Causal | Mask::Full | Mask::SymmetricWindow(_) => return 0,
            };
            // What tokens appended at once see: they, and what the first of them sees before itself.
            let most = reach.saturating_add(capacity.step()).saturating_sub(2).div_ceil(PAGE).saturating_add(1);
            if most >= all {
                return 0;
            }
            let n_windows = capacity.n_windows.unwrap_or(capacity.n_seq);
            let n_pages = most.saturating_mul(n_windows).min(capacity.n_pages());
            let group = CacheGroup { mask, n_pages, max_pages_per_sequence: most };
            groups.iter().position(|known| *known == group).unwrap_or_else(|| {
                groups.push(group);
                groups.len() - 1
            })
        };
        let of_layers = masks.map(of_mask).collect();
        Self { capacity, groups, of_layers, states: None }
    }

    /// What there is room for.
    pub fn capacity(&self) -> Capacity {
        self.capacity
    }

    /// All groups.
    pub fn groups(&self) -> &[CacheGroup] {
        &self.groups
    }

    /// Room for recurrent states, where layers keep some.
    pub fn states(&self) -> Option<StateCapacity> {
        self.states
    }

    /// The same groups with states of `n_elements`.
    #[cfg(test)]
    pub(crate) fn with_states(self, n_elements: usize) -> Self {
        Self { states: StateCapacity::new(&self.capacity, n_elements), ..self }
    }

    /// The group of the cache that layer `i` reads.
    pub fn of_layer(&self, i: usize) -> usize {
        self.of_layers[i]
    }

    /// Pages of the cache that layer `i` reads.
    pub fn n_pages(&self, i: usize) -> usize {
        self.groups[self.of_layers[i]].n_pages
    }

    /// Elements of the keys and values of all layers of `spec`, whose groups these are.
    pub fn n_elements(&self, spec: &ModelSpec) -> u64 {
        let of_layer = |(i, layer): (usize, &LayerSpec)| {
            let KvShape { n_head_kv, key_dim, value_dim } = layer.mixer.kv_shape()?;
            Some(((PAGE * n_head_kv * (key_dim + value_dim)) as u64).saturating_mul(self.n_pages(i) as u64))
        };
        spec.layers.iter().enumerate().filter_map(of_layer).fold(0, u64::saturating_add)
    }
}
