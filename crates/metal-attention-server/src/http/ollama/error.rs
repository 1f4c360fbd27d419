//! Errors in the form that ollama's clients read.

use serde::Serialize;
use utoipa::ToSchema;

use crate::http::ApiError;

/// The body of an error response, and the last line of a stream that fails.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
#[schema(as = OllamaErrorBody)]
pub struct ErrorBody {
    /// A message with the attempt, the failure and a remedy.
    error: String,
}

impl ErrorBody {
    /// The body of `error`.
    pub fn of(error: &ApiError) -> Self {
        Self { error: error.message().to_owned() }
    }
}
