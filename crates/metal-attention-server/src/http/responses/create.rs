//! `/v1/responses`: generates the next items of a conversation; counts its tokens.

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use metal_attention::scheduler::Client;
use serde::Serialize;
use utoipa::ToSchema;

use super::request::ResponseRequest;
use super::response::ResponseObject;
use super::store::{self, ClientResponses};
use super::writer::{ResponseChunks, ResponseWriter};
use crate::http::body::Json;
use crate::http::streaming::{Frames, RunningSequences, stream};
use crate::http::{ApiError, App, prepare};

/// Generates the next items of a conversation.
#[utoipa::path(post, path = "/v1/responses", tag = "openai", request_body = ResponseRequest, responses(
    (status = 200, description = "The response, whole or as server-sent events",
        content((ResponseObject = "application/json"), (String = "text/event-stream")))))]
pub async fn create(
    State(app): State<App>,
    client: Client,
    request: Json<ResponseRequest>,
) -> Result<Response, ApiError> {
    let model = app.lease(request.model.as_deref()).await?;
    let stream_wanted = request.stream;
    let (request, id) = (Arc::new(request), store::response_id());
    let of_response = id.clone();
    let resolve = move |app: &App, request: &ResponseRequest| {
        let stored = ClientResponses::new(&app.options.responses, client, &app.options.keys);
        request.resolve(&stored, &of_response)
    };
    let resolved = prepare(&app, Arc::clone(&request), resolve).await?;
    let pictures = resolved.job.encode_pictures(&app, &model, request.peer, Some(client)).await?;
    let lease = model.clone();
    let begin = move |app: &App, request: &ResponseRequest| {
        let stored = ClientResponses::new(&app.options.responses, client, &app.options.keys);
        let mut chat = resolved.job.submit(app, &lease, client, &pictures)?;
        let echo = request.echo(app, &lease, lease.answer_name(&mut chat.notes))?;
        let record = request.is_kept().then(|| stored.record(resolved.items));
        let writer = ResponseWriter::new(id, echo, request.writer_options(), &lease.tokenizer, record);
        Ok((chat, writer))
    };
    let (chat, mut writer) = prepare(&app, request, begin).await?;
    let mut sequences = RunningSequences::new(app, model, chat.events);
    let mut parsers = chat.parsers;
    if stream_wanted {
        let mut first_frames = Frames::default();
        writer.begin(&mut first_frames);
        return Ok(chat.notes.attach(stream(sequences, first_frames, ResponseChunks::new(parsers, writer))));
    }
    while let Some((i, event)) = sequences.next().await {
        // A stream's writer, whose events are discarded.
        writer.add(parsers.parse(i, event)?, &mut Frames::discarding());
    }
    Ok(chat.notes.attach(axum::Json(writer.into_response()).into_response()))
}

/// The number of tokens of a conversation.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct InputTokens {
    /// `response.input_tokens`.
    object: &'static str,
    /// Tokens of the prompt.
    input_tokens: usize,
}

/// Counts the tokens of a request's prompt without generating.
#[utoipa::path(post, path = "/v1/responses/input_tokens", tag = "openai", request_body = ResponseRequest,
    responses((status = 200, description = "The number of tokens", body = InputTokens)))]
pub async fn input_tokens(
    State(app): State<App>,
    client: Client,
    request: Json<ResponseRequest>,
) -> Result<axum::Json<InputTokens>, ApiError> {
    let model = app.lease(request.model.as_deref()).await?;
    let request = Arc::new(request);
    let resolve = move |app: &App, request: &ResponseRequest| {
        let stored = ClientResponses::new(&app.options.responses, client, &app.options.keys);
        request.resolve(&stored, "")
    };
    let resolved = prepare(&app, Arc::clone(&request), resolve).await?;
    let pictures = resolved.job.encode_pictures(&app, &model, request.peer, None).await?;
    let count = move |_: &App, _: &ResponseRequest| Ok(resolved.job.whole_prompt_ids(&model, &pictures)?.len());
    let input_tokens = prepare(&app, request, count).await?;
    Ok(axum::Json(InputTokens { object: "response.input_tokens", input_tokens }))
}

/// Refuses to compact a conversation.
#[utoipa::path(post, path = "/v1/responses/compact", tag = "openai",
    responses((status = 400, description = "This server compacts no conversations", body = crate::http::error::ErrorBody)))]
pub async fn compact() -> ApiError {
    let message = "/v1/responses/compact is not supported: this server compacts no conversations; have the model sum the \
                   conversation up in a response, and begin a new one with that";
    ApiError::invalid(message).with_code("unsupported_endpoint")
}
