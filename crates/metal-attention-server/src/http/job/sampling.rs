//! The request fields of sampling. The numeric options are those of [`NumberOption`]: names, ranges and descriptions
//! come from that table.

use std::collections::BTreeMap;
use std::fmt;

use metal_attention::sampling::{NumberOption, SamplerKind, SamplerOptions};
use serde::de::{Deserialize, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::json;
use utoipa::openapi::schema::{ArrayBuilder, Object, ObjectBuilder, Schema, SchemaType, Type};
use utoipa::openapi::{OneOfBuilder, RefOr};
use utoipa::{PartialSchema, ToSchema};

use crate::http::limits::{MAX_BREAKER_BYTES, MAX_BREAKERS, MAX_SAMPLERS};
use crate::http::notes::Notes;
use crate::http::{ApiError, body};

/// Samplers of other servers that are accepted in `samplers` and ignored: none of their own options is accepted with a
/// value that has an effect. `infill` only ends texts early.
const WITHOUT_EFFECT: [&str; 6] = ["tfs_z", "top_a", "mirostat", "adaptive_p", "quadratic", "infill"];

/// The sampling options that a request sets.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SamplingFields {
    /// By the option's name: the name that the request uses (it may be an alias), and the value.
    numbers: BTreeMap<&'static str, (String, f64)>,
    /// The sampler chain, in order; `None`: the default.
    samplers: Option<Vec<SamplerKind>>,
    /// Names in `samplers` that are ignored.
    ignored: Vec<String>,
    /// Sequence breakers of DRY; `None`: the default.
    breakers: Option<Vec<String>>,
}

impl SamplingFields {
    /// Applies the request's options to `options`. Fails for a value outside its range; `options` may then be partly
    /// changed.
    pub fn apply(&self, options: &mut SamplerOptions) -> Result<(), ApiError> {
        for (name, (given, value)) in &self.numbers {
            let Some(option) = NumberOption::find(name) else { continue };
            option.set(options, *value).map_err(|_| {
                ApiError::field(given, format!("{given} is {value}, but it must be {}", option.allowed))
            })?;
        }
        options.order = self.samplers.clone().unwrap_or_else(|| std::mem::take(&mut options.order));
        if let Some(breakers) = &self.breakers {
            options.dry_sequence_breakers.clone_from(breakers);
        }
        Ok(())
    }

    /// The numeric options by name.
    pub fn numbers(&self) -> impl Iterator<Item = (&'static str, f64)> {
        self.numbers.iter().map(|(name, (_, value))| (*name, *value))
    }

    /// Returns these options, completed from `base`.
    #[must_use]
    pub fn completed_from(self, base: &Self) -> Self {
        let mut numbers = base.numbers.clone();
        numbers.extend(self.numbers);
        Self {
            numbers,
            samplers: self.samplers.or_else(|| base.samplers.clone()),
            ignored: self.ignored,
            breakers: self.breakers.or_else(|| base.breakers.clone()),
        }
    }

    /// Reads the fields of a request. Notes those without effect.
    pub fn read(object: &body::Object<'_>, notes: &mut Notes) -> Result<Self, ApiError> {
        let fields: Self = object.parse()?;
        fields.ignored.iter().for_each(|name| notes.ignored(format!("samplers.{name}")));
        Ok(fields)
    }
}

impl<'de> Deserialize<'de> for SamplingFields {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(FieldsVisitor)
    }
}

struct FieldsVisitor;

impl<'de> Visitor<'de> for FieldsVisitor {
    type Value = SamplingFields;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<SamplingFields, A::Error> {
        let mut fields = SamplingFields::default();
        while let Some(name) = map.next_key::<String>()? {
            match (name.as_str(), NumberOption::find(&name)) {
                ("samplers", _) => {
                    if let Some(Samplers { order, ignored }) = map.next_value::<Option<Samplers>>()? {
                        (fields.samplers, fields.ignored) = (Some(order), ignored);
                    }
                }
                ("dry_sequence_breakers", _) => {
                    fields.breakers = map.next_value::<Option<Breakers>>()?.map(|Breakers(list)| list);
                }
                (_, None) => drop(map.next_value::<IgnoredAny>()?),
                (_, Some(option)) => {
                    if let Some(value) = map.next_value::<Option<f64>>()? {
                        // An alias does not replace a value under the option's own name.
                        if name == option.name || !fields.numbers.contains_key(option.name) {
                            fields.numbers.insert(option.name, (name, value));
                        }
                    }
                }
            }
        }
        Ok(fields)
    }
}

