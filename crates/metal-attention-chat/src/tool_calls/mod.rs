//! Tool calls in what a model writes.
//!
//! Each family of models writes them in a way of its own, which its chat template shows ([`ToolFormat::of_template`]). A
//! [`ToolCallParser`] takes an answer apart as it comes, and [`ToolFormat::grammar`] is the language of answers that
//! must call a tool.

mod call_json;
mod grammar;
mod held_back;
mod parser;
mod plain;
mod python_call;

pub use parser::ToolCallParser;
pub(crate) use plain::{describes_tools, in_plain_words};

use crate::{Message, ToolCall};

/// How a model writes tool calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ToolFormat {
    /// `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen.
    Hermes,
    /// `{"name": ..., "parameters": {...}}` and nothing else, perhaps after `<|python_tag|>`: Llama 3.
    Llama3,
    /// `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`: Mistral.
    MistralList,
    /// `[TOOL_CALLS]name[ARGS]{...}`: Mistral, from Small 3.2 on.
    MistralArgs,
    /// `{"name": ..., "arguments": {...}}` and nothing else: models that were told so in plain words.
    Json,
}

impl ToolFormat {
    /// The format that a chat template writes.
    pub fn of_template(source: &str) -> Self {
        if source.contains("[TOOL_CALLS]") {
            if source.contains("[ARGS]") { Self::MistralArgs } else { Self::MistralList }
        } else if source.contains("<tool_call>") {
            Self::Hermes
        } else if source.contains("<|python_tag|>") || (source.contains("ipython") && source.contains("\"parameters\""))
        {
            Self::Llama3
        } else {
            Self::Json
        }
    }

    /// The text that begins a call within other text; `None` where a call is all of the answer.
    pub(crate) fn opening(self) -> Option<&'static str> {
        match self {
            Self::Hermes => Some("<tool_call>"),
            Self::Llama3 => Some(PYTHON_TAG),
            Self::MistralList | Self::MistralArgs => Some("[TOOL_CALLS]"),
            Self::Json => None,
        }
    }
}

/// Begins code in answers of Llama 3, and sometimes a JSON call.
const PYTHON_TAG: &str = "<|python_tag|>";

/// Control tokens that are part of calls. They write nothing as text, so they are put in by their spelling.
const MARKERS: [&str; 7] =
    ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", PYTHON_TAG, "<tool_call>", "</tool_call>", "</think>"];

/// A part of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AnswerEvent {
    /// What the model thinks before it answers.
    Reasoning(String),
    /// Text for the user.
    Content(String),
    /// A call begins.
    CallStart {
        /// Its number in the answer, from 0.
        index: usize,
        /// Its name, made here: nine letters and digits.
        id: String,
        /// The function.
        name: String,
    },
    /// More of a call's arguments, which together are a JSON object.
    CallArguments {
        /// The call's number.
        index: usize,
        /// The next piece of text.
        delta: String,
    },
    /// The call is complete.
    CallEnd {
        /// The call's number.
        index: usize,
    },
}

impl Message {
    /// The message that the parts of an answer make.
    pub fn from_events(events: impl IntoIterator<Item = AnswerEvent>) -> Self {
        let mut message = Self { content: None, ..Self::assistant("") };
        for event in events {
            match event {
                AnswerEvent::Reasoning(text) => *message.reasoning_content.get_or_insert_default() += &text,
                AnswerEvent::Content(text) => *message.content.get_or_insert_default() += &text,
                AnswerEvent::CallStart { id, name, .. } => message.tool_calls.push(ToolCall::new(id, name, "")),
                AnswerEvent::CallArguments { delta, .. } => {
                    if let Some(call) = message.tool_calls.last_mut() {
                        call.function.arguments += &delta;
                    }
                }
                AnswerEvent::CallEnd { .. } => {}
            }
        }
        if message.tool_calls.is_empty() {
            message.content.get_or_insert_default();
        }
        message
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_format_is_that_of_the_template() {
        for (name, format) in [
            ("qwen2.5", ToolFormat::Hermes),
            ("qwen3", ToolFormat::Hermes),
            ("hermes-3-tool-use", ToolFormat::Hermes),
            ("llama-3.1", ToolFormat::Llama3),
            ("llama-3.2", ToolFormat::Llama3),
            ("mistral-v3", ToolFormat::MistralList),
            ("mistral-nemo", ToolFormat::MistralList),
            ("mistral-small-3.2", ToolFormat::MistralArgs),
            ("gemma-2", ToolFormat::Json),
            ("phi-4", ToolFormat::Json),
            ("smollm2", ToolFormat::Json),
        ] {
            let path = format!("{}/tests/data/templates/{name}.jinja", env!("CARGO_MANIFEST_DIR"));
            assert_eq!(ToolFormat::of_template(&std::fs::read_to_string(path).unwrap()), format, "{name}");
        }
    }
}
