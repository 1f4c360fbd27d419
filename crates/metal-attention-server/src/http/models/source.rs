//! The interfaces between the server and the program that configures it: where models come from, and how they are set
//! up.

use std::error::Error;
use std::sync::Arc;

use super::card::ModelCard;
use super::keep_alive::KeepAlive;
use super::loaded::LoadedModel;
use crate::http::job::sampling::SamplingFields;

/// The error of a source. The server repeats its text to clients.
pub type SourceError = Box<dyn Error + Send + Sync>;

/// Loads a model. Implemented by the program.
pub trait ModelSource: Send + Sync {
    /// The properties that are known without loading the model.
    fn card(&self) -> Result<Arc<ModelCard>, SourceError>;

    /// The possible placements: the model is loaded at the first one with enough free memory. Empty if they are
    /// unknown.
    fn placements(&self) -> Result<Vec<Placement>, SourceError>;

    /// Loads the model at one of its [`placements`](Self::placements), or an empty one if they are unknown. May be
    /// called again after the previous model was dropped.
    fn load(&self, placement: &Placement) -> Result<LoadedModel, SourceError>;

    /// The share of the present [`load`](Self::load) that is done, from 0 to 1; `None`: unknown. Called while it runs.
    fn load_progress(&self) -> Option<f64> {
        None
    }

    /// Ends the present [`load`](Self::load) early, with an error, where that is possible. Called while it runs, maybe several
    /// times; what the load returns afterwards is dropped.
    fn cancel_load(&self) {}
}

/// The memory that a loaded model occupies, with one entry for each device.
pub type Placement = Vec<MemoryNeed>;

/// The memory of one device that a model occupies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryNeed {
    /// The device, such as `cpu` or `cuda:0`.
    pub device: String,
    /// Bytes of weights and KV cache.
    pub bytes: u64,
    /// Bytes of the device that models may use; `None`: unknown.
    pub capacity: Option<u64>,
}

/// The defaults of a model for requests that do not set a value.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ModelDefaults {
    /// The system prompt of conversations without one.
    pub system: Option<String>,
    /// Sampling options, over those that the model's file recommends.
    pub sampling: SamplingFields,
    /// Stop strings in addition to the request's.
    pub stop: Vec<String>,
    /// Maximum generated tokens.
    pub max_tokens: Option<usize>,
    /// Whether conversations that exceed the context lose their oldest turns; `None`: as the server's options set it.
    pub context_shift: Option<bool>,
}

/// A model of the configuration.
pub struct ModelConfig {
    /// Its names, the main one first; at least one. In the others `*` stands for any text.
    pub names: Vec<String>,
    /// Loads it.
    pub source: Box<dyn ModelSource>,
    /// Whether it is loaded at the start of the server and never unloaded for another model.
    pub resident: bool,
    /// The time that it stays loaded after its last request; `None`: as the server's [`ModelsOptions`] set it.
    pub keep_alive: Option<KeepAlive>,
    /// Defaults for requests.
    pub defaults: ModelDefaults,
}

/// All models of a server.
#[derive(Default)]
pub struct ModelsOptions {
    /// The models of the configuration.
    pub models: Vec<ModelConfig>,
    /// Finds more models: files of a folder, and downloads.
    pub store: Option<Box<dyn ModelStore>>,
    /// The time that models which are not resident stay loaded after their last request; `None`: five minutes.
    pub keep_alive: Option<KeepAlive>,
    /// Maximum bytes of each device for all models; `None`: the device's capacity.
    pub memory: Option<u64>,
}

impl ModelsOptions {
    /// One model, which stays loaded.
    pub fn one(names: Vec<String>, source: impl ModelSource + 'static) -> Self {
        let source = Box::new(source);
        let config =
            ModelConfig { names, source, resident: true, keep_alive: None, defaults: ModelDefaults::default() };
        Self { models: vec![config], ..Self::default() }
    }
}

/// Models that appear and disappear while the server runs.
pub trait ModelStore: Send + Sync {
    /// The present models. Called often: must be fast.
    fn models(&self) -> Vec<StoredModel>;

    /// Downloads a model, which [`models`](Self::models) lists afterwards, and reports the progress. Stops when
    /// `report` returns false; the bytes that have arrived are kept.
    fn pull(&self, name: &str, report: &mut dyn FnMut(PullProgress) -> bool) -> Result<(), SourceError>;

    /// Deletes the files of the model that [`models`](Self::models) lists under this name, readable or not.
    fn delete(&self, name: &str) -> Result<(), SourceError>;
}

/// A model of a [`ModelStore`].
pub struct StoredModel {
    /// Its name.
    pub name: String,
    /// Changes whenever the model's files do.
    pub version: u64,
    /// Creates its source.
    pub open: Box<dyn FnOnce() -> Box<dyn ModelSource> + Send>,
}

/// The progress of a download.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PullProgress {
    /// The present activity, such as `pulling model.gguf`.
    pub status: String,
    /// Bytes of the file.
    pub total: u64,
    /// Bytes of it that have arrived.
    pub completed: u64,
}
