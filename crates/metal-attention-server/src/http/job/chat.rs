//! Chat jobs: from a conversation to submitted sequences.
//!
//! [`ChatJob::submit`] renders the conversation with the model's chat template, tokenises the prompt, compiles the
//! grammar of the answer, and submits `n` sequences with the same prompt to the scheduler. It returns a
//! [`SubmittedChat`]: per choice the receiver of the scheduler's events and the parser that splits them into text,
//! reasoning and tool calls.
//!
//! Handlers run `submit` on a blocking thread (the function `prepare` of `http/mod.rs`), since templates, tokenisation
//! and grammars are CPU-bound. If the client disconnects meanwhile, submission completes and its result is dropped,
//! which cancels the sequences.
//!
//! Each choice has two objects that follow its answer: a [`Guide`], which combines the grammar with the limits on
//! reasoning and calls, and which the scheduler asks, as a [`Constraint`], for the mask of allowed tokens before each
//! token; and a [`ChoiceParser`], which splits its events.
//!
//! # Reasoning and grammar
//!
//! An answer consists of reasoning (if the model reasons), followed by text or tool calls. A grammar applies to what
//! follows the reasoning. Where the grammar begins to apply depends on the end of the prompt:
//!
//! ```text
//! PromptEnd      within reasoning (1)   may begin reasoning?   the grammar applies
//! any            yes                    it has begun           after the reasoning
//! Answer         no                     yes (2)                after the reasoning, if any
//! WithinMessage  no                     no                     response format: from the start of the message (3);
//!                                                              call: from the first generated token
//! AfterMessage   no                     no (4)                 from the first generated token
//! ```
//!
//! 1. Whether the prompt ends within reasoning: the template starts it, or the last message, which the answer
//!    continues, has reasoning and no text.
//! 2. Except after reasoning that the template wrote and ended (`<think></think>`), and with a response format that
//!    covers the whole answer (llama.cpp's field `grammar`).
//! 3. The text of the message is in the prompt. The grammar is advanced over it.
//! 4. The model writes the markup that starts the answer, and reasoning is recognised only after markup of the
//!    template. A grammar has no place for this markup, so with one the model writes the text or calls without it.
//!
//! In gpt-oss's format reasoning is a message of its own, with which a grammar may begin. Its grammars do not allow the
//! rest of a reasoning message that the prompt has begun.

use std::borrow::Cow;
use std::sync::Arc;

use metal_attention::scheduler::{Client, Events};
use metal_attention::tokenizer::Tokenizer;
use metal_attention::{Constraint, PromptSpan};
use metal_attention_chat::{
    ContextBudget, DroppedTurns, FittedPrompt, Message, RenderRequest, RenderedPrompt, Role, Tool, ToolCallParser,
    fit_context, without_picture_markers,
};
use metal_attention_grammar::{Grammar, Guide, GuideOptions, encode_continuation, prompt_with_pictures};

use super::choice_parser::{ChoiceParser, ChoiceParsers};
use super::generation::GenerationSettings;
use super::reasoning::{ReasoningRequest, ReasoningSettings};
use super::response_format::{self, RequestedFormat};
use super::tool_choice::AllowedCalls;
use crate::http::models::ModelLease;
use crate::http::notes::Notes;
use crate::http::peer::Peer;
use crate::http::pictures::{self, Conversation, EncodedPictures};
use crate::http::{ApiError, App, LOG_TARGET};

/// A request for the next message of a conversation.
#[derive(Debug, Clone)]
pub struct ChatJob {
    /// The conversation.
    pub conversation: Conversation,
    /// The tools that the answer may call, whether it must, and whether it may have several calls.
    pub allowed_calls: AllowedCalls,
    /// The required response format (JSON schema, grammar, ...), with the field that requires it; `None`: any text.
    pub response_format: Option<RequestedFormat>,
    /// The request's settings of reasoning, and variables for the template.
    pub reasoning: ReasoningRequest,
    /// Where the prompt ends.
    pub prompt_end: PromptEnd,
    /// Sampling, limits, number of choices.
    pub generation: GenerationSettings,
    /// Whether the oldest part of a conversation that exceeds the context is dropped when the prompt is made; otherwise
    /// the conversation is refused. `None`: as the model's defaults or the server's option `--context-shift` set it.
    /// (llama.cpp's option of that name drops tokens from the KV cache during generation.)
    pub drop_oldest: Option<bool>,
    /// The name of the request's field that has the conversation, which errors name: `messages`, `prompt` or `input`.
    pub messages_field: &'static str,
    /// Notes that were made while the request was read, for response headers.
    pub notes: Notes,
}

