//! The field `options`: sampling, limits and the context.

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error, Visitor};
use serde_json::value::RawValue;
use utoipa::openapi::schema::{AdditionalProperties, ObjectBuilder, Schema, SchemaType, Type};
use utoipa::openapi::{ArrayBuilder, OneOfBuilder, RefOr};
use utoipa::{PartialSchema, ToSchema};

use crate::http::ApiError;
use crate::http::body::Object;
use crate::http::job::sampling::SamplingFields;
use crate::http::job::stop::Stop;
use crate::http::models::LoadedModel;
use crate::http::notes::Notes;
use crate::http::unsupported::{self, Neutral, RefusedField, refused};

/// Options that would change the text and are not supported.
const REFUSED: &[RefusedField] =
    &[refused("mirostat", &[Neutral::Number(0.0)], "use temperature, top_p, top_k and min_p")];

/// Options that do not change the text: how a model is loaded, which the server decides, and parameters of samplers
/// that are refused or that ollama has removed.
const IGNORED: &[&str] = &[
    "num_keep",
    "num_batch",
    "num_gpu",
    "main_gpu",
    "num_thread",
    "numa",
    "low_vram",
    "f16_kv",
    "vocab_only",
    "logits_all",
    "embedding_only",
    "use_mmap",
    "use_mlock",
    "penalize_newline",
    "tfs_z",
    "mirostat_tau",
    "mirostat_eta",
];

/// The options of a request.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct OllamaOptions {
    /// Sampling options.
    pub sampling: SamplingFields,
    /// The seed of the sampler; `None`: random.
    pub seed: Option<u64>,
    /// Maximum generated tokens; `None`: limited by the context only.
    pub max_tokens: Option<usize>,
    /// Strings that end the text.
    pub stop: Vec<String>,
    /// The requested context length.
    n_ctx: Option<i64>,
    /// Notes of ignored options.
    pub notes: Notes,
}

/// The options in addition to those of [`SamplingFields`].
#[derive(Deserialize)]
struct OptionFields {
    /// The seed; below 0: random.
    seed: Option<WholeNumber>,
    /// Maximum generated tokens; below 1: unlimited.
    num_predict: Option<WholeNumber>,
    /// The context length.
    num_ctx: Option<WholeNumber>,
    /// Stop strings.
    stop: Option<Stop>,
}

impl OllamaOptions {
    /// Reads the field `options`, which may be missing or null.
    pub fn read(value: Option<&RawValue>) -> Result<Self, ApiError> {
        let Some(value) = value.filter(|value| value.get() != "null") else { return Ok(Self::default()) };
        if !value.get().starts_with('{') {
            return Err(ApiError::field("options", "options must be an object"));
        }
        let object = Object::split(value.get().as_bytes())?;
        let mut notes = unsupported::check(&object, REFUSED, IGNORED)?;
        let sampling = SamplingFields::read(&object, &mut notes)?;
        let OptionFields { seed, num_predict, num_ctx, stop } = object.parse()?;
        Ok(Self {
            sampling,
            seed: seed.and_then(|WholeNumber(seed)| u64::try_from(seed).ok()),
            max_tokens: num_predict.and_then(|WholeNumber(n)| usize::try_from(n).ok()).filter(|&n| n > 0),
            stop: stop.map(Stop::into_strings).unwrap_or_default(),
            n_ctx: num_ctx.map(|WholeNumber(n)| n),
            notes,
        })
    }

    /// Notes a requested context that is larger than that of `model`. A smaller one has no visible effect.
    pub fn note_context(&self, model: &LoadedModel, notes: &mut Notes) {
        if self.n_ctx.is_some_and(|n| n > model.n_ctx as i64) {
            notes.ignored("num_ctx");
        }
    }
}

/// A whole number, which may be written as `40.0`.
struct WholeNumber(i64);

impl<'de> Deserialize<'de> for WholeNumber {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(WholeNumberVisitor)
    }
}

struct WholeNumberVisitor;

