//! `bench`: measures the speed of models on devices, prefill and decode apart. `bench roofline` measures the device's limits, and
//! `bench encoder` picture encoders.
//!
//! `plan.rs` lists the tests and groups them by the number of sequences; `measure.rs` times one test; `report.rs` holds the
//! results, which `format.rs` writes and `compare.rs` compares with an earlier report.

mod compare;
mod encoder;
mod format;
mod measure;
mod model_hash;
mod plan;
mod report;
mod roofline;
mod speculation;

use std::io::Write;
use std::path::PathBuf;

use metal_attention::tokenizer::EncodeOptions;
use metal_attention::{Device, EngineOptions, ForwardPass, Model, ModelSpec, Profile};

use crate::cli_error::CliError;
use crate::engine_args::{CTX_SIZE_ELSEWHERE, ComputeArgs, at_least_one};
use crate::interrupt;
use crate::model_args::{ModelArgs, ModelsArgs};
use crate::profile_args::ProfileArgs;
use crate::progress::ProgressLine;
use crate::speculation_args::SpeculationArgs;
use crate::text_input::read_file;
use compare::EarlierReport;
use measure::BenchMeasurement;
use plan::{BenchPlan, BenchTest, TestGroup};
use report::{BenchReport, BenchResult, TokensPerSecond};
use speculation::SpeculationBench;

/// The names of the subcommands; clap takes them for models if flags come first.
const SUBCOMMANDS: [&str; 2] = ["encoder", "roofline"];

const AFTER_HELP: &str = "\
Prefill evaluates a prompt of --seq-lengths tokens from an empty context, all in one call, up to the choice of the next \
token. Decode generates --gen-length tokens greedily, one step after the other, after --depth tokens that are evaluated \
outside of the timing; with --batch each step generates a token of that many sequences, and tokens per second count \
all of them. For an embedding model prefill ends with the hidden states, and there is no decode. Loading a model is \
not timed. Tests that do not fit in the model's context are skipped; -c allows a longer one.

stdout gets a table, or with --json, --csv or --markdown the same for programs, including all samples (except for \
--markdown). docs/benchmark.md describes every field. After Ctrl-C the results so far are printed.

--compare takes what --json wrote and adds for each result of the same model (by hash), test, threads and device the \
ratio to the earlier median. A ratio further from 1 than the noise is marked: noise is twice the standard deviation of \
the samples, of both runs together and relative to their means, at least 1 %.

--profile runs each test once more, after the timed runs and with every kernel timed; docs/roofline.md explains it.

Examples:
  metal-attention bench model.gguf
  metal-attention bench a.gguf b.gguf --device cpu,gpu --threads 1,2 --seq-lengths 32,512 --markdown
  metal-attention bench -m model.gguf --wgpu --seq-lengths 0 --depth 0,1024 --batch 1,4,16   # decode only
  metal-attention bench -m model.gguf --json > before.json
  metal-attention bench -m model.gguf --compare before.json
  metal-attention bench -m model.gguf --profile trace.json
  metal-attention bench -m model.gguf --spec ngram --text code.txt --batch 1,8
  metal-attention bench roofline -m model.gguf
  metal-attention bench encoder --mmproj mmproj.gguf";

/// Measure the speed of models, prefill and decode apart
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP, args_conflicts_with_subcommands = true)]
#[allow(clippy::struct_excessive_bools)] // each is a separate flag
pub struct Args {
    #[command(subcommand)]
    command: Option<Command>,

    #[command(flatten)]
    models: ModelsArgs,

