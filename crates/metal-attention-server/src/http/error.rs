//! The error of a request ([`ApiError`]): an HTTP status and the parts of which each interface makes its JSON. OpenAI's
//! JSON is here.

use std::time::Duration;

use axum::body::Body;
use axum::http::header::{CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE};
use axum::http::{HeaderValue, Response, StatusCode};
use axum::response::IntoResponse;
use metal_attention::scheduler::{RequestError, SubmitError};
use serde::Serialize;
use utoipa::ToSchema;

use super::connections::ExceededLimit;

/// The error of a request.
#[derive(Debug, Clone, PartialEq)]
pub struct ApiError {
    /// The HTTP status.
    status: StatusCode,
    /// The details.
    detail: ErrorDetail,
    /// Tokens of a prompt that exceeds the context. Boxed: few errors have it, and results are moved often.
    exceeded: Option<Box<ExceededContext>>,
}

/// A prompt that exceeds the context.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExceededContext {
    /// Tokens of the prompt.
    pub n_prompt: usize,
    /// Maximum tokens of a prompt.
    pub n_ctx: usize,
}

/// The body of an error response.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
pub struct ErrorBody {
    /// The details.
    error: ErrorDetail,
}

/// The details of an error.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
struct ErrorDetail {
    /// A message with the attempt, the failure and a remedy.
    message: String,
    /// The kind of error, such as `invalid_request_error`.
    #[serde(rename = "type")]
    kind: String,
    /// The field of the request that is wrong.
    #[schema(required)]
    param: Option<String>,
    /// An identifier for programs, such as `model_not_found`.
    #[schema(required)]
    code: Option<String>,
}

impl ApiError {
    fn new(status: StatusCode, kind: &str, code: Option<&str>, message: impl Into<String>) -> Self {
        let message = shortened(message.into());
        let detail = ErrorDetail { message, kind: kind.into(), param: None, code: code.map(str::to_owned) };
        Self { status, detail, exceeded: None }
    }

    /// 400: the request is wrong.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", None, message)
    }

    /// 400: the value of a field is wrong.
    pub fn field(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::invalid(message).with_param(param)
    }

    /// 400: the model cannot do it, whatever the request.
    pub fn unsupported_by_model(message: impl Into<String>) -> Self {
        Self::invalid(message).with_code("unsupported_by_model")
    }

    /// 401: the API key is missing or wrong.
    pub fn unauthorized(message: impl Into<String>) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, "invalid_request_error", Some("invalid_api_key"), message)
    }

    /// 403: the Host header is not a name of this server.
    pub fn forbidden(message: impl Into<String>) -> Self {
        Self::new(StatusCode::FORBIDDEN, "invalid_request_error", Some("host_not_allowed"), message)
    }

    /// 403: clients of this server may not change models.
    pub fn may_not_manage() -> Self {
        let message = "clients of this server may not change its models and slots: start it with --allow-manage and a key \
                       (--api-key), or on the loopback alone (--host 127.0.0.1) and without --cors '*'";
        Self::new(StatusCode::FORBIDDEN, "invalid_request_error", Some("management_not_allowed"), message)
    }

    /// 404: the path or the named object does not exist.
    pub fn not_found(code: &str, message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, "invalid_request_error", Some(code), message)
    }

    /// 405: the path does not support the method.
    pub fn method_not_allowed(message: impl Into<String>) -> Self {
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "invalid_request_error", Some("method_not_allowed"), message)
    }

    /// 408: the body did not arrive within `limit`.
    pub fn request_timeout(limit: Duration) -> Self {
        let message =
            format!("the request's body did not arrive within the {} seconds that one may take", limit.as_secs_f64());
        Self::new(StatusCode::REQUEST_TIMEOUT, "invalid_request_error", Some("request_timeout"), message)
    }

    /// 413: the body is longer than `limit` bytes.
    pub fn too_large(limit: usize) -> Self {
        let message =
            format!("the request's body is longer than the {limit} bytes that this server takes (--max-body)");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", Some("body_too_large"), message)
    }

    /// 413: the pictures of a body have more than `limit` bytes.
    pub fn too_large_pictures(limit: usize) -> Self {
        let message = format!(
            "the request's pictures have more than the {limit} bytes that this server takes (--max-image-bytes): send smaller ones, or \
             JPEG instead of PNG"
        );
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", Some("body_too_large"), message)
    }

    /// 429: the body budget is exhausted. `total`, `per_client`: its limits in bytes, of all bodies and of one client.
    pub fn too_many_bodies(total: usize, per_client: usize) -> Self {
        let message = format!(
            "the server has its hands full: it holds bodies of {total} bytes in all (--max-bodies), and of {per_client} from one \
             address: try again later"
        );
        Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", Some("too_many_bodies"), message)
    }

    /// 429 or 503: the connection exceeds a limit.
    pub fn too_many_connections(limit: ExceededLimit) -> Self {
        let code = Some("too_many_connections");
        match limit {
            ExceededLimit::Address => {
                let message = "this address has as many connections as one may have (--max-connections-per-address)";
                Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", code, message)
            }
            ExceededLimit::Server => {
                let message = "the server has as many connections as it may have (--max-connections): try again later";
                Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", code, message)
            }
        }
    }

    /// 500: a defect of the server.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", Some("internal_error"), message)
    }

    /// 501: the server is not configured for it.
    pub fn not_supported(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_IMPLEMENTED, "server_error", Some("not_supported"), message)
    }

    /// 503: temporarily unavailable.
    pub fn unavailable(code: &str, message: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", Some(code), message)
    }

    /// 503: the server shuts down.
    pub fn shutting_down() -> Self {
        Self::unavailable("shutting_down", "the server is shutting down")
    }

    /// 503: the engine has panicked; the server is about to end.
    pub fn engine_failed() -> Self {
        let message = "the engine met a defect and has ended: the server must be started again";
        Self::unavailable("engine_failed", message)
    }

    /// 504: the request timeout (`--timeout`) ended before there was a result.
    pub fn deadline() -> Self {
        let message = "the request took longer than this server allows (--timeout)";
        Self::new(StatusCode::GATEWAY_TIMEOUT, "server_error", Some("timeout"), message)
    }

    /// Sets the field that is wrong.
    #[must_use]
    pub fn with_param(mut self, param: impl Into<String>) -> Self {
        self.detail.param = Some(shortened(param.into()));
        self
    }

    /// Sets the identifier for programs.
    #[must_use]
    pub fn with_code(mut self, code: &str) -> Self {
        self.detail.code = Some(code.to_owned());
        self
    }

    /// The HTTP status.
    pub fn status(&self) -> StatusCode {
        self.status
    }

    /// A message with the attempt, the failure and a remedy.
    pub fn message(&self) -> &str {
        &self.detail.message
    }

    /// The field that is wrong.
    pub fn param(&self) -> Option<&str> {
        self.detail.param.as_deref()
    }

    /// The prompt that exceeds the context; `None` for other errors, and where its tokens were not counted.
    pub fn exceeded(&self) -> Option<&ExceededContext> {
        self.exceeded.as_deref()
    }

    /// The identifier for programs, such as `model_not_found`.
    pub fn code(&self) -> Option<&str> {
        self.detail.code.as_deref()
    }

    /// The error as OpenAI's JSON, for streams whose head was sent.
    pub fn body(&self) -> ErrorBody {
        ErrorBody::of(self)
    }
}

