//! Reads the fields of HTTP requests that set the response format, by the names that llama.cpp, OpenAI, vLLM and
//! `SGLang` use.

use serde_json::{Map, Value};

use crate::ResponseFormat;

/// A field with an invalid value.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct FieldError {
    /// The path of the field, such as `response_format.json_schema`.
    pub param: String,
    /// The description of the error, which names the field.
    pub message: String,
}

/// The names of the fields, each with its reader.
const FIELDS: [(&str, FieldReader); 11] = [
    ("grammar", grammar),
    ("json_schema", schema),
    ("response_format", response_format),
    ("guided_json", schema),
    ("guided_regex", regex),
    ("guided_choice", choice),
    ("guided_grammar", grammar),
    ("guided_json_object", json_object),
    ("structured_outputs", structured_outputs),
    ("regex", regex),
    ("ebnf", grammar),
];

/// Reads the value of a field. The first argument is the field's path, for error messages. `None`: the field sets no
/// format.
type FieldReader = fn(&str, &Value) -> Result<Option<ResponseFormat>, FieldError>;

impl ResponseFormat {
    /// The response format that the fields of a request set, with the name of the field: `grammar`, `json_schema`,
    /// `response_format`, `guided_json`, `guided_regex`, `guided_choice`, `guided_grammar`, `guided_json_object`,
    /// `structured_outputs`, `regex` and `ebnf`. A field that is null, false or empty sets none. Returns an error for
    /// an invalid value, and if two fields set different formats.
    pub fn from_fields(fields: &Map<String, Value>) -> Result<Option<(&'static str, Self)>, FieldError> {
        one(FIELDS.into_iter().map(|(name, read)| (name, name.to_owned(), read)), fields)
    }
}

/// The response format that those `readers` set whose field is in `fields`. A reader is the name of a field, the
/// field's path for messages, and the function that reads it.
fn one(
    readers: impl Iterator<Item = (&'static str, String, FieldReader)>,
    fields: &Map<String, Value>,
) -> Result<Option<(&'static str, ResponseFormat)>, FieldError> {
    let mut found: Option<(&'static str, String, ResponseFormat)> = None;
    for (name, path, read) in readers {
        let Some(value) = fields.get(name).filter(|value| !is_empty(value)) else { continue };
        let Some(format) = read(&path, value)? else { continue };
        match &found {
            Some((_, first, other)) if *other != format => {
                let message = format!("{first} and {path} ask for different things: leave one of them out");
                return Err(FieldError { param: path, message });
            }
            Some(_) => {}
            None => found = Some((name, path, format)),
        }
    }
    Ok(found.map(|(name, _, format)| (name, format)))
}

/// Whether a value counts as not given.
fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(value) => !value,
        Value::Number(_) => false,
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(object) => object.is_empty(),
    }
}

fn error<T>(param: &str, message: impl std::fmt::Display) -> Result<T, FieldError> {
    Err(FieldError { param: param.to_owned(), message: format!("{param} {message}") })
}

fn text<'a>(param: &str, value: &'a Value) -> Result<&'a str, FieldError> {
    value.as_str().map_or_else(|| error(param, "must be a string"), Ok)
}

fn grammar(param: &str, value: &Value) -> Result<Option<ResponseFormat>, FieldError> {
    Ok(Some(ResponseFormat::grammar(text(param, value)?.to_owned())))
}

fn regex(param: &str, value: &Value) -> Result<Option<ResponseFormat>, FieldError> {
    Ok(Some(ResponseFormat::Regex(text(param, value)?.to_owned())))
}

fn choice(param: &str, value: &Value) -> Result<Option<ResponseFormat>, FieldError> {
    let strings = value.as_array().and_then(|list| list.iter().map(|item| Some(item.as_str()?.to_owned())).collect());
    match strings {
        Some(strings) => Ok(Some(ResponseFormat::Choice(strings))),
        None => error(param, "must be a list of strings"),
    }
}

fn json_object(param: &str, value: &Value) -> Result<Option<ResponseFormat>, FieldError> {
    match value {
        Value::Bool(true) => Ok(Some(ResponseFormat::JsonObject)),
        Value::Null | Value::Bool(false) | Value::Number(_) | Value::String(_) | Value::Array(_) | Value::Object(_) => {
            error(param, "must be true or false")
        }
    }
}

fn schema(param: &str, value: &Value) -> Result<Option<ResponseFormat>, FieldError> {
    strict_schema(param, value, None)
}

/// Reads a JSON schema, given as an object or as its text.
fn strict_schema(param: &str, value: &Value, strict: Option<bool>) -> Result<Option<ResponseFormat>, FieldError> {
    let schema = match value {
        Value::Object(_) | Value::Bool(true) => value.clone(),
        Value::String(text) => match serde_json::from_str(text) {
            Ok(schema @ Value::Object(_)) => schema,
            Ok(_) => return error(param, "must be a JSON schema: its text is no object"),
            Err(why) => return error(param, format_args!("must be a JSON schema, but its text is no JSON: {why}")),
        },
        Value::Null | Value::Bool(false) | Value::Number(_) | Value::Array(_) => {
            return error(param, "must be a JSON schema: an object");
        }
    };
    Ok(Some(ResponseFormat::JsonSchema { schema, strict }))
}

