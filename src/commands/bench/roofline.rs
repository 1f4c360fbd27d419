//! `bench roofline`: what a device can do at best, what a model would take then, and what it takes.

mod ceilings;
mod floors;
mod text;

use std::io::Write;
use std::time::Duration;

use metal_attention::{EngineOptions, Model};
use metal_attention_model::{FeedForward, FeedForwardWeights, Linear};
use serde::Serialize;

use self::ceilings::{BatchScaling, Ceilings, DeviceName};
use self::floors::{Floor, ModelSize};
use crate::cli_error::CliError;
use crate::engine_args::EngineArgs;
use crate::model_args::ModelArgs;
use crate::progress::Progress;

const AFTER_HELP: &str = "\
The ceilings of a device, each measured alone: how fast it reads and copies memory, multiplies, and launches work. The \
floor of a phase is the longest of three times: its bytes at the rate of reading, its multiplications at the rate of \
multiplying, its launches at what an empty one costs. Then the same phase is run, and told in percent of its floor's \
speed; more than 100 % are possible where the weights of a small model stay in the caches.

With --json stdout gets one object with the keys version, device, ceilings, batch_scaling, model and floors; see \
docs/roofline.md.

Examples:
  metal-attention bench roofline
  metal-attention bench roofline -m model.gguf --device gpu
  metal-attention bench roofline -m model.gguf --device cpu --threads 1 --json";

/// Measure what this device can do at best, and how near a model comes to it
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
pub struct RooflineArgs {
    #[command(flatten)]
    model: ModelArgs,

    /// Tokens of the prompt [default: 512, with --quick 32; at most the context of the model's training]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    n_prompt: Option<u32>,

    /// Measure for less than a second, which says little: to try the command out
    #[arg(long)]
    quick: bool,

    /// Write one JSON object
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    engine: EngineArgs,
}

/// How long and how much is measured.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(feature = "wgpu"), allow(dead_code))]
struct Effort {
    /// Time for each ceiling.
    time: Duration,
    /// Bytes of a buffer that is read or copied.
    cpu_bytes: usize,
    /// The same on a GPU, and on one that is software.
    gpu_bytes: u64,
    software_bytes: u64,
    n_prompt: usize,
    /// Tokens of a decode.
    n_gen: usize,
    /// Runs of a phase.
    runs: usize,
}

impl Effort {
    fn of(args: &RooflineArgs) -> Self {
        let effort = if args.quick {
            Self {
                time: Duration::from_millis(10),
                cpu_bytes: 16 << 20,
                gpu_bytes: 16 << 20,
                software_bytes: 4 << 20,
                n_prompt: 32,
                n_gen: 4,
                runs: 1,
            }
        } else {
            Self {
                time: Duration::from_millis(300),
                cpu_bytes: 512 << 20,
                gpu_bytes: 1 << 30,
                software_bytes: 32 << 20,
                n_prompt: 512,
                n_gen: 64,
                runs: 5,
            }
        };
        Self { n_prompt: args.n_prompt.map_or(effort.n_prompt, |n| n as usize), ..effort }
    }
}

/// All that the command tells.
#[derive(Serialize)]
struct Report {
    version: &'static str,
    device: DeviceName,
    ceilings: Ceilings,
    batch_scaling: BatchScaling,
    model: ModelSize,
    floors: Vec<Floor>,
}

/// Parts of the measurement, for its progress.
const PARTS: u64 = 8;

/// Runs the command.
pub fn run(args: &RooflineArgs) -> Result<(), CliError> {
    args.model.fetch()?;
    let progress = Progress::steps("measuring", PARTS);
    let mut done = 0;
    let mut step = || {
        done += 1;
        progress.set(done);
    };
    let model = args.model.open()?;
    let mut effort = Effort::of(args);
    let n_ctx_train = model.spec().n_ctx_train;
    effort.n_prompt = effort.n_prompt.min(n_ctx_train);
    effort.n_gen = effort.n_gen.min(n_ctx_train - 1).max(1);
    let options = args.engine.options(&model);
    let n_ctx = options.n_ctx.unwrap_or(effort.n_prompt.max(effort.n_gen + 1));
    let options = EngineOptions { n_ctx: Some(n_ctx), ..options };
    let mut backend = model.backend(&options).map_err(CliError::from)?;
    step();
    let (ceilings, batch_scaling) = ceilings::measure(&mut backend, &model, &options, effort, &mut step)?;
    let floors = floors::measure(&mut backend, &model, &options, effort, &ceilings, &mut step)?;
    drop(progress);
    let report = Report {
        version: env!("CARGO_PKG_VERSION"),
        device: DeviceName::of(&backend),
        ceilings,
        batch_scaling,
        model: ModelSize::of(&model, args.model.name()),
        floors,
    };
    let text = if args.json {
        let json = serde_json::to_string_pretty(&report);
        json.map_err(|e| CliError::General(format!("cannot write JSON: {e}")))? + "\n"
    } else {
        text::of(&report)
    };
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).map_err(CliError::stdout)
}

/// The matrices that every token is multiplied with, those of the layers, then the output head, and which share of it: of
/// experts as many as a token goes to.
fn matrices(model: &Model) -> Vec<(&metal_attention::gguf::Tensor, f64)> {
    let mut all = Vec::new();
    for (layer, w) in model.spec().layers.iter().zip(&model.weights().layers) {
        let share = match &layer.feed_forward {
            FeedForward::Dense(_) | FeedForward::ChannelMix(_) | FeedForward::None => 1.0,
            FeedForward::Experts(e) => e.n_used as f64 / e.n_expert as f64,
        };
        let is_expert = |linear: &Linear| match &w.feed_forward {
            FeedForwardWeights::Dense(_) | FeedForwardWeights::ChannelMix(_) | FeedForwardWeights::None => false,
            FeedForwardWeights::Experts(e) => e.experts.iter().any(|expert| expert.has(linear)),
        };
        all.extend(w.linears().into_iter().map(|l| (&l.weight, if is_expert(l) { share } else { 1.0 })));
    }
    all.extend(model.weights().output.iter().map(|l| (&l.weight, 1.0)));
    all
}
