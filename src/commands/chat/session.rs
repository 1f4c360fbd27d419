//! The model of a conversation: renders the messages as a prompt, generates the answer, and prints it.

use std::io::{IsTerminal, Write};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use metal_attention::picture_files::Picture;
use metal_attention::sampling::SamplerOptions;
use metal_attention::tokenizer::Tokenizer;
use metal_attention::{ForwardPass, GenerateOptions, Generator, Model, PromptSpan, SessionError, StopReason};
use metal_attention_chat::{
    AnswerEvent, ChatTemplate, ContextBudget, Message, ReasoningSetting, RenderRequest, RenderedPrompt, Tool, ToolCall,
    fit_context,
};
use metal_attention_grammar::{GrammarCompiler, ResponseFormat};

use super::history::ChatHistory;
use super::note;
use crate::cli_error::CliError;
use crate::form_args::constrain;
use crate::interrupt;
use crate::picture_args::Pictures;
use crate::progress::ProgressLine;
use crate::statistics::RunStatistics;
use crate::terminal::{self, Screen};
use crate::units;

/// The settings of a session.
pub struct SessionOptions {
    /// The largest number of tokens of an answer. `None`: no limit.
    pub n_predict: Option<usize>,
    /// Strings that end an answer.
    pub stop: Vec<String>,
    /// Whether the model thinks. `None`: the default of its template.
    pub thinking: Option<ReasoningSetting>,
    /// The form of each answer.
    pub form: Option<ResponseFormat>,
    /// The tools that the model may call.
    pub tools: Vec<Tool>,
    /// Whether stdout is a terminal; then reasoning is shown, too.
    pub interactive: bool,
    /// The time that loading the model took.
    pub load: Duration,
}

/// The inputs of a prompt: an id for each, and the spans of pictures.
type Inputs = (Vec<u32>, Vec<PromptSpan>);

/// A model and the messages of a conversation with it.
pub struct ChatSession {
    /// The messages.
    pub conversation: ChatHistory,
    /// The model on its device, with the KV cache of the conversation.
    generator: Generator,
    /// The model's tokenizer.
    tokenizer: Arc<Tokenizer>,
    /// The chat template that renders messages.
    template: ChatTemplate,
    /// The options of the sampler.
    sampling: SamplerOptions,
    /// The other settings.
    options: SessionOptions,
    /// Compiles forms for the vocabulary.
    grammars: GrammarCompiler,
    /// The pictures of the conversation. `None`: there were none so far.
    pictures: Option<Pictures>,
}

impl ChatSession {
    /// A session that continues `conversation`. The template's stop strings are added to those of `options`.
    pub fn new(
        generator: Generator,
        tokenizer: Arc<Tokenizer>,
        template: ChatTemplate,
        conversation: ChatHistory,
        sampling: SamplerOptions,
        mut options: SessionOptions,
    ) -> Self {
        options.stop.extend(template.stop_strings().iter().map(|&s| s.to_owned()));
        let grammars = GrammarCompiler::new(&tokenizer);
        Self { conversation, generator, tokenizer, template, sampling, options, grammars, pictures: None }
    }

    /// Encodes a picture for the conversation. Returns its marker, which stands for it in a message. `open` sets up the encoder,
    /// for the first picture.
    pub fn add_picture(
        &mut self,
        picture: &Picture,
        open: impl FnOnce(&Model) -> Result<Pictures, CliError>,
    ) -> Result<String, CliError> {
        let pictures = match &mut self.pictures {
            Some(pictures) => pictures,
            none => none.insert(open(self.generator.model())?),
        };
        pictures.add(picture, &self.tokenizer)
    }

    /// The model.
    pub fn model(&self) -> &Model {
        self.generator.model()
    }

    /// The forward pass that runs the model.
    pub fn forward_pass(&self) -> &dyn ForwardPass {
        self.generator.forward_pass()
    }

    /// Writes a session file with `note` and the KV cache of the conversation.
    pub fn save(&mut self, path: &Path, note: &[u8]) -> Result<(), SessionError> {
        self.generator.save(path, note)
    }

    /// The options of the sampler.
    pub fn sampling(&self) -> &SamplerOptions {
        &self.sampling
    }

