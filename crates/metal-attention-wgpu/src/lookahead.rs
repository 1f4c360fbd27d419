//! Greedy decoding that does not wait for the CPU: the chosen token feeds the next step on the GPU, and the CPU reads
//! it while that step already runs.

use std::collections::VecDeque;

use crate::{GpuError, Readback};
use metal_attention_model::{BatchToken, ForwardError, Phase};

use super::forward_pass::{GpuForwardPass, Output, STATE};

/// Steps in flight while tokens are read one by one.
const DEPTH: usize = 3;

/// Greedy steps that were submitted and not read yet, each on the tokens that the one before it chose.
#[derive(Debug, Default)]
pub(super) struct Lookahead {
    /// Where the ids of each step will arrive, oldest first.
    in_flight: VecDeque<Readback>,
    /// Buffers to use again.
    free: Vec<Readback>,
    /// The batch that the oldest step in flight evaluates, or, when there is none, the batch that would continue what
    /// was read last.
    next: Vec<BatchToken>,
}

impl Lookahead {
    /// Whether `batch` is what greedy decoding would evaluate next.
    fn continues(&self, batch: &[BatchToken]) -> bool {
        !batch.is_empty() && self.next == batch
    }

    /// Notes that `batch` gave `ids`.
    pub(super) fn advance(&mut self, batch: &[BatchToken], ids: &[u32]) {
        self.next.clear();
        self.next.extend(batch.iter().zip(ids).map(|(t, &id)| BatchToken { id, pos: t.pos + 1, ..*t }));
    }

    /// Forgets every step in flight: the text goes on otherwise.
    fn clear(&mut self) {
        self.next.clear();
        for mut readback in self.in_flight.drain(..) {
            readback.forget();
            self.free.push(readback);
        }
    }
}

impl GpuForwardPass {
    /// One greedy step of sequences that each go on by one token, and the steps that are expected to follow it. On an error
    /// the cache is as it was.
    pub(super) fn decode_greedy(&mut self, batch: &[BatchToken]) -> Result<Vec<u32>, ForwardError> {
        let continues = self.lookahead.continues(batch);
        if !continues {
            self.clear_lookahead();
        }
        // Where a step is in flight, this takes the pages that were reserved for it.
        self.cache.append(&self.gpu, batch, self.spec.n_vocab)?;
        let outcome = self.decode(batch, continues);
        if outcome.is_err() {
            self.clear_lookahead();
            self.cache.pages.retract(batch);
        }
        Ok(outcome?)
    }

    /// The step over a batch that has its pages; the steps after it are submitted where `continues`.
    fn decode(&mut self, batch: &[BatchToken], continues: bool) -> Result<Vec<u32>, GpuError> {
        self.gpu.check()?;
        if self.lookahead.in_flight.is_empty() {
            self.write_batch(batch);
            self.submit_decode(batch, 0)?;
        }
        // A caller that gives back what it was given will do so again.
        while continues && self.lookahead.in_flight.len() < DEPTH {
            let ahead = self.lookahead.in_flight.len();
            if !self.cache.pages.reserve(batch, ahead) {
                break;
            }
            self.submit_decode(batch, ahead)?;
        }
        let mut readback = self.lookahead.in_flight.pop_front().expect("at least one step was submitted");
        let bytes = 4 * batch.len() as u64 + STATE;
        let mut ids = readback.read(&self.gpu, bytes, bytemuck::pod_collect_to_vec::<u8, u32>)?;
        let given_up = ids.pop() != Some(0) && self.at_once.is_some() && batch.len() == 1;
        self.lookahead.free.push(readback);
        if given_up {
            self.leave_at_once();
            return self.decode(batch, continues);
        }
        self.gpu.watch().advance((batch.len() * self.spec.n_layer()) as u64);
        self.lookahead.advance(batch, &ids);
        Ok(ids)
    }

    /// Submits the greedy step `ahead` tokens after `batch`.
    fn submit_decode(&mut self, batch: &[BatchToken], ahead: usize) -> Result<(), GpuError> {
        let bytes = 4 * batch.len() as u64;
        let mut readback = match self.lookahead.free.pop().filter(|r| r.bytes() >= bytes + STATE) {
            Some(readback) => readback,
            None => Readback::new(&self.gpu, bytes + STATE)?,
        };
        self.write_pages(batch);
        let mut encoder = self.record(self.step_of(batch, ahead, Output::Id), false);
        readback.copy(&mut encoder, &self.ids, bytes);
        if let Some(gave_up) = &self.at_once {
            readback.copy_after(&mut encoder, gave_up, 0..4, bytes);
        }
        readback.map(self.gpu.submit(encoder));
        self.lookahead.in_flight.push_back(readback);
        Ok(())
    }

    /// Forgets every step in flight, and gives the pages back that these reserved.
    pub(super) fn clear_lookahead(&mut self) {
        self.lookahead.clear();
        self.cache.pages.release();
    }

    /// Forgets every step in flight where they go on with sequence `seq`, which is about to become another.
    pub(super) fn stop_lookahead_of(&mut self, seq: usize) {
        if self.lookahead.next.iter().any(|token| token.seq == seq) {
            self.clear_lookahead();
        }
    }

    /// Goes back to layers dispatched one by one, after a workgroup gave up waiting for another.
    pub(super) fn leave_at_once(&mut self) {
        tracing::warn!(
            "the GPU did not run all workgroups side by side: decode goes on with a dispatch for each kernel"
        );
        self.clear_lookahead();
        self.prepared = None;
        self.one.layers_at_once = None;
        self.at_once = None;
    }
}

/// Whether steps after `batch` can be queued: one token of each sequence, each with its choice wanted.
pub(super) fn is_decode(batch: &[BatchToken]) -> bool {
    batch.iter().all(|t| t.logits) && Phase::of(batch) == Phase::Decode
}
