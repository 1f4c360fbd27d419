//! The models that requests can name.
//!
//! They come from the configuration, from a model store (a folder, checked for changes at each lookup), and from
//! clients, which derive models with other defaults from them. Several registered models may share one [`LoadUnit`], which
//! [`Residency`] loads and unloads.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockWriteGuard, TryLockError};
use std::time::{Duration, Instant};

use metal_attention::scheduler::Replicas;

use super::card::ModelCard;
use super::keep_alive::KeepAlive;
use super::lease::ModelLease;
use super::loaded::LoadedModel;
use super::names::{matches, without_latest};
use super::residency::{LoadUnit, ModelMemory, ModelStatus, Residency, StartFailure};
use super::source::{ModelConfig, ModelDefaults, ModelStore, ModelsOptions, PullProgress, SourceError, StoredModel};
use crate::http::ApiError;
use crate::http::limits::MAX_MODEL_NAME;
use crate::http::pictures::PictureMetrics;

/// The time that models stay loaded unless configured otherwise.
const DEFAULT_KEEP_ALIVE: KeepAlive = KeepAlive::For(Duration::from_secs(300));

/// The minimum time for which the store's list is valid, and the factor by which it is valid longer than reading it
/// took.
const STORE_AGE: (Duration, u32) = (Duration::from_secs(1), 10);

/// Maximum number of models that clients derive.
const MAX_MADE: usize = 256;

/// A model under the names that requests use.
pub struct RegisteredModel {
    /// The main name first. In the others `*` stands for any text.
    names: Vec<String>,
    /// Defaults for requests.
    pub defaults: ModelDefaults,
    /// The model that is loaded for it. Several registered models may share it.
    unit: Arc<LoadUnit>,
    /// Its origin, which decides whether it can be deleted.
    origin: ModelOrigin,
}

/// The origin of a registered model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ModelOrigin {
    /// The configuration, at the start of the server.
    Configured,
    /// The store, which lists this version of it.
    Stored(u64),
    /// The store, where a client has deleted it while models derived from it remain: its files, of this version, are
    /// still needed. No request can name it.
    Deleted(u64),
    /// A client derived it from another one.
    Made,
}

impl RegisteredModel {
    /// The main name.
    pub fn main_name(&self) -> &str {
        self.names.first().map_or("", String::as_str)
    }

    /// All names, the main one first. In the others `*` stands for any text.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Whether `name` is one of its names.
    pub fn has_name(&self, name: &str) -> bool {
        self.main_name() == name || self.names.iter().skip(1).any(|pattern| matches(pattern, name))
    }

    fn can_be_named(&self) -> bool {
        match self.origin {
            ModelOrigin::Configured | ModelOrigin::Stored(_) | ModelOrigin::Made => true,
            ModelOrigin::Deleted(_) => false,
        }
    }

    /// The properties that are known without loading it. May read the file: call it on a blocking thread.
    pub fn card(&self) -> Result<Arc<ModelCard>, SourceError> {
        self.unit.source.card()
    }
}

/// All models of a server.
pub struct Models {
    /// The registered models, in the order of their addition.
    entries: RwLock<Vec<Arc<RegisteredModel>>>,
    /// The model store; `None`: only the configuration has models.
    store: Option<Box<dyn ModelStore>>,
    /// When the store must be read again; `None`: at once. Locked while it is read.
    next_refresh: Mutex<Option<Instant>>,
    /// Whether the store was read at least once.
    has_refreshed: AtomicBool,
    /// The time that models of the store stay loaded.
    keep_alive: KeepAlive,
    /// There is one model and no store: any name means it.
    is_only_model: bool,
    /// Loads and unloads them.
    residency: Arc<Residency>,
}

impl Models {
    /// The models of `options`. Must be called within a tokio runtime, which loads and unloads them.
    pub fn new(options: ModelsOptions) -> Self {
        let ModelsOptions { models, store, keep_alive, memory } = options;
        let is_only_model = models.len() == 1 && models[0].resident && store.is_none();
        let residency = Residency::new(memory);
        let default = keep_alive.unwrap_or(DEFAULT_KEEP_ALIVE);
        let entry = |config: ModelConfig| {
            let ModelConfig { names, source, resident, keep_alive, defaults } = config;
            let keep_alive = keep_alive.unwrap_or(if resident { KeepAlive::Forever } else { default });
            let name = names.first().map_or("", String::as_str);
            let unit = residency.add(name, source, resident, keep_alive);
            Arc::new(RegisteredModel { names, defaults, unit, origin: ModelOrigin::Configured })
        };
        let entries = RwLock::new(models.into_iter().map(entry).collect());
        let (next_refresh, has_refreshed) = (Mutex::default(), AtomicBool::new(false));
        Self { entries, store, next_refresh, has_refreshed, keep_alive: default, is_only_model, residency }
    }

