//! `/v1/chat/completions`: the next message of a conversation, in `n` choices.
//!
//! Data flow: `request.rs` reads the JSON into a [`ChatRequest`], whose [`ChatJob`](crate::http::job::chat::ChatJob)
//! has no OpenAI names; the handler leases the model and submits the job on a blocking thread; [`RunningSequences`]
//! merges the events of the choices; `response.rs` writes them as one object or as chunks.
//!
//! Failures: if a choice cannot be submitted, those submitted before it are cancelled and the request fails. If a
//! running choice fails, the others are cancelled, too. If the client disconnects, the response is dropped, and with it
//! all running choices (during submission: as soon as its thread is done).

mod prediction;
mod request;
mod response;
mod schema;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use metal_attention::scheduler::Client;

use crate::http::body::Json;
use crate::http::streaming::{Frames, RunningSequences, stream};
use crate::http::{ApiError, App, prepare};
pub use request::ChatRequest;
pub use response::finish_reason;
use response::{ChatChunks, ChatCompletion, ChatWriter};

/// Generates the next message of a conversation.
#[utoipa::path(post, path = "/v1/chat/completions", tag = "openai", request_body = ChatRequest, responses(
    (status = 200, description = "The messages, whole or as server-sent events",
        content((ChatCompletion = "application/json"), (String = "text/event-stream")))))]
pub async fn chat_completions(
    State(app): State<App>,
    client: Client,
    request: Json<ChatRequest>,
) -> Result<Response, ApiError> {
    let model = app.lease(request.model.as_deref()).await?;
    let stream_wanted = request.job.generation.stream;
    let (with_logprobs, prompt_logprobs) =
        (request.job.generation.logprobs.is_some(), request.job.generation.prompt_logprobs);
    let include_usage = request.include_usage;
    let pictures = request.job.encode_pictures(&app, &model, request.peer, Some(client)).await?;
    let lease = model.clone();
    let submit = move |app: &App, request: &ChatRequest| request.job.submit(app, &lease, client, &pictures);
    let chat = prepare(&app, request, submit).await?;
    let mut notes = chat.notes;
    let writer = ChatWriter::new(&model, &chat.prompt_ids, &mut notes, with_logprobs, prompt_logprobs);
    let mut sequences = RunningSequences::new(app, model, chat.events);
    let mut parsers = chat.parsers;
    if stream_wanted {
        let mut first_frames = Frames::default();
        writer.begin(parsers.len(), &mut first_frames);
        let chunks = ChatChunks::new(parsers, writer, include_usage);
        return Ok(notes.attach(stream(sequences, first_frames, chunks)));
    }
    let answers = sequences.collect(&mut parsers).await?;
    Ok(notes.attach(axum::Json(writer.completion(&answers)).into_response()))
}
