//! The response object, as OpenAI's clients read it.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

use crate::http::ApiError;
use crate::http::openai::logprobs::ChatTokenLogprob;

/// A response, with the parameters of its request.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct ResponseObject {
    /// The id of the response.
    pub id: String,
    /// `response`.
    pub object: &'static str,
    /// When the request arrived, in seconds since 1970.
    pub created_at: u64,
    /// When the response was complete, in seconds since 1970.
    #[schema(required)]
    pub completed_at: Option<u64>,
    /// The status of the response.
    pub status: ResponseStatus,
    /// The error of a failed response.
    #[schema(required)]
    pub error: Option<ResponseError>,
    /// The reason why the response is incomplete.
    #[schema(required)]
    pub incomplete_details: Option<IncompleteDetails>,
    /// The items: reasoning, messages and calls.
    pub output: Vec<OutputItem>,
    /// The number of tokens, after the end.
    #[schema(required)]
    pub usage: Option<ResponseUsage>,
    /// The parameters of the request.
    #[serde(flatten)]
    pub echo: RequestEcho,
}

/// The parameters of a request that its response repeats.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[schema(as = Asked)]
pub struct RequestEcho {
    /// The name of the model.
    pub model: String,
    /// False: responses are not generated in the background.
    pub background: bool,
    /// Instructions before the conversation (system prompt).
    #[schema(required)]
    pub instructions: Option<String>,
    /// Maximum generated tokens.
    #[schema(required)]
    pub max_output_tokens: Option<usize>,
    /// Maximum calls of tools that a server runs itself; this one runs none.
    #[schema(required)]
    pub max_tool_calls: Option<i64>,
    /// Notes of the client.
    pub metadata: BTreeMap<String, Value>,
    /// Whether the answer may have several calls.
    pub parallel_tool_calls: bool,
    /// The response that this one continues.
    #[schema(required)]
    pub previous_response_id: Option<String>,
    /// The client's name for requests with a common prefix.
    #[schema(required)]
    pub prompt_cache_key: Option<String>,
    /// The settings of reasoning.
    pub reasoning: Value,
    /// The client's name for its user.
    #[schema(required)]
    pub safety_identifier: Option<String>,
    /// The client's class of service.
    pub service_tier: String,
    /// Whether the response is stored.
    pub store: bool,
    /// The temperature of the sampler.
    pub temperature: f32,
    /// The response format.
    pub text: Value,
    /// Whether the model calls a tool, and which.
    pub tool_choice: Value,
    /// The tools.
    pub tools: Vec<Value>,
    /// The number of most likely tokens reported with each token.
    pub top_logprobs: u32,
    /// The top-p limit of the sampler.
    pub top_p: f32,
    /// The treatment of a conversation that exceeds the context.
    pub truncation: &'static str,
    /// The client's name for its user.
    #[schema(required)]
    pub user: Option<String>,
}

/// The status of a response or an item.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = Status)]
pub enum ResponseStatus {
    /// It is being generated.
    InProgress,
    /// It is complete.
    Completed,
    /// It was cut off.
    Incomplete,
    /// It ended with an error.
    Failed,
}

/// The error of a failed response.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct ResponseError {
    /// `server_error`, `rate_limit_exceeded` or `invalid_prompt`.
    pub code: &'static str,
    /// A description of the failure.
    pub message: String,
}

/// The reason why a response is incomplete.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct IncompleteDetails {
    /// `max_output_tokens`.
    pub reason: &'static str,
}

/// An item of the output.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum OutputItem {
    /// Reasoning of the model.
    Reasoning {
        /// The id of the item.
        id: String,
        /// The reasoning again, if the request sets `reasoning.summary`: it is not summarised.
        summary: Vec<ContentPart>,
        /// The reasoning.
        content: Vec<ContentPart>,
        /// The reasoning encoded for the next request, if `include` requests it.
        #[serde(skip_serializing_if = "Option::is_none")]
        encrypted_content: Option<String>,
        /// The status of the item.
        status: ResponseStatus,
    },
    /// A message of the model.
    Message {
        /// The id of the item.
        id: String,
        /// `assistant`.
        role: &'static str,
        /// The text.
        content: Vec<ContentPart>,
        /// The status of the item.
        status: ResponseStatus,
    },
    /// A function call.
    FunctionCall {
        /// The id of the item.
        id: String,
        /// The call's id, which its result repeats.
        call_id: String,
        /// The function.
        name: String,
        /// The function's namespace.
        #[serde(skip_serializing_if = "Option::is_none")]
        namespace: Option<String>,
        /// The arguments: a JSON object as a string.
        arguments: String,
        /// The status of the item.
        status: ResponseStatus,
    },
    /// A call of a custom tool.
    CustomToolCall {
        /// The id of the item.
        id: String,
        /// The call's id, which its result repeats.
        call_id: String,
        /// The tool.
        name: String,
        /// The tool's namespace.
        #[serde(skip_serializing_if = "Option::is_none")]
        namespace: Option<String>,
        /// The input of the tool.
        input: String,
        /// The status of the item.
        status: ResponseStatus,
    },
}

/// A content part of a message or of reasoning.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[expect(clippy::enum_variant_names, reason = "the interface's own names")]
#[schema(as = Part)]
pub enum ContentPart {
    /// A text.
    OutputText {
        /// The text.
        text: String,
        /// Always empty: there are no citations.
        annotations: Vec<String>,
        /// Log probabilities of its tokens, if requested.
        logprobs: Vec<ChatTokenLogprob>,
    },
    /// Reasoning in the place of a summary.
    SummaryText {
        /// The reasoning.
        text: String,
    },
    /// Reasoning.
    ReasoningText {
        /// The reasoning.
        text: String,
    },
}

/// The number of tokens of a response.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct ResponseUsage {
    /// Tokens of the prompt.
    input_tokens: usize,
    /// Details of the prompt tokens.
    input_tokens_details: InputDetails,
    /// Generated tokens.
    output_tokens: usize,
    /// Details of the generated tokens.
    output_tokens_details: OutputDetails,
    /// The sum of both.
    total_tokens: usize,
}

/// Details of the prompt tokens.
#[derive(Debug, Clone, Serialize, ToSchema)]
struct InputDetails {
    /// Tokens that were found in the prefix cache.
    cached_tokens: usize,
    /// Tokens that were evaluated and added to it.
    cache_write_tokens: usize,
}

/// Details of the generated tokens.
#[derive(Debug, Clone, Serialize, ToSchema)]
struct OutputDetails {
    /// Tokens of reasoning, including its delimiters.
    reasoning_tokens: usize,
}

impl ResponseUsage {
    /// The tokens of a sequence, `reasoning_tokens` of them for reasoning.
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
    /// The response's form of `error`.
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
    /// The id of the item.
    pub fn id(&self) -> &str {
        match self {
            Self::Reasoning { id, .. }
            | Self::Message { id, .. }
            | Self::FunctionCall { id, .. }
            | Self::CustomToolCall { id, .. } => id,
        }
    }

    /// Whether it is reasoning.
    pub fn is_reasoning(&self) -> bool {
        match self {
            Self::Reasoning { .. } => true,
            Self::Message { .. } | Self::FunctionCall { .. } | Self::CustomToolCall { .. } => false,
        }
    }
}
