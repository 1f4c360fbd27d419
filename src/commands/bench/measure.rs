//! Runs a test: prepares the context and times prefill or decode steps.

use std::time::Instant;

use metal_attention::{BatchToken, ForwardError, ForwardPass, Profile};

use super::plan::BenchTest;

/// One test and the forward pass that it runs on.
pub struct BenchMeasurement<'a> {
    /// The forward pass; its context and number of sequences are large enough for the test.
    pub pass: &'a mut dyn ForwardPass,
    /// The test.
    pub test: &'a BenchTest,
}

impl BenchMeasurement<'_> {
    /// The speed of each of `iterations` runs in tokens per second, after `warmup` runs that do not count. Fewer after Ctrl-C.
    /// `done` is called after each run with the number of runs so far, including the warm-up.
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

    /// Runs the test once with every kernel timed. `None` after Ctrl-C.
    pub fn profile(&mut self) -> Result<Option<Profile>, metal_attention::Error> {
        let Some(ids) = unless_cancelled(self.prepare())? else { return Ok(None) };
        self.pass.start_profile()?;
        let outcome = unless_cancelled(self.run(&ids));
        let profile = self.pass.take_profile();
        Ok(outcome?.and(profile))
    }

    /// Brings the context to the state in which a run begins. Returns the input of the run: the tokens of the prompt, or the
    /// next token of each sequence.
    fn prepare(&mut self) -> Result<Vec<u32>, ForwardError> {
        let n_vocab = self.pass.spec().n_vocab;
        match *self.test {
            BenchTest::Prefill { n_prompt } => {
                self.pass.reset();
                Ok((0..n_prompt).map(|pos| random_id(pos, 0, n_vocab)).collect())
            }
            BenchTest::Decode { depth, batch, .. } => {
                self.fill(depth, batch)?;
                let first: Vec<_> = (0..batch).map(|seq| random_id(depth, seq, n_vocab)).collect();
                // A GPU may still be busy with filling the context, or with steps that were launched ahead in the last run. A step
                // whose result is read waits for them, so that they are not timed.
                self.pass.forward_greedy(&[BatchToken { id: first[0], seq: 0, pos: depth, output: true }])?;
                self.pass.truncate(depth);
                Ok(first)
            }
        }
    }

    /// The timed part. Prefill evaluates the prompt `ids` up to the next token, or up to the hidden states if the model has no
    /// output head. Decode takes the test's number of greedy steps from the tokens `ids`, one of each sequence.
    fn run(&mut self, ids: &[u32]) -> Result<(), ForwardError> {
        match *self.test {
            BenchTest::Prefill { .. } if self.pass.spec().output.head.is_none() => {
                let token = |(pos, &id): (usize, &u32)| BatchToken { id, seq: 0, pos, output: true };
                self.pass.forward_hidden(&ids.iter().enumerate().map(token).collect::<Vec<_>>())?;
            }
            BenchTest::Prefill { .. } => {
                self.pass.forward_prompt(ids)?;
            }
            BenchTest::Decode { n_gen, depth, .. } => {
                let token = |(seq, &id): (usize, &u32)| BatchToken { id, seq, pos: depth, output: true };
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

    /// Brings the first `n_seq` sequences to `depth` tokens each. Tokens that they hold already are kept.
    fn fill(&mut self, depth: usize, n_seq: usize) -> Result<(), ForwardError> {
        let n_vocab = self.pass.spec().n_vocab;
        for seq in 0..n_seq {
            self.pass.rewind(seq, depth);
            let n_ubatch = self.pass.n_ubatch();
            while self.pass.n_past(seq) < depth {
                let n_past = self.pass.n_past(seq);
                let token = |pos| BatchToken { id: random_id(pos, seq, n_vocab), seq, pos, output: false };
                let batch: Vec<_> = (n_past..depth.min(n_past.saturating_add(n_ubatch))).map(token).collect();
                self.pass.forward(&batch)?;
            }
        }
        Ok(())
    }
}

/// `None` if Ctrl-C cancelled the computation.
fn unless_cancelled<T>(outcome: Result<T, ForwardError>) -> Result<Option<T>, ForwardError> {
    match outcome {
        Err(ForwardError::Cancelled) => Ok(None),
        outcome => outcome.map(Some),
    }
}

/// The token at a position of a sequence: pseudo-random, but the same in every run.
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
            (BenchTest::Prefill { n_prompt: 20 }, [20, 0, 0]),
            (BenchTest::Decode { n_gen: 4, depth: 16, batch: 1 }, [20, 0, 0]),
            (BenchTest::Decode { n_gen: 2, depth: 0, batch: 3 }, [2, 2, 2]),
            (BenchTest::Decode { n_gen: 1, depth: 9, batch: 3 }, [10, 10, 10]),
        ] {
            let runs = Cell::new(0);
            let mut measurement = BenchMeasurement { pass: &mut *pass, test: &test };
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
            (BenchTest::Prefill { n_prompt: 20 }, vec![(Phase::Prefill, 20)]),
            (BenchTest::Decode { n_gen: 4, depth: 16, batch: 1 }, vec![(Phase::Decode, 1); 4]),
            (BenchTest::Decode { n_gen: 2, depth: 5, batch: 3 }, vec![(Phase::Decode, 3); 2]),
        ] {
            let profile = BenchMeasurement { pass: &mut *pass, test: &test }.profile().unwrap().unwrap();
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
