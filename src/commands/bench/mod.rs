//! `bench`: how fast models are on devices, prefill and decode apart; `bench roofline`: how fast they could be.

mod compare;
mod format;
mod measure;
mod model_hash;
mod plan;
mod report;
mod roofline;

use std::io::Write;
use std::path::PathBuf;

use metal_attention::{Device, EngineOptions, ForwardPass, Model, ModelSpec, Profile};

use crate::cli_error::CliError;
use crate::engine_args::{CTX_SIZE_ELSEWHERE, ComputeArgs, at_least_one};
use crate::interrupt;
use crate::model_args::{ModelArgs, ModelsArgs};
use crate::profile_args::ProfileArgs;
use crate::progress::Progress;
use compare::Earlier;
use measure::Measurement;
use plan::{Plan, Setup, Test};
use report::{BenchResult, Report, TokensPerSecond};

/// The name of the subcommand, which is no model.
const ROOFLINE: &str = "roofline";

const AFTER_HELP: &str = "\
Prefill evaluates a prompt of --seq-lengths tokens from an empty context, all in one call, to the choice of the next \
token. Decode makes --gen-length tokens greedily, one step after the other, after --depth tokens that are evaluated \
outside of the timing; with --batch each step takes that many sequences one token further, and tokens per second count \
all of them. Of a model that makes embeddings prefill ends with the states, and there is no decode. Setting a model up is \
not timed. What does not fit in the model's context is skipped; -c goes past it.

stdout gets a table, or with --json, --csv or --markdown the same for programs, all samples included (--markdown leaves \
them out). docs/benchmark.md describes every field. Ctrl-C ends the measurement; what is done by then is printed.

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
  metal-attention bench roofline -m model.gguf";

/// Measure the speed of models, prefill and decode apart
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP, args_conflicts_with_subcommands = true)]
#[allow(clippy::struct_excessive_bools)] // each is a flag of its own
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

    /// Hold the results against those of an earlier --json
    #[arg(long, value_name = "FILE")]
    compare: Option<PathBuf>,

    #[command(flatten)]
    profile: ProfileArgs,

    /// The devices of the models, one after the other: auto (a GPU with room for the model, through CUDA where that can
    /// be, else the CPU), cpu, cuda, cuda:1, wgpu, wgpu:1 (by index), wgpu:NAME
    #[arg(long, value_name = "DEVICE", value_delimiter = ',', default_value = "auto", help_heading = "Engine")]
    device: Vec<Device>,

    /// The same as --device wgpu
    #[arg(long, visible_alias = "gpu", conflicts_with = "device", help_heading = "Engine")]
    wgpu: bool,

    /// NVIDIA GPUs that share each model out among themselves: that of --device cuda (cuda:2) and those that follow it
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

#[derive(clap::Subcommand)]
enum Command {
    Roofline(Box<roofline::RooflineArgs>),
}

/// Runs the command.
pub fn run(args: &Args) -> Result<(), CliError> {
    match &args.command {
        Some(Command::Roofline(args)) => roofline::run(args),
        None => args.bench(),
    }
}

/// What there is to tell so far.
struct Measured {
    report: Report,
    profiles: Vec<Profile>,
    /// From when the first model is loaded: what was measured is kept when Ctrl-C is pressed.
    asked: Option<interrupt::Until>,
}

