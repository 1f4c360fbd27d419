//! Expresses `not` and `dependentRequired` by other keywords, where that is possible.

use serde_json::{Value, json};

use super::TYPES;
use super::enforced::is_assertion;
use super::exclusive::types_of;

/// A schema for the values that are not valid under `schema`; `None` if it cannot be expressed. Supported are
/// negations of types and of the presence of a property.
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
            // A value that is not an integer may be another number, and no type expresses that.
            if not.contains("integer") && !not.contains("number") {
                return None;
            }
            let is_number = |name: &str| name == "integer" && not.contains("number");
            let left: Vec<_> =
                TYPES.iter().filter(|name| !not.contains(**name) && !is_number(name) && **name != "integer").collect();
            Some(json!({"type": left}))
        }
        (Some((keyword, value)), None) if keyword == "required" => match value.as_array()?.as_slice() {
            // A value that is not an object has no missing property, so only objects remain.
            [Value::String(name)] => Some(json!({"type": "object", "properties": {name: false}})),
            _ => None,
        },
        (Some(_), _) => None,
    }
}

/// The schemas of `dependentRequired`, one per name: the name is absent, or the others are present. `None` if there
/// are too many names or the value is invalid.
pub fn dependencies(value: &Value) -> Option<Vec<Value>> {
    /// The maximum number of names. Each doubles the number of forms of an object.
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
