//! The answer to a chat completion, whole and as a stream.

use std::sync::Arc;

use metal_attention::scheduler::{Event, TokenLogprobs};
use metal_attention::tokenizer::Tokenizer;
use metal_attention_chat::AnswerEvent;
use serde::Serialize;
use utoipa::ToSchema;

use crate::http::job::answer::AssembledAnswer;
use crate::http::job::choice_parser::{ChatEnd, ChatEvent, ChoiceParsers, EndReason};
use crate::http::models::ModelLease;
use crate::http::notes::Notes;
use crate::http::openai::logprobs::{self, ChatLogprobs, ChatTokenLogprob, PromptLogprobs};
use crate::http::openai::usage::Usage;
use crate::http::streaming::{ChunkWriter, Frames};
use crate::http::{ApiError, ids, now};

/// The answer.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct ChatCompletion {
    /// The answer's name.
    id: String,
    /// `chat.completion`.
    object: &'static str,
    /// When the request came, in seconds since 1970.
    created: u64,
    /// The model that answered.
    model: String,
    /// The messages.
    choices: Vec<ChatChoice>,
    /// Log probabilities of the prompt, where they were asked for, by tokens' ids; null for its first token.
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<Vec<Option<PromptLogprobs>>>,
    /// Tokens it took.
    usage: Usage,
}

/// One of the messages.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct ChatChoice {
    /// Its number.
    index: usize,
    /// The message.
    message: AssistantMessage,
    /// Log probabilities, where they were asked for.
    #[schema(required)]
    logprobs: Option<ChatLogprobs>,
    /// Why it ended: `stop`, `length` or `tool_calls`.
    #[schema(required)]
    finish_reason: Option<&'static str>,
}

/// A message of the model.
#[derive(Debug, Clone, Serialize, ToSchema)]
struct AssistantMessage {
    /// `assistant`.
    role: &'static str,
    /// The text; null where it only calls functions.
    #[schema(required)]
    content: Option<String>,
    /// What the model thought before it answered.
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<String>,
    /// The functions that it calls.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(required = false)]
    tool_calls: Vec<ToolCall>,
}

/// A call of a function.
#[derive(Debug, Clone, Serialize, ToSchema)]
struct ToolCall {
    /// The call's id, which its result repeats.
    id: String,
    /// `function`.
    #[serde(rename = "type")]
    kind: &'static str,
    /// What is called, and with what.
    function: FunctionCall,
}

/// What is called, and with what.
#[derive(Debug, Clone, Serialize, ToSchema)]
struct FunctionCall {
    /// The function.
    name: String,
    /// The arguments: a JSON object as text.
    arguments: String,
}

/// Makes OpenAI's objects of a job's events.
pub struct ChatWriter {
    id: String,
    created: u64,
    model: String,
    tokenizer: Arc<Tokenizer>,
    /// The token ids of the prompt.
    prompt: Arc<[u32]>,
    with_logprobs: bool,
    /// How many of the likeliest tokens are reported at each place of the prompt.
    prompt_logprobs: Option<usize>,
    /// Tokens of the answers that have ended.
    usage: Usage,
}

impl ChatWriter {
    /// Answers of `model` to `prompt`; `with_logprobs` and `prompt_logprobs`: which log probabilities are reported.
    pub fn new(
        model: &ModelLease,
        prompt: &Arc<[u32]>,
        notes: &mut Notes,
        with_logprobs: bool,
        prompt_logprobs: Option<usize>,
    ) -> Self {
        Self {
            id: ids::unique("chatcmpl-"),
            created: now(),
            model: model.answer_name(notes),
            tokenizer: Arc::clone(&model.tokenizer),
            prompt: Arc::clone(prompt),
            with_logprobs,
            prompt_logprobs,
            usage: Usage::default(),
        }
    }

    /// Answer number `index` has ended.
    fn ended(&mut self, index: usize, end: &ChatEnd) -> &'static str {
        self.usage.add(end.usage, index == 0);
        self.usage.add_reasoning_tokens(end.reasoning_tokens);
        finish_reason(&end.reason)
    }

    fn logprob(&self, id: u32, logprobs: &TokenLogprobs) -> ChatTokenLogprob {
        ChatTokenLogprob::new(&self.tokenizer, id, logprobs)
    }

    /// The whole completion.
    pub fn completion(mut self, answers: &[AssembledAnswer]) -> ChatCompletion {
        let known = answers.first().and_then(|answer| answer.prompt_logprobs.as_deref());
        let of_prompt = |(logprobs, n_top)| logprobs::of_prompt(&self.tokenizer, &self.prompt, logprobs, n_top);
        let prompt_logprobs = known.zip(self.prompt_logprobs).map(of_prompt);
        let choices = answers.iter().enumerate().map(|(index, answer)| self.choice(index, answer)).collect();
        ChatCompletion {
            id: self.id,
            object: "chat.completion",
            created: self.created,
            model: self.model,
            choices,
            prompt_logprobs,
            usage: self.usage,
        }
    }

    fn choice(&mut self, index: usize, answer: &AssembledAnswer) -> ChatChoice {
        let finish_reason = answer.end.as_ref().map(|end| self.ended(index, end));
        let content = answer.logprobs.iter().map(|(id, logprobs)| self.logprob(*id, logprobs)).collect();
        let tool_calls: Vec<ToolCall> = answer.calls().map(ToolCall::of).collect();
        let message = AssistantMessage {
            role: "assistant",
            content: answer.text().or_else(|| tool_calls.is_empty().then(String::new)),
            reasoning_content: answer.thoughts(),
            tool_calls,
        };
        let logprobs = self.with_logprobs.then_some(ChatLogprobs { content });
        ChatChoice { index, message, logprobs, finish_reason }
    }

    /// Begins a stream of `n` answers: says whose they are.
    pub fn begin(&self, n: usize, out: &mut Frames) {
        for index in 0..n {
            let delta = Delta { role: Some("assistant"), content: Some(String::new()), ..Default::default() };
            out.data(&self.chunk(Some(ChunkChoice { index, delta, logprobs: None, finish_reason: None }), None));
        }
    }

    fn chunk(&self, choice: Option<ChunkChoice>, usage: Option<Usage>) -> ChatChunk {
        ChatChunk {
            id: self.id.clone(),
            object: "chat.completion.chunk",
            created: self.created,
            model: self.model.clone(),
            choices: choice.into_iter().collect(),
            usage,
        }
    }
}

