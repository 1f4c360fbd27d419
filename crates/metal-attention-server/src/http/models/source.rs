//! Where models come from.

use std::error::Error;
use std::sync::Arc;

use super::card::ModelCard;
use super::keep_alive::KeepAlive;
use super::loaded::LoadedModel;
use crate::http::job::sampling::SamplingFields;

/// Why a source failed. The server repeats its text to clients.
pub type SourceError = Box<dyn Error + Send + Sync>;

/// Where a model comes from, and how it is set up.
pub trait ModelSource: Send + Sync {
    /// What is known of the model without loading it.
    fn card(&self) -> Result<Arc<ModelCard>, SourceError>;

    /// Where the model can be loaded: on the first of these with room. Empty where that is not known.
    fn placements(&self) -> Result<Vec<Placement>, SourceError>;

    /// Loads the model at one of its [`placements`](Self::placements); an empty one where they are not known. It may be called
    /// again after what it gave was dropped.
    fn load(&self, placement: &Placement) -> Result<LoadedModel, SourceError>;
}

/// The memory that a loaded model takes, of each device once.
pub type Placement = Vec<MemoryNeed>;

/// Memory of a device that a model takes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryNeed {
    /// The device, such as `cpu` or `cuda:0`.
    pub device: String,
    /// Bytes of weights and KV cache.
    pub bytes: u64,
    /// Bytes that the device has in all for models; `None` where it does not tell.
    pub capacity: Option<u64>,
}

/// What requests to a model have where they do not say otherwise.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ModelDefaults {
    /// The system prompt of conversations that have none.
    pub system: Option<String>,
    /// How tokens are chosen, over what the model's file recommends.
    pub sampling: SamplingFields,
    /// Strings that end a text, besides those of the request.
    pub stop: Vec<String>,
    /// Most tokens to generate.
    pub max_tokens: Option<usize>,
    /// Conversations that the context has no room for lose their oldest turns; `None`: as the server's options say.
    pub context_shift: Option<bool>,
}

/// A model that the server has.
pub struct ModelConfig {
    /// Its names, the main one first. `*` in another than the main one stands for any text. At least one.
    pub names: Vec<String>,
    /// Where it comes from.
    pub source: Box<dyn ModelSource>,
    /// It is loaded when the server starts, and is never unloaded for another.
    pub resident: bool,
    /// How long it stays loaded after a request; `None`: as the server's [`ModelsOptions`] say.
    pub keep_alive: Option<KeepAlive>,
    /// What requests have where they do not say otherwise.
    pub defaults: ModelDefaults,
}

/// All models of a server.
#[derive(Default)]
pub struct ModelsOptions {
    /// Those that are named.
    pub models: Vec<ModelConfig>,
    /// Finds more: the models of a folder, those that are pulled.
    pub store: Option<Box<dyn ModelStore>>,
    /// How long models that are not resident stay loaded after a request; `None`: five minutes.
    pub keep_alive: Option<KeepAlive>,
    /// Most bytes that all models take of a device; `None`: what the device has.
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

/// Models that come and go while the server runs.
pub trait ModelStore: Send + Sync {
    /// The models that there are now. It is called often, and has to be quick.
    fn models(&self) -> Vec<StoredModel>;

    /// Downloads a model, which [`models`](Self::models) lists from then on, and reports its progress. Where `report` gives
    /// false the download stops; what has arrived is kept.
    fn pull(&self, name: &str, report: &mut dyn FnMut(PullProgress) -> bool) -> Result<(), SourceError>;

    /// Removes the files of the model that [`models`](Self::models) lists by this name, readable or not.
    fn delete(&self, name: &str) -> Result<(), SourceError>;
}

/// A model of a [`ModelStore`].
pub struct StoredModel {
    /// Its name.
    pub name: String,
    /// Changes when the model's files do.
    pub version: u64,
    /// Makes its source.
    pub open: Box<dyn FnOnce() -> Box<dyn ModelSource> + Send>,
}

/// How far a download is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PullProgress {
    /// What is done, such as `pulling model.gguf`.
    pub status: String,
    /// Bytes of the file.
    pub total: u64,
    /// Those that are there.
    pub completed: u64,
}
