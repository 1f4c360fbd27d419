//! A response, as OpenAI's clients read it.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

use crate::http::ApiError;
use crate::http::openai::logprobs::ChatTokenLogprob;

/// An answer, with what was asked.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct ResponseObject {
    /// The response's name.
    pub id: String,
    /// `response`.
    pub object: &'static str,
    /// When the request came, in seconds since 1970.
    pub created_at: u64,
    /// When the answer was complete.
    #[schema(required)]
    pub completed_at: Option<u64>,
    /// How far it is.
    pub status: ResponseStatus,
    /// Why it failed.
    #[schema(required)]
    pub error: Option<ResponseError>,
    /// Why it is incomplete.
    #[schema(required)]
    pub incomplete_details: Option<IncompleteDetails>,
    /// What the model thought, said and called.
    pub output: Vec<OutputItem>,
    /// Tokens it took, once it has ended.
    #[schema(required)]
    pub usage: Option<ResponseUsage>,
    /// What was asked.
    #[serde(flatten)]
    pub echo: RequestEcho,
}

/// What was asked, as far as a response repeats it.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[schema(as = Asked)]
pub struct RequestEcho {
    /// The model that answers.
    pub model: String,
    /// False: the server answers while the client waits.
    pub background: bool,
    /// Instructions that come before the conversation.
    #[schema(required)]
    pub instructions: Option<String>,
    /// Most tokens to generate.
    #[schema(required)]
    pub max_output_tokens: Option<usize>,
    /// Most calls of tools that a server runs itself; this one runs none.
    #[schema(required)]
    pub max_tool_calls: Option<i64>,
    /// The client's own notes.
    pub metadata: BTreeMap<String, Value>,
    /// Whether the answer may be several calls.
    pub parallel_tool_calls: bool,
    /// The response that this one goes on from.
    #[schema(required)]
    pub previous_response_id: Option<String>,
    /// The client's name for requests that begin alike.
    #[schema(required)]
    pub prompt_cache_key: Option<String>,
    /// How the model thinks.
    pub reasoning: Value,
    /// The client's name for its user.
    #[schema(required)]
    pub safety_identifier: Option<String>,
    /// How the request is served elsewhere.
    pub service_tier: String,
    /// Whether the response is kept.
    pub store: bool,
    /// How the logits are divided.
    pub temperature: f32,
    /// What the text looks like.
    pub text: Value,
    /// Whether the model calls a tool, and which.
    pub tool_choice: Value,
    /// The tools.
    pub tools: Vec<Value>,
    /// How many of the likeliest tokens are reported with each token.
    pub top_logprobs: u32,
    /// How much of the likeliest tokens is chosen from.
    pub top_p: f32,
    /// What becomes of a conversation that is too long.
    pub truncation: &'static str,
    /// The client's name for its user.
    #[schema(required)]
    pub user: Option<String>,
}

/// How far a response or one of its items is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = Status)]
pub enum ResponseStatus {
    /// It is generated.
    InProgress,
    /// It is complete.
    Completed,
    /// It was cut off.
    Incomplete,
    /// It ended with an error.
    Failed,
}

/// Why a response failed.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct ResponseError {
    /// `server_error`, `rate_limit_exceeded` or `invalid_prompt`.
    pub code: &'static str,
    /// What went wrong.
    pub message: String,
}

/// Why a response is incomplete.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct IncompleteDetails {
    /// `max_output_tokens`.
    pub reason: &'static str,
}