/// Where a prompt ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PromptEnd {
    /// The markup that starts an answer of the assistant (generation prompt).
    Answer,
    /// After the last message, without markup for an answer: the model writes the markup. Only for the field
    /// `add_generation_prompt: false` of the OpenAI chat interface.
    AfterMessage,
    /// Within the last message, which the answer continues. Precondition: it is the assistant's, without tool calls.
    WithinMessage,
}

impl PromptEnd {
    /// The usual end for `messages`: within the last message if that is a text of the assistant, otherwise the start of
    /// an answer.
    pub fn after(messages: &[Message]) -> Self {
        let is_text = |last: &Message| last.role == Role::Assistant && last.tool_calls.is_empty();
        if messages.last().is_some_and(is_text) { Self::WithinMessage } else { Self::Answer }
    }
}

/// The submitted choices of a [`ChatJob`]. Dropping it before they end cancels them.
pub struct SubmittedChat {
    /// By choice: the receiver of the scheduler's events. Dropping one cancels its sequence.
    pub events: Vec<Events>,
    /// By choice: the parser of its events.
    pub parsers: ChoiceParsers,
    /// The token ids of the prompt, as submitted.
    pub prompt_ids: Arc<[u32]>,
    /// Whether the prompt has pictures: the ids of their rows are placeholders.
    pub has_pictures: bool,
    /// Notes for response headers.
    pub notes: Notes,
}

/// A rendered and tokenised prompt.
struct PreparedPrompt {
    /// The prompt that was rendered from [`ChatJob::conversation`]. With [`PromptEnd::WithinMessage`] the answer starts
    /// within it, at `answer_start`.
    rendered: RenderedPrompt,
    /// The token ids of the whole prompt: what is left of `earlier_ids` (see
    /// [`prepare_prompt`](ChatJob::prepare_prompt)), then `rendered`.
    ids: Arc<[u32]>,
    /// The rows of its pictures.
    spans: Arc<[PromptSpan]>,
    /// The settings of reasoning for the model's template.
    reasoning_settings: ReasoningSettings,
}

impl ChatJob {
    /// Whether the oldest part of a conversation that exceeds the context is dropped: what the request says, else the
    /// model's defaults, else the server's options.
    pub fn drops_oldest(&self, app: &App, model: &ModelLease) -> bool {
        self.drop_oldest.or(model.defaults().context_shift).unwrap_or(app.options.context_shift)
    }

    /// Returns the token ids of the prompt for the whole [`conversation`](Self::conversation). [`submit`](Self::submit) may submit
    /// a shorter prompt, if the job [`drops_oldest`](Self::drops_oldest), [`submit_after`](Self::submit_after) a longer
    /// one, which includes earlier ids. CPU-bound: call it on a blocking thread.
    ///
    /// # Errors
    ///
    /// A tool that the model's format cannot express, a template that fails, or a text that is too long to tokenise.
    pub fn whole_prompt_ids(&self, model: &ModelLease, pictures: &EncodedPictures) -> Result<Arc<[u32]>, ApiError> {
        Ok(self.prepare_whole_prompt(model, pictures)?.ids)
    }

    /// Returns the text of that prompt, with `place` for each picture; see [`whole_prompt_ids`](Self::whole_prompt_ids).
    pub fn whole_prompt_text(&self, model: &ModelLease, place: &str) -> Result<String, ApiError> {
        let prompt = self.prepare_whole_prompt(model, &Vec::new())?.rendered.prompt;
        Ok(without_picture_markers(&prompt.text, place))
    }

