//! Greedy decoding that does not wait for the CPU: the chosen token feeds the next step on the GPU, and the CPU reads
//! it while that step already runs.

use std::collections::VecDeque;

use metal_attention_kernels::Readback;
use metal_attention_model::{BatchToken, Phase};

/// Steps in flight while tokens are read one by one.
pub(super) const DEPTH: usize = 3;

/// Greedy steps that were submitted and not read yet, each on the tokens that the one before it chose.
#[derive(Debug, Default)]
pub(super) struct Lookahead {
    /// Where the ids of each step will arrive, oldest first.
    pub(super) in_flight: VecDeque<Readback>,
    /// Buffers to use again.
    pub(super) free: Vec<Readback>,
    /// The batch that the oldest step in flight evaluates, or, when there is none, the batch that would continue what
    /// was read last.
    next: Vec<BatchToken>,
}

impl Lookahead {
    /// Whether `batch` is what greedy decoding would evaluate next.
    pub(super) fn continues(&self, batch: &[BatchToken]) -> bool {
        !batch.is_empty() && self.next == batch
    }

    /// Notes that `batch` gave `ids`.
    pub(super) fn advance(&mut self, batch: &[BatchToken], ids: &[u32]) {
        self.next.clear();
        self.next.extend(batch.iter().zip(ids).map(|(t, &id)| BatchToken { id, pos: t.pos + 1, ..*t }));
    }

    /// Forgets every step in flight: the text goes on otherwise.
    pub(super) fn clear(&mut self) {
        self.next.clear();
        for mut readback in self.in_flight.drain(..) {
            readback.forget();
            self.free.push(readback);
        }
    }
}

/// Whether steps after `batch` can be queued: one token of each sequence, each with its choice wanted.
pub(super) fn is_decode(batch: &[BatchToken]) -> bool {
    batch.iter().all(|t| t.logits) && Phase::of(batch) == Phase::Decode
}
