//! `compare`: where the hidden states of two devices part.

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
use crate::progress::Progress;
use crate::token_input::{TokensArgs, fit_context};
use crate::units;

const AFTER_HELP: &str = "\
The first device is the reference: it computes in F32 with an F32 KV cache, whatever the flags say (--exact \
--cache-type f32). Each of the others runs as the flags say, and its hidden state after every layer and its logits are \
held against those of the reference: first with the tokens going through the layers together, as a prompt does, then \
one by one, as a continuation does. Models without an output head show the states after their last norm instead of \
logits, and where tokens see those after them they only go together. NMSE is |x - reference|^2 / |reference|^2 of the token where it is largest, and \
difference the largest absolute difference of two elements. Where an NMSE is past the tolerance the exit code is 1.

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
#[allow(clippy::struct_excessive_bools)] // each is a flag of its own
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,

    #[command(flatten)]
    tokens: TokensArgs,

    /// Devices to compare, the reference first
    #[arg(long, value_name = "DEVICES", value_delimiter = ',', default_value = "cpu,gpu")]
    devices: Vec<Device>,

    /// Largest NMSE that is no error
    #[arg(long, value_name = "NMSE", default_value_t = 1e-3, value_parser = not_negative, allow_negative_numbers = true)]
    tolerance: f64,

    /// Only with the tokens going through the layers together
    #[arg(long, conflicts_with = "decode")]
    prefill: bool,

    /// Only with the tokens going through the layers one by one
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
    let loading = Progress::spinner("loading the model");
    let mut options = args.setup.options(&model);
    fit_context(&mut options, &ids, &model)?;
    let exact = EngineOptions { device: reference.clone(), exact: true, cache_type: CacheType::F32, ..options.clone() };
    loading.weigh(model.gguf().tensor_bytes());
    let mut reference_pass = model.forward_pass(&exact)?;
    drop(loading);

    let mut out = Output { tolerance: args.tolerance, text: String::new(), comparisons: Vec::new(), n_past: 0 };
    // The comparisons so far are kept, where there are any.
    let mut asked = None;
    let mut compare_all = || -> Result<(), CliError> {
        for device in others {
            let loading = Progress::spinner("loading the model");
            loading.weigh(model.gguf().tensor_bytes());
            let mut pass = model.forward_pass(&EngineOptions { device: device.clone(), ..options.clone() })?;
            drop(loading);
            for way in args.ways(pass.n_ubatch(), model.spec().is_causal()) {
                let steps = Progress::steps("comparing", ids.len() as u64).watched(2 * model.spec().n_layer());
                let progress = |done: usize, _| {
                    steps.set(done as u64);
                    ControlFlow::Continue(())
                };
                let found = compare(&mut *reference_pass, &mut *pass, &ids, way, progress)?;
                drop(steps);
                out.add(reference, device, way, &found);
                asked.get_or_insert_with(interrupt::ask);
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
        interrupt::end();
    }
    if out.n_past > 0 {
        let comparisons = units::count(out.n_past, "comparison");
        return Err(CliError::General(format!("{comparisons} past the tolerance of {:e}", args.tolerance)));
    }
    Ok(())
}

impl Args {
    fn ways(&self, n_ubatch: usize, is_causal: bool) -> Vec<EvaluationMode> {
        let both = [
            (EvaluationMode::Prefill(n_ubatch), self.decode),
            (EvaluationMode::Decode, self.prefill || !is_causal && !self.decode),
        ];
        both.into_iter().filter(|&(_, left_out)| !left_out).map(|(way, _)| way).collect()
    }
}

/// What is written at the end.
struct Output {
    tolerance: f64,
    text: String,
    comparisons: Vec<Value>,
    /// Comparisons past the tolerance.
    n_past: usize,
}

impl Output {
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

    fn line(&mut self, what: &str, d: &Deviation) {
        let mark = if d.within(self.tolerance) { "" } else { "  past the tolerance" };
        let _ =
            writeln!(self.text, "{what:<10}  {:>10.2e}  {:>10.2e}  {:>8}{mark}", d.nmse, d.max_difference, d.position);
    }
}

/// Numbers that JSON does not have become `null`.
fn deviation_json(d: &Deviation) -> Value {
    json!({"nmse": d.nmse, "position": d.position, "max_difference": d.max_difference})
}

fn too_few_devices() -> CliError {
    CliError::Usage("--devices takes two or more devices, the reference first, as in --devices cpu,gpu".into())
}

fn not_negative(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(x) if x >= 0.0 => Ok(x),
        Ok(_) => Err("must be 0 or more".into()),
        Err(e) => Err(e.to_string()),
    }
}