    /// Sets the options of the sampler from the next answer on.
    pub fn set_sampling(&mut self, sampling: SamplerOptions) -> Result<(), CliError> {
        self.generator.set_sampling(sampling.clone())?;
        self.sampling = sampling;
        Ok(())
    }

    /// Whether the model thinks. `None`: the default of its template.
    pub fn thinking(&self) -> Option<ReasoningSetting> {
        self.options.thinking
    }

    /// Sets whether the model thinks from the next answer on. Returns false if its template has no such setting.
    pub fn set_thinking(&mut self, thinking: ReasoningSetting) -> bool {
        self.options.thinking = Some(thinking);
        let is_off = thinking == ReasoningSetting::OFF;
        self.template.set_reasoning(thinking, &mut serde_json::Map::new()) || (is_off && self.template.can_reason())
    }

    /// Changes the seed, because the same seed would give the same answer again: a given seed by 1, a random one anew.
    pub fn next_seed(&mut self) -> Result<(), CliError> {
        let seed = self.sampling.seed.map(|seed| seed.wrapping_add(1));
        self.set_sampling(SamplerOptions { seed, ..self.sampling.clone() })
    }

    /// Answers the last message: writes the answer to stdout while it is generated, and adds it to the conversation. Drops the
    /// oldest turns if they do not fit into the context with the answer. Returns the tool calls of the answer. After an error the
    /// conversation is unchanged.
    pub fn answer(&mut self) -> Result<Vec<ToolCall>, CliError> {
        let n_ctx = self.generator.forward_pass().n_ctx();
        let (rendered, inputs, shortened) = self.fit_prompt(n_ctx)?;
        if let Some(form) = &self.options.form {
            let template_and_prompt = (&self.template, rendered.prompt.text.as_str());
            constrain(&mut self.generator, &self.grammars, form, Some(template_and_prompt))?;
        }
        let progress = self.prefill(&inputs)?;
        let (mut message, stop_reason) = self.write_answer(&rendered, progress)?;
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
        // Turns are dropped only once there is an answer.
        if let Some(shortened) = shortened {
            self.conversation = shortened;
        }
        self.conversation.messages.push(message);
        Ok(calls)
    }

    /// Renders the conversation, without the oldest turns if they do not fit into `n_ctx`. Returns the prompt, its inputs, and
    /// the shortened conversation (`None`: nothing was dropped).
    fn fit_prompt(&self, n_ctx: usize) -> Result<(RenderedPrompt, Inputs, Option<ChatHistory>), CliError> {
        let messages = self.conversation.with_system();
        let render = |messages: &[Message]| {
            let request = RenderRequest { messages, tools: &self.options.tools, ..Default::default() };
            let rendered = self.template.render_with_reasoning(&request, self.options.thinking);
            let rendered = rendered.map_err(|e| CliError::Usage(e.to_string()))?;
            let inputs = match &self.pictures {
                None => (rendered.prompt.encode(&self.tokenizer), Vec::new()),
                Some(pictures) => pictures.prompt(&rendered.prompt, &self.tokenizer),
            };
            let n_tokens = inputs.0.len();
            Ok::<_, CliError>(((rendered, inputs), n_tokens))
        };
        let room = ContextBudget::new(n_ctx, self.options.n_predict);
        let rows = self.pictures.as_ref().map(Pictures::n_rows).unwrap_or_default();
        let fitted = fit_context(&messages, room, &self.tokenizer, &rows, render)?;
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
            ChatHistory::from_messages(fitted.messages.into_owned())
        });
        let (rendered, inputs) = fitted.prompt;
        Ok((rendered, inputs, shortened))
    }

    /// Prefills the part of the prompt that the KV cache does not hold, except for the last tokens, which are evaluated with the first
    /// token of the answer. Returns the line of progress, which shows both.
    fn prefill(&mut self, (ids, spans): &Inputs) -> Result<ProgressLine, CliError> {
        let n_layer = self.generator.model().spec().n_layer();
        let progress = ProgressLine::steps("reading the conversation", ids.len() as u64).watched(n_layer);
        let mut begun = false;
        self.generator.prompt_with_spans(ids, spans, |done, _total| {
            // The first call reports the tokens that the KV cache holds from earlier turns; they took no time.
            if std::mem::replace(&mut begun, true) {
                progress.set(done as u64);
            } else {
                progress.begin_at(done as u64);
            }
            ControlFlow::Continue(())
        })?;
        Ok(progress)
    }

    /// Generates the answer and prints it. Returns it and why it ended; `None`: Ctrl-C.
    fn write_answer(
        &mut self,
        rendered: &RenderedPrompt,
        progress: ProgressLine,
    ) -> Result<(Message, Option<StopReason>), CliError> {
        let mut parser = self.template.continued_parser(rendered, &self.options.tools);
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
            // The progress line is removed before text appears.
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

    /// Keeps the device busy, so that its clocks rise, until `enough` returns true.
    pub fn wake(&mut self, enough: impl FnMut() -> bool) {
        self.generator.wake(enough);
    }

    /// Prints the number of tokens of the last answer and their rate, in faint letters.
    fn print_speed(&self) {
        let timings = self.generator.timings();
        if let Some(rate) = timings.decode_tokens_per_second() {
            note(&terminal::faint(&format!("{}, {rate:.1} tok/s", units::count(timings.generated, "token"))));
        }
    }

    /// Prints how full the context is, and the statistics of the last answer.
    pub fn print_statistics(&self) {
        let (used, n_ctx) = (self.generator.ids().len(), self.generator.forward_pass().n_ctx());
        note(&format!("{:<19}  {used} of {n_ctx} tokens", "context"));
        RunStatistics { load: self.options.load, timings: self.generator.timings() }.print();
    }
}

