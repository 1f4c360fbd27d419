//! `/api/generate`: the answer to a prompt as a chat message, the continuation of a raw prompt, or the text between a
//! prefix and a suffix.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use metal_attention::Constraint;
use metal_attention::scheduler::{Client, Events};
use metal_attention::tokenizer::EncodeOptions;
use metal_attention_chat::{Message, Role};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::ErrorBody;
use super::fields::{OllamaFields, with_images};
use super::models;
use super::stream::{self, AnswerDelta, AnswerEnd, AnswerObject, OllamaAnswerReader, respond};
use crate::http::body::{FromJson, Json, Object};
use crate::http::job::chat::{ChatJob, PromptEnd};
use crate::http::job::choice_parser::ChoiceParsers;
use crate::http::job::fill_in;
use crate::http::job::generation::GenerationSettings;
use crate::http::job::response_format::raw_grammar;
use crate::http::job::tool_choice::AllowedCalls;
use crate::http::models::ModelLease;
use crate::http::notes::Notes;
use crate::http::openai::logprobs::ChatTokenLogprob;
use crate::http::pictures::{Conversation, EncodedPictures};
use crate::http::streaming::RunningSequences;
use crate::http::{ApiError, App, openapi, prepare};

/// The fields that chats do not have.
#[derive(Debug, Clone, Deserialize, ToSchema)]
pub struct OllamaGenerateFields {
    /// The prompt. Without it and without a suffix, the model is only loaded.
    prompt: Option<String>,
    /// The text after the gap to fill.
    suffix: Option<String>,
    /// Instructions before the prompt (system prompt).
    system: Option<String>,
    /// The token ids that an earlier response returned: the prompt continues them.
    context: Option<Vec<u32>>,
    /// Pictures, which stand before the prompt: their files in Base64.
    images: Option<Vec<String>>,
    /// Use the prompt as it is, without the model's template.
    raw: Option<bool>,
}

/// The kind of prompt.
#[derive(Debug, Clone)]
enum GeneratePrompt {
    /// None: the model is only loaded.
    Nothing,
    /// The user's message of a conversation that continues the token ids of an earlier one.
    Message { earlier_ids: Vec<u32>, job: Box<ChatJob> },
    /// A text that is continued as it is.
    Raw(String),
    /// The text before a gap, and the text after it.
    Gap(String, String),
}

/// A request of `/api/generate`.
pub struct OllamaGenerateRequest {
    /// The model's name.
    model: String,
    /// The fields that it shares with chats.
    fields: OllamaFields,
    /// The settings of generation.
    generation: GenerationSettings,
    /// The prompt.
    prompt: GeneratePrompt,
    /// Notes for response headers.
    notes: Notes,
}

impl FromJson for OllamaGenerateRequest {
    const MAY_HAVE_PICTURES: bool = true;

    fn picture_bytes(&self) -> usize {
        match &self.prompt {
            GeneratePrompt::Message { job, .. } => job.conversation.picture_bytes(),
            GeneratePrompt::Nothing | GeneratePrompt::Raw(_) | GeneratePrompt::Gap(..) => 0,
        }
    }

