//! [`CudaRecurrentStates`]: the recurrent states of sequences in device memory, and the plan by which kernels update them.
//!
//! States lie in state slots, one slot for the state of one sequence after some number of its tokens; the host assigns slots
//! ([`PageTable`](metal_attention_model::PageTable)). Each layer with a recurrent mixer has a buffer F32 `[n_slots, elements]`.
//!
//! A run is the consecutive tokens of one sequence in a micro-batch; kernels process all runs in parallel. A run consists of
//! segments: each starts from the state in one slot and leaves the state after its last token in another one, so that a
//! sequence can be taken back to that point later.

use std::sync::Arc;

use metal_attention_model::{CacheGroups, ModelSpec, Segment, StateLayout};

use crate::CudaError;
use crate::args::{RunsArgs, StatesArgs};
use crate::device::{CudaBuffer, CudaDevice};

/// The recurrent states of all layers. Slot 0 is the state of a sequence without tokens; it is zero and never written.
#[derive(Debug)]
pub(crate) struct CudaRecurrentStates {
    /// For each layer, its states `[n_slots, elements]` and the number of elements; `None` for a layer without state.
    layers: Vec<Option<(CudaBuffer, usize)>>,
    /// The runs of the next micro-batch, u32 `[n_runs, 4]`: first token, tokens, first segment, segments (`Runs` of
    /// `recurrence.cuh`).
    runs: CudaBuffer,
    /// Its segments, u32 `[n_segments, 4]`: first token, tokens, slot to read, slot to write.
    segments: CudaBuffer,
    /// State slots, with slot 0; 0 if no layer has a state.
    n_slots: usize,
}

/// The sizes of the runs of a micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct RunSizes {
    /// The number of runs.
    pub(crate) n: usize,
    /// The tokens of the longest run.
    pub(crate) longest: usize,
}

impl RunSizes {
    /// The runs of a decode step: one token of each of `n` sequences.
    pub(crate) fn of_decode(n: usize) -> Self {
        Self { n, longest: 1 }
    }
}

impl CudaRecurrentStates {
    /// Allocates zeroed states with the slots of `groups`, and buffers for the runs and segments of micro-batches of up to
    /// `n_tokens` tokens.
    pub(crate) fn new(
        gpu: &Arc<CudaDevice>,
        spec: &ModelSpec,
        groups: &CacheGroups,
        n_tokens: usize,
    ) -> Result<Self, CudaError> {
        let layout = StateLayout::new(spec);
        let n_slots = groups.states().map_or(0, |states| states.n_states + 1);
        let layers = (0..spec.n_layer()).map(|i| {
            let n = layout.of_layer(i).len();
            let bytes = (n as u64).saturating_mul(4).saturating_mul(n_slots as u64);
            if bytes == 0 { Ok(None) } else { Ok(Some((gpu.zeros("the recurrent states", bytes)?, n))) }
        });
        let layers = layers.collect::<Result<_, CudaError>>()?;
        let bytes = if n_slots == 0 { 0 } else { 16 * n_tokens as u64 };
        let words = || gpu.zeros("the segments of a batch", bytes);
        Ok(Self { layers, runs: words()?, segments: words()?, n_slots })
    }

    /// The states of a single layer, `[n_slots, n]`, for tests of kernels.
    #[cfg(test)]
    pub(crate) fn of_one_layer(
        gpu: &Arc<CudaDevice>,
        states: &[f32],
        n: usize,
        n_tokens: usize,
    ) -> Result<Self, CudaError> {
        let words = || gpu.zeros("the segments of a batch", 16 * n_tokens as u64);
        let layers = vec![Some((gpu.upload("the recurrent states", states)?, n))];
        Ok(Self { layers, runs: words()?, segments: words()?, n_slots: states.len() / n })
    }

    /// Whether no layer has a state.
    pub(crate) fn is_empty(&self) -> bool {
        self.n_slots == 0
    }

    /// The states of layer `i`, from element `first` of each on.
    ///
    /// # Panics
    /// If layer `i` has no state.
    pub(crate) fn of_layer(&self, i: usize, first: usize) -> StatesArgs {
        let (states, stride) = self.layers[i].as_ref().expect("a layer that keeps states has room for them");
        StatesArgs { states: states.ptr(), stride: *stride as u32, first: first as u32 }
    }

