//! Limits the prefill tokens of a step so that sequences that decode do not wait long for their next token.

use std::time::Duration;

/// Target for the duration of a step while other sequences wait for its end.
const STEP: Duration = Duration::from_millis(100);

/// Minimum of prefill tokens in a step: with fewer, reading the weights dominates its time.
const LEAST: usize = 16;

/// Maximum bytes of logits that one step returns for log probabilities of a prompt, or as the result of a request for
/// logits. Logits that tokens are sampled from do not count.
pub(super) const MAX_LOGITS_BYTES: usize = 64 << 20;

/// Estimates from the durations of past steps how many tokens the next one may have.
#[derive(Debug)]
pub(super) struct BatchSizer {
    /// Tokens that a step evaluates in about [`STEP`].
    n_tokens: usize,
    /// Maximum number of tokens in a step.
    n_batch: usize,
}

impl BatchSizer {
    /// The initial estimate, before any step; `n_batch` is the maximum number of tokens in a step.
    pub fn new(n_batch: usize) -> Self {
        Self { n_tokens: n_batch.min(64), n_batch }
    }

    /// Maximum number of tokens in a step.
    pub fn max_tokens(&self) -> usize {
        self.n_batch
    }

    /// Maximum number of prefill tokens in a step with `n_decode` decode tokens. `others_wait`: other sequences or
    /// embeddings wait for the step's end. Without it only the maximum of a step counts.
    pub fn max_prefill_tokens(&self, n_decode: usize, others_wait: bool) -> usize {
        let capacity = self.n_batch.saturating_sub(n_decode);
        if others_wait { self.n_tokens.saturating_sub(n_decode).max(LEAST).min(capacity) } else { capacity }
    }

    /// Records that a step of `n_tokens` tokens took `time`.
    pub fn record_step(&mut self, n_tokens: usize, time: Duration) {
        let fit = n_tokens as f64 * STEP.as_secs_f64() / time.as_secs_f64().max(1e-9);
        // A small step is no measure for larger ones; it can only raise the estimate.
        if 2 * n_tokens >= self.n_tokens || fit > self.n_tokens as f64 {
            self.n_tokens = (fit as usize).clamp(1, 2 * self.n_tokens.max(n_tokens)).min(self.n_batch);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_grow_and_shrink_to_the_time_they_may_take() {
        let mut pace = BatchSizer::new(512);
        let mut steps = |per_token: Duration, n: usize| {
            for _ in 0..n {
                let n_tokens = 4 + pace.max_prefill_tokens(4, true);
                pace.record_step(n_tokens, per_token * n_tokens as u32);
            }
            4 + pace.max_prefill_tokens(4, true)
        };
        assert_eq!(steps(Duration::from_millis(1), 3), 100);
        assert_eq!(steps(Duration::from_micros(400), 3), 250);
        assert_eq!(steps(Duration::from_micros(10), 3), 512);
        assert_eq!(steps(Duration::from_millis(50), 3), 4 + LEAST);
        assert_eq!(steps(Duration::from_millis(2), 3), 50);
    }

    #[test]
    fn decode_alone_makes_no_step_smaller() {
        let mut pace = BatchSizer::new(512);
        pace.record_step(1, Duration::from_millis(60));
        assert_eq!(pace.max_prefill_tokens(1, true), 63);
        assert_eq!(pace.max_prefill_tokens(1, false), 511);
        assert_eq!(pace.max_prefill_tokens(510, true), 2);
    }
}
