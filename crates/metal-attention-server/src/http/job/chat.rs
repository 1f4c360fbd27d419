//! Chat jobs: from a conversation to submitted sequences.
//!
//! [`ChatJob::submit`] renders the conversation with the model's chat template, tokenises the prompt, compiles the
//! grammar of the answer, and submits `n` sequences with the same prompt to the scheduler. It returns a
//! [`SubmittedChat`]: per choice the receiver of the scheduler's events and the parser that splits them into text,
//! thoughts and tool calls.
//!
//! Handlers run `submit` on a blocking thread (the function `prepare` of `http/mod.rs`), since templates, tokenisation
//! and grammars are CPU-bound. If the client disconnects meanwhile, submission completes and its result is dropped,
//! which cancels the sequences.
//!
//! # Thoughts and grammar
//!
//! An answer is thoughts (what interfaces call reasoning or thinking; optional), then text or tool calls. A grammar, if the request requires a form or a
//! call, applies to what follows the thoughts:
//!
//! ```text
//! end of the prompt           may the answer start with thoughts?    where the grammar applies
//! Answer                      yes (1)                                after the thoughts, if any
//! within thoughts (2)         they continue                          after the thoughts
//! WithinMessage, in its text  no                                     a form: from the start of the message (3);
//!                                                                    a call: after the prompt
//! Message                     no (4)                                 from the first token
//! ```
//!
//! 1. Not after thoughts that the template wrote and ended (`<think></think>`), nor with a form that covers the whole answer (llama.cpp's
//!    field `grammar`).
//! 2. The template starts thoughts, or the last message, which the answer continues, ends within its thoughts.
//! 3. The grammar is advanced over the text of the message in the prompt.
//! 4. Thoughts are recognised only where the template wrote the markup that starts the answer.

use std::borrow::Cow;
use std::sync::Arc;

use metal_attention::Constraint;
use metal_attention::scheduler::{Client, Events};
use metal_attention::tokenizer::Tokenizer;
use metal_attention_chat::{
    ContextBudget, DroppedTurns, FittedPrompt, Message, RenderRequest, RenderedPrompt, Role, Tool, ToolCallParser,
    fit_context,
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
    /// The tools that the answer may call, and whether it must.
    pub allowed_calls: AllowedCalls,
    /// The form that the answer must have (JSON schema, grammar, ...), with the field that requires it; `None`: any
    /// text.
    pub required_form: Option<RequestedForm>,
    /// The request's settings of thoughts, and variables for the template.
    pub thinking: ThinkingRequest,
    /// Where the prompt ends.
    pub prompt_end: PromptEnd,
    /// Sampling, limits, number of choices.
    pub generation: GenerationSettings,
    /// Whether a conversation that exceeds the context loses its oldest turns when the prompt is made; otherwise it is
    /// refused. (llama.cpp's option of this name drops tokens from the KV cache during generation.) `None`: as the
    /// model's defaults or the server's options (`--context-shift`) set it.
    pub context_shift: Option<bool>,
    /// The interface's name of the conversation, for errors.
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
    Message,
    /// Within the last message, the assistant's, which the answer continues.
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
    pub prompt: Arc<[u32]>,
    /// Notes for response headers.
    pub notes: Notes,
}

/// A rendered and tokenised prompt.
struct PreparedPrompt {
    /// The prompt of the conversation, without the earlier one that Ollama's `context` may give. With [`PromptEnd::WithinMessage`], the answer starts
    /// within it.
    rendered: RenderedPrompt,
    /// The token ids of the whole prompt: the earlier conversation, if any, then `rendered`.
    ids: Arc<[u32]>,
    /// The settings of thoughts for the model's template.
    thinking: ThinkingSettings,
}

impl ChatJob {
    /// Whether a conversation that exceeds the context loses its oldest turns.
    pub fn drops_turns(&self, app: &App, model: &ModelLease) -> bool {
        self.context_shift.or(model.defaults().context_shift).unwrap_or(app.options.context_shift)
    }

    /// Returns the token ids of the prompt for the whole conversation. [`submit`](Self::submit) may submit a shorter
    /// prompt, as it drops turns that exceed the context. CPU-bound: call it on a blocking thread.
    pub fn uncut_prompt_ids(&self, model: &ModelLease) -> Result<Arc<[u32]>, ApiError> {
        Ok(self.prepared_prompt(model, &[], false, &mut Notes::default())?.ids)
    }

    /// Returns the text of the prompt for the whole conversation; see [`uncut_prompt_ids`](Self::uncut_prompt_ids).
    pub fn uncut_prompt_text(&self, model: &ModelLease) -> Result<String, ApiError> {
        Ok(self.prepared_prompt(model, &[], false, &mut Notes::default())?.rendered.prompt.text)
    }