    /// Tokens of the prompts to prefill; 0: no prefill
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "64,512")]
    seq_lengths: Vec<usize>,

    /// Tokens to decode, of each sequence; 0: no decode
    #[arg(long, value_name = "N", default_value_t = 100)]
    gen_length: usize,

    /// Tokens in the context where a decode begins
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "0")]
    depth: Vec<usize>,

    /// Sequences that are decoded together
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1", value_parser = at_least_one)]
    batch: Vec<usize>,

    /// Timed runs of each test
    #[arg(long, value_name = "N", default_value = "5", value_parser = at_least_one)]
    iterations: usize,

    /// Runs of each test before the timed ones
    #[arg(long, value_name = "N", default_value_t = 1)]
    warmup: usize,

    /// Write one JSON object
    #[arg(long, group = "format")]
    json: bool,

    /// Write comma-separated values
    #[arg(long, group = "format")]
    csv: bool,

    /// Write a Markdown table
    #[arg(long, group = "format")]
    markdown: bool,

    /// Measure decode with drafts instead, in turns with decode without drafts, where this text decides which drafts hold
    #[arg(long, value_name = "FILE", conflicts_with_all = ["compare", "csv", "markdown"], value_hint = clap::ValueHint::FilePath)]
    text: Option<PathBuf>,

    /// The same with what the model itself writes, greedily: this many tokens
    #[arg(long, value_name = "N", conflicts_with_all = ["text", "compare", "csv", "markdown"])]
    own_text: Option<usize>,

    /// Tokens of the text that are in the context before the measurement [default: half of them; of its own text 32]
    #[arg(long, value_name = "N")]
    text_prompt: Option<usize>,

    #[command(flatten)]
    speculation: SpeculationArgs,

    /// Compare the results with those of an earlier --json
    #[arg(long, value_name = "FILE")]
    compare: Option<PathBuf>,

    #[command(flatten)]
    profile: ProfileArgs,

    /// The devices of the models, one after the other: auto (a GPU in which the model fits, preferably through CUDA, else
    /// the CPU), cpu, cuda, cuda:1, wgpu, wgpu:1 (by index), wgpu:NAME
    #[arg(long, value_name = "DEVICE", value_delimiter = ',', default_value = "auto", help_heading = "Engine")]
    device: Vec<Device>,

    /// The same as --device wgpu
    #[arg(long, visible_alias = "gpu", conflicts_with = "device", help_heading = "Engine")]
    wgpu: bool,

    /// NVIDIA GPUs that share each model by tensor parallelism: that of --device cuda (cuda:2) and those that follow it
    #[arg(long, alias = "tensor-parallel-size", value_name = "N", default_value_t = 1, value_parser = at_least_one)]
    #[arg(help_heading = "Engine")]
    tensor_parallel: usize,

    /// Threads that compute on the CPU [default: one for each physical core]
    #[arg(short, long, value_name = "N", value_delimiter = ',', value_parser = at_least_one, help_heading = "Engine")]
    threads: Vec<usize>,

    /// Longest context to measure; 0: that of the model's training [default: the same]
    #[arg(short, long, aliases = CTX_SIZE_ELSEWHERE, value_name = "N", help_heading = "Engine")]
    #[arg(default_value_t = 0, hide_default_value = true)]
    ctx_size: usize,

    #[command(flatten)]
    compute: ComputeArgs,
}

// The subcommands of `bench`.
#[derive(clap::Subcommand)]
enum Command {
    Encoder(Box<encoder::EncoderArgs>),
    Roofline(Box<roofline::RooflineArgs>),
}

/// Runs the command.
pub fn run(args: &Args) -> Result<(), CliError> {
    match &args.command {
        Some(Command::Encoder(args)) => encoder::run(args),
        Some(Command::Roofline(args)) => roofline::run(args),
        None if args.text.is_some() || args.own_text.is_some() => args.bench_drafts(),
        None => args.bench(),
    }
}

/// The results so far.
struct BenchRun {
    /// The report, filled while tests are measured.
    report: BenchReport,
    /// The profiles of `--profile`, one for each test.
    profiles: Vec<Profile>,
    /// Set when the first model is loaded. From then on Ctrl-C ends the measurement instead of the process, so that results
    /// are printed.
    ctrl_c: Option<interrupt::CtrlCGuard>,
}