fn response_format(param: &str, value: &Value) -> Result<Option<ResponseFormat>, FieldError> {
    let Some(format) = value.as_object() else { return error(param, "must be an object") };
    let kind = match format.get("type") {
        Some(Value::String(kind)) => kind.as_str(),
        _ => return error(param, "needs a type: text, json_object, json_schema, grammar or regex"),
    };
    let field = |name: &str| format.get(name).filter(|value| !is_empty(value));
    let required = |name: &str| match field(name) {
        Some(value) => Ok((format!("{param}.{name}"), value)),
        None => error(param, format_args!("of type {kind} needs the field {name}")),
    };
    match kind {
        "text" => Ok(None),
        "json_object" | "json" => match field("schema") {
            Some(value) => schema(&format!("{param}.schema"), value),
            None => Ok(Some(ResponseFormat::JsonObject)),
        },
        "json_schema" => {
            let strict = |holder: &Map<String, Value>| holder.get("strict").and_then(Value::as_bool);
            // llama.cpp also accepts the schema directly in `response_format`.
            if let (None, Some(value)) = (field("json_schema"), field("schema")) {
                return strict_schema(&format!("{param}.schema"), value, strict(format));
            }
            let (path, value) = required("json_schema")?;
            let Some(holder) = value.as_object() else { return error(&path, "must be an object") };
            match holder.get("schema").filter(|value| !value.is_null()) {
                Some(value) => strict_schema(&format!("{path}.schema"), value, strict(holder)),
                None => Ok(Some(ResponseFormat::JsonObject)),
            }
        }
        "grammar" | "lark" | "gbnf" | "ebnf" => {
            let (path, value) = required("grammar")?;
            grammar(&path, value)
        }
        "regex" => {
            let name = if field("regex").is_some() { "regex" } else { "pattern" };
            let (path, value) = required(name)?;
            regex(&path, value)
        }
        "structural_tag" => error(param, "of type structural_tag cannot be followed: use json_schema or grammar"),
        other => error(
            param,
            format_args!("has the unknown type {other:?}: use text, json_object, json_schema, grammar or regex"),
        ),
    }
}

