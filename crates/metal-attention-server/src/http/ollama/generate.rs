//! `/api/generate`: an answer to a prompt, or what comes after it, or what is between two texts.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use metal_attention::Constraint;
use metal_attention::scheduler::{Client, Events};
use metal_attention::tokenizer::EncodeOptions;
use metal_attention_chat::Message;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::ErrorBody;
use super::fields::OllamaFields;
use super::models;
use super::stream::{self, AnswerDelta, AnswerEnd, AnswerObject, AnswerReader, respond};
use crate::http::body::{FromJson, Json, Object};
use crate::http::job::chat::{ChatJob, PromptEnd};
use crate::http::job::choice_parser::ChoiceParsers;
use crate::http::job::fill_in;
use crate::http::job::form::raw_grammar;
use crate::http::job::generation::GenerationSettings;
use crate::http::job::tool_choice::AllowedCalls;
use crate::http::models::ModelLease;
use crate::http::notes::Notes;
use crate::http::openai::logprobs::ChatTokenLogprob;
use crate::http::streaming::RunningSequences;
use crate::http::{ApiError, App, openapi, prepare};

/// The fields of a generated text that chats do not have.
#[derive(Debug, Clone, Deserialize, ToSchema)]
pub struct OllamaGenerateFields {
    /// What the answer is to. Without it and without a suffix, the model is loaded.
    prompt: Option<String>,
    /// The text after the gap that is to be filled.
    suffix: Option<String>,
    /// Instructions before the prompt.
    system: Option<String>,
    /// The token ids that an answer before this one gave.
    context: Option<Vec<u32>>,
    /// Take the prompt as it is, without the model's template.
    raw: Option<bool>,
}

/// How the prompt is made.
#[derive(Debug, Clone)]
enum GeneratePrompt {
    /// There is none: the model is loaded.
    Nothing,
    /// As the user's message of a conversation, after the token ids of one before.
    Message { earlier_ids: Vec<u32>, job: Box<ChatJob> },
    /// As it is.
    Raw(String),
    /// As what is before and after a gap.
    Gap(String, String),
}

/// A request for a text.
pub struct OllamaGenerateRequest {
    model: String,
    fields: OllamaFields,
    generation: GenerationSettings,
    prompt: GeneratePrompt,
    notes: Notes,
}

