//! `/health` and `/ready`, for load balancers and monitoring.

use axum::extract::State;
use serde::Serialize;
use utoipa::ToSchema;

use super::error::ErrorBody;
use super::{ApiError, App};

/// The state of the server.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Health {
    /// `ok`.
    status: &'static str,
}

/// Reports that the server runs, also before a model is loaded.
#[utoipa::path(get, path = "/health", tag = "operations", responses(
    (status = 200, description = "The server runs", body = Health),
    (status = 503, description = "The engine met a defect, and the server ends", body = ErrorBody)))]
pub async fn health(State(app): State<App>) -> Result<axum::Json<Health>, ApiError> {
    app.check_engine()?;
    Ok(axum::Json(Health { status: "ok" }))
}

/// Reports whether requests can be answered: the models of the start have evaluated a first token, and no shutdown has
/// begun.
#[utoipa::path(get, path = "/ready", tag = "operations", responses(
    (status = 200, description = "Requests can be answered", body = Health),
    (status = 503, description = "The model is loading, the server shuts down, or its engine met a defect",
        body = ErrorBody)))]
pub async fn ready(State(app): State<App>) -> Result<axum::Json<Health>, ApiError> {
    app.check_ready()?;
    Ok(axum::Json(Health { status: "ok" }))
}