impl Args {
    fn bench(&self) -> Result<(), CliError> {
        let earlier = self.compare.as_deref().map(Earlier::read).transpose()?;
        let plan = self.plan()?;
        let models = self.models.each();
        if self.models.has(ROOFLINE) {
            return Err(CliError::Usage(format!(
                "{ROOFLINE} comes before its flags: metal-attention bench {ROOFLINE} --json"
            )));
        }
        let opened = models.iter().map(|model| Ok((model, model.open()?))).collect::<Result<Vec<_>, CliError>>()?;
        let mut measured = Measured { report: Report::new(self.settings()), profiles: Vec::new(), asked: None };
        let outcome = self.measure(&plan, &opened, &mut measured);
        let Measured { mut report, profiles, asked: _asked } = measured;
        if let (Err(error), true) = (&outcome, report.results.is_empty())
            && !matches!(error, CliError::Interrupted)
        {
            return outcome;
        }
        report.interrupted = matches!(outcome, Err(CliError::Interrupted));
        if let Some(earlier) = &earlier {
            let notes = earlier.compare(&mut report);
            for note in notes {
                // Where stderr is closed the note is lost, and nothing else.
                let _ = writeln!(std::io::stderr(), "note: {note}");
            }
        }
        let text = self.format(&report)?;
        let mut stdout = std::io::stdout().lock();
        stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).map_err(CliError::stdout)?;
        self.profile.report(&profiles)?;
        outcome
    }

    fn plan(&self) -> Result<Plan, CliError> {
        let plan = Plan::new(&self.seq_lengths, self.gen_length, &self.depth, &self.batch);
        if plan.setups.is_empty() {
            let message = "there is nothing to measure: give --seq-lengths or --gen-length more than 0";
            return Err(CliError::Usage(message.into()));
        }
        Ok(plan)
    }

    fn settings(&self) -> report::Settings {
        let options = self.compute.options();
        report::Settings {
            iterations: self.iterations,
            warmup: self.warmup,
            cache_type: options.cache_type.to_string(),
            exact: options.exact,
            n_ubatch: options.n_ubatch,
        }
    }

    fn format(&self, report: &Report) -> Result<String, CliError> {
        match (self.json, self.csv, self.markdown) {
            (true, ..) => format::json(report),
            (_, true, _) => format::csv(report),
            (.., true) => Ok(format::markdown(report)),
            _ => Ok(format::text(report)),
        }
    }

    /// Every model on every device with every number of threads.
    fn measure(&self, plan: &Plan, models: &[(&ModelArgs, Model)], measured: &mut Measured) -> Result<(), CliError> {
        let devices = if self.wgpu { vec![Device::Wgpu] } else { plan::distinct(&self.device) };
        let threads = match &self.threads[..] {
            [] => vec![None],
            threads => plan::distinct(threads).into_iter().map(Some).collect(),
        };
        for (args, model) in models {
            let limit = if self.ctx_size == 0 { model.spec().n_ctx_train } else { self.ctx_size };
            let (setups, skipped) = plan.split(|test| why_not(test, model.spec(), limit));
            measured.report.skip(&args.name(), skipped);
            let hash = model_hash::sha256(model.gguf())?;
            for device in &devices {
                for &n_threads in &threads {
                    let (device, n_cards) = (device.clone(), self.tensor_parallel);
                    let options = EngineOptions { device, n_ranks: n_cards, n_threads, ..self.compute.options() };
                    let kind = self.measure_setups(&setups, &args.name(), model, &hash, &options, measured)?;
                    // A GPU is as fast whatever the CPU's threads are.
                    if kind.is_some_and(|kind| kind != "cpu") {
                        break;
                    }
                }
            }
        }
        Ok(())
    }

    /// Every test of one model on one device. Returns the kind of the device; `None` where there was no test.
    fn measure_setups(
        &self,
        setups: &[Setup],
        name: &str,
        model: &Model,
        hash: &str,
        options: &EngineOptions,
        measured: &mut Measured,
    ) -> Result<Option<&'static str>, CliError> {
        let mut kind = None;
        for setup in setups {
            if interrupt::requested() {
                return Err(CliError::Interrupted);
            }
            let options = EngineOptions { n_ctx: Some(setup.n_ctx()), n_seq: setup.n_seq, ..options.clone() };
            let mut pass = self.load(model, &options)?;
            measured.asked.get_or_insert_with(interrupt::ask);
            let device = pass.device();
            kind = Some(device.kind);
            let progress = Progress::steps("measuring", setup.tests.len().saturating_mul(self.runs()) as u64);
            for (i, test) in setup.tests.iter().enumerate() {
                progress.describe(format!("{name}, {}, {test}", options.device));
                let done = |runs: usize| progress.set(i.saturating_mul(self.runs()).saturating_add(runs) as u64);
                let mut measurement = Measurement { pass: &mut *pass, test };
                let samples = measurement.samples(self.warmup, self.iterations, done)?;
                if let Some(rates) = TokensPerSecond::new(samples) {
                    let report = &mut measured.report;
                    let cpu = report.machine.cpu.as_deref();
                    report.results.push(BenchResult::new(name, hash, test, &options.device, &device, cpu, rates));
                }
                if self.profile.wanted()
                    && let Some(profile) = measurement.profile()?
                {
                    let device = format!("{name}, {}, {test}", profile.device);
                    measured.profiles.push(Profile { device, ..profile });
                }
            }
        }
        if interrupt::requested() { Err(CliError::Interrupted) } else { Ok(kind) }
    }

    fn load(&self, model: &Model, options: &EngineOptions) -> Result<Box<dyn ForwardPass>, CliError> {
        let loading = Progress::spinner("loading the model");
        loading.weigh(model.gguf().tensor_bytes());
        let mut pass = model.forward_pass(options)?;
        if self.profile.wanted() {
            // A device without a clock is refused before anything is measured.
            pass.start_profile().map_err(metal_attention::Error::from)?;
            pass.take_profile();
        }
        Ok(pass)
    }

    /// Timed runs and warm-up of a test.
    fn runs(&self) -> usize {
        self.warmup.saturating_add(self.iterations)
    }
}

/// Why a model cannot run `test` in a context of `limit` tokens, where it cannot.
fn why_not(test: &Test, spec: &ModelSpec, limit: usize) -> Option<String> {
    if let (Test::Decode { .. }, None) = (test, &spec.output.head) {
        return Some(format!("{test} needs a model that writes text; this one makes embeddings"));
    }
    let n_ctx = test.n_ctx();
    (n_ctx > limit).then(|| format!("{test} takes {n_ctx} tokens of context and there are {limit}; -c allows more"))
}
