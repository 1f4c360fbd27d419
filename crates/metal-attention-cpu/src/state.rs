//! Recurrent states of all layers, in slots that the sequences' [`PageTable`](metal_attention_model::PageTable) names.

use std::ops::Range;

use memmap2::MmapMut;
use metal_attention_model::{CacheGroups, ModelSpec, Segment, StateLayout};

use crate::kernels::recurrent::StridedRowsMut;
use crate::memory::zeros;
use crate::shared::SharedMut;

/// A slot holds the state of a text after some tokens: that of each layer, one after the other. The first one is that of the
/// empty text: zeros.
pub(crate) struct StateSlots {
    /// Anonymous memory, which the system zeroes as it comes into use; it begins with a page, and so with a cache line.
    slots: MmapMut,
    layout: StateLayout,
}

/// [`StateSlots`] in which several threads write, each its own part.
pub(crate) struct SharedStateSlots<'a> {
    slots: SharedMut<'a, f32>,
    layout: &'a StateLayout,
}

impl StateSlots {
    /// Zeros for all states that `groups` have room for; none where the model keeps none. `None` when there is no memory for
    /// them.
    pub(crate) fn new(spec: &ModelSpec, groups: &CacheGroups) -> Option<Self> {
        let layout = StateLayout::new(spec);
        let n_slots = groups.states().map_or(0, |room| room.n_states + 1);
        let n_bytes = n_slots.checked_mul(layout.n_elements())?.checked_mul(size_of::<f32>())?;
        // A step goes through much of it.
        Some(Self { slots: zeros(n_bytes)?, layout })
    }

    #[expect(clippy::cast_ptr_alignment, reason = "a mapping begins with a page")]
    pub(crate) fn shared(&mut self) -> SharedStateSlots<'_> {
        let (ptr, n) = (self.slots.as_mut_ptr().cast::<f32>(), self.slots.len() / size_of::<f32>());
        // SAFETY: the memory is that of so many floats, at the beginning of a page; any bits are one. The borrow is that of
        // the states.
        let slots = unsafe { std::slice::from_raw_parts_mut(ptr, n) };
        SharedStateSlots { slots: SharedMut::new(slots), layout: &self.layout }
    }

    pub(crate) fn bytes(&self) -> usize {
        self.slots.len()
    }

    /// Bytes of a slot.
    pub(crate) fn slot_bytes(&self) -> usize {
        self.layout.n_elements() * size_of::<f32>()
    }

    /// The bytes of a slot.
    pub(crate) fn slot(&self, slot: u32) -> &[u8] {
        &self.slots[self.of_slot(slot)]
    }

    /// Those of one that is another than the empty text's, to be written.
    pub(crate) fn slot_mut(&mut self, slot: u32) -> &mut [u8] {
        let of_slot = self.of_slot(slot);
        &mut self.slots[of_slot]
    }

    fn of_slot(&self, slot: u32) -> Range<usize> {
        slot as usize * self.slot_bytes()..(slot as usize + 1) * self.slot_bytes()
    }
}

impl SharedStateSlots<'_> {
    /// Elements `part` of the state of layer `layer` before `segment`, where they lie elsewhere than those after it, and these:
    /// to be written as a whole.
    ///
    /// # Safety
    ///
    /// Nobody else uses these elements of the two slots; segments of a sequence come one after the other.
    #[expect(clippy::mut_from_ref, reason = "each caller has its elements for itself")]
    pub(crate) unsafe fn source_and_target(
        &self,
        layer: usize,
        segment: &Segment,
        part: Range<usize>,
    ) -> (Option<&[f32]>, &mut [f32]) {
        assert!(part.start <= part.end && part.end <= self.layout.of_layer(layer).len(), "a part of the state");
        // SAFETY: as the caller vouches; the two slots differ where both are looked at.
        unsafe {
            let of = |slot| self.slots.slice(self.start(layer, slot) + part.start, part.len());
            let before = (segment.from != segment.to).then(|| &*of(segment.from));
            (before, of(segment.to))
        }
    }

    /// Elements `part` of the state of layer `layer` that `segment` makes of the state before it: so far that one's.
    ///
    /// # Safety
    ///
    /// As for [`source_and_target`](Self::source_and_target).
    #[expect(clippy::mut_from_ref, reason = "each caller has its elements for itself")]
    pub(crate) unsafe fn carry_over(&self, layer: usize, segment: &Segment, part: Range<usize>) -> &mut [f32] {
        // SAFETY: as the caller vouches.
        let (before, after) = unsafe { self.source_and_target(layer, segment, part) };
        if let Some(before) = before {
            after.copy_from_slice(before);
        }
        after
    }

    /// Columns `part` of the rows `width` long from element `first` on of the state of layer `layer` that `segment` makes of
    /// the state before it: so far that one's.
    ///
    /// # Safety
    ///
    /// As for [`source_and_target`](Self::source_and_target).
    pub(crate) unsafe fn carry_over_rows(
        &self,
        layer: usize,
        segment: &Segment,
        (first, n_rows, width): (usize, usize, usize),
        part: &Range<usize>,
    ) -> StridedRowsMut<'_> {
        assert!(part.start <= part.end && part.end <= width, "a part of the rows");
        for start in (0..n_rows).map(|row| first + row * width) {
            // SAFETY: as the caller vouches.
            unsafe { self.carry_over(layer, segment, start + part.start..start + part.end) };
        }
        let start = self.start(layer, segment.to) + first + part.start;
        // SAFETY: as the caller vouches.
        unsafe { StridedRowsMut::shared(&self.slots, start, n_rows, part.len(), width) }
    }

    /// Where the state of layer `layer` begins in a slot.
    fn start(&self, layer: usize, slot: u32) -> usize {
        slot as usize * self.layout.n_elements() + self.layout.of_layer(layer).start
    }
}
