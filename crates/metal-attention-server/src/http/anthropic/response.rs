//! The response of `/v1/messages`: a message.

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
    /// The id of the message.
    id: String,
    /// `message`.
    #[serde(rename = "type")]
    kind: &'static str,
    /// `assistant`.
    role: &'static str,
    /// The model that answered.
    model: String,
    /// The blocks of the message in the order in which the model wrote them.
    content: Vec<ContentBlock>,
    /// The reason why it ended.
    #[serde(flatten)]
    stop: Stop,
    /// The number of tokens.
    usage: Usage,
}

/// A block of a message.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ContentBlock {
    /// Text.
    Text {
        /// The text.
        text: String,
    },
    /// Reasoning.
    Thinking {
        /// The reasoning.
        thinking: String,
        /// The signature, which clients send back with the reasoning.
        signature: String,
    },
    /// A tool call.
    ToolUse {
        /// The call's id, which its result repeats.
        id: String,
        /// The tool.
        name: String,
        /// The arguments.
        #[schema(value_type = std::collections::BTreeMap<String, Value>)]
        input: Map<String, Value>,
    },
}

/// The reason why a message ended.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, ToSchema)]
#[schema(as = AnthropicStop)]
pub struct Stop {
    /// `end_turn`, `tool_use`, `stop_sequence`, `max_tokens` or `model_context_window_exceeded`.
    #[schema(required)]
    stop_reason: Option<&'static str>,
    /// The one of the request's `stop_sequences` that ended it; otherwise null.
    #[schema(required)]
    stop_sequence: Option<String>,
}

/// The number of tokens of a message.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, ToSchema)]
#[schema(as = AnthropicUsage)]
pub struct Usage {
    /// Tokens of the prompt that were evaluated.
    input_tokens: usize,
    /// 0: every evaluated token is cached, at no cost.
    cache_creation_input_tokens: usize,
    /// Tokens of the prompt that were found in the prefix cache.
    cache_read_input_tokens: usize,
    /// Generated tokens.
    output_tokens: usize,
    /// Details of the generated tokens, if some are reasoning.
    #[serde(skip_serializing_if = "Option::is_none")]
    output_tokens_details: Option<OutputDetails>,
}

/// Details of the generated tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[schema(as = AnthropicOutputDetails)]
struct OutputDetails {
    /// Tokens of reasoning, including its delimiters.
    thinking_tokens: usize,
}

/// The number of tokens of a prompt.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct TokenCount {
    /// Tokens of the prompt, whether cached or not.
    pub input_tokens: usize,
}

/// Writes Anthropic's objects from the events of a job.
pub struct MessageWriter {
    /// The name of the model in the response.
    pub model: String,
    /// Tokens of the prompt.
    pub n_prompt: usize,
    /// The stop strings of the request, without those of the template.
    pub stop: Vec<String>,
    /// Whether the reasoning is left out.
    pub omits_reasoning: bool,
}

impl MessageWriter {
    /// The message before any block of it.
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

    /// Returns the reason why the message ended, and its numbers of tokens.
    pub fn ended(&self, end: &ChatEnd) -> (Stop, Usage) {
        let (stop_reason, stop_sequence) = match &end.reason {
            EndReason::StopString(string) if self.stop.contains(string) => ("stop_sequence", Some(string.clone())),
            // A stop string of the template ends the model's turn.
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

    /// Converts a part of the answer to a block; `None` for blank text, which templates write around calls.
    fn block(&self, block: AnswerBlock) -> Option<ContentBlock> {
        match block {
            AnswerBlock::Text(text) if text.trim().is_empty() => None,
            AnswerBlock::Text(text) => Some(ContentBlock::Text { text }),
            AnswerBlock::Reasoning(reasoning) => {
                let signature = signature::of(&reasoning, self.omits_reasoning);
                let thinking = if self.omits_reasoning { String::new() } else { reasoning };
                Some(ContentBlock::Thinking { thinking, signature })
            }
            AnswerBlock::Call(call) => {
                let input = input(&call.function.arguments);
                Some(ContentBlock::ToolUse { id: call.id, name: call.function.name, input })
            }
        }
    }
}

/// The arguments of a call. Arguments that are no JSON object are wrapped in one.
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

    fn writer(omits_reasoning: bool) -> MessageWriter {
        MessageWriter { model: "m".into(), n_prompt: 9, stop: vec!["STOP".into()], omits_reasoning }
    }

    fn end(reason: EndReason) -> ChatEnd {
        let usage = TextUsage { prompt_tokens: 9, cached_tokens: 7, generated_tokens: 4, ..Default::default() };
        ChatEnd { reason, usage, reasoning_tokens: Some(2), timings: RequestTimings::default() }
    }

    #[test]
    fn messages_are_blocks() {
        let answer = |end| AssembledAnswer {
            blocks: vec![
                AnswerBlock::Reasoning("Hm.".into()),
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
    fn only_stop_strings_of_the_request_are_reported() {
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
