//! `/v1/models`: what is served.

use axum::extract::{Path, State};
use serde::Serialize;
use utoipa::ToSchema;

use crate::http::{ApiError, App};

/// A list of models.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct ModelList {
    /// `list`.
    object: &'static str,
    /// The models.
    data: Vec<ModelEntry>,
}

/// A model.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct ModelEntry {
    /// Its name in requests.
    id: String,
    /// `model`.
    object: &'static str,
    /// When the server started, in seconds since 1970.
    created: u64,
    /// `metal-attention`.
    owned_by: &'static str,
    /// More, once the model is loaded.
    #[schema(required)]
    meta: Option<ModelMeta>,
}

/// What a model is like.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[expect(clippy::struct_field_names, reason = "the field's own names")]
struct ModelMeta {
    /// Tokens each text has room for, its prompt included.
    n_ctx: usize,
    /// Context length of the training.
    n_ctx_train: usize,
    /// Size of the vocabulary.
    n_vocab: usize,
    /// Length of the embeddings.
    n_embd: usize,
}

fn entry(app: &App, id: &str) -> ModelEntry {
    let meta = app.loaded().map(|model| ModelMeta {
        n_ctx: model.n_ctx,
        n_ctx_train: model.n_ctx_train(),
        n_vocab: model.n_vocab(),
        n_embd: model.n_embd(),
    });
    ModelEntry { id: id.to_owned(), object: "model", created: app.started, owned_by: "metal-attention", meta }
}

/// Lists the names of the model that is served.
#[utoipa::path(get, path = "/v1/models", tag = "openai",
    responses((status = 200, description = "The models", body = ModelList)))]
pub async fn models(State(app): State<App>) -> axum::Json<ModelList> {
    let data = app.options.names.iter().map(|name| entry(&app, name)).collect();
    axum::Json(ModelList { object: "list", data })
}

/// Tells of one model.
#[utoipa::path(get, path = "/v1/models/{id}", tag = "openai",
    params(("id" = String, Path, description = "The model's name", min_length = 1)),
    responses((status = 200, description = "The model", body = ModelEntry)))]
pub async fn model(State(app): State<App>, Path(id): Path<String>) -> Result<axum::Json<ModelEntry>, ApiError> {
    if app.options.names.contains(&id) {
        return Ok(axum::Json(entry(&app, &id)));
    }
    let message = format!("there is no model {id:?} here, only {:?}", app.options.names);
    Err(ApiError::not_found("model_not_found", message).with_param("model"))
}
