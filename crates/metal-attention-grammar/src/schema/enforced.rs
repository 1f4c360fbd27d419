//! Reduces a JSON schema to the part that a grammar can enforce.
//!
//! The input is a client's schema: JSON Schema 2020-12, its earlier drafts, or OpenAPI's `nullable`. The output has
//! only keywords that llguidance enforces exactly. Annotations are dropped. An assertion that cannot be enforced is
//! left out, and its JSON pointer is listed. So every text of the grammar is valid, except for the listed assertions.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use percent_encoding::percent_decode_str;
use serde_json::{Map, Value, json};

use super::TYPES;
use super::exclusive::{types_of, values_of};
use super::multiples::Multiples;
use super::negated::{dependencies, negated};
use super::patterns::{begin_differently, kept_apart, size_if_enforced};
use super::references::References;

/// The formats that the grammar enforces. Other formats are annotations (JSON Schema 2020-12, Validation, 7.2.1).
const FORMATS: [&str; 9] = ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"];
/// The maximum magnitude of a numeric bound, 2^53. Beyond it doubles do not represent all integers, and the bound is
/// left out.
const MAX_EXACT: f64 = 9_007_199_254_740_992.0;
/// The maximum number of optional properties of one object. The size of an object's grammar is quadratic in it.
const MAX_OPTIONAL: usize = 400;
/// The maximum size of all patterns of a schema together, in elements, repetitions expanded.
const MAX_PATTERN_SIZE: u64 = 1 << 20;
/// The maximum nesting of schemas, references included.
pub const MAX_DEPTH: usize = 200;

/// The part of a schema that a grammar enforces.
#[derive(Debug, Clone, PartialEq)]
pub struct EnforcedSchema {
    /// The reduced schema. Its references lead to `#/$defs`.
    pub schema: Value,
    /// JSON pointers to the keywords that were left out, such as `#/properties/d/not`.
    pub left_out: Vec<String>,
}

/// The detail in which a schema is enforced. Coarser levels are tried when llguidance cannot compile a finer one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Detail {
    /// Everything that a grammar can enforce.
    Full,
    /// Without patterns and `multipleOf`, which make grammars large or ambiguous when schemas are merged.
    Rough,
    /// In addition without recursive references: llguidance does not terminate on a schema that is merged with a part
    /// of itself.
    Flat,
}

/// The keywords that only [`Detail::Full`] enforces.
const DETAILS: [&str; 4] = ["pattern", "patternProperties", "propertyNames", "multipleOf"];

/// The part of `schema` that a grammar can enforce. An error message if `schema` is not a JSON schema, or is nested
/// too deeply.
pub fn enforceable(schema: &Value, detail: Detail) -> Result<EnforcedSchema, String> {
    let mut builder = EnforcedSchemaBuilder {
        references: References::new(schema),
        detail,
        targets: BTreeMap::new(),
        pending: VecDeque::new(),
        left_out: BTreeSet::new(),
        multiples: Multiples::default(),
        pattern_size: 0,
    };
    let mut enforced = builder.schema(schema, "#", 0)?;
    let mut definitions = Map::new();
    while let Some((name, target, place)) = builder.pending.pop_front() {
        definitions.insert(name, builder.schema(target, &place, 0)?);
    }
    if let (false, Some(root)) = (definitions.is_empty(), enforced.as_object_mut()) {
        root.insert("$defs".into(), definitions.into());
    }
    Ok(EnforcedSchema { schema: enforced, left_out: builder.left_out.into_iter().collect() })
}

struct EnforcedSchemaBuilder<'a> {
    references: References<'a>,
    detail: Detail,
    /// For each reference, the name in `$defs` of its target.
    targets: BTreeMap<String, String>,
    /// Targets that are still to be reduced: name, schema, JSON pointer.
    pending: VecDeque<(String, &'a Value, String)>,
    left_out: BTreeSet<String>,
    multiples: Multiples,
    pattern_size: u64,
}

impl<'a> EnforcedSchemaBuilder<'a> {
    /// Records that a keyword of the schema at `place` is not enforced.
    fn leave_out(&mut self, place: &str, keyword: &str) {
        self.left_out.insert(format!("{place}/{}", escaped(keyword)));
    }