    /// The models that requests can name.
    fn entries(&self) -> Vec<Arc<RegisteredModel>> {
        let entries = self.entries.read().unwrap_or_else(PoisonError::into_inner);
        entries.iter().filter(|entry| entry.can_be_named()).cloned().collect()
    }

    fn entries_mut(&self) -> RwLockWriteGuard<'_, Vec<Arc<RegisteredModel>>> {
        self.entries.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// All models, loaded or not. May read folders: call it on a blocking thread.
    pub fn list(&self) -> Vec<Arc<RegisteredModel>> {
        self.refresh_from_store();
        self.entries()
    }

    /// Whether there is a model store: finding a model may then read folders.
    pub fn has_store(&self) -> bool {
        self.store.is_some()
    }

    /// Whether more than one model may be loaded. Models derived from the only one share its weights.
    pub fn are_several(&self) -> bool {
        !self.is_only_model
    }

    /// Whether the models of the start are loaded.
    pub fn has_started(&self) -> bool {
        self.residency.has_started()
    }

    /// The schedulers of the only model; `None` where there may be several, or it is not loaded.
    pub fn only_scheduler(&self) -> Option<Replicas> {
        if self.are_several() {
            return None;
        }
        self.residency.all_loaded().first().map(|(_, loaded)| loaded.scheduler.clone())
    }

    /// The schedulers of all loaded models, by their main names, and the work of their picture encoders.
    pub fn schedulers(&self) -> Vec<(String, Replicas, Option<PictureMetrics>)> {
        let all = self.residency.all_loaded().into_iter();
        all.map(|(unit, loaded)| (unit.name.clone(), loaded.scheduler.clone(), loaded.picture_metrics())).collect()
    }

    /// Loads the models of the start.
    pub async fn start(&self) -> Result<(), StartFailure> {
        self.residency.start().await
    }

    /// Unloads models whose time has expired. Runs as long as the server.
    pub async fn expire(self: Arc<Self>) {
        Arc::clone(&self.residency).expire().await;
    }

    /// Refuses new requests, waits for the running ones, and cancels those that remain after `grace`.
    pub async fn shut_down(&self, grace: Duration) {
        self.residency.shut_down(grace).await;
    }

    /// The residency status of a model.
    pub fn status(&self, entry: &RegisteredModel) -> ModelStatus {
        self.residency.status(&entry.unit)
    }

    /// The memory of the devices that models are on; `None`: no model is loaded, or the size of a device is unknown.
    pub fn memory(&self) -> Option<ModelMemory> {
        self.residency.memory()
    }

    /// The model if it is loaded now.
    pub fn loaded(&self, entry: &RegisteredModel) -> Option<Arc<LoadedModel>> {
        self.residency.loaded(&entry.unit)
    }

    /// Finds the model with this name, with or without the tag `latest`. May read folders.
    pub fn find(&self, name: &str) -> Result<Arc<RegisteredModel>, ApiError> {
        if name.len() > MAX_MODEL_NAME {
            let message = format!("model: the name is longer than the {MAX_MODEL_NAME} bytes that one may have");
            return Err(ApiError::field("model", message));
        }
        let known = |entries: &[Arc<RegisteredModel>]| {
            let exact = entries.iter().find(|entry| entry.main_name() == name);
            let plain = || entries.iter().find(|entry| entry.main_name() == without_latest(name));
            let alias = || entries.iter().find(|entry| entry.has_name(name) || entry.has_name(without_latest(name)));
            exact.or_else(plain).or_else(alias).cloned()
        };
        // Files may have been added, changed or removed.
        self.refresh_from_store();
        known(&self.entries()).ok_or_else(|| self.unknown(name))
    }

    /// The error that no model has this name.
    pub fn unknown(&self, name: &str) -> ApiError {
        const MOST: usize = 20;
        let entries = self.entries();
        let mut known: Vec<_> = entries.iter().take(MOST).map(|entry| format!("{:?}", entry.main_name())).collect();
        if entries.len() > MOST {
            known.push(format!("and {} more", entries.len() - MOST));
        }
        let known = if known.is_empty() { "none at all".to_owned() } else { format!("only {}", known.join(", ")) };
        let message = format!("there is no model {name:?} here, {known}");
        ApiError::not_found("model_not_found", message).with_param("model")
    }

