//! The table of docs/performance.md is generated from docs/performance/results: `UPDATE_PERFORMANCE=1 cargo test -p
//! metal-attention-testing --test documents performance` writes it.

use std::fmt::Write;

use metal_attention_testing::root;
use serde::Deserialize;

use super::{Page, expect_none};

const BEGIN: &str = "<!-- generated from docs/performance/results -->\n";
const END: &str = "<!-- end of the generated part -->\n";

/// A file of docs/performance/results: what `bench --json` writes, or figures that were transcribed
/// (docs/performance/results/README.md).
#[derive(Deserialize)]
#[serde(untagged)]
enum Results {
    Transcribed(TranscribedReport),
    Bench(BenchReport),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TranscribedReport {
    #[serde(rename = "transcribed")]
    _transcribed: String,
    machine: String,
    device: String,
    commit: Option<String>,
    #[serde(rename = "command")]
    _command: String,
    peer: Option<String>,
    #[serde(rename = "note")]
    _note: String,
    results: Vec<Measurement>,
}

/// The part of a bench report (docs/bench.schema.json) that the table shows.
#[derive(Deserialize)]
struct BenchReport {
    engine: Engine,
    results: Vec<Measurement>,
}

#[derive(Deserialize)]
struct Engine {
    commit: Option<String>,
}

/// The speed of one test. The names are those of docs/bench.schema.json; the peer's are in transcribed files only.
#[derive(Deserialize)]
struct Measurement {
    model: String,
    phase: Phase,
    #[serde(default)]
    n_prompt: usize,
    #[serde(default)]
    depth: usize,
    #[serde(default = "one")]
    batch: usize,
    /// In bench reports only.
    device_name: Option<String>,
    tokens_per_second: Speed,
    peer_tokens_per_second: Option<Speed>,
    /// Ours to the peer's.
    ratio: Option<f64>,
    /// The lowest and the highest ratio of single rounds.
    ratio_range: Option<[f64; 2]>,
}

#[derive(Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
enum Phase {
    Prefill,
    Decode,
}

/// Tokens per second.
#[derive(Deserialize)]
#[serde(untagged)]
enum Speed {
    Number(f64),
    /// The lowest and the highest of several calls.
    Range([f64; 2]),
    /// Of a bench report.
    Statistics {
        median: f64,
    },
}

fn one() -> usize {
    1
}

/// A rate with a comma between thousands, and one decimal below 100 unless it is a whole number.
fn number(x: f64) -> String {
    if x < 100.0 {
        return format!("{}", (x * 10.0).round() / 10.0);
    }
    let x = x.round() as u64;
    if x < 10_000 { x.to_string() } else { format!("{},{:03}", x / 1000, x % 1000) }
}

impl Speed {
    fn text(&self) -> String {
        match *self {
            Self::Number(x) | Self::Statistics { median: x } => number(x),
            Self::Range([low, high]) => format!("{} to {}", number(low), number(high)),
        }
    }