    /// The enforced part of `value`, the schema at the JSON pointer `place`.
    fn schema(&mut self, value: &'a Value, place: &str, depth: usize) -> Result<Value, String> {
        if depth > MAX_DEPTH {
            return Err(format!("its schemas are more than {MAX_DEPTH} deep in each other"));
        }
        match value {
            Value::Bool(_) => Ok(value.clone()),
            Value::Object(object) => self.object(object, place, depth),
            Value::Null | Value::Number(_) | Value::String(_) | Value::Array(_) => {
                Err(format!("{place} is no schema: it must be an object or a boolean"))
            }
        }
    }

    /// The enforced part of an object schema, keyword by keyword.
    fn object(&mut self, object: &'a Map<String, Value>, place: &str, depth: usize) -> Result<Value, String> {
        let mut out = Map::new();
        // Further assertions that are expressed as schemas of their own, for `allOf`.
        let mut all = Vec::new();
        for (keyword, value) in object {
            let at = || format!("{place}/{}", escaped(keyword));
            match keyword.as_str() {
                keyword if self.detail != Detail::Full && DETAILS.contains(&keyword) => self.leave_out(place, keyword),
                // Without the patterns it would forbid the names that they allow.
                "additionalProperties" if self.detail != Detail::Full && object.contains_key("patternProperties") => {
                    self.leave_out(place, keyword);
                }
                "properties" => drop(out.insert(keyword.clone(), self.schemas_by_name(value, &at(), depth)?)),
                "patternProperties" => self.pattern_properties(value, &mut out, place, depth)?,
                "additionalProperties" | "additionalItems" => {
                    out.insert(keyword.clone(), self.schema(value, &at(), depth + 1)?);
                }
                "items" if value.is_array() => {
                    out.insert("prefixItems".into(), self.schemas(value, &at(), depth)?);
                }
                "items" => drop(out.insert(keyword.clone(), self.schema(value, &at(), depth + 1)?)),
                "prefixItems" | "anyOf" => {
                    out.insert(keyword.clone(), self.schemas(value, &at(), depth)?);
                }
                "allOf" => {
                    if let Value::Array(parts) = self.schemas(value, &at(), depth)? {
                        // A placeholder keeps the order of keywords, which is the order of properties in the text.
                        if !parts.is_empty() {
                            out.insert(keyword.clone(), Value::Null);
                        }
                        all.extend(parts);
                    }
                }
                "oneOf" => {
                    let parts = self.schemas(value, &at(), depth)?;
                    if !value.as_array().is_some_and(|parts| self.references.exclude_each_other(parts)) {
                        self.leave_out(place, keyword);
                    }
                    // If several parts can be valid at once, one or more of them are valid.
                    if out.contains_key("anyOf") || object.contains_key("anyOf") {
                        all.push(json!({"anyOf": parts}));
                    } else {
                        out.insert("anyOf".into(), parts);
                    }
                }
                "$ref" => match value.as_str().and_then(|reference| self.reference(reference, object)) {
                    Some(reference) => drop(out.insert(keyword.clone(), reference.into())),
                    None if value.is_string() => self.leave_out(place, keyword),
                    None => return Err(format!("{} must be a string", at())),
                },
                "type" => self.types(value, &mut out, place)?,
                "enum" => match value {
                    Value::Array(values) => drop(out.insert(keyword.clone(), values.clone().into())),
                    _ => return Err(format!("{} must be a list", at())),
                },
                "const" => drop(out.insert(keyword.clone(), value.clone())),
                "required" => match value.as_array() {
                    Some(names) if names.iter().all(Value::is_string) => {
                        drop(out.insert(keyword.clone(), value.clone()));
                    }
                    // In OpenAPI 2 it is a flag of a parameter.
                    None if value.is_boolean() => {}
                    Some(_) | None => return Err(format!("{} must be a list of strings", at())),
                },
                "minLength" | "maxLength" | "minItems" | "maxItems" | "minProperties" | "maxProperties" => {
                    out.insert(
                        keyword.clone(),
                        count(value).ok_or_else(|| format!("{} must be a whole number", at()))?,
                    );
                }
                "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum" => {
                    self.bound(keyword, value, object, &mut out, place)?;
                }
                "multipleOf" => match value {
                    Value::Number(number) if self.multiples.take(number) => {
                        out.insert(keyword.clone(), value.clone());
                    }
                    Value::Number(_) => self.leave_out(place, keyword),
                    _ => return Err(format!("{} must be a number", at())),
                },
                "pattern" => match value.as_str() {
                    Some(pattern) if self.is_enforced(pattern) => drop(out.insert(keyword.clone(), value.clone())),
                    Some(_) => self.leave_out(place, keyword),
                    None => return Err(format!("{} must be a string", at())),
                },
                "format" if value.as_str().is_some_and(|format| FORMATS.contains(&format)) => {
                    out.insert(keyword.clone(), value.clone());
                }
                "uniqueItems"
                | "contains"
                | "dependentSchemas"
                | "dependencies"
                | "unevaluatedItems"
                | "unevaluatedProperties"
                    if !asserts_nothing(keyword, value) =>
                {
                    self.leave_out(place, keyword);
                }
                "if" if object.contains_key("then") || object.contains_key("else") => self.leave_out(place, keyword),
                "$dynamicRef" | "$recursiveRef" => self.leave_out(place, keyword),
                "not" => match negated(value) {
                    Some(part) => all.push(part),
                    None => self.leave_out(place, keyword),
                },
                "dependentRequired" => match dependencies(value) {
                    Some(parts) => all.extend(parts),
                    None => self.leave_out(place, keyword),
                },
                // `propertyNames` and `nullable` are handled below. Other keywords are annotations or unknown.
                _ => {}
            }
        }
        if let Some(names) = object.get("propertyNames").filter(|_| self.detail == Detail::Full) {
            self.property_names(names, object, &mut out, place)?;
        }
        if !all.is_empty() {
            out.insert("allOf".into(), all.into());
        }
        self.limit_optional(&mut out, place);
        self.limit_counts(&mut out, place);
        let is_nullable = object.get("nullable") == Some(&Value::Bool(true));
        // `nullable` is from OpenAPI 3.0.
        Ok(if is_nullable { json!({"anyOf": [out, {"type": "null"}]}) } else { out.into() })
    }

