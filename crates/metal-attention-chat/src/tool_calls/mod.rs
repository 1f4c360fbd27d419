//! Tool calls in the answers of models.
//!
//! Each model family writes tool calls in its own format, which its chat template reveals
//! ([`ToolFormat::of_template`]; unknown formats are derived from renderings of the template, `probe.rs`). A
//! [`ToolCallParser`] parses an answer while it is generated. [`ToolFormat::grammar`] is a grammar of answers that
//! must call a tool. `tools_as_text.rs` describes tools in the prompt if the template does not support them.
//!
//! Terms: a mark is a fixed string of a format, such as `<tool_call>`. An opening is a mark that announces a call. The
//! header of a call is the text between the opening and the arguments.

mod call;
mod call_derived;
mod call_gemma;
mod call_in_reasoning;
mod call_json;
mod call_python;
mod call_tags;
mod checked_names;
mod derived;
mod grammar;
mod grammar_values;
mod harmony;
mod held_back;
mod lenient_json;
mod names;
mod parser;
mod probe;
mod python_call;
mod python_string;
mod python_value;
mod signatures;
mod syntax;
mod tools_as_text;

pub use checked_names::ToolNameError;
pub use derived::DerivedFormat;
pub use parser::ToolCallParser;
pub(crate) use probe::derived;
pub(crate) use tools_as_text::{TemplateToolSupport, ToolPlacement, tool_result_as_text, with_tools_as_text};

use crate::{ChatTemplate, Message, ToolCall};
use syntax::PYTHONIC_START;

/// The format in which a model writes tool calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ToolFormat {
    /// `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen, Granite 4, `SmolLM3`.
    Hermes,
    /// `<tool_call>name<arg_key>...</arg_key><arg_value>...</arg_value></tool_call>`: GLM from 4.5 on.
    Glm,
    /// The name, a line break and the arguments as JSON, without marks: GLM 4.
    Glm4,
    /// `<tool_call><function=name><parameter=key>...</parameter></function></tool_call>`: Qwen3-Coder, Qwen 3.5, Nemotron 3.
    FunctionTags,
    /// Like `FunctionTags`, in `<seed:tool_call>`: Seed-OSS.
    Seed,
    /// `{"name": ..., "parameters": {...}}` without marks, or after `<|python_tag|>`: Llama 3.
    Llama3,
    /// `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`: Mistral.
    MistralList,
    /// `[TOOL_CALLS]name[ARGS]{...}`: Mistral, from Small 3.2 on.
    MistralArgs,
    /// `<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜><｜tool▁calls▁end｜>`: `DeepSeek` V3.1.
    DeepSeek,
    /// Like `DeepSeek`, with `function<｜tool▁sep｜>name` and the arguments in a code block: `DeepSeek` R1 and V3.
    DeepSeekR1,
    /// `<|tool_call|>[{"name": ..., "arguments": {...}}]`: Granite 3, and Phi 4 mini, which has `<|/tool_call|>` at the end.
    TaggedList,
    /// `<TOOLCALL>[{"name": ..., "arguments": {...}}]</TOOLCALL>`: Nemotron Nano 2.
    Nemotron,
    /// Like `Nemotron`, in `<tool_calls>`: Jamba.
    Jamba,
    /// `<|tool_call_start|>[name(key="text", other=1)]<|tool_call_end|>` in Python's notation, or a list of JSON
    /// objects between these marks: LFM2.
    Pythonic,
    /// `<|START_ACTION|>[{"tool_name": ..., "parameters": {...}}]<|END_ACTION|>`: Command R7B, Command A.
    CommandR,
    /// `<|tool_call>call:name{key:<|"|>text<|"|>}<tool_call|>`: Gemma 4.
    Gemma,
    /// `<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}`, one of the messages of an answer:
    /// gpt-oss.
    Harmony,
    /// `{"name": ..., "arguments": {...}}` without marks: models whose tools are described in the prompt.
    Json,
    /// A format that was derived from the chat template: Kimi K2, `MiniMax` M2, `DeepSeek` V3.2 and V4, Hy 3, Solar
    /// Open, `GigaChat` 3.1, Apertus, Functionary 3.1, `MiniCPM` 5.
    Derived(&'static DerivedFormat),
}

impl ToolFormat {
    /// The format of a chat template. If it is not one of the known formats, it is derived from renderings of the
    /// template.
    pub fn of_template(source: &str) -> Self {
        match Self::known(source) {
            Some(format) => format,
            None => ChatTemplate::new(source).map_or(Self::Json, |template| template.tool_format()),
        }
    }

