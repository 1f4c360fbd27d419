//! `--compare`: compares the results of a bench run with those of an earlier report.

use std::path::Path;

use super::report::{BenchReport, BenchResult, ResultComparison, SCHEMA_VERSION, TokensPerSecond};
use crate::cli_error::CliError;
use crate::units;

/// The smallest noise of a ratio: changes below 1 % are not reported, however close the samples are.
const MIN_NOISE: f64 = 0.01;

/// An earlier report, written by `--json`.
pub struct EarlierReport(BenchReport);

impl EarlierReport {
    /// Reads a report. An error if its schema version differs, or if a result has no samples above 0.
    pub fn read(path: &Path) -> Result<Self, CliError> {
        let unusable = |why: String| {
            let file = path.display();
            CliError::Usage(format!("cannot compare with {file}: {why}; --compare takes what bench --json wrote"))
        };
        let text = std::fs::read(path).map_err(|e| unusable(e.to_string()))?;
        let json: serde_json::Value = serde_json::from_slice(&text).map_err(|e| unusable(e.to_string()))?;
        match json.get("schema_version").and_then(serde_json::Value::as_u64) {
            Some(version) if version == u64::from(SCHEMA_VERSION) => {}
            Some(version) => {
                let message = format!("its schema_version is {version} where this program knows {SCHEMA_VERSION}");
                return Err(unusable(message));
            }
            None => return Err(unusable("it has no schema_version".into())),
        }
        let report: BenchReport = serde_json::from_value(json).map_err(|e| unusable(e.to_string()))?;
        let positive = |result: &BenchResult| result.tokens_per_second.samples.iter().all(|&rate| rate > 0.0);
        match report.results.iter().find(|result| result.tokens_per_second.samples.is_empty() || !positive(result)) {
            Some(bad) => Err(unusable(format!("a result of {} has no samples above 0", bad.model))),
            None => Ok(Self(report)),
        }
    }

    /// Sets the comparison of each result that the earlier report has, too. Returns notes for the user: results that are new,
    /// and differences of flags or machine.
    pub fn compare(&self, report: &mut BenchReport) -> Vec<String> {
        let mut n_new = 0;
        for result in &mut report.results {
            let same = self.0.results.iter().find(|earlier| same_test(earlier, result));
            result.comparison =
                same.and_then(|earlier| compare(&earlier.tokens_per_second.samples, &result.tokens_per_second));
            n_new += usize::from(result.comparison.is_none());
        }
        let mut notes = Vec::new();
        if n_new > 0 {
            notes.push(format!("{} not in the earlier report", units::count(n_new, "result")));
        }
        let (old, new) = (&self.0.settings, &report.settings);
        if (&old.cache_type, old.exact, old.n_ubatch) != (&new.cache_type, new.exact, new.n_ubatch) {
            notes.push("the earlier report was made with other engine flags".into());
        }
        if self.0.machine != report.machine {
            notes.push("the earlier report was made on another machine".into());
        }
        notes
    }
}

/// Whether both results are of the same model (by hash), test, threads and device.
fn same_test(a: &BenchResult, b: &BenchResult) -> bool {
    let key = |r: &BenchResult| (r.phase, [r.n_prompt, r.n_gen, r.depth, r.batch, r.threads], r.device.clone());
    a.model_sha256 == b.model_sha256 && key(a) == key(b)
}

/// The ratio of medians with its noise. `None`: there are no earlier samples.
fn compare(earlier: &[f64], now: &TokensPerSecond) -> Option<ResultComparison> {
    let earlier = TokensPerSecond::new(earlier.to_vec())?;
    let ratio = now.median / earlier.median;
    // The relative variances of a quotient's parts add up. A ratio beyond two standard deviations is chance once in twenty times.
    let relative = |rates: &TokensPerSecond| rates.stddev / rates.mean;
    let noise = (2.0 * relative(&earlier).hypot(relative(now))).max(MIN_NOISE);
    let noise = (earlier.samples.len() > 1 && now.samples.len() > 1).then_some(noise);
    let moved = noise.is_some_and(|noise| (ratio - 1.0).abs() > noise);
    Some(ResultComparison { earlier_median: earlier.median, ratio, noise, moved })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(earlier: &[f64], now: &[f64]) -> ResultComparison {
        compare(earlier, &TokensPerSecond::new(now.to_vec()).unwrap()).unwrap()
    }

    #[test]
    fn a_ratio_beyond_the_noise_has_moved() {
        // Standard deviation 2 of a mean of 100, and 3 of 150: 2 % each, 2 * sqrt(2) * 2 % together.
        let moved = of(&[98.0, 100.0, 102.0], &[147.0, 150.0, 153.0]);
        assert_eq!((moved.earlier_median, moved.ratio, moved.moved), (100.0, 1.5, true));
        assert!((moved.noise.unwrap() - 0.04 * 2f64.sqrt()).abs() < 1e-12, "{moved:?}");
        assert!(!of(&[98.0, 100.0, 102.0], &[103.0, 105.0, 107.0]).moved);
        assert!(of(&[98.0, 100.0, 102.0], &[90.0, 92.0, 94.0]).moved);
    }

    #[test]
    fn one_percent_is_always_noise_and_a_single_sample_has_none() {
        assert_eq!(of(&[100.0, 100.0], &[100.9, 100.9]).noise, Some(0.01));
        assert!(!of(&[100.0, 100.0], &[100.9, 100.9]).moved);
        assert!(of(&[100.0, 100.0], &[101.1, 101.1]).moved);
        let one = of(&[100.0], &[300.0, 301.0]);
        assert_eq!((one.noise, one.moved), (None, false));
    }
}
