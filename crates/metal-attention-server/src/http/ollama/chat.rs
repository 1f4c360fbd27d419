//! `/api/chat`: the next message of a conversation.

use axum::extract::State;
use axum::response::Response;
use metal_attention::scheduler::Client;
use metal_attention_chat::{Message, Role, Tool, ToolCall};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::ErrorBody;
use super::fields::{OllamaFields, with_images};
use super::models;
use super::stream::{self, AnswerDelta, AnswerEnd, AnswerObject, OllamaAnswerReader, respond};
use crate::http::body::{FromJson, Json, Object};
use crate::http::job::chat::{ChatJob, PromptEnd, SubmittedChat};
use crate::http::job::tool_choice::AllowedCalls;
use crate::http::limits::MAX_MESSAGES;
use crate::http::models::ModelLease;
use crate::http::notes::Notes;
use crate::http::openai::logprobs::ChatTokenLogprob;
use crate::http::pictures::{Conversation, EncodedPictures};
use crate::http::streaming::RunningSequences;
use crate::http::{ApiError, App, openapi, prepare};

/// The fields of a chat that `/api/generate` does not have.
#[derive(Debug, Clone, Deserialize, ToSchema)]
pub struct OllamaChatFields {
    /// The conversation, the first message first. Without messages, the model is only loaded.
    messages: Option<Vec<OllamaMessage>>,
    /// The functions that the model may call.
    #[schema(value_type = Option<Vec<std::collections::BTreeMap<String, serde_json::Value>>>)]
    tools: Option<Vec<Tool>>,
}

/// A message of a request.
#[derive(Debug, Clone, Deserialize, ToSchema)]
#[schema(as = OllamaSentMessage)]
struct OllamaMessage {
    /// Its author: `system`, `user`, `assistant` or `tool`.
    #[schema(value_type = String)]
    role: Role,
    /// Its text.
    content: Option<String>,
    /// The model's reasoning before it.
    thinking: Option<String>,
    /// Its pictures, which stand before the text: the files in Base64.
    images: Option<Vec<String>>,
    /// The functions that the model called.
    #[schema(value_type = Option<Vec<std::collections::BTreeMap<String, serde_json::Value>>>)]
    tool_calls: Option<Vec<ToolCall>>,
    /// The function whose result this is.
    tool_name: Option<String>,
    /// The id of the call whose result this is.
    tool_call_id: Option<String>,
}

impl OllamaMessage {
    /// The message for a chat template.
    fn message(self) -> Message {
        let text = |text: Option<String>| text.filter(|text| !text.is_empty());
        let content = with_images(self.images.unwrap_or_default(), self.content.as_deref().unwrap_or_default());
        Message {
            role: self.role,
            content: Some(content.text).filter(|text| self.content.is_some() || !text.is_empty()),
            pictures: content.pictures,
            reasoning_content: text(self.thinking),
            tool_calls: self.tool_calls.unwrap_or_default(),
            tool_call_id: text(self.tool_call_id),
            name: text(self.tool_name),
        }
    }
}

/// A request for the next message of a conversation.
pub struct OllamaChatRequest {
    /// The model's name.
    model: String,
    /// The fields that chats share with `/api/generate`.
    fields: OllamaFields,
    /// The conversation and how to continue it.
    job: ChatJob,
}

impl FromJson for OllamaChatRequest {
    const MAY_HAVE_PICTURES: bool = true;

    fn picture_bytes(&self) -> usize {
        self.job.conversation.picture_bytes()
    }

    fn from_json(object: &Object<'_>) -> Result<Self, ApiError> {
        let mut fields = OllamaFields::read(object)?;
        let chat_fields: OllamaChatFields = object.parse()?;
        let sent = chat_fields.messages.unwrap_or_default();
        if sent.len() > MAX_MESSAGES {
            let message = format!("messages has {} messages; at most {MAX_MESSAGES} are allowed", sent.len());
            return Err(ApiError::field("messages", message));
        }
        let messages: Vec<Message> = sent.into_iter().map(OllamaMessage::message).collect();
        let job = ChatJob {
            allowed_calls: AllowedCalls::new(chat_fields.tools.unwrap_or_default(), None, true)?,
            response_format: fields.response_format(),
            reasoning: fields.reasoning(),
            prompt_end: PromptEnd::after(&messages),
            generation: fields.generation()?,
            drop_oldest: Some(fields.drops_oldest()),
            messages_field: "messages",
            notes: fields.notes.clone(),
            conversation: Conversation::new(messages),
        };
        Ok(Self { model: models::required(fields.model.take())?, fields, job })
    }
}

