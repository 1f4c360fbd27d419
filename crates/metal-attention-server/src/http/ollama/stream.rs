//! Writes the responses of `/api/chat` and `/api/generate`, whole or as one JSON object on each line.
//!
//! Data flow: [`OllamaAnswerReader`] parses the scheduler's events of the only sequence into [`AnswerDelta`]s; the endpoint's
//! [`AnswerObject`] makes an object of each, or of their sum.

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
use crate::http::job::choice_parser::{ChatEvent, ChoiceParsers, EndReason};
use crate::http::models::ModelLease;
use crate::http::openai::logprobs::ChatTokenLogprob;
use crate::http::streaming::{ChunkWriter, Frames, Framing, RunningSequences, stream};

/// The present time, in ollama's format.
pub fn now() -> String {
    rfc3339(Timestamp::now())
}

/// Formats a time as ollama does, with nanoseconds.
pub fn rfc3339(time: Timestamp) -> String {
    format!("{time:.9}")
}

/// A call of a function.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
#[schema(as = OllamaToolCall)]
pub struct ToolCall {
    /// The id of the call.
    id: String,
    /// The function and its arguments.
    function: Function,
}

/// The function and its arguments.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
#[schema(as = OllamaFunctionCall)]
struct Function {
    /// The index of the call.
    index: usize,
    /// The function.
    name: String,
    /// The arguments.
    #[schema(value_type = std::collections::BTreeMap<String, Value>)]
    arguments: Map<String, Value>,
}

/// The end of an answer. Times are in nanoseconds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
#[schema(as = OllamaEnd)]
pub struct AnswerEnd {
    /// The reason: `stop` or `length`; `load` and `unload` if nothing was generated.
    done_reason: &'static str,
    /// The time from the request to the end of the answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    total_duration: Option<u64>,
    /// The time to load the model.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    load_duration: Option<u64>,
    /// Tokens of the prompt, including those found in the prefix cache.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    prompt_eval_count: Option<usize>,
    /// The time from the start of the prompt to the first token.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    prompt_eval_duration: Option<u64>,
    /// Generated tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    eval_count: Option<usize>,
    /// The time from the first token to the end.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    eval_duration: Option<u64>,
}

/// A duration in nanoseconds.
pub fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

impl AnswerEnd {
    /// The end for a request that only loads the model.
    const LOAD: Self = Self::without_text("load");
    /// The end for a request that unloads the model.
    const UNLOAD: Self = Self::without_text("unload");

    const fn without_text(done_reason: &'static str) -> Self {
        Self {
            done_reason,
            total_duration: None,
            load_duration: None,
            prompt_eval_count: None,
            prompt_eval_duration: None,
            eval_count: None,
            eval_duration: None,
        }
    }
}

/// The part of an answer that one event adds, or the whole.
#[derive(Debug, Default)]
pub struct AnswerDelta {
    /// Text.
    pub content: String,
    /// Reasoning.
    pub thinking: String,
    /// Complete tool calls.
    pub calls: Vec<ToolCall>,
    /// Log probabilities of tokens.
    pub logprobs: Vec<ChatTokenLogprob>,
    /// The token ids of prompt and answer, at the end, if requested.
    pub context: Option<Vec<u32>>,
    /// The end, in the last part.
    pub end: Option<AnswerEnd>,
}

impl AnswerDelta {
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

/// The JSON object of an endpoint: the whole answer, or the part that a line adds.
pub trait AnswerObject: Serialize + Send + 'static {
    /// The object with `part`. `model`: the model's name in the request.
    fn new(model: &str, part: AnswerDelta) -> Self;
}

/// The response to a request that only loads or unloads the model.
pub fn without_text<A: AnswerObject>(model: &str, is_loaded: bool) -> Response {
    let end = if is_loaded { AnswerEnd::LOAD } else { AnswerEnd::UNLOAD };
    axum::Json(A::new(model, AnswerDelta { end: Some(end), ..AnswerDelta::default() })).into_response()
}

