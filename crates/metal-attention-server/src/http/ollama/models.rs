//! Endpoints that list and describe models: `/api/tags`, `/api/ps` and `/api/show`; and the lookup of the model that a
//! request names.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use axum::extract::State;
use axum::http::StatusCode;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::ErrorBody;
use super::stream::rfc3339;
use crate::http::body::{FromJson, Json, Object};
use crate::http::models::{Capabilities, KeepAlive, ModelCard, ModelDefaults, ModelLease, Models, RegisteredModel};
use crate::http::notes::Notes;
use crate::http::{ApiError, App, run_blocking};

/// The time until a model expires that is never unloaded, as ollama reports it.
const FOREVER: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// Returns the model's name of a request; an error if it is missing.
pub fn required(name: Option<String>) -> Result<String, ApiError> {
    name.filter(|name| !name.is_empty()).ok_or_else(|| ApiError::field("model", "model is required: name one"))
}

/// Finds the model with this name, with or without `:latest`.
pub async fn find(app: &App, name: &str) -> Result<Arc<RegisteredModel>, ApiError> {
    let name = name.to_owned();
    run_blocking(app, move |app| look_up(&app.models, &name)).await
}

fn look_up(models: &Models, name: &str) -> Result<Arc<RegisteredModel>, ApiError> {
    models.find(name).map_err(|error| not_found(name, error))
}

/// The error of an unknown model. Clients of ollama look for the words "not found".
fn not_found(name: &str, error: ApiError) -> ApiError {
    if error.status() != StatusCode::NOT_FOUND {
        return error;
    }
    ApiError::not_found("model_not_found", format!("model '{name}' not found: {}", error.message())).with_param("model")
}

/// Leases the model that a request names, and waits until it is loaded. Sets its `keep_alive`; where clients may not
/// change that, the field is noted as ignored.
pub async fn lease(
    app: &App,
    name: &str,
    keep_alive: Option<KeepAlive>,
    notes: &mut Notes,
) -> Result<ModelLease, ApiError> {
    let model = app.lease_with(Some(name), |models, name| look_up(models, name.unwrap_or_default())).await?;
    match keep_alive {
        Some(keep_alive) if app.may_manage => model.set_keep_alive(keep_alive),
        Some(_) => notes.ignored("keep_alive"),
        None => {}
    }
    Ok(model)
}

/// Handles a request without a prompt: unloads the model if `keep_alive` is zero, else loads it. Returns whether it is
/// loaded.
pub async fn load_or_unload(
    app: &App,
    name: &str,
    keep_alive: Option<KeepAlive>,
    notes: &mut Notes,
) -> Result<bool, ApiError> {
    if keep_alive == Some(KeepAlive::For(Duration::ZERO)) {
        let entry = find(app, name).await?;
        app.check_may_manage()?;
        app.models.unload(&entry);
        return Ok(false);
    }
    lease(app, name, keep_alive, notes).await?;
    Ok(true)
}

/// The models.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[schema(as = OllamaTags)]
pub struct Tags {
    /// The models that requests can name.
    models: Vec<Tag>,
}

/// A model.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[schema(as = OllamaTag)]
struct Tag {
    /// Its name.
    name: String,
    /// Its name.
    model: String,
    /// The time of the last change of its file.
    modified_at: String,
    /// Bytes of its files.
    size: u64,
    /// SHA-256 of its metadata and tensor table.
    digest: String,
    /// The kind of the model.
    details: Details,
}

/// The kind of a model.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[schema(as = OllamaDetails)]
struct Details {
    /// Always empty.
    parent_model: &'static str,
    /// `gguf`.
    format: &'static str,
    /// The architecture.
    family: String,
    /// The architecture, as a list.
    families: Vec<String>,
    /// The number of weights, such as `7.6B`.
    parameter_size: String,
    /// The tensor type of most weights.
    quantization_level: String,
}

impl Details {
    fn of(card: &ModelCard) -> Self {
        Self {
            parent_model: "",
            format: "gguf",
            family: card.architecture.clone(),
            families: vec![card.architecture.clone()],
            parameter_size: parameter_size(card.n_params),
            quantization_level: card.quantization.clone(),
        }
    }
}

