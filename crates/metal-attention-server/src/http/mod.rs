//! The server's HTTP side: OpenAI's interface over a [`Scheduler`](metal_attention::scheduler::Scheduler).
//!
//! `server.rs` takes connections and ends them; `routes.rs` says which path leads where and what a request passes
//! before; one file an endpoint has its types and what it does. `answer.rs` turns the scheduler's events into a whole
//! answer or a stream.

mod anthropic;
mod app;
mod body;
mod client;
mod client_stream;
mod connections;
mod dialect;
mod error;
mod guard;
mod health;
mod ids;
mod job;
mod limits;
mod llama_cpp;
mod mcp;
mod metrics;
mod models;
mod notes;
mod ollama;
mod openai;
mod openapi;
mod options;
mod page;
mod peer;
mod request_line;
mod responses;
mod routes;
mod server;
mod streaming;
mod unsupported;
mod vllm_metrics;
mod work;

use std::time::{SystemTime, UNIX_EPOCH};

use tokio::task::JoinError;

use app::App;
use body::Json;
use error::ApiError;
pub use job::sampling::SamplingFields;
pub use mcp::PageTools;
pub use models::{
    Capabilities, KeepAlive, LoadError, LoadedModel, MemoryNeed, ModelCard, ModelConfig, ModelDefaults, ModelSource,
    ModelStore, ModelsOptions, NoTime, Placement, PullProgress, SourceError, StoredModel,
};
pub use options::{ApiKeys, EmptyKey, HttpOptions};
pub use request_line::LOG_TARGET;
pub use responses::{ResponseStore, StoreError, StoreLimits};
pub use server::{Listeners, ServeError, serve};
pub use work::THREADS;

/// Does with a request what takes a moment, where it holds up nobody. The request is gone when it is done.
async fn prepare<R: Send + 'static, T: Send + 'static>(
    app: &App,
    request: Json<R>,
    work: impl FnOnce(&App, &R) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let owned = app.clone();
    within_timeout(app, app.work.run(request.peer, request.work_size, move || work(&owned, &request))).await
}

/// Does what takes a moment and belongs to no body, where it holds up nobody.
async fn run_blocking<T: Send + 'static>(
    app: &App,
    work: impl FnOnce(&App) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let owned = app.clone();
    task_outcome(tokio::task::spawn_blocking(move || work(&owned)).await)
}

/// What a task came to. Its panic is the request's; the layer that catches panics makes an answer of it.
fn task_outcome<T>(outcome: Result<Result<T, ApiError>, JoinError>) -> Result<T, ApiError> {
    outcome.unwrap_or_else(|error| match error.try_into_panic() {
        Ok(panic) => std::panic::resume_unwind(panic),
        Err(_) => Err(ApiError::shutting_down()),
    })
}

/// What `work` comes to, within the longest time of a request. Where that is over, `work` is dropped, and with it what it submitted.
async fn within_timeout<T>(
    app: &app::AppState,
    work: impl Future<Output = Result<T, ApiError>>,
) -> Result<T, ApiError> {
    match app.options.timeout {
        Some(timeout) => tokio::time::timeout(timeout, work).await.unwrap_or_else(|_| Err(ApiError::deadline())),
        None => work.await,
    }
}

/// Seconds since 1970.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}
