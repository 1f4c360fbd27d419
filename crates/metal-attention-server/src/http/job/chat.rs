//! Chat jobs: from a conversation to submitted sequences.
//!
//! [`ChatJob::submit`] renders the conversation with the model's chat template, tokenises the prompt, compiles the
//! grammar of the answer, and submits `n` sequences with the same prompt to the scheduler. It returns a
//! [`SubmittedChat`]: per choice the receiver of the scheduler's events and the parser that splits them into text,
//! thoughts and tool calls.
//!
//! Handlers run `submit` on a blocking thread (`prepare` in `http/mod.rs`), since templates, tokenisation and grammars
//! are CPU-bound. If the client disconnects meanwhile, submission completes and its result is dropped, which cancels
//! the sequences.

use std::borrow::Cow;
use std::sync::Arc;

use metal_attention::Constraint;
use metal_attention::scheduler::{Client, Events};
use metal_attention::tokenizer::Tokenizer;
use metal_attention_chat::{
    ContextBudget, DroppedTurns, FittedPrompt, Message, RenderRequest, RenderedPrompt, Role, fit_context,
};
use metal_attention_grammar::{Grammar, Guide, GuideOptions, tokens_within};

use super::choice_parser::{ChoiceParser, ChoiceParsers};
use super::form::{self, RequestedForm};
use super::generation::GenerationSettings;
use super::thinking::{ThinkingRequest, ThinkingSettings};
use super::tool_choice::AllowedCalls;
use crate::http::models::ModelLease;
use crate::http::notes::Notes;
use crate::http::{ApiError, App, LOG_TARGET};

/// A request for the next message of a conversation.
#[derive(Debug, Clone)]
pub struct ChatJob {
    /// The conversation, the first message first.
    pub messages: Vec<Message>,
    /// The tools that the answer may call.
    pub calls: AllowedCalls,
    /// The form that the answer must have (JSON schema, grammar, ...), with the field that requires it; `None`: any
    /// text.
    pub form: Option<RequestedForm>,
    /// The request's settings of thoughts, and variables for the template.
    pub thinking: ThinkingRequest,
    /// The end of the prompt.
    pub end: PromptEnd,
    /// Sampling, limits, number of choices.
    pub generation: GenerationSettings,
    /// Whether a conversation that exceeds the context loses its oldest turns; otherwise it is refused. `None`: as the
    /// model's defaults or the server's options (`--context-shift`) set it.
    pub context_shift: Option<bool>,
    /// The interface's name of the conversation, for errors.
    pub messages_field: &'static str,
    /// Notes that were made while the request was read, for response headers.
    pub notes: Notes,
}

/// The end of a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PromptEnd {
    /// The markup that starts an answer of the assistant (generation prompt).
    Answer,
    /// The end of the last message: the model writes the markup itself.
    Message,
    /// The middle of the last message, which the answer continues.
    WithinMessage,
}

impl PromptEnd {
    /// The end for `messages`: an answer continues the last message if that is a text of the assistant.
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
    /// The token ids of the prompt.
    pub prompt: Arc<[u32]>,
    /// Notes for response headers.
    pub notes: Notes,
}

/// A rendered and tokenised prompt.
struct PreparedPrompt {
    /// The prompt, and where the answer starts in it: with [`PromptEnd::WithinMessage`], the answer's beginning is part
    /// of the prompt.
    rendered: RenderedPrompt,
    /// The token ids, including those of an earlier conversation.
    ids: Arc<[u32]>,
    /// The settings of thoughts for the model's template.
    thinking: ThinkingSettings,
}

impl ChatJob {
    /// Whether a conversation that exceeds the context loses its oldest turns.
    pub fn drops_turns(&self, app: &App, model: &ModelLease) -> bool {
        self.context_shift.or(model.defaults().context_shift).unwrap_or(app.options.context_shift)
    }

    /// Returns the token ids of the prompt. CPU-bound: call it on a blocking thread.
    pub fn prompt(&self, model: &ModelLease) -> Result<Arc<[u32]>, ApiError> {
        Ok(self.prepare(model, &[], false, &mut Notes::default())?.ids)
    }

    /// Returns the text of the prompt. CPU-bound: call it on a blocking thread.
    pub fn prompt_text(&self, model: &ModelLease) -> Result<String, ApiError> {
        Ok(self.prepare(model, &[], false, &mut Notes::default())?.rendered.prompt.text)
    }

