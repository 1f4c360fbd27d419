//! `compare`: compares the hidden states of devices layer by layer, and finds the first layer at which they differ.
//!
//! The comparison itself is `metal_attention::compare`; this file runs it for each device and prints the results.

use std::fmt::Write as _;
use std::io::Write;
use std::ops::ControlFlow;

use metal_attention::compare::{Comparison, Deviation, DivergencePoint, EvaluationMode, compare};
use metal_attention::{CacheType, Device, EngineOptions};
use serde_json::{Value, json};

use crate::cli_error::CliError;
use crate::engine_args::SetupArgs;
use crate::interrupt;
use crate::model_args::ModelArgs;
use crate::progress::ProgressLine;
use crate::token_input::{TokensArgs, fit_context};
use crate::units;

const AFTER_HELP: &str = "\
The first device is the reference: it computes in F32 with an F32 KV cache, regardless of the flags (as with --exact \
--cache-type f32). The other devices follow the flags. The hidden state after every layer and the logits are \
compared with those of the reference: first with the tokens going through the layers together, as in prefill, then \
one by one, as in decode. For models without an output head the states after the last norm take the place of the \
logits; for models whose tokens attend to later ones there is no decode. NMSE is |x - reference|^2 / |reference|^2 of the token where it is largest, and \
difference the largest absolute difference of two elements. If an NMSE is larger than the tolerance the exit code is 1.

With --json stdout gets one object with the keys reference, tokens (the ids), tolerance, ok, and comparisons: a list of \
device, way (prefill or decode), layers and logits or states (nmse, position, max_difference; null where not finite), \
first_past (a layer's index, \"logits\", \"states\" or null), same_choices, choice, reference_choice (null without logits).

Examples:
  metal-attention compare -p \"Once upon a time\" --devices cpu,gpu
  metal-attention compare -m model.gguf -p \"The sky is\" --devices cpu,wgpu:0,wgpu:1 --prefill --json
  metal-attention compare -m model.gguf -p \"The sky is\" --devices cpu,cpu";

/// Compare the hidden states of devices, layer by layer
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
#[allow(clippy::struct_excessive_bools)] // each is a separate flag
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,

    #[command(flatten)]
    tokens: TokensArgs,

    /// Devices to compare, the reference first
    #[arg(long, value_name = "DEVICES", value_delimiter = ',', default_value = "cpu,gpu")]
    devices: Vec<Device>,

    /// Largest NMSE that counts as equal
    #[arg(long, value_name = "NMSE", default_value_t = 1e-3, value_parser = not_negative, allow_negative_numbers = true)]
    tolerance: f64,

    /// Compare prefill only: the tokens go through the layers together
    #[arg(long, conflicts_with = "decode")]
    prefill: bool,

    /// Compare decode only: the tokens go through the layers one by one
    #[arg(long)]
    decode: bool,

    /// Write one JSON object
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    setup: SetupArgs,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<(), CliError> {
    let [reference, others @ ..] = &args.devices[..] else { return Err(too_few_devices()) };
    if others.is_empty() {
        return Err(too_few_devices());
    }
    let model = args.model.open()?;
    let ids = args.tokens.read(&args.model, &model)?;
    let loading = ProgressLine::spinner("loading the model");
    let mut options = args.setup.options(&model);
    fit_context(&mut options, &ids, &model)?;
    let exact = EngineOptions { device: reference.clone(), exact: true, cache_type: CacheType::F32, ..options.clone() };
    loading.weigh(model.gguf().tensor_bytes());
    let mut reference_pass = model.forward_pass(&exact)?;
    drop(loading);

    let mut out =
        ComparisonOutput { tolerance: args.tolerance, text: String::new(), comparisons: Vec::new(), n_past: 0 };
    // After the first comparison Ctrl-C ends the work, and the results so far are printed.
    let mut asked = None;
    let mut compare_all = || -> Result<(), CliError> {
        for device in others {
            let loading = ProgressLine::spinner("loading the model");
            loading.weigh(model.gguf().tensor_bytes());
            let mut pass = model.forward_pass(&EngineOptions { device: device.clone(), ..options.clone() })?;
            drop(loading);
            for way in args.ways(pass.n_ubatch(), model.spec().is_causal()) {
                let steps = ProgressLine::steps("comparing", ids.len() as u64).watched(2 * model.spec().n_layer());
                let progress = |done: usize, _| {
                    steps.set(done as u64);
                    ControlFlow::Continue(())
                };
                let found = compare(&mut *reference_pass, &mut *pass, &ids, way, progress)?;
                drop(steps);
                out.add(reference, device, way, &found);
                asked.get_or_insert_with(interrupt::cancel_on_ctrl_c);
            }
        }
        Ok(())
    };
    let interrupted = match compare_all() {
        Err(CliError::Interrupted) => true,
        outcome => outcome.map(|()| false)?,
    };
    let text = if args.json {
        let result = json!({
            "reference": reference.to_string(),
            "tokens": ids,
            "tolerance": args.tolerance,
            "ok": out.n_past == 0 && !interrupted,
            "comparisons": out.comparisons,
        });
        format!("{result:#}\n")
    } else {
        out.text
    };
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).map_err(CliError::stdout)?;
    if interrupted {
        interrupt::exit();
    }
    if out.n_past > 0 {
        let comparisons = units::count(out.n_past, "comparison");
        return Err(CliError::General(format!("{comparisons} past the tolerance of {:e}", args.tolerance)));
    }
    Ok(())
}

