//! What the scheduler's events mean in a conversation: text, thoughts and calls.

use std::sync::Arc;

use metal_attention::scheduler::{Event, FinishReason, RequestTimings, TokenLogprobs, Usage};
use metal_attention::tokenizer::Tokenizer;
use metal_attention_chat::{AnswerEvent, ToolCallParser};

use crate::http::ApiError;

/// What an event adds to an answer.
#[derive(Debug)]
pub enum ChatEvent {
    /// The prompt was evaluated: the log probabilities of its tokens after the first.
    Prompt(Vec<TokenLogprobs>),
    /// Text, thoughts, or a part of a call.
    Answer(AnswerEvent),
    /// The log probabilities of token `id`.
    Logprobs(u32, TokenLogprobs),
    /// The answer is complete. It is the last event.
    End(ChatEnd),
}

/// How an answer ended.
#[derive(Debug)]
pub struct ChatEnd {
    /// Why.
    pub reason: EndReason,
    /// Tokens that it took.
    pub usage: Usage,
    /// Tokens of thoughts, their marks included; `None`: there were no thoughts.
    pub reasoning_tokens: Option<usize>,
    /// The time that it took.
    pub timings: RequestTimings,
}

/// Why an answer ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EndReason {
    /// The model ended it.
    End,
    /// The model ended it, or its first call did, and it calls functions.
    Calls,
    /// This stop string.
    StopString(String),
    /// As many tokens as were asked for, or as the context has room for.
    Length,
}

impl EndReason {
    /// Of a text that ended by itself; an error where it did not.
    pub fn of_text(reason: FinishReason, stop_string: Option<String>) -> Result<Self, ApiError> {
        match reason {
            FinishReason::EndOfText => Ok(Self::End),
            FinishReason::StopString => Ok(Self::StopString(stop_string.unwrap_or_default())),
            FinishReason::Length | FinishReason::ContextFull => Ok(Self::Length),
            FinishReason::Deadline => Err(ApiError::deadline()),
            FinishReason::Cancelled => Err(ApiError::shutting_down()),
        }
    }
}

/// An answer as it is read.
pub struct Reply {
    parser: ToolCallParser,
    /// Nothing after the first call is handed out.
    single_call: bool,
    called: bool,
    reasoning_tokens: Option<usize>,
}

impl Reply {
    /// An answer that `parser` reads; `single_call`: it ends with its first call.
    pub fn new(parser: ToolCallParser, single_call: bool) -> Self {
        Self { parser, single_call, called: false, reasoning_tokens: None }
    }

    /// What is handed out of `events`.
    fn hand_out(&mut self, events: Vec<AnswerEvent>) -> Vec<ChatEvent> {
        let mut parts = Vec::new();
        for event in events {
            if self.single_call && self.called {
                break;
            }
            self.called |= matches!(event, AnswerEvent::CallEnd { .. });
            parts.push(ChatEvent::Answer(event));
        }
        parts
    }
}

/// The answers of one job as they are read.
pub struct Replies {
    tokenizer: Arc<Tokenizer>,
    replies: Vec<Reply>,
}

impl Replies {
    /// Answers whose tokens `tokenizer` spells.
    pub fn new(tokenizer: Arc<Tokenizer>, replies: Vec<Reply>) -> Self {
        Self { tokenizer, replies }
    }

    /// How many answers there are.
    pub fn len(&self) -> usize {
        self.replies.len()
    }

    /// What an event of answer `i` adds. An error is the end of the request.
    pub fn take(&mut self, i: usize, event: Event) -> Result<Vec<ChatEvent>, ApiError> {
        let reply = &mut self.replies[i];
        match event {
            Event::Prompt(logprobs) => Ok(vec![ChatEvent::Prompt(logprobs)]),
            Event::Token { id, text, logprobs } => {
                let was_thinking = reply.parser.is_thinking();
                let events = reply.parser.push_token(&self.tokenizer, id, &text);
                if was_thinking || reply.parser.is_thinking() {
                    *reply.reasoning_tokens.get_or_insert_default() += 1;
                }
                let mut parts = reply.hand_out(events);
                parts.extend(logprobs.map(|logprobs| ChatEvent::Logprobs(id, logprobs)));
                Ok(parts)
            }
            Event::Done { reason, text, stop_string, usage, timings, end_token: _, end_logprobs: _ } => {
                let reason = EndReason::of_text(reason, stop_string)?;
                let mut events = reply.parser.push(&text);
                events.extend(reply.parser.finish());
                let mut parts = reply.hand_out(events);
                let calls = reply.parser.n_calls() > 0 && reason != EndReason::Length;
                let reason = if calls { EndReason::Calls } else { reason };
                let reasoning_tokens = reply.reasoning_tokens;
                parts.push(ChatEvent::End(ChatEnd { reason, usage, reasoning_tokens, timings }));
                Ok(parts)
            }
            Event::Failed(error) => Err(error.into()),
        }
    }
}