/// Parses the events of a sequence.
pub struct OllamaAnswerReader {
    /// Splits reasoning and calls from the text; `None`: the text is plain.
    parsers: Option<ChoiceParsers>,
    /// The model's tokenizer, for the texts of tokens.
    tokenizer: Arc<Tokenizer>,
    /// The model's name in the request.
    model: String,
    /// When the request was read.
    received: Instant,
    /// The time to load the model.
    load: Duration,
    /// The token ids of prompt and answer so far, if requested.
    context: Option<Vec<u32>>,
    /// The tool call that is being generated.
    call: Option<metal_attention_chat::ToolCall>,
}

impl OllamaAnswerReader {
    /// A reader of plain text of `model`, which the request calls `name`.
    pub fn new(model: &ModelLease, name: &str, received: Instant) -> Self {
        Self {
            parsers: None,
            tokenizer: Arc::clone(&model.tokenizer),
            model: name.to_owned(),
            received,
            load: model.waited().unwrap_or_default(),
            context: None,
            call: None,
        }
    }

    /// Parses a chat message with `parsers` instead.
    #[must_use]
    pub fn messages(self, parsers: ChoiceParsers) -> Self {
        Self { parsers: Some(parsers), ..self }
    }

    /// Also reports the token ids of `prompt` and the answer.
    #[must_use]
    pub fn with_context(self, prompt: &[u32]) -> Self {
        Self { context: Some(prompt.to_vec()), ..self }
    }

    /// Returns what an event adds.
    fn parse(&mut self, event: Event) -> Result<AnswerDelta, ApiError> {
        if let Some(context) = &mut self.context {
            match &event {
                Event::Token { id, .. } => context.push(*id),
                Event::Done { end_token, .. } => context.extend(end_token),
                Event::Prompt(_) | Event::Failed(_) => {}
            }
        }
        let mut part = AnswerDelta::default();
        match &mut self.parsers {
            Some(parsers) => {
                for event in parsers.parse(0, event)? {
                    self.add_chat_event(event, &mut part);
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
                    part.end = Some(self.end(&EndReason::of_sequence(reason, stop_string)?, usage, timings));
                }
                Event::Failed(error) => return Err(error.into()),
            },
        }
        if part.end.is_some() {
            part.context = self.context.take();
        }
        Ok(part)
    }

    /// Adds the contents of a chat event to `part`.
    fn add_chat_event(&mut self, event: ChatEvent, part: &mut AnswerDelta) {
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
                    Err(_) => part.content += &call_text(&function),
                }
            }
            ChatEvent::CutCall => part.content.extend(self.call.take().map(|call| call_text(&call.function))),
            ChatEvent::Logprobs(id, logprobs) => part.logprobs.push(self.logprob(id, &logprobs)),
            ChatEvent::End(end) => part.end = Some(self.end(&end.reason, end.usage, end.timings)),
        }
    }

    fn logprob(&self, id: u32, logprobs: &TokenLogprobs) -> ChatTokenLogprob {
        ChatTokenLogprob::new(&self.tokenizer, id, logprobs)
    }

    /// The end of the answer, with its counts and times.
    fn end(&self, reason: &EndReason, usage: Usage, timings: RequestTimings) -> AnswerEnd {
        let done_reason = match reason {
            EndReason::End | EndReason::Calls | EndReason::StopString(_) => "stop",
            EndReason::Length | EndReason::ContextFull => "length",
        };
        AnswerEnd {
            done_reason,
            total_duration: Some(nanoseconds(self.received.elapsed())),
            load_duration: Some(nanoseconds(self.load)),
            prompt_eval_count: Some(usage.prompt_tokens),
            prompt_eval_duration: Some(nanoseconds(timings.prefill)),
            eval_count: Some(usage.generated_tokens),
            eval_duration: Some(nanoseconds(timings.decode)),
        }
    }
}

/// Formats a call as text: it is cut off, or its arguments are no object, so it must not be executed.
fn call_text(call: &metal_attention_chat::FunctionCall) -> String {
    format!("{}({})", call.name, call.arguments)
}