/// Reads vLLM's `structured_outputs`, which replaces its `guided_*` fields.
fn structured_outputs(param: &str, value: &Value) -> Result<Option<ResponseFormat>, FieldError> {
    const PARTS: [(&str, FieldReader); 5] =
        [("json", schema), ("regex", regex), ("choice", choice), ("grammar", grammar), ("json_object", json_object)];
    /// Options of vLLM's grammar backends, which are accepted and ignored. They choose a backend or limit white space,
    /// which is limited here anyway.
    const OTHERS: [&str; 4] =
        ["disable_fallback", "disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"];
    let Some(parts) = value.as_object() else { return error(param, "must be an object") };
    for (name, value) in parts {
        if name == "structural_tag" && !is_empty(value) {
            return error(&format!("{param}.{name}"), "cannot be followed: use json or grammar");
        }
        let known = PARTS.iter().any(|(part, _)| part == name) || OTHERS.contains(&name.as_str());
        if !known && !is_empty(value) {
            return error(&format!("{param}.{name}"), "is unknown: use json, regex, choice, grammar or json_object");
        }
    }
    let readers = PARTS.into_iter().map(|(name, read)| (name, format!("{param}.{name}"), read));
    Ok(one(readers, parts)?.map(|(_, format)| format))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(fields: &Value) -> Result<Option<(&'static str, ResponseFormat)>, FieldError> {
        ResponseFormat::from_fields(fields.as_object().unwrap())
    }

    #[test]
    fn each_field_is_read() {
        let object = json!({"type": "object"});
        let schema = |strict| ResponseFormat::JsonSchema { schema: object.clone(), strict };
        let gbnf = "root ::= \"a\"";
        let lark = "start: \"a\"";
        let choice = ResponseFormat::Choice(vec!["a".into(), "b".into()]);
        for (fields, expected) in [
            (json!({"grammar": gbnf}), ("grammar", ResponseFormat::Gbnf(gbnf.into()))),
            (json!({"grammar": lark}), ("grammar", ResponseFormat::Lark(lark.into()))),
            (json!({"json_schema": object}), ("json_schema", schema(None))),
            (json!({"response_format": {"type": "json_object"}}), ("response_format", ResponseFormat::JsonObject)),
            (json!({"response_format": {"type": "json_object", "schema": object}}), ("response_format", schema(None))),
            (
                json!({"response_format": {"type": "json_schema", "json_schema": {"schema": object, "strict": true}}}),
                ("response_format", schema(Some(true))),
            ),
            (
                json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}),
                ("response_format", ResponseFormat::JsonObject),
            ),
            (json!({"response_format": {"type": "json_schema", "schema": object}}), ("response_format", schema(None))),
            (
                json!({"response_format": {"type": "grammar", "grammar": gbnf}}),
                ("response_format", ResponseFormat::Gbnf(gbnf.into())),
            ),
            (
                json!({"response_format": {"type": "regex", "pattern": "a+"}}),
                ("response_format", ResponseFormat::Regex("a+".into())),
            ),
            (json!({"guided_json": object}), ("guided_json", schema(None))),
            (json!({"guided_json": "{\"type\":\"object\"}"}), ("guided_json", schema(None))),
            (json!({"guided_regex": "a+"}), ("guided_regex", ResponseFormat::Regex("a+".into()))),
            (json!({"guided_choice": ["a", "b"]}), ("guided_choice", choice.clone())),
            (json!({"guided_grammar": gbnf}), ("guided_grammar", ResponseFormat::Gbnf(gbnf.into()))),
            (json!({"guided_json_object": true}), ("guided_json_object", ResponseFormat::JsonObject)),
            (
                json!({"structured_outputs": {"choice": ["a", "b"], "json": null, "disable_fallback": true}}),
                ("structured_outputs", choice),
            ),
            (json!({"structured_outputs": {"json": object}}), ("structured_outputs", schema(None))),
            (json!({"structured_outputs": {"json_object": true}}), ("structured_outputs", ResponseFormat::JsonObject)),
            (json!({"regex": "a+", "ebnf": ""}), ("regex", ResponseFormat::Regex("a+".into()))),
            (json!({"ebnf": gbnf, "regex": null}), ("ebnf", ResponseFormat::Gbnf(gbnf.into()))),
            // Two equal formats do not contradict each other.
            (json!({"regex": "a+", "guided_regex": "a+"}), ("guided_regex", ResponseFormat::Regex("a+".into()))),
        ] {
            assert_eq!(read(&fields), Ok(Some(expected)), "{fields}");
        }
    }

    #[test]
    fn empty_values_set_no_form() {
        for fields in [
            json!({}),
            json!({"grammar": "", "json_schema": null, "response_format": {"type": "text"}, "guided_json": {}}),
            json!({"guided_json_object": false, "guided_choice": [], "regex": null, "structured_outputs": {}}),
            json!({"structured_outputs": {"json": null, "whitespace_pattern": " "}, "format": "json", "grammar": false}),
        ] {
            assert_eq!(read(&fields), Ok(None), "{fields}");
        }
    }

    #[test]
    fn mistakes_name_the_field() {
        for (fields, param, message) in [
            (json!({"grammar": 1}), "grammar", "grammar must be a string"),
            (json!({"json_schema": [1]}), "json_schema", "json_schema must be a JSON schema: an object"),
            (json!({"guided_json": "[1]"}), "guided_json", "guided_json must be a JSON schema: its text is no object"),
            (json!({"guided_choice": ["a", 1]}), "guided_choice", "guided_choice must be a list of strings"),
            (json!({"guided_json_object": "yes"}), "guided_json_object", "guided_json_object must be true or false"),
            (
                json!({"response_format": {"type": "xml"}}),
                "response_format",
                "response_format has the unknown type \"xml\": use text, json_object, json_schema, grammar or regex",
            ),
            (
                json!({"response_format": {"type": "grammar"}}),
                "response_format",
                "response_format of type grammar needs the field grammar",
            ),
            (
                json!({"response_format": {"type": "structural_tag", "structures": []}}),
                "response_format",
                "response_format of type structural_tag cannot be followed: use json_schema or grammar",
            ),
            (
                json!({"structured_outputs": {"structural_tag": "{}"}}),
                "structured_outputs.structural_tag",
                "structured_outputs.structural_tag cannot be followed: use json or grammar",
            ),
            (
                json!({"structured_outputs": {"xml": "x"}}),
                "structured_outputs.xml",
                "structured_outputs.xml is unknown: use json, regex, choice, grammar or json_object",
            ),
            (
                json!({"regex": "a", "guided_json_object": true}),
                "regex",
                "guided_json_object and regex ask for different things: leave one of them out",
            ),
            (
                json!({"structured_outputs": {"regex": "a", "choice": ["b"]}}),
                "structured_outputs.choice",
                "structured_outputs.regex and structured_outputs.choice ask for different things: leave one of them out",
            ),
        ] {
            assert_eq!(read(&fields), Err(FieldError { param: param.into(), message: message.into() }), "{fields}");
        }
        let error = read(&json!({"guided_json": "{"})).unwrap_err();
        assert!(error.message.starts_with("guided_json must be a JSON schema, but its text is no JSON: "), "{error}");
    }
}
