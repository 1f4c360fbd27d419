//! Closes the objects of a JSON schema: an object may have only the properties that the schema names.
//!
//! By the JSON Schema specification an object may have any further properties unless `additionalProperties` forbids
//! them. A small model that may add properties often does not stop adding them.
//!
//! Every value that is valid under the closed schema is valid under the original one.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use serde_json::{Map, Value};

/// The maximum number of schemas and names that are read and written for one schema. References can expand a small
/// schema to a huge one.
const MAX_WORK: usize = 200_000;

/// `schema` with `additionalProperties: false` in each object that does not decide on additional properties itself: in
/// objects that name properties, and with `strict` also in those that name none. An error if it takes too much work.
pub fn close(schema: &Value, strict: bool) -> Result<Value, String> {
    let definitions = schema.get("$defs").and_then(Value::as_object);
    let mut closer =
        Closer { root: schema, strict, references: BTreeMap::new(), pending: VecDeque::new(), n_names: 0, work: 0 };
    let mut closed = closer.close(schema, &PropertyNames::default())?;
    let mut added = Map::new();
    while let Some((name, target, form)) = closer.pending.pop_front() {
        let definition = match form {
            DefinitionForm::Closed => closer.close(target, &PropertyNames::default())?,
            DefinitionForm::Open => closer.open(target)?,
        };
        added.insert(name, definition);
    }
    if let (false, Some(root)) = (added.is_empty(), closed.as_object_mut()) {
        // All references lead to definitions in `added`.
        let also = definitions.into_iter().flatten().filter(|(name, _)| !added.contains_key(*name));
        let all: Map<_, _> = also.map(|(name, value)| (name.clone(), value.clone())).collect();
        root.insert("$defs".into(), Value::Object(all.into_iter().chain(added).collect()));
    }
    Ok(closed)
}

/// The names of an object's properties, collected from the schemas that describe the object.
#[derive(Default)]
struct PropertyNames {
    properties: BTreeSet<String>,
    patterns: BTreeSet<String>,
    /// Whether a schema decides on additional properties itself, or cannot be resolved. Then the object is not closed.
    additional_decided: bool,
}

impl PropertyNames {
    fn is_empty(&self) -> bool {
        self.properties.is_empty() && self.patterns.is_empty()
    }

    fn len(&self) -> usize {
        self.properties.len() + self.patterns.len()
    }

    fn extend(&mut self, more: Self) {
        self.properties.extend(more.properties);
        self.patterns.extend(more.patterns);
        self.additional_decided |= more.additional_decided;
    }
}

/// The form of the definition that replaces the target of a reference.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum DefinitionForm {
    /// The target describes the whole object and is closed.
    Closed,
    /// The target describes a part of an object; the schema that combines the parts is closed.
    Open,
}

/// Keywords that list alternative schemas of the same object.
const ALTERNATIVES: [&str; 2] = ["anyOf", "oneOf"];

