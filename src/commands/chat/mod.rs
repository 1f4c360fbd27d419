//! `chat`: a conversation with a model.
//!
//! [`talk`] runs it; `run` without a text calls it, too. `input.rs` reads lines of the user, `commands.rs` parses them,
//! `history.rs` holds the messages, `session.rs` generates answers, `tools.rs` calls tools of MCP servers, `session_file.rs`
//! stores the conversation, and `waker.rs` wakes an idle device while the user types.

mod commands;
pub mod history;
mod input;
pub mod session;
mod session_file;
pub mod tools;
mod waker;

use std::fs::File;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use metal_attention::Generator;
use metal_attention::scheduler::SchedulerOptions;
use metal_attention::speculation::SpeculativePass;
use metal_attention_chat::{ChatTemplate, Message, ReasoningSetting, Role};

use crate::cli_error::CliError;
use crate::engine_args::EngineArgs;
use crate::form_args::FormArgs;
use crate::interrupt;
use crate::metadata_text::{safe, safe_lines};
use crate::model_args::ModelArgs;
use crate::output_file::OutputFile;
use crate::picture_args::{MmprojArgs, Pictures, read_picture};
use crate::progress::ProgressLine;
use crate::sampling_args::SamplingArgs;
use crate::sampling_options;
use crate::speculation_args::SpeculationArgs;
use crate::template_file;
use crate::text_input::WordsArgs;
use commands::{ChatCommand, HELP};
use history::ChatHistory;
use input::UserInput;
use session::ChatSession;
use session_file::ChatSessionFile;
use tools::{McpTools, ToolServers, ToolsArgs};

/// The largest number of answers in a row that call tools.
const MAX_ROUNDS: usize = 20;

const AFTER_HELP: &str = "\
In a conversation:
  Lines that begin with / are commands; /help lists them. A message that begins with / is written with //.
  A line that ends with \\ continues in the next one; \"\"\" begins and ends a message of several lines.
  Ctrl-C stops the answer and keeps the conversation; Ctrl-D leaves.

If stdin or stdout is no terminal, each line of stdin is a message or a command, and stdout has the answers and \
nothing else.

TEXT is the first message. Without -m the first word is the model, if it names one; all words that follow are the text.

Examples:
  metal-attention chat llama3.2
  metal-attention chat llama3.2 \"Why is the sky blue?\"
  metal-attention chat -m model.gguf --system \"Answer in one sentence.\" --temp 0.3
  echo \"What is Rust?\" | metal-attention chat model.gguf -n 100";

/// Talk with a model
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
pub struct Args {
    #[command(flatten)]
    words: WordsArgs,

    #[command(flatten)]
    model: ModelArgs,

    /// The first message, the same as TEXT
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true)]
    prompt: Option<String>,

    /// System message, for the whole conversation
    #[arg(long, alias = "system-prompt", value_name = "TEXT")]
    system: Option<String>,

    /// Begin with the messages in this file, JSON as /save writes it
    #[arg(long, value_name = "FILE")]
    load: Option<PathBuf>,

    /// Continue the conversation in this file, if it exists, and keep it there, together with its KV cache
    #[arg(long, value_name = "FILE", conflicts_with = "load")]
    session: Option<PathBuf>,

    /// Use the chat template in this file instead of the model's
    #[arg(long, value_name = "FILE")]
    chat_template: Option<PathBuf>,

    /// Whether the model thinks before it answers, or how hard: true, false, low, medium or high
    #[arg(long, value_name = "HOW")]
    thinking: Option<ReasoningSetting>,

    /// Most tokens of an answer; -1: until the model ends it or the context is full
    #[arg(short = 'n', long, value_name = "N", default_value_t = -1, allow_negative_numbers = true)]
    #[arg(aliases = ["predict", "max-tokens", "num-predict", "max-new-tokens"])]
    n_predict: i64,

    /// End an answer before this string (repeatable)
    #[arg(long, value_name = "STR", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    stop: Vec<String>,

    #[command(flatten)]
    engine: EngineArgs,

    #[command(flatten)]
    speculation: SpeculationArgs,

    #[command(flatten)]
    sampling: SamplingArgs,

    #[command(flatten)]
    form: FormArgs,

    #[command(flatten)]
    mmproj: MmprojArgs,

    #[command(flatten)]
    tools: ToolsArgs,
}

