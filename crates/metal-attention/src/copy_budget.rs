//! The time that copies of sequences out of the KV cache may take from the sequences that run.

use std::time::{Duration, Instant};

/// Copies take `1 / SHARE` of the time that passes.
const SHARE: u32 = 16;

/// Most time of a copy: the sequences that run wait for its end.
const MOST: Duration = Duration::from_millis(100);

/// Copies of fewer bytes are made in any case: what they take cannot be measured well, and is little.
const SMALL: u64 = 1 << 20;

/// Bytes a second, before the first copy.
const RATE: f64 = 2e9;

/// Time that is saved up for copies, and their rate.
#[derive(Debug)]
pub(crate) struct CopyBudget {
    left: Duration,
    /// When `left` was that.
    at: Instant,
    /// Bytes a second of the last copy that was not small.
    rate: f64,
}

impl CopyBudget {
    /// That of an engine that begins now.
    pub fn new() -> Self {
        Self { left: MOST, at: Instant::now(), rate: RATE }
    }

    /// Bytes that may be copied at `now`.
    pub fn bytes(&mut self, now: Instant) -> u64 {
        self.left = MOST.min(self.left + now.saturating_duration_since(self.at) / SHARE);
        self.at = now;
        let fit = (self.left.as_secs_f64() * self.rate) as u64;
        fit.max(SMALL)
    }

    /// A copy of `bytes` took `time`.
    pub fn took(&mut self, bytes: u64, time: Duration) {
        self.left = self.left.saturating_sub(time);
        if bytes >= SMALL {
            self.rate = bytes as f64 / time.as_secs_f64().max(1e-9);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_take_a_sixteenth_of_the_time() {
        let mut budget = CopyBudget::new();
        let start = budget.at;
        let at = |ms: u64| start + Duration::from_millis(ms);
        assert_eq!(budget.bytes(at(0)), 200_000_000);
        // All of it at half the rate.
        budget.took(100_000_000, Duration::from_millis(100));
        assert_eq!(budget.bytes(at(0)), SMALL);
        assert_eq!(budget.bytes(at(160)), 10_000_000);
        assert_eq!(budget.bytes(at(320)), 20_000_000);
        budget.took(8_000_000, Duration::from_millis(8));
        assert_eq!(budget.bytes(at(320)), 12_000_000);
        // What is not used is lost from some time on.
        assert_eq!(budget.bytes(at(100_000)), 100_000_000);
        // A small copy that something else held up changes no rate.
        budget.took(1000, Duration::from_millis(30));
        assert_eq!(budget.bytes(at(100_000)), 70_000_000);
    }
}
