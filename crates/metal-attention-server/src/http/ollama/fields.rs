//! The fields that `/api/chat` and `/api/generate` share.

use metal_attention_chat::{MessagePicture, PictureSource, ReasoningEffort, TextWithPictures};
use metal_attention_grammar::ResponseFormat;
use serde::de::{Deserializer, Error};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::options::OllamaOptions;
use crate::http::ApiError;
use crate::http::body::Object;
use crate::http::job::generation::{GenerationSettings, MAX_TOP_LOGPROBS, check};
use crate::http::job::reasoning::ReasoningRequest;
use crate::http::models::{KeepAlive, ModelLease};
use crate::http::notes::Notes;
use crate::http::unsupported::{self, RefusedField, refused};

/// Refused fields.
const REFUSED: &[RefusedField] = &[
    refused("template", &[], "the model's own template is used; raw takes a prompt as it is"),
    refused("_debug_render_only", &[], "use /apply-template"),
];

/// A text behind pictures, whose files are given in Base64.
pub fn with_images(images: Vec<String>, text: &str) -> TextWithPictures {
    let mut content = TextWithPictures::default();
    for image in images {
        content.push_picture(MessagePicture { source: PictureSource::Base64(image.into()), low_detail: false });
    }
    content.push_str(text);
    content
}

/// The fields that `/api/chat` and `/api/generate` share.
#[derive(Deserialize, ToSchema)]
pub struct OllamaFields {
    /// The model's name, with or without `:latest`.
    #[schema(min_length = 1, max_length = 256, required)]
    pub model: Option<String>,
    /// Send the text as it is generated, one JSON object on each line; default: yes.
    stream: Option<bool>,
    /// The response format: `json`, or a JSON schema.
    #[schema(value_type = Option<AnswerFormat>)]
    format: Option<AnswerFormat>,
    /// Whether the model reasons, or its effort.
    think: Option<Think>,
    /// The time that the model stays loaded after the response.
    pub keep_alive: Option<KeepAlive>,
    /// Options of generation.
    #[serde(skip)]
    #[schema(value_type = OllamaOptions)]
    pub options: OllamaOptions,
    /// Report the log probability of each token.
    logprobs: Option<bool>,
    /// Also report this many of the most likely tokens; only with `logprobs`.
    #[schema(minimum = 0, maximum = 20)]
    top_logprobs: Option<u32>,
    /// Truncate a prompt that exceeds the context; default: yes.
    truncate: Option<bool>,
    /// Notes for response headers.
    #[serde(skip)]
    pub notes: Notes,
}

/// A response format.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
#[serde(untagged)]
#[schema(as = OllamaFormat)]
enum AnswerFormat {
    /// `json`: any JSON object; empty: any text.
    Word(String),
    /// A JSON schema.
    Schema(Map<String, Value>),
}

impl<'de> Deserialize<'de> for AnswerFormat {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match Value::deserialize(deserializer)? {
            Value::String(word) if ["", "json"].contains(&&*word) => Ok(Self::Word(word)),
            Value::Object(schema) => Ok(Self::Schema(schema)),
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_) => {
                Err(D::Error::custom("expected \"json\" or a JSON schema"))
            }
        }
    }
}

/// Whether the model reasons, or its effort.
#[derive(Debug, Clone, Copy, Deserialize, ToSchema)]
#[serde(untagged, expecting = "expected true, false, \"low\", \"medium\" or \"high\"")]
#[schema(as = OllamaThink)]
enum Think {
    /// Whether the model reasons.
    Enabled(bool),
    /// The effort.
    #[schema(value_type = String)]
    Effort(ReasoningEffort),
}

impl OllamaFields {
    /// Reads the fields. Notes those without effect.
    pub fn read(object: &Object<'_>) -> Result<Self, ApiError> {
        // The context never shifts during generation: an answer that fills it ends.
        let mut notes = unsupported::check(object, REFUSED, &["shift"])?;
        let options = OllamaOptions::read(object.get("options"))?;
        notes.extend(&options.notes);
        let fields: Self = object.parse()?;
        if fields.top_logprobs.is_some_and(|n| n > 0) && fields.logprobs != Some(true) {
            notes.ignored("top_logprobs");
        }
        Ok(Self { options, notes, ..fields })
    }

    /// The settings of generation.
    pub fn generation(&self) -> Result<GenerationSettings, ApiError> {
        let top = self.top_logprobs.unwrap_or(0);
        check("top_logprobs", top, 0..=MAX_TOP_LOGPROBS)?;
        Ok(GenerationSettings {
            sampling: self.options.sampling.clone(),
            seed: self.options.seed,
            stop: self.options.stop.clone(),
            max_tokens: self.options.max_tokens,
            logprobs: self.logprobs.unwrap_or(false).then_some(top as usize),
            stream: self.stream.unwrap_or(true),
            ..GenerationSettings::default()
        })
    }

    /// The response format, with the field that requires it; `None`: any text.
    pub fn response_format(&self) -> Option<(&'static str, ResponseFormat)> {
        let response_format = match self.format.clone()? {
            AnswerFormat::Word(word) => (!word.is_empty()).then_some(ResponseFormat::JsonObject)?,
            AnswerFormat::Schema(schema) => ResponseFormat::JsonSchema { schema: schema.into(), strict: None },
        };
        Some(("format", response_format))
    }

    /// The settings of reasoning.
    pub fn reasoning(&self) -> ReasoningRequest {
        match self.think {
            None => ReasoningRequest::default(),
            Some(Think::Enabled(on)) => ReasoningRequest { switch: Some(("think", on)), ..Default::default() },
            Some(Think::Effort(effort)) => ReasoningRequest {
                switch: (effort != ReasoningEffort::None).then_some(("think", true)),
                effort: Some(("think", effort)),
                ..Default::default()
            },
        }
    }

    /// Whether reasoning is requested.
    pub fn wants_reasoning(&self) -> bool {
        match self.think {
            None | Some(Think::Enabled(false) | Think::Effort(ReasoningEffort::None)) => false,
            Some(Think::Enabled(true) | Think::Effort(_)) => true,
        }
    }

    /// Fails if reasoning is requested of a model without it.
    pub fn check_reasoning(&self, name: &str, model: &ModelLease) -> Result<(), ApiError> {
        if self.wants_reasoning() && !model.template.can_reason() {
            let message = format!("\"{name}\" does not support thinking: leave think out, or use another model");
            return Err(ApiError::unsupported_by_model(message).with_param("think"));
        }
        Ok(())
    }

    /// Whether the oldest part of a conversation that exceeds the context is dropped.
    pub fn drops_oldest(&self) -> bool {
        self.truncate.unwrap_or(true)
    }
}
