//! `/props`: the properties of the server and its model.

use std::sync::Arc;

use axum::extract::State;
use metal_attention::scheduler::Client;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::error::ErrorBody;
use super::settings::settings;
use crate::http::address::Query;
use crate::http::job::generation::GenerationSettings;
use crate::http::{ApiError, App};

/// The query of `/props` and `/slots`.
#[derive(Debug, Default, Deserialize)]
pub struct ModelQuery {
    /// The model's name; `None`: the default one.
    pub model: Option<String>,
    /// If not empty, `/slots` fails where no slot is free.
    pub fail_on_no_slot: Option<String>,
}

/// The properties of the server and its model.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[schema(as = LlamaCppProps)]
pub struct Props {
    /// The settings of generation that requests have by default.
    default_generation_settings: DefaultSettings,
    /// The number of slots.
    total_slots: usize,
    /// The model's main name.
    model_alias: String,
    /// The model's file; empty if it is built in.
    model_path: String,
    /// The model's chat template.
    chat_template: String,
    /// The capabilities of conversations.
    chat_template_caps: TemplateCaps,
    /// The inputs that the model reads in addition to text.
    modalities: Modalities,
    /// The text of the BOS token; empty if there is none.
    bos_token: String,
    /// The text of the end-of-text token; empty if there is none.
    eos_token: String,
    /// `metal-attention` and its version.
    build_info: String,
    /// `metal-attention`.
    engine: &'static str,
    /// The server's version.
    version: &'static str,
    /// False: a loaded model stays ready.
    is_sleeping: bool,
}

/// The settings of generation that requests have by default.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[schema(as = LlamaCppDefaultSettings)]
struct DefaultSettings {
    /// Maximum tokens of a sequence, its prompt included.
    n_ctx: usize,
    /// The settings in the form of `generation_settings` in responses.
    params: Map<String, Value>,
}

/// The capabilities of conversations. Always true: parts that the model's template does not support are described in
/// text.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[schema(as = LlamaCppTemplateCaps)]
#[expect(clippy::struct_excessive_bools, reason = "llama.cpp's own names")]
struct TemplateCaps {
    /// System messages.
    supports_system_role: bool,
    /// Tools.
    supports_tools: bool,
    /// Messages with tool calls.
    supports_tool_calls: bool,
    /// Messages with several tool calls.
    supports_parallel_tool_calls: bool,
}

/// The inputs that the model reads in addition to text.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[schema(as = LlamaCppModalities)]
struct Modalities {
    /// Images.
    vision: bool,
    /// Sound.
    audio: bool,
}

/// Reports the properties of the server and its model.
#[utoipa::path(get, path = "/props", tag = "llama.cpp", params(("model" = Option<String>, Query, description = "The model's name")),
    responses(
        (status = 200, description = "The properties", body = Props),
        (status = 400, description = "The query is wrong", body = ErrorBody),
        (status = 503, description = "The model is loading, or the server shuts down", body = ErrorBody)))]
pub async fn props(State(app): State<App>, Query(query): Query<ModelQuery>) -> Result<axum::Json<Props>, ApiError> {
    let model = app.lease(query.model.as_deref()).await?;
    let defaults = GenerationSettings::default();
    let stop = defaults.stop(&model, &[]);
    let defaults = defaults.request(&app, &model, Client::Unknown, &Arc::default(), &stop, 0)?;
    let text = |id: Option<u32>| id.and_then(|id| model.tokenizer.token_text(id)).unwrap_or_default().to_owned();
    let version = env!("CARGO_PKG_VERSION");
    Ok(axum::Json(Props {
        default_generation_settings: DefaultSettings { n_ctx: model.n_ctx, params: settings(&defaults) },
        total_slots: model.scheduler.n_slots(),
        model_alias: model.main_name().to_owned(),
        model_path: model.path().map(|path| path.display().to_string()).unwrap_or_default(),
        chat_template: model.template.source().to_owned(),
        chat_template_caps: TemplateCaps {
            supports_system_role: true,
            supports_tools: true,
            supports_tool_calls: true,
            supports_parallel_tool_calls: true,
        },
        modalities: Modalities { vision: model.picture_service().is_ok(), audio: false },
        bos_token: text(model.tokenizer.bos()),
        eos_token: text(model.tokenizer.eos()),
        build_info: format!("metal-attention {version}"),
        engine: "metal-attention",
        version,
        is_sleeping: false,
    }))
}
