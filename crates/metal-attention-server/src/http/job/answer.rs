//! A whole answer, put together from its events.

use metal_attention::scheduler::TokenLogprobs;
use metal_attention_chat::{AnswerEvent, ToolCall};

use super::choice_parser::{ChatEnd, ChatEvent};

/// An answer as far as it has come.
#[derive(Debug, Default)]
pub struct AssembledAnswer {
    /// What it consists of, in the order in which the model wrote it. Neighbours are of different kinds, or calls.
    pub blocks: Vec<AnswerBlock>,
    /// The log probabilities of its tokens, where they were asked for.
    pub logprobs: Vec<(u32, TokenLogprobs)>,
    /// Those of the prompt's tokens after the first, where they were asked for.
    pub prompt_logprobs: Option<Vec<TokenLogprobs>>,
    /// How it ended.
    pub end: Option<ChatEnd>,
}

/// A part of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AnswerBlock {
    /// What the model thought.
    Thoughts(String),
    /// What it says.
    Text(String),
    /// A function that it calls.
    Call(ToolCall),
}

impl AssembledAnswer {
    /// Adds what an event brings.
    pub fn add(&mut self, event: ChatEvent) {
        match event {
            ChatEvent::Prompt(logprobs) => self.prompt_logprobs = Some(logprobs),
            ChatEvent::Logprobs(id, logprobs) => self.logprobs.push((id, logprobs)),
            ChatEvent::End(end) => self.end = Some(end),
            ChatEvent::Answer(AnswerEvent::Content(more)) => match self.blocks.last_mut() {
                Some(AnswerBlock::Text(text)) => text.push_str(&more),
                Some(AnswerBlock::Thoughts(_) | AnswerBlock::Call(_)) | None => {
                    self.blocks.push(AnswerBlock::Text(more));
                }
            },
            ChatEvent::Answer(AnswerEvent::Reasoning(more)) => match self.blocks.last_mut() {
                Some(AnswerBlock::Thoughts(text)) => text.push_str(&more),
                Some(AnswerBlock::Text(_) | AnswerBlock::Call(_)) | None => {
                    self.blocks.push(AnswerBlock::Thoughts(more));
                }
            },
            ChatEvent::Answer(AnswerEvent::CallStart { id, name, .. }) => {
                self.blocks.push(AnswerBlock::Call(ToolCall::new(id, name, "")));
            }
            ChatEvent::Answer(AnswerEvent::CallArguments { index, delta }) => {
                let mut calls = self.blocks.iter_mut().filter_map(|block| match block {
                    AnswerBlock::Call(call) => Some(call),
                    AnswerBlock::Thoughts(_) | AnswerBlock::Text(_) => None,
                });
                if let Some(call) = calls.nth(index) {
                    call.function.arguments += &delta;
                }
            }
            ChatEvent::Answer(AnswerEvent::CallEnd { .. }) | ChatEvent::CutCall => {}
        }
    }

    /// All that it says; `None` where it says nothing.
    pub fn text(&self) -> Option<String> {
        let texts = self.blocks.iter().filter_map(|block| match block {
            AnswerBlock::Text(text) => Some(text.as_str()),
            AnswerBlock::Thoughts(_) | AnswerBlock::Call(_) => None,
        });
        texts.map(str::to_owned).reduce(|all, more| all + &more)
    }

    /// All that the model thought; `None` where that is nothing.
    pub fn thoughts(&self) -> Option<String> {
        let thoughts = self.blocks.iter().filter_map(|block| match block {
            AnswerBlock::Thoughts(text) => Some(text.as_str()),
            AnswerBlock::Text(_) | AnswerBlock::Call(_) => None,
        });
        thoughts.map(str::to_owned).reduce(|all, more| all + &more)
    }

    /// The functions that it calls.
    pub fn calls(&self) -> impl Iterator<Item = &ToolCall> {
        self.blocks.iter().filter_map(|block| match block {
            AnswerBlock::Call(call) => Some(call),
            AnswerBlock::Thoughts(_) | AnswerBlock::Text(_) => None,
        })
    }
}
