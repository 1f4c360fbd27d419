//! From the scheduler's events to an answer: whole, or as a JSON object on each line.

use std::marker::PhantomData;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::response::{IntoResponse, Response};
use jiff::Timestamp;
use metal_attention::scheduler::{Event, RequestTimings, TokenLogprobs, Usage};
use metal_attention::tokenizer::Tokenizer;
use metal_attention_chat::AnswerEvent;
use serde::Serialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::ErrorBody;
use crate::http::ApiError;
use crate::http::answer::{Chunks, Frames, Framing, Texts, stream};
use crate::http::job::reply::{ChatEvent, EndReason, Replies};
use crate::http::models::ModelLease;
use crate::http::openai::logprobs::ChatTokenLogprob;

/// The time now, with nanoseconds.
pub fn now() -> String {
    rfc3339(Timestamp::now())
}

/// A time as ollama writes it.
pub fn rfc3339(time: Timestamp) -> String {
    format!("{time:.9}")
}

/// A call of a function.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
#[schema(as = OllamaToolCall)]
pub struct ToolCall {
    /// The call's name.
    id: String,
    /// What is called, and with what.
    function: Function,
}

/// What is called, and with what.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
#[schema(as = OllamaFunctionCall)]
struct Function {
    /// The call's number.
    index: usize,
    /// The function.
    name: String,
    /// The arguments.
    #[schema(value_type = std::collections::BTreeMap<String, Value>)]
    arguments: Map<String, Value>,
}

/// How an answer ended, and what it took.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
#[schema(as = OllamaEnd)]
pub struct End {
    /// Why it ended: `stop` or `length`; `load` and `unload` where nothing was asked for.
    done_reason: &'static str,
    /// What it took; absent where nothing was asked for.
    #[serde(flatten)]
    metrics: Option<Metrics>,
}

/// What an answer took. Times are in nanoseconds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
#[schema(as = OllamaMetrics)]
struct Metrics {
    /// From the request to the end of the answer.
    total_duration: u64,
    /// Until the model was loaded.
    load_duration: u64,
    /// Tokens of the prompt, those in the prefix cache included.
    prompt_eval_count: usize,
    /// From the start of the prompt to the first token.
    prompt_eval_duration: u64,
    /// Tokens that were generated.
    eval_count: usize,
    /// From the first token to the end.
    eval_duration: u64,
}

/// A duration in nanoseconds.
pub fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

impl End {
    /// Of a request that only loads a model.
    const LOAD: Self = Self { done_reason: "load", metrics: None };
    /// Of a request that only unloads it.
    const UNLOAD: Self = Self { done_reason: "unload", metrics: None };
}

/// What events add to an answer.
#[derive(Debug, Default)]
pub struct Part {
    /// Text.
    pub content: String,
    /// Thoughts.
    pub thinking: String,
    /// Calls that are complete.
    pub calls: Vec<ToolCall>,
    /// The log probabilities of tokens.
    pub logprobs: Vec<ChatTokenLogprob>,
    /// The token ids of prompt and answer, at the end where they are wanted.
    pub context: Option<Vec<u32>>,
    /// How the answer ended, at its end.
    pub end: Option<End>,
}

impl Part {
    fn is_empty(&self) -> bool {
        let Self { content, thinking, calls, logprobs, context, end } = self;
        let is_over = end.is_some() || context.is_some();
        content.is_empty() && thinking.is_empty() && calls.is_empty() && logprobs.is_empty() && !is_over
    }

    fn add(&mut self, more: Self) {
        self.content += &more.content;
        self.thinking += &more.thinking;
        self.calls.extend(more.calls);
        self.logprobs.extend(more.logprobs);
        self.context = more.context.or(self.context.take());
        self.end = more.end.or(self.end.take());
    }
}

/// An object of an answer: the whole, or what is new.
pub trait Answer: Serialize + Send + 'static {
    /// What `part` is in an answer of `model`.
    fn new(model: &str, part: Part) -> Self;
}

/// The answer to a request that loads or unloads the model, and nothing else.
pub fn without_text<A: Answer>(model: &str, is_loaded: bool) -> Response {
    let end = if is_loaded { End::LOAD } else { End::UNLOAD };
    axum::Json(A::new(model, Part { end: Some(end), ..Part::default() })).into_response()
}

/// Reads the events of one text.
pub struct Reader {
    /// Tells thoughts and calls from the text; `None`: there are none.
    replies: Option<Replies>,
    tokenizer: Arc<Tokenizer>,
    /// The model's name in the request.
    model: String,
    received: Instant,
    /// The time that it took to load the model.
    load: Duration,
    /// The token ids of prompt and answer, where they are wanted.
    context: Option<Vec<u32>>,
    /// The call that is being written.
    call: Option<metal_attention_chat::ToolCall>,
}

impl Reader {
    /// Reads a text of `model`, which the request calls `name`.
    pub fn new(model: &ModelLease, name: &str, received: Instant) -> Self {
        Self {
            replies: None,
            tokenizer: Arc::clone(&model.tokenizer),
            model: name.to_owned(),
            received,
            load: model.waited().unwrap_or_default(),
            context: None,
            call: None,
        }
    }

    /// Reads a message, as `replies` do.
    #[must_use]
    pub fn messages(self, replies: Replies) -> Self {
        Self { replies: Some(replies), ..self }
    }

