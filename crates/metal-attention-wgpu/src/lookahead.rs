//! Greedy decode steps that are submitted ahead of the CPU. Argmax on the GPU writes the chosen ids into the batch
//! buffer, so that the next step can start before the CPU has read them. The CPU reads the ids of each step from a
//! readback buffer of its own.

use metal_attention_model::{BatchToken, ForwardError};

use crate::forward_pass::{FLAG_BYTES, ResultKind, WgpuForwardPass};
use crate::{Readback, WgpuError};

impl WgpuForwardPass {
    /// One greedy decode step of sequences with one token each; returns their next ids. Also submits the steps that are
    /// expected to follow. After an error the page tables are as before, and no step is in flight.
    pub(super) fn decode_greedy(&mut self, batch: &[BatchToken]) -> Result<Vec<u32>, ForwardError> {
        self.adopt_compiled_layers();
        if !self.lookahead.continues(batch) {
            self.clear_lookahead();
        }
        // If a step is in flight for this batch, these calls use the pages and state slots that were reserved for it.
        self.cache.pages.check(batch, self.spec.n_vocab)?;
        self.cache.pages.begin_batch(batch);
        self.cache.append(&self.gpu, batch);
        let outcome = self.decode(batch);
        if outcome.is_err() {
            self.clear_lookahead();
            self.cache.pages.retract(batch);
        }
        Ok(outcome?)
    }

    /// Submits the step over `batch`, whose pages are reserved, unless it is in flight; then the steps ahead of it;
    /// then reads its ids. If the persistent kernel timed out, the step is evaluated again without it.
    fn decode(&mut self, batch: &[BatchToken]) -> Result<Vec<u32>, WgpuError> {
        self.gpu.check()?;
        while let Some(steps) = self.lookahead.steps_to_submit(batch, &mut self.cache.pages, 1) {
            if steps.start == 0 {
                self.write_batch(batch);
            }
            self.submit_decode(batch, steps.start)?;
        }
        let mut readback = self.lookahead.pop().expect("at least one step was submitted");
        let bytes = 4 * batch.len() as u64 + FLAG_BYTES;
        let mut ids = readback.read(&self.gpu, bytes, bytemuck::pod_collect_to_vec::<u8, u32>)?;
        let timed_out = ids.pop() != Some(0) && self.persistent_timed_out.is_some() && batch.len() == 1;
        self.free.push(readback);
        if timed_out {
            self.disable_persistent_layers();
            return self.decode(batch);
        }
        self.gpu.watch().advance((batch.len() * self.spec.n_layer()) as u64);
        self.lookahead.advance(batch, &ids);
        Ok(ids)
    }

    /// Submits the greedy decode step that is `ahead` tokens after `batch`, without waiting for it.
    fn submit_decode(&mut self, batch: &[BatchToken], ahead: usize) -> Result<(), WgpuError> {
        let bytes = 4 * batch.len() as u64;
        let mut readback = match self.free.pop().filter(|r| r.bytes() >= bytes + FLAG_BYTES) {
            Some(readback) => readback,
            None => Readback::new(&self.gpu, bytes + FLAG_BYTES)?,
        };
        self.write_pages(batch);
        self.states.write(&self.gpu, &self.cache.pages.segments_ahead(batch, ahead));
        let mut encoder = self.record(self.batch_shape(batch, ahead, ResultKind::Id), false);
        readback.copy(&mut encoder, &self.ids, bytes);
        if let Some(timed_out) = &self.persistent_timed_out {
            readback.copy_after(&mut encoder, timed_out, 0..4, bytes);
        }
        readback.map(self.gpu.submit(encoder));
        self.lookahead.push(readback);
        Ok(())
    }

    /// Drops all steps in flight, and frees the pages and state slots that were reserved for them.
    pub(super) fn clear_lookahead(&mut self) {
        for mut readback in self.lookahead.forget(&mut self.cache.pages) {
            readback.forget();
            self.free.push(readback);
        }
    }

    /// Drops the steps in flight if they extend sequence `seq`, which is about to be changed.
    pub(super) fn stop_lookahead_of(&mut self, seq: usize) {
        if self.lookahead.continues_sequence(seq) {
            self.clear_lookahead();
        }
    }

    /// Replaces the persistent kernel by a dispatch for each kernel, after it timed out.
    pub(super) fn disable_persistent_layers(&mut self) {
        tracing::warn!(
            "the GPU did not run all workgroups side by side: decode goes on with a dispatch for each kernel"
        );
        self.clear_lookahead();
        self.prepared = None;
        self.plan_one.persistent_layers = None;
        self.persistent_timed_out = None;
    }
}
