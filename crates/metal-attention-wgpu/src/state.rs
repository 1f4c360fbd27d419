//! Recurrent states of all layers and sequences in GPU memory.
//!
//! A slot holds the states of all layers of one sequence at one position. Which slot belongs to which sequence is kept
//! on the CPU, in the [`PageTable`](metal_attention_model::PageTable). A *segment* specifies for the kernels which
//! tokens of a batch take a state from one slot to another.

use crate::kernels::segment_words;
use crate::{Arena, Slice, WgpuDevice, WgpuError};
use metal_attention_model::{CacheGroups, Capacity, ModelSpec, Segment, StateLayout};
use wgpu::Buffer;

/// The recurrent states, in slots. Slot 0 is the state before the first token: zeros, which no kernel writes.
#[derive(Debug)]
pub(super) struct WgpuStates {
    /// The states of each layer, F32 `[n_slots, elements]`; `None`: the layer has none.
    layers: Vec<Option<Slice>>,
    /// Bytes of a slot of each layer.
    bytes_of_layers: Vec<u64>,
    /// The segments of the next batch, in the format of [`segment_words`].
    segments: Buffer,
    /// Slots of each layer.
    n_slots: usize,
    /// Bytes of all slots of all layers.
    bytes: u64,
}

impl WgpuStates {
    /// Makes slots, all zero, for the states that `groups` have capacity for, and a buffer for the segments of
    /// `n_tokens` tokens.
    pub(super) fn new(
        gpu: &WgpuDevice,
        spec: &ModelSpec,
        groups: &CacheGroups,
        n_tokens: usize,
    ) -> Result<Self, WgpuError> {
        let what = "the recurrent states";
        let layout = StateLayout::new(spec);
        let n_slots = groups.states().map_or(0, |capacity| capacity.n_states + 1);
        let sizes: Vec<_> =
            (0..spec.n_layer()).map(|i| bytes_of_layer(&layout, i).saturating_mul(n_slots as u64)).collect();
        let kept: Vec<_> = sizes.iter().filter(|&&bytes| bytes > 0).map(|&bytes| Arena::padded(bytes)).collect();
        let mut slices = Vec::new();
        let some: Vec<_> = sizes.iter().filter(|&&bytes| bytes > 0).collect();
        for (n, mut arena) in Arena::in_runs(gpu, what, &kept, usize::MAX)? {
            for &&bytes in &some[slices.len()..][..n] {
                slices.push(arena.take(gpu, what, bytes)?);
            }
        }
        let mut slices = slices.into_iter();
        // At most a run and a segment for each token.
        let n_words = if n_slots == 0 { 1 } else { 1 + 2 * n_tokens as u64 };
        Ok(Self {
            layers: sizes.iter().map(|&bytes| if bytes > 0 { slices.next() } else { None }).collect(),
            bytes_of_layers: (0..spec.n_layer()).map(|i| bytes_of_layer(&layout, i)).collect(),
            segments: gpu.buffer("the segments of a batch", 16 * n_words)?,
            n_slots,
            bytes: state_bytes(groups),
        })
    }

    /// Whether no layer has a recurrent state.
    pub(super) fn is_empty(&self) -> bool {
        self.n_slots == 0
    }

    /// The states of layer `i`, which has some: F32 `[n_slots, elements]`.
    pub(super) fn of_layer(&self, i: usize) -> &Slice {
        self.layers[i].as_ref().expect("a layer that keeps states has room for them")
    }

    /// The slices that make up a slot, layer by layer.
    pub(super) fn of_slot(&self, slot: u32) -> impl Iterator<Item = Slice> {
        let layers = self.layers.iter().zip(&self.bytes_of_layers);
        layers.filter_map(move |(layer, &bytes)| Some(layer.as_ref()?.part(u64::from(slot) * bytes, bytes)))
    }

    /// Bytes of a slot, over all layers.
    pub(super) fn slot_bytes(&self) -> u64 {
        self.bytes_of_layers.iter().sum()
    }

    /// Slots of each layer, slot 0 included.
    pub(super) fn n_slots(&self) -> usize {
        self.n_slots
    }

    /// The buffer of the segments.
    pub(super) fn segments(&self) -> &Buffer {
        &self.segments
    }

    /// Writes the segments of the next batch to the GPU. Does nothing if no layer has a state.
    ///
    /// # Panics
    /// If they do not fit the buffer, or as [`segment_words`] does: shaders use them as indices without checks.
    pub(super) fn write(&self, gpu: &WgpuDevice, segments: &[Segment]) {
        if self.is_empty() {
            return;
        }
        let words = segment_words(segments, self.n_slots);
        assert!(16 * words.len() as u64 <= self.segments.size(), "{} words of segments", words.len());
        gpu.write(&self.segments, &words);
    }

    /// Bytes of all slots of all layers.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// Bytes of a slot of layer `i`.
fn bytes_of_layer(layout: &StateLayout, i: usize) -> u64 {
    (layout.of_layer(i).len() as u64).saturating_mul(size_of::<f32>() as u64)
}

/// Bytes of the states of all layers.
pub(super) fn state_bytes(groups: &CacheGroups) -> u64 {
    groups.states().map_or(0, |capacity| capacity.bytes())
}

/// `capacity`, with its `state_cache` reduced so that the slots of each layer fit one binding of `max_binding` bytes.
pub(super) fn within_bindings(capacity: Capacity, spec: &ModelSpec, max_binding: u64) -> Capacity {
    let layout = StateLayout::new(spec);
    let widest = (0..spec.n_layer()).map(|i| bytes_of_layer(&layout, i)).max().unwrap_or(0);
    let Some(n_slots) = max_binding.checked_div(widest) else { return capacity };
    let least = CacheGroups::new(spec, Capacity { state_cache: 0, ..capacity })
        .states()
        .map_or(0, |capacity| capacity.n_states + 1);
    let more = n_slots.saturating_sub(least as u64);
    let bytes = more.saturating_mul(layout.n_elements() as u64).saturating_mul(size_of::<f32>() as u64);
    Capacity { state_cache: capacity.state_cache.min(usize::try_from(bytes).unwrap_or(usize::MAX)), ..capacity }
}
