//! The tests of a bench run, and the context that they need.

use std::fmt;

use metal_attention::Phase;

use crate::units;

/// One measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BenchTest {
    /// The prefill of a prompt of `n_prompt` tokens from an empty context.
    Prefill {
        /// Tokens of the prompt, at least 1.
        n_prompt: usize,
    },
    /// `n_gen` greedy decode steps of `batch` sequences.
    Decode {
        /// Decode steps, at least 1.
        n_gen: usize,
        /// Tokens of each sequence before the first step.
        depth: usize,
        /// Sequences, at least 1.
        batch: usize,
    },
}

impl BenchTest {
    /// The phase that is measured.
    pub fn phase(&self) -> Phase {
        match self {
            Self::Prefill { .. } => Phase::Prefill,
            Self::Decode { .. } => Phase::Decode,
        }
    }

    /// Tokens of the prompt; 0 for decode.
    pub fn n_prompt(&self) -> usize {
        if let Self::Prefill { n_prompt } = *self { n_prompt } else { 0 }
    }

    /// Generated tokens of each sequence; 0 for prefill.
    pub fn n_gen(&self) -> usize {
        if let Self::Decode { n_gen, .. } = *self { n_gen } else { 0 }
    }

    /// Tokens of each sequence before the timed part; 0 for prefill.
    pub fn depth(&self) -> usize {
        if let Self::Decode { depth, .. } = *self { depth } else { 0 }
    }

    /// Sequences that are evaluated together; 1 for prefill.
    pub fn batch(&self) -> usize {
        if let Self::Decode { batch, .. } = *self { batch } else { 1 }
    }

    /// Timed tokens of one run, of all sequences.
    pub fn n_tokens(&self) -> usize {
        self.n_prompt().saturating_add(self.n_gen()).saturating_mul(self.batch())
    }

    /// The context that each sequence needs, in tokens.
    pub fn n_ctx(&self) -> usize {
        self.n_prompt().max(self.depth().saturating_add(self.n_gen()))
    }
}

impl fmt::Display for BenchTest {
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

/// Tests that run on the same forward pass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TestGroup {
    /// The number of sequences that the forward pass holds.
    pub n_seq: usize,
    /// The tests; not empty.
    pub tests: Vec<BenchTest>,
}

impl TestGroup {
    /// The context of the longest test, in tokens.
    pub fn n_ctx(&self) -> usize {
        self.tests.iter().map(BenchTest::n_ctx).max().unwrap_or(1)
    }
}

/// All tests of a run, grouped by the number of sequences. Each group has its own forward pass, so that no result depends on
/// the other tests of the run, and no memory is allocated for unused sequences.
#[derive(Debug, PartialEq, Eq)]
pub struct BenchPlan {
    /// The groups: that of one sequence first, then in the order of `--batch`.
    pub groups: Vec<TestGroup>,
}

impl BenchPlan {
    /// The prefills of `seq_lengths` tokens, and the decodes of `gen_length` tokens at each depth with each number of sequences.
    /// A length of 0 adds no test.
    pub fn new(seq_lengths: &[usize], gen_length: usize, depths: &[usize], batches: &[usize]) -> Self {
        let mut one = TestGroup { n_seq: 1, tests: Vec::new() };
        one.tests.extend(
            distinct(seq_lengths).into_iter().filter(|&n| n > 0).map(|n_prompt| BenchTest::Prefill { n_prompt }),
        );
        let mut groups = vec![one];
        for batch in distinct(batches).into_iter().filter(|_| gen_length > 0) {
            let tests = distinct(depths).into_iter().map(|depth| BenchTest::Decode { n_gen: gen_length, depth, batch });
            if batch == 1 {
                groups[0].tests.extend(tests);
            } else {
                groups.push(TestGroup { n_seq: batch, tests: tests.collect() });
            }
        }
        groups.retain(|group| !group.tests.is_empty());
        Self { groups }
    }

    /// Splits the plan into the tests for which `why_not` returns `None`, in groups, and the others with the reason it returns.
    pub fn split(&self, why_not: impl Fn(&BenchTest) -> Option<String>) -> (Vec<TestGroup>, Vec<(BenchTest, String)>) {
        let (mut groups, mut skipped) = (Vec::new(), Vec::new());
        for group in &self.groups {
            let mut tests = Vec::new();
            for &test in &group.tests {
                match why_not(&test) {
                    Some(reason) => skipped.push((test, reason)),
                    None => tests.push(test),
                }
            }
            if !tests.is_empty() {
                groups.push(TestGroup { n_seq: group.n_seq, tests });
            }
        }
        (groups, skipped)
    }
}

/// `values` without repetitions, in order.
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

    fn decode(depth: usize, batch: usize) -> BenchTest {
        BenchTest::Decode { n_gen: 10, depth, batch }
    }

    #[test]
    fn tests_are_grouped_by_their_number_of_sequences() {
        let plan = BenchPlan::new(&[32, 0, 64, 32], 10, &[0, 5], &[4, 1, 4]);
        let prefill = |n_prompt| BenchTest::Prefill { n_prompt };
        assert_eq!(
            plan.groups,
            [
                TestGroup { n_seq: 1, tests: vec![prefill(32), prefill(64), decode(0, 1), decode(5, 1)] },
                TestGroup { n_seq: 4, tests: vec![decode(0, 4), decode(5, 4)] },
            ]
        );
        assert_eq!(plan.groups.iter().map(TestGroup::n_ctx).collect::<Vec<_>>(), [64, 15]);
        assert_eq!(BenchPlan::new(&[0], 0, &[0], &[1]).groups, []);
    }

    #[test]
    fn tests_that_a_model_cannot_run_are_skipped() {
        let plan = BenchPlan::new(&[8, 20], 10, &[0, 5, usize::MAX], &[1, 2]);
        let within = |n_ctx| plan.split(move |test| (test.n_ctx() > n_ctx).then(|| format!("more than {n_ctx}")));
        let (groups, skipped) = within(10);
        assert_eq!(
            groups,
            [
                TestGroup { n_seq: 1, tests: vec![BenchTest::Prefill { n_prompt: 8 }, decode(0, 1)] },
                TestGroup { n_seq: 2, tests: vec![decode(0, 2)] },
            ]
        );
        assert_eq!(skipped.len(), 5);
        assert_eq!((skipped[2].0.n_ctx(), &skipped[2].1[..]), (usize::MAX, "more than 10"));
        let (groups, skipped) = within(7);
        assert!(groups.is_empty());
        assert!(skipped.iter().map(|(test, _)| test).eq(plan.groups.iter().flat_map(|s| &s.tests)));
    }

    #[test]
    fn tests_have_names() {
        assert_eq!(BenchTest::Prefill { n_prompt: 1 }.to_string(), "prefill of 1 token");
        assert_eq!(decode(0, 1).to_string(), "decode of 10 tokens");
        assert_eq!(decode(64, 4).to_string(), "decode of 10 tokens at depth 64 x 4 sequences");
    }
}
