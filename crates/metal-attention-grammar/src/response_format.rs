//! [`ResponseFormat`]: the format that the text of an answer must have.

use serde_json::Value;

/// The format that the text of an answer must have.
#[derive(Debug, Clone, PartialEq)]
pub enum ResponseFormat {
    /// Any JSON object.
    JsonObject,
    /// JSON that is valid under a schema.
    JsonSchema {
        /// The JSON schema.
        schema: Value,
        /// `Some(true)`: all assertions are enforced, or the schema is refused. `Some(false)`: objects may have
        /// properties that the schema does not name. `None`: they may not, and assertions that cannot be enforced are
        /// left out.
        strict: Option<bool>,
    },
    /// A grammar in GBNF (llama.cpp) or EBNF (`XGrammar`).
    Gbnf(String),
    /// A grammar in llguidance's variant of Lark.
    Lark(String),
    /// A text that the regular expression matches as a whole.
    Regex(String),
    /// One of these strings.
    Choice(Vec<String>),
}

impl ResponseFormat {
    /// A grammar in GBNF or Lark. Rules defined by `::=` are GBNF.
    pub fn grammar(text: String) -> Self {
        if crate::gbnf::is_gbnf(&text) { Self::Gbnf(text) } else { Self::Lark(text) }
    }
}
