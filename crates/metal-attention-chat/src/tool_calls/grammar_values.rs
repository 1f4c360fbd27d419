//! Grammars for the arguments of calls in notations other than a JSON object.

use serde_json::{Value, json};

use super::derived::DerivedTags;
use super::grammar::{MarkEncoder, literal};

/// The notation of arguments.
#[derive(Debug, Clone)]
pub(super) enum ArgumentStyle {
    /// Keys and values are in tags. Strings are written literally.
    Tags {
        /// The marks around a key.
        key: (String, String),
        /// The mark before a value.
        value: String,
        /// The mark after a value.
        end: &'static str,
    },
    /// Like JSON, with bare keys and special quotes.
    Gemma {
        /// The mark around a string.
        quote: &'static str,
    },
    /// The tags of a derived format.
    Derived(&'static DerivedTags),
    /// Python's keyword arguments, with JSON for containers.
    Python,
}

/// The maximum depth to which the schema of a value is followed. Deeper values may be anything.
const MAX_DEPTH: usize = 8;

/// The maximum size in bytes of the schemas in a grammar, with an allowance for other work. Schemas may refer to each
/// other and to themselves. Beyond the limit, values may be any JSON.
pub(super) const MAX_EFFORT: usize = 1 << 20;

/// Builds the rules for the arguments of one function.
pub(super) struct ArgumentsGrammar<'a> {
    /// The index of the function, for the names of rules.
    function: usize,
    schema: &'a Value,
    style: ArgumentStyle,
    marks: &'a MarkEncoder<'a>,
    /// The rules made so far.
    pub rules: Vec<String>,
    n_rules: usize,
    any: bool,
    /// The size in bytes of the schema of all arguments.
    size: usize,
    /// The part of [`MAX_EFFORT`] that is left.
    pub effort: usize,
}

impl<'a> ArgumentsGrammar<'a> {
    pub fn new(
        function: usize,
        schema: &'a Value,
        style: ArgumentStyle,
        marks: &'a MarkEncoder<'a>,
        effort: usize,
    ) -> Self {
        let size = schema.to_string().len();
        Self { function, schema, style, marks, rules: Vec::new(), n_rules: 0, any: false, size, effort }
    }

    /// Takes `bytes` off the effort. Returns whether it was left.
    fn affords(&mut self, bytes: usize) -> bool {
        let left = self.effort.checked_sub(bytes);
        self.effort = left.unwrap_or(0);
        left.is_some()
    }

    /// An expression for all arguments in the schema: the required ones, then the optional ones.
    pub fn expression(&mut self) -> String {
        let schema = self.schema;
        match self.style.clone() {
            ArgumentStyle::Tags { key, value, end } => {
                let mut all = Vec::new();
                for (name, schema, required) in properties(schema) {
                    let line = if end.ends_with('\n') { "" } else { " \"\\n\"" };
                    let text = self.tagged(schema, end);
                    let argument = format!("{} {} {} {value} {text}{line}", key.0, literal(name), key.1);
                    all.push(if required { argument } else { format!("({argument})?") });
                }
                all.join(" ")
            }
            ArgumentStyle::Derived(tags) => {
                let marks = self.marks;
                let before = marks.text(&tags.before_key);
                let mut all = Vec::new();
                for (name, schema, required) in properties(schema) {
                    let is_text = !matches!(string_constraint(self.referred(schema)), StringConstraint::None);
                    let word = match &tags.flag {
                        Some(flag) => format!("{}{}", if is_text { &flag.text } else { &flag.other }, flag.after),
                        None => String::new(),
                    };
                    let after = marks.text(&format!("{}{word}", tags.after_key));
                    let text = self.tagged(schema, tags.after_value.trim());
                    let argument = format!("{before} {} {after} {text}", literal(name));
                    all.push(if required { argument } else { format!("({argument})?") });
                }
                all.join(" ")
            }
            ArgumentStyle::Gemma { quote } => self.gemma_members(schema, quote, 0),
            ArgumentStyle::Python => self.members(schema, ", ", |arguments, name, schema| {
                let value = arguments.python(schema);
                if is_identifier(name) {
                    return format!("{} {value}", literal(&format!("{name}=")));
                }
                // Python allows only identifiers as keywords; other names are passed by `**{...}`.
                format!("{} {value} \"}}\"", literal(&format!("**{{{}: ", json!(name))))
            }),
        }
    }