struct Closer<'a> {
    root: &'a Value,
    strict: bool,
    /// The name of the new definition for each reference and form.
    references: BTreeMap<(&'a str, DefinitionForm), String>,
    /// Definitions that are still to be made: name, schema, form.
    pending: VecDeque<(String, &'a Value, DefinitionForm)>,
    /// The number of definition names tried so far.
    n_names: usize,
    work: usize,
}

impl<'a> Closer<'a> {
    /// Takes `n` units off the work limit.
    fn spend(&mut self, n: usize) -> Result<(), String> {
        self.work += n;
        if self.work > MAX_WORK {
            return Err(
                "its objects are too entangled to be closed: say additionalProperties for each, or strict: false"
                    .into(),
            );
        }
        Ok(())
    }

    /// The closed form of `schema`, whose object may have the properties that it names, and those of `also`.
    fn close(&mut self, schema: &'a Value, also: &PropertyNames) -> Result<Value, String> {
        let Some(object) = schema.as_object() else { return Ok(schema.clone()) };
        let mut closed = self.insides(object)?;
        let list = |keyword: &str| object.get(keyword).and_then(Value::as_array);
        let reference = object.get("$ref").and_then(Value::as_str);
        let n_alternatives = ALTERNATIVES.iter().filter(|keyword| list(keyword).is_some()).count();
        let n_parts =
            list("allOf").map_or(0, |all| all.len().max(1)) + n_alternatives + usize::from(reference.is_some());
        if n_parts == 0 {
            return self.seal(closed, also);
        }
        if n_parts == 1 && also.is_empty() && !names_properties(object) && !decides_additional(object) {
            // The single part describes the whole object.
            let close = |closer: &mut Self, _: &str, part| closer.close(part, &PropertyNames::default());
            self.map_parts(object, &mut closed, DefinitionForm::Closed, close)?;
            return Ok(Value::Object(closed));
        }
        // The parts together describe one object. It is closed with the names of all parts.
        let target = reference.map(|reference| self.resolve(reference));
        let mut fixed = self.names(list("allOf").into_iter().flatten().chain(target.flatten()).collect())?;
        fixed.additional_decided |= decides_additional(object) || target == Some(None);
        if fixed.additional_decided {
            self.map_parts(object, &mut closed, DefinitionForm::Open, |closer, _, part| closer.open(part))?;
            return Ok(Value::Object(closed));
        }
        fixed.extend(local_names(object));
        fixed.extend(PropertyNames {
            additional_decided: false,
            properties: also.properties.clone(),
            patterns: also.patterns.clone(),
        });
        if n_alternatives == 0 {
            self.map_parts(object, &mut closed, DefinitionForm::Open, |closer, _, part| closer.open(part))?;
            return self.seal(closed, &fixed);
        }
        // Each alternative is closed on its own, so that it does not allow the names of the other alternatives.
        let mut around = BTreeMap::new();
        for keyword in ALTERNATIVES {
            let others = ALTERNATIVES.iter().filter(|other| **other != keyword).filter_map(|other| list(other));
            let mut names = self.names(others.flatten().collect())?;
            names.properties.extend(fixed.properties.iter().cloned());
            names.patterns.extend(fixed.patterns.iter().cloned());
            around.insert(keyword, names);
        }
        self.map_parts(object, &mut closed, DefinitionForm::Open, |closer, keyword, part| match around.get(keyword) {
            Some(names) => closer.close(part, names),
            None => closer.open(part),
        })?;
        Ok(Value::Object(closed))
    }

    /// `schema` with its own object left open and the objects inside of it closed.
    fn open(&mut self, schema: &'a Value) -> Result<Value, String> {
        let Some(object) = schema.as_object() else { return Ok(schema.clone()) };
        let mut opened = self.insides(object)?;
        self.map_parts(object, &mut opened, DefinitionForm::Open, |closer, _, part| closer.open(part))?;
        Ok(Value::Object(opened))
    }

    /// `object` with the schemas of its properties and items closed. Schemas of the same object (`allOf`, `anyOf`,
    /// `oneOf`, `$ref`) are left to [`map_parts`](Self::map_parts).
    fn insides(&mut self, object: &'a Map<String, Value>) -> Result<Map<String, Value>, String> {
        self.spend(1 + object.len())?;
        let whole = PropertyNames::default();
        let mut closed = Map::new();
        for (keyword, value) in object {
            let value = match (keyword.as_str(), value) {
                ("properties" | "patternProperties", Value::Object(schemas)) => {
                    self.spend(schemas.len())?;
                    let closed = schemas.iter().map(|(name, schema)| Ok((name.clone(), self.close(schema, &whole)?)));
                    Value::Object(closed.collect::<Result<_, String>>()?)
                }
                ("prefixItems" | "items", Value::Array(schemas)) => {
                    let closed = schemas.iter().map(|schema| self.close(schema, &whole));
                    Value::Array(closed.collect::<Result<_, String>>()?)
                }
                ("items" | "additionalItems" | "additionalProperties" | "contains", schema) => {
                    self.close(schema, &whole)?
                }
                ("allOf" | "anyOf" | "oneOf", Value::Array(_)) => Value::Null,
                _ => value.clone(),
            };
            closed.insert(keyword.clone(), value);
        }
        Ok(closed)
    }

    /// Writes the schemas of the same object to `new`: each list element is mapped by `part`, which gets the keyword;
    /// a reference is replaced by one to a definition of the form `form`.
    fn map_parts(
        &mut self,
        object: &'a Map<String, Value>,
        new: &mut Map<String, Value>,
        form: DefinitionForm,
        mut part: impl FnMut(&mut Self, &str, &'a Value) -> Result<Value, String>,
    ) -> Result<(), String> {
        for keyword in ["allOf", "anyOf", "oneOf"] {
            if let Some(Value::Array(schemas)) = object.get(keyword) {
                let parts = schemas.iter().map(|schema| part(self, keyword, schema));
                let parts = parts.collect::<Result<_, String>>()?;
                new.insert(keyword.into(), Value::Array(parts));
            }
        }
        if let Some(Value::String(reference)) = object.get("$ref")
            && let Some(target) = self.resolve(reference)
        {
            let name = self.definition(reference, target, form);
            new.insert("$ref".into(), Value::String(format!("#/$defs/{name}")));
        }
        Ok(())
    }

    /// The name of the definition that replaces the target of `reference`.
    fn definition(&mut self, reference: &'a str, target: &'a Value, form: DefinitionForm) -> String {
        if let Some(name) = self.references.get(&(reference, form)) {
            return name.clone();
        }
        let kind = if form == DefinitionForm::Closed { "closed" } else { "open" };
        let name = loop {
            let name = format!("{kind}-{}", self.n_names);
            self.n_names += 1;
            if self.root.pointer(&format!("/$defs/{name}")).is_none() {
                break name;
            }
        };
        self.references.insert((reference, form), name.clone());
        self.pending.push_back((name.clone(), target, form));
        name
    }

    /// The target of a reference within the schema; `None` for other references.
    fn resolve(&self, reference: &str) -> Option<&'a Value> {
        let pointer = reference.strip_prefix('#')?;
        if pointer.contains('%') { None } else { self.root.pointer(pointer) }
    }

    /// The property names in `schemas` and in all their parts.
    fn names(&mut self, mut schemas: Vec<&'a Value>) -> Result<PropertyNames, String> {
        let mut names = PropertyNames::default();
        let mut seen = BTreeSet::new();
        while let Some(schema) = schemas.pop() {
            self.spend(1)?;
            let Some(object) = schema.as_object() else { continue };
            let own = local_names(object);
            self.spend(own.len())?;
            names.extend(own);
            names.additional_decided |= decides_additional(object);
            for keyword in ["allOf", "anyOf", "oneOf"] {
                schemas.extend(object.get(keyword).and_then(Value::as_array).into_iter().flatten());
            }
            if let Some(Value::String(reference)) = object.get("$ref")
                && seen.insert(reference)
            {
                match self.resolve(reference) {
                    Some(target) => schemas.push(target),
                    None => names.additional_decided = true,
                }
            }
        }
        Ok(names)
    }

    /// Closes an object that does not decide on additional properties itself. It may also have the properties of
    /// `also`.
    fn seal(&mut self, mut object: Map<String, Value>, also: &PropertyNames) -> Result<Value, String> {
        let bare = self.strict && type_says_object(&object);
        let names = names_properties(&object) || !also.is_empty() || bare;
        if decides_additional(&object) || !may_be_object(&object) || !names {
            return Ok(Value::Object(object));
        }
        let required = local_names(&object);
        self.spend(also.len() + required.len())?;
        for (keyword, names) in [
            ("properties", also.properties.union(&required.properties).collect::<Vec<_>>()),
            ("patternProperties", also.patterns.iter().collect()),
        ] {
            if names.is_empty() {
                continue;
            }
            let schemas = object.entry(keyword).or_insert_with(|| Value::Object(Map::new()));
            if let Some(schemas) = schemas.as_object_mut() {
                for name in names {
                    schemas.entry(name.as_str()).or_insert(Value::Bool(true));
                }
            }
        }
        object.insert("additionalProperties".into(), Value::Bool(false));
        Ok(Value::Object(object))
    }
}

/// Whether a schema itself decides on additional properties.
fn decides_additional(object: &Map<String, Value>) -> bool {
    object.contains_key("additionalProperties") || object.contains_key("unevaluatedProperties")
}

/// Whether a schema itself mentions properties.
fn names_properties(object: &Map<String, Value>) -> bool {
    ["properties", "patternProperties", "required"].iter().any(|keyword| object.contains_key(*keyword))
}

/// The property names that a schema itself mentions.
fn local_names(object: &Map<String, Value>) -> PropertyNames {
    let keys = |keyword: &str| object.get(keyword).and_then(Value::as_object).into_iter().flat_map(Map::keys);
    let required = object.get("required").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str);
    PropertyNames {
        properties: keys("properties").cloned().chain(required.map(str::to_owned)).collect(),
        patterns: keys("patternProperties").cloned().collect(),
        additional_decided: false,
    }
}

