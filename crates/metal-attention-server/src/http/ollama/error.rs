//! Errors as ollama's clients read them.

use serde::Serialize;
use utoipa::ToSchema;

use crate::http::ApiError;

/// The body of an answer that is no success, and the last line of a stream that fails.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
#[schema(as = OllamaErrorBody)]
pub struct ErrorBody {
    /// What was tried, what went wrong, what to do.
    error: String,
}

impl ErrorBody {
    /// That of `error`.
    pub fn of(error: &ApiError) -> Self {
        Self { error: error.message().to_owned() }
    }
}
