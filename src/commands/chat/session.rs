//! A model that answers.

use std::io::{IsTerminal, Write};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use metal_attention::sampling::SamplerOptions;
use metal_attention::tokenizer::Tokenizer;
use metal_attention::{ForwardPass, GenerateOptions, Generator, Model, SessionError, StopReason};
use metal_attention_chat::{
    AnswerEvent, ChatTemplate, ContextBudget, Continuation, Message, RenderRequest, Thinking, Tool, ToolCall,
    fit_context,
};
use metal_attention_grammar::{AnswerForm, GrammarCompiler};

use super::conversation::Conversation;
use super::note;
use crate::cli_error::CliError;
use crate::form_args::constrain;
use crate::interrupt;
use crate::progress::Progress;
use crate::statistics::Statistics;
use crate::terminal::{self, Screen};
use crate::units;

/// How a session answers.
pub struct Options {
    /// Most tokens of an answer.
    pub n_predict: Option<usize>,
    /// Strings that end an answer.
    pub stop: Vec<String>,
    /// Whether the model thinks; `None`: as its template has it.
    pub thinking: Option<Thinking>,
    /// What each answer must look like.
    pub form: Option<AnswerForm>,
    /// The tools that the model may call.
    pub tools: Vec<Tool>,
    /// A person watches: thoughts are shown, too.
    pub interactive: bool,
    /// How long the model took to load.
    pub load: Duration,
}

/// A model in the middle of a conversation.
pub struct Session {
    /// What was said.
    pub conversation: Conversation,
    generator: Generator,
    tokenizer: Arc<Tokenizer>,
    template: ChatTemplate,
    sampling: SamplerOptions,
    options: Options,
    grammars: GrammarCompiler,
}

impl Session {
    /// A session that goes on with `conversation`.
    pub fn new(
        generator: Generator,
        tokenizer: Arc<Tokenizer>,
        template: ChatTemplate,
        conversation: Conversation,
        sampling: SamplerOptions,
        mut options: Options,
    ) -> Self {
        options.stop.extend(template.stop_strings().iter().map(|&s| s.to_owned()));
        let grammars = GrammarCompiler::new(&tokenizer);
        Self { conversation, generator, tokenizer, template, sampling, options, grammars }
    }

    /// The model.
    pub fn model(&self) -> &Model {
        self.generator.model()
    }

    /// The model on its device.
    pub fn forward_pass(&self) -> &dyn ForwardPass {
        self.generator.forward_pass()
    }

    /// Writes a session file with `note` and what the KV cache has of the conversation.
    pub fn save(&mut self, path: &Path, note: &[u8]) -> Result<(), SessionError> {
        self.generator.save(path, note)
    }

    /// How tokens are chosen.
    pub fn sampling(&self) -> &SamplerOptions {
        &self.sampling
    }

    /// Chooses tokens in another way from the next answer on.
    pub fn set_sampling(&mut self, sampling: SamplerOptions) -> Result<(), CliError> {
        self.generator.set_sampling(sampling.clone())?;
        self.sampling = sampling;
        Ok(())
    }

    /// Whether the model thinks; `None`: as its template has it.
    pub fn thinking(&self) -> Option<Thinking> {
        self.options.thinking
    }

    /// Has the model think so from the next answer on. False: it is not known how this model is told.
    pub fn set_thinking(&mut self, thinking: Thinking) -> bool {
        self.options.thinking = Some(thinking);
        let is_off = thinking == Thinking::OFF;
        self.template.set_thinking(thinking, &mut serde_json::Map::new()) || (is_off && self.template.thinks())
    }

    /// Takes the next seed, or any other one: the same seed would give the same answer again.
    pub fn next_seed(&mut self) -> Result<(), CliError> {
        let seed = self.sampling.seed.map(|seed| seed.wrapping_add(1));
        self.set_sampling(SamplerOptions { seed, ..self.sampling.clone() })
    }

