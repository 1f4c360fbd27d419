//! The parameters of functions and their types, from the tools' JSON schemas. Some notations write strings and other
//! values alike; the types tell them apart.

use std::collections::HashMap;

use serde::de::IgnoredAny;
use serde_json::{Value, json};

use super::lenient_json::{JsonStep, LenientJson, scalar};
use super::python_value;
use crate::Tool;

/// The maximum number of schemas that are read, for all functions together. Schemas may refer to themselves.
const MAX_SCHEMAS: usize = 1 << 16;
/// The maximum nesting of schemas that are read.
const MAX_DEPTH: usize = 8;

/// The signatures of the functions, by name.
#[derive(Debug, Default)]
pub(super) struct Signatures(HashMap<String, Signature>);

#[derive(Debug, Default)]
struct Signature {
    /// The parameters in the order of the schema.
    names: Vec<String>,
    kinds: HashMap<String, ValueKinds>,
}

impl Signatures {
    pub fn of(tools: &[Tool]) -> Self {
        let mut left = MAX_SCHEMAS;
        let mut signature = |tool: &Tool| {
            let mut signature = Signature::default();
            let properties = tool.parameters().and_then(|root| Some((root, root["properties"].as_object()?)));
            for (root, (name, schema)) in properties.into_iter().flat_map(|(root, p)| p.iter().map(move |p| (root, p)))
            {
                signature.names.push(name.clone());
                signature.kinds.insert(name.clone(), ValueKinds::of(schema, root, MAX_DEPTH, &mut left));
            }
            signature
        };
        Self(tools.iter().map(|tool| (tool.name().to_owned(), signature(tool))).collect())
    }

    /// Whether there is a function of this name.
    pub fn has(&self, function: &str) -> bool {
        self.0.contains_key(function)
    }

    /// Whether the name of a function begins with `text`.
    pub fn begins_name(&self, text: &str) -> bool {
        self.0.keys().any(|name| name.starts_with(text))
    }

    /// The length in bytes of the longest function name that `text` begins with.
    pub fn longest_name_in(&self, text: &str) -> usize {
        self.0.keys().filter(|name| text.starts_with(name.as_str())).map(String::len).max().unwrap_or(0)
    }

    /// Whether the schema of `function` has the parameter `key`.
    pub fn has_argument(&self, function: &str, key: &str) -> bool {
        self.0.get(function).is_some_and(|signature| signature.kinds.contains_key(key))
    }

    /// The types that the parameter `key` allows; any type if it is unknown.
    pub fn kinds(&self, function: &str, key: &str) -> ValueKinds {
        self.0.get(function).and_then(|signature| signature.kinds.get(key)).copied().unwrap_or(ValueKinds::ANY)
    }

    /// The name of the parameter at position `at`.
    pub fn name_of(&self, function: &str, at: usize) -> Option<&str> {
        self.0.get(function)?.names.get(at).map(String::as_str)
    }
}

/// The JSON types that a parameter allows, one bit each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ValueKinds(u8);

impl ValueKinds {
    const TEXT: Self = Self(1);
    const NUMBER: Self = Self(2);
    const BOOLEAN: Self = Self(4);
    const NULL: Self = Self(8);
    const LIST: Self = Self(16);
    const OBJECT: Self = Self(32);
    pub const ANY: Self = Self(63);

    /// Whether only strings are allowed. Then a value is a string, whatever it looks like.
    pub fn are_text(self) -> bool {
        self == Self::TEXT
    }

