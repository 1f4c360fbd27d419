//! The fields of requests that say what a text must look like, and the grammars that follow from them.

use metal_attention_grammar::{AnswerForm, Grammar, GrammarError};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use crate::http::ApiError;
use crate::http::body::Object;
use crate::http::models::Loaded;
use crate::http::notes::Notes;

/// A form, and the path of the field that asks for it.
pub type AskedForm = (&'static str, AnswerForm);

/// What a text must look like. Null, false and what is empty ask for nothing; two fields must not ask for different things.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, Serialize, ToSchema)]
pub struct FormFields {
    /// A grammar: llama.cpp's GBNF, or the Lark of llguidance. In chats it is all of the answer: no thoughts come before it but
    /// those that the prompt has begun.
    grammar: Option<String>,
    /// A JSON schema.
    json_schema: Option<Value>,
    /// OpenAI's form: an object whose `type` is `text`, `json_object`, `json_schema` (with `json_schema`: {`schema`, `strict`}, or
    /// `schema`), `grammar` (with `grammar`) or `regex` (with `pattern`).
    response_format: Option<Value>,
    /// A JSON schema, or its text, as vLLM has it.
    guided_json: Option<Value>,
    /// A regular expression that matches the whole text, as vLLM has it.
    guided_regex: Option<String>,
    /// Strings of which the text is one, as vLLM has them.
    guided_choice: Option<Vec<String>>,
    /// The same as `grammar`, as vLLM has it.
    guided_grammar: Option<String>,
    /// Any JSON object, as vLLM has it.
    guided_json_object: Option<bool>,
    /// An object with one of `json`, `regex`, `choice`, `grammar` and `json_object`, as vLLM has it.
    structured_outputs: Option<Value>,
    /// A regular expression that matches the whole text, as `SGLang` has it.
    regex: Option<String>,
    /// The same as `grammar`, as `SGLang` has it.
    ebnf: Option<String>,
}

/// What a request demands of a text; `None` where that is nothing.
pub fn read(object: &Object<'_>) -> Result<Option<AskedForm>, ApiError> {
    let fields: FormFields = object.parse()?;
    // Its values are JSON already.
    let Ok(Value::Object(fields)) = serde_json::to_value(fields) else { return Ok(None) };
    let asked = AnswerForm::from_fields(&fields).map_err(|error| ApiError::field(error.param, error.message))?;
    Ok(asked.map(|(field, form)| (place(field, &fields["response_format"]), form)))
}

/// The path of what describes the form that `field` asks for.
fn place(field: &'static str, response_format: &Value) -> &'static str {
    match field {
        "response_format" if response_format["json_schema"]["schema"].is_object() => {
            "response_format.json_schema.schema"
        }
        "response_format" if response_format["schema"].is_object() => "response_format.schema",
        _ => field,
    }
}

/// Whether a form that `field` asks for is all of the answer, as llama.cpp has it: no thoughts come before it but those that the
/// prompt has begun.
pub fn is_whole(field: &str) -> bool {
    field == "grammar"
}

/// The grammar of a text that begins after a prompt which no template has made.
pub fn raw_grammar(model: &Loaded, asked: Option<&AskedForm>, notes: &mut Notes) -> Result<Option<Grammar>, ApiError> {
    let Some((field, form)) = asked else { return Ok(None) };
    let mut left_out = Vec::new();
    let grammar = model.grammars.raw(form, &mut left_out);
    followed(field, grammar, left_out, notes).map(Some)
}

/// `grammar`, or an error that names the field. Notes the places of the schema that are not enforced.
pub fn followed(
    field: &str,
    grammar: Result<Grammar, GrammarError>,
    left_out: Vec<String>,
    notes: &mut Notes,
) -> Result<Grammar, ApiError> {
    for place in left_out {
        notes.schema_unsupported(place);
    }
    grammar.map_err(|why| ApiError::field(field, format!("{field} cannot be followed: {why}")))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn forms_have_the_path_of_what_describes_them() {
        let read = |json: Value| read(&Object::split(json.to_string().as_bytes()).unwrap());
        let schema = json!({"type": "object"});
        for (fields, place) in [
            (json!({"grammar": "root ::= \"a\""}), "grammar"),
            (json!({"json_schema": schema}), "json_schema"),
            (json!({"response_format": {"type": "json_object"}}), "response_format"),
            (json!({"response_format": {"type": "json_object", "schema": schema}}), "response_format.schema"),
            (
                json!({"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}),
                "response_format.json_schema.schema",
            ),
            (json!({"guided_choice": ["a"], "prompt": "x"}), "guided_choice"),
        ] {
            assert_eq!(read(fields.clone()).unwrap().map(|(field, _)| field), Some(place), "{fields}");
        }
        assert_eq!(read(json!({"grammar": "", "json_schema": null, "guided_choice": []})), Ok(None));
        assert!(read(json!({"grammar": 1})).unwrap_err().message().starts_with("grammar: "));
        assert!(read(json!({"regex": "a", "ebnf": "root ::= \"a\""})).is_err());
    }
}
