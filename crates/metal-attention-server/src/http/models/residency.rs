//! Which models are loaded, and which are unloaded for others.
//!
//! A model is loaded when a request needs it, once for all requests that wait for it. First its memory is reserved: of
//! the models on the same devices, the least recently used ones are evicted, idle ones first. An evicted ("retiring")
//! model accepts no more requests, and is unloaded when its running requests are answered; requests for it wait until
//! it is loaded again. All requests that wait for a model get it as soon as it is loaded, before it can be evicted:
//! none waits for ever. A model that a client unloads during its load is unloaded after those requests, and its load is
//! cancelled where there are none.
//!
//! A removed model is retired like that, and its entry is removed with it. Requests that wait for it fail with
//! "removed", and may find another one with its name.

mod eviction;
mod loading;

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use metal_attention::give_back_memory;
use tokio::runtime::Handle;
use tokio::sync::{Notify, oneshot};

use super::keep_alive::KeepAlive;
use super::loaded::LoadedModel;
use super::source::{MemoryNeed, ModelSource, Placement, SourceError};
use crate::http::ApiError;

/// A model that is loaded and unloaded as a whole.
pub struct LoadUnit {
    /// Its id, which is never reused.
    id: u64,
    /// The main name of the first registered model that uses it, for messages.
    pub name: String,
    /// Loads it.
    pub source: Box<dyn ModelSource>,
    /// Whether it is loaded at the start of the server and never evicted.
    resident: bool,
    /// The time that it stays loaded after its last request, unless a request sets another one.
    keep_alive: KeepAlive,
}

/// The residency status of a model.
#[derive(Debug, Clone, Default)]
pub struct ModelStatus {
    /// Its phase.
    pub phase: ModelPhase,
    /// The time until it is unloaded without another request; `None`: it stays, or is not loaded.
    pub unloads_in: Option<Duration>,
    /// The memory that is reserved for it.
    pub memory: Placement,
}

/// Whether a model is loaded.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub enum ModelPhase {
    /// It is not.
    #[default]
    Unloaded,
    /// It is being loaded, or waits for memory.
    Loading {
        /// The share that is done, from 0 to 1; `None`: unknown.
        progress: Option<f64>,
    },
    /// It is.
    Loaded,
    /// It is being unloaded.
    Unloading,
}

/// The memory of the devices that models are on, in bytes, and how much of it no model has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModelMemory {
    /// Bytes of these devices that models may use.
    pub total: u64,
    /// Those that are not reserved for a model.
    pub free: u64,
}

/// The use of a loaded model by a request. Dropping it ends the use.
pub struct HeldModel {
    /// The residency that counts this use.
    residency: Arc<Residency>,
    /// The load unit.
    unit: Arc<LoadUnit>,
    /// The model.
    pub loaded: Arc<LoadedModel>,
    /// The time that the request waited for it to load; `None`: it was loaded.
    pub waited: Option<Duration>,
}

impl Drop for HeldModel {
    fn drop(&mut self) {
        self.residency.release(&self.unit);
    }
}

/// A loaded model.
struct ResidentModel {
    /// The model.
    loaded: Arc<LoadedModel>,
    /// Requests that use it.
    n_held: usize,
    /// The time of the last begin or end of a use.
    last_used: Instant,
    /// The time that it stays loaded after its last request.
    keep_alive: KeepAlive,
    /// Whether it accepts no more requests and is unloaded when those that use it are answered.
    retiring: bool,
}

impl ResidentModel {
    /// When it is unloaded without another request; `None`: never, or requests use it.
    fn unloads_at(&self) -> Option<Instant> {
        match self.keep_alive {
            KeepAlive::For(time) if self.n_held == 0 => self.last_used.checked_add(time),
            KeepAlive::For(_) | KeepAlive::Forever => None,
        }
    }
}

/// The phase of a model.
enum ResidencyPhase {
    /// It is not loaded.
    Unloaded,
    /// It is loaded at the start of the server: requests are refused until it is loaded.
    Starting,
    /// It waits for memory, or is being loaded.
    Loading(LoadFate),
    /// It is loaded.
    Loaded(ResidentModel),
    /// It is being unloaded.
    Unloading,
}

/// What becomes of a model that is being loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LoadFate {
    /// It stays loaded.
    Stay,
    /// It is unloaded when the requests that wait for it are answered. As soon as none waits, the load is cancelled.
    Unload,
    /// The load is cancelled: its result is dropped. Requests that have arrived since wait for another load.
    Cancelled,
}

/// A request that waits for a model. Dropping it reports that the model was removed.
type Waiter = oneshot::Sender<Result<HeldModel, ApiError>>;

/// The outcome of a request for a model.
enum HoldOutcome {
    /// The model is loaded.
    Held(HeldModel),
    /// It is being loaded, and sent here afterwards.
    Wait(oneshot::Receiver<Result<HeldModel, ApiError>>),
    /// It was removed.
    Removed,
}

