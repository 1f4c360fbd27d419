//! `run`: answers one message through the chat template, or continues a text. Without either, at a terminal, it is `chat`.
//!
//! The steps: find the prompt among flags, words and stdin; load the model; render and encode the prompt; prefill; generate
//! tokens to stdout (`run_output.rs`); print statistics on stderr.

use std::io::{IsTerminal, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use metal_attention::speculation::SpeculativePass;
use metal_attention::tokenizer::Tokenizer;
use metal_attention::{GenerateOptions, Generator, Model, PromptSpan, StopReason};
use metal_attention_chat::{ChatTemplate, Message, Prompt, ReasoningSetting, RenderRequest, RenderedPrompt};
use metal_attention_grammar::GrammarCompiler;

use crate::cli_error::CliError;
use crate::commands::chat;
use crate::commands::chat::history::ChatHistory;
use crate::engine_args::EngineArgs;
use crate::form_args::{FormArgs, constrain};
use crate::interrupt;
use crate::model_args::ModelArgs;
use crate::picture_args::{PictureArgs, Pictures};
use crate::profile_args::ProfileArgs;
use crate::progress::ProgressLine;
use crate::run_output::RunOutput;
use crate::sampling_args::SamplingArgs;
use crate::speculation_args::SpeculationArgs;
use crate::statistics::RunStatistics;
use crate::template_file;
use crate::text_input::{EncodingArgs, WordsArgs, read_file, read_stdin};

const AFTER_HELP: &str = "\
TEXT is a message that the model answers if its file has a chat template; without a template, or with --raw, the model \
continues TEXT. Without -m the first word is the model, if it names one; all words that follow are the text. A text from -p, -f \
or - is continued, unless --chat is given. Without a text, `run MODEL` is `chat` at a terminal; elsewhere it answers the text \
of stdin.

Output:
  stdout has the continuation and nothing else, including the space it may begin with; on a terminal a line break \
  follows. An answer is printed without the model's reasoning, and with a line break. With --json stdout has JSON lines: one of type meta, one of type \
  token (id, text) for each token, and one of type done (text, stop_reason, timings).
  stderr ends with load time, speed and memory. Ctrl-C ends the text; twice, the program.

Examples:
  metal-attention run llama3.2 \"Why is the sky blue?\"
  metal-attention run llama3.2
  metal-attention run -m model.gguf --raw \"The capital of France is\" -n 20
  metal-attention run -p \"Once upon a time\" --temp 0 -n 128
  metal-attention run -m model.gguf -f chapter.txt -n 200 --seed 42
  echo \"Dear diary,\" | metal-attention run -m model.gguf -
  metal-attention run -m model.gguf -p \"Q: What is Rust? A:\" --stop \"Q:\" --json
  metal-attention run -m gemma-3-4b.gguf \"What is this?\" --image photo.jpg
  metal-attention run llama3.2 \"Is the sky blue?\" --regex \"yes|no\"
  metal-attention run llama3.2 \"Describe a cat.\" --json-schema @cat.schema.json";

/// Answer a message, or continue a text
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
#[allow(clippy::struct_excessive_bools)] // each is a separate flag
pub struct Args {
    #[command(flatten)]
    words: WordsArgs,

    #[command(flatten)]
    model: ModelArgs,

    /// A text to continue
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true, conflicts_with = "file")]
    prompt: Option<String>,

    /// Read a text to continue from a file; -: from stdin
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,

    /// Answer the text as a message, also that of -p, -f or -
    #[arg(long, conflicts_with = "raw")]
    chat: bool,

    /// Continue the text as it is
    #[arg(long)]
    raw: bool,

    /// System message, which comes before the message
    #[arg(long, alias = "system-prompt", value_name = "TEXT")]
    system: Option<String>,

    /// Use the chat template in this file instead of the model's
    #[arg(long, value_name = "FILE")]
    chat_template: Option<PathBuf>,

    /// Whether the model thinks before it answers, or how hard: true, false, low, medium or high
    #[arg(long, value_name = "HOW")]
    thinking: Option<ReasoningSetting>,

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
    pictures: PictureArgs,

    #[command(flatten)]
    profile: ProfileArgs,

    #[command(flatten)]
    engine: EngineArgs,

    #[command(flatten)]
    speculation: SpeculationArgs,

    #[command(flatten)]
    sampling: SamplingArgs,

    #[command(flatten)]
    form: FormArgs,
}

/// The input of the model.
enum PromptFlag {
    /// A text to continue.
    Plain(String),
    /// A message to answer. It is continued as plain text if the model has no usable chat template.
    Message(String),
}

