//! Grammars: forms that constrain the generated text.

use metal_attention::Constraint;
use metal_attention_grammar::{Grammar, GrammarCompiler, RenderedConversation, ResponseFormat};
use pyo3::prelude::*;
use serde_json::{Map, Value};

use crate::errors::OptionError;

/// A grammar that constrains generated text. Each generation begins at its start.
#[pyclass(frozen, name = "Grammar", module = "metal_attention._engine")]
pub struct PyGrammar {
    /// The compiled grammar, at its start.
    grammar: Grammar,
    /// Whether it is a form of the text and no tool call.
    is_form: bool,
    /// Parts of a JSON schema that are not enforced.
    #[pyo3(get)]
    left_out: Vec<String>,
}

impl PyGrammar {
    /// Compiles the grammar that `fields` describe, a JSON object of fields as in requests to the server; `None` if they describe no
    /// form. With a conversation it is for the text of the answer, after the reasoning. Takes time: call it with Python detached.
    pub fn make(
        grammars: &GrammarCompiler,
        fields: &str,
        conversation: Option<&RenderedConversation>,
    ) -> PyResult<Option<Self>> {
        let refused = |why: String| OptionError::new_err(why);
        let fields: Map<String, Value> =
            serde_json::from_str(fields).map_err(|error| refused(format!("structured_outputs: {error}")))?;
        let Some((field, form)) = ResponseFormat::from_fields(&fields).map_err(|error| refused(error.to_string()))?
        else {
            return Ok(None);
        };
        let mut left_out = Vec::new();
        let grammar = match conversation {
            Some(chat) => chat.response_format(grammars, &form, &mut left_out),
            None => grammars.raw(&form, &mut left_out).map_err(Into::into),
        };
        let grammar = grammar.map_err(|why| refused(format!("{field} {why}")))?;
        Ok(Some(Self { grammar, is_form: true, left_out }))
    }

    /// Compiles the grammar of an answer that calls a function; with `parallel`, one or more. Call it with Python detached.
    pub fn of_calls(grammars: &GrammarCompiler, conversation: &RenderedConversation, parallel: bool) -> PyResult<Self> {
        let mut left_out = Vec::new();
        let grammar = conversation.calls(grammars, parallel, &mut left_out);
        let grammar = grammar.map_err(|why| OptionError::new_err(format!("tool_choice {why}")))?;
        Ok(Self { grammar, is_form: false, left_out })
    }

    /// The constraint for one generation. In an answer it begins after the reasoning.
    pub fn constraint(&self, conversation: Option<&RenderedConversation>) -> Option<Box<dyn Constraint>> {
        let grammar = self.grammar.clone();
        match conversation {
            Some(conversation) => conversation.constraint(grammar, self.is_form),
            None => Some(Box::new(grammar)),
        }
    }

    /// Whether it is a form of the text and no tool call.
    pub fn is_form(&self) -> bool {
        self.is_form
    }
}