    /// Reports the token ids of `prompt` and the answer, too.
    #[must_use]
    pub fn with_context(self, prompt: &[u32]) -> Self {
        Self { context: Some(prompt.to_vec()), ..self }
    }

    /// What an event adds.
    fn take(&mut self, event: Event) -> Result<Part, ApiError> {
        if let Some(context) = &mut self.context {
            match &event {
                Event::Token { id, .. } => context.push(*id),
                Event::Done { end_token, .. } => context.extend(end_token),
                Event::Prompt(_) | Event::Failed(_) => {}
            }
        }
        let mut part = Part::default();
        match &mut self.replies {
            Some(replies) => {
                for event in replies.take(0, event)? {
                    self.read(event, &mut part);
                }
            }
            None => match event {
                Event::Prompt(_) => {}
                Event::Token { id, text, logprobs } => {
                    part.content = text;
                    part.logprobs.extend(logprobs.map(|logprobs| self.logprob(id, &logprobs)));
                }
                Event::Done { reason, text, stop_string, usage, timings, end_token: _, end_logprobs: _ } => {
                    part.content = text;
                    part.end = Some(self.end(&EndReason::of_text(reason, stop_string)?, usage, timings));
                }
                Event::Failed(error) => return Err(error.into()),
            },
        }
        if part.end.is_some() {
            part.context = self.context.take();
        }
        Ok(part)
    }

    fn read(&mut self, event: ChatEvent, part: &mut Part) {
        match event {
            ChatEvent::Prompt(_) => {}
            ChatEvent::Answer(AnswerEvent::Content(text)) => part.content += &text,
            ChatEvent::Answer(AnswerEvent::Reasoning(text)) => part.thinking += &text,
            ChatEvent::Answer(AnswerEvent::CallStart { id, name, .. }) => {
                self.call = Some(metal_attention_chat::ToolCall::new(id, name, ""));
            }
            ChatEvent::Answer(AnswerEvent::CallArguments { delta, .. }) => {
                if let Some(call) = &mut self.call {
                    call.function.arguments += &delta;
                }
            }
            ChatEvent::Answer(AnswerEvent::CallEnd { index }) => {
                let Some(metal_attention_chat::ToolCall { id, function, .. }) = self.call.take() else { return };
                match serde_json::from_str(&function.arguments) {
                    Ok(arguments) => {
                        let function = Function { index, name: function.name, arguments };
                        part.calls.push(ToolCall { id, function });
                    }
                    // What is no object, as a call that the token limit cut short, is nothing to be called with.
                    Err(_) => part.content += &[&function.name, "(", &function.arguments, ")"].concat(),
                }
            }
            ChatEvent::Logprobs(id, logprobs) => part.logprobs.push(self.logprob(id, &logprobs)),
            ChatEvent::End(end) => part.end = Some(self.end(&end.reason, end.usage, end.timings)),
        }
    }

    fn logprob(&self, id: u32, logprobs: &TokenLogprobs) -> ChatTokenLogprob {
        ChatTokenLogprob::new(&self.tokenizer, id, logprobs)
    }

    fn end(&self, reason: &EndReason, usage: Usage, timings: RequestTimings) -> End {
        let done_reason = match reason {
            EndReason::End | EndReason::Calls | EndReason::StopString(_) => "stop",
            EndReason::Length => "length",
        };
        let metrics = Metrics {
            total_duration: nanoseconds(self.received.elapsed()),
            load_duration: nanoseconds(self.load),
            prompt_eval_count: usage.prompt_tokens,
            prompt_eval_duration: nanoseconds(timings.prefill),
            eval_count: usage.generated_tokens,
            eval_duration: nanoseconds(timings.decode),
        };
        End { done_reason, metrics: Some(metrics) }
    }
}

/// The answer that `reader` makes of the one text in `texts`: a stream, or the whole.
pub async fn respond<A: Answer>(mut texts: Texts, mut reader: Reader, streamed: bool) -> Result<Response, ApiError> {
    if streamed {
        return Ok(stream(texts, Frames::default(), Lines::<A> { reader, kind: PhantomData }));
    }
    let mut whole = Part::default();
    while let Some((_, event)) = texts.next().await {
        whole.add(reader.take(event)?);
    }
    Ok(axum::Json(A::new(&reader.model, whole)).into_response())
}

/// An answer as a stream of objects.
struct Lines<A> {
    reader: Reader,
    kind: PhantomData<fn() -> A>,
}

impl<A: Answer> Chunks for Lines<A> {
    const FRAMING: Framing = Framing::JsonLines;

    fn event(&mut self, _: usize, event: Event, out: &mut Frames) -> Result<(), ApiError> {
        let part = self.reader.take(event)?;
        // The last line says how the answer ended; clients pass over a text in it.
        let end = Part { end: part.end, context: part.context, ..Part::default() };
        let rest = Part { end: None, context: None, ..part };
        for part in [rest, end] {
            if !part.is_empty() {
                out.line(&A::new(&self.reader.model, part));
            }
        }
        Ok(())
    }

    fn end(&mut self, _: &mut Frames) {}

    fn error(&mut self, error: &ApiError, out: &mut Frames) {
        out.line(&ErrorBody::of(error));
    }
}