impl Args {
    /// The ways of evaluation to compare. Decode is left out for models that are not causal, unless a flag names it.
    fn ways(&self, n_ubatch: usize, is_causal: bool) -> Vec<EvaluationMode> {
        let both = [
            (EvaluationMode::Prefill(n_ubatch), self.decode),
            (EvaluationMode::Decode, self.prefill || !is_causal && !self.decode),
        ];
        both.into_iter().filter(|&(_, left_out)| !left_out).map(|(way, _)| way).collect()
    }
}

/// Collects the results for the output.
struct ComparisonOutput {
    /// The largest NMSE that counts as equal.
    tolerance: f64,
    /// The results as text.
    text: String,
    /// The results as JSON.
    comparisons: Vec<Value>,
    /// The number of comparisons with an NMSE beyond the tolerance.
    n_past: usize,
}

impl ComparisonOutput {
    /// Adds the comparison of a device with the reference.
    fn add(&mut self, reference: &Device, device: &Device, way: EvaluationMode, found: &Comparison) {
        let past = found.first_past(self.tolerance);
        self.n_past += usize::from(past.is_some());
        let name = if way == EvaluationMode::Decode { "decode" } else { "prefill" };
        let output = if found.choices.is_some() { "logits" } else { "states" };
        self.comparisons.push(json!({
            "device": device.to_string(),
            "way": name,
            "layers": found.layers.iter().map(deviation_json).collect::<Vec<_>>(),
            output: deviation_json(&found.output),
            "first_past": match past {
                None => Value::Null,
                Some(DivergencePoint::Layer(i)) => json!(i),
                Some(DivergencePoint::Output) => json!(output),
            },
            "same_choices": found.choices.map(|choices| choices.same),
            "choice": found.choices.map(|choices| choices.other),
            "reference_choice": found.choices.map(|choices| choices.reference),
        }));
        let how = if way == EvaluationMode::Decode { "one by one" } else { "together" };
        let tokens = units::count(found.n_tokens, "token");
        // Writing to a string cannot fail.
        let _ = writeln!(self.text, "{device} against {reference}, {tokens} {how}");
        let _ = writeln!(self.text, "{:<10}  {:>10}  {:>10}  {:>8}", "layer", "NMSE", "difference", "at token");
        for (i, layer) in found.layers.iter().enumerate() {
            self.line(&i.to_string(), layer);
        }
        self.line(output, &found.output);
        if let Some(choices) = found.choices {
            let same = format!("{} of {} equal", choices.same, found.n_tokens);
            let last = format!("after the last {} and {}", choices.other, choices.reference);
            let _ = writeln!(self.text, "next token  {same}, {last}");
        }
        let _ = match past {
            None => writeln!(self.text, "all within the tolerance of {:e}\n", self.tolerance),
            Some(DivergencePoint::Layer(i)) => {
                writeln!(self.text, "layer {i} is the first past the tolerance of {:e}\n", self.tolerance)
            }
            Some(DivergencePoint::Output) => {
                writeln!(self.text, "only the {output} are past the tolerance of {:e}\n", self.tolerance)
            }
        };
    }

    /// Adds a line of the table: a layer or the output.
    fn line(&mut self, what: &str, d: &Deviation) {
        let mark = if d.within(self.tolerance) { "" } else { "  past the tolerance" };
        let _ =
            writeln!(self.text, "{what:<10}  {:>10.2e}  {:>10.2e}  {:>8}{mark}", d.nmse, d.max_difference, d.position);
    }
}

/// A deviation as JSON. Infinite and NaN numbers become `null`.
fn deviation_json(d: &Deviation) -> Value {
    json!({"nmse": d.nmse, "position": d.position, "max_difference": d.max_difference})
}

/// The error for fewer than two devices.
fn too_few_devices() -> CliError {
    CliError::Usage("--devices takes two or more devices, the reference first, as in --devices cpu,gpu".into())
}

/// Parses a number of 0 or more.
fn not_negative(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(x) if x >= 0.0 => Ok(x),
        Ok(_) => Err("must be 0 or more".into()),
        Err(e) => Err(e.to_string()),
    }
}