    fn from_json(object: &Object<'_>) -> Result<Self, ApiError> {
        let mut fields = OllamaFields::read(object)?;
        let generate_fields: OllamaGenerateFields = object.parse()?;
        let mut notes = fields.notes.clone();
        let generation = fields.generation()?;
        let text = |text: Option<String>| text.filter(|text| !text.is_empty());
        let (prompt, suffix, system) =
            (text(generate_fields.prompt), text(generate_fields.suffix), text(generate_fields.system));
        let earlier_ids = generate_fields.context.unwrap_or_default();
        let images = generate_fields.images.unwrap_or_default();
        if !images.is_empty() && (suffix.is_some() || generate_fields.raw == Some(true)) {
            let message =
                "images have no place in raw prompts and before a suffix: leave raw and suffix out, or use /api/chat";
            return Err(ApiError::field("images", message));
        }
        // A picture alone is a prompt, too.
        let prompt = prompt.or_else(|| (!images.is_empty()).then(String::new));
        let prompt = match (prompt, suffix) {
            (None, None) => GeneratePrompt::Nothing,
            (prompt, Some(suffix)) => {
                if system.is_some() {
                    notes.ignored("system");
                }
                if !earlier_ids.is_empty() {
                    notes.ignored("context");
                }
                GeneratePrompt::Gap(prompt.unwrap_or_default(), suffix)
            }
            (Some(_), None) if generate_fields.raw == Some(true) && (system.is_some() || !earlier_ids.is_empty()) => {
                let message = "raw mode does not support system or context: put what they say into the prompt";
                return Err(ApiError::field("raw", message));
            }
            (Some(prompt), None) if generate_fields.raw == Some(true) => GeneratePrompt::Raw(prompt),
            (Some(prompt), None) => {
                let message = Message::of(Role::User, with_images(images, &prompt));
                let messages = system.map(Message::system).into_iter().chain([message]).collect();
                let job = ChatJob {
                    conversation: Conversation::new(messages),
                    allowed_calls: AllowedCalls::new(Vec::new(), None, true)?,
                    response_format: fields.response_format(),
                    reasoning: fields.reasoning(),
                    prompt_end: PromptEnd::Answer,
                    generation: generation.clone(),
                    drop_oldest: Some(fields.drops_oldest()),
                    messages_field: "prompt",
                    notes: notes.clone(),
                };
                GeneratePrompt::Message { earlier_ids, job: Box::new(job) }
            }
        };
        Ok(Self { model: models::required(fields.model.take())?, fields, generation, prompt, notes })
    }
}

openapi::all_of!(OllamaGenerateRequest, OllamaGenerateFields, OllamaFields);

/// The response, or a line of its stream.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[schema(as = OllamaGenerate)]
pub struct GenerateAnswer {
    /// The model's name in the request.
    model: String,
    /// The present time.
    created_at: String,
    /// The text, or the part that a line adds.
    response: String,
    /// Reasoning.
    #[serde(skip_serializing_if = "String::is_empty")]
    #[schema(required = false)]
    thinking: String,
    /// Whether this is the end.
    done: bool,
    /// The end, in the last line.
    #[serde(flatten)]
    end: Option<AnswerEnd>,
    /// The token ids of prompt and answer, in the last line: a later request continues them.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    context: Option<Vec<u32>>,
    /// Log probabilities of its tokens, if requested.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(required = false)]
    logprobs: Vec<ChatTokenLogprob>,
}

impl AnswerObject for GenerateAnswer {
    fn new(model: &str, part: AnswerDelta) -> Self {
        // The request has no tools, so there are no calls.
        let AnswerDelta { content: response, thinking, calls: _, logprobs, context, end } = part;
        Self {
            model: model.to_owned(),
            created_at: stream::now(),
            response,
            thinking,
            done: end.is_some(),
            end,
            context,
            logprobs,
        }
    }
}

/// Generates an answer to a prompt.
#[utoipa::path(post, path = "/api/generate", tag = "ollama", request_body = OllamaGenerateRequest, responses(
    (status = 200, description = "The text, whole or as a JSON object on each line",
        content((GenerateAnswer = "application/json"), (String = "application/x-ndjson"))),
    (status = 404, description = "There is no such model", body = ErrorBody)))]
pub async fn generate(
    State(app): State<App>,
    client: Client,
    request: Json<OllamaGenerateRequest>,
) -> Result<Response, ApiError> {
    let (name, keep_alive, mut notes) = (&request.model, request.fields.keep_alive, Notes::default());
    if matches!(request.prompt, GeneratePrompt::Nothing) {
        let is_loaded = models::load_or_unload(&app, name, keep_alive, &mut notes).await?;
        return Ok(notes.attach(stream::without_text::<GenerateAnswer>(name, is_loaded)));
    }
    let model = models::lease(&app, name, keep_alive, &mut notes).await?;
    request.fields.check_reasoning(name, &model)?;
    let reader = OllamaAnswerReader::new(&model, name, request.generation.received);
    let streamed = request.generation.stream;
    let pictures = match &request.prompt {
        GeneratePrompt::Message { job, .. } => job.encode_pictures(&app, &model, request.peer, Some(client)).await?,
        GeneratePrompt::Nothing | GeneratePrompt::Raw(_) | GeneratePrompt::Gap(..) => Vec::new(),
    };
    let lease = model.clone();
    let submit = move |app: &App, request: &OllamaGenerateRequest| request.submit(app, &lease, client, &pictures);
    let submitted = prepare(&app, request, submit).await?;
    let SubmittedGenerate { events, message, notes: more } = submitted;
    notes.extend(&more);
    let reader = match message {
        Some((parsers, Some(prompt))) => reader.messages(parsers).with_context(&prompt),
        Some((parsers, None)) => reader.messages(parsers),
        None => reader,
    };
    let sequences = RunningSequences::new(app, model, events);
    Ok(notes.attach(respond::<GenerateAnswer>(sequences, reader, streamed).await?))
}

