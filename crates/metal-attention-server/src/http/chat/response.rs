//! The answer to a chat completion, whole and as a stream.

use std::sync::Arc;

use metal_attention::tokenizer::Tokenizer;
use metal_attention_chat::{AnswerEvent, ToolCallParser};
use serde::Serialize;
use utoipa::ToSchema;

use crate::http::ApiError;
use crate::http::answer::{Chunks, Out, finish_reason};
use crate::http::logprobs::{self, ChatLogprobs, ChatTokenLogprob, PromptLogprobs};
use crate::http::notes::Notes;
use crate::http::usage::Usage;
use metal_attention::scheduler::Event;

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
    /// The call's name, which the answer to it gives back.
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

impl ChatChoice {
    /// Adds what a text brought.
    pub fn add(&mut self, part: ChatPart) {
        let message = &mut self.message;
        match part {
            ChatPart::Reply(AnswerEvent::Content(text)) => message.content.get_or_insert_default().push_str(&text),
            ChatPart::Reply(AnswerEvent::Reasoning(text)) => {
                message.reasoning_content.get_or_insert_default().push_str(&text);
            }
            ChatPart::Reply(AnswerEvent::CallStart { id, name, .. }) => {
                let function = FunctionCall { name, arguments: String::new() };
                message.tool_calls.push(ToolCall { id, kind: "function", function });
            }
            ChatPart::Reply(AnswerEvent::CallArguments { index, delta }) => {
                if let Some(call) = message.tool_calls.get_mut(index) {
                    call.function.arguments += &delta;
                }
            }
            ChatPart::Reply(AnswerEvent::CallEnd { .. }) => {}
            ChatPart::Logprob(logprob) => self.logprobs.get_or_insert_default().content.push(*logprob),
            ChatPart::End(reason) => {
                self.finish_reason = Some(reason);
                if message.tool_calls.is_empty() {
                    message.content.get_or_insert_default();
                }
            }
        }
    }
}

/// What an event adds to a message.
pub enum ChatPart {
    /// Text, or a part of a call.
    Reply(AnswerEvent),
    /// A token's log probability.
    Logprob(Box<ChatTokenLogprob>),
    /// The message is complete.
    End(&'static str),
}

/// A text as it is read.
pub struct Reply {
    parser: ToolCallParser,
    /// Nothing after the first call is handed out.
    single_call: bool,
    called: bool,
}

impl Reply {
    /// A text that `parser` reads; `single_call`: it ends with its first call.
    pub fn new(parser: ToolCallParser, single_call: bool) -> Self {
        Self { parser, single_call, called: false }
    }

    /// What is handed out of `events`.
    fn parts(&mut self, events: Vec<AnswerEvent>) -> Vec<ChatPart> {
        let mut parts = Vec::new();
        for event in events {
            if self.single_call && self.called {
                break;
            }
            self.called |= matches!(event, AnswerEvent::CallEnd { .. });
            parts.push(ChatPart::Reply(event));
        }
        parts
    }
}

/// Makes OpenAI's objects of events.
pub struct ChatWriter {
    /// The answer's name.
    pub id: String,
    /// When the request came, in seconds since 1970.
    pub created: u64,
    /// The model that answers.
    pub model: String,
    /// Spells tokens.
    pub tokenizer: Arc<Tokenizer>,
    /// What each text is so far.
    pub replies: Vec<Reply>,
    /// Whether log probabilities are wanted.
    pub with_logprobs: bool,
    /// Tokens of the texts that have ended.
    pub usage: Usage,
    /// The token ids of the prompt.
    pub prompt: Arc<[u32]>,
    /// Where the prompt's log probabilities are wanted: for how many of the likeliest tokens, and what there is of them.
    pub prompt_logprobs: Option<(usize, Option<Vec<Option<PromptLogprobs>>>)>,
    /// How the request was read.
    pub notes: Notes,
}

impl ChatWriter {
    /// The messages before there is anything in them.
    pub fn choices(&self) -> Vec<ChatChoice> {
        let message =
            || AssistantMessage { role: "assistant", content: None, reasoning_content: None, tool_calls: Vec::new() };
        let logprobs = || self.with_logprobs.then(ChatLogprobs::default);
        (0..self.replies.len())
            .map(|index| ChatChoice { index, message: message(), logprobs: logprobs(), finish_reason: None })
            .collect()
    }