/// A sampler chain: a list of names, names separated by `;`, or llama.cpp's letters.
struct Samplers {
    /// The supported samplers, in order.
    order: Vec<SamplerKind>,
    /// The names of samplers that are ignored.
    ignored: Vec<String>,
}

impl Samplers {
    /// Reads the names of samplers; unsupported ones are an error unless they are in [`WITHOUT_EFFECT`].
    fn from_names<'a, E: Error>(names: impl Iterator<Item = &'a str>) -> Result<Self, E> {
        let (mut order, mut ignored) = (Vec::new(), Vec::new());
        for name in names.map(str::trim).filter(|name| !name.is_empty()) {
            if order.len() + ignored.len() == MAX_SAMPLERS {
                return Err(E::custom(format!("more than {MAX_SAMPLERS} samplers, which is the most allowed")));
            }
            match name.parse() {
                Ok(kind) => order.push(kind),
                Err(_) if WITHOUT_EFFECT.contains(&name) => ignored.push(name.to_owned()),
                Err(why) => return Err(E::custom(why)),
            }
        }
        Ok(Self { order, ignored })
    }
}

impl<'de> Deserialize<'de> for Samplers {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(SamplersVisitor)
    }
}

struct SamplersVisitor;

impl<'de> Visitor<'de> for SamplersVisitor {
    type Value = Samplers;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of samplers' names, or a string of their letters")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Samplers, E> {
        let letters = SamplerKind::parse_letters(text).filter(|order| order.len() <= MAX_SAMPLERS);
        match letters.filter(|_| text.parse::<SamplerKind>().is_err()) {
            Some(order) => Ok(Samplers { order, ignored: Vec::new() }),
            None => Samplers::from_names(text.split(';')),
        }
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Samplers, A::Error> {
        let mut names = Vec::new();
        while let Some(name) = list.next_element::<String>()? {
            names.push(name);
        }
        Samplers::from_names(names.iter().map(String::as_str))
    }
}

/// Sequence breakers of DRY: a list, or a string with a JSON list, with or without its brackets.
struct Breakers(Vec<String>);

impl<'de> Deserialize<'de> for Breakers {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(BreakersVisitor)
    }
}

struct BreakersVisitor;

impl<'de> Visitor<'de> for BreakersVisitor {
    type Value = Breakers;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of strings")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Breakers, E> {
        let list = if text.trim_start().starts_with('[') { text.to_owned() } else { format!("[{text}]") };
        let list: Vec<String> =
            serde_json::from_str(&list).map_err(|_| E::custom("a string that is no list in JSON"))?;
        list.iter().try_for_each(|breaker| check_breaker(breaker))?;
        check_breakers(list.len())?;
        Ok(Breakers(list))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Breakers, A::Error> {
        let mut breakers = Vec::new();
        while let Some(breaker) = list.next_element::<String>()? {
            check_breaker(&breaker)?;
            breakers.push(breaker);
            check_breakers(breakers.len())?;
        }
        Ok(Breakers(breakers))
    }
}

fn check_breaker<E: Error>(breaker: &str) -> Result<(), E> {
    match breaker.len() {
        0..=MAX_BREAKER_BYTES => Ok(()),
        n => Err(E::custom(format!("a string of {n} bytes; at most {MAX_BREAKER_BYTES} are allowed"))),
    }
}

fn check_breakers<E: Error>(n: usize) -> Result<(), E> {
    if n > MAX_BREAKERS {
        return Err(E::custom(format!("more than {MAX_BREAKERS} strings, which is the most allowed")));
    }
    Ok(())
}

impl PartialSchema for SamplingFields {
    fn schema() -> RefOr<Schema> {
        let mut fields = ObjectBuilder::new().description(Some(
            "How tokens are chosen. What is left out has the value that the model's file recommends, else the default.",
        ));
        for option in NumberOption::ALL {
            fields = fields.property(option.name, number(option, option.doc));
            for alias in option.aliases {
                fields = fields.property(*alias, number(option, &format!("The same as `{}`.", option.name)));
            }
        }
        let strings = |what: &str| {
            let string = || ObjectBuilder::new().schema_type(Type::String);
            let null = ObjectBuilder::new().schema_type(Type::Null);
            let list = ArrayBuilder::new().items(string());
            OneOfBuilder::new().item(null).item(string()).item(list).description(Some(what))
        };
        fields = fields
            .property("samplers", strings("The samplers to apply, first to last: names, or llama.cpp's letters."))
            .property("dry_sequence_breakers", strings("Strings that end a repetition for DRY."));
        fields.into()
    }
}