/// Runs the command.
pub fn run(args: &Args) -> Result<(), CliError> {
    let (model_args, words) = args.words.model_and_text(&args.model, !args.is_for_program())?;
    let has_text = words.is_some() || args.prompt.is_some() || args.file.is_some() || args.pictures.are_given();
    let model_args = if has_text || args.is_for_program() { model_args } else { model_args.or_chosen()? };
    let Some(given) = args.prompt_input(&model_args, words)? else {
        return chat::talk(&args.conversation(&model_args), None);
    };
    let form = args.form.form()?;
    model_args.fetch()?;
    let start = Instant::now();
    let loading = ProgressLine::spinner("loading the model");
    let model = model_args.open()?;
    let tokenizer = model_args.tokenizer(&model)?;
    let sampling = args.sampling.options(&model)?;
    loading.weigh(model.gguf().tensor_bytes());
    let options = args.engine.options(&model);
    let draft = args.speculation.draft_file(&model_args)?;
    let SpeculativePass { pass, drafter } = args.speculation.open(&model, draft.as_ref(), &options)?;
    let mut generator = Generator::with_pass(&model, pass, sampling)?;
    generator.set_drafter(drafter, args.speculation.depth());
    if args.profile.is_set() {
        generator.start_profile()?;
    }
    drop(loading);
    let load = start.elapsed();
    tracing::info!("seed: {}", generator.sampler().seed());

    let (given, pictures) = match given {
        PromptFlag::Plain(text) => {
            let (text, pictures) = args.pictures.read(text, &model_args, &model, &tokenizer, &options)?;
            (PromptFlag::Plain(text), pictures)
        }
        PromptFlag::Message(text) => {
            let (text, pictures) = args.pictures.read(text, &model_args, &model, &tokenizer, &options)?;
            (PromptFlag::Message(text), pictures)
        }
    };
    let grammars = GrammarCompiler::new(&tokenizer);
    let mut output = RunOutput::new(args.json);
    let mut stop = args.stop.clone();
    let template = match &given {
        PromptFlag::Plain(_) => None,
        PromptFlag::Message(_) => args.template(&model, &tokenizer)?,
    };
    let (text, (ids, spans)) = match (given, template) {
        (PromptFlag::Message(text), Some(template)) => {
            let rendered = args.message(text, &template)?;
            stop.extend(template.stop_strings().iter().map(|&stop| stop.to_owned()));
            output.answer(Arc::clone(&tokenizer), template.continued_parser(&rendered, &[]));
            let inputs = match &pictures {
                None => (rendered.prompt.encode(&tokenizer), Vec::new()),
                Some(pictures) => pictures.prompt(&rendered.prompt, &tokenizer),
            };
            if let Some(form) = &form {
                constrain(&mut generator, &grammars, form, Some((&template, &rendered.prompt.text)))?;
            }
            (Pictures::shown(&rendered.prompt.text), inputs)
        }
        (PromptFlag::Plain(text) | PromptFlag::Message(text), _) => {
            if !args.raw && has_template(&model) {
                note(
                    "note: the text is continued as it is, though the model has a chat template: --chat has it answered, --raw \
                      leaves this note out",
                );
            }
            let inputs = match &pictures {
                None => (tokenizer.encode(&text, args.encoding.options()), Vec::new()),
                Some(pictures) => {
                    let prompt = Prompt { text: text.clone(), literals: Vec::new() };
                    pictures.prompt(&prompt, &tokenizer)
                }
            };
            if let Some(form) = &form {
                constrain(&mut generator, &grammars, form, None)?;
            }
            (Pictures::shown(&text), inputs)
        }
    };
    // After Ctrl-C the text so far and the statistics are printed.
    let _ctrl_c = interrupt::cancel_on_ctrl_c();
    let stop_reason =
        args.continue_text(&model_args.name(), &text, (&ids, &spans), stop, &mut generator, &mut output)?;
    let statistics = RunStatistics { load, timings: generator.timings() };
    output.end(stop_reason, &statistics)?;
    if stop_reason == Some(StopReason::ContextFull) {
        let n_ctx = generator.forward_pass().n_ctx();
        note(&format!(
            "note: the text ends here because the context of {n_ctx} tokens is full; -c makes it larger (the model was trained with {})",
            model.spec().n_ctx_train
        ));
    }
    statistics.print();
    if let Some(profile) = generator.take_profile() {
        args.profile.report(&[profile])?;
    }
    if stop_reason.is_none() {
        interrupt::exit();
    }
    Ok(())
}

/// Whether the file has a chat template.
fn has_template(model: &Model) -> bool {
    model.gguf().metadata().str("tokenizer.chat_template").is_ok_and(|template| template.is_some())
}