    /// Answers the last message: writes the answer to stdout as it comes, and adds it to the conversation. The oldest turns are
    /// dropped where the context has no room for them and the answer. Returns the tools that the answer calls.
    pub fn answer(&mut self) -> Result<Vec<ToolCall>, CliError> {
        let n_ctx = self.generator.forward_pass().n_ctx();
        let (begun, ids, shortened) = self.fitted(n_ctx)?;
        if let Some(form) = &self.options.form {
            let rendered = (&self.template, begun.prompt.text.as_str());
            constrain(&mut self.generator, &self.grammars, form, Some(rendered))?;
        }
        let progress = self.read(&ids)?;
        let (mut message, stop_reason) = self.write_answer(&begun, progress)?;
        if stop_reason == Some(StopReason::ContextFull) {
            note(&format!("note: the answer ends here because the context of {n_ctx} tokens is full"));
        }
        if self.options.interactive {
            self.print_speed();
        }
        let is_whole = matches!(stop_reason, Some(StopReason::EndOfGeneration | StopReason::StopString));
        if !is_whole && !message.tool_calls.is_empty() {
            note("note: the answer ends within a call of a tool, which is dropped");
            message.tool_calls.clear();
            message.content.get_or_insert_default();
        }
        if stop_reason.is_none() && message.text().is_empty() {
            return Err(CliError::Interrupted);
        }
        let calls = message.tool_calls.clone();
        // Not before there is an answer: without one nothing is dropped.
        if let Some(shortened) = shortened {
            self.conversation = shortened;
        }
        self.conversation.messages.push(message);
        Ok(calls)
    }

    /// The prompt, and its tokens, of the conversation without the oldest turns that the context has no room for; and what is left
    /// of the conversation, where there are any.
    fn fitted(&self, n_ctx: usize) -> Result<(Continuation, Vec<u32>, Option<Conversation>), CliError> {
        let messages = self.conversation.with_system();
        let render = |messages: &[Message]| {
            let request = RenderRequest { messages, tools: &self.options.tools, ..Default::default() };
            let begun = self.template.render_thinking(&request, self.options.thinking);
            let begun = begun.map_err(|e| CliError::Usage(e.to_string()))?;
            let ids = begun.prompt.encode(&self.tokenizer);
            let n_tokens = ids.len();
            Ok::<_, CliError>(((begun, ids), n_tokens))
        };
        let room = ContextBudget::new(n_ctx, self.options.n_predict);
        let fitted = fit_context(&messages, room, &self.tokenizer, render)?;
        if fitted.n_tokens >= n_ctx {
            return Err(CliError::Usage(format!(
                "the context is full: the last message takes {} tokens of {n_ctx}, and there is nothing else to drop; -c makes \
                 the context larger",
                fitted.n_tokens
            )));
        }
        let shortened = fitted.dropped.map(|dropped| {
            let (turns, tokens) = (units::count(dropped.n_turns, "turn"), units::count(dropped.n_tokens, "token"));
            note(&format!("the context of {n_ctx} tokens is full: dropped the oldest {turns}, {tokens}"));
            Conversation::from_messages(fitted.messages.into_owned())
        });
        let (begun, ids) = fitted.prompt;
        Ok((begun, ids, shortened))
    }

    /// Evaluates what is new of the conversation, but for the part that the first token of the answer takes along; the
    /// progress is that of both.
    fn read(&mut self, ids: &[u32]) -> Result<Progress, CliError> {
        let n_layer = self.generator.model().spec().n_layer();
        let progress = Progress::steps("reading the conversation", ids.len() as u64).watched(n_layer);
        let mut begun = false;
        self.generator.prompt(ids, |done, _total| {
            // What earlier turns have left in the KV cache comes first, and takes no time.
            if std::mem::replace(&mut begun, true) {
                progress.set(done as u64);
            } else {
                progress.begin_at(done as u64);
            }
            ControlFlow::Continue(())
        })?;
        Ok(progress)
    }

