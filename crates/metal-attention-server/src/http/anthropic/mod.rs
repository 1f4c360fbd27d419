//! Anthropic's interface: `/v1/messages`.
//!
//! Data flow: `request.rs` reads the JSON into a [`MessagesRequest`] with a
//! [`ChatJob`](crate::http::job::chat::ChatJob) of one choice (`content.rs` and `conversation.rs` read its messages);
//! the job is submitted on a blocking thread; `response.rs` writes the message whole, `stream.rs` as events.

mod content;
mod conversation;
mod error;
mod request;
mod response;
mod schema;
mod signature;
mod stream;
mod unsupported;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use metal_attention::scheduler::Client;

use crate::http::body::Json;
use crate::http::streaming::{Frames, RunningSequences, stream};
use crate::http::{ApiError, App, prepare};
pub use error::ErrorBody;
use request::MessagesRequest;
use response::{MessageObject, MessageWriter, TokenCount};
use stream::MessageChunks;

/// Generates the next message of a conversation.
#[utoipa::path(post, path = "/v1/messages", tag = "anthropic", request_body = MessagesRequest, responses(
    (status = 200, description = "The message, whole or as server-sent events",
        content((MessageObject = "application/json"), (schema::StreamEvent = "text/event-stream")))))]
pub async fn messages(
    State(app): State<App>,
    client: Client,
    request: Json<MessagesRequest>,
) -> Result<Response, ApiError> {
    let model = app.lease(request.model.as_deref()).await?;
    let generation = &request.job.generation;
    let (stream_wanted, stop) = (generation.stream, generation.stop.clone());
    let omits_reasoning = request.omits_reasoning;
    let pictures = request.job.encode_pictures(&app, &model, request.peer, Some(client)).await?;
    let lease = model.clone();
    let submit = move |app: &App, request: &MessagesRequest| request.job.submit(app, &lease, client, &pictures);
    let chat = prepare(&app, request, submit).await?;
    let mut notes = chat.notes;
    let name = model.answer_name(&mut notes);
    let writer = MessageWriter { model: name, n_prompt: chat.prompt_ids.len(), stop, omits_reasoning };
    let mut sequences = RunningSequences::new(app, model, chat.events);
    let mut parsers = chat.parsers;
    if stream_wanted {
        let mut first_frames = Frames::default();
        let chunks = MessageChunks::begin(parsers, writer, &mut first_frames);
        return Ok(notes.attach(stream(sequences, first_frames, chunks)));
    }
    let answer = sequences.collect(&mut parsers).await?.pop().unwrap_or_default();
    Ok(notes.attach(axum::Json(writer.message(answer)).into_response()))
}

/// Counts the tokens of a prompt without generating.
#[utoipa::path(post, path = "/v1/messages/count_tokens", tag = "anthropic", request_body = MessagesRequest,
    responses((status = 200, description = "How many tokens the prompt has", body = TokenCount)))]
pub async fn count_tokens(
    State(app): State<App>,
    request: Json<MessagesRequest>,
) -> Result<axum::Json<TokenCount>, ApiError> {
    let model = app.lease(request.model.as_deref()).await?;
    let pictures = request.job.encode_pictures(&app, &model, request.peer, None).await?;
    let count = move |_: &App, request: &MessagesRequest| request.job.whole_prompt_ids(&model, &pictures);
    let prompt = prepare(&app, request, count).await?;
    Ok(axum::Json(TokenCount { input_tokens: prompt.len() }))
}
