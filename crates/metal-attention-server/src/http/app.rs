//! What all requests share.

use std::ops::Deref;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

use metal_attention::scheduler::Replicas;

use super::body::Bodies;
use super::connections::Connections;
use super::limits::MAX_MODEL_NAME;
use super::metrics::HttpMetrics;
use super::models::{Loaded, ModelLease};
use super::work::Work;
use super::{ApiError, HttpOptions};

/// What all requests share; clones are the same.
#[derive(Clone)]
pub struct App(Arc<Parts>);

/// The parts of an [`App`].
pub struct Parts {
    /// How the server is set up.
    pub options: HttpOptions,
    /// What was counted.
    pub metrics: HttpMetrics,
    /// Those that are open.
    pub connections: Arc<Connections>,
    /// The bodies of the requests that are read or worked on.
    pub bodies: Arc<Bodies>,
    /// Shares out the threads that may block.
    pub work: Work,
    /// When the server started, in seconds since 1970.
    pub started: u64,
    /// Set once the model is loaded.
    model: OnceLock<Arc<Loaded>>,
    leaving: AtomicBool,
    shutting_down: AtomicBool,
}

impl Deref for App {
    type Target = Parts;

    fn deref(&self) -> &Parts {
        &self.0
    }
}

impl App {
    /// A server whose model is yet to be loaded.
    pub fn new(options: HttpOptions) -> Self {
        let started = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        Self(Arc::new(Parts {
            connections: Arc::new(Connections::new(options.max_connections, options.connections_of_one())),
            bodies: Bodies::new(options.max_bodies, options.max_body),
            work: Work::default(),
            options,
            metrics: HttpMetrics::default(),
            started,
            model: OnceLock::new(),
            leaving: AtomicBool::new(false),
            shutting_down: AtomicBool::new(false),
        }))
    }
}

impl Parts {
    /// The model is loaded: requests can be answered from now on.
    pub fn set_model(&self, model: Loaded) {
        // A second model would be a defect of the caller; the first one stays.
        let _ = self.model.set(Arc::new(model));
    }

    /// From now on `/ready` says that the server ends.
    pub fn leave(&self) {
        self.leaving.store(true, Ordering::Release);
    }

    /// From now on requests are refused.
    pub fn shut_down(&self) {
        // In this order: whoever hears that it ends is refused, too.
        self.shutting_down.store(true, Ordering::Release);
        self.leave();
    }

    /// An error where requests had better go elsewhere.
    pub fn check_ready(&self) -> Result<(), ApiError> {
        self.model()?;
        if self.leaving.load(Ordering::Acquire) { Err(ApiError::shutting_down()) } else { Ok(()) }
    }

    /// The model, once it is loaded and until the server shuts down.
    fn model(&self) -> Result<&Arc<Loaded>, ApiError> {
        self.check_engine()?;
        if self.shutting_down.load(Ordering::Relaxed) {
            return Err(ApiError::shutting_down());
        }
        self.model.get().ok_or_else(|| ApiError::unavailable("loading", "the model is still loading: try again soon"))
    }

    /// An error where the engine, or each replica of it, met a defect: nothing can be answered any more.
    pub fn check_engine(&self) -> Result<(), ApiError> {
        match self.scheduler().and_then(Replicas::defect) {
            Some(_) => Err(ApiError::engine_failed()),
            None => Ok(()),
        }
    }

    /// The model for a request that calls it `name`, loaded.
    pub async fn lease(&self, name: Option<&str>) -> Result<ModelLease, ApiError> {
        if name.is_some_and(|name| name.len() > MAX_MODEL_NAME) {
            let message = format!("model: the name is longer than the {MAX_MODEL_NAME} bytes that one may have");
            return Err(ApiError::field("model", message));
        }
        Ok(ModelLease::new(Arc::clone(self.model()?), self.options.names.as_slice().into(), name))
    }

    /// The model, where it is loaded.
    pub fn loaded(&self) -> Option<&Loaded> {
        self.model().ok().map(|model| &**model)
    }

    /// What runs requests, as soon as there is something.
    pub fn scheduler(&self) -> Option<&Replicas> {
        self.model.get().map(|model| &model.scheduler)
    }

    /// The model's main name.
    pub fn model_name(&self) -> String {
        self.options.names.first().cloned().unwrap_or_default()
    }
}
