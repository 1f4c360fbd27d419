//! What all requests share.

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use super::body::BodyBudget;
use super::connections::Connections;
use super::metrics::HttpMetrics;
use super::models::{ModelLease, Models, ModelsOptions, ServedModel};
use super::work::WorkLimiter;
use super::{ApiError, HttpOptions, run_blocking, within_timeout};

/// What all requests share; clones are the same.
#[derive(Clone)]
pub struct App(Arc<AppState>);

/// The parts of an [`App`].
pub struct AppState {
    /// How the server is set up.
    pub options: HttpOptions,
    /// What was counted.
    pub metrics: HttpMetrics,
    /// Those that are open.
    pub connections: Arc<Connections>,
    /// The bodies of the requests that are read or worked on.
    pub bodies: Arc<BodyBudget>,
    /// Shares out the threads that may block.
    pub work: WorkLimiter,
    /// Taken as long as there is a copy of a slot's text.
    pub slot_copy: Arc<tokio::sync::Mutex<()>>,
    /// When the server started, in seconds since 1970.
    pub started: u64,
    /// The models that requests can name.
    pub models: Arc<Models>,
    /// Clients may change which models there are, which are loaded, and what is on disk.
    pub may_manage: bool,
    leaving: AtomicBool,
    shutting_down: AtomicBool,
}

impl Deref for App {
    type Target = AppState;

    fn deref(&self) -> &AppState {
        &self.0
    }
}

impl App {
    /// A server whose models are yet to be loaded. Called within a runtime, which loads them. `on_loopback`: it listens on
    /// the loopback and nowhere else.
    pub fn new(options: HttpOptions, models: ModelsOptions, on_loopback: bool) -> Self {
        let started = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        Self(Arc::new(AppState {
            connections: Arc::new(Connections::new(options.max_connections, options.connections_of_one())),
            bodies: BodyBudget::new(options.max_bodies, options.max_body),
            work: WorkLimiter::default(),
            slot_copy: Arc::default(),
            may_manage: may_manage(&options, on_loopback),
            options,
            metrics: HttpMetrics::default(),
            started,
            models: Arc::new(Models::new(models)),
            leaving: AtomicBool::new(false),
            shutting_down: AtomicBool::new(false),
        }))
    }

    /// The model for a request that calls it `name`: waits until it is loaded. The only model answers by any name.
    pub async fn lease(&self, name: Option<&str>) -> Result<ModelLease, ApiError> {
        self.lease_with(name, Models::resolve).await
    }

    /// The model that `look_up` finds for a request that calls it `name`: waits until it is loaded.
    pub async fn lease_with(&self, name: Option<&str>, look_up: LookUp) -> Result<ModelLease, ApiError> {
        self.check_open()?;
        let lease = async {
            for _ in 0..LOOK_UPS {
                let entry = self.look_up(name, look_up).await?;
                if let Some(lease) = self.models.lease(&entry, name).await? {
                    return Ok(lease);
                }
            }
            Err(self.models.unknown(name.unwrap_or_default()))
        };
        within_timeout(self, lease).await
    }

    async fn look_up(&self, name: Option<&str>, look_up: LookUp) -> Result<Arc<ServedModel>, ApiError> {
        if !self.models.has_store() {
            return look_up(&self.models, name);
        }
        // It may look through folders.
        let name = name.map(str::to_owned);
        run_blocking(self, move |app| look_up(&app.models, name.as_deref())).await
    }
}

/// How often a model is looked up for a request: one that is removed before it is loaded may have been replaced.
const LOOK_UPS: usize = 2;

/// Finds the model of a request by the name that it has for it.
pub type LookUp = fn(&Models, Option<&str>) -> Result<Arc<ServedModel>, ApiError>;

impl AppState {
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
        self.check_open()?;
        if !self.models.has_started() {
            return Err(ApiError::unavailable("loading", "the model is still loading: try again soon"));
        }
        if self.leaving.load(Ordering::Acquire) { Err(ApiError::shutting_down()) } else { Ok(()) }
    }

    /// An error where the server takes no requests any more.
    fn check_open(&self) -> Result<(), ApiError> {
        self.check_engine()?;
        if self.shutting_down.load(Ordering::Relaxed) { Err(ApiError::shutting_down()) } else { Ok(()) }
    }

    /// An error where the engine of the only model, or each replica of it, met a defect: nothing can be answered any more.
    /// Where there are several models, one that met a defect is loaded again.
    pub fn check_engine(&self) -> Result<(), ApiError> {
        match self.models.only_scheduler().and_then(|scheduler| scheduler.defect()) {
            Some(_) => Err(ApiError::engine_failed()),
            None => Ok(()),
        }
    }

    /// Refuses a request that changes models where clients may not.
    pub fn check_may_manage(&self) -> Result<(), ApiError> {
        if self.may_manage { Ok(()) } else { Err(ApiError::may_not_manage()) }
    }
}

/// Whether clients may change models. Where pages of any origin may ask without a key, the loopback is open to strangers.
fn may_manage(options: &HttpOptions, on_loopback: bool) -> bool {
    let has_keys = !options.keys.is_empty();
    let any_page = options.cors_origin.as_ref().is_some_and(|origin| origin == "*");
    has_keys && (on_loopback || options.allow_manage) || on_loopback && !any_page
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::ApiKeys;

    #[test]
    fn models_are_changed_on_the_loopback_or_with_a_key() {
        let may = |on_loopback, allow_manage, key: &str, cors: Option<&'static str>| {
            let keys = ApiKeys::new(Some(key.to_owned()).filter(|key| !key.is_empty())).unwrap();
            let cors_origin = cors.map(axum::http::HeaderValue::from_static);
            may_manage(&HttpOptions { keys, allow_manage, cors_origin, ..Default::default() }, on_loopback)
        };
        assert!(may(true, false, "", None) && may(true, false, "k", None));
        assert!(may(true, false, "", Some("https://example.org")));
        assert!(!may(true, false, "", Some("*")) && may(true, false, "k", Some("*")));
        assert!(!may(false, false, "", None) && !may(false, false, "k", None) && !may(false, true, "", None));
        assert!(may(false, true, "k", None));
    }
}
