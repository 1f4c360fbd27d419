//! Greedy steps that run ahead of the CPU: how they are submitted and read.

use std::ops::Range;

use metal_attention_model::{BatchToken, ForwardError};

use crate::CudaError;
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
        self.cache.pages.begin_batch(batch);
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
        let at_once = if batch.len() == 1 { self.tokens_at_once(batch[0].pos).max(1) } else { 1 };
        while let Some(steps) = self.lookahead.steps_to_submit(batch, &mut self.cache.pages, at_once) {
            if steps.start == 0 {
                self.write_batch(batch)?;
            }
            self.submit_decode(batch, steps)?;
        }
        let number = self.lookahead.pop().expect("at least one step was submitted");
        let ids = self.steps.ids.read(number, batch.len())?;
        self.steps.check_together()?;
        self.steps.gpu.watch().advance((batch.len() * self.spec.n_layer()) as u64);
        self.lookahead.advance(batch, &ids);
        Ok(ids)
    }

    /// Submits the greedy steps that lie so many tokens after `batch`.
    fn submit_decode(&mut self, batch: &[BatchToken], mut steps: Range<usize>) -> Result<(), CudaError> {
        self.cache.write_pages(batch)?;
        while !steps.is_empty() {
            self.states.write(&self.cache.pages.segments_ahead(batch, steps.start))?;
            let n = self.launch(batch.len(), batch[0].pos + steps.start, steps.len(), Wanted::Id { advance: true })?;
            for number in self.steps.ids.last_numbers(n) {
                self.lookahead.push(number);
            }
            steps.start += n;
        }
        Ok(())
    }

    /// Forgets every step in flight, and gives back what these reserved.
    pub(crate) fn clear_lookahead(&mut self) {
        self.lookahead.forget(&mut self.cache.pages).for_each(drop);
    }

    /// Forgets every step in flight where they go on with sequence `seq`, which is about to become another.
    pub(crate) fn stop_lookahead_of(&mut self, seq: usize) {
        if self.lookahead.continues_sequence(seq) {
            self.clear_lookahead();
        }
    }
}