/// Prints a line on stderr. Errors are ignored, because stderr may be closed.
fn note(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

impl Args {
    /// Whether a program reads the output, or the text is continued: nothing is a conversation then.
    fn is_for_program(&self) -> bool {
        self.json || self.raw || self.echo
    }

    /// The input that flags, words or stdin give. `None`: there is none, and a conversation at the terminal begins.
    fn prompt_input(&self, model: &ModelArgs, words: Option<String>) -> Result<Option<PromptFlag>, CliError> {
        let plain = match (&self.prompt, &self.file, words.as_deref()) {
            (Some(_), _, Some(_)) | (_, Some(_), Some(_)) => {
                let twice =
                    "the text is given twice: by a flag, and without one (with -m, what has no flag is the text)";
                return Err(CliError::Usage(twice.into()));
            }
            (Some(text), _, None) => text.clone(),
            (None, Some(path), None) if path == Path::new("-") => read_stdin()?,
            (None, Some(path), None) => read_file(path)?,
            (None, None, Some("-")) => read_stdin()?,
            (None, None, Some(_)) => {
                let text = words.unwrap_or_default();
                return Ok(Some(if self.raw { PromptFlag::Plain(text) } else { PromptFlag::Message(text) }));
            }
            (None, None, None) => return self.input_without_text(model),
        };
        Ok(Some(if self.chat { PromptFlag::Message(plain) } else { PromptFlag::Plain(plain) }))
    }

    /// The input if the command line has no text: that of stdin unless stdin is a terminal. `None`: a conversation begins.
    fn input_without_text(&self, model: &ModelArgs) -> Result<Option<PromptFlag>, CliError> {
        let (input, output) = (std::io::stdin(), std::io::stdout());
        if self.pictures.are_given() && input.is_terminal() {
            return Ok(Some(PromptFlag::Message(String::new())));
        }
        if !self.is_for_program() && input.is_terminal() && output.is_terminal() {
            return Ok(None);
        }
        if model.is_named() && !input.is_terminal() {
            let text = read_stdin()?;
            if !text.trim().is_empty() {
                return Ok(Some(if self.raw {
                    PromptFlag::Plain(text)
                } else {
                    PromptFlag::Message(text.trim_end().to_owned())
                }));
            }
        }
        Err(CliError::Usage(
            "there is no prompt: metal-attention run MODEL TEXT answers a message; -p TEXT, -f FILE, or - (from stdin) give a text to \
             continue; metal-attention chat MODEL begins a conversation"
                .into(),
        ))
    }

    /// The settings of the conversation that begins if there is no input.
    fn conversation<'a>(&'a self, model: &'a ModelArgs) -> chat::ChatSetup<'a> {
        chat::ChatSetup {
            model,
            system: self.system.as_deref(),
            load: None,
            session: None,
            chat_template: self.chat_template.as_deref(),
            thinking: self.thinking,
            n_predict: self.n_predict,
            stop: &self.stop,
            engine: &self.engine,
            speculation: &self.speculation,
            sampling: &self.sampling,
            form: &self.form,
            mmproj: self.pictures.mmproj(),
            tools: None,
        }
    }

    /// The chat template for a message. `None`: the model has none that can be used, and no flag needs one.
    fn template(&self, model: &Model, tokenizer: &Arc<Tokenizer>) -> Result<Option<ChatTemplate>, CliError> {
        let metadata = model.gguf().metadata();
        if let Some(path) = &self.chat_template {
            return template_file::read(path, tokenizer).map(Some);
        }
        if self.chat || self.system.is_some() {
            return Ok(Some(ChatTemplate::for_model(metadata, Arc::clone(tokenizer))));
        }
        Ok(ChatTemplate::from_metadata(metadata, Arc::clone(tokenizer)).unwrap_or_else(|error| {
            tracing::warn!("{error}: the text is continued as it is");
            None
        }))
    }

    /// Renders the prompt of a conversation that has only this message.
    fn message(&self, text: String, template: &ChatTemplate) -> Result<RenderedPrompt, CliError> {
        let conversation = ChatHistory { system: self.system.clone(), messages: vec![Message::user(text)] };
        let messages = conversation.with_system();
        let request = RenderRequest { messages: &messages, ..Default::default() };
        template.render_with_reasoning(&request, self.thinking).map_err(|e| CliError::Usage(e.to_string()))
    }

    /// Prefills the prompt `ids` and writes the generated text to `output`. Returns why it ended; `None`: Ctrl-C. `text` is the
    /// prompt as a string.
    fn continue_text(
        &self,
        model: &str,
        text: &str,
        (ids, spans): (&[u32], &[PromptSpan]),
        stop: Vec<String>,
        generator: &mut Generator,
        output: &mut RunOutput,
    ) -> Result<Option<StopReason>, CliError> {
        let n_layer = generator.model().spec().n_layer();
        let progress = ProgressLine::steps("reading the prompt", ids.len() as u64).watched(n_layer);
        let prefilled = generator.prompt_with_spans(ids, spans, |done, _total| {
            progress.set(done as u64);
            ControlFlow::Continue(())
        });
        match prefilled {
            // A cancelled prefill is no error: the loop below ends at once.
            Err(error) if !error.is_cancelled() => return Err(error.into()),
            _ => {}
        }
        let mut progress = Some(progress);
        output.begin(model, generator, text, self.echo)?;
        let mut generation = generator.generate(GenerateOptions {
            n_predict: usize::try_from(self.n_predict).ok(),
            stop,
            ignore_eos: self.ignore_eos,
            ..Default::default()
        });
        while !interrupt::requested()
            && let Some(token) = generation.next()
        {
            // The progress line is removed before text appears.
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
