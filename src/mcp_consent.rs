//! Asks the user for consent to a call of an MCP tool.

use metal_attention_mcp::{Consent, OfferedTool};
use serde_json::{Map, Value};

use crate::cli_error::CliError;
use crate::metadata_text::safe_lines;

/// The answer of the user.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ConsentAnswer {
    /// The tool may be called.
    Yes(Consent),
    /// It may not be called.
    No,
}

/// The question.
const QUESTION: &str = "call it? [y]es, [n]o, [a]lways: ";

/// The message if consent is needed and stdin is no terminal.
pub const NO_TERMINAL: &str = "consent needs a terminal; `allow` in the configuration lets a tool be called without it";

impl ConsentAnswer {
    /// Parses an answer. `None`: it is none of the words. An empty line means no.
    fn read(answer: &str) -> Option<Self> {
        match answer.trim().to_lowercase().as_str() {
            "y" | "yes" => Some(Self::Yes(Consent::Once)),
            "a" | "always" => Some(Self::Yes(Consent::Always)),
            "" | "n" | "no" => Some(Self::No),
            _ => None,
        }
    }
}

/// Asks for consent to the call that [`shown`] describes. `None`: the user refuses. `read_line` prints the question and reads a
/// line; it is called until the line is an answer.
pub fn read_consent(mut read_line: impl FnMut(&str) -> Result<String, CliError>) -> Result<Option<Consent>, CliError> {
    loop {
        match ConsentAnswer::read(&read_line(QUESTION)?) {
            Some(ConsentAnswer::Yes(consent)) => return Ok(Some(consent)),
            Some(ConsentAnswer::No) => return Ok(None),
            None => {}
        }
    }
}

/// The description of a call: the server, the tool and all arguments, escaped for a terminal.
pub fn shown(tool: &OfferedTool, arguments: &Map<String, Value>) -> String {
    let arguments = serde_json::to_string(arguments).unwrap_or_default();
    safe_lines(&format!("{}.{} {arguments}", tool.server, tool.tool.name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_yes_and_always_are_consent() {
        for (answer, consent) in [
            ("y", Some(ConsentAnswer::Yes(Consent::Once))),
            (" YES ", Some(ConsentAnswer::Yes(Consent::Once))),
            ("a", Some(ConsentAnswer::Yes(Consent::Always))),
            ("", Some(ConsentAnswer::No)),
            ("n", Some(ConsentAnswer::No)),
            ("yep", None),
        ] {
            assert_eq!(ConsentAnswer::read(answer), consent, "{answer:?}");
        }
    }
}