    /// The enforced parts of a list of schemas.
    fn schemas(&mut self, value: &'a Value, place: &str, depth: usize) -> Result<Value, String> {
        let list = value.as_array().ok_or_else(|| format!("{place} must be a list of schemas"))?;
        let enforced: Result<Vec<_>, _> =
            list.iter().enumerate().map(|(i, part)| self.schema(part, &format!("{place}/{i}"), depth + 1)).collect();
        Ok(enforced?.into())
    }

    /// The enforced parts of an object of schemas.
    fn schemas_by_name(&mut self, value: &'a Value, place: &str, depth: usize) -> Result<Value, String> {
        let object = value.as_object().ok_or_else(|| format!("{place} must be an object with schemas"))?;
        let mut out = Map::new();
        for (name, schema) in object {
            out.insert(name.clone(), self.schema(schema, &format!("{place}/{}", escaped(name)), depth + 1)?);
        }
        Ok(out.into())
    }

    /// Handles `patternProperties`. A pattern that cannot be enforced, or that could match the same name as a later
    /// pattern, is left out.
    fn pattern_properties(
        &mut self,
        value: &'a Value,
        out: &mut Map<String, Value>,
        place: &str,
        depth: usize,
    ) -> Result<(), String> {
        let at = format!("{place}/patternProperties");
        let patterns = value.as_object().ok_or_else(|| format!("{at} must be an object with schemas"))?;
        let mut enforced = Map::new();
        for (pattern, schema) in patterns {
            if self.is_enforced(pattern) {
                let schema = self.schema(schema, &format!("{at}/{}", escaped(pattern)), depth + 1)?;
                enforced.insert(pattern.clone(), schema);
            } else {
                self.leave_out(&at, pattern);
            }
        }
        // The grammar applies only one pattern to a name. So two patterns must not match the same name.
        let patterns: Vec<_> = enforced.keys().cloned().collect();
        for (i, pattern) in patterns.iter().enumerate() {
            for other in &patterns[i + 1..] {
                let [Some(schema), Some(other_schema)] = [pattern, other].map(|pattern| enforced.get(pattern).cloned())
                else {
                    continue;
                };
                if !begin_differently(pattern, other) {
                    enforced.remove(pattern);
                    match kept_apart(pattern, other) {
                        Some((pattern, other_apart)) => {
                            enforced.remove(other);
                            enforced.extend([(pattern, schema), (other_apart, other_schema)]);
                        }
                        None => self.leave_out(&at, pattern),
                    }
                }
            }
        }
        if !enforced.is_empty() {
            out.insert("patternProperties".into(), enforced.into());
        }
        Ok(())
    }

