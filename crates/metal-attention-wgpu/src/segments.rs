//! What recurrent layers do with a batch, made fit for kernels that go through all runs at the same time.

use metal_attention_model::Segment;

fn follow_each_other(a: &Segment, b: &Segment) -> bool {
    a.seq == b.seq && a.pos + a.n == b.pos
}

/// `segments` that can be gone through again and again: what a run writes goes to the last of its slots, from which none
/// begins. Each sequence has one run.
pub(super) fn repeatable(segments: &[Segment]) -> Vec<Segment> {
    let runs = segments.chunk_by(follow_each_other);
    runs.flat_map(|run| run.iter().map(|segment| Segment { to: run[run.len() - 1].to, ..*segment })).collect()
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
}
