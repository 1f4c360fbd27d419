//! Token counts and durations of a prompt and its continuation.

use std::time::Duration;

/// Token counts and durations since the last prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Timings {
    /// Evaluated tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens of the prompt that were in the KV cache already.
    pub cached_tokens: usize,
    /// Duration of the prompt's evaluation, sampling of the first token included.
    pub prefill: Duration,
    /// Generated tokens, the end token not included.
    pub generated: usize,
    /// Tokens chosen after the first one, the end token included. Each takes a decode step, except drafts that hold.
    pub decode_steps: usize,
    /// Drafts that were evaluated.
    pub drafted: usize,
    /// Those of them that held.
    pub accepted: usize,
    /// Duration of the decode steps.
    pub decode: Duration,
    /// From the prompt to the first token; `None` before it.
    pub first_token: Option<Duration>,
}

impl Timings {
    /// Prompt tokens per second; `None` if nothing was measured.
    pub fn prefill_tokens_per_second(&self) -> Option<f64> {
        per_second(self.prompt_tokens, self.prefill)
    }

    /// Decode steps per second; `None` if nothing was measured.
    pub fn decode_tokens_per_second(&self) -> Option<f64> {
        per_second(self.decode_steps, self.decode)
    }
}

fn per_second(n: usize, time: Duration) -> Option<f64> {
    (n > 0 && !time.is_zero()).then(|| n as f64 / time.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_tokens_over_seconds() {
        let timings = Timings {
            prompt_tokens: 100,
            prefill: Duration::from_millis(250),
            decode_steps: 3,
            decode: Duration::from_millis(1500),
            ..Default::default()
        };
        assert_eq!(timings.prefill_tokens_per_second(), Some(400.0));
        assert_eq!(timings.decode_tokens_per_second(), Some(2.0));
        assert_eq!(Timings::default().decode_tokens_per_second(), None);
    }
}
