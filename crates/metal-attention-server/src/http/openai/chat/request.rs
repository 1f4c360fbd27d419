//! The request of `/v1/chat/completions`, from JSON to a job.

use metal_attention_chat::{Message, Role, SentMessage, Tool};
use serde::Deserialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::prediction::Prediction;
use crate::http::ApiError;
use crate::http::body::{FromJson, Object};
use crate::http::job::chat::{ChatJob, PromptEnd};
use crate::http::job::generation::{GenerationSettings, MAX_TOP_LOGPROBS, check};
use crate::http::job::response_format::{self, ResponseFormatFields};
use crate::http::job::sampling::SamplingFields;
use crate::http::job::tool_choice::{AllowedCalls, ToolChoice};
use crate::http::limits::MAX_MESSAGES;
use crate::http::openai::fields::GenerationFields;
use crate::http::openai::reasoning::ReasoningFields;
use crate::http::openai::unsupported::Endpoint;
use crate::http::openapi::all_of;
use crate::http::pictures::Conversation;

/// The fields that completions do not have.
#[derive(Debug, Clone, Deserialize, ToSchema)]
pub struct ChatFields {
    /// The conversation, the first message first.
    #[schema(value_type = Vec<super::schema::ChatMessage>, min_items = 1)]
    messages: Vec<SentMessage>,
    /// Report the log probability of each token.
    logprobs: Option<bool>,
    /// Also report this many of the most likely tokens at each position; only with `logprobs`.
    #[schema(minimum = 0, maximum = 20)]
    top_logprobs: Option<u32>,
    /// The functions that the model may call.
    #[schema(value_type = Option<Vec<super::schema::ToolDefinition>>)]
    pub tools: Option<Vec<Tool>>,
    /// Whether the model calls a function, and which.
    #[schema(value_type = Option<super::schema::ToolChoice>)]
    tool_choice: Option<ToolChoice>,
    /// Whether one answer may call several functions; default: yes.
    parallel_tool_calls: Option<bool>,
    /// A text that the answer is likely to repeat, such as the file that it edits.
    prediction: Option<Prediction>,
    /// Additional variables of the model's chat template, such as `enable_thinking`.
    #[schema(value_type = Option<std::collections::BTreeMap<String, Value>>)]
    chat_template_kwargs: Option<Map<String, Value>>,
    /// Whether the answer continues the last message if that is the assistant's; default: yes.
    continue_final_message: Option<bool>,
    /// Whether the prompt ends with the markup that starts an answer; default: yes.
    add_generation_prompt: Option<bool>,
}

impl ChatFields {
    /// The number of most likely tokens to report at each position; `None`: no log probabilities.
    fn top_logprobs(&self) -> Result<Option<usize>, ApiError> {
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

    /// The end of the prompt.
    fn prompt_end(&self) -> Result<PromptEnd, ApiError> {
        let last = self.messages.last();
        let prefix = last.is_some_and(|last| last.is_prefix);
        let can = last.is_some_and(|SentMessage { message, .. }| {
            message.role == Role::Assistant && message.tool_calls.is_empty()
        });
        match self.continue_final_message {
            Some(true) if !can => {
                let message = "continue_final_message needs a text of the assistant as the last message";
                Err(ApiError::field("continue_final_message", message))
            }
            Some(true) | None if can => Ok(PromptEnd::WithinMessage),
            Some(false) if can && prefix => Ok(PromptEnd::WithinMessage),
            Some(_) | None if self.add_generation_prompt == Some(false) => Ok(PromptEnd::AfterMessage),
            Some(_) | None => Ok(PromptEnd::Answer),
        }
    }
}

/// The conversation. Fails if it is empty or too long.
fn messages(sent: Vec<SentMessage>) -> Result<Vec<Message>, ApiError> {
    match sent.len() {
        0 => Err(ApiError::field("messages", "messages is empty: give at least one message")),
        1..=MAX_MESSAGES => Ok(sent.into_iter().map(|sent| sent.message).collect()),
        n => {
            let message = format!("messages has {n} messages; at most {MAX_MESSAGES} are allowed");
            Err(ApiError::field("messages", message))
        }
    }
}

/// A request for a chat completion.
pub struct ChatRequest {
    /// The name of the model; `None`: the default one.
    pub model: Option<String>,
    /// The conversation and how to continue it.
    pub job: ChatJob,
    /// Whether a stream ends with the number of tokens.
    pub include_usage: bool,
}

impl FromJson for ChatRequest {
    const MAY_HAVE_PICTURES: bool = true;

    fn picture_bytes(&self) -> usize {
        self.job.conversation.picture_bytes()
    }

    fn from_json(object: &Object<'_>) -> Result<Self, ApiError> {
        let (shared, mut notes) = GenerationFields::read(Endpoint::Chat, object)?;
        let sampling = SamplingFields::read(object, &mut notes)?;
        let reasoning: ReasoningFields = object.parse()?;
        let fields: ChatFields = object.parse()?;
        let generation = shared.generation(sampling, None)?;
        let generation = GenerationSettings {
            logprobs: fields.top_logprobs()?.or(generation.logprobs),
            prediction: fields.prediction.clone().map(Prediction::into_text).unwrap_or_default(),
            ..generation
        };
        let end = fields.prompt_end()?;
        let tools = fields.tools.unwrap_or_default();
        let job = ChatJob {
            allowed_calls: AllowedCalls::new(
                tools,
                fields.tool_choice.as_ref(),
                fields.parallel_tool_calls.unwrap_or(true),
            )?,
            response_format: response_format::read(object)?,
            reasoning: reasoning.request(fields.chat_template_kwargs.unwrap_or_default())?,
            prompt_end: end,
            generation,
            drop_oldest: None,
            messages_field: "messages",
            notes,
            conversation: Conversation::new(messages(fields.messages)?),
        };
        Ok(Self { include_usage: shared.include_usage(), model: shared.model, job })
    }
}

all_of!(ChatRequest, ChatFields, ResponseFormatFields, ReasoningFields, GenerationFields, SamplingFields);
