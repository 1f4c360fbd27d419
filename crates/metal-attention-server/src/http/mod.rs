//! The server's HTTP side: OpenAI's interface over a [`Scheduler`](crate::scheduler::Scheduler).
//!
//! `server.rs` takes connections and ends them; `routes.rs` says which path leads where and what a request passes
//! before; one file an endpoint has its types and what it does. `answer.rs` turns the scheduler's events into a whole
//! answer or a stream.

mod answer;
mod app;
mod body;
mod chat;
mod completions;
mod constraint;
mod embeddings;
mod error;
mod fields;
mod guard;
mod health;
mod ids;
mod logprobs;
mod metrics;
mod models;
mod openapi;
mod options;
mod page;
mod peer;
mod prompt;
mod routes;
mod server;
mod tokens;
mod usage;

use std::time::{SystemTime, UNIX_EPOCH};

use app::App;
pub use app::Loaded;
use error::ApiError;
pub use options::{HttpOptions, Keys};
pub use server::serve;

/// Runs `work`, which takes a moment, where it holds up nobody.
async fn prepare<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        // The panic is this request's; the layer that catches panics makes an answer of it.
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(_) => Err(ApiError::unavailable("shutting_down", "the server is shutting down")),
        },
    }
}

/// Seconds since 1970.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}
