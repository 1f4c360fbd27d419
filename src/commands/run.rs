//! `run`: continues a prompt.

use std::io::Write;
use std::ops::ControlFlow;
use std::time::Instant;

use metal_attention::{GenerateOptions, Generator, StopReason};

use crate::cli_error::CliError;
use crate::engine_args::EngineArgs;
use crate::interrupt;
use crate::model_args::ModelArgs;
use crate::profile_args::ProfileArgs;
use crate::progress::Progress;
use crate::run_output::RunOutput;
use crate::sampling_args::SamplingArgs;
use crate::statistics::Statistics;
use crate::text_input::{EncodingArgs, TextArgs};

const AFTER_HELP: &str = "\
Output:
  stdout has the continuation and nothing else, with the space it may begin with; a line break \
  follows where stdout is a terminal. With --json it has JSON lines: one of type meta, one of type \
  token (id, text) for each token, and one of type done (text, stop_reason, timings).
  stderr ends with load time, speed and memory. Ctrl-C ends the text; twice, the program.

Examples:
  metal-attention run -p \"Once upon a time\" --temp 0 -n 128
  metal-attention run -m model.gguf -f chapter.txt -n 200 --seed 42
  echo \"Dear diary,\" | metal-attention run -m model.gguf -
  metal-attention run -m model.gguf -p \"Q: What is Rust? A:\" --stop \"Q:\" --json";

/// Continue a prompt
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
#[allow(clippy::struct_excessive_bools)] // each is a flag of its own
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,

    #[command(flatten)]
    text: TextArgs,

    /// Most tokens to generate; -1: until the model ends the text or the context is full
    #[arg(short = 'n', long, value_name = "N", default_value_t = -1, allow_negative_numbers = true)]
    #[arg(aliases = ["predict", "max-tokens", "num-predict", "max-new-tokens"])]
    n_predict: i64,

    /// End the text before this string (repeatable)
    #[arg(long, value_name = "STR", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    stop: Vec<String>,

    /// Never choose a token that ends the text
    #[arg(long)]
    ignore_eos: bool,

    #[command(flatten)]
    encoding: EncodingArgs,

    /// Print the prompt before its continuation
    #[arg(long, conflicts_with = "json")]
    echo: bool,

    /// Print JSON lines
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    profile: ProfileArgs,

    #[command(flatten)]
    engine: EngineArgs,

    #[command(flatten)]
    sampling: SamplingArgs,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<(), CliError> {
    let text = args.text.read()?.ok_or_else(|| {
        CliError::Usage("there is no prompt: give one with -p TEXT, -f FILE, or - to read it from stdin".into())
    })?;
    args.model.fetch()?;
    let start = Instant::now();
    let loading = Progress::spinner("loading the model");
    let model = args.model.open()?;
    let tokenizer = args.model.tokenizer(&model)?;
    let sampling = args.sampling.options(model.spec().n_vocab)?;
    loading.weigh(model.gguf().tensor_bytes());
    let mut generator = Generator::new(&model, &args.engine.options(&model), sampling)?;
    if args.profile.wanted() {
        generator.start_profile()?;
    }
    drop(loading);
    let load = start.elapsed();
    tracing::info!("seed: {}", generator.sampler().seed());

    let ids = tokenizer.encode(&text, args.encoding.options());
    // The text so far and its statistics are kept.
    let _asked = interrupt::ask();
    let mut output = RunOutput::new(args.json);
    let stop_reason = args.continue_text(&text, &ids, &mut generator, &mut output)?;
    let statistics = Statistics { load, timings: generator.timings() };
    output.end(stop_reason, &statistics)?;
    if stop_reason == Some(StopReason::ContextFull) {
        let n_ctx = generator.forward_pass().n_ctx();
        // Where stderr is closed the text is all there is to tell.
        let _ = writeln!(
            std::io::stderr(),
            "note: the text ends here because the context of {n_ctx} tokens is full; -c makes it larger (the model was trained with {})",
            model.spec().n_ctx_train
        );
    }
    statistics.print();
    if let Some(profile) = generator.take_profile() {
        args.profile.report(&[profile])?;
    }
    if stop_reason.is_none() {
        interrupt::end();
    }
    Ok(())
}

impl Args {
    /// Evaluates the prompt and writes its continuation. Returns why it ended; `None`: Ctrl-C.
    fn continue_text(
        &self,
        text: &str,
        ids: &[u32],
        generator: &mut Generator,
        output: &mut RunOutput,
    ) -> Result<Option<StopReason>, CliError> {
        let n_layer = generator.model().spec().n_layer();
        let progress = Progress::steps("reading the prompt", ids.len() as u64).watched(n_layer);
        let prefilled = generator.prompt(ids, |done, _total| {
            progress.set(done as u64);
            ControlFlow::Continue(())
        });
        match prefilled {
            // The loop below sees Ctrl-C, too.
            Err(error) if !error.is_cancelled() => return Err(error.into()),
            _ => {}
        }
        let mut progress = Some(progress);
        output.begin(&self.model.name(), generator, text, self.echo)?;
        let mut generation = generator.generate(GenerateOptions {
            n_predict: usize::try_from(self.n_predict).ok(),
            stop: self.stop.clone(),
            ignore_eos: self.ignore_eos,
        });
        while !interrupt::requested()
            && let Some(token) = generation.next()
        {
            // The line on stderr goes away before text appears.
            progress = None;
            match token {
                Err(error) if error.is_cancelled() => break,
                token => output.token(&token?)?,
            }
        }
        drop(progress);
        let stop_reason = generation.stop_reason();
        output.rest(&generation.finish())?;
        Ok(stop_reason)
    }
}
