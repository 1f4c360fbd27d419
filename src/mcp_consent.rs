//! Whether the user lets a tool be called.

use metal_attention_mcp::OfferedTool;
use serde_json::{Map, Value};

use crate::metadata_text::safe_lines;

/// What the user says to a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Consent {
    /// This call and no other.
    Once,
    /// This call and all later ones of the tool.
    Always,
    /// Not this call.
    No,
}

/// What the user reads before the answer.
pub const QUESTION: &str = "call it? [y]es, [n]o, [a]lways: ";

impl Consent {
    /// What was typed; `None`: it has to be asked again. An empty answer is no consent.
    pub fn read(answer: &str) -> Option<Self> {
        match answer.trim().to_lowercase().as_str() {
            "y" | "yes" => Some(Self::Once),
            "a" | "always" => Some(Self::Always),
            "" | "n" | "no" => Some(Self::No),
            _ => None,
        }
    }
}

/// A call as it is shown: the server, the tool and the arguments, all of them.
pub fn shown(tool: &OfferedTool, arguments: &Map<String, Value>) -> String {
    let arguments = serde_json::to_string(arguments).unwrap_or_default();
    safe_lines(&format!("{}.{} {arguments}", tool.server, tool.tool.name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_but_yes_is_consent() {
        for (answer, consent) in [
            ("y", Some(Consent::Once)),
            (" YES ", Some(Consent::Once)),
            ("a", Some(Consent::Always)),
            ("", Some(Consent::No)),
            ("n", Some(Consent::No)),
            ("yep", None),
        ] {
            assert_eq!(Consent::read(answer), consent, "{answer:?}");
        }
    }
}
