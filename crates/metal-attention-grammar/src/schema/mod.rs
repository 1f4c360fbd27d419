//! JSON schemas of clients, as grammars can follow them.
//!
//! [`prepared`] is the whole way: `followed.rs` leaves out what no grammar enforces, by the keywords in files of their own,
//! and `closed.rs` ends objects at the properties that they name.

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

/// Most names by patterns (`patternProperties`) of a schema: each is compared with each.
const MAX_NAME_PATTERNS: usize = 16;
/// Most parts of a schema that must all hold (`allOf`): the names by patterns are compared for each.
const MAX_ALL_OF: usize = 64;
/// Most parts of a schema of which one must hold alone (`oneOf`): each is compared with each.
const MAX_ONE_OF: usize = 512;

/// White space between the parts of a JSON text: enough to be laid out, not enough to never end.
const JSON_SPACE: &str = r"( |\n[ \t]{0,32})?";
/// The types of JSON Schema.
const TYPES: [&str; 7] = ["array", "boolean", "integer", "null", "number", "object", "string"];

/// `schema` for texts that do not go on with white space or with properties for ever. What a request itself says about
/// how its schema is compiled is not followed.
/// `left_out`: places of assertions that are not enforced; with `strict` there must be none.
pub fn prepared(
    schema: &Value,
    strict: Option<bool>,
    detail: Detail,
    left_out: &mut Vec<String>,
) -> Result<Value, String> {
    check_effort(schema)?;
    let followed = enforceable(schema, detail)?;
    if let (Some(true), Some(place)) = (strict, followed.left_out.first()) {
        return Err(format!("it is strict, but {place} cannot be enforced: leave the keyword out, or strict"));
    }
    left_out.extend(followed.left_out);
    let mut schema = match strict {
        Some(false) => followed.schema,
        Some(true) | None => close(&followed.schema, strict.is_some())?,
    };
    if let Some(object) = schema.as_object_mut() {
        object.insert("x-guidance".into(), json!({"whitespace_pattern": JSON_SPACE}));
    }
    Ok(schema)
}

/// Refuses a schema whose size is in no proportion to the work that it makes.
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
