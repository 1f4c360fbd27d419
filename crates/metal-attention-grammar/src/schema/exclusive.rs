//! Detects schemas that exclude each other. Then `oneOf` can be enforced as `anyOf`.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use super::references::References;

/// The maximum nesting of schemas that are compared.
const MAX_DEPTH: usize = 4;

impl References<'_> {
    /// Whether no value can be valid under two of `parts`. False if that is not certain.
    pub fn exclude_each_other(&self, parts: &[Value]) -> bool {
        parts.iter().enumerate().all(|(i, part)| parts[i + 1..].iter().all(|other| self.disjoint(part, other, 0)))
    }

    /// Whether no value can be valid under both `a` and `b`. False if that is not certain.
    fn disjoint(&self, a: &Value, b: &Value, depth: usize) -> bool {
        if depth > MAX_DEPTH {
            return false;
        }
        let (Some(a), Some(b)) = (self.target(a), self.target(b)) else {
            return a == &Value::Bool(false) || b == &Value::Bool(false);
        };
        if let (Some(types), Some(others)) = (types_of(a), types_of(b)) {
            if !types.iter().any(|name| others.iter().any(|other| same_type(name, other))) {
                return true;
            }
            let is_object = |types: &BTreeSet<String>| types.iter().eq(["object"]);
            if is_object(&types) && is_object(&others) {
                let property =
                    |of: &Map<String, Value>, name: &str| of.get("properties").and_then(|all| all.get(name)).cloned();
                let names = [a, b].into_iter().filter_map(|of| of.get("required")?.as_array()).flatten();
                return names.filter_map(Value::as_str).any(|name| match (property(a, name), property(b, name)) {
                    (Some(one), Some(other)) => self.disjoint(&one, &other, depth + 1),
                    (Some(_) | None, _) => false,
                });
            }
        }
        match (values_of(a), values_of(b)) {
            (Some(values), Some(others)) => !values.iter().any(|value| others.contains(value)),
            (Some(_) | None, _) => false,
        }
    }

    /// The keywords of a schema, or of the target of its reference.
    fn target<'b>(&'b self, schema: &'b Value) -> Option<&'b Map<String, Value>> {
        let object = schema.as_object()?;
        match object.get("$ref").and_then(Value::as_str) {
            Some(reference) => self.resolve(reference)?.as_object(),
            None => Some(object),
        }
    }
}

/// The JSON types that a schema allows; `None` if it does not restrict them.
pub fn types_of(object: &Map<String, Value>) -> Option<BTreeSet<String>> {
    match object.get("type") {
        Some(Value::String(name)) => Some([name.clone()].into()),
        Some(Value::Array(names)) => names.iter().map(|name| name.as_str().map(str::to_owned)).collect(),
        Some(Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_)) => None,
        None => values_of(object).map(|values| values.iter().map(|value| type_of(value).to_owned()).collect()),
    }
}

/// Whether a value may have both types.
fn same_type(a: &str, b: &str) -> bool {
    a == b || matches!((a, b), ("integer", "number") | ("number", "integer"))
}

/// The values that `enum` or `const` lists; `None` if neither is there.
pub fn values_of(object: &Map<String, Value>) -> Option<Vec<Value>> {
    let listed = object.get("enum").and_then(Value::as_array).cloned();
    object.get("const").map(|value| vec![value.clone()]).or(listed)
}

fn type_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}
