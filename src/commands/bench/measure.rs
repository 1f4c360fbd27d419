//! The timing itself.

use std::time::Instant;

use metal_attention::{BatchToken, ForwardError, ForwardPass, Profile};

use super::plan::Test;

/// A test on a model that is set up for it.
pub struct Measurement<'a> {
    pub pass: &'a mut dyn ForwardPass,
    pub test: &'a Test,
}

impl Measurement<'_> {
    /// Tokens per second of each of `iterations` runs, after `warmup` runs that do not count. Fewer after Ctrl-C.
    /// `done` hears how many runs are over, the first ones included.
    pub fn samples(
        &mut self,
        warmup: usize,
        iterations: usize,
        done: impl Fn(usize),
    ) -> Result<Vec<f64>, metal_attention::Error> {
        let mut samples = Vec::new();
        for run in 0..warmup.saturating_add(iterations) {
            let Some(ids) = unless_cancelled(self.prepare())? else { break };
            let start = Instant::now();
            if unless_cancelled(self.run(&ids))?.is_none() {
                break;
            }
            let seconds = start.elapsed().as_secs_f64();
            if run >= warmup {
                samples.push(self.test.n_tokens() as f64 / seconds.max(1e-9));
            }
            done(run + 1);
        }
        Ok(samples)
    }

    /// One run with every kernel timed. `None` after Ctrl-C.
    pub fn profile(&mut self) -> Result<Option<Profile>, metal_attention::Error> {
        let Some(ids) = unless_cancelled(self.prepare())? else { return Ok(None) };
        self.pass.start_profile()?;
        let outcome = unless_cancelled(self.run(&ids));
        let profile = self.pass.take_profile();
        Ok(outcome?.and(profile))
    }

    /// Brings the context to where a run begins. Returns what the run is fed with: the prompt, or the first token of
    /// each sequence.
    fn prepare(&mut self) -> Result<Vec<u32>, ForwardError> {
        let n_vocab = self.pass.spec().n_vocab;
        match *self.test {
            Test::Prefill { n_prompt } => {
                self.pass.reset();
                Ok((0..n_prompt).map(|pos| random_id(pos, 0, n_vocab)).collect())
            }
            Test::Decode { depth, batch, .. } => {
                self.fill(depth, batch)?;
                let first: Vec<_> = (0..batch).map(|seq| random_id(depth, seq, n_vocab)).collect();
                // A GPU may still fill the context, or be busy with steps that ran ahead of the last run's end: a step
                // whose result comes back waits for these.
                self.pass.forward_greedy(&[BatchToken { id: first[0], seq: 0, pos: depth, logits: true }])?;
                self.pass.truncate(depth);
                Ok(first)
            }
        }
    }

    /// Evaluates the prompt `ids` to the id that follows it, or to the states that embeddings are made of, or takes the sequences that go on with `ids` as many greedy
    /// steps further as the test says.
    fn run(&mut self, ids: &[u32]) -> Result<(), ForwardError> {
        match *self.test {
            Test::Prefill { .. } if self.pass.spec().output.head.is_none() => {
                let token = |(pos, &id): (usize, &u32)| BatchToken { id, seq: 0, pos, logits: true };
                self.pass.forward_hidden(&ids.iter().enumerate().map(token).collect::<Vec<_>>())?;
            }
            Test::Prefill { .. } => {
                self.pass.forward_prompt(ids)?;
            }
            Test::Decode { n_gen, depth, .. } => {
                let token = |(seq, &id): (usize, &u32)| BatchToken { id, seq, pos: depth, logits: true };
                let mut step: Vec<_> = ids.iter().enumerate().map(token).collect();
                for _ in 0..n_gen {
                    let ids = self.pass.forward_greedy(&step)?;
                    for (token, id) in step.iter_mut().zip(ids) {
                        (token.id, token.pos) = (id, token.pos + 1);
                    }
                }
            }
        }
        Ok(())
    }

    /// Leaves `depth` tokens in each of the first `n_seq` sequences, keeping what they have of these.
    fn fill(&mut self, depth: usize, n_seq: usize) -> Result<(), ForwardError> {
        let n_vocab = self.pass.spec().n_vocab;
        for seq in 0..n_seq {
            self.pass.rewind(seq, depth);
            let n_ubatch = self.pass.n_ubatch();
            while self.pass.n_past(seq) < depth {
                let n_past = self.pass.n_past(seq);
                let token = |pos| BatchToken { id: random_id(pos, seq, n_vocab), seq, pos, logits: false };
                let batch: Vec<_> = (n_past..depth.min(n_past.saturating_add(n_ubatch))).map(token).collect();
                self.pass.forward(&batch)?;
            }
        }
        Ok(())
    }
}

