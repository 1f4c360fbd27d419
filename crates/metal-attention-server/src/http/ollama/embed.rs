//! `/api/embed` and `/api/embeddings`: texts to vectors.

use std::time::{Duration, Instant};

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use metal_attention::scheduler::Client;
use metal_attention::tokenizer::EncodeOptions;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::ErrorBody;
use super::models;
use super::options::OllamaOptions;
use super::stream::nanoseconds;
use crate::http::body::{FromJson, Json, Object};
use crate::http::limits::MAX_PROMPTS;
use crate::http::models::{KeepAlive, ModelLease};
use crate::http::notes::Notes;
use crate::http::openai::embeddings::truncate_vector;
use crate::http::request_line::RequestLine;
use crate::http::{ApiError, App, prepare, within_timeout};

/// A request for embeddings.
#[derive(Debug, Clone, Deserialize, ToSchema)]
#[schema(as = OllamaEmbedRequest)]
pub struct EmbedFields {
    /// The model's name, with or without `:latest`.
    #[schema(min_length = 1, max_length = 256, required)]
    model: Option<String>,
    /// The texts.
    input: Option<EmbedInput>,
    /// Truncate texts that exceed the context; default: yes.
    truncate: Option<bool>,
    /// Keep this many leading values of each vector and normalise it again; 0: all.
    dimensions: Option<u32>,
    /// The time that the model stays loaded after the response.
    keep_alive: Option<KeepAlive>,
    /// Options, none of which changes embeddings.
    #[serde(skip)]
    #[schema(value_type = OllamaOptions)]
    #[allow(dead_code, reason = "part of the description")]
    options: (),
}

/// A request for the embedding of one text.
#[derive(Debug, Clone, Deserialize, ToSchema)]
#[schema(as = OllamaEmbeddingsRequest)]
pub struct EmbeddingsFields {
    /// The model's name, with or without `:latest`.
    #[schema(min_length = 1, max_length = 256, required)]
    model: Option<String>,
    /// The text.
    prompt: Option<String>,
    /// The time that the model stays loaded after the response.
    keep_alive: Option<KeepAlive>,
    /// Options, none of which changes embeddings.
    #[serde(skip)]
    #[schema(value_type = OllamaOptions)]
    #[allow(dead_code, reason = "part of the description")]
    options: (),
}

/// A text or several.
#[derive(Debug, Clone, Deserialize, Serialize, ToSchema)]
#[serde(untagged, expecting = "expected a string or a list of strings")]
#[schema(as = OllamaInput)]
enum EmbedInput {
    /// One text.
    Text(String),
    /// Several texts.
    Texts(Vec<String>),
}

/// A request for embeddings, in either form.
pub struct EmbedJob {
    /// The model's name.
    model: String,
    /// The field with the texts, for errors.
    field: &'static str,
    /// The texts.
    texts: Vec<String>,
    /// Whether texts that exceed the context are truncated.
    truncate: bool,
    /// The number of leading values of a vector to keep; 0: all.
    dimensions: usize,
    /// The time that the model stays loaded after the response; `None`: unchanged.
    keep_alive: Option<KeepAlive>,
    /// When the request was read.
    received: Instant,
    /// Notes for response headers.
    notes: Notes,
}

/// The request of `/api/embed`.
pub struct EmbedRequest(EmbedJob);

/// The request of `/api/embeddings`.
pub struct EmbeddingsRequest(EmbedJob);

impl FromJson for EmbedRequest {
    fn from_json(object: &Object<'_>) -> Result<Self, ApiError> {
        let fields: EmbedFields = object.parse()?;
        let texts = match fields.input {
            None => Vec::new(),
            // ollama returns no vector for an empty text.
            Some(EmbedInput::Text(text)) => Some(text).filter(|text| !text.is_empty()).into_iter().collect(),
            Some(EmbedInput::Texts(texts)) => texts,
        };
        let mut read = EmbedJob::read("input", fields.model, texts, fields.keep_alive, object)?;
        read.truncate = fields.truncate.unwrap_or(true);
        read.dimensions = fields.dimensions.unwrap_or(0) as usize;
        Ok(Self(read))
    }
}

impl FromJson for EmbeddingsRequest {
    fn from_json(object: &Object<'_>) -> Result<Self, ApiError> {
        let fields: EmbeddingsFields = object.parse()?;
        let text = fields.prompt.filter(|text| !text.is_empty());
        EmbedJob::read("prompt", fields.model, text.into_iter().collect(), fields.keep_alive, object).map(Self)
    }
}

/// The embeddings of all texts.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[schema(as = OllamaEmbed)]
pub struct EmbedAnswer {
    /// The model's name in the request.
    model: String,
    /// A vector of length 1 for each text.
    embeddings: Vec<Vec<f32>>,
    /// The time from the request to the response, in nanoseconds.
    total_duration: u64,
    /// The time to load the model, in nanoseconds.
    load_duration: u64,
    /// Tokens of all texts.
    prompt_eval_count: usize,
}

/// The embedding of one text.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[schema(as = OllamaEmbeddings)]
pub struct EmbeddingsAnswer {
    /// A vector of length 1; empty for an empty text.
    embedding: Vec<f32>,
}

/// Computes embeddings of texts, normalised to length 1.
#[utoipa::path(post, path = "/api/embed", tag = "ollama", request_body = EmbedFields, responses(
    (status = 200, description = "The embeddings", body = EmbedAnswer),
    (status = 404, description = "There is no such model", body = ErrorBody)))]
