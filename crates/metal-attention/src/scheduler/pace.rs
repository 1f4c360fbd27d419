//! How many tokens a step may have so that nobody waits long for the next one.

use std::time::Duration;

/// How long a step may take while other texts wait for its end.
const STEP: Duration = Duration::from_millis(100);

/// Tokens of prompts that a step takes in any case: with fewer, reading the weights is most of its work.
const LEAST: usize = 16;

/// Learns from the steps so far how many tokens the next one may have.
#[derive(Debug)]
pub(super) struct Pace {
    /// Tokens that took about [`STEP`].
    n_tokens: usize,
    /// Most tokens of a step.
    n_batch: usize,
}

impl Pace {
    /// Before the first step; a step has no more than `n_batch` tokens.
    pub fn new(n_batch: usize) -> Self {
        Self { n_tokens: n_batch.min(64), n_batch }
    }

    /// Tokens of prompts for a step that takes `n_decode` texts further. Where `hurry` is false nobody else waits for its
    /// end.
    pub fn prompt_tokens(&self, n_decode: usize, hurry: bool) -> usize {
        let room = self.n_batch - n_decode;
        if hurry { self.n_tokens.saturating_sub(n_decode).max(LEAST).min(room) } else { room }
    }

    /// A step of so many tokens took so long.
    pub fn took(&mut self, n_tokens: usize, time: Duration) {
        let fit = n_tokens as f64 * STEP.as_secs_f64() / time.as_secs_f64().max(1e-9);
        // A small step tells little about larger ones, but that they may be larger.
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
        let mut pace = Pace::new(512);
        let mut steps = |per_token: Duration, n: usize| {
            for _ in 0..n {
                let n_tokens = 4 + pace.prompt_tokens(4, true);
                pace.took(n_tokens, per_token * n_tokens as u32);
            }
            4 + pace.prompt_tokens(4, true)
        };
        assert_eq!(steps(Duration::from_millis(1), 3), 100);
        assert_eq!(steps(Duration::from_micros(400), 3), 250);
        assert_eq!(steps(Duration::from_micros(10), 3), 512);
        assert_eq!(steps(Duration::from_millis(50), 3), 4 + LEAST);
        assert_eq!(steps(Duration::from_millis(2), 3), 50);
    }

    #[test]
    fn decode_alone_makes_no_step_smaller() {
        let mut pace = Pace::new(512);
        pace.took(1, Duration::from_millis(60));
        assert_eq!(pace.prompt_tokens(1, true), 63);
        assert_eq!(pace.prompt_tokens(1, false), 511);
        assert_eq!(pace.prompt_tokens(510, true), 2);
    }
}
