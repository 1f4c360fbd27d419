//! Limits on the contents of a request's fields. They are checked in a first pass over the JSON that keeps nothing:
//! a few bytes of JSON can become a hundred in memory.

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};

use super::ApiError;
use super::body::Object;

/// Maximum fields of a request.
pub const MAX_FIELDS: usize = 1 << 10;
/// Maximum prompts of a request.
pub const MAX_PROMPTS: usize = 256;
/// Maximum documents of a request.
pub const MAX_DOCUMENTS: usize = 256;
/// Maximum bytes of a model's name, which every chunk of a stream repeats.
pub const MAX_MODEL_NAME: usize = 256;
/// Maximum token ids of a request.
pub const MAX_IDS: usize = 1 << 20;
/// Maximum choices (`n`) of each prompt.
pub const MAX_CHOICES: u32 = 16;
/// Maximum stop strings of a request.
pub const MAX_STOP_STRINGS: usize = 32;
/// Maximum bytes of a stop string.
pub const MAX_STOP_BYTES: usize = 1 << 10;
/// Maximum bytes of all stop strings of a request.
pub const MAX_STOP_BYTES_IN_ALL: usize = 16 << 10;
/// Maximum stop tokens of a request: each generated token is compared with them.
pub const MAX_STOP_IDS: usize = 64;
/// Maximum samplers in a chain.
pub const MAX_SAMPLERS: usize = 32;
/// Maximum sequence breakers of DRY: each is searched in every token of the vocabulary.
pub const MAX_BREAKERS: usize = 32;
/// Maximum bytes of a sequence breaker.
pub const MAX_BREAKER_BYTES: usize = 64;
/// Maximum tokens with a logit bias.
pub const MAX_LOGIT_BIAS: usize = 1 << 10;
/// Maximum items of a conversation (Responses interface).
pub const MAX_ITEMS: usize = 1 << 13;
/// Maximum messages of a conversation.
pub const MAX_MESSAGES: usize = 1 << 12;
/// Texts up to this many bytes are tokenised even where their length suggests that they exceed the context.
pub const MAX_UNCLEAR_BYTES: usize = 1 << 20;
/// Maximum bytes of the text that token ids are decoded to.
pub const MAX_TEXT_BYTES: usize = 4 << 20;

/// Maximum nesting of lists and objects in a field, its own value included.
const MAX_DEPTH: usize = 64;

/// The maximum contents of one field.
struct Limit {
    /// The field's name.
    field: &'static str,
    /// Values, in all lists and objects together.
    values: usize,
    /// Bytes of strings and names.
    bytes: usize,
    /// Additional CPU work of its contents.
    work: WorkCost,
}

/// The CPU work of a field's contents except parsing JSON.
enum WorkCost {
    /// None.
    Nothing,
    /// Per value: it is a JSON schema, and compiling one takes far longer than parsing it.
    Values,
    /// Per value and byte: strings may be grammars or schemas.
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

/// Fields with other limits than [`OTHERS`].
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

/// The limits of all other fields; their bytes are bounded by the body's.
const OTHERS: Limit = limit("", 64 << 10, usize::MAX);

/// Checks the fields of `object` against their limits. Returns the number of values in its schemas and grammars (see
/// [`WorkCost`]), by which the CPU work is estimated.
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

/// The contents of a field that were counted so far.
struct FieldCount {
    /// The limits of the field.
    limit: &'static Limit,
    /// Values so far.
    values: usize,
    /// Bytes of strings and names so far.
    bytes: usize,
    /// The limit that is exceeded, as the rest of a message.
    exceeded: Option<String>,
}

impl FieldCount {
    /// Adds to the count; fails beyond the limit.
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

/// Counts a value at nesting `depth` of its field.
struct ValueCounter<'a> {
    /// The count of its field.
    count: &'a mut FieldCount,
    /// Its nesting; 1 for the value of the field itself.
    depth: usize,
}

impl ValueCounter<'_> {
    /// Counts the beginning of a list or an object.
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

/// Counts a field's name.
struct NameCounter<'a> {
    /// The count of its field.
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
    fn the_contents_of_a_field_are_limited() {
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
    fn contents_up_to_the_limits_are_accepted() {
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
    fn a_body_that_is_no_object_is_refused() {
        for json in ["[]", "1", "null", "\"x\""] {
            assert_eq!(refused(json), (None, "the body must be a JSON object".into()), "{json}");
        }
        for json in ["", "{", "{\"a\":}", "{} {}", "{\"a\":1e999}", "{\"a\":\"\\ud800\"}", "{1:2}", "{\"a\" 1}"] {
            assert!(refused(json).1.starts_with("the body is no JSON: "), "{json}: {}", refused(json).1);
        }
    }
}
