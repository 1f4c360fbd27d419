//! A complete choice of a chat, assembled from its [`ChatEvent`]s. For responses that are not streamed.

use metal_attention::scheduler::TokenLogprobs;
use metal_attention_chat::{AnswerEvent, ToolCall};

use super::choice_parser::{ChatEnd, ChatEvent};

/// A choice as far as its events have arrived.
#[derive(Debug, Default)]
pub struct AssembledAnswer {
    /// Its parts in the order in which the model wrote them. Neighbouring texts are merged, and so are neighbouring
    /// parts of reasoning.
    pub blocks: Vec<AnswerBlock>,
    /// Log probabilities of its tokens; empty if they were not requested.
    pub logprobs: Vec<(u32, TokenLogprobs)>,
    /// Log probabilities of the prompt's tokens after the first; `None` if they were not requested.
    pub prompt_logprobs: Option<Vec<TokenLogprobs>>,
    /// The end; `None` as long as the sequence runs.
    pub end: Option<ChatEnd>,
}

/// A part of a choice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AnswerBlock {
    /// Reasoning.
    Reasoning(String),
    /// Text.
    Text(String),
    /// A tool call; its arguments may be incomplete.
    Call(ToolCall),
}

impl AssembledAnswer {
    /// Adds an event. Events must arrive in order.
    pub fn add(&mut self, event: ChatEvent) {
        match event {
            ChatEvent::Prompt(logprobs) => self.prompt_logprobs = Some(logprobs),
            ChatEvent::Logprobs(id, logprobs) => self.logprobs.push((id, logprobs)),
            ChatEvent::End(end) => self.end = Some(end),
            ChatEvent::Answer(AnswerEvent::Content(more)) => match self.blocks.last_mut() {
                Some(AnswerBlock::Text(text)) => text.push_str(&more),
                Some(AnswerBlock::Reasoning(_) | AnswerBlock::Call(_)) | None => {
                    self.blocks.push(AnswerBlock::Text(more));
                }
            },
            ChatEvent::Answer(AnswerEvent::Reasoning(more)) => match self.blocks.last_mut() {
                Some(AnswerBlock::Reasoning(text)) => text.push_str(&more),
                Some(AnswerBlock::Text(_) | AnswerBlock::Call(_)) | None => {
                    self.blocks.push(AnswerBlock::Reasoning(more));
                }
            },
            ChatEvent::Answer(AnswerEvent::CallStart { id, name, .. }) => {
                self.blocks.push(AnswerBlock::Call(ToolCall::new(id, name, "")));
            }
            ChatEvent::Answer(AnswerEvent::CallArguments { index, delta }) => {
                let mut calls = self.blocks.iter_mut().filter_map(|block| match block {
                    AnswerBlock::Call(call) => Some(call),
                    AnswerBlock::Reasoning(_) | AnswerBlock::Text(_) => None,
                });
                if let Some(call) = calls.nth(index) {
                    call.function.arguments += &delta;
                }
            }
            ChatEvent::Answer(AnswerEvent::CallEnd { .. }) | ChatEvent::CutCall => {}
        }
    }

    /// All its text; `None` if there is none.
    pub fn text(&self) -> Option<String> {
        let texts = self.blocks.iter().filter_map(|block| match block {
            AnswerBlock::Text(text) => Some(text.as_str()),
            AnswerBlock::Reasoning(_) | AnswerBlock::Call(_) => None,
        });
        texts.map(str::to_owned).reduce(|all, more| all + &more)
    }

    /// All its reasoning; `None` if there is none.
    pub fn reasoning(&self) -> Option<String> {
        let reasoning = self.blocks.iter().filter_map(|block| match block {
            AnswerBlock::Reasoning(text) => Some(text.as_str()),
            AnswerBlock::Text(_) | AnswerBlock::Call(_) => None,
        });
        reasoning.map(str::to_owned).reduce(|all, more| all + &more)
    }

    /// Its tool calls.
    pub fn calls(&self) -> impl Iterator<Item = &ToolCall> {
        self.blocks.iter().filter_map(|block| match block {
            AnswerBlock::Call(call) => Some(call),
            AnswerBlock::Reasoning(_) | AnswerBlock::Text(_) => None,
        })
    }
}
