//! What recurrent layers do with a batch, made fit for kernels that go through all runs at the same time.

use metal_attention_model::{BatchToken, Segment};

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