/// The settings that a conversation begins with.
pub struct ChatSetup<'a> {
    /// The model.
    pub model: &'a ModelArgs,
    /// The system message. `None`: that of the loaded messages, if there is one.
    pub system: Option<&'a str>,
    /// The file with earlier messages (`--load`).
    pub load: Option<&'a Path>,
    /// The file that keeps the conversation (`--session`).
    pub session: Option<&'a Path>,
    /// The file with a chat template that replaces the model's.
    pub chat_template: Option<&'a Path>,
    /// Whether the model thinks. `None`: the default of its template.
    pub thinking: Option<ReasoningSetting>,
    /// The largest number of tokens of an answer; below 0: no limit.
    pub n_predict: i64,
    /// Strings that end an answer.
    pub stop: &'a [String],
    /// The device and its options.
    pub engine: &'a EngineArgs,
    /// The flags for drafts.
    pub speculation: &'a SpeculationArgs,
    /// The sampling flags.
    pub sampling: &'a SamplingArgs,
    /// The form of each answer.
    pub form: &'a FormArgs,
    /// The file that encodes pictures.
    pub mmproj: &'a MmprojArgs,
    /// The MCP servers whose tools the model may call.
    pub tools: Option<ToolServers<'a>>,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<(), CliError> {
    let (model, text) = args.words.model_and_text(&args.model, args.prompt.is_none())?;
    let model = if args.prompt.is_some() { model } else { model.or_chosen()? };
    if text.is_some() && args.prompt.is_some() {
        return Err(CliError::Usage("the first message is given twice: by -p, and without a flag".into()));
    }
    let setup = ChatSetup {
        model: &model,
        system: args.system.as_deref(),
        load: args.load.as_deref(),
        session: args.session.as_deref(),
        chat_template: args.chat_template.as_deref(),
        thinking: args.thinking,
        n_predict: args.n_predict,
        stop: &args.stop,
        engine: &args.engine,
        speculation: &args.speculation,
        sampling: &args.sampling,
        form: &args.form,
        mmproj: &args.mmproj,
        tools: args.tools.servers(),
    };
    talk(&setup, text.or_else(|| args.prompt.clone()))
}