impl ErrorBody {
    /// The body of `error`.
    pub fn of(error: &ApiError) -> Self {
        Self { error: error.detail.clone() }
    }
}

/// Cuts a message, which may quote a long request, to 2,000 bytes.
fn shortened(mut text: String) -> String {
    const MOST: usize = 2000;
    if text.len() > MOST {
        let end = (0..=MOST).rev().find(|&end| text.is_char_boundary(end));
        text.truncate(end.unwrap_or(0));
        text += "...";
    }
    text
}

impl From<SubmitError> for ApiError {
    fn from(error: SubmitError) -> Self {
        let message = error.to_string();
        match error {
            SubmitError::QueueFull { .. } => {
                Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", Some("queue_full"), message)
            }
            SubmitError::ShuttingDown => Self::unavailable("shutting_down", message),
            SubmitError::EngineFailed => Self::engine_failed(),
            SubmitError::PromptTooLong { n_prompt, n_ctx, n_ctx_train: _ } => {
                let error = Self::invalid(message).with_code("context_length_exceeded");
                Self { exceeded: Some(Box::new(ExceededContext { n_prompt, n_ctx })), ..error }
            }
            SubmitError::NoText | SubmitError::NoLogits => Self::unsupported_by_model(message),
            SubmitError::TooManySequences { .. } => Self::invalid(message).with_code("too_many_texts"),
            SubmitError::EmptyPrompt
            | SubmitError::TokenOutOfRange { .. }
            | SubmitError::Span(_)
            | SubmitError::Sampling(_) => Self::invalid(message),
        }
    }
}

impl From<RequestError> for ApiError {
    fn from(error: RequestError) -> Self {
        match error {
            RequestError::ShutDown => Self::unavailable("shutting_down", error.to_string()),
            RequestError::Constraint(_) => Self::invalid(error.to_string()).with_code("constraint_failed"),
            RequestError::NoNumbers => Self::internal(error.to_string()).with_code("model_gave_no_numbers"),
            RequestError::EngineFailed => Self::internal(error.to_string()).with_code("engine_failed"),
            RequestError::Forward(_) | RequestError::LogitsProcessor(_) | RequestError::Panicked(_) => {
                Self::internal(error.to_string())
            }
        }
    }
}

impl IntoResponse for ApiError {
    /// A response without a body. [`write_errors`](super::dialect::write_errors) writes it in the form of the path's
    /// interface.
    fn into_response(self) -> Response<Body> {
        let mut response = Response::new(Body::empty());
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        match self.status {
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => {
                headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
            }
            StatusCode::UNAUTHORIZED => {
                headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            }
            _ => {}
        }
        response.extensions_mut().insert(self);
        response
    }
}