/// The submitted sequence of a request.
struct SubmittedGenerate {
    /// The receiver of the scheduler's events, the only one.
    events: Vec<Events>,
    /// The parser of a chat message, and the prompt's token ids unless it has pictures, which a later request could not
    /// continue; `None`: plain text.
    message: Option<(ChoiceParsers, Option<Arc<[u32]>>)>,
    /// Notes for response headers.
    notes: Notes,
}

impl OllamaGenerateRequest {
    /// Submits the request. CPU-bound: call it on a blocking thread.
    fn submit(
        &self,
        app: &App,
        model: &ModelLease,
        client: Client,
        pictures: &EncodedPictures,
    ) -> Result<SubmittedGenerate, ApiError> {
        let mut submitted = match &self.prompt {
            GeneratePrompt::Nothing => return Err(ApiError::field("prompt", "prompt is empty")),
            GeneratePrompt::Message { earlier_ids, job } => {
                Self::submit_message(earlier_ids, job, app, model, client, pictures)?
            }
            GeneratePrompt::Raw(prompt) => {
                model.check_length(prompt, "prompt")?;
                let options = EncodeOptions { add_special: true, parse_special: true };
                self.submit_text(model.tokenizer.encode(prompt, options), app, model, client)?
            }
            GeneratePrompt::Gap(prefix, suffix) => {
                let tokens = fill_in::tokens(model)?;
                let prefix = fill_in::encode(model, prefix, "prompt")?;
                let suffix = fill_in::encode(model, suffix, "suffix")?;
                self.submit_text(fill_in::prompt(model, tokens, &[], &prefix, &suffix), app, model, client)?
            }
        };
        self.fields.options.note_context(model, &mut submitted.notes);
        Ok(submitted)
    }

    /// Submits a chat message that continues the end of `earlier_ids`, cut to leave room for the answer.
    fn submit_message(
        earlier_ids: &[u32],
        job: &ChatJob,
        app: &App,
        model: &ModelLease,
        client: Client,
        pictures: &EncodedPictures,
    ) -> Result<SubmittedGenerate, ApiError> {
        model.check_ids(earlier_ids, "context")?;
        let chat = job.submit_after(earlier_ids, app, model, client, pictures)?;
        let prompt = (!chat.has_pictures).then_some(chat.prompt_ids);
        Ok(SubmittedGenerate { events: chat.events, message: Some((chat.parsers, prompt)), notes: chat.notes })
    }

    /// Submits a sequence that continues `prompt`.
    fn submit_text(
        &self,
        prompt: Vec<u32>,
        app: &App,
        model: &ModelLease,
        client: Client,
    ) -> Result<SubmittedGenerate, ApiError> {
        let mut notes = self.notes.clone();
        if self.fields.wants_reasoning() {
            notes.ignored("think");
        }
        let stop = self.generation.stop(model, &[]);
        let mut request = self.generation.request(app, model, client, &prompt.into(), &stop, 0)?;
        let grammar = raw_grammar(model, self.fields.response_format().as_ref(), &mut notes)?;
        request.constraint = grammar.map(|grammar| Box::new(grammar) as Box<dyn Constraint>);
        let events = vec![model.scheduler.submit(request)?];
        Ok(SubmittedGenerate { events, message: None, notes })
    }
}