/// Holds a conversation: answers `first`, if it is given, then each message of the user until the end of the input.
pub fn talk(args: &ChatSetup, first: Option<String>) -> Result<(), CliError> {
    let form = args.form.form()?;
    let start = Instant::now();
    args.model.fetch()?;
    let loading = ProgressLine::spinner("loading the model");
    let model = args.model.open()?;
    let tokenizer = args.model.tokenizer(&model)?;
    let sampling = args.sampling.options(&model)?;
    let template = match args.chat_template {
        None => ChatTemplate::for_model(model.gguf().metadata(), Arc::clone(&tokenizer)),
        Some(path) => template_file::read(path, &tokenizer)?,
    };
    let (tools, loading) = match args.tools {
        Some(servers) => {
            // Only one line of progress is shown at a time.
            drop(loading);
            (Some(McpTools::start(servers, &template)?), ProgressLine::spinner("loading the model"))
        }
        None => (None, loading),
    };
    loading.weigh(model.gguf().tensor_bytes());
    let engine = args.engine.options(&model);
    let draft = args.speculation.draft_file(args.model)?;
    let SpeculativePass { pass, drafter } = args.speculation.open(&model, draft.as_ref(), &engine)?;
    let mut generator = Generator::with_pass(&model, pass, sampling.clone())?;
    generator.set_drafter(drafter, args.speculation.depth());
    drop(loading);
    generator.keep_prompt_ends(SchedulerOptions::default_cache_ram());

    let mut conversation = match args.load {
        Some(path) => load(path)?,
        None => ChatHistory::default(),
    };
    let mut session_file = None;
    if let Some(path) = args.session {
        let (session, messages) = ChatSessionFile::open(path, &mut generator)?;
        (session_file, conversation) = (Some(session), messages);
    }
    if let Some(system) = args.system {
        conversation.system = Some(system.to_owned());
    }
    let interactive = std::io::stdin().is_terminal() && std::io::stdout().is_terminal();
    let options = session::SessionOptions {
        n_predict: usize::try_from(args.n_predict).ok(),
        stop: args.stop.to_vec(),
        thinking: args.thinking,
        form,
        tools: tools.as_ref().map(McpTools::functions).unwrap_or_default(),
        interactive,
        load: start.elapsed(),
    };
    let session = ChatSession::new(generator, tokenizer, template, conversation, sampling, options);
    let mut chat = ChatLoop {
        session,
        session_file,
        tools,
        input: UserInput::new(interactive)?,
        name: args.model.name(),
        n_vocab: model.spec().n_vocab,
        interactive,
        setup: args,
        markers: String::new(),
    };
    if interactive {
        note(&format!("{}; /help lists the commands, Ctrl-D leaves", args.model.name()));
    }
    let outcome = chat.converse(first);
    outcome.and(chat.save_all())
}

/// The state of a conversation: reads commands and carries them out.
/// Notes for the user go to stderr, answers to stdout.
struct ChatLoop<'a> {
    /// The model and the messages.
    session: ChatSession,
    /// The file of `--session`.
    session_file: Option<ChatSessionFile>,
    /// The tools of MCP servers. `None`: the model may call none.
    tools: Option<McpTools>,
    /// The source of the user's lines.
    input: UserInput,
    /// The model's name for `/show`.
    name: String,
    /// The number of tokens in the vocabulary.
    n_vocab: usize,
    /// Whether stdin and stdout are a terminal.
    interactive: bool,
    /// The settings that the conversation began with.
    setup: &'a ChatSetup<'a>,
    /// The markers of the pictures for the next message.
    markers: String,
}