/// Formats a number of weights, such as `7.6B`.
fn parameter_size(n: u64) -> String {
    const UNITS: [(f64, &str); 4] = [(1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")];
    let unit = UNITS.into_iter().find(|(size, _)| n as f64 >= *size);
    unit.map_or_else(|| n.to_string(), |(size, name)| format!("{:.1}{name}", n as f64 / size))
}

/// Returns a model's name with a tag.
fn tagged(name: &str) -> String {
    let has_tag = name.rsplit('/').next().is_some_and(|last| last.contains(':'));
    if has_tag { name.to_owned() } else { format!("{name}:latest") }
}

/// The time of the last change of the model's file, else of the server's start.
fn modified(app: &App, card: &ModelCard) -> String {
    let time = card.modified.unwrap_or(SystemTime::UNIX_EPOCH + Duration::from_secs(app.started));
    rfc3339(Timestamp::try_from(time).unwrap_or_default())
}

/// The models whose files can be read, with their properties. Logs the others.
fn known(
    models: impl IntoIterator<Item = Arc<RegisteredModel>>,
) -> impl Iterator<Item = (Arc<RegisteredModel>, Arc<ModelCard>)> {
    models.into_iter().filter_map(|entry| match entry.card() {
        Ok(card) => Some((entry, card)),
        Err(error) => {
            tracing::warn!("the model {:?} is not listed: {error}", entry.main_name());
            None
        }
    })
}

/// Lists the models that requests can name.
#[utoipa::path(get, path = "/api/tags", tag = "ollama",
    responses((status = 200, description = "The models", body = Tags)))]
pub async fn tags(State(app): State<App>) -> Result<axum::Json<Tags>, ApiError> {
    let list = run_blocking(&app, |app| {
        let tag = |(entry, card): (Arc<RegisteredModel>, Arc<ModelCard>)| Tag {
            name: tagged(entry.main_name()),
            model: tagged(entry.main_name()),
            modified_at: modified(app, &card),
            size: card.size,
            details: Details::of(&card),
            digest: card.digest.clone(),
        };
        Ok(Tags { models: known(app.models.list()).map(tag).collect() })
    });
    Ok(axum::Json(list.await?))
}

/// The models that are loaded.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[schema(as = OllamaProcesses)]
pub struct Processes {
    /// The loaded models.
    models: Vec<Process>,
}

/// A model that is loaded.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[schema(as = OllamaProcess)]
struct Process {
    /// Its name.
    name: String,
    /// Its name.
    model: String,
    /// Bytes of memory that are reserved for it.
    size: u64,
    /// SHA-256 of its metadata and tensor table.
    digest: String,
    /// The kind of the model.
    details: Details,
    /// The time at which it is unloaded without another request.
    expires_at: String,
    /// Bytes of them on other devices than the CPU.
    size_vram: u64,
    /// Maximum tokens of a sequence, its prompt included.
    context_length: usize,
}

/// Lists the models that are loaded.
#[utoipa::path(get, path = "/api/ps", tag = "ollama",
    responses((status = 200, description = "The models", body = Processes)))]
pub async fn ps(State(app): State<App>) -> Result<axum::Json<Processes>, ApiError> {
    let list = run_blocking(&app, |app| {
        let process = |(entry, card): (Arc<RegisteredModel>, Arc<ModelCard>)| {
            let loaded = app.models.loaded(&entry)?;
            let status = app.models.status(&entry);
            let bytes = |counts: fn(&str) -> bool| -> u64 {
                status.memory.iter().filter(|need| counts(&need.device)).map(|need| need.bytes).sum()
            };
            let set_aside = bytes(|_| true);
            Some(Process {
                name: tagged(entry.main_name()),
                model: tagged(entry.main_name()),
                // If the memory is unknown, the size of the files is a lower bound.
                size: if set_aside == 0 { card.size } else { set_aside },
                details: Details::of(&card),
                digest: card.digest.clone(),
                expires_at: rfc3339(
                    Timestamp::now().saturating_add(status.unloads_in.unwrap_or(FOREVER)).unwrap_or_default(),
                ),
                size_vram: bytes(|device| !device.starts_with("cpu")),
                context_length: loaded.n_ctx,
            })
        };
        // Files of models that are not loaded are not read.
        let loaded = app.models.list().into_iter().filter(|entry| app.models.loaded(entry).is_some());
        Ok(Processes { models: known(loaded).filter_map(process).collect() })
    });
    Ok(axum::Json(list.await?))
}

/// A request to describe a model.
#[derive(Debug, Clone, Deserialize, ToSchema)]
#[schema(as = OllamaShowRequest)]
pub struct ShowRequest {
    /// The model's name, with or without `:latest`.
    #[schema(min_length = 1, max_length = 256)]
    model: Option<String>,
    /// The model's name, as older clients send it.
    #[schema(min_length = 1, max_length = 256)]
    name: Option<String>,
}

impl FromJson for ShowRequest {
    fn from_json(object: &Object<'_>) -> Result<Self, ApiError> {
        object.parse()
    }
}