    /// Encodes the pictures of the conversation. With a client, once its request can be admitted: nothing is fetched before.
    ///
    /// # Errors
    ///
    /// Those of [`pictures::encode`], and a full queue.
    pub async fn encode_pictures(
        &self,
        app: &App,
        model: &ModelLease,
        peer: Peer,
        client: Option<Client>,
    ) -> Result<EncodedPictures, ApiError> {
        let Conversation { pictures, .. } = &self.conversation;
        if let Some(client) = client.filter(|_| !pictures.is_empty()) {
            model.scheduler.check_capacity(client)?;
        }
        pictures::encode(app, model, peer, self.messages_field, pictures).await
    }

    /// Renders and tokenises the prompt for all messages, however long it is.
    fn prepare_whole_prompt(&self, model: &ModelLease, pictures: &EncodedPictures) -> Result<PreparedPrompt, ApiError> {
        let mut notes = Notes::default();
        self.prepare_prompt(model, pictures, /* earlier_ids */ &[], /* drops_oldest */ false, &mut notes)
    }

    /// Renders `messages` and tokenises the prompt: `earlier_ids`, which are the token ids of an earlier conversation
    /// in Ollama's field `context` (empty in other interfaces), then the ids of the rendered prompt.
    ///
    /// If `drops_oldest`, tokens are dropped until the prompt fits its share of the context ([`ContextBudget`]: the
    /// context without the answer's share, which is `max_tokens`, but at most a quarter of the context):
    ///
    /// 1. The oldest turns of `messages` are dropped, until the rendered prompt (not counting `earlier_ids`) fits. The
    ///    last turn is kept.
    /// 2. The first tokens of `earlier_ids` are dropped, until the whole prompt fits, or none of them are left.
    ///
    /// Both drop whole quarters of the context, so that the following prompts of a growing conversation start with the
    /// same tokens and hit the prefix cache. `notes` gets the dropped turns and the truncated field.
    ///
    /// The prompt may exceed the context nevertheless: without `drops_oldest`, or if the messages that are kept are too
    /// long. The scheduler then refuses it, and `notes` reach no response.
    ///
    /// # Errors
    ///
    /// Those of [`whole_prompt_ids`](Self::whole_prompt_ids).
    fn prepare_prompt(
        &self,
        model: &ModelLease,
        pictures: &EncodedPictures,
        earlier_ids: &[u32],
        drops_oldest: bool,
        notes: &mut Notes,
    ) -> Result<PreparedPrompt, ApiError> {
        model.template.tool_format().check_tools(&self.allowed_calls.tools).map_err(|e| {
            let place = if e.is_argument { "parameters" } else { "name" };
            ApiError::field(format!("tools[{}].function.{place}", e.tool), e.to_string())
        })?;
        let reasoning_settings = self.reasoning.settings(&model.template, notes);
        let messages = self.messages_with_system(model);
        // Returns the rendered prompt with its inputs, and their number.
        let render = |messages: &[Message]| {
            let rendered = self.render_prompt(messages, model, &reasoning_settings)?;
            model.check_length(&rendered.prompt.text, self.messages_field)?;
            let inputs = prompt_with_pictures(&rendered.prompt, pictures, &model.tokenizer);
            let n_tokens = inputs.0.len();
            Ok::<_, ApiError>(((rendered, inputs), n_tokens))
        };
        let rows: Vec<usize> = pictures.iter().map(|picture| picture.n_rows()).collect();
        let context_budget = ContextBudget::new(model.n_ctx, self.generation.max_tokens(model));
        let (rendered, (ids, mut spans)) = if drops_oldest {
            let FittedPrompt { prompt: rendered_and_inputs, n_tokens, dropped, .. } =
                fit_context(&messages, context_budget, &model.tokenizer, &rows, render)?;
            // A prompt that the scheduler refuses gets no note. Only messages can make it longer than the context: step
            // 2 drops all of `earlier_ids` if need be.
            if let Some(DroppedTurns { n_turns, n_messages, n_tokens: n_dropped }) = dropped
                && n_tokens <= model.n_ctx
            {
                notes.dropped_turns(n_turns);
                tracing::info!(
                    target: LOG_TARGET,
                    "dropped the oldest {n_turns} turns, {n_messages} messages of {n_dropped} tokens: the prompt has {n_tokens} \
                     tokens now, the context {}",
                    model.n_ctx
                );
            }
            rendered_and_inputs
        } else {
            render(&messages)?.0
        };
        // The whole prompt is BOS, if the model has one, then what is left of `earlier_ids`, then the rendered prompt.
        let (earlier, rendered_ids) = (without_bos(model, earlier_ids), without_bos(model, &ids));
        let bos = &ids[..ids.len() - rendered_ids.len()];
        let n_earlier_dropped =
            if drops_oldest { context_budget.n_to_drop(earlier.len() + ids.len()).min(earlier.len()) } else { 0 };
        if n_earlier_dropped > 0 {
            // The field of the request from which `earlier_ids` come.
            notes.truncated("context");
        }
        let earlier = &earlier[n_earlier_dropped..];
        for span in &mut spans {
            span.inputs = span.inputs.start + earlier.len()..span.inputs.end + earlier.len();
        }
        let ids = [bos, earlier, rendered_ids].concat().into();
        Ok(PreparedPrompt { rendered, ids, spans: spans.into(), reasoning_settings })
    }

