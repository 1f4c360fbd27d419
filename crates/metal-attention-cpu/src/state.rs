//! The recurrent states of all layers, in slots.
//!
//! A state slot contains the state of one sequence at one position: F32 elements of every layer, one layer after the other. The
//! [`PageTable`](metal_attention_model::PageTable) assigns slots to sequences. A *segment* is the part of one sequence in a
//! micro-batch: its tokens are computed from the state in slot `from`, and the state after them goes to slot `to`. The two are
//! the same slot where the old state is not kept.

use std::ops::Range;

use memmap2::MmapMut;
use metal_attention_model::{CacheGroups, ModelSpec, Segment, StateLayout};

use crate::kernels::recurrent::StridedRowsMut;
use crate::memory::zeros;
use crate::shared::SharedMut;

/// All state slots. Slot 0 contains zeros, the state of an empty sequence, and is never written.
pub(crate) struct StateSlots {
    /// Anonymous memory, which the system zeroes on first use. It begins at a page boundary, so the first slot is aligned to
    /// cache lines.
    slots: MmapMut,
    /// Where the state of each layer lies in a slot.
    layout: StateLayout,
}

/// [`StateSlots`] that several threads write to, each to other elements.
pub(crate) struct SharedStateSlots<'a> {
    slots: SharedMut<'a, f32>,
    layout: &'a StateLayout,
}

impl StateSlots {
    /// Allocates as many slots as `groups` has states, and slot 0; no slots for a model without recurrent states. `None` when
    /// there is not enough memory.
    pub(crate) fn new(spec: &ModelSpec, groups: &CacheGroups) -> Option<Self> {
        let layout = StateLayout::new(spec);
        let n_slots = groups.states().map_or(0, |states| states.n_states + 1);
        let n_bytes = n_slots.checked_mul(layout.n_elements())?.checked_mul(size_of::<f32>())?;
        Some(Self { slots: zeros(n_bytes)?, layout })
    }

    /// The slots for a forward pass on several threads.
    #[expect(clippy::cast_ptr_alignment, reason = "a mapping begins with a page")]
    pub(crate) fn shared(&mut self) -> SharedStateSlots<'_> {
        let (ptr, n) = (self.slots.as_mut_ptr().cast::<f32>(), self.slots.len() / size_of::<f32>());
        // SAFETY: the mapping is `n` floats long and aligned to a page; any bits are a valid float. The slice borrows `self`.
        let slots = unsafe { std::slice::from_raw_parts_mut(ptr, n) };
        SharedStateSlots { slots: SharedMut::new(slots), layout: &self.layout }
    }

    /// Bytes of all slots.
    pub(crate) fn bytes(&self) -> usize {
        self.slots.len()
    }

    /// Bytes of one slot.
    pub(crate) fn slot_bytes(&self) -> usize {
        self.layout.n_elements() * size_of::<f32>()
    }

    /// The contents of a slot.
    pub(crate) fn slot(&self, slot: u32) -> &[u8] {
        &self.slots[self.of_slot(slot)]
    }

    /// The contents of a slot other than slot 0, for writing.
    pub(crate) fn slot_mut(&mut self, slot: u32) -> &mut [u8] {
        let of_slot = self.of_slot(slot);
        &mut self.slots[of_slot]
    }

    /// The byte range of a slot.
    fn of_slot(&self, slot: u32) -> Range<usize> {
        slot as usize * self.slot_bytes()..(slot as usize + 1) * self.slot_bytes()
    }
}

impl SharedStateSlots<'_> {
    /// Elements `part` of the state of layer `layer`, before and after `segment`. The first result is the state before; `None`
    /// where `from` and `to` are the same slot, so that the second result contains it. The second result is the state after,
    /// all of which the caller has to write.
    ///
    /// # Safety
    ///
    /// No other thread accesses these elements of the two slots, and the segments of a sequence are processed in order.
    #[expect(clippy::mut_from_ref, reason = "each caller has its elements for itself")]
    pub(crate) unsafe fn source_and_target(
        &self,
        layer: usize,
        segment: &Segment,
        part: Range<usize>,
    ) -> (Option<&[f32]>, &mut [f32]) {
        assert!(part.start <= part.end && part.end <= self.layout.of_layer(layer).len(), "a part of the state");
        // SAFETY: as the caller vouches; where both slots are borrowed they are different ones.
        unsafe {
            let of = |slot| self.slots.slice(self.start(layer, slot) + part.start, part.len());
            let before = (segment.from != segment.to).then(|| &*of(segment.from));
            (before, of(segment.to))
        }
    }

    /// Elements `part` of the state of layer `layer` in the slot that `segment` writes. They contain the state before the
    /// segment, copied where it is in another slot, and are updated in place.
    ///
    /// # Safety
    ///
    /// See [`source_and_target`](Self::source_and_target).
    #[expect(clippy::mut_from_ref, reason = "each caller has its elements for itself")]
    pub(crate) unsafe fn carry_over(&self, layer: usize, segment: &Segment, part: Range<usize>) -> &mut [f32] {
        // SAFETY: as the caller vouches.
        let (before, after) = unsafe { self.source_and_target(layer, segment, part) };
        if let Some(before) = before {
            after.copy_from_slice(before);
        }
        after
    }

    /// [`carry_over`](Self::carry_over) of columns `part` of a matrix in the state: `n_rows` rows of `width` elements, which
    /// begins at element `first` of the layer's state.
    ///
    /// # Safety
    ///
    /// See [`source_and_target`](Self::source_and_target).
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

    /// The index of the first element of layer `layer` in slot `slot`.
    fn start(&self, layer: usize, slot: u32) -> usize {
        slot as usize * self.layout.n_elements() + self.layout.of_layer(layer).start
    }
}
