//! Errors in the form that llama.cpp's clients read.

use axum::http::StatusCode;
use serde::Serialize;
use utoipa::ToSchema;

use crate::http::ApiError;

/// The body of an error response, and the last event of a stream that fails.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
#[schema(as = LlamaCppErrorBody)]
pub struct ErrorBody {
    /// The details.
    error: ErrorDetail,
}

/// The details of an error.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
#[schema(as = LlamaCppErrorDetail)]
struct ErrorDetail {
    /// The HTTP status.
    code: u16,
    /// A message with the attempt, the failure and a remedy.
    message: String,
    /// The kind of error, such as `invalid_request_error`.
    #[serde(rename = "type")]
    kind: &'static str,
    /// The field of the request that is wrong.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    param: Option<String>,
    /// Tokens of a prompt that exceeds the context.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    n_prompt_tokens: Option<usize>,
    /// Maximum tokens of a prompt.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    n_ctx: Option<usize>,
}

impl ErrorBody {
    /// The body of `error`.
    pub fn of(error: &ApiError) -> Self {
        let exceeded = error.exceeded();
        Self {
            error: ErrorDetail {
                code: error.status().as_u16(),
                message: error.message().to_owned(),
                kind: kind(error),
                param: error.param().map(str::to_owned),
                n_prompt_tokens: exceeded.map(|exceeded| exceeded.n_prompt),
                n_ctx: exceeded.map(|exceeded| exceeded.n_ctx),
            },
        }
    }
}

/// llama.cpp's name of this kind of error.
fn kind(error: &ApiError) -> &'static str {
    match error.status() {
        StatusCode::UNAUTHORIZED => "authentication_error",
        StatusCode::FORBIDDEN => "permission_error",
        StatusCode::NOT_FOUND => "not_found_error",
        StatusCode::NOT_IMPLEMENTED => "not_supported_error",
        StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => "unavailable_error",
        _ if error.code() == Some("context_length_exceeded") => "exceed_context_size_error",
        status if status.is_client_error() => "invalid_request_error",
        _ => "server_error",
    }
}

#[cfg(test)]
mod tests {
    use metal_attention::scheduler::SubmitError;
    use serde_json::{Value, json};

    use super::*;

    fn body(error: &ApiError) -> Value {
        serde_json::to_value(ErrorBody::of(error)).unwrap()["error"].clone()
    }

    #[test]
    fn errors_have_the_status_as_their_code() {
        let wrong = body(&ApiError::field("seed", "seed is wrong"));
        let expected =
            json!({"code": 400, "message": "seed is wrong", "type": "invalid_request_error", "param": "seed"});
        assert_eq!(wrong, expected);
        assert_eq!(body(&ApiError::shutting_down())["type"], "unavailable_error");
        assert_eq!(body(&ApiError::deadline())["type"], "server_error");
        assert_eq!(body(&ApiError::unauthorized("no"))["type"], "authentication_error");
        assert_eq!(body(&ApiError::not_found("model_not_found", "no"))["code"], 404);
    }

    #[test]
    fn errors_of_long_prompts_have_the_numbers_of_tokens() {
        let error = SubmitError::PromptTooLong { n_prompt: 20_000, n_ctx: 512, n_ctx_train: 512 };
        let error = body(&error.into());
        assert_eq!((&error["type"], &error["code"]), (&json!("exceed_context_size_error"), &json!(400)));
        assert_eq!((&error["n_prompt_tokens"], &error["n_ctx"]), (&json!(20_000), &json!(512)));
    }
}