impl ToolCall {
    fn of(call: &metal_attention_chat::ToolCall) -> Self {
        let function = FunctionCall { name: call.function.name.clone(), arguments: call.function.arguments.clone() };
        Self { id: call.id.clone(), kind: "function", function }
    }
}

/// OpenAI's name for why an answer ended.
pub fn finish_reason(reason: &EndReason) -> &'static str {
    match reason {
        EndReason::End | EndReason::StopString(_) => "stop",
        EndReason::Calls => "tool_calls",
        EndReason::Length | EndReason::ContextFull => "length",
    }
}

/// A part of a streamed answer.
#[derive(Debug, Clone, Serialize)]
pub struct ChatChunk {
    id: String,
    object: &'static str,
    created: u64,
    model: String,
    choices: Vec<ChunkChoice>,
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Usage>,
}

/// What is new of a message.
#[derive(Debug, Clone, Default, Serialize)]
struct ChunkChoice {
    index: usize,
    delta: Delta,
    logprobs: Option<ChatLogprobs>,
    finish_reason: Option<&'static str>,
}

/// What is new of a message.
#[derive(Debug, Clone, Default, Serialize)]
struct Delta {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<CallDelta>,
}

/// What is new of a call.
#[derive(Debug, Clone, Serialize)]
struct CallDelta {
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
    function: FunctionDelta,
}

/// What is new of a call.
#[derive(Debug, Clone, Serialize)]
struct FunctionDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    arguments: String,
}

impl Delta {
    /// What `event` adds; `None` where that is nothing.
    fn of(event: AnswerEvent) -> Option<Self> {
        let call = |index, id: Option<String>, name, arguments| Self {
            tool_calls: vec![CallDelta {
                index,
                kind: id.is_some().then_some("function"),
                id,
                function: FunctionDelta { name, arguments },
            }],
            ..Self::default()
        };
        match event {
            AnswerEvent::Content(text) => Some(Self { content: Some(text), ..Self::default() }),
            AnswerEvent::Reasoning(text) => Some(Self { reasoning_content: Some(text), ..Self::default() }),
            AnswerEvent::CallStart { index, id, name } => Some(call(index, Some(id), Some(name), String::new())),
            AnswerEvent::CallArguments { index, delta } => Some(call(index, None, None, delta)),
            AnswerEvent::CallEnd { .. } => None,
        }
    }
}

/// A chat completion as a stream.
pub struct ChatChunks {
    parsers: ChoiceParsers,
    writer: ChatWriter,
    /// Whether the stream ends with the number of tokens.
    include_usage: bool,
}

impl ChatChunks {
    /// A stream of what `parsers` read, as `writer` writes it.
    pub fn new(parsers: ChoiceParsers, writer: ChatWriter, include_usage: bool) -> Self {
        Self { parsers, writer, include_usage }
    }
}

impl ChunkWriter for ChatChunks {
    fn event(&mut self, index: usize, event: Event, out: &mut Frames) -> Result<(), ApiError> {
        for part in self.parsers.parse(index, event)? {
            let choice = ChunkChoice { index, ..Default::default() };
            let choice = match part {
                // Streams report no log probabilities of the prompt, and no ends of calls.
                ChatEvent::Prompt(_) | ChatEvent::CutCall => continue,
                ChatEvent::Answer(event) => match Delta::of(event) {
                    Some(delta) => ChunkChoice { delta, ..choice },
                    None => continue,
                },
                ChatEvent::Logprobs(id, logprobs) => {
                    let content = vec![self.writer.logprob(id, &logprobs)];
                    ChunkChoice { logprobs: Some(ChatLogprobs { content }), ..choice }
                }
                ChatEvent::End(end) => ChunkChoice { finish_reason: Some(self.writer.ended(index, &end)), ..choice },
            };
            out.data(&self.writer.chunk(Some(choice), None));
        }
        Ok(())
    }

    fn end(&mut self, out: &mut Frames) {
        if self.include_usage {
            out.data(&self.writer.chunk(None, Some(self.writer.usage)));
        }
        out.done();
    }

    fn error(&mut self, error: &ApiError, out: &mut Frames) {
        out.data(&error.body());
        out.done();
    }
}
