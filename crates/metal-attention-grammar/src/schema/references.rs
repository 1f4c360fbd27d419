//! Resolves the references (`$ref`) of a JSON schema.

use std::collections::{BTreeMap, HashSet};
use std::ptr;

use percent_encoding::percent_decode_str;
use serde_json::{Map, Value};

use super::enforced::MAX_DEPTH;

/// The maximum number of schemas that are visited to detect a cycle, per reference.
const MAX_STEPS: usize = 2000;

/// A schema with an index of its named parts.
pub struct References<'a> {
    root: &'a Value,
    /// The schemas with a `$anchor` or `$id`, by that name.
    anchors: BTreeMap<&'a str, &'a Value>,
}

impl<'a> References<'a> {
    /// Indexes the named parts of `root`.
    pub fn new(root: &'a Value) -> Self {
        let mut references = Self { root, anchors: BTreeMap::new() };
        references.find_anchors(root, 0);
        references
    }

    fn find_anchors(&mut self, value: &'a Value, depth: usize) {
        if depth > MAX_DEPTH {
            return;
        }
        match value {
            Value::Object(object) => {
                for keyword in ["$anchor", "$dynamicAnchor", "$id", "id"] {
                    if let Some(name) = object.get(keyword).and_then(Value::as_str) {
                        self.anchors.entry(name).or_insert(value);
                    }
                }
                object.values().for_each(|value| self.find_anchors(value, depth + 1));
            }
            Value::Array(list) => list.iter().for_each(|value| self.find_anchors(value, depth + 1)),
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
        }
    }

    /// The target of a reference: a percent-encoded JSON pointer (RFC 6901) in a fragment, an anchor, or an
    /// identifier. `None` if it is not in the schema.
    pub fn resolve(&self, reference: &str) -> Option<&'a Value> {
        if let Some(found) = self.anchors.get(reference) {
            return Some(found);
        }
        let (base, fragment) = reference.split_once('#')?;
        let start = if base.is_empty() { self.root } else { self.anchors.get(base)? };
        let fragment = percent_decode_str(fragment).decode_utf8().ok()?;
        match &*fragment {
            "" => Some(start),
            pointer if pointer.starts_with('/') => start.pointer(pointer),
            anchor => self.anchors.get(anchor).copied(),
        }
    }

    /// Whether `reference`, a `$ref` of `object`, leads back to `object` through references and combining keywords
    /// (`allOf`, `anyOf`, `oneOf`) alone, that is, without descending into a value.
    pub fn leads_back(&self, reference: &str, object: &Map<String, Value>) -> bool {
        self.reaches(reference, object, |keywords| {
            let parts = ["allOf", "anyOf", "oneOf"].into_iter().filter_map(|keyword| keywords.get(keyword)?.as_array());
            parts.flatten().collect()
        })
    }

    /// Whether `reference`, a `$ref` of `object`, leads back to `object`, also by descending into the value.
    pub fn recurs(&self, reference: &str, object: &Map<String, Value>) -> bool {
        self.reaches(reference, object, |keywords| {
            let inner = |value: &'a Value| match value {
                Value::Array(list) => list.iter().collect::<Vec<_>>(),
                Value::Object(_) => vec![value],
                Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => Vec::new(),
            };
            keywords.values().flat_map(inner).collect()
        })
    }

    /// Whether `object` can be reached from the target of `reference` through further references and the sub-schemas
    /// that `parts` returns.
    fn reaches(
        &self,
        reference: &str,
        object: &Map<String, Value>,
        parts: impl Fn(&'a Map<String, Value>) -> Vec<&'a Value>,
    ) -> bool {
        let mut left: Vec<_> = self.resolve(reference).into_iter().collect();
        let mut seen: HashSet<*const Map<String, Value>> = HashSet::new();
        while let Some(schema) = left.pop() {
            let Some(keywords) = schema.as_object() else { continue };
            if ptr::eq(keywords, object) {
                return true;
            }
            if seen.len() == MAX_STEPS || !seen.insert(keywords) {
                continue;
            }
            let reference = keywords.get("$ref").and_then(Value::as_str);
            left.extend(reference.and_then(|reference| self.resolve(reference)));
            left.extend(parts(keywords));
        }
        false
    }
}
