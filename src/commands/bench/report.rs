//! The results, as `--json` writes them. docs/benchmark.md and docs/bench.schema.json describe the fields.

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use metal_attention::{Device, DeviceInfo, Phase, cpu_simd_name, physical_cores};
use serde::{Deserialize, Serialize};

use super::plan::Test;

/// Raised with every change that a reader of older reports would stumble over.
pub const SCHEMA_VERSION: u32 = 1;

/// Everything that was measured, and where.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    pub schema_version: u32,
    pub engine: Engine,
    pub machine: Machine,
    /// When the measurement began, in seconds since 1970 (UTC).
    pub unix_time: u64,
    pub settings: Settings,
    pub results: Vec<BenchResult>,
    pub skipped: Vec<Skipped>,
    /// Ctrl-C ended the measurement before all was done.
    pub interrupted: bool,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Engine {
    pub name: String,
    pub version: String,
    /// `None`: it was not built from a git checkout.
    pub commit: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    pub os: String,
    pub arch: String,
    /// The CPU's name, where the system tells.
    pub cpu: Option<String>,
    /// The instruction set of the CPU's kernels.
    pub simd: String,
    pub physical_cores: usize,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    pub iterations: usize,
    pub warmup: usize,
    pub cache_type: String,
    pub exact: bool,
    /// `null`: as many as suit the device.
    pub n_ubatch: Option<usize>,
}

/// How a [`Phase`] is written.
#[derive(Serialize, Deserialize)]
#[serde(remote = "Phase", rename_all = "lowercase")]
pub enum PhaseName {
    Prefill,
    Decode,
}

/// One test of one model on one device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BenchResult {
    /// The file's name without its folder.
    pub model: String,
    /// Of the file; of a split model's files one after the other.
    pub model_sha256: String,
    #[serde(with = "PhaseName")]
    pub phase: Phase,
    /// 0 for a decode.
    pub n_prompt: usize,
    /// Of each sequence; 0 for a prefill.
    pub n_gen: usize,
    /// Tokens in the context before the timing.
    pub depth: usize,
    /// Sequences that are decoded together.
    pub batch: usize,
    /// Threads that compute: 1 for a GPU.
    pub threads: usize,
    /// As named by `--device`; for `auto` what it took, `cpu`, `cuda` or `gpu`.
    pub device: String,
    pub device_name: String,
    /// The GPU's.
    pub driver: Option<String>,
    pub tokens_per_second: TokensPerSecond,
    /// Only with `--compare`, where the earlier report has the same test.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub comparison: Option<Comparison>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TokensPerSecond {
    pub mean: f64,
    pub median: f64,
    /// Of the sample (divided by n - 1); 0 where there is one sample only.
    pub stddev: f64,
    pub best: f64,
    /// In the order in which they were measured.
    pub samples: Vec<f64>,
}

/// A result against that of an earlier report.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    /// Tokens per second of the earlier report.
    pub earlier_median: f64,
    /// This median divided by the earlier one.
    pub ratio: f64,
    /// How far from 1 the ratio may be by chance; `None` where one of the two has fewer than two samples.
    pub noise: Option<f64>,
    /// The ratio is further from 1 than the noise.
    pub moved: bool,
}

/// A test that was not run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Skipped {
    pub model: String,
    #[serde(with = "PhaseName")]
    pub phase: Phase,
    pub n_prompt: usize,
    pub n_gen: usize,
    pub depth: usize,
    pub batch: usize,
    pub reason: String,
}

