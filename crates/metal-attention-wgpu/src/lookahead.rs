//! Greedy steps that run ahead of the CPU: how they are submitted and read.

use metal_attention_model::{BatchToken, ForwardError};

use crate::forward_pass::{Output, STATE, WgpuForwardPass};
use crate::{Readback, WgpuError};

impl WgpuForwardPass {
    /// One greedy step of sequences that each go on by one token, and the steps that are expected to follow it. On an error
    /// the cache is as it was.
    pub(super) fn decode_greedy(&mut self, batch: &[BatchToken]) -> Result<Vec<u32>, ForwardError> {
        self.take_late_kernels();
        if !self.lookahead.continues(batch) {
            self.clear_lookahead();
        }
        // Where a step is in flight, this takes the pages and slots that were reserved for it.
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

    /// The step over a batch that has its pages, and those that are to be submitted after it.
    fn decode(&mut self, batch: &[BatchToken]) -> Result<Vec<u32>, WgpuError> {
        self.gpu.check()?;
        while let Some(steps) = self.lookahead.steps_to_submit(batch, &mut self.cache.pages, 1) {
            if steps.start == 0 {
                self.write_batch(batch);
            }
            self.submit_decode(batch, steps.start)?;
        }
        let mut readback = self.lookahead.pop().expect("at least one step was submitted");
        let bytes = 4 * batch.len() as u64 + STATE;
        let mut ids = readback.read(&self.gpu, bytes, bytemuck::pod_collect_to_vec::<u8, u32>)?;
        let given_up = ids.pop() != Some(0) && self.at_once.is_some() && batch.len() == 1;
        self.free.push(readback);
        if given_up {
            self.leave_at_once();
            return self.decode(batch);
        }
        self.gpu.watch().advance((batch.len() * self.spec.n_layer()) as u64);
        self.lookahead.advance(batch, &ids);
        Ok(ids)
    }

    /// Submits the greedy step `ahead` tokens after `batch`.
    fn submit_decode(&mut self, batch: &[BatchToken], ahead: usize) -> Result<(), WgpuError> {
        let bytes = 4 * batch.len() as u64;
        let mut readback = match self.free.pop().filter(|r| r.bytes() >= bytes + STATE) {
            Some(readback) => readback,
            None => Readback::new(&self.gpu, bytes + STATE)?,
        };
        self.write_pages(batch);
        self.states.write(&self.gpu, &self.cache.pages.segments_ahead(batch, ahead));
        let mut encoder = self.record(self.step_of(batch, ahead, Output::Id), false);
        readback.copy(&mut encoder, &self.ids, bytes);
        if let Some(gave_up) = &self.at_once {
            readback.copy_after(&mut encoder, gave_up, 0..4, bytes);
        }
        readback.map(self.gpu.submit(encoder));
        self.lookahead.push(readback);
        Ok(())
    }

    /// Forgets every step in flight, and gives back what these reserved.
    pub(super) fn clear_lookahead(&mut self) {
        for mut readback in self.lookahead.forget(&mut self.cache.pages) {
            readback.forget();
            self.free.push(readback);
        }
    }

    /// Forgets every step in flight where they go on with sequence `seq`, which is about to become another.
    pub(super) fn stop_lookahead_of(&mut self, seq: usize) {
        if self.lookahead.continues_sequence(seq) {
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
