//! Runs: the consecutive tokens of one sequence in a batch, a prefill chunk or a decode token. Recurrent layers process
//! each run in order.

use std::collections::HashSet;

use crate::BatchToken;

/// Divides a batch so that in each part every sequence has one run: tokens that follow each other. Kernels of recurrent
/// layers process all runs of a part at the same time.
pub fn one_run_per_sequence(batch: &[BatchToken]) -> Vec<&[BatchToken]> {
    let mut parts = Vec::new();
    let (mut start, mut seen) = (0, HashSet::new());
    let mut at = 0;
    for run in batch.chunk_by(|a, b| a.seq == b.seq) {
        if !seen.insert(run[0].seq) {
            parts.push(&batch[start..at]);
            start = at;
            seen = HashSet::from([run[0].seq]);
        }
        at += run.len();
    }
    parts.push(&batch[start..]);
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sequence_comes_once_in_a_part() {
        let token = |seq| BatchToken { id: 0, seq, pos: 0, output: false };
        let batch: Vec<_> = [0, 0, 1, 2, 1, 1, 2, 2, 2, 1].map(token).into();
        let lengths: Vec<_> = one_run_per_sequence(&batch).iter().map(|part| part.len()).collect();
        assert_eq!(lengths, [4, 5, 1]);
        assert_eq!(one_run_per_sequence(&batch[..2]).len(), 1);
    }
}
