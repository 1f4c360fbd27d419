//! What steps cost, and how many drafts pay.

use std::time::Duration;

/// Rows of the largest step that is timed.
const MAX_ROWS: usize = 128;

/// Weight of the latest duration in an average.
const LATEST: f64 = 0.2;

/// The first steps of a size, of which the shortest counts: they load kernels, and record graphs of launches.
const FIRST_STEPS: u32 = 6;

/// A duration counts at most as this multiple of the average: the machine may have been busy.
const OUTLIER: f64 = 3.0;

/// The average durations of decode steps by their number of rows: one for each sequence and one for each draft.
///
/// Steps without drafts are timed apart: they may run ahead of the host, and other kernels may run them. A number of rows is
/// known once it was timed twice. What is not known counts as cheap, so that it is tried when
/// likely drafts are there. On a GPU two rows may cost almost as much as sixteen.
#[derive(Debug)]
pub struct StepCosts {
    plain: Averages,
    drafted: Averages,
}

/// The average of `i + 1` rows at index `i`; `None` before the first step.
#[derive(Debug)]
struct Averages([Option<Average>; MAX_ROWS]);

/// An average duration.
#[derive(Debug, Clone, Copy)]
struct Average {
    seconds: f64,
    /// The steps counted so far, up to [`FIRST_STEPS`].
    n_steps: u32,
}

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

    /// The number of drafts that gives the most tokens a second in a step over `n_seq` sequences, and that rate; 0 drafts until the
    /// cost of a step without drafts is known. `probabilities`: that each draft holds with all before it in its sequence, highest
    /// first. `drafting`: seconds that it takes to propose them.
    pub fn best_depth(&self, n_seq: usize, probabilities: &[f32], drafting: f64) -> (usize, f64) {
        let Some(plain) = self.plain.between(n_seq) else { return (0, 0.0) };
        let mut best = (0, n_seq as f64 / plain);
        let mut tokens = n_seq as f64;
        // Steps of more rows are not timed.
        let most = MAX_ROWS.saturating_sub(n_seq);
        for (n, &probability) in (1..=most).zip(probabilities) {
            tokens += f64::from(probability);
            let rate = tokens / (self.drafted_seconds((n_seq, plain), n_seq + n) + drafting);
            if rate > best.1 {
                best = (n, rate);
            }
        }
        best
    }

    /// Whether the cost of a step over `n_seq` sequences without drafts is known.
    pub fn is_known(&self, n_seq: usize) -> bool {
        self.plain.between(n_seq).is_some()
    }

    /// The seconds of a step of `n_rows` rows with drafts, by the known ones and the step without drafts, `plain`: its rows and
    /// seconds. Between two of them on the line through both, beyond the largest as the largest.
    fn drafted_seconds(&self, plain: (usize, f64), n_rows: usize) -> f64 {
        let known = |n: usize| Some((n, self.drafted.known(n)?));
        let before = (plain.0 + 1..=n_rows).rev().find_map(known).unwrap_or(plain);
        let after = (n_rows..=MAX_ROWS).find_map(known);
        let on_line = |(n, a): (usize, f64), (m, b): (usize, f64)| a + (b - a) * (n_rows - n) as f64 / (m - n) as f64;
        match after {
            Some(after) if before.0 < n_rows => on_line(before, after),
            Some(_) | None => before.1,
        }
    }
}

impl Averages {
    /// The seconds of a step of `n_rows` rows, if they are known.
    fn known(&self, n_rows: usize) -> Option<f64> {
        let average = self.0.get(n_rows.checked_sub(1)?).copied().flatten();
        average.filter(|average| average.n_steps > 1).map(|average| average.seconds)
    }

    /// The seconds of a step of `n_rows` rows, on the line through those next to it if they are not known themselves. `None` if
    /// none on one side of it are known.
    fn between(&self, n_rows: usize) -> Option<f64> {
        let known = |n: usize| Some((n, self.known(n)?));
        let ((n, a), (m, b)) = ((1..=n_rows).rev().find_map(known)?, (n_rows..=MAX_ROWS).find_map(known)?);
        Some(if n == m { a } else { a + (b - a) * (n_rows - n) as f64 / (m - n) as f64 })
    }