impl FromJson for OllamaGenerateRequest {
    fn from_json(object: &Object<'_>) -> Result<Self, ApiError> {
        let mut fields = OllamaFields::read(object)?;
        let own: OllamaGenerateFields = object.parse()?;
        let mut notes = fields.notes.clone();
        let generation = fields.generation()?;
        let text = |text: Option<String>| text.filter(|text| !text.is_empty());
        let (prompt, suffix, system) = (text(own.prompt), text(own.suffix), text(own.system));
        let earlier_ids = own.context.unwrap_or_default();
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
            (Some(_), None) if own.raw == Some(true) && (system.is_some() || !earlier_ids.is_empty()) => {
                let message = "raw mode does not support system or context: put what they say into the prompt";
                return Err(ApiError::field("raw", message));
            }
            (Some(prompt), None) if own.raw == Some(true) => GeneratePrompt::Raw(prompt),
            (Some(prompt), None) => {
                let messages = system.map(Message::system).into_iter().chain([Message::user(prompt)]).collect();
                let job = ChatJob {
                    messages,
                    calls: AllowedCalls::new(Vec::new(), None, true)?,
                    form: fields.form(),
                    thinking: fields.thinking(),
                    end: PromptEnd::Answer,
                    generation: generation.clone(),
                    context_shift: Some(fields.context_shift()),
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

/// The answer, or a line of it.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[schema(as = OllamaGenerate)]
pub struct GenerateAnswer {
    /// The model, as the request calls it.
    model: String,
    /// The time.
    created_at: String,
    /// The text, or what is new of it.
    response: String,
    /// What the model thought.
    #[serde(skip_serializing_if = "String::is_empty")]
    #[schema(required = false)]
    thinking: String,
    /// Whether this is the end.
    done: bool,
    /// How the text ended, at its end.
    #[serde(flatten)]
    end: Option<AnswerEnd>,
    /// The token ids of prompt and answer, at the end: with them the next request goes on.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    context: Option<Vec<u32>>,
    /// The log probabilities of its tokens, where they were asked for.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(required = false)]
    logprobs: Vec<ChatTokenLogprob>,
}

impl AnswerObject for GenerateAnswer {
    fn new(model: &str, part: AnswerDelta) -> Self {
        // There are no tools, so that no answer has calls.
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

/// Answers a prompt.
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
    request.fields.check_thinking(name, &model)?;
    let reader = AnswerReader::new(&model, name, request.generation.received);
    let streamed = request.generation.stream;
    let lease = model.clone();
    let submitted = prepare(&app, request, move |app, request| request.submit(app, &lease, client)).await?;
    let SubmittedGenerate { events, message, notes: more } = submitted;
    notes.extend(&more);
    let reader = match message {
        Some((parsers, prompt)) => reader.messages(parsers).with_context(&prompt),
        None => reader,
    };
    let sequences = RunningSequences::new(app, model, events);
    Ok(notes.attach(respond::<GenerateAnswer>(sequences, reader, streamed).await?))
}

/// A text that is being generated.
struct SubmittedGenerate {
    events: Vec<Events>,
    /// What reads it as a message, and the prompt's token ids; `None`: it is a text and nothing else.
    message: Option<(ChoiceParsers, Arc<[u32]>)>,
    notes: Notes,
}

impl OllamaGenerateRequest {
    /// Submits the request. Templates and tokens take time: not to be called on a thread that serves others.
    fn submit(&self, app: &App, model: &ModelLease, client: Client) -> Result<SubmittedGenerate, ApiError> {
        let mut submitted = match &self.prompt {
            GeneratePrompt::Nothing => return Err(ApiError::field("prompt", "prompt is empty")),
            GeneratePrompt::Message { earlier_ids, job } => Self::submit_message(earlier_ids, job, app, model, client)?,
            GeneratePrompt::Raw(prompt) => {
                model.check_length(prompt, "prompt")?;
                let options = EncodeOptions { add_special: true, parse_special: true };
                self.submit_text(model.tokenizer.encode(prompt, options), app, model, client)?
            }
            GeneratePrompt::Gap(earlier_ids, after) => {
                let tokens = fill_in::tokens(model)?;
                let earlier_ids = fill_in::encode(model, earlier_ids, "prompt")?;
                let after = fill_in::encode(model, after, "suffix")?;
                self.submit_text(fill_in::prompt(model, tokens, &[], &earlier_ids, &after), app, model, client)?
            }
        };
        self.fields.options.note_context(model, &mut submitted.notes);
        Ok(submitted)
    }

    /// Submits a message after the end of `earlier_ids` that leaves room for the answer.
    fn submit_message(
        earlier_ids: &[u32],
        job: &ChatJob,
        app: &App,
        model: &ModelLease,
        client: Client,
    ) -> Result<SubmittedGenerate, ApiError> {
        model.check_ids(earlier_ids, "context")?;
        let chat = job.submit_after(earlier_ids, app, model, client)?;
        Ok(SubmittedGenerate { events: chat.events, message: Some((chat.parsers, chat.prompt)), notes: chat.notes })
    }

    /// Submits a text that goes on after `prompt`.
    fn submit_text(
        &self,
        prompt: Vec<u32>,
        app: &App,
        model: &ModelLease,
        client: Client,
    ) -> Result<SubmittedGenerate, ApiError> {
        let mut notes = self.notes.clone();
        if self.fields.wants_thoughts() {
            notes.ignored("think");
        }
        let stop = self.generation.stop(model, &[]);
        let mut request = self.generation.request(app, model, client, &prompt.into(), &stop, 0)?;
        let grammar = raw_grammar(model, self.fields.form().as_ref(), &mut notes)?;
        request.constraint = grammar.map(|grammar| Box::new(grammar) as Box<dyn Constraint>);
        let events = vec![model.scheduler.submit(request)?];
        Ok(SubmittedGenerate { events, message: None, notes })
    }
}