/// The state of one load unit.
struct ResidencyEntry {
    /// The load unit.
    unit: Arc<LoadUnit>,
    /// Its phase.
    phase: ResidencyPhase,
    /// Requests that wait for it to be loaded.
    waiters: Vec<Waiter>,
    /// The memory that is reserved for it.
    memory: Placement,
    /// Whether no registered model uses it any more: the entry is removed when it is unloaded.
    is_removed: bool,
}

impl ResidencyEntry {
    /// Whether its load is cancelled.
    fn is_cancelled(&self) -> bool {
        matches!(self.phase, ResidencyPhase::Loading(LoadFate::Cancelled))
    }

    /// Bytes of `device` that are reserved for it.
    fn bytes_on(&self, device: &str) -> u64 {
        self.memory.iter().filter(|need| need.device == device).map(|need| need.bytes).sum()
    }

    /// Whether its memory will be freed: it is retiring or being unloaded.
    fn is_unloading(&self) -> bool {
        match &self.phase {
            ResidencyPhase::Unloading => true,
            ResidencyPhase::Loaded(model) => model.retiring,
            ResidencyPhase::Unloaded | ResidencyPhase::Starting | ResidencyPhase::Loading(_) => false,
        }
    }
}

/// The reason why a model of the start was not loaded.
pub enum StartFailure {
    /// Its source failed.
    Load(SourceError),
    /// The system could not start a thread.
    Thread(std::io::Error),
    /// The load panicked.
    Panicked,
}

/// Loads and unloads models.
pub struct Residency {
    /// The load units by id.
    entries: Mutex<BTreeMap<u64, ResidencyEntry>>,
    /// The id of the next unit. Ids are not reused, since requests may still refer to a removed unit.
    next_id: AtomicU64,
    /// Notified when a model was loaded or unloaded, or a use ended.
    changed: Notify,
    /// Held by the load that reserves memory: one at a time.
    load_lock: tokio::sync::Mutex<()>,
    /// Maximum bytes of each device for all models; `None`: the device's capacity.
    memory: Option<u64>,
    /// Runs loads and unloads.
    runtime: Handle,
}

impl Residency {
    /// No models yet; all together may occupy `memory` bytes of each device. Must be called within a tokio runtime,
    /// which loads and unloads them.
    pub fn new(memory: Option<u64>) -> Arc<Self> {
        let (changed, load_lock) = (Notify::new(), tokio::sync::Mutex::new(()));
        let (entries, next_id) = (Mutex::default(), AtomicU64::new(0));
        Arc::new(Self { entries, next_id, changed, load_lock, memory, runtime: Handle::current() })
    }

    fn entries(&self) -> MutexGuard<'_, BTreeMap<u64, ResidencyEntry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a model, which can be loaded from now on.
    pub fn add(
        &self,
        name: &str,
        source: Box<dyn ModelSource>,
        resident: bool,
        keep_alive: KeepAlive,
    ) -> Arc<LoadUnit> {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let unit = Arc::new(LoadUnit { id, name: name.to_owned(), source, resident, keep_alive });
        let phase = if resident { ResidencyPhase::Starting } else { ResidencyPhase::Unloaded };
        let (waiters, memory) = (Vec::new(), Vec::new());
        self.entries()
            .insert(id, ResidencyEntry { unit: Arc::clone(&unit), phase, waiters, memory, is_removed: false });
        unit
    }

    /// Returns a use of the model, after it is loaded. `None`: the model was removed.
    pub async fn hold(self: &Arc<Self>, unit: &Arc<LoadUnit>) -> Result<Option<HeldModel>, ApiError> {
        match self.hold_loaded(unit)? {
            HoldOutcome::Held(held) => Ok(Some(held)),
            HoldOutcome::Wait(receiver) => receiver.await.ok().transpose(),
            HoldOutcome::Removed => Ok(None),
        }
    }

    /// Returns a use of the model if it is loaded; else a receiver of one. Starts the load if need be.
    fn hold_loaded(self: &Arc<Self>, unit: &Arc<LoadUnit>) -> Result<HoldOutcome, ApiError> {
        let mut entries = self.entries();
        let Some(entry) = entries.get_mut(&unit.id).filter(|entry| !entry.is_removed) else {
            return Ok(HoldOutcome::Removed);
        };
        if let ResidencyPhase::Loaded(model) = &mut entry.phase {
            model.retiring |= model.loaded.scheduler.defect().is_some();
            if !model.retiring {
                model.n_held += 1;
                model.last_used = Instant::now();
                let loaded = Arc::clone(&model.loaded);
                let (residency, unit) = (Arc::clone(self), Arc::clone(unit));
                return Ok(HoldOutcome::Held(HeldModel { residency, unit, loaded, waited: None }));
            }
        }
        let (sender, receiver) = oneshot::channel();
        match &entry.phase {
            ResidencyPhase::Starting => {
                return Err(ApiError::unavailable("loading", "the model is still loading: try again soon"));
            }
            ResidencyPhase::Unloaded => self.begin_load(entry),
            ResidencyPhase::Loaded(model) if model.n_held == 0 => self.begin_unload(entry),
            ResidencyPhase::Loaded(_) | ResidencyPhase::Loading(_) | ResidencyPhase::Unloading => {}
        }
        // Waiters whose request has ended would accumulate.
        entry.waiters.retain(|waiter| !waiter.is_closed());
        entry.waiters.push(sender);
        Ok(HoldOutcome::Wait(receiver))
    }

