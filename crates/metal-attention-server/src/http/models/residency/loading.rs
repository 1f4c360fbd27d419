//! Loads models: reserves memory, runs the load on a thread, and sends the model to the requests that wait for it.

use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use super::{
    HeldModel, LoadFate, LoadUnit, Residency, ResidencyEntry, ResidencyPhase, ResidentModel, StartFailure, Waiter,
};
use crate::http::ApiError;
use crate::http::models::loaded::LoadedModel;
use crate::http::models::source::{Placement, SourceError};

/// The interval at which a load that waits for memory checks again, in addition to after each unload.
const MEMORY_POLL: Duration = Duration::from_secs(1);

/// The interval at which a load that may be cancelled is looked at.
pub(super) const CANCEL_POLL: Duration = Duration::from_millis(50);

impl Residency {
    /// Loads the models of the start, one after the other.
    pub async fn start(self: &Arc<Self>) -> Result<(), StartFailure> {
        loop {
            let next = self.entries().values().find_map(|entry| match &entry.phase {
                ResidencyPhase::Starting => Some(Arc::clone(&entry.unit)),
                ResidencyPhase::Unloaded
                | ResidencyPhase::Loading(_)
                | ResidencyPhase::Loaded(_)
                | ResidencyPhase::Unloading => None,
            });
            let Some(unit) = next else { return Ok(()) };
            // Its memory is reserved before other loads check for free memory. A source that fails here fails again
            // when it loads, as does a model without enough memory.
            let placements = placements_of(&unit).await.unwrap_or_default();
            let placement = self.reserve_anyway(&unit, &placements);
            let loaded = load_on_thread(&unit, placement).await?;
            self.finish_load(&unit, loaded, Duration::ZERO);
        }
    }

    /// Reserves memory for a model that is loaded even where it exceeds the capacity.
    fn reserve_anyway(&self, unit: &LoadUnit, placements: &[Placement]) -> Placement {
        let mut entries = self.entries();
        let best = self.best_placement(&entries, unit, placements).ok().flatten().map(|(placement, _)| placement);
        let placement = best.or(placements.first()).cloned().unwrap_or_default();
        if let Some(entry) = entries.get_mut(&unit.id) {
            entry.memory.clone_from(&placement);
        }
        placement
    }

    /// Starts to load the model.
    pub(super) fn begin_load(self: &Arc<Self>, entry: &mut ResidencyEntry) {
        entry.phase = ResidencyPhase::Loading(LoadFate::Stay);
        self.runtime.spawn(Arc::clone(self).load(Arc::clone(&entry.unit)));
    }

    /// Loads the model, and sends it, or the error, to the requests that wait for it.
    async fn load(self: Arc<Self>, unit: Arc<LoadUnit>) {
        let begun = Instant::now();
        match self.try_load(&unit).await {
            Ok(loaded) => {
                tracing::info!("loaded {} in {:.2} s", unit.name, begun.elapsed().as_secs_f64());
                self.finish_load(&unit, loaded, begun.elapsed());
            }
            Err(error) => self.fail_load(&unit, &error),
        }
    }

    /// Sends the error of a load to the requests that wait for it. After a cancelled load they wait for another one.
    fn fail_load(self: &Arc<Self>, unit: &LoadUnit, error: &ApiError) {
        let mut entries = self.entries();
        let Some(entry) = entries.get_mut(&unit.id) else { return };
        let was_cancelled = entry.is_cancelled();
        let failed = if was_cancelled { Vec::new() } else { std::mem::take(&mut entry.waiters) };
        if was_cancelled {
            tracing::info!("the load of {} was cancelled", unit.name);
        } else {
            tracing::warn!("{} was not loaded: {}", unit.name, error.message());
        }
        self.become_unloaded(&mut entries, unit);
        drop(entries);
        for waiter in failed {
            let _ = waiter.send(Err(error.clone()));
        }
        self.changed.notify_waiters();
    }

    /// Reserves memory for the model and loads it.
    async fn try_load(self: &Arc<Self>, unit: &Arc<LoadUnit>) -> Result<LoadedModel, ApiError> {
        let placements = placements_of(unit).await.map_err(|error| not_loaded(unit, &*error))?;
        let placement = self.reserve_memory(unit, &placements).await?;
        load_on_thread(unit, placement).await.map_err(|failure| match failure {
            StartFailure::Load(error) => not_loaded(unit, &*error),
            StartFailure::Thread(error) => not_loaded(unit, &error),
            StartFailure::Panicked => ApiError::internal(format!("loading the model {:?} met a defect", unit.name)),
        })
    }