/// Prints an answer while it is generated, and collects it as a message.
pub struct AnswerOutput {
    /// Whether reasoning is printed, too.
    show_reasoning: bool,
    /// Formats the text. `None`: stdout is no terminal.
    screen: Option<Screen>,
    /// Whether the last text printed was a thought.
    thinking: bool,
    /// The parts of the answer so far.
    events: Vec<AnswerEvent>,
    /// Whether text of the answer was printed; reasoning does not count.
    begun: bool,
}

impl AnswerOutput {
    /// An empty answer. The cursor is at the beginning of a line.
    pub fn new(show_reasoning: bool) -> Self {
        let screen = std::io::stdout().is_terminal().then(Screen::stdout);
        Self { show_reasoning, screen, thinking: false, events: Vec::new(), begun: false }
    }

    /// Prints more of the answer.
    pub fn write(&mut self, events: Vec<AnswerEvent>) -> Result<(), CliError> {
        for event in events {
            let event = match event {
                // Templates differ in the white space before an answer.
                AnswerEvent::Content(text) if !self.begun => AnswerEvent::Content(text.trim_start().to_owned()),
                event => event,
            };
            match &event {
                AnswerEvent::Reasoning(text) if self.show_reasoning => {
                    self.thinking = true;
                    match &mut self.screen {
                        Some(screen) => write(&screen.thought(text))?,
                        None => write(text)?,
                    }
                }
                AnswerEvent::Content(text) if !text.is_empty() => {
                    self.begun = true;
                    self.end_reasoning()?;
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

    /// Prints an empty line after reasoning.
    fn end_reasoning(&mut self) -> Result<(), CliError> {
        if std::mem::take(&mut self.thinking) {
            self.end_style()?;
            write("\n\n")?;
            // The answer begins at column 0.
            self.screen = self.screen.as_ref().map(|_| Screen::stdout());
        }
        Ok(())
    }

    /// Resets the terminal's style.
    fn end_style(&mut self) -> Result<(), CliError> {
        let end = self.screen.as_mut().map(Screen::end).unwrap_or_default();
        write(&end)
    }

    /// Ends the line, unless the answer is only tool calls. Returns the answer.
    pub fn end(mut self) -> Result<Message, CliError> {
        self.end_reasoning()?;
        self.end_style()?;
        let message = Message::from_events(self.events);
        if self.begun || message.tool_calls.is_empty() {
            write("\n")?;
        }
        Ok(message)
    }
}

/// Writes to stdout and flushes, so that each token is seen at once.
fn write(text: &str) -> Result<(), CliError> {
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).map_err(CliError::stdout)
}