fn types(object: &Map<String, Value>) -> Option<Vec<&str>> {
    match object.get("type")? {
        Value::String(one) => Some(vec![one]),
        Value::Array(several) => Some(several.iter().filter_map(Value::as_str).collect()),
        _ => None,
    }
}

fn may_be_object(object: &Map<String, Value>) -> bool {
    types(object).is_none_or(|types| types.contains(&"object"))
}

fn type_says_object(object: &Map<String, Value>) -> bool {
    types(object).is_some_and(|types| types.contains(&"object"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn objects_are_closed_at_any_depth() {
        let name = json!({"type": "object", "properties": {"a": {"type": "string"}}});
        let closed_name =
            json!({"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": false});
        for place in [
            |s: &Value| s.clone(),
            |s: &Value| json!({"type": "array", "items": s}),
            |s: &Value| json!({"type": "array", "prefixItems": [s, {"type": "string"}, s]}),
            |s: &Value| json!({"type": "array", "items": [s], "additionalItems": s}),
            |s: &Value| json!({"anyOf": [s, {"type": "null"}]}),
            |s: &Value| json!({"oneOf": [{"type": "null"}, s], "description": "one"}),
            |s: &Value| json!({"allOf": [s], "title": "A"}),
            |s: &Value| json!({"type": "object", "additionalProperties": s}),
            |s: &Value| json!({"type": "object", "properties": {"x": s}, "additionalProperties": true}),
            |s: &Value| json!({"type": "object", "properties": {"x": {"items": {"anyOf": [s]}}}, "additionalProperties": {}}),
            |s: &Value| json!({"patternProperties": {"^x": s}, "additionalProperties": false}),
        ] {
            assert_eq!(close(&place(&name), false).unwrap(), place(&closed_name));
        }
        // Other schemas are unchanged.
        for schema in [
            json!(true),
            json!({}),
            json!({"type": "string", "properties": {"a": {}}}),
            json!({"enum": [{"type": "object", "properties": {}}], "const": {"properties": {}}}),
            json!({"default": {"properties": {}}, "type": "object"}),
            json!({"type": "object", "properties": {"a": {}}, "unevaluatedProperties": false}),
        ] {
            assert_eq!(close(&schema, false).unwrap(), schema);
        }
    }

    #[test]
    fn objects_without_named_properties_are_closed_if_strict() {
        for schema in [json!({"type": "object"}), json!({"type": ["object", "null"]})] {
            assert_eq!(close(&schema, false).unwrap(), schema);
            assert_eq!(close(&schema, true).unwrap()["additionalProperties"], false);
        }
        assert_eq!(close(&json!({"type": "object", "properties": {}}), false).unwrap()["additionalProperties"], false);
        let required = close(&json!({"type": "object", "required": ["a"]}), false).unwrap();
        assert_eq!((&required["properties"], &required["additionalProperties"]), (&json!({"a": true}), &json!(false)));
    }

    #[test]
    fn references_lead_to_closed_definitions() {
        let schema = json!({"$ref": "#/$defs/Node", "$defs": {"closed-0": 1, "Node": {"type": "object",
            "properties": {"next": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]},
                "leaf": {"$ref": "#/elsewhere/Leaf", "description": "a leaf"}}}},
            "elsewhere": {"Leaf": {"properties": {"x": {}}}}});
        let closed = close(&schema, false).unwrap();
        assert_eq!(closed["$ref"], "#/$defs/closed-1");
        let node = &closed["$defs"]["closed-1"];
        assert_eq!(node["additionalProperties"], false);
        assert_eq!(node["properties"]["next"]["anyOf"][0], json!({"$ref": "#/$defs/closed-1"}));
        let leaf = &node["properties"]["leaf"];
        assert_eq!(leaf, &json!({"$ref": "#/$defs/closed-2", "description": "a leaf"}));
        assert_eq!(closed["$defs"]["closed-2"], json!({"properties": {"x": {}}, "additionalProperties": false}));
        assert_eq!(closed["$defs"]["closed-0"], 1);
        // A reference to the root, and one that cannot be resolved.
        let closed = close(&json!({"properties": {"a": {"$ref": "#"}, "b": {"$ref": "other.json"}}}), false).unwrap();
        assert_eq!(closed["properties"], json!({"a": {"$ref": "#/$defs/closed-0"}, "b": {"$ref": "other.json"}}));
        assert_eq!(closed["$defs"]["closed-0"]["additionalProperties"], false);
    }

    #[test]
    fn parts_of_one_object_are_closed_around_the_names_of_all() {
        let base = json!({"properties": {"a": {"type": "string"}}});
        let schema = json!({"allOf": [{"$ref": "#/$defs/Base"}], "properties": {"b": {}}, "$defs": {"Base": base}});
        let closed = close(&schema, false).unwrap();
        assert_eq!(closed["allOf"], json!([{"$ref": "#/$defs/open-0"}]));
        assert_eq!(closed["$defs"]["open-0"], base);
        assert_eq!(
            (&closed["properties"], &closed["additionalProperties"]),
            (&json!({"b": {}, "a": true}), &json!(false))
        );

        let schema = json!({"properties": {"kind": {}}, "anyOf": [{"properties": {"x": {}}}, {"required": ["y"]}]});
        let closed = close(&schema, false).unwrap();
        assert_eq!(closed.get("additionalProperties"), None);
        assert_eq!(
            closed["anyOf"],
            json!([
            {"properties": {"x": {}, "kind": true}, "additionalProperties": false},
            {"required": ["y"], "properties": {"kind": true, "y": true}, "additionalProperties": false}])
        );

        // If a part decides on additional properties, that decision stands.
        let schema =
            json!({"allOf": [{"properties": {"a": {}}, "additionalProperties": true}, {"properties": {"b": {}}}]});
        assert_eq!(close(&schema, true).unwrap(), schema);
    }

    /// Small schemas whose references make them huge or circular.
    #[test]
    fn closing_terminates() {
        let chain = |n: usize, link: &dyn Fn(usize) -> Value| {
            let definitions: Map<String, Value> = (0..n).map(|i| (format!("D{i}"), link(i))).collect();
            json!({"$ref": "#/$defs/D0", "$defs": definitions})
        };
        let to = |i: usize| format!("#/$defs/D{i}");
        // Each definition names the properties of all that follow, and each is used on its own.
        let mut nested = chain(5000, &|i| json!({"allOf": [{"$ref": to(i + 1)}], "properties": {format!("p{i}"): {}}}));
        let uses: Map<String, Value> = (0..5000).map(|i| (i.to_string(), json!({"$ref": to(i)}))).collect();
        nested["properties"] = Value::Object(uses);
        assert!(close(&nested, false).is_err_and(|why| why.contains("entangled")));
        // Each definition refers to the next one twice.
        let doubled =
            chain(60, &|i| json!({"allOf": [{"$ref": to(i + 1)}, {"$ref": to(i + 1)}], "properties": {"a": {}}}));
        assert!(close(&doubled, false).is_ok());
        // A long chain without recursion.
        let long = chain(20_000, &|i| json!({"properties": {"next": {"$ref": to(i + 1)}}}));
        assert!(close(&long, false).is_ok());
        for circle in [
            json!({"$ref": "#"}),
            json!({"allOf": [{"$ref": "#"}, {"$ref": "#"}], "properties": {"a": {}}}),
            json!({"anyOf": [{"$ref": "#/anyOf/0"}, {"$ref": "#"}], "properties": {"a": {}}, "$ref": "#"}),
        ] {
            assert!(close(&circle, true).is_ok(), "{circle}");
        }
        let mut deep = json!({"properties": {"a": {}}});
        for i in 0..100 {
            deep = if i % 2 == 0 {
                json!({"anyOf": [deep], "required": ["a"]})
            } else {
                json!({"properties": {"a": deep}})
            };
        }
        assert!(close(&deep, true).is_ok());
        for wrong in [
            json!({"properties": 1, "allOf": 2, "anyOf": {}, "$ref": 3, "required": "a", "type": 5}),
            json!({"allOf": [], "$defs": 7, "patternProperties": [1], "items": 3, "$ref": "#/allOf"}),
        ] {
            assert!(close(&wrong, true).is_ok(), "{wrong}");
        }
    }
}
