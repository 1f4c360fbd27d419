//! What recurrent layers do with a batch, as the kernels read it.

use metal_attention_model::{BatchToken, Segment};

/// The words of `segments` for kernels of recurrent layers. Segments that follow each other in a sequence are a *run*. First
/// `[n_runs, 0, 0, 0]`; then of each run `[first segment, as an index of these words, segments, first token in the batch,
/// tokens]`; then of each segment `[first token in the batch, tokens, slot of the state before, slot of that after]`.
pub fn segment_words(segments: &[Segment]) -> Vec<[u32; 4]> {
    let runs = || segments.chunk_by(follow_each_other);
    let mut words = vec![[runs().count() as u32, 0, 0, 0]];
    let (mut at, mut row) = (1 + words[0][0], 0);
    for run in runs() {
        let n_tokens = run.iter().map(|segment| segment.n as u32).sum();
        words.push([at, run.len() as u32, row, n_tokens]);
        at += run.len() as u32;
        row += n_tokens;
    }
    let mut row = 0;
    words.extend(segments.iter().map(|&Segment { n, from, to, .. }| {
        row += n as u32;
        [row - n as u32, n as u32, from, to]
    }));
    words
}

fn follow_each_other(a: &Segment, b: &Segment) -> bool {
    a.seq == b.seq && a.pos + a.n == b.pos
}

/// `segments` that can be gone through again and again: what a run writes goes to the last of its slots, from which none
/// begins. Each sequence has one run.
pub(super) fn repeatable(segments: &[Segment]) -> Vec<Segment> {
    let runs = segments.chunk_by(follow_each_other);
    runs.flat_map(|run| run.iter().map(|segment| Segment { to: run[run.len() - 1].to, ..*segment })).collect()
}

/// Cuts a batch where a sequence comes back: kernels go through all runs at the same time.
pub(super) fn one_run_of_each(batch: &[BatchToken]) -> Vec<&[BatchToken]> {
    let mut parts = Vec::new();
    let (mut start, mut seen) = (0, std::collections::HashSet::new());
    let mut at = 0;
    for run in batch.chunk_by(|a, b| a.seq == b.seq) {
        if !seen.insert(run[0].seq) {
            parts.push(&batch[start..at]);
            start = at;
            seen = std::collections::HashSet::from([run[0].seq]);
        }
        at += run.len();
    }
    parts.push(&batch[start..]);
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn segment(seq: usize, pos: usize, n: usize, from: u32, to: u32) -> Segment {
        Segment { seq, pos, n, from, to }
    }

    /// Two runs, the first in three segments, of which the second works in place.
    const SOME: [Segment; 4] =
        [segment(2, 60, 4, 3, 4), segment(2, 64, 9, 4, 4), segment(2, 73, 1, 4, 5), segment(0, 0, 1, 0, 6)];

    #[test]
    fn runs_come_before_their_segments() {
        let runs = [[2, 0, 0, 0], [3, 3, 0, 14], [6, 1, 14, 1]];
        let segments = [[0, 4, 3, 4], [4, 9, 4, 4], [13, 1, 4, 5], [14, 1, 0, 6]];
        assert_eq!(segment_words(&SOME), [&runs[..], &segments[..]].concat());
        assert_eq!(segment_words(&[]), [[0; 4]]);
    }

    #[test]
    fn what_is_gone_through_again_reads_nothing_it_wrote() {
        let slots: Vec<_> = repeatable(&SOME).iter().map(|segment| (segment.from, segment.to)).collect();
        assert_eq!(slots, [(3, 5), (4, 5), (4, 5), (0, 6)]);
    }

    #[test]
    fn a_sequence_comes_once_in_a_part() {
        let token = |seq| BatchToken { id: 0, seq, pos: 0, logits: false };
        let batch: Vec<_> = [0, 0, 1, 2, 1, 1, 2, 2, 2, 1].map(token).into();
        let lengths: Vec<_> = one_run_of_each(&batch).iter().map(|part| part.len()).collect();
        assert_eq!(lengths, [4, 5, 1]);
        assert_eq!(one_run_of_each(&batch[..2]).len(), 1);
    }
}
