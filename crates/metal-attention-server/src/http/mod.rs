//! The HTTP server: the interfaces of OpenAI, Anthropic, ollama and llama.cpp over a
//! [`Scheduler`](metal_attention::scheduler::Scheduler).
//!
//! A request passes: `server.rs` (accepts connections), `routes.rs` and `guard.rs` (middleware), `body.rs` (JSON to a
//! typed request), the handler in the folder of its interface (`openai/`, `responses/`, `anthropic/`, `ollama/`,
//! `llama_cpp/`), `models/` (leases the model), `job/` (prompt, grammar and submission, without an interface's names),
//! and `streaming.rs` (events to a response).

mod address;
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
mod pictures;
mod request_line;
mod responses;
mod resumable;
mod routes;
mod server;
mod streaming;
mod unsupported;
mod vllm_metrics;
mod work;

use std::sync::Arc;
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
pub use page::Page;
pub use pictures::{HostName, PictureOptions};
pub use request_line::LOG_TARGET;
pub use responses::{ResponseStore, StoreError, StoreLimits};
pub use server::{Listeners, ServeError, serve};
pub use work::THREADS;

/// Runs `work`, the CPU-bound part of a request (templates, tokenisation, grammars, submission), on a blocking thread
/// within the request timeout. A request that is not shared is dropped afterwards, with its body.
async fn prepare<R: Send + Sync + 'static, T: Send + 'static>(
    app: &App,
    request: impl Into<Arc<Json<R>>>,
    work: impl FnOnce(&App, &R) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let (owned, request) = (app.clone(), request.into());
    within_timeout(app, app.work.run(request.peer, request.work_size, move || work(&owned, &request))).await
}

/// Runs `work` that needs no body, such as reading folders, on a blocking thread.
async fn run_blocking<T: Send + 'static>(
    app: &App,
    work: impl FnOnce(&App) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let owned = app.clone();
    task_outcome(tokio::task::spawn_blocking(move || work(&owned)).await)
}

/// The outcome of a task. A panic is resumed here: the middleware `catch_panic` turns it into an error response.
fn task_outcome<T>(outcome: Result<Result<T, ApiError>, JoinError>) -> Result<T, ApiError> {
    outcome.unwrap_or_else(|error| match error.try_into_panic() {
        Ok(panic) => std::panic::resume_unwind(panic),
        Err(_) => Err(ApiError::shutting_down()),
    })
}

/// Waits for `work` at most for the request timeout (`--timeout`). Afterwards `work` is dropped, which cancels the
/// sequences that it has submitted.
async fn within_timeout<T>(
    app: &app::AppState,
    work: impl Future<Output = Result<T, ApiError>>,
) -> Result<T, ApiError> {
    match app.options.timeout {
        Some(timeout) => tokio::time::timeout(timeout, work).await.unwrap_or_else(|_| Err(ApiError::deadline())),
        None => work.await,
    }
}

/// The time in seconds since 1970.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}
