//! The language of answers that must call a tool.

use metal_attention_tokenizer::Tokenizer;
use serde_json::json;

use super::ToolFormat;
use crate::Tool;

impl ToolFormat {
    /// A grammar of the answers that call one of `tools` (which must not be empty), or with `parallel` one or more of
    /// them, in the Lark of llguidance. The arguments follow the tools' JSON schemas.
    ///
    /// `thinking`: the answer begins with thoughts, which end with `</think>`. `tokenizer` tells which of the texts
    /// around calls are control tokens.
    pub fn grammar(self, tools: &[Tool], parallel: bool, thinking: bool, tokenizer: Option<&Tokenizer>) -> String {
        let marker = |text: &str| marker(text, tokenizer);
        let thoughts = if thinking { "thoughts SPACE " } else { "" };
        let more = |separator: &str| if parallel { format!(" ({separator}call)*") } else { String::new() };
        let calls = match self {
            Self::Hermes | Self::Json => format!("call{}", more("\"\\n\" ")),
            Self::Llama3 => format!("call{}", more("\"; \" ")),
            Self::MistralArgs => format!("call{}", more("")),
            Self::MistralList => format!("{} \"[\" call{} \"]\"", marker("[TOOL_CALLS]"), more("\", \" ")),
        };
        let mut rules = vec![format!("start: {thoughts}{calls}")];
        if thinking {
            rules.push(match marker(END_OF_THINKING) {
                text if text.starts_with('"') => format!("thoughts[suffix={text}]: /(?s:.*)/"),
                token => format!("thoughts: /(?s:.*)/ {token}"),
            });
            rules.push("SPACE: /[ \\n]{0,4}/".into());
        }
        let names = (0..tools.len()).map(|i| format!("call_{i}")).collect::<Vec<_>>().join(" | ");
        rules.push(match self {
            Self::Hermes => {
                format!("call: {} \"\\n\" ({names}) \"\\n\" {}", marker("<tool_call>"), marker("</tool_call>"))
            }
            _ => format!("call: {names}"),
        });
        for (i, tool) in tools.iter().enumerate() {
            let name = json!(tool.name());
            let object = |key: &str| {
                let open = json!(format!("{{\"name\": {name}, \"{key}\": "));
                format!("{open} arguments_{i} \"}}\"")
            };
            let call = match self {
                Self::MistralArgs => format!("{} {name} {} arguments_{i}", marker("[TOOL_CALLS]"), marker("[ARGS]")),
                Self::Llama3 => object("parameters"),
                Self::Hermes | Self::MistralList | Self::Json => object("arguments"),
            };
            let any = json!({"type": "object"});
            let schema = tool.parameters().unwrap_or(&any);
            rules.extend([format!("call_{i}: {call}"), format!("arguments_{i}: %json {schema}")]);
        }
        rules.join("\n") + "\n"
    }
}

const END_OF_THINKING: &str = "</think>";

/// A token by its number where `text` is a control token, else the text.
fn marker(text: &str, tokenizer: Option<&Tokenizer>) -> String {
    let id = tokenizer.and_then(|tokenizer| tokenizer.token_id(text).filter(|&id| tokenizer.is_control(id)));
    id.map_or_else(|| json!(text).to_string(), |id| format!("<[{id}]>"))
}
