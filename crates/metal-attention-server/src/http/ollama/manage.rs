//! Endpoints that change the set of models: `/api/create`, `/api/copy`, `/api/delete` and `/api/pull`.

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use futures_util::StreamExt;
use futures_util::stream;
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;
use utoipa::ToSchema;

use super::ErrorBody;
use super::models::{find, required};
use super::options::OllamaOptions;
use crate::http::body::{FromJson, Json, Object};
use crate::http::models::{ModelDefaults, PullProgress};
use crate::http::notes::Notes;
use crate::http::streaming::{Framing, line, streamed};
use crate::http::unsupported::{self, RefusedField, refused};
use crate::http::{ApiError, App, run_blocking};

/// Refused fields of `/api/create`.
const REFUSED: &[RefusedField] = &[
    refused("template", &[], "the model's own template is used"),
    refused("files", &[], "put the file where the server finds its models (--models-dir), or pull it"),
    refused("adapters", &[], "leave them out"),
    refused("messages", &[], "put them into the requests"),
    refused("quantize", &[], "use metal-attention quantize"),
    refused("quantization", &[], "use metal-attention quantize"),
    refused("modelfile", &[], "use from, system and parameters"),
    refused("path", &[], "use from, system and parameters"),
];

/// The progress of an operation.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
#[schema(as = OllamaProgress)]
pub struct ProgressReport {
    /// The present activity; `success` at the end.
    status: String,
    /// The name of the file that is being downloaded.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    digest: Option<String>,
    /// Bytes of the file.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    total: Option<u64>,
    /// Bytes of it that have arrived.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    completed: Option<u64>,
}

impl ProgressReport {
    fn new(status: &str) -> Self {
        Self { status: status.to_owned(), digest: None, total: None, completed: None }
    }

    fn success() -> Self {
        Self::new("success")
    }

    fn of(PullProgress { status, total, completed }: PullProgress) -> Self {
        // Clients show one progress bar for each name.
        let digest = status.strip_prefix("pulling ").map(str::to_owned);
        Self { status, digest, total: Some(total), completed: Some(completed) }
    }
}

/// A request to derive a model.
#[derive(Debug, Clone, Deserialize, ToSchema)]
#[schema(as = OllamaCreateRequest)]
pub struct CreateFields {
    /// The name of the new model.
    #[schema(min_length = 1, max_length = 256)]
    model: Option<String>,
    /// The name of the new model, as older clients send it.
    #[schema(min_length = 1, max_length = 256)]
    name: Option<String>,
    /// The model from which it is derived.
    from: Option<String>,
    /// The system prompt of conversations without one.
    system: Option<String>,
    /// Default options of requests.
    #[serde(skip)]
    #[schema(value_type = OllamaOptions)]
    #[allow(dead_code, reason = "part of the description")]
    parameters: (),
    /// Report the progress, one JSON object on each line; default: yes.
    stream: Option<bool>,
}

/// A request to derive a model.
pub struct CreateRequest {
    /// The name of the new model.
    model: String,
    /// The model from which it is derived.
    from: String,
    /// The system prompt; empty: none.
    system: Option<String>,
    /// Default options of requests.
    parameters: OllamaOptions,
    /// Whether the response is streamed.
    stream: bool,
    /// Notes for response headers.
    notes: Notes,
}

impl FromJson for CreateRequest {
    fn from_json(object: &Object<'_>) -> Result<Self, ApiError> {
        let mut notes = unsupported::check(object, REFUSED, &["license", "renderer", "parser"])?;
        let fields: CreateFields = object.parse()?;
        let parameters = OllamaOptions::read(object.get("parameters"))?;
        notes.extend(&parameters.notes);
        let from = fields.from.filter(|from| !from.is_empty());
        Ok(Self {
            model: required(fields.model.or(fields.name))?,
            from: from.ok_or_else(|| ApiError::field("from", "from is required: name the model to make it of"))?,
            system: fields.system,
            parameters,
            stream: fields.stream.unwrap_or(true),
            notes,
        })
    }
}

