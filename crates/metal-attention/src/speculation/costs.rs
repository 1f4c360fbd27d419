//! What steps cost, and how many drafts pay.

use std::time::Duration;

/// Rows of the largest step that is timed.
const MAX_ROWS: usize = 128;

/// Weight of the latest duration in an average.
const LATEST: f64 = 0.2;

/// A duration counts at most as this multiple of the average: the machine may have been busy.
const OUTLIER: f64 = 3.0;

/// The average durations of decode steps by their number of rows: one for each sequence and one for each draft.
///
/// Steps without drafts are timed apart: they may run ahead of the host, and other kernels may run them.
#[derive(Debug)]
pub struct StepCosts {
    plain: Averages,
    drafted: Averages,
}

/// Seconds of a step of `i + 1` rows; `None` before the first one.
#[derive(Debug)]
struct Averages([Option<f64>; MAX_ROWS]);

impl Default for StepCosts {
    fn default() -> Self {
        Self { plain: Averages([None; MAX_ROWS]), drafted: Averages([None; MAX_ROWS]) }
    }
}

impl StepCosts {
    /// Records that a step over `n_seq` sequences with `n_drafts` drafts in all took `time`.
    pub fn record(&mut self, n_seq: usize, n_drafts: usize, time: Duration) {
        let averages = if n_drafts == 0 { &mut self.plain } else { &mut self.drafted };
        averages.record(n_seq + n_drafts, time.as_secs_f64());
    }

    /// The number of drafts that gives the most tokens a second in a step over `n_seq` sequences; 0 before a step without drafts
    /// was timed. `probabilities`: that each draft holds with all before it in its sequence, highest first.
    pub fn best_depth(&self, n_seq: usize, probabilities: &[f32]) -> usize {
        let Some(plain) = self.plain.get(n_seq) else { return 0 };
        let mut best = (0, n_seq as f64 / plain);
        let mut tokens = n_seq as f64;
        // At most twice as many rows as were timed: what more of them cost is not known.
        let largest = self.drafted.0.iter().rposition(Option::is_some).map_or(n_seq, |i| (i + 1).max(n_seq));
        let most = (2 * largest - n_seq).min(probabilities.len());
        for (n, &probability) in (1..=most).zip(probabilities) {
            tokens += f64::from(probability);
            let rate = tokens / self.drafted_seconds((n_seq, plain), n_seq + n);
            if rate > best.1 {
                best = (n, rate);
            }
        }
        best.0
    }

    /// The seconds of a step of `n_rows` rows with drafts, by those that were timed and the step without drafts, `plain`: its
    /// rows and seconds. Between two of them on the line through both, and beyond the largest on that through it and `plain`.
    fn drafted_seconds(&self, plain: (usize, f64), n_rows: usize) -> f64 {
        let timed = |n: usize| Some((n, self.drafted.get(n)?));
        let before = (plain.0 + 1..=n_rows).rev().find_map(timed).unwrap_or(plain);
        let after = (n_rows..=MAX_ROWS).find_map(timed);
        let on_line = |(n, a): (usize, f64), (m, b): (usize, f64)| a + (b - a) * (n_rows - n) as f64 / (m - n) as f64;
        match after {
            _ if before.0 == n_rows => before.1,
            Some(after) => on_line(before, after),
            None if before.0 > plain.0 => on_line(plain, before).max(before.1),
            None => plain.1,
        }
    }
}

impl Averages {
    fn get(&self, n_rows: usize) -> Option<f64> {
        self.0.get(n_rows.checked_sub(1)?).copied().flatten()
    }

    fn record(&mut self, n_rows: usize, seconds: f64) {
        let Some(place) = n_rows.checked_sub(1).and_then(|i| self.0.get_mut(i)) else { return };
        *place = Some(match *place {
            None => seconds,
            Some(average) => average + LATEST * (seconds.min(OUTLIER * average) - average),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Costs of one step without drafts over `plain.0` sequences, and of steps with drafts over as many, by their rows.
    fn timed(plain: (usize, u64), drafted: &[(usize, u64)]) -> StepCosts {
        let mut costs = StepCosts::default();
        costs.record(plain.0, 0, Duration::from_micros(plain.1));
        for &(n, micros) in drafted {
            costs.record(plain.0, n - plain.0, Duration::from_micros(micros));
        }
        costs
    }

    #[test]
    fn costs_lie_on_lines_through_what_was_timed() {
        let costs = timed((1, 100), &[(3, 120), (7, 200), (999, 9)]);
        let micros = |n| (1e6 * costs.drafted_seconds((1, 1e-4), n)).round() as u64;
        assert_eq!([2, 3, 4, 7, 13].map(micros), [110, 120, 140, 200, 300]);
        assert_eq!((1e6 * timed((3, 50), &[]).drafted_seconds((3, 5e-5), 9)).round() as u64, 50);
        // An outlier counts as three times the average.
        let costs = timed((1, 100), &[(2, 100), (2, 1_000_000)]);
        assert_eq!((1e6 * costs.drafted.get(2).unwrap()).round() as u64, 140);
    }

    #[test]
    fn as_many_drafts_as_pay() {
        // A device on which rows cost nothing, and one on which each costs as much as a step.
        let cheap = timed((1, 100), &[(32, 110)]);
        let dear = timed((1, 100), &[(2, 200), (4, 400)]);
        let halves: Vec<f32> = (1..=16).map(|i| 0.5f32.powi(i)).collect();
        assert_eq!(dear.best_depth(1, &[1.0, 0.99, 0.9]), 0);
        assert_eq!(cheap.best_depth(1, &[0.9; 16]), 16);
        assert_eq!(cheap.best_depth(1, &halves), 7);
        assert_eq!(cheap.best_depth(1, &[0.001]), 0);
        // In a batch a row costs a smaller part of a step, but also gains a smaller part.
        assert_eq!(timed((8, 100), &[(16, 130)]).best_depth(8, &[0.5, 0.4, 0.3, 0.1]), 2);
        // Nothing was timed; then one row was, and twice as many are tried.
        assert_eq!(StepCosts::default().best_depth(1, &[0.9]), 0);
        assert_eq!(timed((1, 100), &[]).best_depth(1, &[0.9; 8]), 1);
        assert_eq!(timed((1, 100), &[(2, 101)]).best_depth(1, &[0.9; 8]), 3);
    }
}
