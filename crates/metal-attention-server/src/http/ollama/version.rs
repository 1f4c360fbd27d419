//! `/api/version`, and what is at `/` for clients of ollama.

use serde::Serialize;
use utoipa::ToSchema;

/// The release of ollama whose interface this is. Clients compare it with the least that they need.
const VERSION: &str = "0.12.11";

/// What ollama has at `/`.
pub const RUNNING: &str = "Ollama is running";

/// A version.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[schema(as = OllamaVersion)]
pub struct Version {
    /// The release of ollama whose interface this is.
    version: &'static str,
}

/// Tells which release of ollama has this interface.
#[utoipa::path(get, path = "/api/version", tag = "ollama",
    responses((status = 200, description = "The release of ollama whose interface this is", body = Version)))]
pub async fn version() -> axum::Json<Version> {
    axum::Json(Version { version: VERSION })
}
