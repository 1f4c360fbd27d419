//! The models that requests can name.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockWriteGuard, TryLockError};
use std::time::{Duration, Instant};

use metal_attention::scheduler::Replicas;

use super::card::ModelCard;
use super::keep_alive::KeepAlive;
use super::lease::ModelLease;
use super::loaded::LoadedModel;
use super::names::{matches, without_latest};
use super::residency::{LoadUnit, ModelStatus, Residency, StartFailure};
use super::source::{ModelConfig, ModelDefaults, ModelStore, ModelsOptions, PullProgress, SourceError, StoredModel};
use crate::http::ApiError;
use crate::http::limits::MAX_MODEL_NAME;

/// How long models stay loaded where nothing is said about it.
const DEFAULT_KEEP_ALIVE: KeepAlive = KeepAlive::For(Duration::from_secs(300));

/// How long what was found in the store holds at least, and how many times as long as looking through it took.
const STORE_AGE: (Duration, u32) = (Duration::from_secs(1), 10);

/// Most models that clients make.
const MAX_MADE: usize = 256;

/// A model as requests name it.
pub struct ServedModel {
    /// The main one first. In the others `*` stands for any text.
    names: Vec<String>,
    /// What requests have where they do not say otherwise.
    pub defaults: ModelDefaults,
    /// What is loaded for it. Several entries may share it.
    unit: Arc<LoadUnit>,
    origin: ModelOrigin,
}

/// Where an entry comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ModelOrigin {
    /// The server was started with it.
    Configured,
    /// The store has it, in this version.
    Stored(u64),
    /// A client deleted it, and models that were made of it are left, so the store has it still, in this version. No
    /// request can name it.
    Deleted(u64),
    /// A client made it.
    Made,
}

impl ServedModel {
    /// The main name.
    pub fn main_name(&self) -> &str {
        self.names.first().map_or("", String::as_str)
    }

    /// Its names, the main one first. In the others `*` stands for any text.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Whether the model is called `name`.
    pub fn has_name(&self, name: &str) -> bool {
        self.main_name() == name || self.names.iter().skip(1).any(|pattern| matches(pattern, name))
    }

    fn can_be_named(&self) -> bool {
        match self.origin {
            ModelOrigin::Configured | ModelOrigin::Stored(_) | ModelOrigin::Made => true,
            ModelOrigin::Deleted(_) => false,
        }
    }

    /// What is known of the model without loading it. It may read the file: not to be called on a thread that serves
    /// others.
    pub fn card(&self) -> Result<Arc<ModelCard>, SourceError> {
        self.unit.source.card()
    }
}

/// The models of a server.
pub struct Models {
    entries: RwLock<Vec<Arc<ServedModel>>>,
    store: Option<Box<dyn ModelStore>>,
    /// When the store is to be looked through again; `None`: at once. Locked by what looks through it.
    next_refresh: Mutex<Option<Instant>>,
    /// The store was looked through once.
    has_refreshed: AtomicBool,
    keep_alive: KeepAlive,
    /// There is one model and never another: it answers by any name.
    is_only_model: bool,
    residency: Arc<Residency>,
}

