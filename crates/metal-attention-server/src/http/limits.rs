//! How much a request may hold. It is counted on a first reading that keeps nothing, before anything is made of the
//! body: a few bytes of JSON can become a hundred in memory.

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};

use super::ApiError;
use super::body::Object;

/// Most fields of a request.
pub const MAX_FIELDS: usize = 1 << 10;
/// Most texts of a prompt.
pub const MAX_PROMPTS: usize = 256;
/// Most documents of a request.
pub const MAX_DOCUMENTS: usize = 256;
/// Most bytes of a model's name in a request, which each part of the answer repeats.
pub const MAX_MODEL_NAME: usize = 256;
/// Most token ids of a request.
pub const MAX_IDS: usize = 1 << 20;
/// Most texts that one request may ask for after each prompt.
pub const MAX_CHOICES: u32 = 16;
/// Most stop strings of a request.
pub const MAX_STOP_STRINGS: usize = 32;
/// Most bytes of a stop string.
pub const MAX_STOP_BYTES: usize = 1 << 10;
/// Most bytes of all stop strings together.
pub const MAX_STOP_BYTES_IN_ALL: usize = 16 << 10;
/// Most tokens that end a text: each token is compared with them.
pub const MAX_STOP_IDS: usize = 64;
/// Most samplers that are applied one after the other.
pub const MAX_SAMPLERS: usize = 32;
/// Most strings that end a repetition: each is looked for in each token of the vocabulary.
pub const MAX_BREAKERS: usize = 32;
/// Most bytes of such a string.
pub const MAX_BREAKER_BYTES: usize = 64;
/// Most tokens whose logits a request changes.
pub const MAX_LOGIT_BIAS: usize = 1 << 10;
/// Most items of a conversation.
pub const MAX_ITEMS: usize = 1 << 13;
/// Most messages of a conversation.
pub const MAX_MESSAGES: usize = 1 << 12;
/// Most bytes of a text of which it is not clear from its length whether the context has room for it.
pub const MAX_UNCLEAR_BYTES: usize = 1 << 20;
/// Most bytes of text that token ids are turned into.
pub const MAX_TEXT_BYTES: usize = 4 << 20;

/// Lists and objects inside each other, the field's own value included.
const MAX_DEPTH: usize = 64;

/// The most that a field may hold: values, in all its lists and objects together, and bytes of strings and names.
struct Limit {
    field: &'static str,
    values: usize,
    bytes: usize,
    work: WorkCost,
}

/// What of a field is work besides reading it.
enum WorkCost {
    /// Nothing.
    Nothing,
    /// Each value: it is part of a schema, which takes far longer to follow than to read.
    Values,
    /// Each value and each byte: texts may be grammars or schemas.
    Bytes,
}

const fn limit(field: &'static str, values: usize, bytes: usize) -> Limit {
    Limit { field, values, bytes, work: WorkCost::Nothing }
}

const fn schema(field: &'static str, bytes: usize) -> Limit {
    Limit { field, values: 8 << 10, bytes, work: WorkCost::Values }
}

const fn grammar(field: &'static str, values: usize, bytes: usize) -> Limit {
    Limit { field, values, bytes, work: WorkCost::Bytes }
}

/// Fields that may hold more or less than [`OTHERS`].
const LIMITS: [Limit; 25] = [
    limit("prompt", MAX_IDS + MAX_PROMPTS + 1, usize::MAX),
    limit("input", MAX_IDS + MAX_PROMPTS + 1, usize::MAX),
    limit("tokens", MAX_IDS + 1, usize::MAX),
    limit("context", MAX_IDS + 1, usize::MAX),
    schema("format", 256 << 10),
    schema("tools", 512 << 10),
    limit("tool_choice", 8 << 10, 64 << 10),
    schema("response_format", 256 << 10),
    schema("output_config", 256 << 10),
    schema("output_format", 256 << 10),
    grammar("json_schema", 8 << 10, 256 << 10),
    grammar("guided_json", 8 << 10, 256 << 10),
    grammar("structured_outputs", 8 << 10, 256 << 10),
    grammar("guided_choice", 8 << 10, 256 << 10),
    grammar("grammar", 64, 256 << 10),
    grammar("guided_grammar", 64, 256 << 10),
    grammar("ebnf", 64, 256 << 10),
    grammar("guided_regex", 64, 64 << 10),
    grammar("regex", 64, 64 << 10),
    limit("response_fields", 64, 64 << 10),
    schema("text", 256 << 10),
    limit("include", 64, 4 << 10),
    limit("metadata", 1 << 10, 64 << 10),
    limit("chat_template_kwargs", 1 << 10, 64 << 10),
    limit("stream_options", 64, 64 << 10),
];