impl ChatLoop<'_> {
    /// Answers `first`, then the lines of the input.
    fn converse(&mut self, first: Option<String>) -> Result<(), CliError> {
        if let Some(text) = first {
            if self.interactive {
                note(&format!("> {}", safe_lines(&text)));
            }
            self.carry_out_and_report(ChatCommand::Say(text))?;
        }
        while self.turn()? {}
        Ok(())
    }

    /// Writes the session file with the KV cache, if there is one.
    fn save_all(&mut self) -> Result<(), CliError> {
        self.session_file.as_mut().map_or(Ok(()), |session_file| session_file.save_all(&mut self.session))
    }

    /// Reads a message or a command and carries it out. Returns false if the conversation ends.
    fn turn(&mut self) -> Result<bool, CliError> {
        let Some(text) = waker::read_awake(&mut self.input, &mut self.session)? else { return Ok(false) };
        match commands::parse(&text) {
            Ok(ChatCommand::Exit) => return Ok(false),
            Ok(command) => self.carry_out_and_report(command)?,
            Err(problem) if self.interactive => note(&problem),
            Err(problem) => return Err(CliError::Usage(problem)),
        }
        Ok(true)
    }

    /// Carries out a command and writes the session file's messages. At a terminal an error is printed and the conversation
    /// continues, unless stdout is closed; otherwise it is returned.
    fn carry_out_and_report(&mut self, command: ChatCommand) -> Result<(), CliError> {
        let _ctrl_c = interrupt::cancel_on_ctrl_c();
        let outcome = self.carry_out(command);
        let session_file =
            self.session_file.as_mut().map_or(Ok(()), |session_file| session_file.save_messages(&self.session));
        if let Err(error) = outcome.and(session_file) {
            match error {
                CliError::Interrupted => note("note: not answered"),
                // A script ends at the first error.
                error if !self.interactive || matches!(error, CliError::Write { .. }) => return Err(error),
                error => note(&format!("error: {error}")),
            }
        }
        if interrupt::requested() && !self.interactive {
            self.save_all()?;
            interrupt::exit();
        }
        Ok(())
    }

    /// Carries out a command.
    fn carry_out(&mut self, command: ChatCommand) -> Result<(), CliError> {
        let conversation = &mut self.session.conversation;
        match command {
            ChatCommand::Nothing | ChatCommand::Exit => {}
            ChatCommand::Say(text) => return self.send_message(&text),
            ChatCommand::Image(path, text) => return self.add_picture(&path, text),
            ChatCommand::Regenerate => return self.regenerate(),
            ChatCommand::System(None) => {
                note(conversation.system.as_deref().unwrap_or("there is no system message; /system TEXT sets one"));
            }
            ChatCommand::System(Some(text)) => conversation.system = Some(text).filter(|text| text != "none"),
            ChatCommand::Reset => {
                conversation.messages.clear();
                note("a new conversation");
            }
            ChatCommand::Undo => match conversation.undo() {
                Some(text) => note(&format!("took back: {}", Pictures::shown(&text))),
                None => note("there is nothing to take back"),
            },
            ChatCommand::Save(path) => {
                let json = serde_json::to_string_pretty(&conversation.with_system())
                    .map_err(|e| CliError::General(format!("cannot write JSON: {e}")))?;
                // After an error an earlier file is unchanged, and the conversation continues.
                save(&path, &(Pictures::shown(&json) + "\n")).map_err(|error| CliError::General(error.to_string()))?;
                note(&format!("wrote {}", path.display()));
            }
            ChatCommand::Load(path) => {
                *conversation = load(&path)?;
                note(&format!("read {} messages from {}", conversation.with_system().len(), path.display()));
            }
            ChatCommand::Set(None) => note(&sampling_options::text(self.session.sampling())),
            ChatCommand::Set(Some((name, value))) => {
                let mut sampling = self.session.sampling().clone();
                sampling_options::set(&mut sampling, &name, &value, self.n_vocab).map_err(CliError::Usage)?;
                self.session.set_sampling(sampling)?;
            }
            ChatCommand::Think(thinking) => {
                if !self.session.set_thinking(thinking) {
                    note("note: the model's chat template knows no such setting");
                }
            }
            ChatCommand::Show => note(&self.show()),
            ChatCommand::Stats => self.session.print_statistics(),
            ChatCommand::Help => note(HELP),
        }
        Ok(())
    }

    /// The text of `/show`: the model, its device, its context and the sampling options.
    fn show(&self) -> String {
        let (model, pass) = (self.session.model(), self.session.forward_pass());
        let (spec, device) = (model.spec(), pass.device());
        let metadata = model.gguf().metadata();
        let named = metadata.str("general.name").ok().flatten().unwrap_or_default();
        let system = self.session.conversation.system.as_deref().unwrap_or("none");
        let lines = [
            ("model", format!("{} {named}", self.name)),
            ("architecture", format!("{}, {} layers, {} wide", spec.architecture, spec.n_layer(), spec.n_embd)),
            ("device", format!("{}, {}", device.kind, device.name)),
            ("context", format!("{} tokens; the model was trained with {}", pass.n_ctx(), spec.n_ctx_train)),
            ("system", system.to_owned()),
            ("tools", self.tools.as_ref().map_or_else(|| "none".into(), McpTools::names)),
            (
                "reasoning",
                self.session.thinking().map_or_else(|| "as its chat template has it".into(), |t| t.to_string()),
            ),
        ];
        let lines: Vec<_> = lines.iter().map(|(name, value)| format!("{name:<13} {}", safe(value.trim()))).collect();
        lines.join("\n") + "\n" + &sampling_options::text(self.session.sampling())
    }

    /// Adds a picture to the next message, which is `text` if there is one.
    fn add_picture(&mut self, path: &Path, text: Option<String>) -> Result<(), CliError> {
        let picture = read_picture(path)?;
        let marker = self.session.add_picture(&picture, |model| {
            self.setup.mmproj.open(self.setup.model, model, &self.setup.engine.options(model))
        })?;
        self.markers.push_str(&marker);
        if let Some(text) = text {
            return self.send_message(&text);
        }
        let (width, height) = (picture.width(), picture.height());
        note(&format!("{}, {width} x {height} pixels, comes with the next message", path.display()));
        Ok(())
    }

    /// Adds a message of the user and answers it. After an error without an answer the message is removed again.
    fn send_message(&mut self, text: &str) -> Result<(), CliError> {
        let text = std::mem::take(&mut self.markers) + text;
        self.session.conversation.messages.push(Message::user(text));
        self.answer().inspect_err(|_| {
            if !self.has_answer() {
                self.session.conversation.undo();
            }
        })
    }

    /// Answers the last message of the user again, with another seed. After an error the earlier answer is restored.
    fn regenerate(&mut self) -> Result<(), CliError> {
        let Some(answer) = self.session.conversation.take_answer() else {
            note("there is nothing to answer");
            return Ok(());
        };
        self.session.next_seed()?;
        self.answer().inspect_err(|_| {
            if !self.has_answer() {
                self.session.conversation.messages.extend(answer);
            }
        })
    }

    /// Whether an answer, or at least a tool call, follows the last message of the user.
    fn has_answer(&self) -> bool {
        self.session.conversation.messages.last().is_some_and(|message| message.role != Role::User)
    }

    /// Generates the answer to the last message. Tool calls are executed, and the model continues with their results, at most
    /// [`MAX_ROUNDS`] times. Returns early after Ctrl-C.
    fn answer(&mut self) -> Result<(), CliError> {
        for _ in 0..MAX_ROUNDS {
            let calls = self.session.answer()?;
            let Some(tools) = self.tools.as_ref().filter(|_| !calls.is_empty()) else { return Ok(()) };
            for call in calls {
                let text = tools.call(&call.function.name, &call.function.arguments, &mut self.input)?;
                let result = Message::new(Role::Tool, text);
                let (tool_call_id, name) = (Some(call.id), Some(call.function.name));
                self.session.conversation.messages.push(Message { tool_call_id, name, ..result });
            }
            if interrupt::requested() {
                return Ok(());
            }
        }
        note(&format!("note: the model called tools {MAX_ROUNDS} times in a row: it is not asked again"));
        Ok(())
    }
}

/// Writes `json` to a file, which an error leaves unchanged.
fn save(path: &Path, json: &str) -> Result<(), CliError> {
    let mut out = OutputFile::create(path)?;
    let failed = |source| CliError::Write { to: path.display().to_string(), source };
    out.write_all(json.as_bytes()).map_err(failed)?;
    out.commit()
}

/// Reads the messages in a file of `/save`.
fn load(path: &Path) -> Result<ChatHistory, CliError> {
    let messages: Vec<Message> = serde_json::from_str(&read(path)?)
        .map_err(|e| CliError::Usage(format!("{} has no list of messages in JSON: {e}", path.display())))?;
    Ok(ChatHistory::from_messages(messages))
}

/// Reads a file of text.
fn read(path: &Path) -> Result<String, CliError> {
    let cannot = |e: std::io::Error| CliError::Usage(format!("cannot read {}: {e}", path.display()));
    std::io::read_to_string(File::open(path).map_err(cannot)?).map_err(cannot)
}

/// Prints a line on stderr. Errors are ignored, because stderr may be closed.
fn note(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}
