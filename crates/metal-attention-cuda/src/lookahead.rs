//! Greedy steps that run ahead of the CPU: how they are submitted and read.

use metal_attention_model::{BatchToken, ForwardError};

use crate::CudaError;
use crate::device::Readback;
use crate::forward_pass::CudaForwardPass;
use crate::step::Wanted;

impl CudaForwardPass {
    /// One greedy step of sequences that each go on by one token, and the steps that are expected to follow it. On an error
    /// the cache is as it was.
    pub(crate) fn decode_greedy(&mut self, batch: &[BatchToken]) -> Result<Vec<u32>, ForwardError> {
        if !self.lookahead.continues(batch) {
            self.clear_lookahead();
        }
        // Where a step is in flight, this takes the pages that were reserved for it.
        self.cache.pages.check(batch, self.spec.n_vocab)?;
        self.cache.pages.begin(batch);
        let outcome = self.cache.append(batch).and_then(|()| self.decode(batch));
        if outcome.is_err() {
            self.clear_lookahead();
            self.cache.pages.retract(batch);
        }
        Ok(outcome?)
    }

    /// The step over a batch that has its pages, and those that are to be submitted after it.
    fn decode(&mut self, batch: &[BatchToken]) -> Result<Vec<u32>, CudaError> {
        self.steps.gpu.check_watch()?;
        while let Some(ahead) = self.lookahead.wanted(batch, &mut self.cache.pages) {
            if ahead == 0 {
                self.write_batch(batch)?;
            }
            self.submit_decode(batch, ahead)?;
        }
        let mut readback = self.lookahead.pop().expect("at least one step was submitted");
        let ids: Vec<u32> = bytemuck::pod_collect_to_vec(readback.read(4 * batch.len() as u64)?);
        self.free.push(readback);
        self.steps.check_together()?;
        self.steps.gpu.watch().advance((batch.len() * self.spec.n_layer()) as u64);
        self.lookahead.advance(batch, &ids);
        Ok(ids)
    }

    /// Submits the greedy step `ahead` tokens after `batch`.
    fn submit_decode(&mut self, batch: &[BatchToken], ahead: usize) -> Result<(), CudaError> {
        let bytes = 4 * batch.len() as u64;
        let mut readback = match self.free.pop().filter(|r| r.bytes() >= bytes) {
            Some(readback) => readback,
            None => Readback::new(&self.steps.gpu, bytes.max(256))?,
        };
        self.cache.write_pages(batch)?;
        self.states.write(&self.cache.pages.segments_ahead(batch, ahead))?;
        self.launch(batch.len(), batch[0].pos + ahead, Wanted::Id { advance: true })?;
        readback.copy(&self.steps.s.ids, bytes)?;
        self.lookahead.push(readback);
        Ok(())
    }

    /// Forgets every step in flight, and gives back what these reserved.
    pub(crate) fn clear_lookahead(&mut self) {
        self.free.extend(self.lookahead.forget(&mut self.cache.pages));
    }

    /// Forgets every step in flight where they go on with sequence `seq`, which is about to become another.
    pub(crate) fn stop_lookahead_of(&mut self, seq: usize) {
        if self.lookahead.goes_on_with(seq) {
            self.clear_lookahead();
        }
    }
}
