//! Recurrent states in the device's memory, in slots that the sequences' [`PageTable`](metal_attention_model::PageTable) names,
//! and what a step does with them.

use std::sync::Arc;

use metal_attention_model::{CacheGroups, ModelSpec, Segment, StateLayout};

use crate::CudaError;
use crate::args::{RunsArgs, StatesArgs};
use crate::device::{CudaBuffer, CudaDevice};

/// The states of every layer that keeps some, in slots. A slot holds the state of a text after some tokens; the first one is
/// that of the empty text: zeros, which nobody writes to.
#[derive(Debug)]
pub(crate) struct CudaRecurrentStates {
    /// Those of each layer, F32 `[n_slots, elements]`, where it keeps some.
    layers: Vec<Option<(CudaBuffer, usize)>>,
    /// What the next step does with them: the runs of its batch and their segments, as `Runs` of `recurrence.cuh` has them.
    runs: CudaBuffer,
    segments: CudaBuffer,
    n_slots: usize,
}

/// The runs of a batch: of each sequence the tokens that follow each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct RunSizes {
    /// How many there are.
    pub(crate) n: usize,
    /// Tokens of the longest.
    pub(crate) longest: usize,
}

impl RunSizes {
    /// A token each of `n` sequences.
    pub(crate) fn of_decode(n: usize) -> Self {
        Self { n, longest: 1 }
    }
}

impl CudaRecurrentStates {
    /// Zeros for all states that `groups` have room for, and room for the segments of `n_tokens` tokens.
    pub(crate) fn new(
        gpu: &Arc<CudaDevice>,
        spec: &ModelSpec,
        groups: &CacheGroups,
        n_tokens: usize,
    ) -> Result<Self, CudaError> {
        let layout = StateLayout::new(spec);
        let n_slots = groups.states().map_or(0, |room| room.n_states + 1);
        let layers = (0..spec.n_layer()).map(|i| {
            let n = layout.of_layer(i).len();
            let bytes = (n as u64).saturating_mul(4).saturating_mul(n_slots as u64);
            if bytes == 0 { Ok(None) } else { Ok(Some((gpu.zeros("the recurrent states", bytes)?, n))) }
        });
        let layers = layers.collect::<Result<_, CudaError>>()?;
        let room = if n_slots == 0 { 0 } else { 16 * n_tokens as u64 };
        let words = || gpu.zeros("the segments of a batch", room);
        Ok(Self { layers, runs: words()?, segments: words()?, n_slots })
    }

    /// Whether no layer keeps any.
    pub(crate) fn is_empty(&self) -> bool {
        self.n_slots == 0
    }

    /// Those of layer `i`, which keeps some, from element `first` of each on.
    pub(crate) fn of_layer(&self, i: usize, first: usize) -> StatesArgs {
        let (states, stride) = self.layers[i].as_ref().expect("a layer that keeps states has room for them");
        StatesArgs { states: states.ptr(), stride: *stride as u32, first: first as u32 }
    }

    /// What the next step does with them.
    pub(crate) fn runs(&self) -> RunsArgs {
        RunsArgs { runs: self.runs.ptr(), segments: self.segments.ptr() }
    }

    /// Makes `segments`, those of a batch in the order of its tokens, what the next step does with the states.
    ///
    /// # Panics
    /// Where a slot is not there, or is written as slot 0, or a segment has no tokens: kernels index by these.
    pub(crate) fn write(&self, segments: &[Segment]) -> Result<RunSizes, CudaError> {
        let (runs, words) = words_of(segments, self.n_slots);
        if !self.is_empty() {
            self.runs.write(0, bytemuck::cast_slice(&runs))?;
            self.segments.write(0, bytemuck::cast_slice(&words))?;
        }
        Ok(RunSizes { n: runs.len(), longest: runs.iter().map(|run| run[1] as usize).max().unwrap_or(0) })
    }

    /// Where the state in a slot lies, layer by layer: buffers, bytes before it, and its bytes.
    pub(crate) fn slot_parts(&self, slot: u32) -> impl Iterator<Item = (&CudaBuffer, u64, u64)> {
        let bytes = |n: usize| 4 * n as u64;
        self.layers.iter().flatten().map(move |(states, n)| (states, u64::from(slot) * bytes(*n), bytes(*n)))
    }

    /// Bytes of a slot, over all layers.
    pub(crate) fn slot_bytes(&self) -> u64 {
        self.layers.iter().flatten().map(|(_, n)| 4 * *n as u64).sum()
    }

    /// Bytes of all of them.
    pub(crate) fn bytes(&self) -> u64 {
        self.layers.iter().flatten().map(|(states, _)| states.bytes()).sum()
    }
}

/// The words of runs and segments. A run is segments of one sequence that follow each other, each from the state that the one
/// before leaves: (first token, tokens, first segment, segments). A segment: (first token, tokens, slot before, slot after).
fn words_of(segments: &[Segment], n_slots: usize) -> (Vec<[u32; 4]>, Vec<[u32; 4]>) {
    let word = |n: usize| u32::try_from(n).expect("sizes of a batch fit 32 bits");
    let (mut runs, mut words) = (Vec::new(), Vec::new());
    let mut token = 0;
    for run in segments.chunk_by(|a, b| a.seq == b.seq && a.pos + a.n == b.pos && a.to == b.from) {
        let n_tokens = run.iter().map(|segment| segment.n).sum();
        runs.push([word(token), word(n_tokens), word(words.len()), word(run.len())]);
        for &Segment { seq: _, pos: _, n, from, to } in run {
            let there = |slot: u32| (slot as usize) < n_slots;
            assert!(
                n > 0 && there(from) && there(to) && to > 0,
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
    fn runs_are_segments_that_follow_each_other() {
        let segments =
            [segment(2, 60, 4, 3, 5), segment(2, 64, 9, 5, 1), segment(0, 0, 1, 0, 2), segment(1, 7, 2, 4, 4)];
        let (runs, words) = words_of(&segments, 6);
        assert_eq!(runs, [[0, 13, 0, 2], [13, 1, 2, 1], [14, 2, 3, 1]]);
        assert_eq!(words, [[0, 4, 3, 5], [4, 9, 5, 1], [13, 1, 0, 2], [14, 2, 4, 4]]);
        assert_eq!(words_of(&[segment(0, 0, 2, 0, 1), segment(0, 2, 1, 2, 3)], 4).0.len(), 2, "another state");
    }

    #[test]
    fn slots_that_are_not_there_are_refused() {
        let refused = |s: Segment| std::panic::catch_unwind(|| words_of(&[s], 3)).is_err();
        assert!(!refused(segment(0, 0, 1, 0, 2)));
        assert!(refused(segment(0, 0, 1, 0, 3)) && refused(segment(0, 0, 1, 1, 0)) && refused(segment(0, 0, 0, 0, 1)));
    }
}