    /// Submits all choices. `pictures`: those of the conversation, by their numbers. CPU-bound: call it on a blocking
    /// thread.
    ///
    /// # Errors
    ///
    /// Those of [`submit_after`](Self::submit_after).
    pub fn submit(
        &self,
        app: &App,
        model: &ModelLease,
        client: Client,
        pictures: &EncodedPictures,
    ) -> Result<SubmittedChat, ApiError> {
        self.submit_after(&[], app, model, client, pictures)
    }

    /// Submits all choices, with a prompt that continues the tokens of `earlier_ids` (Ollama's field `context`).
    /// `client`: the client from whose share of slots and batches the sequences take.
    ///
    /// # Errors
    ///
    /// - The request has more choices than slots and queue can hold, or requires a call and a response format.
    /// - The prompt cannot be made ([`whole_prompt_ids`](Self::whole_prompt_ids)), is empty or longer than the context.
    /// - The response format or the tools cannot be compiled to a grammar, or the text that the answer continues does
    ///   not match it.
    /// - A setting of generation is invalid.
    /// - The model generates no text, the queue is full, or the scheduler has shut down or failed.
    ///
    /// If a choice cannot be submitted, those submitted before it are cancelled, as their event receivers are dropped.
    pub fn submit_after(
        &self,
        earlier_ids: &[u32],
        app: &App,
        model: &ModelLease,
        client: Client,
        pictures: &EncodedPictures,
    ) -> Result<SubmittedChat, ApiError> {
        model.scheduler.check_n_sequences(self.generation.n as usize)?;
        self.check_format_and_calls()?;
        let mut notes = self.notes.clone();
        let drops_oldest = self.drops_oldest(app, model);
        let prompt = self.prepare_prompt(model, pictures, earlier_ids, drops_oldest, &mut notes)?;
        let ends_in_reasoning = self.new_tool_call_parser(model, &prompt.rendered).is_reasoning();
        let grammar = self.answer_grammar(model, &prompt.rendered, ends_in_reasoning, &mut notes)?;
        let (events, parsers) = self.submit_choices(app, model, client, &prompt, grammar.as_ref())?;
        let parsers = ChoiceParsers::new(Arc::clone(&model.tokenizer), parsers);
        let has_pictures = !prompt.spans.is_empty();
        Ok(SubmittedChat { events, parsers, prompt_ids: prompt.ids, has_pictures, notes })
    }

    /// Fails if the request requires a call and also a response format: an answer with a response format has no calls.
    fn check_format_and_calls(&self) -> Result<(), ApiError> {
        match &self.response_format {
            Some((field, _)) if self.allowed_calls.required => {
                let message = format!("tool_choice demands a call, which {} rules out", root_field(field));
                Err(ApiError::field("tool_choice", message))
            }
            Some(_) | None => Ok(()),
        }
    }

    /// The tools whose calls are parsed. An answer with a response format has no calls: all of it is text. Templates
    /// get the tools nevertheless ([`render_prompt`](Self::render_prompt)).
    fn callable_tools(&self) -> &[Tool] {
        if self.response_format.is_some() { &[] } else { &self.allowed_calls.tools }
    }