    /// The reference, in the output, for a `$ref` of `object`; `None` if its target does not exist, or leads back to
    /// `object` without consuming a value.
    fn reference(&mut self, reference: &str, object: &Map<String, Value>) -> Option<String> {
        let target = self.references.resolve(reference)?;
        if self.references.leads_back(reference, object) {
            return None;
        }
        if self.detail == Detail::Flat && self.references.recurs(reference, object) {
            return None;
        }
        let place = percent_decode_str(reference).decode_utf8().ok()?.into_owned();
        let name = self.targets.get(&place).cloned().unwrap_or_else(|| {
            let name = format!("d{}", self.targets.len());
            self.pending.push_back((name.clone(), target, place.clone()));
            name
        });
        self.targets.insert(place, name.clone());
        Some(format!("#/$defs/{name}"))
    }

    /// Handles `type`.
    fn types(&mut self, value: &Value, out: &mut Map<String, Value>, place: &str) -> Result<(), String> {
        let known = |name: &Value| name.as_str().is_some_and(|name| TYPES.contains(&name));
        match value {
            Value::String(_) if known(value) => drop(out.insert("type".into(), value.clone())),
            Value::Array(names) if names.iter().all(known) => drop(out.insert("type".into(), value.clone())),
            Value::String(_) | Value::Array(_) => self.leave_out(place, "type"),
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_) => {
                return Err(format!("{place}/type must be a string or a list of strings"));
            }
        }
        Ok(())
    }

    /// Handles a numeric bound.
    fn bound(
        &mut self,
        keyword: &str,
        value: &Value,
        object: &Map<String, Value>,
        out: &mut Map<String, Value>,
        place: &str,
    ) -> Result<(), String> {
        let number = match (keyword, value) {
            // In draft 4 these are boolean flags of minimum and maximum.
            ("exclusiveMinimum", Value::Bool(is_exclusive)) => {
                object.get("minimum").filter(|_| *is_exclusive).and_then(Value::as_f64)
            }
            ("exclusiveMaximum", Value::Bool(is_exclusive)) => {
                object.get("maximum").filter(|_| *is_exclusive).and_then(Value::as_f64)
            }
            (_, value) => Some(value.as_f64().ok_or_else(|| format!("{place}/{keyword} must be a number"))?),
        };
        match number {
            Some(number) if number.abs() <= MAX_EXACT => drop(out.insert(keyword.into(), json!(number))),
            Some(_) => self.leave_out(place, keyword),
            None => {}
        }
        Ok(())
    }

    /// Whether the grammar enforces a pattern: it has no lookaround, backreferences or word boundaries, and the
    /// patterns are not too large in total. Counts its size.
    fn is_enforced(&mut self, pattern: &str) -> bool {
        let Some(size) = size_if_enforced(pattern) else { return false };
        self.pattern_size = self.pattern_size.saturating_add(size);
        self.pattern_size <= MAX_PATTERN_SIZE
    }

    /// Handles `propertyNames`, if the object names no properties itself: as a pattern of names, or as a list of
    /// names.
    fn property_names(
        &mut self,
        value: &Value,
        object: &Map<String, Value>,
        out: &mut Map<String, Value>,
        place: &str,
    ) -> Result<(), String> {
        let Some(names) = value.as_object() else {
            if !value.is_boolean() {
                return Err(format!("{place}/propertyNames must be a schema"));
            }
            if value == &Value::Bool(false) {
                out.insert("maxProperties".into(), json!(0));
            }
            return Ok(());
        };
        let assertions: Vec<_> = names.iter().filter(|(keyword, _)| is_assertion(keyword)).collect();
        // A property name is always a string.
        let has_texts = types_of(names).is_none_or(|types| types.contains("string"));
        if !has_texts {
            out.insert("maxProperties".into(), json!(0));
            return Ok(());
        }
        let has_only =
            |keywords: &[&str]| assertions.iter().all(|(k, _)| *k == "type" || keywords.contains(&k.as_str()));
        if has_only(&[]) {
            return Ok(());
        }
        let pattern = match names.get("pattern").and_then(Value::as_str) {
            Some(pattern) if has_only(&["pattern"]) => Some(pattern.to_owned()),
            None if has_only(&["minLength", "maxLength"]) => pattern_of_lengths(names),
            Some(_) | None => None,
        };
        let known = values_of(names).filter(|_| has_only(&["enum"]) || has_only(&["const"]));
        let has_names = ["properties", "patternProperties"].iter().any(|keyword| object.contains_key(*keyword));
        let further = out.get("additionalProperties").cloned().unwrap_or(Value::Bool(true));
        match (pattern, known) {
            _ if has_names => self.leave_out(place, "propertyNames"),
            (Some(pattern), _) if self.is_enforced(&pattern) => {
                out.insert("patternProperties".into(), json!({pattern: further}));
                out.insert("additionalProperties".into(), Value::Bool(false));
            }
            (_, Some(known)) if known.len() <= MAX_OPTIONAL => {
                let texts = known.iter().filter_map(Value::as_str);
                let properties: Map<_, _> = texts.map(|name| (name.to_owned(), further.clone())).collect();
                out.insert("properties".into(), properties.into());
                out.insert("additionalProperties".into(), Value::Bool(false));
            }
            (Some(_) | None, _) => self.leave_out(place, "propertyNames"),
        }
        Ok(())
    }

    /// Drops optional properties beyond [`MAX_OPTIONAL`]. Texts without them are valid, too.
    fn limit_optional(&mut self, out: &mut Map<String, Value>, place: &str) {
        let required = required_names(out);
        let Some(properties) = out.get_mut("properties").and_then(Value::as_object_mut) else { return };
        let mut n_optional = 0;
        let before = properties.len();
        properties.retain(|name, _| {
            n_optional += usize::from(!required.contains(name));
            required.contains(name) || n_optional <= MAX_OPTIONAL
        });
        if properties.len() < before {
            out.insert("additionalProperties".into(), Value::Bool(false));
            self.leave_out(place, "properties");
        }
    }

    /// Drops `minProperties` and `maxProperties` where the grammar does not count properties: it counts only if all
    /// named properties are required.
    fn limit_counts(&mut self, out: &mut Map<String, Value>, place: &str) {
        if out.get("maxProperties") == Some(&json!(0)) {
            for keyword in ["maxProperties", "properties", "patternProperties"] {
                out.remove(keyword);
            }
            out.insert("additionalProperties".into(), Value::Bool(false));
        }
        let required = required_names(out);
        let named = out.get("properties").and_then(Value::as_object);
        let has_optional = named.is_some_and(|named| named.keys().any(|name| !required.contains(name)));
        // A schema that is merged with this one may name further properties.
        let is_merged = ["allOf", "anyOf", "$ref"].iter().any(|keyword| out.contains_key(*keyword))
            || ["/allOf/", "/anyOf/", "/oneOf/", "/$defs/"].iter().any(|part| place.contains(part));
        if has_optional || is_merged {
            for keyword in ["minProperties", "maxProperties"] {
                if out.remove(keyword).is_some_and(|n| n != 0) {
                    self.leave_out(place, keyword);
                }
            }
        }
    }
}