/// Derives a model from another one, with a system prompt and parameters of its own. It exists until the server ends.
#[utoipa::path(post, path = "/api/create", tag = "ollama", request_body = CreateFields, responses(
    (status = 200, description = "The model is made",
        content((ProgressReport = "application/json"), (String = "application/x-ndjson"))),
    (status = 403, description = "Clients may not change models", body = ErrorBody),
    (status = 404, description = "There is no such model", body = ErrorBody)))]
pub async fn create(State(app): State<App>, request: Json<CreateRequest>) -> Result<Response, ApiError> {
    app.check_may_manage()?;
    let from = find(&app, &request.from).await?;
    let (parameters, base) = (&request.parameters, &from.defaults);
    let defaults = ModelDefaults {
        system: request.system.clone().map_or(base.system.clone(), |system| Some(system).filter(|s| !s.is_empty())),
        sampling: parameters.sampling.clone().completed_from(&base.sampling),
        stop: if parameters.stop.is_empty() { base.stop.clone() } else { parameters.stop.clone() },
        max_tokens: parameters.max_tokens.or(base.max_tokens),
        context_shift: base.context_shift,
    };
    app.models.make(&request.model, &from, defaults)?;
    let mut notes = request.notes.clone();
    if let Some(model) = app.models.loaded(&from) {
        parameters.note_context(&model, &mut notes);
    }
    if !request.stream {
        return Ok(notes.attach(axum::Json(ProgressReport::success()).into_response()));
    }
    let progress =
        [ProgressReport::new(&format!("using existing layer of {}", request.from)), ProgressReport::success()];
    Ok(notes.attach(streamed(Framing::JsonLines, stream::iter(progress.map(|progress| line(&progress))))))
}

/// A request to give a model another name.
#[derive(Debug, Clone, Deserialize, ToSchema)]
#[schema(as = OllamaCopyRequest)]
pub struct CopyRequest {
    /// The model.
    source: String,
    /// The other name.
    #[schema(min_length = 1, max_length = 256)]
    destination: String,
}

impl FromJson for CopyRequest {
    fn from_json(object: &Object<'_>) -> Result<Self, ApiError> {
        object.parse()
    }
}

/// Gives a model another name, until the server ends.
#[utoipa::path(post, path = "/api/copy", tag = "ollama", request_body = CopyRequest, responses(
    (status = 200, description = "The model has the name"),
    (status = 403, description = "Clients may not change models", body = ErrorBody),
    (status = 404, description = "There is no such model", body = ErrorBody)))]
pub async fn copy(State(app): State<App>, request: Json<CopyRequest>) -> Result<StatusCode, ApiError> {
    app.check_may_manage()?;
    let source = find(&app, &request.source).await?;
    app.models.make(&request.destination, &source, source.defaults.clone())?;
    Ok(StatusCode::OK)
}

/// A request that only names a model.
#[derive(Debug, Clone, Deserialize, ToSchema)]
#[schema(as = OllamaNameRequest)]
pub struct NameRequest {
    /// The model's name.
    #[schema(min_length = 1, max_length = 256)]
    model: Option<String>,
    /// The model's name, as older clients send it.
    #[schema(min_length = 1, max_length = 256)]
    name: Option<String>,
    /// For a long operation: report the progress, one JSON object on each line; default: yes.
    stream: Option<bool>,
}

impl FromJson for NameRequest {
    fn from_json(object: &Object<'_>) -> Result<Self, ApiError> {
        object.parse()
    }
}

impl NameRequest {
    fn name(&self) -> Result<String, ApiError> {
        required(self.model.clone().or_else(|| self.name.clone()))
    }
}