    /// Adds the rule that `make` returns for a new name. Returns that name.
    fn rule(&mut self, make: impl FnOnce(&str) -> String) -> String {
        let name = format!("value_{}_{}", self.function, self.n_rules);
        self.n_rules += 1;
        self.rules.push(make(&name));
        name
    }

    /// An expression for a value and the mark after it.
    fn tagged(&mut self, schema: &Value, end: &str) -> String {
        let marks = self.marks;
        let schema = self.referred(schema);
        match string_constraint(schema) {
            StringConstraint::OneOf(texts) if self.affords(length(&texts)) => {
                format!("({}) {}", alternatives(&texts), marks.mark(end))
            }
            StringConstraint::Any | StringConstraint::OneOf(_) => self.rule(|name| marks.text_up_to(name, end)),
            StringConstraint::None => {
                let schema = self.with_definitions(schema);
                let json = self.rule(|name| format!("{name}: %json {schema}"));
                format!("{json} {}", marks.mark(end))
            }
        }
    }

    /// `schema` as text, with the definitions that it may refer to; `{}` (any value) if that exceeds the effort.
    fn with_definitions(&mut self, schema: &Value) -> String {
        let text = schema.to_string();
        let refers = text.contains("\"$ref\"");
        let Value::Object(schema) = schema else { return text };
        if !self.affords(text.len() + if refers { self.size } else { 0 }) {
            return "{}".into();
        }
        let mut schema = schema.clone();
        for key in ["$defs", "definitions", "x-guidance"] {
            if let Some(value) = self.schema.get(key).filter(|_| refers || key == "x-guidance") {
                schema.entry(key).or_insert_with(|| value.clone());
            }
        }
        Value::from(schema).to_string()
    }

    /// An expression for the members of an object, without its braces. `write` makes the expression of a member from
    /// its name and schema.
    fn members(
        &mut self,
        schema: &Value,
        separator: &str,
        mut write: impl FnMut(&mut Self, &str, &Value) -> String,
    ) -> String {
        let separator = literal(separator);
        let (mut required, mut optional) = (Vec::new(), Vec::new());
        for (name, schema, is_required) in properties(schema) {
            let member = write(self, name, schema);
            let member = self.rule(|rule| format!("{rule}: {member}"));
            if is_required { required.push(member) } else { optional.push(member) }
        }
        if !required.is_empty() {
            let others = optional.iter().map(|member| format!("({separator} {member})?"));
            let required = required.join(&format!(" {separator} "));
            return [required].into_iter().chain(others).collect::<Vec<_>>().join(" ");
        }
        // No member is required: any subset in order. The rules are built from the last member on, because the first
        // member that occurs has no comma before it.
        let (mut from_here, mut rest) = (String::new(), String::new());
        for member in optional.iter().rev() {
            let others = if from_here.is_empty() { String::new() } else { format!(" | {from_here}") };
            let (first, tail) = (format!("{member} {rest}{others}"), format!("({separator} {member})? {rest}"));
            from_here = self.rule(|name| format!("{name}: {first}"));
            rest = self.rule(|name| format!("{name}: {tail}"));
        }
        if from_here.is_empty() { from_here } else { format!("({from_here})?") }
    }

