//! A model that a request uses.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use metal_attention::sampling::SamplerOptions;

use super::keep_alive::KeepAlive;
use super::loaded::LoadedModel;
use super::registry::{Models, RegisteredModel};
use super::residency::HeldModel;
use super::source::ModelDefaults;
use crate::http::ApiError;
use crate::http::notes::Notes;
use crate::http::request_line::RequestLine;

/// A model that a request uses. It stays loaded as long as this or a clone exists.
#[derive(Clone)]
pub struct ModelLease {
    /// The registry.
    models: Arc<Models>,
    /// The model's entry in the registry, under the name of the request.
    entry: Arc<RegisteredModel>,
    /// Keeps the model loaded.
    held: Arc<HeldModel>,
    /// The name in the request; empty if it names none.
    requested_name: Arc<str>,
}

impl Deref for ModelLease {
    type Target = LoadedModel;

    fn deref(&self) -> &LoadedModel {
        &self.held.loaded
    }
}

impl ModelLease {
    /// A lease of `entry`, which the request names `requested_name`. Logs the time that the request waited.
    pub(super) fn new(
        models: Arc<Models>,
        entry: Arc<RegisteredModel>,
        held: HeldModel,
        requested_name: Option<&str>,
    ) -> Self {
        if let (Some(waited), Some(line)) = (held.waited, RequestLine::current()) {
            line.waited_for_model(waited);
        }
        Self { models, entry, held: Arc::new(held), requested_name: requested_name.unwrap_or_default().into() }
    }

    /// The model's main name.
    pub fn main_name(&self) -> &str {
        self.entry.main_name()
    }

    /// The name in the response: the request's, else the main name. Notes the main name where the request's name is
    /// none of the model's.
    pub fn answer_name(&self, notes: &mut Notes) -> String {
        if self.requested_name.is_empty() {
            return self.main_name().to_owned();
        }
        if !self.entry.has_name(&self.requested_name) {
            notes.answered_by(self.main_name());
        }
        self.requested_name.as_ref().to_owned()
    }

    /// The model's defaults for requests.
    pub fn defaults(&self) -> &ModelDefaults {
        &self.entry.defaults
    }

    /// The default sampling options: the configuration's over those that the model's file recommends. Fails for a value
    /// outside its range.
    pub fn default_sampling(&self) -> Result<SamplerOptions, ApiError> {
        let mut sampling = self.sampling();
        self.defaults().sampling.apply(&mut sampling)?;
        Ok(sampling)
    }

    /// Sets how long the model stays loaded after its last request. Zero unloads it when the requests that use it are
    /// answered.
    pub fn set_keep_alive(&self, keep_alive: KeepAlive) {
        self.models.set_keep_alive(&self.entry, keep_alive);
    }

    /// The time that the request waited for the model to load; `None`: it was loaded.
    pub fn waited(&self) -> Option<Duration> {
        self.held.waited
    }
}