impl ToSchema for SamplingFields {}

/// The OpenAPI schema of a numeric option.
fn number(option: &NumberOption, what: &str) -> Object {
    let default = option.get(&SamplerOptions::default());
    // Through f32, so that 0.1 is not written as 0.10000000149.
    let default = (default as f32).to_string().parse().unwrap_or(default);
    let kind = if option.is_count() { Type::Integer } else { Type::Number };
    ObjectBuilder::new()
        .schema_type(SchemaType::from_iter([kind.clone(), Type::Null]))
        .description(Some(what))
        .minimum(option.minimum())
        .maximum(option.maximum())
        .default(Some(if option.is_count() { json!(default as u64) } else { json!(default) }))
        .build()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: &str) -> Result<SamplerOptions, String> {
        let fields: SamplingFields = serde_json::from_str(json).map_err(|e| e.to_string())?;
        let mut options = SamplerOptions::default();
        fields
            .apply(&mut options)
            .map_err(|e| serde_json::to_value(e.body()).unwrap()["error"]["param"].to_string())?;
        Ok(options)
    }

    #[test]
    fn every_option_is_a_field() {
        for option in NumberOption::ALL {
            let value = option.minimum().unwrap_or(0.0).max(0.5).ceil();
            let mut expected = SamplerOptions::default();
            option.set(&mut expected, value).unwrap();
            for name in option.aliases.iter().chain([&option.name]) {
                assert_eq!(read(&format!(r#"{{"{name}": {value}}}"#)).as_ref(), Ok(&expected), "{name}");
                assert_eq!(read(&format!(r#"{{"{name}": null}}"#)), Ok(SamplerOptions::default()), "{name}");
                assert!(read(&format!(r#"{{"{name}": "x"}}"#)).is_err(), "{name}");
            }
        }
        assert_eq!(read(r#"{"typical": 7}"#), Err("\"typical\"".into()));
        // The option's own name counts more than an alias, whatever the order.
        for json in [r#"{"temperature": 1, "temp": 2}"#, r#"{"temp": 2, "temperature": 1}"#] {
            assert_eq!(read(json).unwrap().temperature, 1.0);
        }
    }

    #[test]
    fn samplers_are_names_or_letters() {
        use SamplerKind::{MinP, Temperature, TopK, TypicalP};
        for (json, order) in [
            (r#"["top_k", "typ_p", "temperature"]"#, vec![TopK, TypicalP, Temperature]),
            (r#""top-k;temp""#, vec![TopK, Temperature]),
            (r#""kymt""#, vec![TopK, TypicalP, MinP, Temperature]),
            (r#""temp""#, vec![Temperature]),
            (r#"["tfs_z", "top_k"]"#, vec![TopK]),
            ("[]", vec![]),
        ] {
            assert_eq!(read(&format!(r#"{{"samplers": {json}}}"#)).unwrap().order, order, "{json}");
        }
        assert_eq!(read(r#"{"samplers": null}"#), Ok(SamplerOptions::default()));
        assert!(read(r#"{"samplers": ["nothing"]}"#).unwrap_err().contains("no sampler named \"nothing\""));
        assert!(read(&format!(r#"{{"samplers": "{}"}}"#, "k".repeat(33))).is_err());
        let mut notes = Notes::default();
        let object = body::Object::split(br#"{"samplers": ["tfs_z", "top_k"]}"#).unwrap();
        SamplingFields::read(&object, &mut notes).unwrap();
        let mut expected = Notes::default();
        expected.ignored("samplers.tfs_z");
        assert_eq!(notes, expected);
    }

    #[test]
    fn breakers_are_a_list_or_one_in_a_string() {
        let read = |json: &str| read(&format!(r#"{{"dry_sequence_breakers": {json}}}"#));
        for json in [r#"["\n", ":"]"#, r#""[\"\\n\", \":\"]""#, r#""\"\\n\", \":\"""#] {
            assert_eq!(read(json).unwrap().dry_sequence_breakers, ["\n", ":"], "{json}");
        }
        assert_eq!(read("[]").unwrap().dry_sequence_breakers, [""; 0]);
        for json in
            ["1", r#""x""#, "[1]", &format!("[\"{}\"]", "x".repeat(65)), &format!("[\"\"{}]", ",\"\"".repeat(32))]
        {
            assert!(read(json).is_err(), "{json}");
        }
    }
}
