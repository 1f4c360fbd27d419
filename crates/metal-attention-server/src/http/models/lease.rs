//! A model in use by a request.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use metal_attention::sampling::SamplerOptions;

use super::keep_alive::KeepAlive;
use super::loaded::LoadedModel;
use super::registry::{Models, ServedModel};
use super::residency::HeldModel;
use super::source::ModelDefaults;
use crate::http::ApiError;
use crate::http::notes::Notes;
use crate::http::request_line::RequestLine;

/// A model in use by a request. It stays loaded as long as this or a clone of it lives.
#[derive(Clone)]
pub struct ModelLease {
    models: Arc<Models>,
    entry: Arc<ServedModel>,
    held: Arc<HeldModel>,
    /// The name that the request has for it; empty where it has none.
    asked: Arc<str>,
}

impl Deref for ModelLease {
    type Target = LoadedModel;

    fn deref(&self) -> &LoadedModel {
        &self.held.loaded
    }
}

impl ModelLease {
    pub(super) fn new(models: Arc<Models>, entry: Arc<ServedModel>, held: HeldModel, asked: Option<&str>) -> Self {
        if let (Some(waited), Some(line)) = (held.waited, RequestLine::current()) {
            line.waited_for_model(waited);
        }
        Self { models, entry, held: Arc::new(held), asked: asked.unwrap_or_default().into() }
    }

    /// The model's main name.
    pub fn main_name(&self) -> &str {
        self.entry.main_name()
    }

    /// The name that an answer has: the request's, else the model's own. `notes` say which model it is where the request
    /// has a name that is not the model's.
    pub fn answer_name(&self, notes: &mut Notes) -> String {
        if self.asked.is_empty() {
            return self.main_name().to_owned();
        }
        if !self.entry.has_name(&self.asked) {
            notes.answered_by(self.main_name());
        }
        self.asked.as_ref().to_owned()
    }

    /// What requests have where they do not say otherwise.
    pub fn defaults(&self) -> &ModelDefaults {
        &self.entry.defaults
    }

    /// How tokens are chosen where a request does not say otherwise: as the server's configuration says, else the model's
    /// file.
    pub fn default_sampling(&self) -> Result<SamplerOptions, ApiError> {
        let mut sampling = self.sampling();
        self.defaults().sampling.apply(&mut sampling)?;
        Ok(sampling)
    }

    /// From now on the model stays loaded this long after its last request. No time at all unloads it when the requests
    /// that use it are answered.
    pub fn set_keep_alive(&self, keep_alive: KeepAlive) {
        self.models.set_keep_alive(&self.entry, keep_alive);
    }

    /// How long the request waited for the model to load; `None`: it was loaded.
    pub fn waited(&self) -> Option<Duration> {
        self.held.waited
    }
}