    /// Generates the answer. Returns it, and why it ended; `None`: Ctrl-C.
    fn write_answer(
        &mut self,
        begun: &Continuation,
        progress: Progress,
    ) -> Result<(Message, Option<StopReason>), CliError> {
        let mut parser = self.template.continued_parser(begun, &self.options.tools);
        let mut output = AnswerOutput::new(self.options.interactive);
        let mut generation = self.generator.generate(GenerateOptions {
            n_predict: self.options.n_predict,
            stop: self.options.stop.clone(),
            ..Default::default()
        });
        let mut progress = Some(progress);
        while !interrupt::requested()
            && let Some(token) = generation.next()
        {
            // The line on stderr goes away before text appears.
            progress = None;
            let token = match token {
                Err(error) if error.is_cancelled() => break,
                token => token?,
            };
            output.write(parser.push_token(&self.tokenizer, token.id, &token.text))?;
        }
        drop(progress);
        let stop_reason = generation.stop_reason();
        output.write(parser.push(&generation.finish()))?;
        output.write(parser.finish())?;
        Ok((output.end()?, stop_reason))
    }

    /// Brings the device up to its speed, until `enough`.
    pub fn wake(&mut self, enough: impl FnMut() -> bool) {
        self.generator.wake(enough);
    }

    /// Tokens of the last answer and their rate, in faint letters.
    fn print_speed(&self) {
        let timings = self.generator.timings();
        if let Some(rate) = timings.decode_tokens_per_second() {
            note(&terminal::faint(&format!("{}, {rate:.1} tok/s", units::count(timings.generated, "token"))));
        }
    }

    /// What the last answer cost, and how full the context is.
    pub fn print_statistics(&self) {
        let (used, n_ctx) = (self.generator.ids().len(), self.generator.forward_pass().n_ctx());
        note(&format!("{:<19}  {used} of {n_ctx} tokens", "context"));
        Statistics { load: self.options.load, timings: self.generator.timings() }.print();
    }
}

/// Writes an answer as it comes, and keeps it.
pub struct AnswerOutput {
    /// Thoughts are written, too.
    show_thoughts: bool,
    /// Where stdout is a terminal.
    screen: Option<Screen>,
    thinking: bool,
    events: Vec<AnswerEvent>,
    begun: bool,
}

impl AnswerOutput {
    /// An answer that begins a line.
    pub fn new(show_thoughts: bool) -> Self {
        let screen = std::io::stdout().is_terminal().then(Screen::stdout);
        Self { show_thoughts, screen, thinking: false, events: Vec::new(), begun: false }
    }

    /// More of the answer.
    pub fn write(&mut self, events: Vec<AnswerEvent>) -> Result<(), CliError> {
        for event in events {
            let event = match event {
                // White space before an answer is the template's business.
                AnswerEvent::Content(text) if !self.begun => AnswerEvent::Content(text.trim_start().to_owned()),
                event => event,
            };
            match &event {
                AnswerEvent::Reasoning(text) if self.show_thoughts => {
                    self.thinking = true;
                    match &mut self.screen {
                        Some(screen) => write(&screen.thought(text))?,
                        None => write(text)?,
                    }
                }
                AnswerEvent::Content(text) if !text.is_empty() => {
                    self.begun = true;
                    self.end_thoughts()?;
                    match &mut self.screen {
                        Some(screen) => write(&screen.text(text))?,
                        None => write(text)?,
                    }
                }
                _ => {}
            }
            self.events.push(event);
        }
        Ok(())
    }

    fn end_thoughts(&mut self) -> Result<(), CliError> {
        if std::mem::take(&mut self.thinking) {
            self.end_style()?;
            write("\n\n")?;
            // The answer begins a line.
            self.screen = self.screen.as_ref().map(|_| Screen::stdout());
        }
        Ok(())
    }

    fn end_style(&mut self) -> Result<(), CliError> {
        let end = self.screen.as_mut().map(Screen::end).unwrap_or_default();
        write(&end)
    }

    /// Ends the line, unless there are calls of tools and no text. Returns the answer.
    pub fn end(mut self) -> Result<Message, CliError> {
        self.end_thoughts()?;
        self.end_style()?;
        let message = Message::from_events(self.events);
        if self.begun || message.tool_calls.is_empty() {
            write("\n")?;
        }
        Ok(message)
    }
}

/// Writes and flushes, for every token to be seen at once.
fn write(text: &str) -> Result<(), CliError> {
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).map_err(CliError::stdout)
}
