//! `/apply-template`: the prompt of a conversation, without an answer.

use axum::extract::State;
use serde::Serialize;
use utoipa::ToSchema;

use super::prompt::MEDIA_MARKER;
use crate::http::body::Json;
use crate::http::openai::chat::ChatRequest;
use crate::http::{ApiError, App, prepare};

/// The prompt of a conversation.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[schema(as = LlamaCppTemplatePrompt)]
pub struct TemplatePrompt {
    /// The text, for `/completion`.
    prompt: String,
}

/// Renders a conversation with the model's chat template. The request is that of `/v1/chat/completions`.
#[utoipa::path(post, path = "/apply-template", tag = "llama.cpp", request_body = ChatRequest,
    responses((status = 200, description = "The prompt", body = TemplatePrompt)))]
pub async fn apply_template(
    State(app): State<App>,
    request: Json<ChatRequest>,
) -> Result<axum::Json<TemplatePrompt>, ApiError> {
    let model = app.lease(request.model.as_deref()).await?;
    let prompt = prepare(&app, request, move |_, request| request.job.whole_prompt_text(&model, MEDIA_MARKER)).await?;
    Ok(axum::Json(TemplatePrompt { prompt }))
}