/// Deletes a model: a derived one, or one of the model folder with its file.
#[utoipa::path(delete, path = "/api/delete", tag = "ollama", request_body = NameRequest, responses(
    (status = 200, description = "The model is gone"),
    (status = 400, description = "The request is wrong", body = ErrorBody),
    (status = 408, description = "The request's body did not arrive in time", body = ErrorBody),
    (status = 413, description = "The request's body is too long", body = ErrorBody),
    (status = 429, description = "Too many requests wait already", body = ErrorBody),
    (status = 503, description = "The server shuts down", body = ErrorBody),
    (status = 403, description = "Clients may not change models", body = ErrorBody),
    (status = 404, description = "There is no such model", body = ErrorBody)))]
pub async fn delete(State(app): State<App>, request: Json<NameRequest>) -> Result<StatusCode, ApiError> {
    app.check_may_manage()?;
    let entry = find(&app, &request.name()?).await?;
    run_blocking(&app, move |app| app.models.delete(&entry)).await?;
    Ok(StatusCode::OK)
}

/// Maximum queued progress reports of a download.
const MAX_REPORTS: usize = 64;

/// Downloads a model from the Hugging Face hub.
#[utoipa::path(post, path = "/api/pull", tag = "ollama", request_body = NameRequest, responses(
    (status = 200, description = "The model is there",
        content((ProgressReport = "application/json"), (String = "application/x-ndjson"))),
    (status = 403, description = "Clients may not change models", body = ErrorBody)))]
pub async fn pull(State(app): State<App>, request: Json<NameRequest>) -> Result<Response, ApiError> {
    app.check_may_manage()?;
    let name = request.name()?;
    let as_stream = request.stream.unwrap_or(true);
    let mut reports = start_pull(app, name)?;
    // A failure at the start has an HTTP status of its own.
    let mut report = reports.recv().await.transpose()?;
    if as_stream {
        let begin = [ProgressReport::new("pulling manifest")].into_iter().chain(report).map(Ok);
        let rest = stream::unfold(reports, |mut reports| async move { Some((reports.recv().await?, reports)) });
        let written = stream::iter(begin).chain(rest).map(|report| match report {
            Ok(progress) => line(&progress),
            Err(error) => line(&ErrorBody::of(&error)),
        });
        return Ok(streamed(Framing::JsonLines, written));
    }
    // The last report is the response.
    while let Some(next) = reports.recv().await.transpose()? {
        report = Some(next);
    }
    let last = report.ok_or_else(|| ApiError::internal("the download met a defect"))?;
    Ok(axum::Json(last).into_response())
}

/// Starts to download the model `name` on a new thread. Returns progress reports; the last one is `success` or an
/// error. The download stops when the receiver is dropped.
fn start_pull(app: App, name: String) -> Result<mpsc::Receiver<Result<ProgressReport, ApiError>>, ApiError> {
    let (sender, reports) = mpsc::channel(MAX_REPORTS);
    let download = move || {
        let mut report = |progress| match sender.try_send(Ok(ProgressReport::of(progress))) {
            // A later report has newer numbers, so this one may be dropped.
            Ok(()) | Err(mpsc::error::TrySendError::Full(_)) => true,
            Err(mpsc::error::TrySendError::Closed(_)) => false,
        };
        let result = app.models.pull(&name, &mut report);
        let _ = sender.blocking_send(result.map(|()| ProgressReport::success()));
    };
    std::thread::Builder::new()
        .name("pull".into())
        .spawn(download)
        .map_err(|error| ApiError::internal(format!("no thread for the download: {error}")))?;
    Ok(reports)
}

/// Refuses operations that this server does not support.
pub async fn not_supported(request: Request) -> ApiError {
    let path = request.uri().path();
    let message = format!(
        "{path} is not supported: this server sends no models elsewhere and takes none from clients; pull one with \
         /api/pull, or put its file into the folder of --models-dir"
    );
    ApiError::invalid(message).with_code("unsupported_endpoint")
}