    /// Renders and tokenises the prompt, after the tokens of `earlier_ids`, an earlier conversation. `may_cut`:
    /// whatever exceeds the context is dropped, the tokens of `earlier_ids` after the oldest turns; otherwise the
    /// scheduler refuses a prompt that is too long.
    ///
    /// Errors: a tool that the model's format cannot express, a template that fails, or a text that is too long to
    /// tokenise.
    fn prepare(
        &self,
        model: &ModelLease,
        earlier_ids: &[u32],
        may_cut: bool,
        notes: &mut Notes,
    ) -> Result<PreparedPrompt, ApiError> {
        model.template.tool_format().check_tools(&self.calls.tools).map_err(|e| {
            let place = if e.is_argument { "parameters" } else { "name" };
            ApiError::field(format!("tools[{}].function.{place}", e.tool), e.to_string())
        })?;
        let thinking = self.thinking.settings(&model.template, notes);
        let messages = self.messages_with_system(model);
        let render = |messages: &[Message]| {
            let rendered = self.rendered(messages, model, &thinking)?;
            model.check_length(&rendered.prompt.text, self.messages_field)?;
            let ids = rendered.prompt.encode(&model.tokenizer);
            let n_tokens = ids.len();
            Ok::<_, ApiError>(((rendered, ids), n_tokens))
        };
        let room = ContextBudget::new(model.n_ctx, self.generation.max_tokens(model));
        let (rendered, ids) = if may_cut {
            let FittedPrompt { prompt, n_tokens, dropped, .. } =
                fit_context(&messages, room, &model.tokenizer, render)?;
            // No note for a prompt that is still too long: the scheduler refuses it.
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
            prompt
        } else {
            render(&messages)?.0
        };
        let (earlier, new) = (without_bos(model, earlier_ids), without_bos(model, &ids));
        let n_cut = if may_cut { room.n_to_drop(earlier.len() + ids.len()).min(earlier.len()) } else { 0 };
        if n_cut > 0 {
            notes.truncated("context");
        }
        // The prompt starts with the model's BOS token, if it has one, also where `earlier_ids` are cut.
        let bos = &ids[..ids.len() - new.len()];
        Ok(PreparedPrompt { rendered, ids: [bos, &earlier[n_cut..], new].concat().into(), thinking })
    }

    /// Submits all choices. CPU-bound: call it on a blocking thread. See [`submit_after`](Self::submit_after) for
    /// failures.
    pub fn submit(&self, app: &App, model: &ModelLease, client: Client) -> Result<SubmittedChat, ApiError> {
        self.submit_after(&[], app, model, client)
    }

    /// Submits all choices, with a prompt that continues the tokens of `earlier_ids`.
    ///
    /// Failures: the error of the first choice that cannot be submitted (an invalid request, a full queue, a shutdown)
    /// is the error of the job. Choices that were submitted before it are cancelled, as their event receivers are
    /// dropped.
    pub fn submit_after(
        &self,
        earlier_ids: &[u32],
        app: &App,
        model: &ModelLease,
        client: Client,
    ) -> Result<SubmittedChat, ApiError> {
        let n = self.generation.n;
        model.scheduler.check_n_sequences(n as usize)?;
        if let (true, Some((field, _))) = (self.calls.required, &self.form) {
            let message = format!("tool_choice demands a call, which {} rules out", root_field(field));
            return Err(ApiError::field("tool_choice", message));
        }
        let mut notes = self.notes.clone();
        let may_cut = self.drops_turns(app, model);
        let PreparedPrompt { rendered, ids, thinking } = self.prepare(model, earlier_ids, may_cut, &mut notes)?;
        let stop = self.generation.stop(model, model.template.stop_strings());
        // An answer with a required form has no tool calls: the parser treats all of it as text.
        let tools = if self.form.is_some() { &[] } else { self.calls.tools.as_slice() };
        let parser = || model.template.continued_parser(&rendered, tools);
        let thinks = parser().is_thinking();
        let mut grammar = self.grammar(model, &rendered, thinks, &mut notes)?;
        if let (Some(grammar), Some((field, _)), PromptEnd::WithinMessage, false) =
            (&mut grammar, &self.form, self.end, thinks)
        {
            self.advance_grammar(grammar, &model.tokenizer, field)?;
        }
        // Thoughts may only start the answer: not within a message, after the prompt's own thoughts, or where the form
        // covers the whole answer.
        let has_thought = model.template.reasoning().is_some_and(|markers| markers.ended_in(&rendered.prompt.text));
        let covers_answer = self.form.as_ref().is_some_and(|(field, _)| form::covers_answer(field));
        let may_think = self.end == PromptEnd::Answer && !has_thought && !covers_answer;
        let (mut events, mut parsers) = (Vec::new(), Vec::new());
        for choice in 0..n {
            let mut request = self.generation.request(app, model, client, &ids, &stop, choice)?;
            let options = GuideOptions {
                template: &model.template,
                parser: parser(),
                grammar: grammar.clone(),
                budget: thinking.budget,
                single_call: !self.calls.parallel && !tools.is_empty(),
                has_tools: !tools.is_empty(),
                may_think,
            };
            let guide = Guide::new(&model.tokenizer, options);
            request.constraint = guide.map(|guide| Box::new(guide) as Box<dyn Constraint>);
            events.push(model.scheduler.submit(request)?);
            parsers.push(ChoiceParser::new(parser(), !self.calls.parallel));
        }
        let parsers = ChoiceParsers::new(Arc::clone(&model.tokenizer), parsers);
        Ok(SubmittedChat { events, parsers, prompt: ids, notes })
    }

