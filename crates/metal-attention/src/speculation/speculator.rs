//! The decision how many drafts each sequence gets.

use std::time::Duration;

use super::{Draft, DraftDepth, DraftRequest, Drafter, StepCosts};

/// The probability that a token holds which a constraint forces: the model may spell the text otherwise.
const FORCED_CONFIDENCE: f32 = 0.9;

/// A drafter, and how many of its drafts pay. [`Generator`](crate::Generator) and [`Scheduler`](crate::scheduler::Scheduler) have
/// one; a caller that evaluates batches itself makes its own.
pub struct Speculator {
    drafter: Box<dyn Drafter>,
    depth: DraftDepth,
    costs: StepCosts,
}

impl Speculator {
    /// Speculation with this drafter, before any step was timed.
    pub fn new(drafter: Box<dyn Drafter>, depth: DraftDepth) -> Self {
        Self { drafter, depth, costs: StepCosts::default() }
    }

    /// The most drafts of a sequence in a step.
    pub fn max_depth(&self) -> usize {
        self.depth.max()
    }

    /// The drafter.
    pub fn drafter(&self) -> &dyn Drafter {
        &*self.drafter
    }

    /// The drafts of each request for a step over `n_seq` sequences, those of the requests included: as many as give the
    /// most tokens a second, and at most `max_rows` in all. Where a constraint forces tokens (`forced`, one list for each request,
    /// empty: none), these are the drafts.
    pub fn propose(
        &mut self,
        n_seq: usize,
        max_rows: usize,
        requests: &[DraftRequest<'_>],
        forced: &[Vec<u32>],
    ) -> Vec<Draft> {
        if requests.is_empty() || max_rows == 0 {
            return vec![Draft::default(); requests.len()];
        }
        let mut drafts = match self.drafter.propose(requests) {
            Ok(drafts) => drafts,
            Err(why) => {
                tracing::warn!("the {} drafter failed: {why}", self.drafter.name());
                return vec![Draft::default(); requests.len()];
            }
        };
        for ((draft, ids), request) in drafts.iter_mut().zip(forced).zip(requests) {
            if !ids.is_empty() {
                *draft = Draft { ids: ids.clone(), confidence: vec![FORCED_CONFIDENCE; ids.len()] };
                draft.truncate(request.n);
            }
        }
        // The probability that each draft holds with all before it. They fall within a sequence, so that the likeliest of all
        // sequences are the first ones of each.
        let mut of_all: Vec<f32> = Vec::new();
        for draft in &drafts {
            of_all.extend(cumulative(draft));
        }
        of_all.sort_unstable_by(|a, b| b.total_cmp(a));
        of_all.truncate(max_rows);
        let n = match self.depth {
            DraftDepth::Adaptive(_) => self.costs.best_depth(n_seq, &of_all),
            DraftDepth::Fixed(_) => of_all.len(),
        };
        let Some(least) = n.checked_sub(1).map(|last| of_all[last]) else {
            for draft in &mut drafts {
                draft.truncate(0);
            }
            return drafts;
        };
        let mut left = n;
        for draft in &mut drafts {
            let likely = cumulative(draft).take_while(|&p| p >= least).count();
            draft.truncate(likely.min(left));
            left -= draft.ids.len();
        }
        drafts
    }

    /// Records that a decode step over `n_seq` sequences, with `n_drafts` drafts in all, took `time`.
    pub fn record_step(&mut self, n_seq: usize, n_drafts: usize, time: Duration) {
        self.costs.record(n_seq, n_drafts, time);
    }
}

/// The probability of each draft that it holds with all before it.
fn cumulative(draft: &Draft) -> impl Iterator<Item = f32> {
    draft.confidence.iter().scan(1.0, |all, p| {
        *all *= p;
        Some(*all)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ForwardError, MemoryUse};

    /// Proposes the ids 1, 2, ... with a confidence for each sequence.
    struct Confident(Vec<f32>);

    impl Drafter for Confident {
        fn name(&self) -> &'static str {
            "confident"
        }

        fn propose(&mut self, requests: &[DraftRequest<'_>]) -> Result<Vec<Draft>, ForwardError> {
            let of = |request: &DraftRequest<'_>| Draft {
                ids: (1..=request.n as u32).collect(),
                confidence: vec![self.0[request.seq]; request.n],
            };
            Ok(requests.iter().map(of).collect())
        }

        fn memory_use(&self) -> MemoryUse {
            MemoryUse::default()
        }
    }

    #[test]
    fn likely_sequences_get_more_drafts() {
        let mut speculator = Speculator::new(Box::new(Confident(vec![0.9, 0.2, 0.6])), DraftDepth::default());
        let requests: Vec<_> = (0..3).map(|seq| DraftRequest { seq, ids: &[7], prediction: &[], n: 8 }).collect();
        let mut lengths = |max_rows| -> Vec<usize> {
            speculator.propose(3, max_rows, &requests, &[]).iter().map(|draft| draft.ids.len()).collect()
        };
        assert_eq!(lengths(99), [0, 0, 0]);
        let mut speculator = Speculator::new(Box::new(Confident(vec![0.9, 0.2, 0.6])), DraftDepth::default());
        for (n_rows, micros) in [(3, 100), (6, 115), (12, 150)] {
            speculator.record_step(3, n_rows - 3, Duration::from_micros(micros));
        }
        let mut lengths = |max_rows| -> Vec<usize> {
            speculator.propose(3, max_rows, &requests, &[]).iter().map(|draft| draft.ids.len()).collect()
        };
        assert_eq!(lengths(99), [8, 0, 2]);
        assert_eq!(lengths(6), [5, 0, 1]);
        assert_eq!(lengths(0), [0, 0, 0]);
        let mut speculator = Speculator::new(Box::new(Confident(vec![0.9, 0.2, 0.6])), DraftDepth::Fixed(8));
        let lengths: Vec<_> = speculator.propose(3, 20, &requests, &[]).iter().map(|draft| draft.ids.len()).collect();
        assert_eq!(lengths.iter().sum::<usize>(), 20);
    }
}