    /// Ends a use of the model. Unloads it if it is retiring or its time is zero.
    fn release(self: &Arc<Self>, unit: &LoadUnit) {
        let mut entries = self.entries();
        let Some(entry) = entries.get_mut(&unit.id) else { return };
        if let ResidencyPhase::Loaded(model) = &mut entry.phase {
            model.n_held -= 1;
            model.last_used = Instant::now();
            let is_over = model.retiring || model.keep_alive == KeepAlive::For(Duration::ZERO);
            if model.n_held == 0 && is_over {
                self.begin_unload(entry);
            }
        }
        drop(entries);
        self.changed.notify_waiters();
    }

    /// Sets how long the model stays loaded after its last request.
    pub fn set_keep_alive(&self, unit: &LoadUnit, keep_alive: KeepAlive) {
        if let Some(ResidencyEntry { phase: ResidencyPhase::Loaded(model), .. }) = self.entries().get_mut(&unit.id) {
            model.keep_alive = keep_alive;
        }
        self.changed.notify_waiters();
    }

    /// Unloads the model when the requests that use it, or wait for it, are answered. A load that no request waits for any more
    /// is cancelled.
    pub fn retire(self: &Arc<Self>, unit: &LoadUnit) {
        let mut entries = self.entries();
        let Some(entry) = entries.get_mut(&unit.id) else { return };
        self.retire_entry(entry);
        if let ResidencyPhase::Loading(fate @ LoadFate::Stay) = &mut entry.phase {
            *fate = LoadFate::Unload;
            self.runtime.spawn(Arc::clone(self).cancel_unwanted(Arc::clone(&entry.unit)));
        }
    }

    /// Retires the model of `entry`: it is unloaded when the requests that use it are answered.
    fn retire_entry(self: &Arc<Self>, entry: &mut ResidencyEntry) {
        if let ResidencyPhase::Loaded(model) = &mut entry.phase {
            model.retiring = true;
            if model.n_held == 0 {
                self.begin_unload(entry);
            }
        }
    }

    /// The status of the model.
    pub fn status(&self, unit: &LoadUnit) -> ModelStatus {
        let entries = self.entries();
        let Some(entry) = entries.get(&unit.id) else { return ModelStatus::default() };
        let (phase, unloads_in) = match &entry.phase {
            ResidencyPhase::Unloaded => (ModelPhase::Unloaded, None),
            ResidencyPhase::Starting | ResidencyPhase::Loading(_) => {
                (ModelPhase::Loading { progress: unit.source.load_progress() }, None)
            }
            ResidencyPhase::Loaded(model) => {
                let unloads_in = match model.keep_alive {
                    KeepAlive::Forever => None,
                    KeepAlive::For(time) if model.n_held > 0 => Some(time),
                    KeepAlive::For(time) => Some(time.saturating_sub(model.last_used.elapsed())),
                };
                (ModelPhase::Loaded, unloads_in)
            }
            ResidencyPhase::Unloading => (ModelPhase::Unloading, None),
        };
        ModelStatus { phase, unloads_in, memory: entry.memory.clone() }
    }

    /// Bytes that models may use of the device of `need`; `None`: unknown.
    fn capacity(&self, need: &MemoryNeed) -> Option<u64> {
        self.memory.into_iter().chain(need.capacity).min()
    }

    /// The memory of the devices that models are on; `None`: no model is loaded, or the size of a device is unknown.
    pub fn memory(&self) -> Option<ModelMemory> {
        let entries = self.entries();
        let mut devices: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
        for need in entries.values().flat_map(|entry| &entry.memory) {
            let capacity = self.capacity(need)?;
            let (total, used) = devices.entry(&need.device).or_default();
            *total = capacity.max(*total);
            *used += need.bytes;
        }
        let sum = |value: fn(&(u64, u64)) -> u64| devices.values().map(value).sum();
        let free = |(total, used): &(u64, u64)| total.saturating_sub(*used);
        (!devices.is_empty()).then(|| ModelMemory { total: sum(|(total, _)| *total), free: sum(free) })
    }

