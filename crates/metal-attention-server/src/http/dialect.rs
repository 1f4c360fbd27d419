//! The HTTP interface (dialect) of a path, and the form of its errors.

use axum::body::Body;
use axum::extract::Request;
use axum::http::Response;
use axum::middleware::Next;
use serde::Serialize;

use super::error::ErrorBody;
use super::{ApiError, anthropic, llama_cpp, ollama};

/// The HTTP interface of a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// OpenAI's, and that of all other paths: `/v1/chat/completions`, `/v1/responses`, ...
    OpenAi,
    /// Anthropic's: `/v1/messages` and the paths below.
    Anthropic,
    /// ollama's: `/api/...`.
    Ollama,
    /// llama.cpp's: `/completion`, `/infill`, `/props`, ...
    LlamaCpp,
}

impl Dialect {
    /// The interface of `path`.
    pub fn of_path(path: &str) -> Self {
        let is_below =
            |base: &str| path.strip_prefix(base).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
        if is_below("/v1/messages") {
            Self::Anthropic
        } else if is_below("/api") {
            Self::Ollama
        } else if llama_cpp::PATHS.iter().any(|base| is_below(base)) {
            Self::LlamaCpp
        } else {
            Self::OpenAi
        }
    }

    /// The JSON of an error.
    fn error_body(self, error: &ApiError) -> Vec<u8> {
        fn json(body: &impl Serialize) -> Vec<u8> {
            serde_json::to_vec(body).unwrap_or_default()
        }
        match self {
            Self::OpenAi => json(&ErrorBody::of(error)),
            Self::Anthropic => json(&anthropic::ErrorBody::of(error)),
            Self::Ollama => json(&ollama::ErrorBody::of(error)),
            Self::LlamaCpp => json(&llama_cpp::ErrorBody::of(error)),
        }
    }
}

/// Middleware: writes the body of an error response in the form of the path's interface. Handlers return [`ApiError`],
/// whose response has no body.
pub async fn write_errors(request: Request, next: Next) -> Response<Body> {
    let dialect = Dialect::of_path(request.uri().path());
    let mut response = next.run(request).await;
    if let Some(error) = response.extensions_mut().remove::<ApiError>() {
        *response.body_mut() = Body::from(dialect.error_body(&error));
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_have_dialects() {
        for (path, dialect) in [
            ("/v1/messages", Dialect::Anthropic),
            ("/v1/messages/count_tokens", Dialect::Anthropic),
            ("/v1/messagesx", Dialect::OpenAi),
            ("/api/chat", Dialect::Ollama),
            ("/apix", Dialect::OpenAi),
            ("/v1/responses", Dialect::OpenAi),
            ("/completion", Dialect::LlamaCpp),
            ("/completions", Dialect::LlamaCpp),
            ("/v1/completions", Dialect::OpenAi),
            ("/chat/completions", Dialect::OpenAi),
            ("/slots/0", Dialect::LlamaCpp),
            ("/", Dialect::OpenAi),
        ] {
            assert_eq!(Dialect::of_path(path), dialect, "{path}");
        }
    }
}