impl Models {
    /// The models of `options`. Called within a runtime, which loads and unloads them.
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
            Arc::new(ServedModel { names, defaults, unit, origin: ModelOrigin::Configured })
        };
        let entries = RwLock::new(models.into_iter().map(entry).collect());
        let (next_refresh, has_refreshed) = (Mutex::default(), AtomicBool::new(false));
        Self { entries, store, next_refresh, has_refreshed, keep_alive: default, is_only_model, residency }
    }

    /// The models that requests can name.
    fn entries(&self) -> Vec<Arc<ServedModel>> {
        let entries = self.entries.read().unwrap_or_else(PoisonError::into_inner);
        entries.iter().filter(|entry| entry.can_be_named()).cloned().collect()
    }

    fn entries_mut(&self) -> RwLockWriteGuard<'_, Vec<Arc<ServedModel>>> {
        self.entries.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// All models, loaded or not. It may look through folders: not to be called on a thread that serves others.
    pub fn list(&self) -> Vec<Arc<ServedModel>> {
        self.refresh_from_store();
        self.entries()
    }

    /// Whether models come and go while the server runs: finding one then looks through folders.
    pub fn has_store(&self) -> bool {
        self.store.is_some()
    }

    /// Whether more than one model may be loaded. What clients make of the only one is loaded as that one.
    pub fn are_several(&self) -> bool {
        !self.is_only_model
    }

    /// Whether the models that the server starts with are loaded.
    pub fn has_started(&self) -> bool {
        self.residency.has_started()
    }

    /// What runs the requests to the only model, where there is no other and it is loaded.
    pub fn only_scheduler(&self) -> Option<Replicas> {
        if self.are_several() {
            return None;
        }
        self.residency.all_loaded().first().map(|(_, loaded)| loaded.scheduler.clone())
    }

    /// The models that are loaded, by their main names, with what runs their requests.
    pub fn schedulers(&self) -> Vec<(String, Replicas)> {
        let all = self.residency.all_loaded();
        all.into_iter().map(|(unit, loaded)| (unit.name.clone(), loaded.scheduler.clone())).collect()
    }

    /// Loads the models that the server starts with.
    pub async fn start(&self) -> Result<(), StartFailure> {
        self.residency.start().await
    }

    /// Unloads models whose time is over, as long as the server runs.
    pub async fn expire(self: Arc<Self>) {
        Arc::clone(&self.residency).expire().await;
    }

    /// Takes no more requests, and returns when those of all models are finished; those that are not after `grace` are
    /// cancelled.
    pub async fn shut_down(&self, grace: Duration) {
        self.residency.shut_down(grace).await;
    }

    /// What is the case with a model.
    pub fn status(&self, entry: &ServedModel) -> ModelStatus {
        self.residency.status(&entry.unit)
    }

    /// The model, where it is loaded now.
    pub fn loaded(&self, entry: &ServedModel) -> Option<Arc<LoadedModel>> {
        self.residency.loaded(&entry.unit)
    }

    /// The model that is called `name`, with or without the tag `latest`. It may look through folders.
    pub fn find(&self, name: &str) -> Result<Arc<ServedModel>, ApiError> {
        if name.len() > MAX_MODEL_NAME {
            let message = format!("model: the name is longer than the {MAX_MODEL_NAME} bytes that one may have");
            return Err(ApiError::field("model", message));
        }
        let known = |entries: &[Arc<ServedModel>]| {
            let exact = entries.iter().find(|entry| entry.main_name() == name);
            let plain = || entries.iter().find(|entry| entry.main_name() == without_latest(name));
            let alias = || entries.iter().find(|entry| entry.has_name(name) || entry.has_name(without_latest(name)));
            exact.or_else(plain).or_else(alias).cloned()
        };
        // Files may have come, changed or gone.
        self.refresh_from_store();
        known(&self.entries()).ok_or_else(|| self.unknown(name))
    }

    /// There is no model that is called `name`.
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

    /// The model that a request means. The only one answers by any name; without a name it is the first one that the
    /// server was started with. It may look through folders.
    pub fn resolve(&self, name: Option<&str>) -> Result<Arc<ServedModel>, ApiError> {
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

    /// The model of `entry` for a request that calls it `asked`: waits until it is loaded. `None`: it is removed.
    pub async fn lease(
        self: &Arc<Self>,
        entry: &Arc<ServedModel>,
        asked: Option<&str>,
    ) -> Result<Option<ModelLease>, ApiError> {
        let held = self.residency.hold(&entry.unit).await?;
        Ok(held.map(|held| ModelLease::new(Arc::clone(self), Arc::clone(entry), held, asked)))
    }

    /// The model stays loaded for this long after each request from now on. Of a model that is loaded and not in use, no time
    /// at all unloads it now.
    pub fn set_keep_alive(&self, entry: &ServedModel, keep_alive: KeepAlive) {
        self.residency.set_keep_alive(&entry.unit, keep_alive);
    }

    /// The model goes when the requests that use it are answered.
    pub fn unload(&self, entry: &ServedModel) {
        self.residency.retire(&entry.unit);
    }

    /// Makes the model `name`, which is that of `from` with other `defaults`. It is there until the server ends.
    pub fn make(&self, name: &str, from: &ServedModel, defaults: ModelDefaults) -> Result<(), ApiError> {
        let name = without_latest(name);
        if name.is_empty() || name.len() > MAX_MODEL_NAME || name.contains(['*', '\0']) {
            let message = format!("model: {name:?} is no name for a model: 1 to {MAX_MODEL_NAME} bytes without *");
            return Err(ApiError::field("model", message));
        }
        let (unit, origin) = (Arc::clone(&from.unit), ModelOrigin::Made);
        let entry = Arc::new(ServedModel { names: vec![name.to_owned()], defaults, unit, origin });
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

    /// Removes a model: one that a client made, or one of the store. Its files go with the last model that is made of
    /// them. It removes files: not to be called on a thread that serves others.
    pub fn delete(&self, entry: &Arc<ServedModel>) -> Result<(), ApiError> {
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

    /// Removes the name of a model where another one is left with the same files, or it has none of the store. `Some`: it is
    /// the last one, and this is the store's, whose files are to be deleted.
    fn delete_name(&self, entry: &Arc<ServedModel>) -> Option<Arc<ServedModel>> {
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
            // The store would list it again.
            ModelOrigin::Stored(version) => {
                let (names, defaults, unit) = (entry.names.clone(), entry.defaults.clone(), Arc::clone(&entry.unit));
                entries[at] = Arc::new(ServedModel { names, defaults, unit, origin: ModelOrigin::Deleted(version) });
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

    fn forget(&self, entries: &mut Vec<Arc<ServedModel>>, is_gone: impl Fn(&Arc<ServedModel>) -> bool) {
        let gone: Vec<_> = entries.extract_if(.., |entry| is_gone(entry)).collect();
        for entry in gone {
            if !entries.iter().any(|other| Arc::ptr_eq(&other.unit, &entry.unit)) {
                self.residency.remove(&entry.unit);
            }
        }
    }

    /// Downloads a model to the store; it stops where `report` gives false. It takes a while: not to be called on a thread that serves others.
    pub fn pull(&self, name: &str, report: &mut dyn FnMut(PullProgress) -> bool) -> Result<(), ApiError> {
        let Some(store) = &self.store else {
            let message = "this server keeps no models that can be pulled: start it with --models-dir";
            return Err(ApiError::invalid(message).with_code("no_model_store"));
        };
        store.pull(name, report).map_err(|error| ApiError::invalid(format!("{name:?} cannot be pulled: {error}")))?;
        // One that was deleted while another model was made of it can be named again.
        self.forget(&mut self.entries_mut(), |entry| {
            matches!(entry.origin, ModelOrigin::Deleted(_)) && entry.main_name() == name
        });
        let mut next_refresh = self.next_refresh.lock().unwrap_or_else(PoisonError::into_inner);
        *next_refresh = Some(self.sync_with_store(&**store));
        Ok(())
    }

    /// Takes notice of models that came, changed or went, unless that was done just now, or another thread is at it: what is
    /// known serves meanwhile, as folders on a network may be slow.
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

    /// Takes notice of models that came, changed or went. It gives when to do so again.
    fn sync_with_store(&self, store: &dyn ModelStore) -> Instant {
        let begun = Instant::now();
        let found = store.models();
        let (least, times) = STORE_AGE;
        let holds = begun.elapsed().saturating_mul(times).max(least);
        let is_there = |entry: &ServedModel, version: u64| {
            found.iter().any(|model| model.version == version && model.name == entry.main_name())
        };
        // Those that are told that their model is gone look for a new version of it when this is done.
        let mut entries = self.entries_mut();
        self.forget(&mut entries, |entry| match entry.origin {
            ModelOrigin::Stored(version) | ModelOrigin::Deleted(version) => !is_there(entry, version),
            ModelOrigin::Configured | ModelOrigin::Made => false,
        });
        for StoredModel { name, version, open } in found {
            if !entries.iter().any(|entry| entry.main_name() == name) {
                let unit = self.residency.add(&name, open(), false, self.keep_alive);
                let (defaults, origin) = (ModelDefaults::default(), ModelOrigin::Stored(version));
                entries.push(Arc::new(ServedModel { names: vec![name], defaults, unit, origin }));
            }
        }
        self.has_refreshed.store(true, Ordering::Release);
        Instant::now() + holds
    }
}