    /// Renders and tokenises the prompt: the token ids `earlier_ids` of an earlier conversation, then those of
    /// `messages`. A request sends the ids of an earlier answer back in Ollama's field `context`; otherwise there are
    /// none.
    ///
    /// `may_cut`: if the prompt exceeds the context's share for prompts ([`ContextBudget`]: the answer gets `max_tokens`,
    /// but at most a quarter), tokens are dropped in two stages, in steps of a quarter of the context, so that the
    /// start of the prompt stays the same for some requests. First, without regard to `earlier_ids`, the oldest turns of
    /// `messages` are dropped. Then the first tokens of `earlier_ids` are dropped. Both are noted in `notes`. If the
    /// prompt is still too long, what is left is returned without a note of dropped turns: the scheduler refuses it, as
    /// it refuses a prompt that is too long without `may_cut`.
    ///
    /// Errors: a tool that the model's format cannot express, a template that fails, or a text that is too long to
    /// tokenise.
    fn prepared_prompt(
        &self,
        model: &ModelLease,
        earlier_ids: &[u32],
        may_cut: bool,
        notes: &mut Notes,
    ) -> Result<PreparedPrompt, ApiError> {
        model.template.tool_format().check_tools(&self.allowed_calls.tools).map_err(|e| {
            let place = if e.is_argument { "parameters" } else { "name" };
            ApiError::field(format!("tools[{}].function.{place}", e.tool), e.to_string())
        })?;
        let thinking = self.thinking.settings(&model.template, notes);
        let messages = self.messages_with_system(model);
        let render = |messages: &[Message]| {
            let rendered = self.rendered_prompt(messages, model, &thinking)?;
            model.check_length(&rendered.prompt.text, self.messages_field)?;
            let ids = rendered.prompt.encode(&model.tokenizer);
            let n_tokens = ids.len();
            Ok::<_, ApiError>(((rendered, ids), n_tokens))
        };
        let context_budget = ContextBudget::new(model.n_ctx, self.generation.max_tokens(model));
        let (rendered, ids) = if may_cut {
            let FittedPrompt { prompt, n_tokens, dropped, .. } =
                fit_context(&messages, context_budget, &model.tokenizer, render)?;
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
        let n_cut = if may_cut { context_budget.n_to_drop(earlier.len() + ids.len()).min(earlier.len()) } else { 0 };
        if n_cut > 0 {
            // The field of the request from which `earlier_ids` come.
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

    /// Submits all choices, with a prompt that continues the tokens of `earlier_ids` (Ollama's field `context`).
    /// `client`: whose share of slots and batches the sequences count for.
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
        model.scheduler.check_n_sequences(self.generation.n as usize)?;
        self.check_required_call()?;
        let mut notes = self.notes.clone();
        let may_cut = self.drops_turns(app, model);
        let prompt = self.prepared_prompt(model, earlier_ids, may_cut, &mut notes)?;
        let ends_in_thoughts = self.answer_parser(model, &prompt.rendered).is_thinking();
        let grammar = self.answer_grammar(model, &prompt.rendered, ends_in_thoughts, &mut notes)?;
        let (events, parsers) = self.submit_choices(app, model, client, &prompt, grammar.as_ref())?;
        let parsers = ChoiceParsers::new(Arc::clone(&model.tokenizer), parsers);
        Ok(SubmittedChat { events, parsers, prompt: prompt.ids, notes })
    }

    /// Fails if a call is required as well as a form of the text.
    fn check_required_call(&self) -> Result<(), ApiError> {
        match &self.required_form {
            Some((field, _)) if self.allowed_calls.required => {
                let message = format!("tool_choice demands a call, which {} rules out", root_field(field));
                Err(ApiError::field("tool_choice", message))
            }
            Some(_) | None => Ok(()),
        }
    }

    /// The tools whose calls are parsed. An answer with a required form has no calls: all of it is text.
    fn callable_tools(&self) -> &[Tool] {
        if self.required_form.is_some() { &[] } else { &self.allowed_calls.tools }
    }

    /// A parser of the answer that has parsed the part of the answer in the prompt.
    fn answer_parser(&self, model: &ModelLease, rendered: &RenderedPrompt) -> ToolCallParser {
        model.template.continued_parser(rendered, self.callable_tools())
    }

    /// Whether the answer may start with thoughts that the prompt has not started; see the table at the top of the
    /// file.
    fn may_start_thoughts(&self, model: &ModelLease, prompt: &str) -> bool {
        let has_thought = model.template.reasoning().is_some_and(|markers| markers.ended_in(prompt));
        let covers_answer = self.required_form.as_ref().is_some_and(|(field, _)| form::covers_answer(field));
        self.prompt_end == PromptEnd::Answer && !has_thought && !covers_answer
    }

    /// Submits a sequence for each choice, and returns the receivers and the parsers of their events, by choice.
    /// `grammar` is the state of the grammar at the end of the prompt.
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
        let may_think = self.may_start_thoughts(model, &prompt.rendered.prompt.text);
        let (mut events, mut parsers) = (Vec::new(), Vec::new());
        for choice in 0..self.generation.n {
            let mut request = self.generation.request(app, model, client, &prompt.ids, &stop, choice)?;
            // Parsers have a state, so each choice has two: its guide parses in the scheduler's thread, to mask tokens,
            // and its `ChoiceParser` in the handler, to write the response.
            let options = GuideOptions {
                template: &model.template,
                parser: self.answer_parser(model, &prompt.rendered),
                grammar: grammar.cloned(),
                budget: prompt.thinking.budget,
                // Without tools there are no calls to limit, and a guide for this alone would be a needless cost.
                single_call: !self.allowed_calls.parallel && has_tools,
                has_tools,
                may_think,
            };
            let guide = Guide::new(&model.tokenizer, options);
            request.constraint = guide.map(|guide| Box::new(guide) as Box<dyn Constraint>);
            events.push(model.scheduler.submit(request)?);
            let single_call = !self.allowed_calls.parallel;
            parsers.push(ChoiceParser::new(self.answer_parser(model, &prompt.rendered), single_call));
        }
        Ok((events, parsers))
    }

    /// Renders `messages` to the prompt, with the position where the answer starts. Fails if the template does.
    fn rendered_prompt(
        &self,
        messages: &[Message],
        model: &ModelLease,
        thinking: &ThinkingSettings,
    ) -> Result<RenderedPrompt, ApiError> {
        let request = RenderRequest {
            messages,
            tools: &self.allowed_calls.tools,
            add_generation_prompt: self.prompt_end != PromptEnd::Message,
            variables: Some(&thinking.variables),
            // The current time.
            now: None,
        };
        let rendered = match self.prompt_end {
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

    /// Advances the grammar over the start of the answer that is part of the prompt, the text of the last message.
    /// Fails if that violates the form that `field` requires.
    fn advance_grammar(&self, grammar: &mut Grammar, tokenizer: &Tokenizer, field: &str) -> Result<(), ApiError> {
        let text = self.messages.last().map_or("", Message::text);
        // Most templates trim messages; the form begins with the first character of the text.
        let ids = tokens_within(tokenizer, text.trim_start(), /* parse_special */ false);
        ids.into_iter().try_for_each(|id| grammar.accept(id)).map_err(|_| {
            let message = format!(
                "the last message, which the answer goes on with, is no beginning of what {} demands",
                root_field(field)
            );
            ApiError::field(self.messages_field, message)
        })
    }

    /// The grammar of the answer, advanced to the end of the prompt; `None`: any text. `ends_in_thoughts`: the prompt
    /// ends within thoughts.
    fn answer_grammar(
        &self,
        model: &ModelLease,
        rendered: &RenderedPrompt,
        ends_in_thoughts: bool,
        notes: &mut Notes,
    ) -> Result<Option<Grammar>, ApiError> {
        let mut grammar = self.compiled_grammar(model, rendered, ends_in_thoughts, notes)?;
        // Within thoughts, the prompt has no part of the text yet.
        let starts_text = self.prompt_end == PromptEnd::WithinMessage && !ends_in_thoughts;
        if let (Some(grammar), Some((field, _))) = (&mut grammar, &self.required_form)
            && starts_text
        {
            self.advance_grammar(grammar, &model.tokenizer, field)?;
        }
        Ok(grammar)
    }

    /// Compiles the grammar of the whole answer: of the required form, or of tool calls if one is required; `None`: any
    /// text. The compiler reads the prompt, as its end tells whether thoughts are open. Notes the parts of a schema that
    /// the grammar does not enforce.
    fn compiled_grammar(
        &self,
        model: &ModelLease,
        rendered: &RenderedPrompt,
        ends_in_thoughts: bool,
        notes: &mut Notes,
    ) -> Result<Option<Grammar>, ApiError> {
        // The JSON pointers of schema assertions that are not enforced.
        let mut left_out = Vec::new();
        // The compiler recognises open thoughts by a start marker at the end of the prompt. A prompt that ends in the
        // middle of thoughts has it earlier, so the marker stands in for the prompt.
        let prompt = match model.template.reasoning() {
            Some(markers) if ends_in_thoughts => markers.start,
            Some(_) | None => &rendered.prompt.text,
        };
        let AllowedCalls { tools, parallel, .. } = &self.allowed_calls;
        let (field, grammar) = match &self.required_form {
            Some((field, form)) => (*field, model.grammars.form(&model.template, prompt, form, &mut left_out)),
            None if self.allowed_calls.required => {
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
