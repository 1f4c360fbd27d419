//! The answer: a message.

use serde::Serialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::signature;
use crate::http::ids;
use crate::http::job::answer::{AnswerBlock, AssembledAnswer};
use crate::http::job::choice_parser::{ChatEnd, EndReason};

/// A message of the model.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[schema(as = AnthropicMessage)]
pub struct MessageObject {
    /// The message's name.
    id: String,
    /// `message`.
    #[serde(rename = "type")]
    kind: &'static str,
    /// `assistant`.
    role: &'static str,
    /// The model that answered.
    model: String,
    /// What the message consists of, in the order in which the model wrote it.
    content: Vec<ContentBlock>,
    /// Why it ended.
    #[serde(flatten)]
    stop: Stop,
    /// Tokens it took.
    usage: Usage,
}

/// A part of a message.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ContentBlock {
    /// Text.
    Text {
        /// The text.
        text: String,
    },
    /// What the model thought.
    Thinking {
        /// The thoughts.
        thinking: String,
        /// What goes with them when they are sent back.
        signature: String,
    },
    /// A tool that the model calls.
    ToolUse {
        /// The call's id, which its result repeats.
        id: String,
        /// The tool.
        name: String,
        /// What it is called with.
        #[schema(value_type = std::collections::BTreeMap<String, Value>)]
        input: Map<String, Value>,
    },
}

/// Why a message ended.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, ToSchema)]
#[schema(as = AnthropicStop)]
pub struct Stop {
    /// `end_turn`, `tool_use`, `stop_sequence`, `max_tokens` or `model_context_window_exceeded`.
    #[schema(required)]
    stop_reason: Option<&'static str>,
    /// The one of the request's `stop_sequences` that ended it.
    #[schema(required)]
    stop_sequence: Option<String>,
}

/// How many tokens a message took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, ToSchema)]
#[schema(as = AnthropicUsage)]
pub struct Usage {
    /// Tokens of the prompt that were evaluated.
    input_tokens: usize,
    /// 0: all that is evaluated may be found again, and nothing is charged for it.
    cache_creation_input_tokens: usize,
    /// Tokens of the prompt that were in the KV cache already.
    cache_read_input_tokens: usize,
    /// Tokens that were generated.
    output_tokens: usize,
    /// More about them, where some of them are thoughts.
    #[serde(skip_serializing_if = "Option::is_none")]
    output_tokens_details: Option<OutputDetails>,
}

/// More about the tokens that were generated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[schema(as = AnthropicOutputDetails)]
struct OutputDetails {
    /// Tokens of thoughts, their marks included.
    thinking_tokens: usize,
}

/// How many tokens a prompt has.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct TokenCount {
    /// The tokens, also those that are in the KV cache already.
    pub input_tokens: usize,
}

/// Makes Anthropic's objects of a job's answer.
pub struct MessageWriter {
    /// The model that answers.
    pub model: String,
    /// Tokens of the prompt.
    pub n_prompt: usize,
    /// The strings that the request has end the message.
    pub stop: Vec<String>,
    /// The message leaves out its thoughts.
    pub omits_thoughts: bool,
}

impl MessageWriter {
    /// The message before anything of it has come.
    pub fn begun(&self) -> MessageObject {
        MessageObject {
            id: ids::unique("msg_"),
            kind: "message",
            role: "assistant",
            model: self.model.clone(),
            content: Vec::new(),
            stop: Stop::default(),
            usage: Usage { input_tokens: self.n_prompt, ..Default::default() },
        }
    }

    /// The whole message.
    pub fn message(&self, answer: AssembledAnswer) -> MessageObject {
        let (stop, usage) = answer.end.as_ref().map(|end| self.ended(end)).unwrap_or_default();
        let content = answer.blocks.into_iter().filter_map(|block| self.block(block)).collect();
        MessageObject { content, stop, usage, ..self.begun() }
    }

    /// Why the message ended, and what it took.
    pub fn ended(&self, end: &ChatEnd) -> (Stop, Usage) {
        let (stop_reason, stop_sequence) = match &end.reason {
            EndReason::StopString(string) if self.stop.contains(string) => ("stop_sequence", Some(string.clone())),
            // A string of the template's own ends the model's turn.
            EndReason::End | EndReason::StopString(_) => ("end_turn", None),
            EndReason::Calls => ("tool_use", None),
            EndReason::Length => ("max_tokens", None),
            EndReason::ContextFull => ("model_context_window_exceeded", None),
        };
        let usage = Usage {
            input_tokens: end.usage.prompt_tokens - end.usage.cached_tokens,
            cache_creation_input_tokens: 0,
            cache_read_input_tokens: end.usage.cached_tokens,
            output_tokens: end.usage.generated_tokens,
            output_tokens_details: end.reasoning_tokens.map(|thinking_tokens| OutputDetails { thinking_tokens }),
        };
        (Stop { stop_reason: Some(stop_reason), stop_sequence }, usage)
    }