/// `None` after Ctrl-C.
fn unless_cancelled<T>(outcome: Result<T, ForwardError>) -> Result<Option<T>, ForwardError> {
    match outcome {
        Err(ForwardError::Cancelled) => Ok(None),
        outcome => outcome.map(Some),
    }
}

/// An id for a place in a sequence, the same in every run.
fn random_id(pos: usize, seq: usize, n_vocab: usize) -> u32 {
    // Fibonacci hashing: the upper bits of a product with 2^64 / golden ratio.
    let hash = ((seq as u64) << 32 | pos as u64).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    (hash % n_vocab as u64) as u32
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use metal_attention::{Device, EngineOptions, Model, Phase};

    use super::*;

    fn pass(n_ubatch: usize) -> Box<dyn ForwardPass> {
        let (n_ctx, n_ubatch) = (Some(20), Some(n_ubatch));
        let options = EngineOptions { device: Device::Cpu, n_ctx, n_seq: 3, n_ubatch, ..Default::default() };
        Model::built_in().unwrap().forward_pass(&options).unwrap()
    }

    #[test]
    fn every_iteration_is_a_sample() {
        let mut pass = pass(7);
        for (test, n_past) in [
            (Test::Prefill { n_prompt: 20 }, [20, 0, 0]),
            (Test::Decode { n_gen: 4, depth: 16, batch: 1 }, [20, 0, 0]),
            (Test::Decode { n_gen: 2, depth: 0, batch: 3 }, [2, 2, 2]),
            (Test::Decode { n_gen: 1, depth: 9, batch: 3 }, [10, 10, 10]),
        ] {
            let runs = Cell::new(0);
            let mut measurement = Measurement { pass: &mut *pass, test: &test };
            let rates = measurement.samples(2, 3, |n| runs.set(n)).unwrap();
            assert_eq!((rates.len(), runs.get()), (3, 5), "{test}");
            assert!(rates.iter().all(|rate| rate.is_finite() && *rate > 0.0), "{rates:?}");
            assert_eq!([0, 1, 2].map(|seq| pass.n_past(seq)), n_past, "{test}");
        }
    }

    #[test]
    fn a_profile_has_the_steps_of_the_test_and_no_others() {
        let mut pass = pass(20);
        for (test, steps) in [
            (Test::Prefill { n_prompt: 20 }, vec![(Phase::Prefill, 20)]),
            (Test::Decode { n_gen: 4, depth: 16, batch: 1 }, vec![(Phase::Decode, 1); 4]),
            (Test::Decode { n_gen: 2, depth: 5, batch: 3 }, vec![(Phase::Decode, 3); 2]),
        ] {
            let profile = Measurement { pass: &mut *pass, test: &test }.profile().unwrap().unwrap();
            let found: Vec<_> = profile.steps.iter().map(|step| (step.phase, step.n_tokens)).collect();
            assert_eq!(found, steps, "{test}");
        }
    }

    #[test]
    fn ids_are_in_the_vocabulary_and_differ() {
        let ids: Vec<_> = (0..64).map(|pos| random_id(pos, 0, 512)).collect();
        assert!(ids.iter().all(|&id| id < 512));
        let mut distinct = ids.clone();
        distinct.sort_unstable();
        distinct.dedup();
        assert!(distinct.len() > 40, "{ids:?}");
        assert_ne!(ids, (0..64).map(|pos| random_id(pos, 1, 512)).collect::<Vec<_>>());
        assert_eq!(random_id(5, 3, 1), 0);
    }
}