/// A part of an answer.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum OutputItem {
    /// What the model thought.
    Reasoning {
        /// The item's name.
        id: String,
        /// The thoughts again, where the request has `reasoning.summary`: nobody sums them up.
        summary: Vec<ContentPart>,
        /// The thoughts.
        content: Vec<ContentPart>,
        /// The thoughts in a form that the next request may repeat, where `include` has it.
        #[serde(skip_serializing_if = "Option::is_none")]
        encrypted_content: Option<String>,
        /// How far it is.
        status: ResponseStatus,
    },
    /// What the model says.
    Message {
        /// The item's name.
        id: String,
        /// `assistant`.
        role: &'static str,
        /// The text.
        content: Vec<ContentPart>,
        /// How far it is.
        status: ResponseStatus,
    },
    /// A function that the model calls.
    FunctionCall {
        /// The item's name.
        id: String,
        /// The call's id, which its result repeats.
        call_id: String,
        /// The function.
        name: String,
        /// Its namespace.
        #[serde(skip_serializing_if = "Option::is_none")]
        namespace: Option<String>,
        /// The arguments: a JSON object as text.
        arguments: String,
        /// How far it is.
        status: ResponseStatus,
    },
    /// A custom tool that the model calls.
    CustomToolCall {
        /// The item's name.
        id: String,
        /// The call's id, which its result repeats.
        call_id: String,
        /// The tool.
        name: String,
        /// Its namespace.
        #[serde(skip_serializing_if = "Option::is_none")]
        namespace: Option<String>,
        /// What it is called with.
        input: String,
        /// How far it is.
        status: ResponseStatus,
    },
}

/// A part of a message or of thoughts.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[expect(clippy::enum_variant_names, reason = "the interface's own names")]
#[schema(as = Part)]
pub enum ContentPart {
    /// A text.
    OutputText {
        /// The text.
        text: String,
        /// Empty: nothing is quoted.
        annotations: Vec<String>,
        /// Log probabilities of its tokens, where they were asked for.
        logprobs: Vec<ChatTokenLogprob>,
    },
    /// Thoughts, as a summary.
    SummaryText {
        /// The thoughts.
        text: String,
    },
    /// Thoughts.
    ReasoningText {
        /// The thoughts.
        text: String,
    },
}

/// How many tokens a response took.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct ResponseUsage {
    /// Tokens of the prompt.
    input_tokens: usize,
    /// More about them.
    input_tokens_details: InputDetails,
    /// Tokens that were generated.
    output_tokens: usize,
    /// More about them.
    output_tokens_details: OutputDetails,
    /// Both.
    total_tokens: usize,
}

/// More about the tokens of the prompt.
#[derive(Debug, Clone, Serialize, ToSchema)]
struct InputDetails {
    /// Tokens that were in the KV cache already.
    cached_tokens: usize,
    /// Tokens that were added to it.
    cache_write_tokens: usize,
}

/// More about the tokens that were generated.
#[derive(Debug, Clone, Serialize, ToSchema)]
struct OutputDetails {
    /// Tokens of thoughts, their marks included.
    reasoning_tokens: usize,
}

impl ResponseUsage {
    /// What a text took, `reasoning_tokens` of it for thoughts.
    pub fn new(usage: metal_attention::scheduler::Usage, reasoning_tokens: Option<usize>) -> Self {
        let (cached, input, output) = (usage.cached_tokens, usage.prompt_tokens, usage.generated_tokens);
        Self {
            input_tokens: input,
            input_tokens_details: InputDetails {
                cached_tokens: cached,
                cache_write_tokens: input.saturating_sub(cached),
            },
            output_tokens: output,
            output_tokens_details: OutputDetails { reasoning_tokens: reasoning_tokens.unwrap_or(0) },
            total_tokens: input + output,
        }
    }
}

impl ResponseError {
    /// That of `error`.
    pub fn of(error: &ApiError) -> Self {
        let code = match error.status().as_u16() {
            429 => "rate_limit_exceeded",
            400..500 => "invalid_prompt",
            _ => "server_error",
        };
        Self { code, message: error.message().to_owned() }
    }
}

impl OutputItem {
    /// The item's name.
    pub fn id(&self) -> &str {
        match self {
            Self::Reasoning { id, .. }
            | Self::Message { id, .. }
            | Self::FunctionCall { id, .. }
            | Self::CustomToolCall { id, .. } => id,
        }
    }

    /// Whether it is what the model thought.
    pub fn is_reasoning(&self) -> bool {
        match self {
            Self::Reasoning { .. } => true,
            Self::Message { .. } | Self::FunctionCall { .. } | Self::CustomToolCall { .. } => false,
        }
    }
}
