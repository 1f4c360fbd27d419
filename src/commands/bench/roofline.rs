//! `bench roofline`: measures the limits of a device (ceilings), derives from them the shortest time that prefill and decode
//! of a model could take (floors), and compares it with the time they take.
//!
//! `ceilings.rs` measures the device, `floors.rs` the model, `text.rs` prints the report.

mod ceilings;
mod floors;
mod text;

use std::io::Write;
use std::time::Duration;

use metal_attention::backends::CeilingEffort;
use metal_attention::{EngineOptions, Model};
use metal_attention_model::{FeedForward, Linear};
use serde::Serialize;

use self::ceilings::{BatchScaling, Ceilings, DeviceName};
use self::floors::{Floor, ModelSize};
use crate::cli_error::CliError;
use crate::engine_args::EngineArgs;
use crate::model_args::ModelArgs;
use crate::progress::ProgressLine;

const AFTER_HELP: &str = "\
The ceilings of a device, each measured alone: how fast it reads and copies memory, multiplies, and launches work. The \
floor of a phase is the longest of three times: its bytes at the rate of reading, its multiplications at the rate of \
multiplying, its launches at the cost of an empty one. Then the same phase is run, and its speed is printed in percent of the \
floor's; more than 100 % are possible if the weights of a small model stay in the caches.

With --json stdout gets one object with the keys version, device, ceilings, batch_scaling, model and floors; see \
docs/roofline.md.

Examples:
  metal-attention bench roofline
  metal-attention bench roofline -m model.gguf --device gpu
  metal-attention bench roofline -m model.gguf --device cpu --threads 1 --json";

/// Measure the limits of this device, and how close a model comes to them
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
pub struct RooflineArgs {
    #[command(flatten)]
    model: ModelArgs,

    /// Tokens of the prompt [default: 512, with --quick 32; at most the context of the model's training]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    n_prompt: Option<u32>,

    /// Measure for less than a second: a try of the command with inexact results
    #[arg(long)]
    quick: bool,

    /// Write one JSON object
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    engine: EngineArgs,
}

/// How long each measurement takes, and its sizes.
#[derive(Debug, Clone, Copy)]
struct MeasurementEffort {
    /// The effort of each ceiling.
    ceilings: CeilingEffort,
    /// Tokens of the prompt that is prefilled.
    n_prompt: usize,
    /// Tokens that are decoded.
    n_gen: usize,
    /// Timed runs of each phase.
    runs: usize,
}

impl MeasurementEffort {
    /// The effort that the flags choose.
    fn of(args: &RooflineArgs) -> Self {
        let effort = if args.quick {
            Self {
                ceilings: CeilingEffort {
                    time: Duration::from_millis(10),
                    cpu_bytes: 16 << 20,
                    gpu_bytes: 16 << 20,
                    software_bytes: 4 << 20,
                },
                n_prompt: 32,
                n_gen: 4,
                runs: 1,
            }
        } else {
            Self {
                ceilings: CeilingEffort {
                    time: Duration::from_millis(300),
                    cpu_bytes: 512 << 20,
                    gpu_bytes: 1 << 30,
                    software_bytes: 32 << 20,
                },
                n_prompt: 512,
                n_gen: 64,
                runs: 5,
            }
        };
        Self { n_prompt: args.n_prompt.map_or(effort.n_prompt, |n| n as usize), ..effort }
    }
}

/// The report: the JSON object of `--json`.
#[derive(Serialize)]
struct RooflineReport {
    /// The version of the program.
    version: &'static str,
    /// The device that was measured.
    device: DeviceName,
    /// The limits of the device.
    ceilings: Ceilings,
    /// The cost of products by the number of tokens.
    batch_scaling: BatchScaling,
    /// The size of the model.
    model: ModelSize,
    /// Prefill and decode.
    floors: Vec<Floor>,
}

/// The number of parts of the measurement, for the progress line.
const PARTS: u64 = 8;

/// Runs the command.
pub fn run(args: &RooflineArgs) -> Result<(), CliError> {
    args.model.fetch()?;
    let progress = ProgressLine::steps("measuring", PARTS);
    let mut done = 0;
    let mut step = || {
        done += 1;
        progress.set(done);
    };
    let model = args.model.open()?;
    let mut effort = MeasurementEffort::of(args);
    let n_ctx_train = model.spec().n_ctx_train;
    effort.n_prompt = effort.n_prompt.min(n_ctx_train);
    effort.n_gen = effort.n_gen.min(n_ctx_train - 1).max(1);
    let options = args.engine.options(&model);
    let n_ctx = options.n_ctx.unwrap_or(effort.n_prompt.max(effort.n_gen + 1));
    let options = EngineOptions { n_ctx: Some(n_ctx), ..options };
    let mut pass = model.backend(&options).map_err(CliError::from)?;
    step();
    let (ceilings, batch_scaling) = ceilings::measure(&mut *pass, &model, &options, effort, &mut step)?;
    let floors = floors::measure(&mut *pass, &model, &options, effort, &ceilings, &mut step)?;
    drop(progress);
    let report = RooflineReport {
        version: env!("CARGO_PKG_VERSION"),
        device: DeviceName::of(&*pass),
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

/// The matrices of the layers and then the output head, each with the share of it that one token is multiplied with: 1, or
/// for experts `n_used / n_expert`.
fn matrices(model: &Model) -> Vec<(&metal_attention::gguf::Tensor, f64)> {
    let mut all = Vec::new();
    for layer in &model.weights().layers {
        let share = |linear: &Linear| match &layer.feed_forward {
            FeedForward::Experts(w) if w.experts.iter().any(|expert| expert.has(linear)) => {
                w.spec.n_used as f64 / w.spec.n_expert as f64
            }
            FeedForward::Dense(_) | FeedForward::Experts(_) | FeedForward::ChannelMix(_) | FeedForward::None => 1.0,
        };
        all.extend(layer.linears().into_iter().map(|linear| (&linear.weight, share(linear))));
    }
    all.extend(model.weights().output.iter().map(|l| (&l.weight, 1.0)));
    all
}
