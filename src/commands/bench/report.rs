//! The report of a bench run: the JSON object of `--json`. docs/benchmark.md and docs/bench.schema.json describe the fields.

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use metal_attention::{Device, DeviceInfo, Phase, cpu_simd_name, physical_cores};
use serde::{Deserialize, Serialize};

use super::plan::BenchTest;

/// Raised by every change that breaks readers of older reports.
pub const SCHEMA_VERSION: u32 = 1;

/// The report of a bench run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BenchReport {
    /// [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// The program.
    pub engine: EngineInfo,
    /// The machine.
    pub machine: MachineInfo,
    /// The time at which the measurement began, in seconds since 1970 (UTC).
    pub unix_time: u64,
    /// The flags of the run.
    pub settings: BenchSettings,
    /// The results in the order they were measured.
    pub results: Vec<BenchResult>,
    /// The tests that were not run.
    pub skipped: Vec<SkippedTest>,
    /// Whether Ctrl-C ended the measurement early.
    pub interrupted: bool,
}

/// The program that measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EngineInfo {
    /// `metal-attention`.
    pub name: String,
    /// The version of the program.
    pub version: String,
    /// The git commit it was built from. `None`: not built from a git checkout.
    pub commit: Option<String>,
}

/// The machine that was measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MachineInfo {
    /// The operating system, in Rust's words.
    pub os: String,
    /// The architecture, in Rust's words.
    pub arch: String,
    /// The CPU's name. `None`: not known.
    pub cpu: Option<String>,
    /// The instruction set that the CPU's kernels use.
    pub simd: String,
    /// The number of physical cores.
    pub physical_cores: usize,
}

/// The flags of a bench run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BenchSettings {
    /// Timed runs of each test.
    pub iterations: usize,
    /// Runs before the timed ones.
    pub warmup: usize,
    /// The number format of the KV cache.
    pub cache_type: String,
    /// Whether `--exact` was given.
    pub exact: bool,
    /// The largest micro-batch. `null`: the device's default.
    pub n_ubatch: Option<usize>,
}

/// The names of [`Phase`] in JSON and CSV.
#[derive(Serialize, Deserialize)]
#[serde(remote = "Phase", rename_all = "lowercase")]
pub enum PhaseName {
    /// `prefill`.
    Prefill,
    /// `decode`.
    Decode,
}

/// The result of one test of one model on one device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BenchResult {
    /// The file's name without its folder.
    pub model: String,
    /// The SHA-256 of the file; of a split model, of its files concatenated.
    pub model_sha256: String,
    /// The phase that was measured.
    #[serde(with = "PhaseName")]
    pub phase: Phase,
    /// Tokens of the prompt; 0 for decode.
    pub n_prompt: usize,
    /// Generated tokens of each sequence; 0 for prefill.
    pub n_gen: usize,
    /// Tokens of each sequence before the timed part.
    pub depth: usize,
    /// Sequences that were decoded together.
    pub batch: usize,
    /// Threads that compute; 1 for a GPU.
    pub threads: usize,
    /// The device in the form of `--device`; for `auto` the chosen one: `cpu`, `cuda` or `gpu`.
    pub device: String,
    /// The name of the CPU or GPU.
    pub device_name: String,
    /// The GPU's driver. `None` for a CPU.
    pub driver: Option<String>,
    /// The speed.
    pub tokens_per_second: TokensPerSecond,
    /// The comparison with an earlier report, only with `--compare` and if that report has the same test.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub comparison: Option<ResultComparison>,
}

/// The speed of a test in tokens per second, over its timed runs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TokensPerSecond {
    /// The mean of the samples.
    pub mean: f64,
    /// The median of the samples.
    pub median: f64,
    /// The standard deviation of the samples (divided by n - 1); 0 for a single sample.
    pub stddev: f64,
    /// The largest sample.
    pub best: f64,
    /// One number for each run, in order.
    pub samples: Vec<f64>,
}

/// The comparison of a result with that of an earlier report.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ResultComparison {
    /// The median of the earlier result, in tokens per second.
    pub earlier_median: f64,
    /// The median divided by the earlier median.
    pub ratio: f64,
    /// The distance of the ratio from 1 that chance explains. `None`: one of the results has a single sample.
    pub noise: Option<f64>,
    /// Whether the distance of the ratio from 1 is larger than the noise.
    pub moved: bool,
}

/// A test that was not run. The fields are those of [`BenchResult`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SkippedTest {
    /// The file's name without its folder.
    pub model: String,
    /// The phase of the test.
    #[serde(with = "PhaseName")]
    pub phase: Phase,
    /// Tokens of the prompt; 0 for decode.
    pub n_prompt: usize,
    /// Generated tokens of each sequence; 0 for prefill.
    pub n_gen: usize,
    /// Tokens of each sequence before the timed part.
    pub depth: usize,
    /// Sequences that are decoded together.
    pub batch: usize,
    /// The reason, for people.
    pub reason: String,
}

impl BenchReport {
    /// A report without results, of this program and machine.
    pub fn new(settings: BenchSettings) -> Self {
        Self {
            schema_version: SCHEMA_VERSION,
            engine: EngineInfo {
                name: "metal-attention".into(),
                version: env!("CARGO_PKG_VERSION").into(),
                commit: option_env!("METAL_ATTENTION_COMMIT").map(str::to_owned),
            },
            machine: MachineInfo::this(),
            unix_time: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |t| t.as_secs()),
            settings,
            results: Vec::new(),
            skipped: Vec::new(),
            interrupted: false,
        }
    }

    /// Adds tests that the model cannot run, each with its reason.
    pub fn skip(&mut self, model: &str, tests: Vec<(BenchTest, String)>) {
        self.skipped.extend(tests.into_iter().map(|(test, reason)| SkippedTest {
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
    /// The result of `test` with the model file `model`, whose SHA-256 is `hash`. `device` is the requested device, `info`
    /// describes the device that ran it, and `cpu` is the CPU's name.
    pub fn new(
        model: &str,
        hash: &str,
        test: &BenchTest,
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
    /// The statistics of `samples`. `None` if there are none.
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

impl MachineInfo {
    /// This machine.
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

/// The CPU's name from `/proc/cpuinfo`. `None` if the system has no such file.
fn cpu_name() -> Option<String> {
    let info = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = info.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

/// The last part of a path, or the whole name of a model that is no file, such as the built-in one.
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
