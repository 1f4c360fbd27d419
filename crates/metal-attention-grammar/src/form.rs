//! What an answer must look like.

use serde_json::Value;

/// What an answer must look like.
#[derive(Debug, Clone, PartialEq)]
pub enum AnswerForm {
    /// Any JSON object.
    JsonObject,
    /// JSON that follows a schema.
    JsonSchema {
        /// The schema.
        schema: Value,
        /// True: all of the schema is enforced, or it is refused. False: objects may have properties that the schema does not
        /// name. `None`: they may not, and what cannot be enforced is left out.
        strict: Option<bool>,
    },
    /// A grammar in the GBNF of llama.cpp, or the EBNF of `XGrammar`.
    Gbnf(String),
    /// A grammar in the Lark of llguidance.
    Lark(String),
    /// A text that a regular expression matches as a whole.
    Regex(String),
    /// One of these strings.
    Choice(Vec<String>),
}

impl AnswerForm {
    /// A grammar in whichever of the two formats it is written: rules by `::=` are GBNF.
    pub fn grammar(text: String) -> Self {
        if crate::gbnf::is_gbnf(&text) { Self::Gbnf(text) } else { Self::Lark(text) }
    }
}
