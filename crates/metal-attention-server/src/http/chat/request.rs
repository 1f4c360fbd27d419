//! What a chat completion may ask for.

use metal_attention_chat::{Message, Tool};
use serde::de::{DeserializeOwned, Error};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::http::ApiError;
use crate::http::body::{FromJson, parse};
use crate::http::fields::{GenerationFields, check};
use crate::http::limits::MAX_MESSAGES;
use crate::http::logprobs::MAX_TOP_LOGPROBS;
use crate::http::openapi::all_of;
use crate::http::sampling::SamplingFields;
use crate::http::unsupported::Endpoint;

/// What a chat completion may ask for besides what it shares with completions.
#[derive(Debug, Clone, Deserialize, ToSchema)]
pub struct ChatFields {
    /// The conversation so far, the first message first.
    #[schema(value_type = Vec<super::schema::ChatMessage>, min_items = 1)]
    pub messages: Vec<Message>,
    /// Tell the log probability of each token.
    logprobs: Option<bool>,
    /// And of so many of the likeliest; only with `logprobs`.
    #[schema(minimum = 0, maximum = 20)]
    top_logprobs: Option<u32>,
    /// What the answer must look like.
    pub response_format: Option<ResponseFormat>,
    /// The functions that the model may call.
    #[schema(value_type = Option<Vec<super::schema::ToolDefinition>>)]
    pub tools: Option<Vec<Tool>>,
    /// Whether the model calls a function, and which.
    tool_choice: Option<ToolChoice>,
    /// Whether one answer may call several functions; without a word about it, yes.
    parallel_tool_calls: Option<bool>,
    /// More variables for the model's chat template, such as `enable_thinking`.
    #[schema(value_type = Option<std::collections::BTreeMap<String, Value>>)]
    pub chat_template_kwargs: Option<Map<String, Value>>,
}

/// What an answer must look like.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ResponseFormat {
    /// Any text.
    #[default]
    Text,
    /// Any JSON object, or one that follows a schema.
    JsonObject {
        /// The schema, as llama.cpp's clients send it.
        #[schema(value_type = Option<std::collections::BTreeMap<String, Value>>)]
        schema: Option<Map<String, Value>>,
    },
    /// JSON that follows a schema.
    JsonSchema {
        /// The schema.
        #[serde(deserialize_with = "object")]
        json_schema: JsonSchema,
    },
}

/// A `T` out of a JSON object: serde would take a list of its fields, too.
fn object<'de, D: Deserializer<'de>, T: DeserializeOwned>(deserializer: D) -> Result<T, D::Error> {
    let object = Map::deserialize(deserializer)?;
    T::deserialize(Value::Object(object)).map_err(D::Error::custom)
}

/// A schema for an answer.
#[derive(Debug, Clone, PartialEq, Deserialize, ToSchema)]
pub struct JsonSchema {
    /// The schema; without it, any JSON object.
    #[schema(value_type = Option<std::collections::BTreeMap<String, Value>>)]
    pub schema: Option<Map<String, Value>>,
    /// Whether objects hold what they name and nothing else where they do not say `additionalProperties`: true, all;
    /// false, none; without a word about it, those that name any properties.
    pub strict: Option<bool>,
}

/// Whether the model calls a function, and which.
#[derive(Debug, Clone, PartialEq, Deserialize, ToSchema)]
#[serde(untagged, expecting = "expected \"none\", \"auto\", \"required\", or an object that names a function")]
enum ToolChoice {
    /// A word.
    Mode(ToolMode),
    /// This function.
    Named(NamedTool),
}

/// Whether the model calls a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum ToolMode {
    /// It does not.
    None,
    /// As it likes.
    Auto,
    /// It does.
    Required,
}

/// A function by its name.
#[derive(Debug, Clone, PartialEq, Deserialize, ToSchema)]
struct NamedTool {
    /// The function.
    function: FunctionName,
}

/// The name of a function.
#[derive(Debug, Clone, PartialEq, Deserialize, ToSchema)]
struct FunctionName {
    /// The name.
    name: String,
}

/// What a request says about calls of functions.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Calls<'a> {
    /// None.
    No,
    /// The model calls what it likes, or nothing.
    Any(&'a [Tool]),
    /// The model calls one of these.
    OneOf {
        /// The functions.
        tools: &'a [Tool],
        /// Or several.
        parallel: bool,
    },
}

impl<'a> Calls<'a> {
    /// The functions that the model is told of.
    pub fn tools(self) -> &'a [Tool] {
        match self {
            Self::No => &[],
            Self::Any(tools) | Self::OneOf { tools, .. } => tools,
        }
    }
}

impl ChatFields {
    /// How many of the likeliest tokens are wanted with the log probability of each token.
    pub fn top_logprobs(&self) -> Result<Option<usize>, ApiError> {
        let top = self.top_logprobs.unwrap_or(0);
        check("top_logprobs", top, 0..=MAX_TOP_LOGPROBS)?;
        if self.logprobs.unwrap_or(false) {
            return Ok(Some(top as usize));
        }
        if top > 0 {
            return Err(ApiError::field("top_logprobs", "top_logprobs has no effect without logprobs: true"));
        }
        Ok(None)
    }

    /// What the model may call.
    pub fn calls(&self) -> Result<Calls<'_>, ApiError> {
        let tools = self.tools.as_deref().unwrap_or_default();
        let none = |param| ApiError::field(param, "tool_choice wants a call, but there are no tools");
        match &self.tool_choice {
            Some(ToolChoice::Mode(ToolMode::None)) => Ok(Calls::No),
            None | Some(ToolChoice::Mode(ToolMode::Auto)) if tools.is_empty() => Ok(Calls::No),
            None | Some(ToolChoice::Mode(ToolMode::Auto)) => Ok(Calls::Any(tools)),
            Some(ToolChoice::Mode(ToolMode::Required)) if tools.is_empty() => Err(none("tool_choice")),
            Some(ToolChoice::Mode(ToolMode::Required)) => {
                Ok(Calls::OneOf { tools, parallel: self.parallel_tool_calls.unwrap_or(true) })
            }
            Some(ToolChoice::Named(named)) => {
                let name = &named.function.name;
                let at = tools.iter().position(|tool| tool.name() == name).ok_or_else(|| {
                    ApiError::field("tool_choice", format!("tool_choice names {name:?}, which is none of the tools"))
                })?;
                Ok(Calls::OneOf { tools: &tools[at..=at], parallel: false })
            }
        }
    }
}

/// A request for a chat completion.
pub struct ChatRequest {
    /// What only chats have.
    pub own: ChatFields,
    /// What completions have, too.
    pub shared: GenerationFields,
}

impl FromJson for ChatRequest {
    fn from_json(json: &[u8]) -> Result<Self, ApiError> {
        let shared = GenerationFields::read(Endpoint::Chat, json)?;
        let request = Self { own: parse(json)?, shared };
        match request.own.messages.len() {
            0 => Err(ApiError::field("messages", "messages is empty: give at least one message")),
            1..=MAX_MESSAGES => Ok(request),
            n => {
                let message = format!("messages has {n} messages; at most {MAX_MESSAGES} are allowed");
                Err(ApiError::field("messages", message))
            }
        }
    }
}

all_of!(ChatRequest, ChatFields, GenerationFields, SamplingFields);