    /// The known format whose marks occur in a template; `None` if there is none.
    pub(crate) fn known(source: &str) -> Option<Self> {
        let has = |text: &str| source.contains(text);
        Some(if has("[TOOL_CALLS]") {
            if has("[ARGS]") { Self::MistralArgs } else { Self::MistralList }
        } else if has("<|channel|>") && has("<|message|>") {
            Self::Harmony
        } else if has("<|tool_call>") {
            Self::Gemma
        } else if has("<｜tool▁calls▁begin｜>") {
            if has("```json") { Self::DeepSeekR1 } else { Self::DeepSeek }
        } else if has("<|START_ACTION|>") {
            Self::CommandR
        } else if has("<seed:tool_call>") {
            Self::Seed
        } else if has(PYTHONIC_START) || has("<|tool_list_start|>") || has("List of tools: [") {
            // Some templates of this format only list the tools.
            Self::Pythonic
        } else if has("<TOOLCALL>") {
            Self::Nemotron
        } else if has("<tool_calls>") {
            Self::Jamba
        } else if has("<|tool_call|>") || has("<|/tool|>") {
            Self::TaggedList
        } else if has("<arg_key>") {
            Self::Glm
        } else if tools_as_text::calls_are_metadata(source) {
            Self::Glm4
        } else if has("<function=") && has("<parameter=") {
            Self::FunctionTags
        } else if has("<tool_call>") {
            Self::Hermes
        } else if has("<function=") && has("</function>") {
            return None;
        } else if has("<|python_tag|>") || (has("ipython") && has("\"parameters\"")) {
            Self::Llama3
        } else {
            return None;
        })
    }
}

/// A part of a parsed answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AnswerEvent {
    /// Text of the reasoning.
    Reasoning(String),
    /// Text for the user.
    Content(String),
    /// The beginning of a call.
    CallStart {
        /// The index of the call in the answer.
        index: usize,
        /// A generated id: nine letters and digits.
        id: String,
        /// The name of the function.
        name: String,
    },
    /// More text of a call's arguments. All of it together is a JSON object.
    CallArguments {
        /// The index of the call.
        index: usize,
        /// The next piece of the arguments.
        delta: String,
    },
    /// The end of a call.
    CallEnd {
        /// The index of the call.
        index: usize,
    },
}

impl Message {
    /// The message that consists of these events. A call without its end is left out.
    pub fn from_events(events: impl IntoIterator<Item = AnswerEvent>) -> Self {
        let mut message = Self { content: None, ..Self::assistant("") };
        let mut in_call = false;
        for event in events {
            match event {
                AnswerEvent::Reasoning(text) => *message.reasoning_content.get_or_insert_default() += &text,
                AnswerEvent::Content(text) => *message.content.get_or_insert_default() += &text,
                AnswerEvent::CallStart { id, name, .. } => {
                    message.tool_calls.push(ToolCall::new(id, name, ""));
                    in_call = true;
                }
                AnswerEvent::CallArguments { delta, .. } => {
                    if let Some(call) = message.tool_calls.last_mut() {
                        call.function.arguments += &delta;
                    }
                }
                AnswerEvent::CallEnd { .. } => in_call = false,
            }
        }
        if in_call {
            message.tool_calls.pop();
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
            ("qwen3-coder", ToolFormat::FunctionTags),
            ("seed-oss", ToolFormat::Seed),
            ("glm-4.6", ToolFormat::Glm),
            ("deepseek-v3.1", ToolFormat::DeepSeek),
            ("deepseek-r1-distill", ToolFormat::DeepSeekR1),
            ("granite-3.3", ToolFormat::TaggedList),
            ("granite-4.0", ToolFormat::Hermes),
            ("phi-4-mini", ToolFormat::TaggedList),
            ("command-r7b-tool-use", ToolFormat::CommandR),
            ("ministral-3-reasoning", ToolFormat::MistralArgs),
            ("gemma-4", ToolFormat::Gemma),
            ("gpt-oss", ToolFormat::Harmony),
            ("smollm3", ToolFormat::Json),
            ("gemma-2", ToolFormat::Json),
            ("phi-4", ToolFormat::Json),
            ("smollm2", ToolFormat::Json),
            ("qwen3.5", ToolFormat::FunctionTags),
            ("nemotron-3-nano", ToolFormat::FunctionTags),
            ("nemotron-nano-2", ToolFormat::Nemotron),
            ("lfm2", ToolFormat::Pythonic),
            ("lfm2.5", ToolFormat::Pythonic),
            ("granite-4.1", ToolFormat::Hermes),
            ("falcon-h1", ToolFormat::Hermes),
            ("jamba", ToolFormat::Jamba),
            ("rwkv-world", ToolFormat::Json),
        ] {
            let path = format!("{}/tests/data/templates/{name}.jinja", env!("CARGO_MANIFEST_DIR"));
            assert_eq!(ToolFormat::of_template(&std::fs::read_to_string(path).unwrap()), format, "{name}");
        }
    }
}
