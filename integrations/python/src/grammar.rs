//! Structured outputs: the form that a text must have.

use metal_attention_grammar::{Form, Grammar, Grammars};
use pyo3::prelude::*;
use serde_json::{Map, Value};

use crate::conversation::Conversation;
use crate::errors::OptionError;

/// A grammar that texts follow, each from its beginning.
#[pyclass(frozen, name = "Grammar", module = "metal_attention._engine")]
pub struct PyGrammar {
    grammar: Grammar,
    /// The text has a form of its own, and is no tool call.
    is_form: bool,
    /// Places of a JSON schema that are not enforced.
    #[pyo3(get)]
    left_out: Vec<String>,
}

impl PyGrammar {
    /// The grammar that `fields` ask for, a JSON object of fields as in requests to the server; `None` where they ask for
    /// nothing. Of a conversation it is that of the answer's text, after its thoughts. Grammars take time: not to be called by who
    /// holds Python.
    pub fn make(grammars: &Grammars, fields: &str, conversation: Option<&Conversation>) -> PyResult<Option<Self>> {
        let refused = |why: String| OptionError::new_err(why);
        let fields: Map<String, Value> =
            serde_json::from_str(fields).map_err(|error| refused(format!("structured_outputs: {error}")))?;
        let Some((field, form)) = Form::from_fields(&fields).map_err(|error| refused(error.to_string()))? else {
            return Ok(None);
        };
        let mut left_out = Vec::new();
        if conversation.is_some_and(|chat| chat.continues_message() && !chat.begins_thoughts()) {
            return Err(refused(format!("{field} needs an answer of its own: leave continue_final_message out")));
        }
        let grammar = match conversation {
            Some(chat) => grammars.form(chat.template(), chat.prompt_of_grammar(), &form, &mut left_out),
            None => grammars.raw(&form, &mut left_out),
        };
        let grammar = grammar.map_err(|why| refused(format!("{field} cannot be followed: {why}")))?;
        Ok(Some(Self { grammar, is_form: true, left_out }))
    }

    /// The grammar of an answer that calls a function; `parallel`: or several. Not to be called by who holds Python.
    pub fn of_calls(grammars: &Grammars, conversation: &Conversation, parallel: bool) -> PyResult<Self> {
        let mut left_out = Vec::new();
        let (prompt, tools) = (conversation.prompt_of_grammar(), conversation.tools());
        let grammar = grammars.calls(conversation.template(), prompt, tools, parallel, &mut left_out);
        let grammar = grammar.map_err(|why| OptionError::new_err(format!("tools cannot be followed: {why}")))?;
        Ok(Self { grammar, is_form: false, left_out })
    }

    /// Whether the text has a form of its own, and is no tool call.
    pub fn is_form(&self) -> bool {
        self.is_form
    }

    /// The grammar before a text begins.
    pub fn fresh(&self) -> Grammar {
        self.grammar.clone()
    }
}