    /// The target of the schema's reference, or the schema itself.
    fn referred<'s>(&self, schema: &'s Value) -> &'s Value
    where
        'a: 's,
    {
        let root = self.schema;
        let referred = schema.get("$ref").and_then(Value::as_str).and_then(|at| root.pointer(at.strip_prefix('#')?));
        referred.unwrap_or(schema)
    }

    /// An expression for a value in Python's notation, which differs from JSON for booleans and null.
    fn python(&mut self, schema: &Value) -> String {
        let schema = self.referred(schema);
        match schema.get("type").and_then(Value::as_str) {
            Some("boolean") if schema.get("enum").or(schema.get("const")).is_none() => "(\"True\" | \"False\")".into(),
            Some("null") => "\"None\"".into(),
            Some(_) | None => {
                let schema = self.with_definitions(schema);
                self.rule(|name| format!("{name}: %json {schema}"))
            }
        }
    }

    fn gemma_members(&mut self, schema: &Value, quote: &str, depth: usize) -> String {
        self.members(schema, ",", |arguments, name, schema| {
            let value = arguments.gemma(schema, quote, depth);
            if is_identifier(name) {
                return format!("{} {value}", literal(&format!("{name}:")));
            }
            let mark = arguments.marks.mark(quote);
            format!("{mark} {} {mark} \":\" {value}", literal(name))
        })
    }

    fn gemma(&mut self, schema: &Value, quote: &str, depth: usize) -> String {
        let (marks, mark) = (self.marks, self.marks.mark(quote));
        if !self.affords(256) {
            return self.any_value(quote);
        }
        let schema = self.referred(schema);
        match string_constraint(schema) {
            StringConstraint::OneOf(texts) if self.affords(length(&texts)) => {
                return format!("{mark} ({}) {mark}", alternatives(&texts));
            }
            StringConstraint::Any | StringConstraint::OneOf(_) => {
                let text = self.rule(|name| marks.text_up_to(name, quote));
                return format!("{mark} {text}");
            }
            StringConstraint::None => {}
        }
        if let Some(alternatives) = self.gemma_union(schema, quote, depth) {
            return alternatives;
        }
        match schema.get("type").and_then(Value::as_str) {
            Some("integer" | "number" | "boolean" | "null") => {
                let schema = self.with_definitions(schema);
                self.rule(|name| format!("{name}: %json {schema}"))
            }
            Some("array") if depth < MAX_DEPTH => {
                let item = self.gemma(schema.get("items").unwrap_or(&Value::Null), quote, depth + 1);
                format!("\"[\" ({item} (\",\" {item})*)? \"]\"")
            }
            Some("object") if depth < MAX_DEPTH && schema.get("properties").is_some() => {
                let members = self.gemma_members(schema, quote, depth + 1);
                format!("\"{{\" {members} \"}}\"")
            }
            Some(_) | None => self.any_value(quote),
        }
    }

    /// An expression for the alternatives of a schema: its listed values, its types or its sub-schemas; `None` if it
    /// has none.
    fn gemma_union(&mut self, schema: &Value, quote: &str, depth: usize) -> Option<String> {
        if depth >= MAX_DEPTH {
            return None;
        }
        let list = |key: &str| schema.get(key).and_then(Value::as_array).filter(|list| !list.is_empty());
        let values = list("enum").map(Vec::as_slice).or(schema.get("const").map(std::slice::from_ref));
        let alternatives: Vec<String> = if let Some(values) = values {
            if !self.affords(values.iter().map(|value| value.to_string().len() + 16).sum()) {
                return None;
            }
            values.iter().map(|value| self.gemma_literal(value, quote)).collect()
        } else if let Some(types) = list("type") {
            let mut one = schema.clone();
            let of_type = |name: &Value| {
                one["type"] = name.clone();
                self.gemma(&one, quote, depth + 1)
            };
            types.iter().map(of_type).collect()
        } else {
            let schemas = list("anyOf").or_else(|| list("oneOf"))?;
            schemas.iter().map(|schema| self.gemma(schema, quote, depth + 1)).collect()
        };
        Some(self.rule(|name| format!("{name}: {}", alternatives.join(" | "))))
    }

    /// An expression for exactly this value in Gemma's notation.
    fn gemma_literal(&self, value: &Value, quote: &str) -> String {
        let mark = self.marks.mark(quote);
        let list = |items: Vec<String>| items.join(" \",\" ");
        match value {
            Value::Null | Value::Bool(_) | Value::Number(_) => literal(&value.to_string()),
            Value::String(text) => format!("{mark} {} {mark}", literal(text)),
            Value::Array(values) => {
                let items = values.iter().map(|value| self.gemma_literal(value, quote)).collect();
                format!("\"[\" {} \"]\"", list(items))
            }
            Value::Object(members) => {
                let member = |(name, value): (&String, &Value)| {
                    format!("{mark} {} {mark} \":\" {}", literal(name), self.gemma_literal(value, quote))
                };
                format!("\"{{\" {} \"}}\"", list(members.iter().map(member).collect()))
            }
        }
    }

    /// The name of a rule for any value in Gemma's notation.
    fn any_value(&mut self, quote: &str) -> String {
        let function = self.function;
        let any = format!("any_{function}");
        if !std::mem::replace(&mut self.any, true) {
            let scalar = json!({"type": ["number", "boolean", "null"]});
            let mark = self.marks.mark(quote);
            self.rules.push(self.marks.text_up_to(&format!("{any}_text"), quote));
            self.rules.push(format!("{any}_scalar: %json {scalar}"));
            self.rules.push(format!(
                "{any}: {mark} {any}_text | {any}_scalar | \"[\" ({any} (\",\" {any})*)? \"]\" \
                 | \"{{\" ({any}_member (\",\" {any}_member)*)? \"}}\""
            ));
            self.rules.push(format!("{any}_member: /[a-zA-Z_][a-zA-Z0-9_]*/ \":\" {any}"));
        }
        any
    }
}