    /// A new parser of the answer. It has parsed the start of the answer that is part of the prompt, if any.
    fn new_tool_call_parser(&self, model: &ModelLease, rendered: &RenderedPrompt) -> ToolCallParser {
        model.template.continued_parser(rendered, self.callable_tools())
    }

    /// Whether the answer may begin with reasoning if the prompt has begun none; see the table at the top of the file.
    fn may_begin_reasoning(&self, model: &ModelLease, prompt: &str) -> bool {
        // Whether the prompt ends with the end marker.
        let has_ended_reasoning = model.template.reasoning().is_some_and(|markers| markers.ended_in(prompt));
        let covers_answer =
            self.response_format.as_ref().is_some_and(|(field, _)| response_format::covers_answer(field));
        self.prompt_end == PromptEnd::Answer && !has_ended_reasoning && !covers_answer
    }

    /// Submits a sequence for each choice, and returns the receivers and the parsers of their events, by choice.
    /// `grammar` is the state of the grammar at the end of the prompt. Fails if a setting of generation is invalid, or
    /// if the scheduler refuses a sequence.
    fn submit_choices(
        &self,
        app: &App,
        model: &ModelLease,
        client: Client,
        prompt: &PreparedPrompt,
        grammar: Option<&Grammar>,
    ) -> Result<(Vec<Events>, Vec<ChoiceParser>), ApiError> {
        let stop = self.generation.stop(model, model.template.stop_strings());
        let has_tools = !self.callable_tools().is_empty();
        let may_begin_reasoning = self.may_begin_reasoning(model, &prompt.rendered.prompt.text);
        // Without tools there are no calls to limit.
        let single_call = has_tools && !self.allowed_calls.parallel;
        let prediction = self.generation.prediction_ids(model)?;
        let (mut events, mut parsers) = (Vec::new(), Vec::new());
        for choice in 0..self.generation.n {
            let mut request = self.generation.request(app, model, client, &prompt.ids, &stop, choice)?;
            request.spans = Arc::clone(&prompt.spans);
            request.prediction = Arc::clone(&prediction);
            // Parsers have a state, so each choice has two: the one of its guide runs in the scheduler's thread, to
            // mask tokens, the one of its `ChoiceParser` in the handler, to write the response.
            let options = GuideOptions {
                template: &model.template,
                parser: self.new_tool_call_parser(model, &prompt.rendered),
                grammar: grammar.cloned(),
                budget: prompt.reasoning_settings.budget,
                single_call,
                has_tools,
                may_begin_reasoning,
            };
            // `None`, a sequence without a constraint, if there is nothing to restrict: no grammar, no budget of
            // reasoning tokens, no single call.
            let guide = Guide::new(&model.tokenizer, options);
            request.constraint = guide.map(|guide| Box::new(guide) as Box<dyn Constraint>);
            events.push(model.scheduler.submit(request)?);
            parsers.push(ChoiceParser::new(self.new_tool_call_parser(model, &prompt.rendered), single_call));
        }
        Ok((events, parsers))
    }

    /// Renders `messages` to the prompt, with the byte offset where the answer starts. Fails if the template does.
    fn render_prompt(
        &self,
        messages: &[Message],
        model: &ModelLease,
        reasoning_settings: &ReasoningSettings,
    ) -> Result<RenderedPrompt, ApiError> {
        let request = RenderRequest {
            messages,
            tools: &self.allowed_calls.tools,
            add_generation_prompt: self.prompt_end != PromptEnd::AfterMessage,
            variables: Some(&reasoning_settings.variables),
            // The current time.
            now: None,
        };
        let rendered = match self.prompt_end {
            PromptEnd::WithinMessage => model.template.render_continued(&request),
            PromptEnd::Answer | PromptEnd::AfterMessage => {
                model.template.render(&request).map(|prompt| RenderedPrompt { answer_start: prompt.text.len(), prompt })
            }
        };
        rendered.map_err(|e| ApiError::field(self.messages_field, e.to_string()))
    }

