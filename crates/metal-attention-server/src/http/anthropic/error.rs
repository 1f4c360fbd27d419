//! Errors in the form that Anthropic's clients read.

use axum::http::StatusCode;
use serde::Serialize;
use utoipa::ToSchema;

use crate::http::ApiError;

/// The body of an error response: `{"type": "error", "error": {"type": ..., "message": ...}}`.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
#[schema(as = AnthropicErrorBody)]
pub struct ErrorBody {
    /// `error`.
    #[serde(rename = "type")]
    kind: &'static str,
    /// The details.
    error: ErrorDetail,
}

/// The details of an error.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
#[schema(as = AnthropicErrorDetail)]
struct ErrorDetail {
    /// The kind of error, such as `invalid_request_error`.
    #[serde(rename = "type")]
    kind: &'static str,
    /// A message with the attempt, the failure and a remedy.
    message: String,
}

impl ErrorBody {
    /// The body of `error`.
    pub fn of(error: &ApiError) -> Self {
        let message = error.message();
        let message = match error.code() {
            // Claude Code shortens the conversation when it reads these words.
            Some("context_length_exceeded") => format!("prompt is too long: {message}"),
            Some(_) | None => message.to_owned(),
        };
        Self { kind: "error", error: ErrorDetail { kind: kind(error.status()), message } }
    }
}

/// Anthropic's name of errors with this status.
fn kind(status: StatusCode) -> &'static str {
    match status {
        StatusCode::UNAUTHORIZED => "authentication_error",
        StatusCode::FORBIDDEN => "permission_error",
        StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED => "not_found_error",
        StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
        StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
        StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
        StatusCode::GATEWAY_TIMEOUT | StatusCode::REQUEST_TIMEOUT => "timeout_error",
        status if status.is_client_error() => "invalid_request_error",
        _ => "api_error",
    }
}