pub async fn embed(State(app): State<App>, client: Client, request: Json<EmbedRequest>) -> Result<Response, ApiError> {
    let (model, received) = (request.0.model.clone(), request.0.received);
    let Embedded { vectors: embeddings, load, n_tokens, notes } =
        vectors(&app, client, request, |request| &request.0).await?;
    let answer = EmbedAnswer {
        model,
        embeddings,
        total_duration: nanoseconds(received.elapsed()),
        load_duration: nanoseconds(load),
        prompt_eval_count: n_tokens,
    };
    Ok(notes.attach(axum::Json(answer).into_response()))
}

/// Computes the embedding of one text, normalised to length 1: ollama's older endpoint.
#[utoipa::path(post, path = "/api/embeddings", tag = "ollama", request_body = EmbeddingsFields, responses(
    (status = 200, description = "The embedding", body = EmbeddingsAnswer),
    (status = 404, description = "There is no such model", body = ErrorBody)))]
pub async fn embeddings(
    State(app): State<App>,
    client: Client,
    request: Json<EmbeddingsRequest>,
) -> Result<Response, ApiError> {
    let Embedded { vectors, notes, .. } = vectors(&app, client, request, |request| &request.0).await?;
    let answer = EmbeddingsAnswer { embedding: vectors.into_iter().next().unwrap_or_default() };
    Ok(notes.attach(axum::Json(answer).into_response()))
}

/// The result of a request.
struct Embedded {
    /// One vector for each text, `[n_embd]` or its leading values.
    vectors: Vec<Vec<f32>>,
    /// The time to load the model.
    load: Duration,
    /// Tokens of all texts.
    n_tokens: usize,
    /// Notes for response headers.
    notes: Notes,
}

/// Computes the vectors of `request`, whose job `job_of` returns.
async fn vectors<R: Send + Sync + 'static>(
    app: &App,
    client: Client,
    request: Json<R>,
    job_of: fn(&R) -> &EmbedJob,
) -> Result<Embedded, ApiError> {
    let job = job_of(&request);
    let mut notes = job.notes.clone();
    let model = models::lease(app, &job.model, job.keep_alive, &mut notes).await?;
    let load = model.waited().unwrap_or_default();
    let prepared = prepare(app, request, move |_, request| {
        let job = job_of(request);
        model.check_embeds()?;
        let n_embd = model.n_embd();
        if job.dimensions > n_embd {
            let message = format!("dimensions is {}, but this model's embeddings have {n_embd}", job.dimensions);
            return Err(ApiError::field("dimensions", message));
        }
        let ids = job.encode(&model, &mut notes)?;
        model.scheduler.check_n_sequences(ids.len())?;
        let n_tokens = ids.iter().map(Vec::len).sum();
        let pending = ids.into_iter().map(|ids| model.scheduler.embed(client, ids)).collect::<Result<Vec<_>, _>>()?;
        let dimensions = if job.dimensions == 0 { n_embd } else { job.dimensions };
        // The lease keeps the model loaded until all vectors are computed.
        Ok((model, pending, dimensions, n_tokens, notes))
    });
    let computed = async {
        let (_model, pending, dimensions, n_tokens, notes) = prepared.await?;
        let mut vectors = Vec::with_capacity(pending.len());
        for vector in pending {
            vectors.push(truncate_vector(vector.await?, dimensions));
        }
        Ok(Embedded { vectors, load, n_tokens, notes })
    };
    let computed = within_timeout(app, computed).await?;
    if let Some(line) = RequestLine::current() {
        line.prompt_tokens(computed.n_tokens);
    }
    Ok(computed)
}

impl EmbedJob {
    /// Reads the fields that both endpoints share. `texts` are those of the field `field`.
    fn read(
        field: &'static str,
        model: Option<String>,
        texts: Vec<String>,
        keep_alive: Option<KeepAlive>,
        object: &Object<'_>,
    ) -> Result<Self, ApiError> {
        if texts.len() > MAX_PROMPTS {
            let message = format!("{field}: more than {MAX_PROMPTS} texts, which is the most of one request");
            return Err(ApiError::field(field, message));
        }
        let notes = OllamaOptions::read(object.get("options"))?.notes;
        let model = models::required(model)?;
        let received = Instant::now();
        Ok(Self { model, field, texts, truncate: true, dimensions: 0, keep_alive, received, notes })
    }

    /// Returns the token ids of each text, truncated to the context if requested; a final end or separator token
    /// remains at the end. Notes truncated texts.
    fn encode(&self, model: &ModelLease, notes: &mut Notes) -> Result<Vec<Vec<u32>>, ApiError> {
        let options = EncodeOptions { add_special: true, parse_special: true };
        let encode = |(i, text): (usize, &String)| {
            model.check_length(text, self.field)?;
            let mut ids = model.tokenizer.encode(text, options);
            if ids.is_empty() {
                let message = format!("{} has an empty text, of which there is no embedding: leave it out", self.field);
                return Err(ApiError::field(self.field, message));
            }
            if self.truncate && ids.len() > model.n_ctx {
                let (eos, separator) = (model.tokenizer.eos(), model.tokenizer.separator());
                let end = ids.last().copied().filter(|&id| [eos, separator].contains(&Some(id)));
                ids.truncate(model.n_ctx);
                if let (Some(end), Some(last)) = (end, ids.last_mut()) {
                    *last = end;
                }
                notes.truncated(format!("{}[{i}]", self.field));
            }
            Ok(ids)
        };
        self.texts.iter().enumerate().map(encode).collect()
    }
}
