//! `/completion`: continues prompts, in llama.cpp's form.

use axum::extract::State;
use axum::response::Response;
use metal_attention::scheduler::Client;
use serde::Deserialize;
use utoipa::ToSchema;

use super::prompt::Prompts;
use super::request::{CutPrompt, SharedRequest, TextFields};
use super::response::{CompletionAnswer, answer};
use crate::http::body::{FromJson, Json, Object};
use crate::http::job::response_format::ResponseFormatFields;
use crate::http::job::sampling::SamplingFields;
use crate::http::openai::fields::GenerationFields;
use crate::http::{ApiError, App, openapi, prepare};

/// The fields of `/completion` that `/infill` does not have.
#[derive(Debug, Clone, Deserialize, ToSchema)]
#[schema(as = LlamaCppCompletionFields)]
struct CompletionFields {
    /// The prompt or prompts.
    prompt: Prompts,
}

/// A request to continue prompts.
pub struct LlamaCppCompletionRequest {
    /// The prompts.
    prompts: Prompts,
    /// The part that it shares with `/infill`.
    shared: SharedRequest,
}

impl FromJson for LlamaCppCompletionRequest {
    fn from_json(object: &Object<'_>) -> Result<Self, ApiError> {
        let shared = SharedRequest::read(object)?;
        let fields: CompletionFields = object.parse()?;
        Ok(Self { prompts: fields.prompt, shared })
    }
}

openapi::all_of!(
    LlamaCppCompletionRequest,
    CompletionFields,
    TextFields,
    ResponseFormatFields,
    GenerationFields,
    SamplingFields
);

/// Continues prompts.
#[utoipa::path(post, path = "/completion", tag = "llama.cpp", request_body = LlamaCppCompletionRequest, responses(
    (status = 200, description = "The texts, whole or as server-sent events",
        content((CompletionAnswer = "application/json"), (String = "text/event-stream")))))]
pub async fn completion(
    State(app): State<App>,
    client: Client,
    request: Json<LlamaCppCompletionRequest>,
) -> Result<Response, ApiError> {
    let model = app.lease(request.shared.model.as_deref()).await?;
    let is_stream = request.shared.generation.stream;
    let lease = model.clone();
    let submit = move |app: &App, request: &LlamaCppCompletionRequest| {
        let prompts = request.prompts.encode(&lease)?;
        let prompts = prompts.into_iter().map(|ids| CutPrompt { ids, truncated: false });
        request.shared.submit(app, &lease, client, prompts.collect())
    };
    let submitted = prepare(&app, request, submit).await?;
    answer(app, model, submitted, is_stream).await
}