    /// The addresses of the runs and segments that [`write`](Self::write) has uploaded.
    pub(crate) fn runs(&self) -> RunsArgs {
        RunsArgs { runs: self.runs.ptr(), segments: self.segments.ptr() }
    }

    /// Uploads the runs of the next micro-batch. `segments` are its segments in the order of its tokens.
    ///
    /// # Panics
    /// If a slot is out of range, slot 0 would be written, or a segment has no tokens: kernels use these as indices unchecked.
    pub(crate) fn write(&self, segments: &[Segment]) -> Result<RunSizes, CudaError> {
        let (runs, words) = words_of(segments, self.n_slots);
        if !self.is_empty() {
            self.runs.write(0, bytemuck::cast_slice(&runs))?;
            self.segments.write(0, bytemuck::cast_slice(&words))?;
        }
        Ok(RunSizes { n: runs.len(), longest: runs.iter().map(|run| run[1] as usize).max().unwrap_or(0) })
    }

    /// The parts of a state slot, layer by layer: buffer, offset in bytes, and length in bytes.
    pub(crate) fn slot_parts(&self, slot: u32) -> impl Iterator<Item = (&CudaBuffer, u64, u64)> {
        let bytes = |n: usize| 4 * n as u64;
        self.layers.iter().flatten().map(move |(states, n)| (states, u64::from(slot) * bytes(*n), bytes(*n)))
    }

    /// Bytes of a slot, over all layers.
    pub(crate) fn slot_bytes(&self) -> u64 {
        self.layers.iter().flatten().map(|(_, n)| 4 * *n as u64).sum()
    }

    /// Bytes of all slots of all layers.
    pub(crate) fn bytes(&self) -> u64 {
        self.layers.iter().flatten().map(|(states, _)| states.bytes()).sum()
    }
}

/// The runs and the segments as kernels read them (see [`CudaRecurrentStates`]). A run is a maximal sequence of segments of one
/// sequence, each of which starts at the position and from the slot where the one before ends.
fn words_of(segments: &[Segment], n_slots: usize) -> (Vec<[u32; 4]>, Vec<[u32; 4]>) {
    let word = |n: usize| u32::try_from(n).expect("sizes of a batch fit 32 bits");
    let (mut runs, mut words) = (Vec::new(), Vec::new());
    let mut token = 0;
    for run in segments.chunk_by(|a, b| a.seq == b.seq && a.pos + a.n == b.pos && a.to == b.from) {
        let n_tokens = run.iter().map(|segment| segment.n).sum();
        runs.push([word(token), word(n_tokens), word(words.len()), word(run.len())]);
        for &Segment { seq: _, pos: _, n, from, to } in run {
            let in_range = |slot: u32| (slot as usize) < n_slots;
            assert!(
                n > 0 && in_range(from) && in_range(to) && to > 0,
                "{n} tokens from slot {from} to slot {to} of {n_slots}"
            );
            words.push([word(token), word(n), from, to]);
            token += n;
        }
    }
    (runs, words)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segment(seq: usize, pos: usize, n: usize, from: u32, to: u32) -> Segment {
        Segment { seq, pos, n, from, to }
    }

    #[test]
    fn consecutive_segments_of_a_sequence_are_one_run() {
        let segments =
            [segment(2, 60, 4, 3, 5), segment(2, 64, 9, 5, 1), segment(0, 0, 1, 0, 2), segment(1, 7, 2, 4, 4)];
        let (runs, words) = words_of(&segments, 6);
        assert_eq!(runs, [[0, 13, 0, 2], [13, 1, 2, 1], [14, 2, 3, 1]]);
        assert_eq!(words, [[0, 4, 3, 5], [4, 9, 5, 1], [13, 1, 0, 2], [14, 2, 4, 4]]);
        assert_eq!(words_of(&[segment(0, 0, 2, 0, 1), segment(0, 2, 1, 2, 3)], 4).0.len(), 2, "another slot");
    }

    #[test]
    fn slots_out_of_range_are_refused() {
        let refused = |s: Segment| std::panic::catch_unwind(|| words_of(&[s], 3)).is_err();
        assert!(!refused(segment(0, 0, 1, 0, 2)));
        assert!(refused(segment(0, 0, 1, 0, 3)) && refused(segment(0, 0, 1, 1, 0)) && refused(segment(0, 0, 0, 0, 1)));
    }
}
