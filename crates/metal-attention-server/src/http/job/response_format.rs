//! Response formats (structured output): the request fields that require one (JSON schema, grammar, regular
//! expression), and the grammars compiled from them.

use metal_attention_grammar::{Grammar, GrammarError, ResponseFormat};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use crate::http::ApiError;
use crate::http::body::Object;
use crate::http::models::LoadedModel;
use crate::http::notes::Notes;

/// A response format, with the path of the field that requires it.
pub type RequestedFormat = (&'static str, ResponseFormat);

/// The response format. Null, false and empty values require none; two fields must not require different formats.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, Serialize, ToSchema)]
#[schema(as = FormFields)]
pub struct ResponseFormatFields {
    /// A grammar: llama.cpp's GBNF, or llguidance's Lark. In chats it covers the whole answer: no reasoning comes
    /// before it except what the prompt has started.
    grammar: Option<String>,
    /// A JSON schema.
    json_schema: Option<Value>,
    /// OpenAI's field: an object whose `type` is `text`, `json_object`, `json_schema` (with `json_schema`: {`schema`,
    /// `strict`}, or `schema`), `grammar` (with `grammar`) or `regex` (with `pattern`).
    response_format: Option<Value>,
    /// A JSON schema, or its text (vLLM).
    guided_json: Option<Value>,
    /// A regular expression that matches the whole text (vLLM).
    guided_regex: Option<String>,
    /// Strings, one of which is the text (vLLM).
    guided_choice: Option<Vec<String>>,
    /// An alias of `grammar` (vLLM).
    guided_grammar: Option<String>,
    /// Any JSON object (vLLM).
    guided_json_object: Option<bool>,
    /// An object with one of `json`, `regex`, `choice`, `grammar` and `json_object` (vLLM).
    structured_outputs: Option<Value>,
    /// A regular expression that matches the whole text (`SGLang`).
    regex: Option<String>,
    /// An alias of `grammar` (`SGLang`).
    ebnf: Option<String>,
}

/// Reads the response format of a request; `None`: any text.
pub fn read(object: &Object<'_>) -> Result<Option<RequestedFormat>, ApiError> {
    let fields: ResponseFormatFields = object.parse()?;
    // Their values are JSON already, so this cannot fail.
    let Ok(Value::Object(fields)) = serde_json::to_value(fields) else { return Ok(None) };
    let required = ResponseFormat::from_fields(&fields).map_err(|error| ApiError::field(error.param, error.message))?;
    Ok(required.map(|(field, response_format)| (place(field, &fields["response_format"]), response_format)))
}

/// The path of the schema within the field `field` that requires the format.
fn place(field: &'static str, response_format: &Value) -> &'static str {
    match field {
        "response_format" if response_format["json_schema"]["schema"].is_object() => {
            "response_format.json_schema.schema"
        }
        "response_format" if response_format["schema"].is_object() => "response_format.schema",
        _ => field,
    }
}

/// Whether the response format of `field` covers the whole answer, as llama.cpp defines it for `grammar`: no reasoning
/// comes before it except what the prompt has started.
pub fn covers_answer(field: &str) -> bool {
    field == "grammar"
}

/// Compiles the grammar for an answer to a prompt without a chat template; `None`: any text.
pub fn raw_grammar(
    model: &LoadedModel,
    required: Option<&RequestedFormat>,
    notes: &mut Notes,
) -> Result<Option<Grammar>, ApiError> {
    let Some((field, response_format)) = required else { return Ok(None) };
    let mut unenforced = Vec::new();
    let grammar = model.grammars.raw(response_format, &mut unenforced);
    checked_grammar(field, grammar, unenforced, notes).map(Some)
}

/// Returns the compiled `grammar`, or an error that names the field. Notes `unenforced`, the places of the schema that
/// the grammar does not enforce.
pub fn checked_grammar(
    field: &str,
    grammar: Result<Grammar, GrammarError>,
    unenforced: Vec<String>,
    notes: &mut Notes,
) -> Result<Grammar, ApiError> {
    for place in unenforced {
        notes.schema_unsupported(place);
    }
    grammar.map_err(|why| ApiError::field(field, format!("{field} cannot be followed: {why}")))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn forms_have_the_path_of_their_schema() {
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
