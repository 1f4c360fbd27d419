//! The state that all requests share: options, metrics, connections, models.

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use super::body::BodyBudget;
use super::connections::Connections;
use super::metrics::HttpMetrics;
use super::models::{ModelLease, Models, ModelsOptions, RegisteredModel};
use super::resumable::ResumableStreams;
use super::work::WorkLimiter;
use super::{ApiError, HttpOptions, pictures, run_blocking, within_timeout};

/// The shared state. A clone refers to the same state.
#[derive(Clone)]
pub struct App(Arc<AppState>);

/// The fields of an [`App`].
pub struct AppState {
    /// The options of the server.
    pub options: HttpOptions,
    /// Counters of requests and connections.
    pub metrics: HttpMetrics,
    /// The open connections.
    pub connections: Arc<Connections>,
    /// The memory that request bodies occupy.
    pub bodies: Arc<BodyBudget>,
    /// Limits the CPU work of requests on blocking threads.
    pub work: WorkLimiter,
    /// Limits the pictures that are decoded or wait for an encoder.
    pub pictures_at_once: Arc<tokio::sync::Semaphore>,
    /// Held while a copy of a slot's sequence is in memory: one at a time.
    pub slot_copy: Arc<tokio::sync::Mutex<()>>,
    /// The streams that their clients can resume.
    pub streams: ResumableStreams,
    /// The start of the server, in seconds since 1970.
    pub started: u64,
    /// The models that requests can name.
    pub models: Arc<Models>,
    /// Whether clients may add, load, unload and delete models and slots.
    pub may_manage: bool,
    /// The shutdown has begun: `/ready` fails, requests are still accepted.
    shutdown_announced: AtomicBool,
    /// New requests are refused.
    shutting_down: AtomicBool,
}

impl Deref for App {
    type Target = AppState;

    fn deref(&self) -> &AppState {
        &self.0
    }
}

impl App {
    /// The state of a server whose models are not loaded yet. Must be called within a tokio runtime, which loads them.
    /// `on_loopback`: the server listens on the loopback interface only.
    pub fn new(mut options: HttpOptions, models: ModelsOptions, on_loopback: bool) -> Self {
        // The largest body with pictures fits into the memory of all bodies.
        let max_pictures = &mut options.pictures.max_bytes;
        *max_pictures = (*max_pictures).min(options.max_bodies.saturating_sub(options.max_body));
        let largest_body = options.max_body.saturating_add(*max_pictures);
        let started = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        Self(Arc::new(AppState {
            connections: Arc::new(Connections::new(options.max_connections, options.connections_of_one())),
            bodies: BodyBudget::new(options.max_bodies, largest_body),
            work: WorkLimiter::default(),
            pictures_at_once: Arc::new(tokio::sync::Semaphore::new(pictures::ALL_AT_ONCE)),
            slot_copy: Arc::default(),
            streams: ResumableStreams::default(),
            may_manage: may_manage(&options, on_loopback),
            options,
            metrics: HttpMetrics::default(),
            started,
            models: Arc::new(Models::new(models)),
            shutdown_announced: AtomicBool::new(false),
            shutting_down: AtomicBool::new(false),
        }))
    }

    /// Leases the model that a request names, and waits until it is loaded. Where the server has only one model, any
    /// name means it.
    pub async fn lease(&self, name: Option<&str>) -> Result<ModelLease, ApiError> {
        self.lease_with(name, Models::resolve).await
    }

    /// Leases the model that `look_up` finds for `name`, and waits until it is loaded.
    ///
    /// Errors: no such model, a load that failed, a shutdown, or the request timeout.
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

    async fn look_up(&self, name: Option<&str>, look_up: LookUp) -> Result<Arc<RegisteredModel>, ApiError> {
        if !self.models.has_store() {
            return look_up(&self.models, name);
        }
        // Reading the model folder may block.
        let name = name.map(str::to_owned);
        run_blocking(self, move |app| look_up(&app.models, name.as_deref())).await
    }
}

/// Attempts to look up a model: a model that is removed while the request waits may have been replaced by a new
/// version.
const LOOK_UPS: usize = 2;

/// Finds a model by the name in a request; `None`: the request names none.
pub type LookUp = fn(&Models, Option<&str>) -> Result<Arc<RegisteredModel>, ApiError>;

impl AppState {
    /// Makes `/ready` report that the server shuts down. Requests are still accepted.
    pub fn announce_shutdown(&self) {
        self.shutdown_announced.store(true, Ordering::Release);
    }

    /// Refuses all new requests.
    pub fn shut_down(&self) {
        // In this order: a client that sees `/ready` fail is refused from then on.
        self.shutting_down.store(true, Ordering::Release);
        self.announce_shutdown();
    }

    /// Fails where a load balancer should send requests elsewhere: loading, shutting down, or a failed engine.
    pub fn check_ready(&self) -> Result<(), ApiError> {
        self.check_open()?;
        if !self.models.has_started() {
            return Err(ApiError::unavailable("loading", "the model is still loading: try again soon"));
        }
        if self.shutdown_announced.load(Ordering::Acquire) { Err(ApiError::shutting_down()) } else { Ok(()) }
    }

    /// Fails where the server accepts no more requests.
    fn check_open(&self) -> Result<(), ApiError> {
        self.check_engine()?;
        if self.shutting_down.load(Ordering::Relaxed) { Err(ApiError::shutting_down()) } else { Ok(()) }
    }

    /// Fails where the engine of the only model, or each of its replicas, has panicked: no request can be answered any
    /// more. Where there are several models, one whose engine panicked is loaded again instead.
    pub fn check_engine(&self) -> Result<(), ApiError> {
        match self.models.only_scheduler().and_then(|scheduler| scheduler.defect()) {
            Some(_) => Err(ApiError::engine_failed()),
            None => Ok(()),
        }
    }

    /// Refuses a request that changes models, unless clients may do that.
    pub fn check_may_manage(&self) -> Result<(), ApiError> {
        if self.may_manage { Ok(()) } else { Err(ApiError::may_not_manage()) }
    }
}

/// Whether clients may change models. With `--cors '*'` and without a key, any web page in a browser of this machine
/// could do it, even on the loopback.
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
