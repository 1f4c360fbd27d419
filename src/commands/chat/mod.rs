//! `chat`: a conversation with a model.
//!
//! [`Setup`] is what a conversation needs; `run` without a text begins one, too. `input.rs` reads what the user types, `commands.rs` understands it, `conversation.rs` is what was said, and
//! `session.rs` has the model answer, `tools.rs` calls the tools that it asks for, and `kept.rs` keeps it in a file; `waker.rs` readies the device while somebody types.

mod commands;
pub mod conversation;
mod input;
mod kept;
pub mod session;
pub mod tools;
mod waker;

use std::fs::File;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use metal_attention::Generator;
use metal_attention::scheduler::SchedulerOptions;
use metal_attention_chat::{ChatTemplate, Message, Role, Thinking};

use crate::cli_error::CliError;
use crate::engine_args::EngineArgs;
use crate::form_args::FormArgs;
use crate::interrupt;
use crate::metadata_text::{safe, safe_lines};
use crate::model_args::ModelArgs;
use crate::output_file::OutputFile;
use crate::progress::Progress;
use crate::sampling_args::SamplingArgs;
use crate::sampling_options;
use crate::template_file;
use crate::text_input::WordsArgs;
use commands::{Command, HELP};
use conversation::Conversation;
use input::Input;
use kept::KeptSession;
use session::Session;
use tools::{Tools, ToolsArgs, Wanted};

/// How often in a row an answer may be calls of tools.
const MAX_ROUNDS: usize = 20;

const AFTER_HELP: &str = "\
In a conversation:
  Lines that begin with / are commands; /help lists them. A message that begins with / is written with //.
  A line that ends with \\ goes on in the next one; \"\"\" begins and ends a message of several lines.
  Ctrl-C stops the answer and keeps the conversation; Ctrl-D leaves.

Where stdin or stdout is no terminal, each line of stdin is a message or a command, and stdout has the answers and \
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

    /// The first message, as TEXT
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true)]
    prompt: Option<String>,

    /// Instructions for the whole conversation
    #[arg(long, alias = "system-prompt", value_name = "TEXT")]
    system: Option<String>,

    /// Begin with the messages in this file, JSON as /save writes it
    #[arg(long, value_name = "FILE")]
    load: Option<PathBuf>,

    /// Keep the conversation in this file, with what the KV cache has of it, and go on with what is there
    #[arg(long, value_name = "FILE", conflicts_with = "load")]
    session: Option<PathBuf>,

    /// Use the chat template in this file instead of the model's
    #[arg(long, value_name = "FILE")]
    chat_template: Option<PathBuf>,

    /// Whether the model thinks before it answers, or how hard: true, false, low, medium or high
    #[arg(long, value_name = "HOW")]
    thinking: Option<Thinking>,

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
    sampling: SamplingArgs,

    #[command(flatten)]
    form: FormArgs,

    #[command(flatten)]
    tools: ToolsArgs,
}

/// What a conversation begins with.
pub struct Setup<'a> {
    /// The model.
    pub model: &'a ModelArgs,
    /// Instructions for the whole conversation.
    pub system: Option<&'a str>,
    /// The file with the messages so far.
    pub load: Option<&'a Path>,
    /// The file that keeps the conversation.
    pub session: Option<&'a Path>,
    /// The file with the chat template, in the place of the model's.
    pub chat_template: Option<&'a Path>,
    /// Whether the model thinks; `None`: as its template has it.
    pub thinking: Option<Thinking>,
    /// Most tokens of an answer; below 0: no limit.
    pub n_predict: i64,
    /// Strings that end an answer.
    pub stop: &'a [String],
    /// Where the model runs.
    pub engine: &'a EngineArgs,
    /// How tokens are chosen.
    pub sampling: &'a SamplingArgs,
    /// What each answer must look like.
    pub form: &'a FormArgs,
    /// The MCP servers whose tools the model may call.
    pub tools: Option<Wanted<'a>>,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<(), CliError> {
    let (model, text) = args.words.model_and_text(&args.model)?;
    if text.is_some() && args.prompt.is_some() {
        return Err(CliError::Usage("the first message is given twice: by -p, and without a flag".into()));
    }
    let setup = Setup {
        model: &model,
        system: args.system.as_deref(),
        load: args.load.as_deref(),
        session: args.session.as_deref(),
        chat_template: args.chat_template.as_deref(),
        thinking: args.thinking,
        n_predict: args.n_predict,
        stop: &args.stop,
        engine: &args.engine,
        sampling: &args.sampling,
        form: &args.form,
        tools: args.tools.wanted(),
    };
    talk(&setup, text.or_else(|| args.prompt.clone()))
}

