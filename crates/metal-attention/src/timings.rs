//! What a prompt and its continuation cost.

use std::time::Duration;

/// Tokens and time since the last prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Timings {
    /// Tokens of the prompt that were evaluated so far.
    pub prompt_tokens: usize,
    /// Tokens of the prompt that were in the KV cache already.
    pub cached_tokens: usize,
    /// Time spent on the prompt, the choice of the first token included.
    pub prefill: Duration,
    /// Tokens generated, without the one that ended the generation.
    pub generated: usize,
    /// Steps after the first token: one token each, the one that ended the generation included.
    pub decode_steps: usize,
    /// Time spent on the steps after the first token.
    pub decode: Duration,
    /// From the prompt to the first token; `None` while there is none.
    pub first_token: Option<Duration>,
}

impl Timings {
    /// Prompt tokens per second; `None` when nothing was measured.
    pub fn prefill_tokens_per_second(&self) -> Option<f64> {
        per_second(self.prompt_tokens, self.prefill)
    }

    /// Steps per second after the first token; `None` when nothing was measured.
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