    /// The model if it is loaded now. It may be unloaded while the caller has it; its memory is then freed later.
    pub fn loaded(&self, unit: &LoadUnit) -> Option<Arc<LoadedModel>> {
        match &self.entries().get(&unit.id)?.phase {
            ResidencyPhase::Loaded(model) => Some(Arc::clone(&model.loaded)),
            ResidencyPhase::Unloaded
            | ResidencyPhase::Starting
            | ResidencyPhase::Loading(_)
            | ResidencyPhase::Unloading => None,
        }
    }

    /// All models that are loaded now.
    pub fn all_loaded(&self) -> Vec<(Arc<LoadUnit>, Arc<LoadedModel>)> {
        let entries = self.entries();
        let loaded = entries.values().filter_map(|entry| match &entry.phase {
            ResidencyPhase::Loaded(model) => Some((Arc::clone(&entry.unit), Arc::clone(&model.loaded))),
            ResidencyPhase::Unloaded
            | ResidencyPhase::Starting
            | ResidencyPhase::Loading(_)
            | ResidencyPhase::Unloading => None,
        });
        loaded.collect()
    }

    /// Whether the models of the start are loaded.
    pub fn has_started(&self) -> bool {
        !self.entries().values().any(|entry| matches!(entry.phase, ResidencyPhase::Starting))
    }

    /// Starts to unload the model, which no request uses any more.
    fn begin_unload(self: &Arc<Self>, entry: &mut ResidencyEntry) {
        let ResidencyPhase::Loaded(model) = std::mem::replace(&mut entry.phase, ResidencyPhase::Unloading) else {
            return;
        };
        self.runtime.spawn(Arc::clone(self).unload(Arc::clone(&entry.unit), model.loaded));
    }

    /// Unloads the model. Loads it again for requests that have arrived meanwhile.
    async fn unload(self: Arc<Self>, unit: Arc<LoadUnit>, loaded: Arc<LoadedModel>) {
        loaded.scheduler.shut_down(Duration::ZERO).await;
        // Freeing memory may block.
        let free = move || {
            drop(loaded);
            give_back_memory();
        };
        let _ = tokio::task::spawn_blocking(free).await;
        tracing::info!("unloaded {}", unit.name);
        self.become_unloaded(&mut self.entries(), &unit);
        self.changed.notify_waiters();
    }

    /// Marks the model as unloaded. Loads it again for requests that wait for it.
    fn become_unloaded(self: &Arc<Self>, entries: &mut BTreeMap<u64, ResidencyEntry>, unit: &LoadUnit) {
        let Some(entry) = entries.get_mut(&unit.id) else { return };
        entry.phase = ResidencyPhase::Unloaded;
        entry.memory.clear();
        entry.waiters.retain(|waiter| !waiter.is_closed());
        if entry.is_removed {
            entries.remove(&unit.id);
        } else if !entry.waiters.is_empty() {
            self.begin_load(entry);
        }
    }

    /// Unloads models whose time has expired. Runs as long as the server.
    pub async fn expire(self: Arc<Self>) {
        loop {
            let mut changed = pin!(self.changed.notified());
            changed.as_mut().enable();
            let mut next = None;
            for entry in self.entries().values_mut() {
                let ResidencyPhase::Loaded(model) = &entry.phase else { continue };
                match model.unloads_at() {
                    Some(at) if at <= Instant::now() => self.retire_entry(entry),
                    Some(at) => next = next.into_iter().chain([at]).min(),
                    None => {}
                }
            }
            match next {
                Some(at) => drop(tokio::time::timeout_at(at.into(), changed).await),
                None => changed.await,
            }
        }
    }

    /// Refuses new requests, waits for the running ones, and cancels those that remain after `grace`.
    pub async fn shut_down(&self, grace: Duration) {
        let loaded = self.all_loaded();
        join_all(loaded.iter().map(|(_, loaded)| loaded.scheduler.shut_down(grace))).await;
    }

    /// Removes a model that no registered model uses any more. It is unloaded when the requests that use it are answered;
    /// requests that wait for it to be loaded again fail with "removed".
    pub fn remove(self: &Arc<Self>, unit: &LoadUnit) {
        let mut entries = self.entries();
        let Some(entry) = entries.get_mut(&unit.id) else { return };
        entry.is_removed = true;
        match &entry.phase {
            ResidencyPhase::Unloaded => drop(entries.remove(&unit.id)),
            ResidencyPhase::Loaded(_) => {
                entry.waiters.clear();
                self.retire_entry(entry);
            }
            ResidencyPhase::Unloading => entry.waiters.clear(),
            // Requests that wait for this load still get the model.
            ResidencyPhase::Starting | ResidencyPhase::Loading(_) => {}
        }
    }
}

#[cfg(test)]
mod tests;