/// Answers `first`, then what is typed or comes from stdin, to its end.
pub fn talk(args: &Setup, first: Option<String>) -> Result<(), CliError> {
    let form = args.form.form()?;
    let start = Instant::now();
    args.model.fetch()?;
    let loading = Progress::spinner("loading the model");
    let model = args.model.open()?;
    let tokenizer = args.model.tokenizer(&model)?;
    let sampling = args.sampling.options(&model)?;
    let template = match args.chat_template {
        None => ChatTemplate::for_model(model.gguf().metadata(), Arc::clone(&tokenizer)),
        Some(path) => template_file::read(path, &tokenizer)?,
    };
    let (tools, loading) = match args.tools {
        Some(wanted) => {
            // Progress has one line.
            drop(loading);
            (Some(Tools::start(wanted, &template)?), Progress::spinner("loading the model"))
        }
        None => (None, loading),
    };
    loading.weigh(model.gguf().tensor_bytes());
    let mut generator = Generator::new(&model, &args.engine.options(&model), sampling.clone())?;
    drop(loading);
    generator.keep_prompt_ends(SchedulerOptions::default_cache_ram());

    let mut conversation = match args.load {
        Some(path) => load(path)?,
        None => Conversation::default(),
    };
    let mut kept = None;
    if let Some(path) = args.session {
        let (session, messages) = KeptSession::open(path, &mut generator)?;
        (kept, conversation) = (Some(session), messages);
    }
    if let Some(system) = args.system {
        conversation.system = Some(system.to_owned());
    }
    let interactive = std::io::stdin().is_terminal() && std::io::stdout().is_terminal();
    let options = session::Options {
        n_predict: usize::try_from(args.n_predict).ok(),
        stop: args.stop.to_vec(),
        thinking: args.thinking,
        form,
        tools: tools.as_ref().map(Tools::functions).unwrap_or_default(),
        interactive,
        load: start.elapsed(),
    };
    let session = Session::new(generator, tokenizer, template, conversation, sampling, options);
    let mut chat = Chat {
        session,
        kept,
        tools,
        input: Input::new(interactive)?,
        name: args.model.name(),
        n_vocab: model.spec().n_vocab,
        interactive,
    };
    if interactive {
        note(&format!("{}; /help lists the commands, Ctrl-D leaves", args.model.name()));
    }
    let outcome = chat.converse(first);
    outcome.and(chat.keep_all())
}

/// A conversation and where its lines come from.
struct Chat {
    session: Session,
    /// The file that keeps it.
    kept: Option<KeptSession>,
    tools: Option<Tools>,
    input: Input,
    /// The model's name.
    name: String,
    n_vocab: usize,
    interactive: bool,
}

impl Chat {
    /// Answers `first`, and then what is read.
    fn converse(&mut self, first: Option<String>) -> Result<(), CliError> {
        if let Some(text) = first {
            if self.interactive {
                note(&format!("> {}", safe_lines(&text)));
            }
            self.carry_out_or_tell(Command::Say(text))?;
        }
        while self.turn()? {}
        Ok(())
    }

    /// Writes the session's file as a whole.
    fn keep_all(&mut self) -> Result<(), CliError> {
        self.kept.as_mut().map_or(Ok(()), |kept| kept.keep_all(&mut self.session))
    }

    /// Reads a message or a command and does it. False: the user leaves.
    fn turn(&mut self) -> Result<bool, CliError> {
        let Some(text) = waker::read_awake(&mut self.input, &mut self.session)? else { return Ok(false) };
        match commands::parse(&text) {
            Ok(Command::Exit) => return Ok(false),
            Ok(command) => self.carry_out_or_tell(command)?,
            Err(problem) if self.interactive => note(&problem),
            Err(problem) => return Err(CliError::Usage(problem)),
        }
        Ok(true)
    }