    /// Marks the model as loaded, and sends it to the requests that wait for it.
    fn finish_load(self: &Arc<Self>, unit: &Arc<LoadUnit>, loaded: LoadedModel, took: Duration) {
        let mut entries = self.entries();
        let Some(entry) = entries.get_mut(&unit.id) else { return };
        let loaded = Arc::new(loaded);
        if entry.is_cancelled() {
            // Its work may have been cancelled as well.
            entry.phase = ResidencyPhase::Unloading;
            self.runtime.spawn(Arc::clone(self).unload(Arc::clone(unit), loaded));
            return;
        }
        let is_unwanted = entry.is_removed || matches!(entry.phase, ResidencyPhase::Loading(LoadFate::Unload));
        let waiters = std::mem::take(&mut entry.waiters);
        entry.phase = ResidencyPhase::Loaded(ResidentModel {
            loaded: Arc::clone(&loaded),
            n_held: waiters.len(),
            last_used: Instant::now(),
            keep_alive: unit.keep_alive,
            retiring: false,
        });
        if is_unwanted {
            self.retire_entry(entry);
        }
        drop(entries);
        for waiter in waiters {
            let (residency, unit, loaded) = (Arc::clone(self), Arc::clone(unit), Arc::clone(&loaded));
            // If the request has ended, this drops the use at once.
            drop(waiter.send(Ok(HeldModel { residency, unit, loaded, waited: Some(took) })));
        }
        self.changed.notify_waiters();
    }

    /// Reserves memory for the model, and waits until enough is freed. Returns its placement.
    async fn reserve_memory(
        self: &Arc<Self>,
        unit: &LoadUnit,
        placements: &[Placement],
    ) -> Result<Placement, ApiError> {
        let _guard = self.load_lock.lock().await;
        loop {
            let mut changed = pin!(self.changed.notified());
            changed.as_mut().enable();
            if let Some(placement) = self.try_reserve(unit, placements)? {
                return Ok(placement);
            }
            // Checks again, also after a timeout.
            let _ = tokio::time::timeout(MEMORY_POLL, changed).await;
        }
    }

    /// Reserves memory if enough is free, and returns the placement; else retires the models of the eviction plan.
    /// Fails, without retiring any, where no placement can have enough memory.
    fn try_reserve(self: &Arc<Self>, unit: &LoadUnit, placements: &[Placement]) -> Result<Option<Placement>, ApiError> {
        let mut entries = self.entries();
        if entries.get(&unit.id).is_some_and(ResidencyEntry::is_cancelled) {
            return Err(ApiError::internal("the load was cancelled"));
        }
        let Some((placement, plan)) = self.best_placement(&entries, unit, placements)? else {
            return Ok(Some(Placement::new()));
        };
        for id in plan.to_evict {
            if let Some(entry) = entries.get_mut(&id) {
                self.retire_entry(entry);
            }
        }
        if !plan.is_free {
            return Ok(None);
        }
        if let Some(entry) = entries.get_mut(&unit.id) {
            entry.memory.clone_from(placement);
        }
        Ok(Some(placement.clone()))
    }

    /// Cancels the load of a model that is to be unloaded, as soon as no request waits for it. Ends with the load.
    pub(super) async fn cancel_unwanted(self: Arc<Self>, unit: Arc<LoadUnit>) {
        loop {
            if let Some(entry) = self.entries().get_mut(&unit.id) {
                let ResidencyPhase::Loading(fate) = &mut entry.phase else { return };
                if *fate == LoadFate::Unload && entry.waiters.iter().all(Waiter::is_closed) {
                    *fate = LoadFate::Cancelled;
                }
                match fate {
                    // Another load of the same model.
                    LoadFate::Stay => return,
                    LoadFate::Unload => {}
                    // Again and again, since a load that has just begun may not be cancelled yet.
                    LoadFate::Cancelled => unit.source.cancel_load(),
                }
            } else {
                return;
            }
            self.changed.notify_waiters();
            tokio::time::sleep(CANCEL_POLL).await;
        }
    }
}

/// The possible placements of the model. May read its file.
async fn placements_of(unit: &Arc<LoadUnit>) -> Result<Vec<Placement>, SourceError> {
    let unit = Arc::clone(unit);
    tokio::task::spawn_blocking(move || unit.source.placements()).await.unwrap_or_else(|error| Err(error.into()))
}

/// Loads the model on a new thread.
async fn load_on_thread(unit: &Arc<LoadUnit>, placement: Placement) -> Result<LoadedModel, StartFailure> {
    let (sender, receiver) = oneshot::channel();
    let unit = Arc::clone(unit);
    let load = move || drop(sender.send(unit.source.load(&placement)));
    std::thread::Builder::new().name("load".into()).spawn(load).map_err(StartFailure::Thread)?;
    // A thread that panicked has logged why.
    receiver.await.map_err(|_| StartFailure::Panicked)?.map_err(StartFailure::Load)
}

fn not_loaded(unit: &LoadUnit, why: &dyn std::error::Error) -> ApiError {
    ApiError::internal(format!("the model {:?} cannot be loaded: {why}", unit.name)).with_code("model_not_loaded")
}