impl Args {
    /// Measures all tests and prints the report.
    fn bench(&self) -> Result<(), CliError> {
        let earlier = self.compare.as_deref().map(EarlierReport::read).transpose()?;
        let plan = self.plan()?;
        let models = self.models.each();
        if let Some(name) = SUBCOMMANDS.into_iter().find(|name| self.models.has(name)) {
            return Err(CliError::Usage(format!("{name} comes before its flags: metal-attention bench {name} --json")));
        }
        let opened = models.iter().map(|model| Ok((model, model.open()?))).collect::<Result<Vec<_>, CliError>>()?;
        let mut run = BenchRun { report: BenchReport::new(self.settings()), profiles: Vec::new(), ctrl_c: None };
        let outcome = self.measure(&plan, &opened, &mut run);
        let BenchRun { mut report, profiles, ctrl_c: _ctrl_c } = run;
        if let (Err(error), true) = (&outcome, report.results.is_empty())
            && !matches!(error, CliError::Interrupted)
        {
            return outcome;
        }
        report.interrupted = matches!(outcome, Err(CliError::Interrupted));
        if let Some(earlier) = &earlier {
            let notes = earlier.compare(&mut report);
            for note in notes {
                // Errors are ignored, because stderr may be closed.
                let _ = writeln!(std::io::stderr(), "note: {note}");
            }
        }
        let text = self.format(&report)?;
        let mut stdout = std::io::stdout().lock();
        stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).map_err(CliError::stdout)?;
        self.profile.report(&profiles)?;
        outcome
    }

    /// Measures a drafter on a text.
    fn bench_drafts(&self) -> Result<(), CliError> {
        let text = self.text.as_deref().map(read_file).transpose()?;
        let name = self.text.as_ref().and_then(|path| path.file_name());
        let name = name.map_or_else(|| "its own text".to_owned(), |name| name.to_string_lossy().into_owned());
        let _ctrl_c = interrupt::cancel_on_ctrl_c();
        let devices = if self.wgpu { vec![Device::Wgpu] } else { plan::distinct(&self.device) };
        let mut reports = Vec::new();
        for args in self.models.each() {
            let model = args.open()?;
            let draft = self.speculation.draft_file(&args)?;
            let open = |options: &EngineOptions| self.speculation.open(&model, draft.as_ref(), options);
            let n_threads = self.threads.first().copied();
            let options = EngineOptions { device: devices[0].clone(), n_threads, ..self.compute.options() };
            let (ids, n_prompt) = if let Some(text) = &text {
                let special = EncodeOptions { add_special: true, parse_special: false };
                let ids = args.tokenizer(&model)?.encode(text, special);
                let n_prompt = self.text_prompt.unwrap_or(ids.len() / 2);
                (ids, n_prompt)
            } else {
                let (n_prompt, n) = (self.text_prompt.unwrap_or(32), self.own_text.unwrap_or(0));
                (speculation::own_text(&model, &options, n_prompt, n)?, n_prompt)
            };
            if n_prompt == 0 || n_prompt + 2 > ids.len() {
                let n = ids.len();
                return Err(CliError::Usage(format!(
                    "the text has {n} tokens: --text-prompt leaves some before and some in the measurement if it is from 1 to {}",
                    n.saturating_sub(2)
                )));
            }
            let (prompt, generated) = ids.split_at(n_prompt);
            for device in &devices {
                let options = EngineOptions { device: device.clone(), ..options.clone() };
                for &batch in &self.batch {
                    let n_rounds = [self.warmup, self.iterations];
                    let bench = SpeculationBench {
                        open: &open,
                        depth: self.speculation.depth(),
                        text: &name,
                        prompt,
                        generated,
                        batch,
                        n_rounds,
                    };
                    let Some(report) = bench.measure(&model, &args.name(), &options)? else {
                        speculation::print(&reports, self.json)?;
                        return Err(CliError::Interrupted);
                    };
                    reports.push(report);
                }
            }
        }
        speculation::print(&reports, self.json)
    }

    /// The tests that the flags choose. An error if there are none.
    fn plan(&self) -> Result<BenchPlan, CliError> {
        let plan = BenchPlan::new(&self.seq_lengths, self.gen_length, &self.depth, &self.batch);
        if plan.groups.is_empty() {
            let message = "there is nothing to measure: give --seq-lengths or --gen-length more than 0";
            return Err(CliError::Usage(message.into()));
        }
        Ok(plan)
    }

    /// The flags that are recorded in the report.
    fn settings(&self) -> report::BenchSettings {
        let options = self.compute.options();
        report::BenchSettings {
            iterations: self.iterations,
            warmup: self.warmup,
            cache_type: options.cache_type.to_string(),
            exact: options.exact,
            n_ubatch: options.n_ubatch,
        }
    }

    /// The report in the format that the flags choose.
    fn format(&self, report: &BenchReport) -> Result<String, CliError> {
        match (self.json, self.csv, self.markdown) {
            (true, ..) => format::json(report),
            (_, true, _) => format::csv(report),
            (.., true) => Ok(format::markdown(report)),
            _ => Ok(format::text(report)),
        }
    }

    /// Measures every model on every device with every number of threads.
    fn measure(&self, plan: &BenchPlan, models: &[(&ModelArgs, Model)], run: &mut BenchRun) -> Result<(), CliError> {
        let devices = if self.wgpu { vec![Device::Wgpu] } else { plan::distinct(&self.device) };
        let threads = match &self.threads[..] {
            [] => vec![None],
            threads => plan::distinct(threads).into_iter().map(Some).collect(),
        };
        for (args, model) in models {
            let limit = if self.ctx_size == 0 { model.spec().n_ctx_train } else { self.ctx_size };
            let (groups, skipped) = plan.split(|test| why_not(test, model.spec(), limit));
            run.report.skip(&args.name(), skipped);
            let hash = model_hash::sha256(model.gguf())?;
            for device in &devices {
                for &n_threads in &threads {
                    let (device, n_ranks) = (device.clone(), self.tensor_parallel);
                    let options = EngineOptions { device, n_ranks, n_threads, ..self.compute.options() };
                    let kind = self.measure_groups(&groups, &args.name(), model, &hash, &options, run)?;
                    // The number of CPU threads does not change the speed of a GPU: it is measured once.
                    if kind.is_some_and(|kind| kind != "cpu") {
                        break;
                    }
                }
            }
        }
        Ok(())
    }

    /// Measures every test of one model on one device. Returns the kind of the device; `None` if there was no test.
    fn measure_groups(
        &self,
        groups: &[TestGroup],
        name: &str,
        model: &Model,
        hash: &str,
        options: &EngineOptions,
        run: &mut BenchRun,
    ) -> Result<Option<&'static str>, CliError> {
        let mut kind = None;
        for group in groups {
            if interrupt::requested() {
                return Err(CliError::Interrupted);
            }
            let options = EngineOptions { n_ctx: Some(group.n_ctx()), n_seq: group.n_seq, ..options.clone() };
            let mut pass = self.load(model, &options)?;
            run.ctrl_c.get_or_insert_with(interrupt::cancel_on_ctrl_c);
            let device = pass.device();
            kind = Some(device.kind);
            let progress = ProgressLine::steps("measuring", group.tests.len().saturating_mul(self.runs()) as u64);
            for (i, test) in group.tests.iter().enumerate() {
                progress.describe(format!("{name}, {}, {test}", options.device));
                let done = |runs: usize| progress.set(i.saturating_mul(self.runs()).saturating_add(runs) as u64);
                let mut measurement = BenchMeasurement { pass: &mut *pass, test };
                let samples = measurement.samples(self.warmup, self.iterations, done)?;
                if let Some(rates) = TokensPerSecond::new(samples) {
                    let report = &mut run.report;
                    let cpu = report.machine.cpu.as_deref();
                    report.results.push(BenchResult::new(name, hash, test, &options.device, &device, cpu, rates));
                }
                if self.profile.is_set()
                    && let Some(profile) = measurement.profile()?
                {
                    let device = format!("{name}, {}, {test}", profile.device);
                    run.profiles.push(Profile { device, ..profile });
                }
            }
        }
        if interrupt::requested() { Err(CliError::Interrupted) } else { Ok(kind) }
    }

    /// Builds the forward pass.
    fn load(&self, model: &Model, options: &EngineOptions) -> Result<Box<dyn ForwardPass>, CliError> {
        let loading = ProgressLine::spinner("loading the model");
        loading.weigh(model.gguf().tensor_bytes());
        let mut pass = model.forward_pass(options)?;
        if self.profile.is_set() {
            // An error of a device that cannot time kernels is reported before anything is measured.
            pass.start_profile().map_err(metal_attention::Error::from)?;
            pass.take_profile();
        }
        Ok(pass)
    }

    /// The number of runs of a test, with the warm-up.
    fn runs(&self) -> usize {
        self.warmup.saturating_add(self.iterations)
    }
}

/// The reason why a model cannot run `test` in a context of `limit` tokens. `None`: it can.
fn why_not(test: &BenchTest, spec: &ModelSpec, limit: usize) -> Option<String> {
    if let (BenchTest::Decode { .. }, None) = (test, &spec.output.head) {
        return Some(format!("{test} needs a model that writes text; this one makes embeddings"));
    }
    let n_ctx = test.n_ctx();
    (n_ctx > limit).then(|| format!("{test} takes {n_ctx} tokens of context and there are {limit}; -c allows more"))
}