/// Returns the response to the only sequence of `sequences`: streamed, or whole.
pub async fn respond<A: AnswerObject>(
    mut sequences: RunningSequences,
    mut reader: OllamaAnswerReader,
    streamed: bool,
) -> Result<Response, ApiError> {
    if streamed {
        return Ok(stream(sequences, Frames::default(), AnswerLines::<A> { reader, kind: PhantomData }));
    }
    let mut whole = AnswerDelta::default();
    while let Some((_, event)) = sequences.next().await {
        whole.add(reader.parse(event)?);
    }
    Ok(axum::Json(A::new(&reader.model, whole)).into_response())
}

/// Writes an answer as lines of JSON.
struct AnswerLines<A> {
    /// Parses the events.
    reader: OllamaAnswerReader,
    /// The endpoint's object.
    kind: PhantomData<fn() -> A>,
}

impl<A: AnswerObject> ChunkWriter for AnswerLines<A> {
    const FRAMING: Framing = Framing::JsonLines;

    fn event(&mut self, _: usize, event: Event, out: &mut Frames) -> Result<(), ApiError> {
        let part = self.reader.parse(event)?;
        // The end is a line of its own, since clients ignore text in the last line.
        let end = AnswerDelta { end: part.end, context: part.context, ..AnswerDelta::default() };
        let rest = AnswerDelta { end: None, context: None, ..part };
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

#[cfg(test)]
mod tests {
    use metal_attention::Model;
    use metal_attention::scheduler::FinishReason;
    use metal_attention_chat::{Tool, ToolCallParser, ToolFormat};
    use serde_json::{Value, json};

    use super::*;
    use crate::http::job::choice_parser::ChoiceParser;

    /// Text, calls and end of an answer that is generated in `pieces`.
    fn parts(pieces: &[&str], reason: FinishReason) -> Vec<Value> {
        let tokenizer = Model::built_in().unwrap().tokenizer().unwrap();
        let tool = json!({"type": "function", "function": {"name": "now"}});
        let parser = ToolCallParser::new(ToolFormat::Hermes, &[Tool::try_from(tool).unwrap()]);
        let mut reader = OllamaAnswerReader {
            parsers: Some(ChoiceParsers::new(Arc::clone(&tokenizer), vec![ChoiceParser::new(parser, false)])),
            tokenizer,
            model: "m".into(),
            received: Instant::now(),
            load: Duration::ZERO,
            context: None,
            call: None,
        };
        let token = |piece: &&str| Event::Token { id: 400, text: (*piece).to_owned(), logprobs: None };
        let done = Event::Done {
            reason,
            text: String::new(),
            stop_string: None,
            end_token: None,
            end_logprobs: None,
            usage: Usage::default(),
            timings: RequestTimings::default(),
        };
        let events = pieces.iter().map(token).chain([done]);
        let parts = events.map(|event| reader.parse(event).unwrap()).filter(|part| !part.is_empty());
        let json = |part: AnswerDelta| {
            let functions: Vec<_> = part.calls.into_iter().map(|call| call.function).collect();
            json!([part.content, functions, part.end.map(|end| end.done_reason)])
        };
        parts.map(json).collect()
    }

    #[test]
    fn a_call_is_sent_when_it_is_complete() {
        let pieces = [
            "Let me see.",
            "<tool_call>{\"name\": \"now\", ",
            "\"arguments\": {\"zone\": \"",
            "CET\"}}",
            "</tool_call>",
        ];
        let call = json!({"index": 0, "name": "now", "arguments": {"zone": "CET"}});
        assert_eq!(
            parts(&pieces, FinishReason::EndOfText),
            [json!(["Let me see.", [], null]), json!(["", [call], null]), json!(["", [], "stop"])]
        );
    }

    #[test]
    fn a_call_that_is_cut_off_is_text() {
        let pieces = ["<tool_call>{\"name\": \"now\", \"arguments\": {\"zone\": \"", "CE"];
        let [last] = &parts(&pieces, FinishReason::Length)[..] else { panic!() };
        assert!(last[0].as_str().unwrap().starts_with("now({\"zone\":"), "{last}");
        assert_eq!((&last[1], &last[2]), (&json!([]), &json!("length")));
    }

    #[test]
    fn times_have_nanoseconds() {
        let time: Timestamp = "2024-06-19T19:22:45.5Z".parse().unwrap();
        assert_eq!(rfc3339(time), "2024-06-19T19:22:45.500000000Z");
    }
}