    /// The block of a message that `block` is; none where it is nothing but blanks, as they stand around calls.
    fn block(&self, block: AnswerBlock) -> Option<ContentBlock> {
        match block {
            AnswerBlock::Text(text) if text.trim().is_empty() => None,
            AnswerBlock::Text(text) => Some(ContentBlock::Text { text }),
            AnswerBlock::Thoughts(thoughts) => {
                let signature = signature::of(&thoughts, self.omits_thoughts);
                let thinking = if self.omits_thoughts { String::new() } else { thoughts };
                Some(ContentBlock::Thinking { thinking, signature })
            }
            AnswerBlock::Call(call) => {
                let input = input(&call.function.arguments);
                Some(ContentBlock::ToolUse { id: call.id, name: call.function.name, input })
            }
        }
    }
}

/// The input of a call. What is no object stands in one.
fn input(arguments: &str) -> Map<String, Value> {
    if arguments.trim().is_empty() {
        return Map::new();
    }
    match serde_json::from_str(arguments) {
        Ok(Value::Object(input)) => input,
        Ok(value) => Map::from_iter([("arguments".to_owned(), value)]),
        Err(_) => Map::from_iter([("arguments".to_owned(), arguments.into())]),
    }
}

#[cfg(test)]
mod tests {
    use metal_attention::scheduler::{RequestTimings, Usage as TextUsage};
    use metal_attention_chat::ToolCall;
    use serde_json::json;

    use super::*;

    fn writer(omits_thoughts: bool) -> MessageWriter {
        MessageWriter { model: "m".into(), n_prompt: 9, stop: vec!["STOP".into()], omits_thoughts }
    }

    fn end(reason: EndReason) -> ChatEnd {
        let usage = TextUsage { prompt_tokens: 9, cached_tokens: 7, generated_tokens: 4 };
        ChatEnd { reason, usage, reasoning_tokens: Some(2), timings: RequestTimings::default() }
    }

    #[test]
    fn messages_are_blocks() {
        let answer = |end| AssembledAnswer {
            blocks: vec![
                AnswerBlock::Thoughts("Hm.".into()),
                AnswerBlock::Text("\n\n".into()),
                AnswerBlock::Call(ToolCall::new("a", "f", r#"{"z":1,"a":2}"#)),
                AnswerBlock::Text(" \n".into()),
                AnswerBlock::Call(ToolCall::new("b", "g", "")),
                AnswerBlock::Text("\nSo.".into()),
            ],
            end: Some(end),
            ..Default::default()
        };
        let message = |omits| serde_json::to_value(writer(omits).message(answer(end(EndReason::Calls)))).unwrap();
        let whole = message(false);
        assert!(whole["id"].as_str().unwrap().starts_with("msg_"));
        let mut expected = json!({"id": whole["id"], "type": "message", "role": "assistant", "model": "m",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "bWV0YWwtYXR0ZW50aW9uIA=="},
                {"type": "tool_use", "id": "a", "name": "f", "input": {"z": 1, "a": 2}},
                {"type": "tool_use", "id": "b", "name": "g", "input": {}},
                {"type": "text", "text": "\nSo."}],
            "stop_reason": "tool_use", "stop_sequence": null,
            "usage": {"input_tokens": 2, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 7,
                "output_tokens": 4, "output_tokens_details": {"thinking_tokens": 2}}});
        assert_eq!(whole, expected);
        let omitted = message(true);
        expected["id"] = omitted["id"].clone();
        expected["content"][0] = json!({"type": "thinking", "thinking": "", "signature": signature::of("Hm.", true)});
        assert_eq!(omitted, expected);
    }

    #[test]
    fn reasons_are_those_of_the_request() {
        let reason = |reason| {
            let (Stop { stop_reason, stop_sequence }, _) = writer(false).ended(&end(reason));
            (stop_reason.unwrap(), stop_sequence)
        };
        assert_eq!(reason(EndReason::End), ("end_turn", None));
        assert_eq!(reason(EndReason::StopString("STOP".into())), ("stop_sequence", Some("STOP".into())));
        assert_eq!(reason(EndReason::StopString("\nUser:".into())), ("end_turn", None));
        assert_eq!(reason(EndReason::Length), ("max_tokens", None));
        assert_eq!(reason(EndReason::ContextFull), ("model_context_window_exceeded", None));
    }

    #[test]
    fn inputs_are_objects() {
        for (arguments, expected) in [
            ("", json!({})),
            (" \n", json!({})),
            (r#"{"a": [1]}"#, json!({"a": [1]})),
            ("[1]", json!({"arguments": [1]})),
            (r#"{"a": "#, json!({"arguments": r#"{"a": "#})),
        ] {
            assert_eq!(Value::Object(input(arguments)), expected, "{arguments}");
        }
    }
}