/// The description of a model.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[schema(as = OllamaShow)]
pub struct Show {
    /// The licence's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    license: Option<String>,
    /// A Modelfile of the model.
    modelfile: String,
    /// The defaults of its requests: a name and a value on each line.
    #[serde(skip_serializing_if = "String::is_empty")]
    #[schema(required = false)]
    parameters: String,
    /// The source of its chat template.
    template: String,
    /// The system prompt of conversations without one.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    system: Option<String>,
    /// The kind of the model.
    details: Details,
    /// The file's metadata; lists are null.
    #[schema(value_type = std::collections::BTreeMap<String, Value>)]
    model_info: Map<String, Value>,
    /// Its capabilities: `completion`, `tools`, `vision`, `thinking`, `insert`, `embedding`.
    capabilities: Vec<&'static str>,
    /// The time of the last change of its file.
    modified_at: String,
}

/// Describes one model.
#[utoipa::path(post, path = "/api/show", tag = "ollama", request_body = ShowRequest, responses(
    (status = 200, description = "The model", body = Show),
    (status = 404, description = "There is no such model", body = ErrorBody)))]
pub async fn show(State(app): State<App>, request: Json<ShowRequest>) -> Result<axum::Json<Show>, ApiError> {
    let name = required(request.model.clone().or_else(|| request.name.clone()))?;
    let entry = find(&app, &name).await?;
    let show = run_blocking(&app, move |app| {
        let card = entry.card().map_err(|error| {
            ApiError::internal(format!("the file of the model {:?} cannot be read: {error}", entry.main_name()))
        })?;
        Ok(Show::of(app, &entry, &card))
    });
    Ok(axum::Json(show.await?))
}

impl Show {
    /// The description of a model with the properties in `card`.
    fn of(app: &App, entry: &RegisteredModel, card: &ModelCard) -> Self {
        let parameters = parameters(&entry.defaults);
        let from = [format!("FROM {}", entry.main_name())];
        let lines = parameters.iter().map(|(name, value)| format!("PARAMETER {name} {value}"));
        let system = entry.defaults.system.iter().map(|system| format!("SYSTEM \"\"\"{system}\"\"\""));
        let modelfile: Vec<_> = from.into_iter().chain(lines).chain(system).collect();
        let parameters: Vec<_> = parameters.iter().map(|(name, value)| format!("{name:<30} {value}")).collect();
        let mut model_info = card.metadata.clone();
        model_info.insert("general.parameter_count".into(), card.n_params.into());
        Self {
            license: card.metadata.get("general.license").and_then(Value::as_str).map(str::to_owned),
            modelfile: modelfile.join(
                "
",
            ) + "
",
            parameters: parameters.join(
                "
",
            ),
            template: card.template.clone().unwrap_or_default(),
            system: entry.defaults.system.clone(),
            details: Details::of(card),
            model_info,
            capabilities: capabilities(card.capabilities),
            modified_at: modified(app, card),
        }
    }
}

/// The defaults of a model's requests, under ollama's names.
fn parameters(defaults: &ModelDefaults) -> Vec<(&'static str, String)> {
    let numbers = defaults.sampling.numbers().map(|(name, value)| (name, value.to_string()));
    let max_tokens = defaults.max_tokens.map(|n| ("num_predict", n.to_string()));
    let stop = defaults.stop.iter().map(|stop| ("stop", format!("{stop:?}")));
    numbers.chain(max_tokens).chain(stop).collect()
}

/// ollama's names of a model's capabilities.
fn capabilities(can: Capabilities) -> Vec<&'static str> {
    let Capabilities { completion, tools, thinking, vision, insert, embedding } = can;
    let all = [
        (completion, "completion"),
        (tools, "tools"),
        (vision, "vision"),
        (thinking, "thinking"),
        (insert, "insert"),
        (embedding, "embedding"),
    ];
    all.into_iter().filter_map(|(can, name)| can.then_some(name)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_formatted_in_thousands() {
        for (n, text) in [
            (999, "999"),
            (260_032, "260.0K"),
            (134_515_008, "134.5M"),
            (7_615_616_512, "7.6B"),
            (1_026_000_000_000, "1.0T"),
        ] {
            assert_eq!(parameter_size(n), text);
        }
    }

    #[test]
    fn names_have_tags() {
        for (name, expected) in [
            ("llama", "llama:latest"),
            ("llama:1b", "llama:1b"),
            ("a/b", "a/b:latest"),
            ("hf:a/b", "hf:a/b:latest"),
            ("hf.co/a/b:Q4_0", "hf.co/a/b:Q4_0"),
        ] {
            assert_eq!(tagged(name), expected);
        }
    }
}
