//! Negations and dependencies that other keywords can say.

use serde_json::{Value, json};

use super::TYPES;
use super::enforced::is_assertion;
use super::exclusive::types_of;

/// What a value that does not follow `schema` follows, for negations that a grammar can say: of types, and of the presence of
/// a property.
pub fn negated(schema: &Value) -> Option<Value> {
    let object = match schema {
        Value::Bool(holds) => return Some(Value::Bool(!holds)),
        Value::Object(object) => object,
        Value::Null | Value::Number(_) | Value::String(_) | Value::Array(_) => return None,
    };
    let mut assertions = object.iter().filter(|(keyword, _)| is_assertion(keyword));
    match (assertions.next(), assertions.next()) {
        (None, _) => Some(Value::Bool(false)),
        (Some((keyword, _)), None) if keyword == "type" => {
            let not = types_of(object)?;
            // What is no integer may be another number, which no type says.
            if not.contains("integer") && !not.contains("number") {
                return None;
            }
            let is_number = |name: &str| name == "integer" && not.contains("number");
            let left: Vec<_> =
                TYPES.iter().filter(|name| !not.contains(**name) && !is_number(name) && **name != "integer").collect();
            Some(json!({"type": left}))
        }
        (Some((keyword, value)), None) if keyword == "required" => match value.as_array()?.as_slice() {
            // What is no object has all that an object requires.
            [Value::String(name)] => Some(json!({"type": "object", "properties": {name: false}})),
            _ => None,
        },
        (Some(_), _) => None,
    }
}

/// `dependentRequired`, for each name: it is absent, or the others are there.
pub fn dependencies(value: &Value) -> Option<Vec<Value>> {
    /// Most names: each doubles the ways in which an object can be written.
    const MOST: usize = 4;
    let names = value.as_object().filter(|names| names.len() <= MOST)?;
    names
        .iter()
        .map(|(name, others)| {
            let others = others.as_array().filter(|others| others.iter().all(Value::is_string))?;
            let all: Vec<_> = std::iter::once(Value::from(name.clone())).chain(others.iter().cloned()).collect();
            Some(json!({"anyOf": [{"properties": {name: false}}, {"required": all}]}))
        })
        .collect()
}
