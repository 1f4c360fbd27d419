//! Recurrent states of all layers, in slots that the sequences' [`PageTable`](metal_attention_model::PageTable) names.

use metal_attention_model::{CacheGroups, ModelSpec, Segment, StateLayout};

use crate::kv_cache::zeroed;
use crate::shared::SharedMut;

/// A slot holds the state of a text after some tokens: that of each layer, one after the other. The first one is that of the
/// empty text: zeros.
pub(crate) struct States {
    slots: Vec<f32>,
    layout: StateLayout,
}

/// [`States`] in which several threads write, each its own part.
pub(crate) struct SharedStates<'a> {
    slots: SharedMut<'a, f32>,
    layout: &'a StateLayout,
}

impl States {
    /// Zeros for all states that `groups` have room for; none where the model keeps none. `None` when there is no memory for
    /// them.
    pub(crate) fn new(spec: &ModelSpec, groups: &CacheGroups) -> Option<Self> {
        let layout = StateLayout::new(spec);
        let n_slots = groups.states().map_or(0, |room| room.n_states + 1);
        Some(Self { slots: zeroed(n_slots.checked_mul(layout.n_elements())?)?, layout })
    }

    pub(crate) fn shared(&mut self) -> SharedStates<'_> {
        SharedStates { slots: SharedMut::new(&mut self.slots), layout: &self.layout }
    }

    pub(crate) fn bytes(&self) -> usize {
        size_of_val(self.slots.as_slice())
    }
}

impl SharedStates<'_> {
    /// The state of layer `layer` that `segment` makes of the state before it: so far that one.
    ///
    /// `part`: which elements of each row of `row` the caller works on; the others are not touched. The state's rows are to be
    /// written to there alone.
    ///
    /// # Safety
    ///
    /// Nobody else uses these elements of the two slots; segments of a sequence come one after the other.
    pub(crate) unsafe fn begin(
        &self,
        layer: usize,
        segment: &Segment,
        row: usize,
        part: &std::ops::Range<usize>,
    ) -> *mut f32 {
        let range = self.layout.of_layer(layer);
        assert!(part.start <= part.end && part.end <= row && range.len().is_multiple_of(row), "a part of whole rows");
        let at = |slot: u32| slot as usize * self.layout.n_elements() + range.start;
        if segment.from != segment.to {
            for start in (0..range.len()).step_by(row) {
                // SAFETY: as the caller vouches; the two slots differ.
                let (from, to) = unsafe {
                    let of = |slot| self.slots.slice(at(slot) + start + part.start, part.len());
                    (of(segment.from), of(segment.to))
                };
                to.copy_from_slice(from);
            }
        }
        self.slots.at(at(segment.to))
    }
}
