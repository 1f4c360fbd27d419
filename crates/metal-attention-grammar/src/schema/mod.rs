//! Prepares JSON schemas of clients for llguidance.
//!
//! [`prepared`] runs both stages: `enforced.rs` removes what no grammar enforces (single keywords have files of their
//! own), and `closed.rs` restricts objects to the properties that they name.

mod closed;
mod enforced;
mod exclusive;
#[cfg(test)]
mod keywords;
mod multiples;
mod negated;
mod patterns;
#[cfg(test)]
mod random_schemas;
mod references;

use serde_json::{Value, json};

use closed::close;
pub use enforced::Detail;
use enforced::enforceable;

/// The maximum number of `patternProperties` entries in a schema: each is compared with each.
const MAX_NAME_PATTERNS: usize = 16;
/// The maximum number of `allOf` parts in a schema: patterns of names are compared for each.
const MAX_ALL_OF: usize = 64;
/// The maximum number of `oneOf` parts in a schema: each is compared with each.
const MAX_ONE_OF: usize = 512;

/// White space between the parts of a JSON text: enough for indentation, but bounded, so that a model cannot write it
/// for ever.
const JSON_SPACE: &str = r"( |\n[ \t]{0,32})?";
/// The type names of JSON Schema.
const TYPES: [&str; 7] = ["array", "boolean", "integer", "null", "number", "object", "string"];

/// `schema` in the form that llguidance compiles: reduced to what can be enforced, closed (unless `strict` is false),
/// and with bounded white space. Options for llguidance in the client's schema (`x-guidance`) are ignored.
///
/// `left_out` gets the JSON pointers of assertions that are not enforced. If `strict` is true and there are any, the
/// result is an error.
pub fn prepared(
    schema: &Value,
    strict: Option<bool>,
    detail: Detail,
    left_out: &mut Vec<String>,
) -> Result<Value, String> {
    check_effort(schema)?;
    let enforced = enforceable(schema, detail)?;
    if let (Some(true), Some(place)) = (strict, enforced.left_out.first()) {
        return Err(format!("it is strict, but {place} cannot be enforced: leave the keyword out, or strict"));
    }
    left_out.extend(enforced.left_out);
    let mut schema = match strict {
        Some(false) => enforced.schema,
        Some(true) | None => close(&enforced.schema, strict.is_some())?,
    };
    if let Some(object) = schema.as_object_mut() {
        object.insert("x-guidance".into(), json!({"whitespace_pattern": JSON_SPACE}));
    }
    Ok(schema)
}

/// Refuses a schema with more parts than the limits above, whose cost is quadratic.
fn check_effort(schema: &Value) -> Result<(), String> {
    let mut counts = [("patternProperties", MAX_NAME_PATTERNS, 0), ("allOf", MAX_ALL_OF, 0), ("oneOf", MAX_ONE_OF, 0)];
    let mut left = vec![schema];
    while let Some(value) = left.pop() {
        match value {
            Value::Object(object) => {
                for (keyword, _, n) in &mut counts {
                    *n += match object.get(*keyword) {
                        Some(Value::Object(parts)) => parts.len(),
                        Some(Value::Array(parts)) => parts.len(),
                        Some(Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_)) | None => 0,
                    };
                }
                left.extend(object.values());
            }
            Value::Array(list) => left.extend(list),
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
        }
    }
    match counts.into_iter().find(|(_, most, n)| n > most) {
        Some((keyword, most, n)) => Err(format!("it has {n} parts in {keyword}; at most {most} are allowed")),
        None => Ok(()),
    }
}