    fn record(&mut self, n_rows: usize, seconds: f64) {
        let Some(place) = n_rows.checked_sub(1).and_then(|i| self.0.get_mut(i)) else { return };
        *place = Some(match *place {
            None => Average { seconds, n_steps: 1 },
            Some(Average { seconds: shortest, n_steps }) if n_steps < FIRST_STEPS => {
                Average { seconds: shortest.min(seconds), n_steps: n_steps + 1 }
            }
            Some(Average { seconds: average, n_steps }) => {
                let change = seconds.min(OUTLIER * average) - average;
                Average { seconds: average + LATEST * change, n_steps }
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Costs of steps without drafts over `plain.0` sequences, and of steps with drafts over as many, by their rows.
    fn timed(plain: (usize, u64), drafted: &[(usize, u64)]) -> StepCosts {
        let mut costs = StepCosts::default();
        for (n, micros) in [plain].into_iter().chain(drafted.iter().copied()) {
            // The first steps take longer.
            for time in [9, 2, 4, 2, 2, 1].map(|times| times * micros) {
                costs.record(plain.0, n - plain.0, Duration::from_micros(time));
            }
        }
        costs
    }

    #[test]
    fn costs_lie_on_lines_between_what_is_known() {
        let costs = timed((1, 100), &[(3, 120), (7, 200), (999, 9)]);
        let micros = |n| (1e6 * costs.drafted_seconds((1, 1e-4), n)).round() as u64;
        assert_eq!([2, 3, 4, 7, 13].map(micros), [110, 120, 140, 200, 200]);
        assert_eq!((1e6 * timed((3, 50), &[]).drafted_seconds((3, 5e-5), 9)).round() as u64, 50);
        // An outlier counts as three times the average.
        let mut costs = timed((1, 100), &[(2, 100)]);
        costs.record(1, 1, Duration::from_secs(1));
        assert_eq!((1e6 * costs.drafted.known(2).unwrap()).round() as u64, 140);
    }

    #[test]
    fn as_many_drafts_as_pay() {
        // A device on which rows cost nothing, and one on which each costs as much as a step.
        let cheap = timed((1, 100), &[(32, 110)]);
        let dear = timed((1, 100), &[(2, 200), (4, 400)]);
        let halves: Vec<f32> = (1..=16).map(|i| 0.5f32.powi(i)).collect();
        assert_eq!(dear.best_depth(1, &[1.0, 0.99, 0.9], 0.0).0, 0);
        assert_eq!(cheap.best_depth(1, &[0.9; 16], 0.0).0, 16);
        assert_eq!(cheap.best_depth(1, &halves, 0.0).0, 7);
        assert_eq!(cheap.best_depth(1, &[0.001], 0.0).0, 0);
        // In a batch a row costs a smaller part of a step, but also gains a smaller part.
        assert_eq!(timed((8, 100), &[(16, 130)]).best_depth(8, &[0.5, 0.4, 0.3, 0.1], 0.0).0, 2);
        // Proposing them takes as long as a step.
        assert_eq!(cheap.best_depth(1, &[0.9; 16], 1e-4), (16, cheap.best_depth(1, &[0.9; 16], 1e-4).1));
        assert_eq!(cheap.best_depth(1, &[0.9], 1e-4).0, 0);
        // Nothing was timed, or the cost of a step without drafts is not known yet; then rows count as cheap.
        assert_eq!(StepCosts::default().best_depth(1, &[0.9], 0.0).0, 0);
        let mut costs = StepCosts::default();
        costs.record(1, 0, Duration::from_micros(100));
        assert_eq!(costs.best_depth(1, &[0.9], 0.0).0, 0);
        assert_eq!(timed((1, 100), &[]).best_depth(1, &[0.9; 8], 0.0).0, 8);
        // Two rows cost almost as much as sixteen: a few drafts do not pay, many do.
        let stairs = timed((1, 100), &[(2, 205), (17, 220)]);
        assert_eq!((stairs.best_depth(1, &[0.9], 0.0).0, stairs.best_depth(1, &[0.9; 16], 0.0).0), (0, 16));
    }
}