openapi::all_of!(OllamaChatRequest, OllamaChatFields, OllamaFields);

/// The response, or a line of its stream.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[schema(as = OllamaChat)]
pub struct ChatAnswer {
    /// The model's name in the request.
    model: String,
    /// The present time.
    created_at: String,
    /// The message, or the part that a line adds.
    message: AnswerMessage,
    /// Whether this is the end.
    done: bool,
    /// The end, in the last line.
    #[serde(flatten)]
    end: Option<AnswerEnd>,
    /// Log probabilities of its tokens, if requested.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(required = false)]
    logprobs: Vec<ChatTokenLogprob>,
}

/// A message of the model.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[schema(as = OllamaMessage)]
struct AnswerMessage {
    /// `assistant`.
    role: &'static str,
    /// The text.
    content: String,
    /// Reasoning.
    #[serde(skip_serializing_if = "String::is_empty")]
    #[schema(required = false)]
    thinking: String,
    /// The functions that it calls.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(required = false)]
    tool_calls: Vec<stream::ToolCall>,
}

impl AnswerObject for ChatAnswer {
    fn new(model: &str, part: AnswerDelta) -> Self {
        let AnswerDelta { content, thinking, calls: tool_calls, logprobs, context: _, end } = part;
        Self {
            model: model.to_owned(),
            created_at: stream::now(),
            message: AnswerMessage { role: "assistant", content, thinking, tool_calls },
            done: end.is_some(),
            end,
            logprobs,
        }
    }
}

/// Generates the next message of a conversation.
#[utoipa::path(post, path = "/api/chat", tag = "ollama", request_body = OllamaChatRequest, responses(
    (status = 200, description = "The message, whole or as a JSON object on each line",
        content((ChatAnswer = "application/json"), (String = "application/x-ndjson"))),
    (status = 404, description = "There is no such model", body = ErrorBody)))]
pub async fn chat(
    State(app): State<App>,
    client: Client,
    request: Json<OllamaChatRequest>,
) -> Result<Response, ApiError> {
    let (name, keep_alive, mut notes) = (&request.model, request.fields.keep_alive, Notes::default());
    if request.job.conversation.messages.is_empty() {
        let is_loaded = models::load_or_unload(&app, name, keep_alive, &mut notes).await?;
        return Ok(notes.attach(stream::without_text::<ChatAnswer>(name, is_loaded)));
    }
    let model = models::lease(&app, name, keep_alive, &mut notes).await?;
    request.fields.check_reasoning(name, &model)?;
    let reader = OllamaAnswerReader::new(&model, name, request.job.generation.received);
    let streamed = request.job.generation.stream;
    let pictures = request.job.encode_pictures(&app, &model, request.peer, Some(client)).await?;
    let lease = model.clone();
    let submit = move |app: &App, request: &OllamaChatRequest| request.submit(app, &lease, client, &pictures);
    let chat = prepare(&app, request, submit).await?;
    let sequences = RunningSequences::new(app, model, chat.events);
    let answer = respond::<ChatAnswer>(sequences, reader.messages(chat.parsers), streamed).await?;
    notes.extend(&chat.notes);
    Ok(notes.attach(answer))
}

impl OllamaChatRequest {
    /// Submits the job. CPU-bound: call it on a blocking thread.
    fn submit(
        &self,
        app: &App,
        model: &ModelLease,
        client: Client,
        pictures: &EncodedPictures,
    ) -> Result<SubmittedChat, ApiError> {
        let mut chat = self.job.submit(app, model, client, pictures)?;
        self.fields.options.note_context(model, &mut chat.notes);
        Ok(chat)
    }
}
