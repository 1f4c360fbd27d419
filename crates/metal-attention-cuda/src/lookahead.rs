//! Lookahead for greedy decoding: decode steps are submitted before the ids of the steps before them are read. The device chooses the ids and goes
//! on with them; the host reads them afterwards. `Lookahead` of the model crate decides how many steps ahead are submitted, and reserves their KV pages.

use std::ops::Range;

use metal_attention_model::{BatchToken, ForwardError};

use crate::CudaError;
use crate::forward_pass::CudaForwardPass;
use crate::runner::TokenOutput;

impl CudaForwardPass {
    /// Evaluates one greedy decode step: `batch` has one token of each sequence. Returns the id that follows each of them, and leaves further steps
    /// in flight. On an error no step is in flight, and the KV cache is as before the call.
    pub(crate) fn decode_greedy(&mut self, batch: &[BatchToken]) -> Result<Vec<u32>, ForwardError> {
        if !self.lookahead.continues(batch) {
            self.clear_lookahead();
        }
        // Uses the pages that were reserved when the step was submitted, if it is in flight.
        self.cache.pages.check(batch, self.spec.n_vocab)?;
        self.cache.pages.begin_batch(batch);
        let outcome = self.cache.append(batch).and_then(|()| self.decode(batch));
        if outcome.is_err() {
            self.clear_lookahead();
            self.cache.pages.retract(batch);
        }
        Ok(outcome?)
    }

    /// Submits the step of `batch`, which has its KV pages, unless it is in flight, and steps after it; then waits for the ids of the first one.
    fn decode(&mut self, batch: &[BatchToken]) -> Result<Vec<u32>, CudaError> {
        self.runner.gpu.check_watch()?;
        let at_once = if batch.len() == 1 { self.steps_per_launch(batch[0].pos).max(1) } else { 1 };
        while let Some(steps) = self.lookahead.steps_to_submit(batch, &mut self.cache.pages, at_once) {
            if steps.start == 0 {
                self.upload_batch(batch)?;
            }
            self.submit_decode(batch, steps)?;
        }
        let number = self.lookahead.pop().expect("at least one step was submitted");
        let ids = self.runner.ids.read(number, batch.len())?;
        self.runner.check_not_aborted()?;
        self.runner.gpu.watch().advance((batch.len() * self.spec.n_layer()) as u64);
        self.lookahead.advance(batch, &ids);
        Ok(ids)
    }

    /// Submits greedy steps; `steps`: how many tokens they lie after `batch`.
    fn submit_decode(&mut self, batch: &[BatchToken], mut steps: Range<usize>) -> Result<(), CudaError> {
        self.cache.write_pages(batch)?;
        while !steps.is_empty() {
            self.recurrent_states.write(&self.cache.pages.segments_ahead(batch, steps.start))?;
            let n = self.launch_decode_steps(
                batch.len(),
                batch[0].pos + steps.start,
                steps.len(),
                TokenOutput::Id { feeds_next_step: true },
            )?;
            for number in self.runner.ids.last_numbers(n) {
                self.lookahead.push(number);
            }
            steps.start += n;
        }
        Ok(())
    }

    /// Discards all steps in flight, and releases the KV pages that are reserved for them.
    pub(crate) fn clear_lookahead(&mut self) {
        self.lookahead.forget(&mut self.cache.pages).for_each(drop);
    }

    /// Discards all steps in flight if they include sequence `seq`, whose content is about to change.
    pub(crate) fn stop_lookahead_of(&mut self, seq: usize) {
        if self.lookahead.continues_sequence(seq) {
            self.clear_lookahead();
        }
    }
}