/// A pattern of the strings whose length, in characters, is within the bounds of a schema; `None` for invalid bounds.
fn pattern_of_lengths(bounds: &Map<String, Value>) -> Option<String> {
    let length = |keyword: &str| bounds.get(keyword).map(|length| count(length)?.as_u64());
    let least = length("minLength").unwrap_or(Some(0))?;
    let most = length("maxLength").map_or(Some(String::new()), |most| most.map(|n| n.to_string()))?;
    Some(format!("^[\\s\\S]{{{least},{most}}}$"))
}

/// The names of the required properties of an object.
fn required_names(object: &Map<String, Value>) -> BTreeSet<String> {
    let names = object.get("required").and_then(Value::as_array);
    names.into_iter().flatten().filter_map(Value::as_str).map(str::to_owned).collect()
}

/// A name as a segment of a JSON pointer (RFC 6901).
fn escaped(name: &str) -> String {
    name.replace('~', "~0").replace('/', "~1")
}

/// A count, which may be written as `3.0`; `None` for other values.
fn count(value: &Value) -> Option<Value> {
    let number = value.as_f64().filter(|n| n.fract() == 0.0 && (0.0..=f64::from(u32::MAX)).contains(n))?;
    Some(json!(number as u64))
}

/// Whether a keyword with this value restricts nothing.
fn asserts_nothing(keyword: &str, value: &Value) -> bool {
    match value {
        Value::Bool(holds) if keyword == "uniqueItems" => !holds,
        Value::Bool(holds) => *holds && keyword != "contains",
        Value::Object(object) => object.is_empty() && keyword != "contains",
        Value::Null | Value::Array(_) | Value::Number(_) | Value::String(_) => false,
    }
}

/// Whether a keyword of a schema is an assertion, not an annotation. `format` counts as an annotation here.
pub fn is_assertion(keyword: &str) -> bool {
    !["title", "description", "$comment", "default", "examples", "format"].contains(&keyword)
}
