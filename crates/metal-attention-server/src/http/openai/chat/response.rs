//! The response of `/v1/chat/completions`, whole and as a stream.

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

/// The response.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct ChatCompletion {
    /// The id of the response.
    id: String,
    /// `chat.completion`.
    object: &'static str,
    /// When the request arrived, in seconds since 1970.
    created: u64,
    /// The model that answered.
    model: String,
    /// The messages, one for each choice.
    choices: Vec<ChatChoice>,
    /// Log probabilities of the prompt, if requested, by token ids; null for its first token.
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<Vec<Option<PromptLogprobs>>>,
    /// Tokens of the prompt and of all choices.
    usage: Usage,
}

/// One of the choices.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct ChatChoice {
    /// Its index.
    index: usize,
    /// The message.
    message: AssistantMessage,
    /// Log probabilities of its tokens, if requested.
    #[schema(required)]
    logprobs: Option<ChatLogprobs>,
    /// The reason why it ended: `stop`, `length` or `tool_calls`.
    #[schema(required)]
    finish_reason: Option<&'static str>,
}

/// A message of the model.
#[derive(Debug, Clone, Serialize, ToSchema)]
struct AssistantMessage {
    /// `assistant`.
    role: &'static str,
    /// The text; null if it only calls functions.
    #[schema(required)]
    content: Option<String>,
    /// The model's reasoning before the answer.
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
    /// The function and its arguments.
    function: FunctionCall,
}

/// The function and its arguments.
#[derive(Debug, Clone, Serialize, ToSchema)]
struct FunctionCall {
    /// The function's name.
    name: String,
    /// The arguments: a JSON object as a string.
    arguments: String,
}

/// Writes OpenAI's objects from the events of a job's choices.
pub struct ChatWriter {
    /// The id of the response.
    id: String,
    /// When the request arrived, in seconds since 1970.
    created: u64,
    /// The name of the model in the response.
    model: String,
    /// The model's tokenizer, for the texts of tokens.
    tokenizer: Arc<Tokenizer>,
    /// The token ids of the prompt.
    prompt: Arc<[u32]>,
    /// Whether log probabilities of generated tokens are reported.
    with_logprobs: bool,
    /// The number of most likely tokens reported at each position of the prompt; `None`: none.
    prompt_logprobs: Option<usize>,
    /// Tokens of the choices that have ended.
    usage: Usage,
}

impl ChatWriter {
    /// A writer for answers of `model` to `prompt`. `with_logprobs`, `prompt_logprobs`: the log probabilities that are
    /// reported.
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

    /// Adds the tokens of choice `index`, which has ended. Returns the reason in OpenAI's words.
    fn ended(&mut self, index: usize, end: &ChatEnd) -> &'static str {
        self.usage.add(end.usage, index == 0);
        self.usage.add_reasoning_tokens(end.reasoning_tokens);
        finish_reason(&end.reason)
    }

    fn logprob(&self, id: u32, logprobs: &TokenLogprobs) -> ChatTokenLogprob {
        ChatTokenLogprob::new(&self.tokenizer, id, logprobs)
    }

    /// Returns the whole response. `answers`: one for each choice, by index.
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

    /// The object of choice `index`.
    fn choice(&mut self, index: usize, answer: &AssembledAnswer) -> ChatChoice {
        let finish_reason = answer.end.as_ref().map(|end| self.ended(index, end));
        let content = answer.logprobs.iter().map(|(id, logprobs)| self.logprob(*id, logprobs)).collect();
        let tool_calls: Vec<ToolCall> = answer.calls().map(ToolCall::of).collect();
        let message = AssistantMessage {
            role: "assistant",
            content: answer.text().or_else(|| tool_calls.is_empty().then(String::new)),
            reasoning_content: answer.reasoning(),
            tool_calls,
        };
        let logprobs = self.with_logprobs.then_some(ChatLogprobs { content });
        ChatChoice { index, message, logprobs, finish_reason }
    }

    /// Writes the first chunk of each of `n` choices, with the role.
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

/// OpenAI's word for the reason why a choice ended.
pub fn finish_reason(reason: &EndReason) -> &'static str {
    match reason {
        EndReason::End | EndReason::StopString(_) => "stop",
        EndReason::Calls => "tool_calls",
        EndReason::Length | EndReason::ContextFull => "length",
    }
}

/// A chunk of a streamed response.
#[derive(Debug, Clone, Serialize)]
pub struct ChatChunk {
    /// The id of the response.
    id: String,
    /// `chat.completion.chunk`.
    object: &'static str,
    /// When the request arrived, in seconds since 1970.
    created: u64,
    /// The name of the model.
    model: String,
    /// One choice, or none in the chunk with the usage.
    choices: Vec<ChunkChoice>,
    /// Tokens of the request, in the last chunk if requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Usage>,
}

/// The part of a choice that a chunk adds.
#[derive(Debug, Clone, Default, Serialize)]
struct ChunkChoice {
    /// Its index.
    index: usize,
    /// The added part of the message.
    delta: Delta,
    /// Log probabilities of added tokens.
    logprobs: Option<ChatLogprobs>,
    /// The reason why it ended, in its last chunk.
    finish_reason: Option<&'static str>,
}

/// The part of a message that a chunk adds.
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

/// The part of a tool call that a chunk adds.
#[derive(Debug, Clone, Serialize)]
struct CallDelta {
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
    function: FunctionDelta,
}

/// The part of a function call that a chunk adds.
#[derive(Debug, Clone, Serialize)]
struct FunctionDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    arguments: String,
}

impl Delta {
    /// Returns what `event` adds to the message; `None` for the end of a call, which has no chunk.
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

/// Writes a chat completion as a stream of chunks.
pub struct ChatChunks {
    /// The parsers of the choices' events.
    parsers: ChoiceParsers,
    /// Makes the chunks.
    writer: ChatWriter,
    /// Whether the stream ends with the number of tokens.
    include_usage: bool,
}

impl ChatChunks {
    /// A stream of what `parsers` parse and `writer` writes.
    pub fn new(parsers: ChoiceParsers, writer: ChatWriter, include_usage: bool) -> Self {
        Self { parsers, writer, include_usage }
    }
}

impl ChunkWriter for ChatChunks {
    fn event(&mut self, index: usize, event: Event, out: &mut Frames) -> Result<(), ApiError> {
        for part in self.parsers.parse(index, event)? {
            let choice = ChunkChoice { index, ..Default::default() };
            let choice = match part {
                // Streams have neither log probabilities of the prompt nor ends of calls.
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
