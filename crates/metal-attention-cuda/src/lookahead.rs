//! Greedy decode steps that are submitted before the ids of the steps before them are read. The device chooses the ids and
//! goes on with them; the host reads them afterwards.

use std::ops::Range;

use metal_attention_model::Step;

use crate::CudaError;
use crate::executor::CudaExecutor;
use crate::runner::TokenOutput;

impl CudaExecutor {
    /// Submits greedy steps; `ahead`: how many tokens they lie after those of `step`. Returns their step numbers.
    pub(crate) fn submit_decode(&mut self, step: &Step, ahead: Range<usize>) -> Result<Vec<u32>, CudaError> {
        self.runner.gpu.bind()?;
        self.runner.gpu.check_watch()?;
        let tokens = &step.tokens[..];
        if ahead.start == 0 {
            self.upload_tokens(step)?;
        }
        self.cache.write_pages(tokens, &step.pages)?;
        let mut numbers = Vec::new();
        let mut steps = ahead;
        while !steps.is_empty() {
            self.recurrent_states.write(&step.pages.segments_ahead(tokens, steps.start))?;
            let output = TokenOutput::Id { feeds_next_step: true };
            let n = self.launch_decode_steps(tokens.len(), tokens[0].pos + steps.start, steps.len(), output)?;
            numbers.extend(self.runner.ids.last_numbers(n));
            steps.start += n;
        }
        Ok(numbers)
    }

    /// Waits for the ids of the step with `number`, `[n_sequences]`.
    pub(crate) fn read_decode(&mut self, number: u32, ids: &mut [u32]) -> Result<(), CudaError> {
        self.runner.gpu.check_watch()?;
        ids.copy_from_slice(&self.runner.ids.read(number, ids.len())?);
        self.runner.check_not_aborted()?;
        self.runner.gpu.watch().advance((ids.len() * self.spec.n_layer()) as u64);
        Ok(())
    }
}
