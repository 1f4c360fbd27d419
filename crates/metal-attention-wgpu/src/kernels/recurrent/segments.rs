//! Runs and segments: which tokens of a batch take a recurrent state from one slot to another, in the format of the
//! kernels.

use metal_attention_model::Segment;

/// The words of `segments`, which cover the tokens of a batch in order: first (number of runs, 0, 0, 0); then for each
/// run (index of its first segment in these words, number of segments, first token's row in the batch, number of
/// tokens); then for each segment (first token's row, number of tokens, slot of the state before, slot of the state
/// after).
///
/// A run is the consecutive segments of one sequence, each of which starts from the state that the one before leaves.
/// Kernels process runs in parallel, so a batch has at most one for each sequence.
///
/// # Panics
/// If a slot is not below `n_slots`, if slot 0 is written, or if a segment has no tokens: kernels use these as indices
/// unchecked.
pub fn segment_words(segments: &[Segment], n_slots: usize) -> Vec<[u32; 4]> {
    let word = |n: usize| u32::try_from(n).expect("sizes of a batch fit 32 bits");
    let follows = |a: &Segment, b: &Segment| a.seq == b.seq && a.pos + a.n == b.pos && a.to == b.from;
    let runs: Vec<&[Segment]> = segments.chunk_by(follows).collect();
    let mut words = vec![[word(runs.len()), 0, 0, 0]];
    let (mut segment, mut token) = (1 + runs.len(), 0);
    for run in &runs {
        let n_tokens = run.iter().map(|segment| segment.n).sum();
        words.push([word(segment), word(run.len()), word(token), word(n_tokens)]);
        segment += run.len();
        token += n_tokens;
    }
    let mut token = 0;
    for &Segment { seq: _, pos: _, n, from, to } in segments {
        let there = |slot: u32| (slot as usize) < n_slots;
        assert!(n > 0 && there(from) && there(to) && to > 0, "{n} tokens from slot {from} to slot {to} of {n_slots}");
        words.push([word(token), word(n), from, to]);
        token += n;
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segment(seq: usize, pos: usize, n: usize, from: u32, to: u32) -> Segment {
        Segment { seq, pos, n, from, to }
    }

    #[test]
    fn runs_are_segments_that_follow_each_other() {
        assert_eq!(segment_words(&[], 1), [[0; 4]]);
        let segments =
            [segment(2, 60, 4, 3, 5), segment(2, 64, 9, 5, 1), segment(0, 0, 1, 0, 2), segment(1, 7, 2, 4, 4)];
        let words = segment_words(&segments, 6);
        assert_eq!(words[..4], [[3, 0, 0, 0], [4, 2, 0, 13], [6, 1, 13, 1], [7, 1, 14, 2]]);
        assert_eq!(words[4..], [[0, 4, 3, 5], [4, 9, 5, 1], [13, 1, 0, 2], [14, 2, 4, 4]]);
        // A different state, or a gap between positions, begins another run.
        assert_eq!(segment_words(&[segment(0, 0, 2, 0, 1), segment(0, 2, 1, 2, 3)], 4)[0][0], 2);
        assert_eq!(segment_words(&[segment(0, 0, 2, 0, 1), segment(0, 3, 1, 1, 3)], 4)[0][0], 2);
    }

    #[test]
    fn slots_out_of_range_are_refused() {
        let refused = |s: Segment| std::panic::catch_unwind(|| segment_words(&[s], 3)).is_err();
        assert!(!refused(segment(0, 0, 1, 0, 2)));
        assert!(refused(segment(0, 0, 1, 3, 2)) && refused(segment(0, 0, 1, 0, 3)));
        assert!(refused(segment(0, 0, 1, 0, 0)) && refused(segment(0, 0, 0, 0, 1)));
    }
}
