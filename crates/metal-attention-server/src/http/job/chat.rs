//! The next message of a conversation, without a dialect.

use std::borrow::Cow;
use std::sync::Arc;

use metal_attention::Constraint;
use metal_attention::scheduler::{Client, Events};
use metal_attention::tokenizer::Tokenizer;
use metal_attention_chat::{
    ContextRoom, Continuation, DroppedTurns, FittedPrompt, Message, RenderRequest, Role, fit_context,
};
use metal_attention_grammar::{Grammar, Guide, GuideOptions, tokens_within};

use super::form::{self, AskedForm};
use super::generation::Generation;
use super::reply::{Replies, Reply};
use super::thinking::{ThinkingRequest, ThinkingWish};
use super::tool_choice::Calls;
use crate::http::models::ModelLease;
use crate::http::notes::Notes;
use crate::http::{ApiError, App, LOG_TARGET};

/// A request for the next message of a conversation.
#[derive(Debug, Clone)]
pub struct ChatJob {
    /// The conversation so far, the first message first.
    pub messages: Vec<Message>,
    /// The functions that the answer may call.
    pub calls: Calls,
    /// What the answer must look like, and the field that says so.
    pub form: Option<AskedForm>,
    /// What is said about thoughts, and the template's variables.
    pub thinking: ThinkingRequest,
    /// How the prompt ends.
    pub end: PromptEnd,
    /// How the text is generated.
    pub generation: Generation,
    /// Whether the oldest turns of a conversation that the context has no room for are dropped; else it is refused. `None`: as the
    /// model and the server are set up (`--context-shift`).
    pub context_shift: Option<bool>,
    /// How the dialect calls the conversation, for errors.
    pub messages_field: &'static str,
    /// What the response headers say of how the request was read.
    pub notes: Notes,
}

/// How the prompt ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PromptEnd {
    /// With what begins an answer.
    Answer,
    /// With the last message.
    Message,
    /// In the last message, which the answer goes on with.
    WithinMessage,
}

impl PromptEnd {
    /// Of a conversation whose answer goes on with a last text of the assistant.
    pub fn after(messages: &[Message]) -> Self {
        let is_text = |last: &Message| last.role == Role::Assistant && last.tool_calls.is_empty();
        if messages.last().is_some_and(is_text) { Self::WithinMessage } else { Self::Answer }
    }
}

/// The answers to a [`ChatJob`] as they are generated.
pub struct Chat {
    /// The scheduler's events of each text.
    pub events: Vec<Events>,
    /// Reads them.
    pub replies: Replies,
    /// The token ids of the prompt.
    pub prompt: Arc<[u32]>,
    /// What the response headers say.
    pub notes: Notes,
}

/// A prompt, and what of it the answers begin with.
struct Prepared {
    continuation: Continuation,
    ids: Arc<[u32]>,
    wish: ThinkingWish,
}

impl ChatJob {
    /// Whether the oldest turns of a conversation that the context has no room for are dropped.
    pub fn drops_turns(&self, app: &App, model: &ModelLease) -> bool {
        self.context_shift.or(model.defaults().context_shift).unwrap_or(app.options.context_shift)
    }

    /// The token ids of the prompt. Templates and tokens take time: not to be called on a thread that serves others.
    pub fn prompt(&self, model: &ModelLease) -> Result<Arc<[u32]>, ApiError> {
        Ok(self.prepare(model, &[], false, &mut Notes::default())?.ids)
    }

    /// The text of the prompt. Templates take time: not to be called on a thread that serves others.
    pub fn prompt_text(&self, model: &ModelLease) -> Result<String, ApiError> {
        Ok(self.prepare(model, &[], false, &mut Notes::default())?.continuation.prompt.text)
    }