impl Visitor<'_> for WholeNumberVisitor {
    type Value = WholeNumber;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a whole number")
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<WholeNumber, E> {
        Ok(WholeNumber(value))
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<WholeNumber, E> {
        Ok(WholeNumber(i64::try_from(value).unwrap_or(i64::MAX)))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<WholeNumber, E> {
        if value.fract() == 0.0 {
            return Ok(WholeNumber(value as i64));
        }
        Err(E::invalid_value(serde::de::Unexpected::Float(value), &self))
    }
}

impl PartialSchema for OllamaOptions {
    fn schema() -> RefOr<Schema> {
        let number = |what: &str| {
            ObjectBuilder::new().schema_type(SchemaType::from_iter([Type::Integer, Type::Null])).description(Some(what))
        };
        let string = || ObjectBuilder::new().schema_type(Type::String);
        let stop = OneOfBuilder::new()
            .item(ObjectBuilder::new().schema_type(Type::Null))
            .item(string())
            .item(ArrayBuilder::new().items(string()));
        ObjectBuilder::new()
            .schema_type(SchemaType::from_iter([Type::Object, Type::Null]))
            .description(Some(
                "How the text is generated: the options below, and those that say how tokens are chosen, by the names that \
                 `/v1/completions` has for them (`temperature`, `top_k`, ...).",
            ))
            .property("seed", number("The same seed gives the same text; below 0: another one each time."))
            .property("num_predict", number("Most tokens to generate; below 1: as many as there is room for."))
            .property("num_ctx", number("Tokens that the context is to hold. It holds as many as the server was given."))
            .property("stop", stop.description(Some("Strings that end the text.")))
            .additional_properties(Some(AdditionalProperties::FreeForm(true)))
            .into()
    }
}

impl ToSchema for OllamaOptions {
    fn name() -> std::borrow::Cow<'static, str> {
        "OllamaOptions".into()
    }
}

#[cfg(test)]
mod tests {
    use metal_attention::sampling::SamplerOptions;
    use serde_json::json;

    use super::*;

    fn read(options: &serde_json::Value) -> Result<OllamaOptions, String> {
        let value = serde_json::value::to_raw_value(options).unwrap();
        OllamaOptions::read(Some(&value)).map_err(|error| error.message().to_owned())
    }

    #[test]
    fn options_are_used_or_noted() {
        let options = json!({"temperature": 0.5, "top_k": 40.0, "top_p": 0.8, "min_p": 0.1, "typical_p": 0.7,
            "repeat_penalty": 1.25, "repeat_last_n": -1, "presence_penalty": 1.5, "frequency_penalty": 0.25,
            "seed": 7.0, "num_predict": 20.0, "stop": ["a", "b"], "num_ctx": 4096, "num_gpu": 1, "numa": false,
            "mirostat": 0, "mirostat_tau": 0.8, "use_mmap": true, "made_up": [1]});
        let options = read(&options).unwrap();
        assert_eq!((options.seed, options.max_tokens), (Some(7), Some(20)));
        assert_eq!((options.stop.as_slice(), options.n_ctx), (&["a".to_owned(), "b".to_owned()][..], Some(4096)));
        let mut sampler = SamplerOptions::default();
        options.sampling.apply(&mut sampler).unwrap();
        assert_eq!((sampler.temperature, sampler.top_k, sampler.top_p), (0.5, 40, 0.8));
        assert_eq!((sampler.min_p, sampler.typical_p, sampler.repeat_penalty), (0.1, 0.7, 1.25));
        assert_eq!((sampler.presence_penalty, sampler.frequency_penalty), (1.5, 0.25));
        let mut notes = Notes::default();
        for name in ["num_gpu", "mirostat_tau", "use_mmap"] {
            notes.ignored(name);
        }
        assert_eq!(options.notes, notes);
    }

    #[test]
    fn null_and_unlimited_options_are_like_missing_ones() {
        assert_eq!(OllamaOptions::read(None), Ok(OllamaOptions::default()));
        for nothing in [
            json!(null),
            json!({}),
            json!({"temperature": null, "seed": null, "stop": null, "num_gpu": null, "mirostat": null, "num_ctx": null}),
            json!({"num_predict": -1, "seed": -1}),
            json!({"num_predict": -2, "stop": []}),
            json!({"num_predict": 0}),
        ] {
            assert_eq!(read(&nothing), Ok(OllamaOptions::default()), "{nothing}");
        }
        assert_eq!(read(&json!({"stop": "x"})).unwrap().stop, ["x"]);
    }

    #[test]
    fn unsupported_options_are_refused_by_name() {
        for (options, message) in [
            (json!([]), "options must be an object"),
            (json!("x"), "options must be an object"),
            (json!({"mirostat": 2}), "mirostat is not supported: use temperature, top_p, top_k and min_p"),
            (json!({"seed": 0.5}), "seed: invalid value: floating point `0.5`, expected a whole number"),
            (json!({"num_predict": "x"}), "num_predict: invalid type: string \"x\", expected a whole number"),
            (json!({"stop": 1}), "stop: invalid type: integer `1`, expected a string or a list of strings"),
        ] {
            assert_eq!(read(&options), Err(message.into()), "{options}");
        }
    }
}