impl Report {
    /// A report without results yet.
    pub fn new(settings: Settings) -> Self {
        Self {
            schema_version: SCHEMA_VERSION,
            engine: Engine {
                name: "metal-attention".into(),
                version: env!("CARGO_PKG_VERSION").into(),
                commit: option_env!("METAL_ATTENTION_COMMIT").map(str::to_owned),
            },
            machine: Machine::this(),
            unix_time: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |t| t.as_secs()),
            settings,
            results: Vec::new(),
            skipped: Vec::new(),
            interrupted: false,
        }
    }

    /// Notes tests that a model cannot run, and why.
    pub fn skip(&mut self, model: &str, tests: Vec<(Test, String)>) {
        self.skipped.extend(tests.into_iter().map(|(test, reason)| Skipped {
            model: file_name(model),
            phase: test.phase(),
            n_prompt: test.n_prompt(),
            n_gen: test.n_gen(),
            depth: test.depth(),
            batch: test.batch(),
            reason,
        }));
    }
}

impl BenchResult {
    /// The result of `test` of the file `model` on `info`, which was asked for as `device`; `cpu` is the CPU's name.
    pub fn new(
        model: &str,
        hash: &str,
        test: &Test,
        device: &Device,
        info: &DeviceInfo,
        cpu: Option<&str>,
        tokens_per_second: TokensPerSecond,
    ) -> Self {
        let cpu = cpu.filter(|_| info.kind == "cpu");
        Self {
            model: file_name(model),
            model_sha256: hash.to_owned(),
            phase: test.phase(),
            n_prompt: test.n_prompt(),
            n_gen: test.n_gen(),
            depth: test.depth(),
            batch: test.batch(),
            threads: info.n_threads,
            device: if *device == Device::Auto { info.kind.to_owned() } else { device.to_string() },
            device_name: cpu.map_or(info.name.clone(), |cpu| format!("{cpu}, {}", info.name)),
            driver: info.driver.clone(),
            tokens_per_second,
            comparison: None,
        }
    }
}

impl TokensPerSecond {
    /// What `samples` say; `None` where there are none.
    pub fn new(samples: Vec<f64>) -> Option<Self> {
        let n = samples.len();
        let mut sorted = samples.clone();
        sorted.sort_by(f64::total_cmp);
        let best = *sorted.last()?;
        let mean = samples.iter().sum::<f64>() / n as f64;
        let squares: f64 = samples.iter().map(|x| (x - mean).powi(2)).sum();
        Some(Self {
            mean,
            median: f64::midpoint(sorted[(n - 1) / 2], sorted[n / 2]),
            stddev: if n > 1 { (squares / (n - 1) as f64).sqrt() } else { 0.0 },
            best,
            samples,
        })
    }
}

impl Machine {
    fn this() -> Self {
        Self {
            os: std::env::consts::OS.into(),
            arch: std::env::consts::ARCH.into(),
            cpu: cpu_name(),
            simd: cpu_simd_name().into(),
            physical_cores: physical_cores(),
        }
    }
}

/// The CPU's name, where Linux tells.
fn cpu_name() -> Option<String> {
    let info = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = info.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

/// The last part of a path, or the whole name of a model that is no file.
fn file_name(model: &str) -> String {
    Path::new(model).file_name().map_or(model.into(), |name| name.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statistics_match_hand_computed_ones() {
        let rates = TokensPerSecond::new(vec![2.0, 9.0, 4.0, 5.0]).unwrap();
        assert_eq!((rates.mean, rates.median, rates.best), (5.0, 4.5, 9.0));
        // Squares of -3, 4, -1, 0 add up to 26.
        assert!((rates.stddev - (26.0f64 / 3.0).sqrt()).abs() < 1e-12);
        assert_eq!(rates.samples, [2.0, 9.0, 4.0, 5.0]);
        let one = TokensPerSecond::new(vec![7.0]).unwrap();
        assert_eq!((one.mean, one.median, one.stddev, one.best), (7.0, 7.0, 0.0, 7.0));
        assert_eq!(TokensPerSecond::new(vec![3.0, 1.0, 2.0]).unwrap().median, 2.0);
        assert_eq!(TokensPerSecond::new(vec![]), None);
    }

    #[test]
    fn models_are_named_by_their_file() {
        assert_eq!(file_name("/models/a b.gguf"), "a b.gguf");
        assert_eq!(file_name("stories260K (built in)"), "stories260K (built in)");
    }
}