    /// The prompt after the tokens of `before`. `fits`: what the context has no room for is dropped.
    fn prepare(&self, model: &ModelLease, before: &[u32], fits: bool, notes: &mut Notes) -> Result<Prepared, ApiError> {
        model.template.tool_format().check_tools(&self.calls.tools).map_err(|e| {
            let place = if e.is_argument { "parameters" } else { "name" };
            ApiError::field(format!("tools[{}].function.{place}", e.tool), e.to_string())
        })?;
        let wish = self.thinking.wish(&model.template, notes);
        let messages = self.messages_with_system(model);
        let render = |messages: &[Message]| {
            let continuation = self.continuation(messages, model, &wish)?;
            model.check_length(&continuation.prompt.text, self.messages_field)?;
            let ids = continuation.prompt.encode(&model.tokenizer);
            let n_tokens = ids.len();
            Ok::<_, ApiError>(((continuation, ids), n_tokens))
        };
        let room = ContextRoom::new(model.n_ctx, self.generation.max_tokens(model));
        let (continuation, ids) = if fits {
            let FittedPrompt { prompt, n_tokens, dropped, .. } =
                fit_context(&messages, room, &model.tokenizer, render)?;
            // A prompt that is still too long is refused.
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
        let (old, own) = (without_bos(model, before), without_bos(model, &ids));
        let n_cut = if fits { room.n_to_drop(old.len() + ids.len()).min(old.len()) } else { 0 };
        if n_cut > 0 {
            notes.truncated("context");
        }
        // Also what is left of an earlier conversation begins with the token that begins a text, where the model has one.
        let bos = &ids[..ids.len() - own.len()];
        Ok(Prepared { continuation, ids: [bos, &old[n_cut..], own].concat().into(), wish })
    }

    /// Submits the job's texts. Templates and tokens take time: not to be called on a thread that serves others.
    pub fn submit(&self, app: &App, model: &ModelLease, client: Client) -> Result<Chat, ApiError> {
        self.submit_after(&[], app, model, client)
    }

    /// The same where the tokens of `before`, an earlier conversation, come before the prompt.
    pub fn submit_after(
        &self,
        before: &[u32],
        app: &App,
        model: &ModelLease,
        client: Client,
    ) -> Result<Chat, ApiError> {
        let n = self.generation.n;
        model.scheduler.check_n_sequences(n as usize)?;
        if let (true, Some((field, _))) = (self.calls.required, &self.form) {
            let message = format!("tool_choice demands a call, which {} rules out", first_name(field));
            return Err(ApiError::field("tool_choice", message));
        }
        let mut notes = self.notes.clone();
        let fits = self.drops_turns(app, model);
        let Prepared { continuation, ids, wish } = self.prepare(model, before, fits, &mut notes)?;
        let stop = self.generation.stop(model, model.template.stop_strings());
        // An answer in a form of its own has no calls.
        let tools = if self.form.is_some() { &[] } else { self.calls.tools.as_slice() };
        let parser = || model.template.continued_parser(&continuation, tools);
        let thinks = parser().is_thinking();
        let mut grammar = self.grammar(model, &continuation, thinks, &mut notes)?;
        if let (Some(grammar), Some((field, _)), PromptEnd::WithinMessage, false) =
            (&mut grammar, &self.form, self.end, thinks)
        {
            self.follow(grammar, &model.tokenizer, field)?;
        }
        let has_thought = model.template.reasoning().is_some_and(|markers| markers.ended_in(&continuation.prompt.text));
        let is_whole = self.form.as_ref().is_some_and(|(field, _)| form::is_whole(field));
        let may_think = self.end == PromptEnd::Answer && !has_thought && !is_whole;
        let (mut events, mut replies) = (Vec::new(), Vec::new());
        for choice in 0..n {
            let mut request = self.generation.request(app, model, client, &ids, &stop, choice)?;
            let options = GuideOptions {
                template: &model.template,
                parser: parser(),
                grammar: grammar.clone(),
                budget: wish.budget,
                single_call: !self.calls.parallel && !tools.is_empty(),
                has_tools: !tools.is_empty(),
                may_think,
            };
            let guide = Guide::new(&model.tokenizer, options);
            request.constraint = guide.map(|guide| Box::new(guide) as Box<dyn Constraint>);
            events.push(model.scheduler.submit(request)?);
            replies.push(Reply::new(parser(), !self.calls.parallel));
        }
        let replies = Replies::new(Arc::clone(&model.tokenizer), replies);
        Ok(Chat { events, replies, prompt: ids, notes })
    }

    /// The prompt of `messages`, and where the answer begins in it.
    fn continuation(
        &self,
        messages: &[Message],
        model: &ModelLease,
        wish: &ThinkingWish,
    ) -> Result<Continuation, ApiError> {
        let request = RenderRequest {
            messages,
            tools: &self.calls.tools,
            add_generation_prompt: self.end != PromptEnd::Message,
            variables: Some(&wish.variables),
            now: None,
        };
        let rendered = match self.end {
            PromptEnd::WithinMessage => model.template.render_continued(&request),
            PromptEnd::Answer | PromptEnd::Message => {
                model.template.render(&request).map(|prompt| Continuation { begin: prompt.text.len(), prompt })
            }
        };
        rendered.map_err(|e| ApiError::field(self.messages_field, e.to_string()))
    }

    /// The conversation, with the model's system prompt where it has none of its own.
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

    /// Has the grammar read the beginning of the answer that the prompt has already.
    fn follow(&self, grammar: &mut Grammar, tokenizer: &Tokenizer, field: &str) -> Result<(), ApiError> {
        let text = self.messages.last().map_or("", Message::text);
        let ids = tokens_within(tokenizer, text.trim_start(), false);
        ids.into_iter().try_for_each(|id| grammar.accept(id)).map_err(|_| {
            let message = format!(
                "the last message, which the answer goes on with, is no beginning of what {} demands",
                first_name(field)
            );
            ApiError::field(self.messages_field, message)
        })
    }

    /// The grammar that the answer follows. `thinking`: the prompt ends in thoughts.
    fn grammar(
        &self,
        model: &ModelLease,
        continuation: &Continuation,
        thinking: bool,
        notes: &mut Notes,
    ) -> Result<Option<Grammar>, ApiError> {
        let mut left_out = Vec::new();
        // A prompt that ends in thoughts which have begun before is to the grammar as one that begins them.
        let prompt = match model.template.reasoning() {
            Some(markers) if thinking => markers.start,
            Some(_) | None => &continuation.prompt.text,
        };
        let Calls { tools, parallel, .. } = &self.calls;
        let (field, grammar) = match &self.form {
            Some((field, form)) => (*field, model.grammars.form(&model.template, prompt, form, &mut left_out)),
            None if self.calls.required => {
                ("tools", model.grammars.calls(&model.template, prompt, tools, *parallel, &mut left_out))
            }
            None => return Ok(None),
        };
        form::followed(field, grammar, left_out, notes).map(Some)
    }
}

/// The name of the field that `path` leads into.
fn first_name(path: &str) -> &str {
    path.split('.').next().unwrap_or(path)
}

/// `ids` without the token that begins a text.
fn without_bos<'a>(model: &ModelLease, ids: &'a [u32]) -> &'a [u32] {
    match (ids, model.tokenizer.bos()) {
        ([first, rest @ ..], Some(bos)) if *first == bos && model.tokenizer.adds_bos() => rest,
        (ids, _) => ids,
    }
}