    /// What an event of text `i` adds to its message.
    pub fn take(&mut self, i: usize, event: Event) -> Result<Vec<ChatPart>, ApiError> {
        let reply = &mut self.replies[i];
        match event {
            Event::Prompt(logprobs) => {
                if let Some((n_top, known)) = &mut self.prompt_logprobs {
                    *known = Some(logprobs::of_prompt(&self.tokenizer, &self.prompt, &logprobs, *n_top));
                }
                Ok(Vec::new())
            }
            Event::Token { id, text, logprobs } => {
                let was_thinking = reply.parser.is_thinking();
                let events = reply.parser.push_token(&self.tokenizer, id, &text);
                if was_thinking || reply.parser.is_thinking() {
                    self.usage.add_reasoning_token();
                }
                let mut parts = reply.parts(events);
                if let Some(logprobs) = logprobs {
                    let logprob = ChatTokenLogprob::new(&self.tokenizer, id, &logprobs);
                    parts.push(ChatPart::Logprob(Box::new(logprob)));
                }
                Ok(parts)
            }
            Event::Done { reason, text, usage, .. } => {
                self.usage.add(usage, i == 0);
                let reason = finish_reason(reason)?;
                let mut events = reply.parser.push(&text);
                events.extend(reply.parser.finish());
                let mut parts = reply.parts(events);
                let reason = if reply.parser.n_calls() > 0 && reason == "stop" { "tool_calls" } else { reason };
                parts.push(ChatPart::End(reason));
                Ok(parts)
            }
            Event::Failed(error) => Err(error.into()),
        }
    }

    /// The whole answer.
    pub fn answer(&self, choices: Vec<ChatChoice>) -> ChatCompletion {
        ChatCompletion {
            id: self.id.clone(),
            object: "chat.completion",
            created: self.created,
            model: self.model.clone(),
            choices,
            prompt_logprobs: self.prompt_logprobs.as_ref().and_then(|(_, known)| known.clone()),
            usage: self.usage,
        }
    }

    /// Begins a stream: tells who speaks.
    pub fn begin(&self, out: &mut Out) {
        for index in 0..self.replies.len() {
            let delta = Delta { role: Some("assistant"), content: Some(String::new()), ..Default::default() };
            out.push(&self.chunk(Some(ChunkChoice { index, delta, logprobs: None, finish_reason: None }), None));
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
    /// Makes the objects.
    pub writer: ChatWriter,
    /// Whether the stream ends with the number of tokens.
    pub include_usage: bool,
}

impl Chunks for ChatChunks {
    fn event(&mut self, index: usize, event: Event, out: &mut Out) -> Result<(), ApiError> {
        for part in self.writer.take(index, event)? {
            let choice = ChunkChoice { index, ..Default::default() };
            let choice = match part {
                ChatPart::Reply(event) => match Delta::of(event) {
                    Some(delta) => ChunkChoice { delta, ..choice },
                    None => continue,
                },
                ChatPart::Logprob(one) => {
                    ChunkChoice { logprobs: Some(ChatLogprobs { content: vec![*one] }), ..choice }
                }
                ChatPart::End(reason) => ChunkChoice { finish_reason: Some(reason), ..choice },
            };
            out.push(&self.writer.chunk(Some(choice), None));
        }
        Ok(())
    }

    fn end(&mut self, out: &mut Out) {
        if self.include_usage {
            out.push(&self.writer.chunk(None, Some(self.writer.usage)));
        }
    }
}