    /// Finds the model that a request means. Where there is only one, any name means it; without a name it is the first
    /// one of the configuration. May read folders.
    pub fn resolve(&self, name: Option<&str>) -> Result<Arc<RegisteredModel>, ApiError> {
        let first = || {
            let entries = self.list();
            entries.iter().find(|entry| entry.origin == ModelOrigin::Configured).or(entries.first()).cloned()
        };
        match name.filter(|name| !name.is_empty()) {
            Some(name) => match self.find(name) {
                Err(error) if self.is_only_model && error.code() == Some("model_not_found") => first().ok_or(error),
                found => found,
            },
            None => first().ok_or_else(|| self.unknown("")),
        }
    }

    /// Leases the model for a request that names it `requested_name`, and waits until it is loaded. `None`: it was removed.
    pub async fn lease(
        self: &Arc<Self>,
        entry: &Arc<RegisteredModel>,
        requested_name: Option<&str>,
    ) -> Result<Option<ModelLease>, ApiError> {
        let held = self.residency.hold(&entry.unit).await?;
        Ok(held.map(|held| ModelLease::new(Arc::clone(self), Arc::clone(entry), held, requested_name)))
    }

    /// Sets how long the model stays loaded after each request. Zero unloads an unused model now.
    pub fn set_keep_alive(&self, entry: &RegisteredModel, keep_alive: KeepAlive) {
        self.residency.set_keep_alive(&entry.unit, keep_alive);
    }

    /// Unloads the model when the requests that use it, or wait for it, are answered. A load that no request waits for is
    /// cancelled.
    pub fn unload(&self, entry: &RegisteredModel) {
        self.residency.retire(&entry.unit);
    }

    /// Derives the model `name` from `from`, with other defaults. It exists until the server ends. Fails for an invalid
    /// name, the name of a model that is a file, and too many derived models.
    pub fn make(&self, name: &str, from: &RegisteredModel, defaults: ModelDefaults) -> Result<(), ApiError> {
        let name = without_latest(name);
        if name.is_empty() || name.len() > MAX_MODEL_NAME || name.contains(['*', '\0']) {
            let message = format!("model: {name:?} is no name for a model: 1 to {MAX_MODEL_NAME} bytes without *");
            return Err(ApiError::field("model", message));
        }
        let (unit, origin) = (Arc::clone(&from.unit), ModelOrigin::Made);
        let entry = Arc::new(RegisteredModel { names: vec![name.to_owned()], defaults, unit, origin });
        let mut entries = self.entries_mut();
        match entries.iter().position(|known| known.can_be_named() && known.main_name() == name) {
            Some(at) if entries[at].origin == ModelOrigin::Made => entries[at] = entry,
            Some(_) => {
                let message = format!("model: there is a model {name:?} already, which is a file: choose another name");
                return Err(ApiError::field("model", message));
            }
            None if entries.iter().filter(|entry| entry.origin == ModelOrigin::Made).count() >= MAX_MADE => {
                let message = format!("there are {MAX_MADE} models that clients made, which is the most: delete one");
                return Err(ApiError::invalid(message));
            }
            None => entries.push(entry),
        }
        Ok(())
    }

    /// Deletes a derived model, or one of the store. Files are deleted with the last model that shares them. Deletes
    /// files: call it on a blocking thread.
    pub fn delete(&self, entry: &Arc<RegisteredModel>) -> Result<(), ApiError> {
        let name = entry.main_name();
        if entry.origin == ModelOrigin::Configured {
            let message = format!("the server was started with the model {name:?}, which cannot be deleted");
            return Err(ApiError::invalid(message).with_code("model_is_configured"));
        }
        let (Some(stored), Some(store)) = (self.delete_name(entry), &self.store) else { return Ok(()) };
        self.residency.retire(&entry.unit);
        store
            .delete(stored.main_name())
            .map_err(|error| ApiError::internal(format!("the model {name:?} cannot be deleted: {error}")))?;
        self.forget(&mut self.entries_mut(), |known| Arc::ptr_eq(&known.unit, &entry.unit));
        Ok(())
    }