    /// Renders `messages` to the prompt, with the position where the answer starts.
    fn rendered(
        &self,
        messages: &[Message],
        model: &ModelLease,
        thinking: &ThinkingSettings,
    ) -> Result<RenderedPrompt, ApiError> {
        let request = RenderRequest {
            messages,
            tools: &self.calls.tools,
            add_generation_prompt: self.end != PromptEnd::Message,
            variables: Some(&thinking.variables),
            now: None,
        };
        let rendered = match self.end {
            PromptEnd::WithinMessage => model.template.render_continued(&request),
            PromptEnd::Answer | PromptEnd::Message => {
                model.template.render(&request).map(|prompt| RenderedPrompt { answer_start: prompt.text.len(), prompt })
            }
        };
        rendered.map_err(|e| ApiError::field(self.messages_field, e.to_string()))
    }

    /// The conversation, after the model's default system prompt if it has no system message.
    fn messages_with_system(&self, model: &ModelLease) -> Cow<'_, [Message]> {
        let has_system = || self.messages.iter().any(|message| matches!(message.role, Role::System | Role::Developer));
        match &model.defaults().system {
            Some(system) if !has_system() => {
                let system = [Message::system(system.clone())];
                Cow::Owned(system.into_iter().chain(self.messages.iter().cloned()).collect())
            }
            Some(_) | None => Cow::Borrowed(&self.messages),
        }
    }

    /// Advances the grammar over the beginning of the answer that is part of the prompt. Fails where that beginning
    /// violates the form of `field`.
    fn advance_grammar(&self, grammar: &mut Grammar, tokenizer: &Tokenizer, field: &str) -> Result<(), ApiError> {
        let text = self.messages.last().map_or("", Message::text);
        let ids = tokens_within(tokenizer, text.trim_start(), false);
        ids.into_iter().try_for_each(|id| grammar.accept(id)).map_err(|_| {
            let message = format!(
                "the last message, which the answer goes on with, is no beginning of what {} demands",
                root_field(field)
            );
            ApiError::field(self.messages_field, message)
        })
    }

    /// Compiles the grammar of the answer; `None`: any text. `thinking`: the prompt ends within thoughts.
    fn grammar(
        &self,
        model: &ModelLease,
        rendered: &RenderedPrompt,
        thinking: bool,
        notes: &mut Notes,
    ) -> Result<Option<Grammar>, ApiError> {
        let mut left_out = Vec::new();
        // For the grammar, a prompt that ends within thoughts is one that starts them.
        let prompt = match model.template.reasoning() {
            Some(markers) if thinking => markers.start,
            Some(_) | None => &rendered.prompt.text,
        };
        let AllowedCalls { tools, parallel, .. } = &self.calls;
        let (field, grammar) = match &self.form {
            Some((field, form)) => (*field, model.grammars.form(&model.template, prompt, form, &mut left_out)),
            None if self.calls.required => {
                ("tools", model.grammars.calls(&model.template, prompt, tools, *parallel, &mut left_out))
            }
            None => return Ok(None),
        };
        form::checked_grammar(field, grammar, left_out, notes).map(Some)
    }
}

/// The first name of the field path `path`.
fn root_field(path: &str) -> &str {
    path.split('.').next().unwrap_or(path)
}

/// Returns `ids` without the leading BOS token that the tokenizer has added.
fn without_bos<'a>(model: &ModelLease, ids: &'a [u32]) -> &'a [u32] {
    match (ids, model.tokenizer.bos()) {
        ([first, rest @ ..], Some(bos)) if *first == bos && model.tokenizer.adds_bos() => rest,
        (ids, _) => ids,
    }
}