/// What any other field may hold; of bytes, what the body may.
const OTHERS: Limit = limit("", 64 << 10, usize::MAX);

/// Checks that the fields of `object` hold no more than they may. Returns how many values its schemas and grammars have.
pub fn check(object: &Object<'_>) -> Result<usize, ApiError> {
    let mut schema_values = 0;
    for (field, value) in object.fields() {
        let limit = LIMITS.iter().find(|limit| limit.field == field).unwrap_or(&OTHERS);
        let mut count = FieldCount { limit, values: 0, bytes: 0, exceeded: None };
        let read = ValueCounter { count: &mut count, depth: 1 }.deserialize(value);
        if let Some(what) = count.exceeded {
            return Err(ApiError::field(field, format!("{field} {what}")));
        }
        read.map_err(|error| ApiError::invalid(format!("the body is no JSON: in {field}, {error}")))?;
        schema_values += match limit.work {
            WorkCost::Nothing => 0,
            WorkCost::Values => count.values,
            WorkCost::Bytes => count.values + count.bytes,
        };
    }
    Ok(schema_values)
}

/// What a field holds so far.
struct FieldCount {
    limit: &'static Limit,
    values: usize,
    bytes: usize,
    exceeded: Option<String>,
}

impl FieldCount {
    fn add<E: Error>(&mut self, values: usize, bytes: usize) -> Result<(), E> {
        self.values += values;
        self.bytes += bytes;
        let Limit { values, bytes, .. } = *self.limit;
        if self.values > values {
            return Err(self.exceed(format!("holds more than {values} values, which is the most that it may")));
        }
        if self.bytes > bytes {
            return Err(self.exceed(format!("holds more than {bytes} bytes of text, which is the most that it may")));
        }
        Ok(())
    }

    fn exceed<E: Error>(&mut self, what: String) -> E {
        self.exceeded = Some(what);
        E::custom("the field holds too much")
    }
}

/// Counts a value, which is `depth` deep in its field.
struct ValueCounter<'a> {
    count: &'a mut FieldCount,
    depth: usize,
}

impl ValueCounter<'_> {
    /// Counts a list or an object.
    fn enter<E: Error>(&mut self) -> Result<(), E> {
        if self.depth > MAX_DEPTH {
            let what = format!("has lists and objects more than {MAX_DEPTH} deep inside each other");
            return Err(self.count.exceed(what));
        }
        self.count.add(1, 0)
    }

    fn inner(&mut self) -> ValueCounter<'_> {
        ValueCounter { count: self.count, depth: self.depth + 1 }
    }
}

