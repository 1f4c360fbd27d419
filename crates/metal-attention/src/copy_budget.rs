//! A time budget for copying sequences out of the KV cache, so that running sequences are not held up.

use std::time::{Duration, Instant};

/// Copies may use `1 / SHARE` of the elapsed time.
const SHARE: u32 = 16;

/// Maximum time of one copy, during which running sequences wait.
const MOST: Duration = Duration::from_millis(100);

/// Copies of fewer bytes are always allowed: their time is short and cannot be measured well.
const SMALL: u64 = 1 << 20;

/// Assumed bytes per second before the first copy.
const RATE: f64 = 2e9;

/// The time available for copies, and their measured rate.
#[derive(Debug)]
pub(crate) struct CopyBudget {
    /// Time available at `at`.
    left: Duration,
    /// Time of the last update of `left`.
    at: Instant,
    /// Bytes per second of the last copy that was not small.
    rate: f64,
}

impl CopyBudget {
    /// The budget at the start.
    pub fn new() -> Self {
        Self { left: MOST, at: Instant::now(), rate: RATE }
    }

    /// Bytes that may be copied at time `now`.
    pub fn bytes(&mut self, now: Instant) -> u64 {
        self.left = MOST.min(self.left + now.saturating_duration_since(self.at) / SHARE);
        self.at = now;
        let fit = (self.left.as_secs_f64() * self.rate) as u64;
        fit.max(SMALL)
    }

    /// Records that a copy of `bytes` bytes took `time`.
    pub fn record_copy(&mut self, bytes: u64, time: Duration) {
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
        // The whole budget at half the assumed rate.
        budget.record_copy(100_000_000, Duration::from_millis(100));
        assert_eq!(budget.bytes(at(0)), SMALL);
        assert_eq!(budget.bytes(at(160)), 10_000_000);
        assert_eq!(budget.bytes(at(320)), 20_000_000);
        budget.record_copy(8_000_000, Duration::from_millis(8));
        assert_eq!(budget.bytes(at(320)), 12_000_000);
        // Unused time is capped.
        assert_eq!(budget.bytes(at(100_000)), 100_000_000);
        // A small copy does not change the rate.
        budget.record_copy(1000, Duration::from_millis(30));
        assert_eq!(budget.bytes(at(100_000)), 70_000_000);
    }
}
