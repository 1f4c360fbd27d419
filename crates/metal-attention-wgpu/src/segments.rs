//! Segments of a batch for profiles, which evaluate the same batch several times.

use metal_attention_model::Segment;

fn follow_each_other(a: &Segment, b: &Segment) -> bool {
    a.seq == b.seq && a.pos + a.n == b.pos
}

/// `segments` changed so that evaluating them repeatedly starts from the same states each time: all segments of a run
/// write to its last slot, which none of them reads. Each sequence has one run.
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

    /// Two runs. The first has three segments, of which the second reads and writes the same slot.
    const SOME: [Segment; 4] =
        [segment(2, 60, 4, 3, 4), segment(2, 64, 9, 4, 4), segment(2, 73, 1, 4, 5), segment(0, 0, 1, 0, 6)];

    #[test]
    fn repeated_segments_read_no_slot_that_they_write() {
        let slots: Vec<_> = repeatable(&SOME).iter().map(|segment| (segment.from, segment.to)).collect();
        assert_eq!(slots, [(3, 5), (4, 5), (4, 5), (0, 6)]);
    }
}