impl<'de> DeserializeSeed<'de> for ValueCounter<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for ValueCounter<'_> {
    type Value = ();

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E: Error>(self) -> Result<(), E> {
        self.count.add(1, 0)
    }

    fn visit_bool<E: Error>(self, _: bool) -> Result<(), E> {
        self.count.add(1, 0)
    }

    fn visit_i64<E: Error>(self, _: i64) -> Result<(), E> {
        self.count.add(1, 0)
    }

    fn visit_u64<E: Error>(self, _: u64) -> Result<(), E> {
        self.count.add(1, 0)
    }

    fn visit_f64<E: Error>(self, _: f64) -> Result<(), E> {
        self.count.add(1, 0)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<(), E> {
        self.count.add(1, text.len())
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut list: A) -> Result<(), A::Error> {
        self.enter()?;
        while list.next_element_seed(self.inner())?.is_some() {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<(), A::Error> {
        self.enter()?;
        while let Some(()) = map.next_key_seed(NameCounter { count: self.count })? {
            map.next_value_seed(self.inner())?;
        }
        Ok(())
    }
}

/// Counts the name of a field.
struct NameCounter<'a> {
    count: &'a mut FieldCount,
}

impl<'de> DeserializeSeed<'de> for NameCounter<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for NameCounter<'_> {
    type Value = ();

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a name")
    }

    fn visit_str<E: Error>(self, name: &str) -> Result<(), E> {
        self.count.add(0, name.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(json: &[u8]) -> Result<usize, ApiError> {
        super::check(&Object::split(json)?)
    }

    fn refused(json: &str) -> (Option<String>, String) {
        let body = serde_json::to_value(check(json.as_bytes()).unwrap_err().body()).unwrap();
        let error = &body["error"];
        (error["param"].as_str().map(str::to_owned), error["message"].as_str().unwrap().to_owned())
    }

    #[test]
    fn what_a_field_may_hold_is_counted() {
        let list = |n: usize, item: &str| vec![item; n].join(",");
        let field = |json: String| {
            let (field, message) = refused(&json);
            assert!(message.starts_with(field.as_deref().unwrap()), "{message}");
            message
        };
        let message = field(format!(r#"{{"prompt": [{}]}}"#, list(600_000, "[1]")));
        assert_eq!(message, "prompt holds more than 1048833 values, which is the most that it may");
        let message = field(format!(r#"{{"n": 1, "messages": [{}]}}"#, list(70_000, "{}")));
        assert_eq!(message, "messages holds more than 65536 values, which is the most that it may");
        let message = field(format!(r#"{{"tools": ["{}"]}}"#, "x".repeat(600_000)));
        assert_eq!(message, "tools holds more than 524288 bytes of text, which is the most that it may");
        let message = field(format!(r#"{{"chat_template_kwargs": {{"{}": 1}}}}"#, "x".repeat(70_000)));
        assert_eq!(message, "chat_template_kwargs holds more than 65536 bytes of text, which is the most that it may");
        let message = field(format!(r#"{{"whatever": {}1{}}}"#, "[".repeat(65), "]".repeat(65)));
        assert_eq!(message, "whatever has lists and objects more than 64 deep inside each other");
        field(format!(r#"{{"a": {}1{}}}"#, r#"{"a":"#.repeat(100_000), "}".repeat(100_000)));
        field(format!(r#"{{"a": {}1{}}}"#, "[".repeat(1_000_000), "]".repeat(1_000_000)));
    }

    #[test]
    fn what_is_left_of_the_limits_is_let_through() {
        let ids = vec!["511"; MAX_IDS].join(",");
        assert_eq!(check(format!(r#"{{"prompt": [{ids}]}}"#).as_bytes()), Ok(0));
        let nested = format!(r#"{{"x": {}1{}}}"#, "[".repeat(64), "]".repeat(64));
        assert_eq!(check(nested.as_bytes()), Ok(0));
        let text = "x".repeat(4 << 20);
        assert_eq!(check(format!(r#"{{"messages": [{{"content": "{text}"}}]}}"#).as_bytes()), Ok(0));
        let schema = br#"{"response_format": {"a": [1, -2, 3.5, null, true, "x"]}, "tools": []}"#;
        assert_eq!(check(schema), Ok(9));
        assert_eq!(check(b"{}"), Ok(0));
    }

    #[test]
    fn what_is_no_object_is_refused() {
        for json in ["[]", "1", "null", "\"x\""] {
            assert_eq!(refused(json), (None, "the body must be a JSON object".into()), "{json}");
        }
        for json in ["", "{", "{\"a\":}", "{} {}", "{\"a\":1e999}", "{\"a\":\"\\ud800\"}", "{1:2}", "{\"a\" 1}"] {
            assert!(refused(json).1.starts_with("the body is no JSON: "), "{json}: {}", refused(json).1);
        }
    }
}