/// Whether a key can be written without quotes.
fn is_identifier(name: &str) -> bool {
    let begins = name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_');
    begins && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

/// The properties in a schema: name, schema and whether it is required. Required ones come first.
fn properties(schema: &Value) -> Vec<(&str, &Value, bool)> {
    let required = schema.get("required").and_then(Value::as_array);
    let is_required = |name: &str| required.is_some_and(|names| names.iter().any(|other| other == name));
    let properties = schema.get("properties").and_then(Value::as_object).into_iter().flatten();
    let mut properties: Vec<_> = properties.map(|(name, schema)| (&**name, schema, is_required(name))).collect();
    properties.sort_by_key(|(_, _, required)| !required);
    properties
}

/// The strings that a schema allows.
enum StringConstraint<'a> {
    /// Any string.
    Any,
    /// One of these strings.
    OneOf(Vec<&'a str>),
    /// The schema allows other values than strings.
    None,
}

fn string_constraint(schema: &Value) -> StringConstraint<'_> {
    let kind = schema.get("type").and_then(Value::as_str);
    let values = match (schema.get("enum"), schema.get("const")) {
        (Some(Value::Array(values)), _) => Some(values.as_slice()),
        (_, Some(value)) => Some(std::slice::from_ref(value)),
        (_, None) => None,
    };
    let texts = values.and_then(|values| values.iter().map(Value::as_str).collect::<Option<Vec<_>>>());
    match (kind, texts) {
        (Some("string") | None, Some(texts)) if !texts.is_empty() => StringConstraint::OneOf(texts),
        (Some("string"), _) => StringConstraint::Any,
        (Some(_) | None, _) => StringConstraint::None,
    }
}

fn alternatives(texts: &[&str]) -> String {
    texts.iter().map(|text| Value::from(*text).to_string()).collect::<Vec<_>>().join(" | ")
}

fn length(texts: &[&str]) -> usize {
    texts.iter().map(|text| text.len() + 4).sum()
}
