//! `/api/version`, and the text at `/` for clients of ollama.

use serde::Serialize;
use utoipa::ToSchema;

/// The version of ollama whose interface this is. Clients compare it with the minimum that they need.
const VERSION: &str = "0.12.11";

/// The text of ollama's page at `/`.
pub const RUNNING: &str = "Ollama is running";

/// A version.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[schema(as = OllamaVersion)]
pub struct Version {
    /// The version of ollama whose interface this is.
    version: &'static str,
}

/// Reports the version of ollama whose interface this is.
#[utoipa::path(get, path = "/api/version", tag = "ollama",
    responses((status = 200, description = "The release of ollama whose interface this is", body = Version)))]
pub async fn version() -> axum::Json<Version> {
    axum::Json(Version { version: VERSION })
}