    /// The conversation, after the model's default system prompt if it has no system message.
    fn messages_with_system(&self, model: &ModelLease) -> Cow<'_, [Message]> {
        let messages = &self.conversation.messages;
        let has_system = || messages.iter().any(|message| matches!(message.role, Role::System | Role::Developer));
        match &model.defaults().system {
            Some(system) if !has_system() => {
                let system = [Message::system(system.clone())];
                Cow::Owned(system.into_iter().chain(messages.iter().cloned()).collect())
            }
            Some(_) | None => Cow::Borrowed(messages),
        }
    }

    /// Advances the grammar over the start of the answer that is part of the prompt, the text of the last message.
    /// Fails if this text does not match the response format that `field` requires.
    fn advance_grammar(&self, grammar: &mut Grammar, tokenizer: &Tokenizer, field: &str) -> Result<(), ApiError> {
        let text = self.conversation.messages.last().map_or("", Message::text);
        // White space before the text is not part of the response format: most templates trim messages.
        let ids = encode_continuation(tokenizer, text.trim_start(), /* parse_special */ false);
        ids.into_iter().try_for_each(|id| grammar.accept(id)).map_err(|_| {
            let message = format!(
                "the last message, which the answer continues, does not match the beginning of what {} requires",
                root_field(field)
            );
            ApiError::field(self.messages_field, message)
        })
    }

    /// The grammar of the answer, advanced to the end of the prompt; `None`: any text. `ends_in_reasoning`: the prompt
    /// ends within reasoning.
    fn answer_grammar(
        &self,
        model: &ModelLease,
        rendered: &RenderedPrompt,
        ends_in_reasoning: bool,
        notes: &mut Notes,
    ) -> Result<Option<Grammar>, ApiError> {
        let mut grammar = self.compile_grammar(model, rendered, ends_in_reasoning, notes)?;
        // A prompt that ends within reasoning has no part of the text yet. The grammar of a required call begins after
        // the text in the prompt.
        let has_start_of_text = self.prompt_end == PromptEnd::WithinMessage && !ends_in_reasoning;
        if let (Some(grammar), Some((field, _))) = (&mut grammar, &self.response_format)
            && has_start_of_text
        {
            self.advance_grammar(grammar, &model.tokenizer, field)?;
        }
        Ok(grammar)
    }

    /// Compiles the grammar of the whole answer: of the response format, or of tool calls if one is required; `None`:
    /// any text. `ends_in_reasoning`: the prompt ends within reasoning, whose rest the grammar then allows first. Adds
    /// to `notes` the parts of a schema that the grammar does not enforce.
    ///
    /// Fails if the response format or the tools cannot be compiled; the error names their field.
    fn compile_grammar(
        &self,
        model: &ModelLease,
        rendered: &RenderedPrompt,
        ends_in_reasoning: bool,
        notes: &mut Notes,
    ) -> Result<Option<Grammar>, ApiError> {
        // The JSON pointers of schema assertions that are not enforced.
        let mut unenforced = Vec::new();
        // The compiler only examines whether the prompt ends with the marker that starts reasoning. Where the prompt
        // ends in the middle of reasoning, the marker comes earlier; the marker alone is then passed in the prompt's
        // place.
        let prompt = match model.template.reasoning() {
            Some(markers) if ends_in_reasoning => markers.start,
            Some(_) | None => &rendered.prompt.text,
        };
        let AllowedCalls { tools, parallel, .. } = &self.allowed_calls;
        let (field, grammar) = match &self.response_format {
            Some((field, format)) => {
                (*field, model.grammars.response_format(&model.template, prompt, format, &mut unenforced))
            }
            None if self.allowed_calls.required => {
                ("tools", model.grammars.calls(&model.template, prompt, tools, *parallel, &mut unenforced))
            }
            None => return Ok(None),
        };
        response_format::checked_grammar(field, grammar, unenforced, notes).map(Some)
    }
}

/// The first name of the field path `path`: `response_format` of `response_format.json_schema`.
fn root_field(path: &str) -> &str {
    path.split('.').next().unwrap_or(path)
}

/// Returns `ids` without a leading BOS token, if the tokenizer adds one.
fn without_bos<'a>(model: &ModelLease, ids: &'a [u32]) -> &'a [u32] {
    match (ids, model.tokenizer.bos()) {
        ([first, rest @ ..], Some(bos)) if *first == bos && model.tokenizer.adds_bos() => rest,
        (ids, _) => ids,
    }
}