    /// Removes the name of a model where another one shares its files, or where it has none in the store. Returns the
    /// store's model where it is the last one: its files are to be deleted.
    fn delete_name(&self, entry: &Arc<RegisteredModel>) -> Option<Arc<RegisteredModel>> {
        let mut entries = self.entries_mut();
        let at = entries.iter().position(|known| Arc::ptr_eq(known, entry))?;
        let same = || entries.iter().filter(|known| Arc::ptr_eq(&known.unit, &entry.unit));
        let is_last = same().filter(|known| known.can_be_named()).count() == 1;
        let stored =
            same().find(|known| matches!(known.origin, ModelOrigin::Stored(_) | ModelOrigin::Deleted(_))).cloned();
        if is_last && stored.is_some() {
            return stored;
        }
        match entry.origin {
            // The entry remains, since the store would list it again.
            ModelOrigin::Stored(version) => {
                let (names, defaults, unit) = (entry.names.clone(), entry.defaults.clone(), Arc::clone(&entry.unit));
                entries[at] =
                    Arc::new(RegisteredModel { names, defaults, unit, origin: ModelOrigin::Deleted(version) });
            }
            ModelOrigin::Configured | ModelOrigin::Deleted(_) | ModelOrigin::Made => {
                entries.remove(at);
                if is_last {
                    self.residency.remove(&entry.unit);
                }
            }
        }
        None
    }

    fn forget(&self, entries: &mut Vec<Arc<RegisteredModel>>, is_gone: impl Fn(&Arc<RegisteredModel>) -> bool) {
        let gone: Vec<_> = entries.extract_if(.., |entry| is_gone(entry)).collect();
        for entry in gone {
            if !entries.iter().any(|other| Arc::ptr_eq(&other.unit, &entry.unit)) {
                self.residency.remove(&entry.unit);
            }
        }
    }

    /// Downloads a model to the store. Stops when `report` returns false. Takes long: call it on a blocking thread.
    pub fn pull(&self, name: &str, report: &mut dyn FnMut(PullProgress) -> bool) -> Result<(), ApiError> {
        let Some(store) = &self.store else {
            let message = "this server keeps no models that can be pulled: start it with --models-dir";
            return Err(ApiError::invalid(message).with_code("no_model_store"));
        };
        store.pull(name, report).map_err(|error| ApiError::invalid(format!("{name:?} cannot be pulled: {error}")))?;
        // A deleted model from which others are derived can be named again.
        self.forget(&mut self.entries_mut(), |entry| {
            matches!(entry.origin, ModelOrigin::Deleted(_)) && entry.main_name() == name
        });
        let mut next_refresh = self.next_refresh.lock().unwrap_or_else(PoisonError::into_inner);
        *next_refresh = Some(self.sync_with_store(&**store));
        Ok(())
    }

    /// Reads the store again, unless that was done recently or another thread is doing it: folders on a network may be
    /// slow.
    fn refresh_from_store(&self) {
        let Some(store) = &self.store else { return };
        let mut next_refresh = match self.next_refresh.try_lock() {
            Ok(next_refresh) => next_refresh,
            Err(TryLockError::WouldBlock) if self.has_refreshed.load(Ordering::Acquire) => return,
            Err(_) => self.next_refresh.lock().unwrap_or_else(PoisonError::into_inner),
        };
        if next_refresh.is_none_or(|when| when <= Instant::now()) {
            *next_refresh = Some(self.sync_with_store(&**store));
        }
    }

    /// Updates the entries from the store. Returns when to do so again.
    fn sync_with_store(&self, store: &dyn ModelStore) -> Instant {
        let begun = Instant::now();
        let found = store.models();
        let (least, times) = STORE_AGE;
        let holds = begun.elapsed().saturating_mul(times).max(least);
        let is_there = |entry: &RegisteredModel, version: u64| {
            found.iter().any(|model| model.version == version && model.name == entry.main_name())
        };
        // Requests whose model is removed here look up its new version afterwards.
        let mut entries = self.entries_mut();
        self.forget(&mut entries, |entry| match entry.origin {
            ModelOrigin::Stored(version) | ModelOrigin::Deleted(version) => !is_there(entry, version),
            ModelOrigin::Configured | ModelOrigin::Made => false,
        });
        for StoredModel { name, version, open } in found {
            if !entries.iter().any(|entry| entry.main_name() == name) {
                let unit = self.residency.add(&name, open(), false, self.keep_alive);
                let (defaults, origin) = (ModelDefaults::default(), ModelOrigin::Stored(version));
                entries.push(Arc::new(RegisteredModel { names: vec![name], defaults, unit, origin }));
            }
        }
        self.has_refreshed.store(true, Ordering::Release);
        Instant::now() + holds
    }
}
