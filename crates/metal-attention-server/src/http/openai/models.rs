//! `/v1/models`: the models that requests can name.

use axum::extract::State;
use serde::Serialize;
use utoipa::ToSchema;

use crate::http::address::Path;
use crate::http::models::{ModelMemory, ModelPhase, RegisteredModel};
use crate::http::{ApiError, App, run_blocking};

/// A list of models.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct ModelList {
    /// `list`.
    object: &'static str,
    /// The models.
    data: Vec<ModelEntry>,
    /// The memory of the devices that models are on; left out while no model is loaded.
    #[serde(skip_serializing_if = "Option::is_none")]
    memory: Option<Memory>,
}

/// The memory of the devices that models are on.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[schema(as = ModelMemory)]
struct Memory {
    /// Bytes that models may use.
    total: u64,
    /// Bytes of them that no model has.
    free: u64,
}

/// Whether a model is loaded, as llama.cpp's router says it.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[schema(as = ModelStatus)]
struct Status {
    /// `unloaded`, `loading`, `loaded` or `unloading`.
    value: &'static str,
    /// The share that is loaded, from 0 to 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    progress: Option<f64>,
}

impl From<ModelPhase> for Status {
    fn from(phase: ModelPhase) -> Self {
        let (value, progress) = match phase {
            ModelPhase::Unloaded => ("unloaded", None),
            ModelPhase::Loading { progress } => ("loading", progress),
            ModelPhase::Loaded => ("loaded", None),
            ModelPhase::Unloading => ("unloading", None),
        };
        Self { value, progress }
    }
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
    /// Whether it is loaded.
    status: Status,
    /// More properties; null until the model is loaded.
    #[schema(required)]
    meta: Option<ModelMeta>,
}

/// The properties of a loaded model.
#[derive(Debug, Clone, Serialize, ToSchema)]
struct ModelMeta {
    /// Maximum tokens of a sequence, its prompt included.
    n_ctx: usize,
    /// The context length of the training.
    n_ctx_train: usize,
    /// Size of the vocabulary.
    n_vocab: usize,
    /// The width of the embeddings.
    n_embd: usize,
    /// The number of values in all tensors.
    n_params: usize,
    /// Bytes of all tensors.
    size: u64,
    /// Whether it sees pictures.
    vision: bool,
    /// llama.cpp's number of the kind of vocabulary: 1 SPM, 2 BPE, 3 `WordPiece`, 4 Unigram, 5 RWKV, 6 PLaMo-2, 0
    /// others.
    vocab_type: u8,
}

/// llama.cpp's number of the vocabulary kind `model`.
fn vocab_type(model: &str) -> u8 {
    let kinds = ["llama", "gpt2", "bert", "t5", "rwkv", "plamo2"];
    kinds.into_iter().zip(1..).find(|(kind, _)| *kind == model).map_or(0, |(_, number)| number)
}

/// The object of a model.
fn entry(app: &App, model: &RegisteredModel) -> ModelEntry {
    let meta = app.models.loaded(model).map(|model| ModelMeta {
        n_ctx: model.n_ctx,
        n_ctx_train: model.n_ctx_train(),
        n_vocab: model.n_vocab(),
        n_embd: model.n_embd(),
        n_params: model.n_params(),
        size: model.tensor_bytes(),
        vision: model.picture_service().is_ok(),
        vocab_type: vocab_type(model.tokenizer.model()),
    });
    let (id, status) = (model.main_name().to_owned(), app.models.status(model).phase.into());
    ModelEntry { id, object: "model", created: app.started, owned_by: "metal-attention", status, meta }
}

/// Lists the models that requests can name.
#[utoipa::path(get, path = "/v1/models", tag = "openai",
    responses((status = 200, description = "The models", body = ModelList)))]
pub async fn models(State(app): State<App>) -> Result<axum::Json<ModelList>, ApiError> {
    let data = run_blocking(&app, |app| {
        let all = app.models.list().into_iter();
        // An alias is listed as a model of its own; a pattern is not listed.
        let named = |name: &str, model: &RegisteredModel| ModelEntry { id: name.to_owned(), ..entry(app, model) };
        let names = all.flat_map(|model| {
            let names = model.names().iter().filter(|name| !name.contains('*'));
            names.map(|name| named(name, &model)).collect::<Vec<_>>()
        });
        Ok(names.collect())
    });
    let data = data.await?;
    let memory = app.models.memory().map(|ModelMemory { total, free }| Memory { total, free });
    Ok(axum::Json(ModelList { object: "list", data, memory }))
}

/// Describes one model.
#[utoipa::path(get, path = "/v1/models/{id}", tag = "openai",
    params(("id" = String, Path, description = "The model's name", min_length = 1)),
    responses((status = 200, description = "The model", body = ModelEntry)))]
pub async fn model(State(app): State<App>, Path(id): Path<String>) -> Result<axum::Json<ModelEntry>, ApiError> {
    let found = run_blocking(&app, move |app| {
        let model = app.models.find(&id)?;
        Ok(ModelEntry { id, ..entry(app, &model) })
    });
    Ok(axum::Json(found.await?))
}