    /// The lowest and the highest number.
    fn range(&self) -> [f64; 2] {
        match *self {
            Self::Number(x) | Self::Statistics { median: x } => [x, x],
            Self::Range(range) => range,
        }
    }
}

impl Measurement {
    /// The cell's text, such as `512: 834 (2.1x)`.
    fn text(&self) -> String {
        let mut text = String::new();
        if self.phase == Phase::Prefill {
            write!(text, "{}: ", self.n_prompt).unwrap();
        }
        if self.batch > 1 {
            write!(text, "{} seq ", self.batch).unwrap();
        }
        if self.depth > 0 {
            write!(text, "@{} ", self.depth).unwrap();
        }
        text += &self.tokens_per_second.text();
        match (self.ratio, &self.peer_tokens_per_second) {
            (Some(ratio), _) => write!(text, " ({ratio}x)").unwrap(),
            (None, Some(peer)) => write!(text, " (peer {})", peer.text()).unwrap(),
            (None, None) => {}
        }
        text
    }
}

/// All files of results, with their names without `.json`, in the order of their names.
fn all_results() -> Vec<(String, Results)> {
    let folder = root().join("docs/performance/results");
    let mut files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|file| file.extension() == Some("json".as_ref()));
    files.sort();
    let read = |file: std::path::PathBuf| {
        let name = file.file_stem().unwrap().to_str().unwrap().to_owned();
        let text = std::fs::read_to_string(&file).unwrap();
        (name, serde_json::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", file.display())))
    };
    files.into_iter().map(read).collect()
}

/// The table: a row for each file with its device, machine and peer, followed by a row for each model.
fn table(all: &[(String, Results)]) -> String {
    let mut text = String::from("| model | prefill | decode |\n|---|---|---|\n");
    for (name, results) in all {
        let (place, commit, peer, results) = match results {
            Results::Transcribed(TranscribedReport { device, machine, commit, peer, results, .. }) => {
                (format!("{device}, {machine}"), commit, peer.as_deref(), results)
            }
            Results::Bench(BenchReport { engine, results }) => {
                let device = results.iter().find_map(|result| result.device_name.clone());
                (device.unwrap_or_default(), &engine.commit, None, results)
            }
        };
        write!(text, "| **[{name}](performance/results/{name}.json)**: {place}").unwrap();
        for (what, value) in [("commit", commit.as_deref()), ("peer", peer)] {
            if let Some(value) = value {
                write!(text, "; {what}: {value}").unwrap();
            }
        }
        text += " | | |\n";
        let mut models: Vec<&str> = Vec::new();
        for result in results {
            if !models.contains(&&*result.model) {
                models.push(&result.model);
            }
        }
        for model in models {
            let cell = |phase: &Phase| {
                let of_phase = results.iter().filter(|result| result.model == model && result.phase == *phase);
                of_phase.map(Measurement::text).collect::<Vec<_>>().join("; ")
            };
            let (prefill, decode) = (cell(&Phase::Prefill), cell(&Phase::Decode));
            writeln!(text, "| {} | {prefill} | {decode} |", model.replace('|', "\\|")).unwrap();
        }
    }
    text
}

#[test]
fn the_table_is_generated_from_the_results() {
    let page = Page::read("docs/performance.md");
    let (before, rest) = page.text.split_once(BEGIN).expect("a mark where the table begins");
    let (_, after) = rest.split_once(END).expect("a mark where the table ends");
    let wanted = format!("{before}{BEGIN}{}{END}{after}", table(&all_results()));
    if std::env::var_os("UPDATE_PERFORMANCE").is_some() {
        std::fs::write(&page.path, &wanted).unwrap();
    } else {
        assert!(page.text == wanted, "docs/performance.md: write the table with UPDATE_PERFORMANCE=1");
    }
}

#[test]
fn ratios_agree_with_the_rates() {
    let mut errors = Vec::new();
    for (name, results) in all_results() {
        let Results::Transcribed(results) = results else { continue };
        for Measurement { model, ratio, ratio_range, tokens_per_second, peer_tokens_per_second, .. } in results.results
        {
            let (Some(ratio), Some(peer)) = (ratio, peer_tokens_per_second) else { continue };
            let ([low, high], [peer_low, peer_high]) = (tokens_per_second.range(), peer.range());
            // Rates and ratios have their own medians.
            if !(low / peer_high * 0.8..=high / peer_low * 1.25).contains(&ratio) {
                errors.push(format!("{name}, {model}: {ratio} is not {low} / {peer_low}"));
            }
            if ratio_range.is_some_and(|[low, high]| !(low * 0.98..=high * 1.02).contains(&ratio)) {
                errors.push(format!("{name}, {model}: {ratio} lies outside its range"));
            }
        }
    }
    expect_none(&errors);
}

#[test]
fn reports_of_bench_are_read() {
    let report = std::fs::read_to_string(root().join("tests/data/bench/report.json")).unwrap();
    let results = serde_json::from_str(&report).unwrap();
    let table = table(&[("some-cpu-2026-01-02".into(), results)]);
    let rows: Vec<_> = table.lines().skip(2).collect();
    let link = "**[some-cpu-2026-01-02](performance/results/some-cpu-2026-01-02.json)**";
    assert_eq!(rows[0], format!("| {link}: Some CPU, avx2; commit: 0123456789ab | | |"));
    assert!(rows[1].starts_with("| small\\|one, q4_0.gguf | 512: 4000 | @1024 "), "{table}");
}

#[test]
fn the_pages_are_short() {
    let pages = ["cpu", "wgpu", "cuda", "server", "build"].map(|name| format!("docs/performance/{name}.md"));
    let size = |name: &str| Page::read(name).text.len();
    assert!(size("docs/performance.md") <= 12 << 10);
    assert!(size("docs/cuda.md") <= 10 << 10);
    let sum = size("docs/performance.md") + pages.iter().map(|name| size(name)).sum::<usize>();
    assert!(sum <= 40 << 10, "{sum} bytes");
}