    /// Carries out a command. On a terminal the user reads what goes wrong, and the conversation goes on.
    fn carry_out_or_tell(&mut self, command: Command) -> Result<(), CliError> {
        let _asked = interrupt::ask();
        let outcome = self.carry_out(command);
        let kept = self.kept.as_mut().map_or(Ok(()), |kept| kept.keep_messages(&self.session));
        if let Err(error) = outcome.and(kept) {
            match error {
                CliError::Interrupted => note("note: not answered"),
                // In a script, what cannot be said or done ends it.
                error if !self.interactive || matches!(error, CliError::Write { .. }) => return Err(error),
                error => note(&format!("error: {error}")),
            }
        }
        if interrupt::requested() && !self.interactive {
            self.keep_all()?;
            interrupt::end();
        }
        Ok(())
    }

    fn carry_out(&mut self, command: Command) -> Result<(), CliError> {
        let conversation = &mut self.session.conversation;
        match command {
            Command::Nothing | Command::Exit => {}
            Command::Say(text) => return self.say(text),
            Command::Regenerate => return self.regenerate(),
            Command::System(None) => {
                note(conversation.system.as_deref().unwrap_or("there is no system message; /system TEXT sets one"));
            }
            Command::System(Some(text)) => conversation.system = Some(text).filter(|text| text != "none"),
            Command::Reset => {
                conversation.messages.clear();
                note("a new conversation");
            }
            Command::Undo => match conversation.undo() {
                Some(text) => note(&format!("took back: {text}")),
                None => note("there is nothing to take back"),
            },
            Command::Save(path) => {
                let json = serde_json::to_string_pretty(&conversation.with_system())
                    .map_err(|e| CliError::General(format!("cannot write JSON: {e}")))?;
                // On an error the file that was saved before stays as it was, and the conversation goes on.
                save(&path, &(json + "\n")).map_err(|error| CliError::General(error.to_string()))?;
                note(&format!("wrote {}", path.display()));
            }
            Command::Load(path) => {
                *conversation = load(&path)?;
                note(&format!("read {} messages from {}", conversation.with_system().len(), path.display()));
            }
            Command::Set(None) => note(&sampling_options::text(self.session.sampling())),
            Command::Set(Some((name, value))) => {
                let mut sampling = self.session.sampling().clone();
                sampling_options::set(&mut sampling, &name, &value, self.n_vocab).map_err(CliError::Usage)?;
                self.session.set_sampling(sampling)?;
            }
            Command::Think(thinking) => {
                if !self.session.set_thinking(thinking) {
                    note("note: the model's chat template knows no such setting");
                }
            }
            Command::Show => note(&self.show()),
            Command::Stats => self.session.print_statistics(),
            Command::Help => note(HELP),
        }
        Ok(())
    }

    /// The model, its device, its context and how its answers are chosen.
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
            ("tools", self.tools.as_ref().map_or_else(|| "none".into(), Tools::names)),
            (
                "thoughts",
                self.session.thinking().map_or_else(|| "as its chat template has it".into(), |t| t.to_string()),
            ),
        ];
        let lines: Vec<_> = lines.iter().map(|(name, value)| format!("{name:<13} {}", safe(value.trim()))).collect();
        lines.join("\n") + "\n" + &sampling_options::text(self.session.sampling())
    }

    fn say(&mut self, text: String) -> Result<(), CliError> {
        self.session.conversation.messages.push(Message::user(text));
        self.answer().inspect_err(|_| {
            if !self.has_answer() {
                self.session.conversation.undo();
            }
        })
    }

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

    /// Whether there is something after the last message of the user, be it a call of a tool.
    fn has_answer(&self) -> bool {
        self.session.conversation.messages.last().is_some_and(|message| message.role != Role::User)
    }

    /// Has the model answer the last message, and calls the tools that it asks for before it does.
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

/// Puts `json` into a file.
fn save(path: &Path, json: &str) -> Result<(), CliError> {
    let mut out = OutputFile::create(path)?;
    let failed = |source| CliError::Write { to: path.display().to_string(), source };
    out.write_all(json.as_bytes()).map_err(failed)?;
    out.commit()
}

/// The conversation in a file.
fn load(path: &Path) -> Result<Conversation, CliError> {
    let messages: Vec<Message> = serde_json::from_str(&read(path)?)
        .map_err(|e| CliError::Usage(format!("{} has no list of messages in JSON: {e}", path.display())))?;
    Ok(Conversation::from_messages(messages))
}

fn read(path: &Path) -> Result<String, CliError> {
    let cannot = |e: std::io::Error| CliError::Usage(format!("cannot read {}: {e}", path.display()));
    std::io::read_to_string(File::open(path).map_err(cannot)?).map_err(cannot)
}

/// Tells the user something; where stderr is closed nobody hears it.
fn note(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}