    fn has(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    fn of_value(value: &Value) -> Self {
        match value {
            Value::Null => Self::NULL,
            Value::Bool(_) => Self::BOOLEAN,
            Value::Number(_) => Self::NUMBER,
            Value::String(_) => Self::TEXT,
            Value::Array(_) => Self::LIST,
            Value::Object(_) => Self::OBJECT,
        }
    }

    fn of_type(name: &Value) -> Self {
        match name.as_str() {
            Some("string") => Self::TEXT,
            Some("number" | "integer") => Self::NUMBER,
            Some("boolean") => Self::BOOLEAN,
            Some("null") => Self::NULL,
            Some("array") => Self::LIST,
            Some("object") => Self::OBJECT,
            Some(_) | None => Self::ANY,
        }
    }

    /// The type of the JSON value `text`, which may be a number of any size; `None` if it is not JSON.
    fn of_json(text: &str) -> Option<Self> {
        serde_json::from_str::<IgnoredAny>(text).ok()?;
        Some(match text.trim_start().bytes().next()? {
            b'"' => Self::TEXT,
            b'{' => Self::OBJECT,
            b'[' => Self::LIST,
            b't' | b'f' => Self::BOOLEAN,
            b'n' => Self::NULL,
            _ => Self::NUMBER,
        })
    }

    /// The repaired JSON of `text`, if it resembles a value of an allowed type.
    fn mended(self, text: &str) -> Option<String> {
        if self == Self::ANY {
            return None;
        }
        let json = if text.starts_with(['{', '[']) {
            let mut reader = LenientJson::new();
            // Text after the value is ignored.
            text.chars().all(|c| reader.push(c) == JsonStep::More);
            reader.finish();
            Some(reader.take())
        } else {
            scalar(text)
        };
        json.filter(|json: &String| Self::of_json(json).is_some_and(|kind| self.has(kind)))
    }

    /// The types that `schema` allows. `root` is the schema that contains it; `left` is the number of schemas that may
    /// still be read.
    fn of(schema: &Value, root: &Value, depth: usize, left: &mut usize) -> Self {
        let Some(schema) = schema.as_object().filter(|_| depth > 0 && *left > 0) else { return Self::ANY };
        *left -= 1;
        let mut kinds = Self::ANY;
        let mut narrow = |other: Self| kinds = Self(kinds.0 & other.0);
        let any_of = |kinds: &mut dyn Iterator<Item = Self>| Self(kinds.fold(0, |all, kinds| all | kinds.0));
        for (key, value) in schema {
            match (key.as_str(), value) {
                ("type", Value::Array(names)) => narrow(any_of(&mut names.iter().map(Self::of_type))),
                ("type", name) => narrow(Self::of_type(name)),
                ("enum", Value::Array(values)) => narrow(any_of(&mut values.iter().map(Self::of_value))),
                ("const", value) => narrow(Self::of_value(value)),
                ("anyOf" | "oneOf", Value::Array(schemas)) => {
                    narrow(any_of(&mut schemas.iter().map(|schema| Self::of(schema, root, depth - 1, left))));
                }
                ("allOf", Value::Array(schemas)) => {
                    for schema in schemas {
                        narrow(Self::of(schema, root, depth - 1, left));
                    }
                }
                ("$ref", Value::String(at)) => {
                    if let Some(schema) = at.strip_prefix('#').and_then(|at| root.pointer(at)) {
                        narrow(Self::of(schema, root, depth - 1, left));
                    }
                }
                (_, _) => {}
            }
        }
        // A schema that allows nothing is ignored.
        if kinds.0 == 0 { Self::ANY } else { kinds }
    }

    /// The JSON of `text`, a value without quotes from between tags. It is a string if it is not a value of another
    /// allowed type.
    pub fn as_json(self, text: &str) -> String {
        let trimmed = text.trim();
        if self.are_text() {
            return json!(text).to_string();
        }
        if let Some(kind) = Self::of_json(trimmed)
            && (self.has(kind) || !self.has(Self::TEXT))
        {
            return trimmed.to_owned();
        }
        // Python's notation. It is not tried if any type is allowed, because the text may be a string.
        let python = Some(trimmed).filter(|_| self != Self::ANY).and_then(python_value::as_json);
        let python =
            python.filter(|json| !self.has(Self::TEXT) || Self::of_json(json).is_some_and(|kind| self.has(kind)));
        python.or_else(|| self.mended(trimmed)).unwrap_or_else(|| json!(text).to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kinds(schema: &Value) -> ValueKinds {
        let root = json!({"$defs": {"city": {"enum": ["Bern"]}, "loop": {"anyOf": [{"$ref": "#/$defs/loop"}]}}});
        ValueKinds::of(schema, &root, MAX_DEPTH, &mut 1000)
    }

    #[test]
    fn schemas_give_the_kinds() {
        let either = |kinds: &[ValueKinds]| ValueKinds(kinds.iter().fold(0, |all, kinds| all | kinds.0));
        for (schema, expected) in [
            (json!({}), ValueKinds::ANY),
            (json!(true), ValueKinds::ANY),
            (json!({"type": "string"}), ValueKinds::TEXT),
            (json!({"enum": ["a", "b"]}), ValueKinds::TEXT),
            (json!({"type": "integer", "enum": [1, 2]}), ValueKinds::NUMBER),
            (json!({"const": null}), ValueKinds::NULL),
            (json!({"type": ["string", "null"]}), either(&[ValueKinds::TEXT, ValueKinds::NULL])),
            (
                json!({"anyOf": [{"type": "array"}, {"type": "object"}]}),
                either(&[ValueKinds::LIST, ValueKinds::OBJECT]),
            ),
            (json!({"allOf": [{"type": ["string", "boolean"]}, {"type": "boolean"}]}), ValueKinds::BOOLEAN),
            (json!({"$ref": "#/$defs/city"}), ValueKinds::TEXT),
            (json!({"$ref": "#/$defs/loop"}), ValueKinds::ANY),
            (json!({"$ref": "elsewhere"}), ValueKinds::ANY),
            (json!({"type": "string", "enum": [1]}), ValueKinds::ANY),
        ] {
            assert_eq!(kinds(&schema), expected, "{schema}");
        }
    }

    #[test]
    fn values_follow_the_schema() {
        for (schema, text, expected) in [
            (json!({"type": "string"}), "12", "\"12\""),
            (json!({"type": "string"}), " \"a\"\n", "\" \\\"a\\\"\\n\""),
            (json!({"type": "integer"}), " 12\n", "12"),
            (json!({"type": "integer"}), "twelve", "\"twelve\""),
            (json!({"type": "boolean"}), "True", "true"),
            (json!({"type": ["string", "null"]}), "None", "null"),
            (json!({"type": ["string", "null"]}), "12", "\"12\""),
            (json!({"type": ["string", "integer"]}), "12", "12"),
            (json!({"type": "array"}), "['a', True]", "[\"a\", true]"),
            (json!({"type": "object"}), "{\"a\": [1.50]}", "{\"a\": [1.50]}"),
            (json!({}), "12", "12"),
            (json!({}), "True", "\"True\""),
            (json!({}), "\"x\"", "\"x\""),
        ] {
            assert_eq!(kinds(&schema).as_json(text), expected, "{schema} {text}");
        }
    }

    /// Reading schemas that refer to themselves many times terminates.
    #[test]
    fn hostile_schemas_end() {
        let references = vec![json!({"$ref": "#/$defs/n"}); 100];
        let tool = json!({"type": "function", "function": {"name": "f", "parameters": {
            "properties": {"a": {"anyOf": references}}, "$defs": {"n": {"anyOf": references}}}}});
        let signatures = Signatures::of(&[Tool::try_from(tool).unwrap()]);
        assert_eq!(signatures.kinds("f", "a"), ValueKinds::ANY);
        assert_eq!((signatures.name_of("f", 0), signatures.name_of("f", 1)), (Some("a"), None));
    }
}
