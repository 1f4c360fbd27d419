//! Which tests are measured, and what they need.

use std::fmt;

use metal_attention::Phase;

use crate::units;

/// One thing to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Test {
    /// A prompt of `n_prompt` tokens from an empty context.
    Prefill {
        /// At least 1.
        n_prompt: usize,
    },
    /// `n_gen` greedy steps of `batch` sequences which have `depth` tokens each.
    Decode {
        /// At least 1.
        n_gen: usize,
        /// Tokens in the context before the first step.
        depth: usize,
        /// At least 1.
        batch: usize,
    },
}

impl Test {
    /// The name of what is measured.
    pub fn phase(&self) -> Phase {
        match self {
            Self::Prefill { .. } => Phase::Prefill,
            Self::Decode { .. } => Phase::Decode,
        }
    }

    /// Tokens of the prompt; 0 for a decode.
    pub fn n_prompt(&self) -> usize {
        if let Self::Prefill { n_prompt } = *self { n_prompt } else { 0 }
    }

    /// Tokens to decode of each sequence; 0 for a prefill.
    pub fn n_gen(&self) -> usize {
        if let Self::Decode { n_gen, .. } = *self { n_gen } else { 0 }
    }

    /// Tokens in the context before the timing.
    pub fn depth(&self) -> usize {
        if let Self::Decode { depth, .. } = *self { depth } else { 0 }
    }

    /// Sequences that are evaluated together.
    pub fn batch(&self) -> usize {
        if let Self::Decode { batch, .. } = *self { batch } else { 1 }
    }

    /// Tokens that a run evaluates, those of all sequences.
    pub fn n_tokens(&self) -> usize {
        self.n_prompt().saturating_add(self.n_gen()).saturating_mul(self.batch())
    }

    /// Tokens of each sequence.
    pub fn n_ctx(&self) -> usize {
        self.n_prompt().max(self.depth().saturating_add(self.n_gen()))
    }
}

impl fmt::Display for Test {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Prefill { n_prompt } => write!(f, "prefill of {}", units::count(*n_prompt, "token")),
            Self::Decode { n_gen, depth, batch } => {
                write!(f, "decode of {}", units::count(*n_gen, "token"))?;
                if *depth > 0 {
                    write!(f, " at depth {depth}")?;
                }
                if *batch > 1 { write!(f, " x {batch} sequences") } else { Ok(()) }
            }
        }
    }
}

/// Tests that share one set-up of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Setup {
    /// Sequences there is room for.
    pub n_seq: usize,
    /// Not empty.
    pub tests: Vec<Test>,
}

impl Setup {
    /// Tokens that the longest test needs.
    pub fn n_ctx(&self) -> usize {
        self.tests.iter().map(Test::n_ctx).max().unwrap_or(1)
    }
}

/// All tests, by set-up. Each number of sequences has a set-up of its own, so that a result does not depend on what
/// else is measured, and no memory is held for sequences that are not in use.
#[derive(Debug, PartialEq, Eq)]
pub struct Plan {
    /// One sequence first, then as given.
    pub setups: Vec<Setup>,
}

impl Plan {
    /// Prefills of `seq_lengths` tokens, and decodes of `gen_length` at each depth with each number of sequences.
    /// A length of 0 is none.
    pub fn new(seq_lengths: &[usize], gen_length: usize, depths: &[usize], batches: &[usize]) -> Self {
        let mut one = Setup { n_seq: 1, tests: Vec::new() };
        one.tests
            .extend(distinct(seq_lengths).into_iter().filter(|&n| n > 0).map(|n_prompt| Test::Prefill { n_prompt }));
        let mut setups = vec![one];
        for batch in distinct(batches).into_iter().filter(|_| gen_length > 0) {
            let tests = distinct(depths).into_iter().map(|depth| Test::Decode { n_gen: gen_length, depth, batch });
            if batch == 1 {
                setups[0].tests.extend(tests);
            } else {
                setups.push(Setup { n_seq: batch, tests: tests.collect() });
            }
        }
        setups.retain(|setup| !setup.tests.is_empty());
        Self { setups }
    }

    /// The set-ups with the tests that a model can run, `why_not` says nothing of them, and the others with the reason.
    pub fn split(&self, why_not: impl Fn(&Test) -> Option<String>) -> (Vec<Setup>, Vec<(Test, String)>) {
        let (mut setups, mut skipped) = (Vec::new(), Vec::new());
        for setup in &self.setups {
            let mut tests = Vec::new();
            for &test in &setup.tests {
                match why_not(&test) {
                    Some(reason) => skipped.push((test, reason)),
                    None => tests.push(test),
                }
            }
            if !tests.is_empty() {
                setups.push(Setup { n_seq: setup.n_seq, tests });
            }
        }
        (setups, skipped)
    }
}

/// `values` without those that came before.
pub fn distinct<T: Clone + PartialEq>(values: &[T]) -> Vec<T> {
    let mut found = Vec::with_capacity(values.len());
    for value in values {
        if !found.contains(value) {
            found.push(value.clone());
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(depth: usize, batch: usize) -> Test {
        Test::Decode { n_gen: 10, depth, batch }
    }

    #[test]
    fn tests_are_grouped_by_their_number_of_sequences() {
        let plan = Plan::new(&[32, 0, 64, 32], 10, &[0, 5], &[4, 1, 4]);
        let prefill = |n_prompt| Test::Prefill { n_prompt };
        assert_eq!(
            plan.setups,
            [
                Setup { n_seq: 1, tests: vec![prefill(32), prefill(64), decode(0, 1), decode(5, 1)] },
                Setup { n_seq: 4, tests: vec![decode(0, 4), decode(5, 4)] },
            ]
        );
        assert_eq!(plan.setups.iter().map(Setup::n_ctx).collect::<Vec<_>>(), [64, 15]);
        assert_eq!(Plan::new(&[0], 0, &[0], &[1]).setups, []);
    }

    #[test]
    fn what_a_model_cannot_run_is_skipped() {
        let plan = Plan::new(&[8, 20], 10, &[0, 5, usize::MAX], &[1, 2]);
        let within = |n_ctx| plan.split(move |test| (test.n_ctx() > n_ctx).then(|| format!("more than {n_ctx}")));
        let (setups, skipped) = within(10);
        assert_eq!(
            setups,
            [
                Setup { n_seq: 1, tests: vec![Test::Prefill { n_prompt: 8 }, decode(0, 1)] },
                Setup { n_seq: 2, tests: vec![decode(0, 2)] },
            ]
        );
        assert_eq!(skipped.len(), 5);
        assert_eq!((skipped[2].0.n_ctx(), &skipped[2].1[..]), (usize::MAX, "more than 10"));
        let (setups, skipped) = within(7);
        assert!(setups.is_empty());
        assert!(skipped.iter().map(|(test, _)| test).eq(plan.setups.iter().flat_map(|s| &s.tests)));
    }

    #[test]
    fn tests_have_names() {
        assert_eq!(Test::Prefill { n_prompt: 1 }.to_string(), "prefill of 1 token");
        assert_eq!(decode(0, 1).to_string(), "decode of 10 tokens");
        assert_eq!(decode(64, 4).to_string(), "decode of 10 tokens at depth 64 x 4 sequences");
    }
}
