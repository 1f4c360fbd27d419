//! Which models are loaded, and which give way for others.
//!
//! A model that is not loaded is loaded for all requests that wait for it. First the memory is freed that it needs: of
//! the models on its devices those go that were used least recently, idle ones first. A model that is to go takes no
//! more requests, and goes when its answers are complete; requests that come meanwhile wait until it is loaded again.
//! All requests that waited for a model get it when it is loaded, before it can be made to go: none waits for ever.
//!
//! A model that is removed goes like that, and its slot with it. Requests that wait for it meanwhile are told, and may find
//! another one by its name.

use std::collections::{BTreeMap, BTreeSet};
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use metal_attention::give_back_memory;
use tokio::runtime::Handle;
use tokio::sync::{Notify, oneshot};

use super::keep_alive::KeepAlive;
use super::loaded::Loaded;
use super::source::{MemoryNeed, ModelSource, Placement, SourceError};
use crate::http::ApiError;

/// How often a load that waits for memory looks again, besides when a model goes.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// A model that is loaded as a whole.
pub struct Unit {
    id: u64,
    /// The main name of its first entry, for messages.
    pub name: String,
    /// Where it comes from.
    pub source: Box<dyn ModelSource>,
    /// It is loaded when the server starts, and never unloaded for another model.
    resident: bool,
    keep_alive: KeepAlive,
}

/// What is the case with a model.
#[derive(Debug, Clone, Default)]
pub struct Status {
    /// When it goes if no other request comes; `None`: it stays, or is not loaded.
    pub goes_in: Option<Duration>,
    /// The memory that is set aside for it.
    pub memory: Placement,
}

/// A model in use.
pub struct Held {
    residency: Arc<Residency>,
    unit: Arc<Unit>,
    /// The model.
    pub loaded: Arc<Loaded>,
    /// How long the request waited for it to load.
    pub waited: Option<Duration>,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.residency.release(&self.unit);
    }
}

/// A model that is loaded.
struct Running {
    loaded: Arc<Loaded>,
    /// Requests that use it.
    n_held: usize,
    last_used: Instant,
    keep_alive: KeepAlive,
    /// It takes no more requests, and goes when those that it has are answered.
    retiring: bool,
}

impl Running {
    /// When it goes if no request comes; `None`: never, or requests use it.
    fn goes_at(&self) -> Option<Instant> {
        match self.keep_alive {
            KeepAlive::For(time) if self.n_held == 0 => self.last_used.checked_add(time),
            KeepAlive::For(_) | KeepAlive::Forever => None,
        }
    }
}

/// The phases of a model.
enum Phase {
    /// It is not loaded.
    Unloaded,
    /// The server starts with it: requests are refused until it is loaded.
    Starting,
    /// It waits for memory, or is being loaded.
    Loading,
    /// It is loaded.
    Loaded(Running),
    /// It is being unloaded.
    Unloading,
}

/// A request that waits for a model. Where the model is removed it is dropped.
type Waiter = oneshot::Sender<Result<Held, ApiError>>;

/// What a request for a model comes to.
enum Hold {
    /// The model is loaded.
    Held(Held),
    /// It is to be loaded.
    Wait(oneshot::Receiver<Result<Held, ApiError>>),
    /// There is no such model any more.
    Removed,
}

/// What is known of a unit.
struct Slot {
    unit: Arc<Unit>,
    phase: Phase,
    waiters: Vec<Waiter>,
    /// The memory that is set aside for it.
    memory: Placement,
    /// No entry has it any more: the slot goes when it is unloaded.
    is_removed: bool,
}

impl Slot {
    fn bytes_on(&self, device: &str) -> u64 {
        self.memory.iter().filter(|need| need.device == device).map(|need| need.bytes).sum()
    }

    fn is_going(&self) -> bool {
        match &self.phase {
            Phase::Unloading => true,
            Phase::Loaded(running) => running.retiring,
            Phase::Unloaded | Phase::Starting | Phase::Loading => false,
        }
    }
}

/// Why a model that the server starts with was not loaded.
pub enum StartFailure {
    /// Its source failed.
    Load(SourceError),
    /// The system gave no thread.
    Thread(std::io::Error),
    /// Loading it panicked.
    Panicked,
}

/// Loads and unloads models.
pub struct Residency {
    slots: Mutex<BTreeMap<u64, Slot>>,
    /// The id of the next unit: none is used twice, as requests may still have a unit that was removed.
    next_id: AtomicU64,
    /// Something changed: a model was loaded, went, or is not used any more.
    changed: Notify,
    /// One load at a time makes room.
    turn: tokio::sync::Mutex<()>,
    /// Most bytes of a device that all models take.
    memory: Option<u64>,
    runtime: Handle,
}

impl Residency {
    /// Models that take at most `memory` bytes of each device. Called within a runtime, which loads and unloads them.
    pub fn new(memory: Option<u64>) -> Arc<Self> {
        let (changed, turn) = (Notify::new(), tokio::sync::Mutex::new(()));
        let (slots, next_id) = (Mutex::default(), AtomicU64::new(0));
        Arc::new(Self { slots, next_id, changed, turn, memory, runtime: Handle::current() })
    }

    fn slots(&self) -> MutexGuard<'_, BTreeMap<u64, Slot>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A model that can be loaded from now on.
    pub fn add(&self, name: &str, source: Box<dyn ModelSource>, resident: bool, keep_alive: KeepAlive) -> Arc<Unit> {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let unit = Arc::new(Unit { id, name: name.to_owned(), source, resident, keep_alive });
        let phase = if resident { Phase::Starting } else { Phase::Unloaded };
        let (waiters, memory) = (Vec::new(), Vec::new());
        self.slots().insert(id, Slot { unit: Arc::clone(&unit), phase, waiters, memory, is_removed: false });
        unit
    }

    /// The model in use; waits until it is loaded. `None`: it is removed.
    pub async fn hold(self: &Arc<Self>, unit: &Arc<Unit>) -> Result<Option<Held>, ApiError> {
        match self.hold_loaded(unit)? {
            Hold::Held(held) => Ok(Some(held)),
            Hold::Wait(receiver) => receiver.await.ok().transpose(),
            Hold::Removed => Ok(None),
        }
    }

    /// The model in use where it is loaded, else a wait for it.
    fn hold_loaded(self: &Arc<Self>, unit: &Arc<Unit>) -> Result<Hold, ApiError> {
        let mut slots = self.slots();
        let Some(slot) = slots.get_mut(&unit.id).filter(|slot| !slot.is_removed) else { return Ok(Hold::Removed) };
        if let Phase::Loaded(running) = &mut slot.phase {
            running.retiring |= running.loaded.scheduler.defect().is_some();
            if !running.retiring {
                running.n_held += 1;
                running.last_used = Instant::now();
                let loaded = Arc::clone(&running.loaded);
                let (residency, unit) = (Arc::clone(self), Arc::clone(unit));
                return Ok(Hold::Held(Held { residency, unit, loaded, waited: None }));
            }
        }
        let (sender, receiver) = oneshot::channel();
        match &slot.phase {
            Phase::Starting => {
                return Err(ApiError::unavailable("loading", "the model is still loading: try again soon"));
            }
            Phase::Unloaded => self.begin_load(slot),
            Phase::Loaded(running) if running.n_held == 0 => self.begin_unload(slot),
            Phase::Loaded(_) | Phase::Loading | Phase::Unloading => {}
        }
        // Those that went away while the model is not loaded would pile up.
        slot.waiters.retain(|waiter| !waiter.is_closed());
        slot.waiters.push(sender);
        Ok(Hold::Wait(receiver))
    }

    /// A request does not use the model any more.
    fn release(self: &Arc<Self>, unit: &Unit) {
        let mut slots = self.slots();
        let Some(slot) = slots.get_mut(&unit.id) else { return };
        if let Phase::Loaded(running) = &mut slot.phase {
            running.n_held -= 1;
            running.last_used = Instant::now();
            let is_over = running.retiring || running.keep_alive == KeepAlive::For(Duration::ZERO);
            if running.n_held == 0 && is_over {
                self.begin_unload(slot);
            }
        }
        drop(slots);
        self.changed.notify_waiters();
    }

    /// The model stays loaded for this long after a request from now on.
    pub fn set_keep_alive(&self, unit: &Unit, keep_alive: KeepAlive) {
        if let Some(Slot { phase: Phase::Loaded(running), .. }) = self.slots().get_mut(&unit.id) {
            running.keep_alive = keep_alive;
        }
        self.changed.notify_waiters();
    }

    /// The model goes when the requests that use it are answered.
    pub fn retire(self: &Arc<Self>, unit: &Unit) {
        if let Some(slot) = self.slots().get_mut(&unit.id) {
            self.retire_slot(slot);
        }
    }

    fn retire_slot(self: &Arc<Self>, slot: &mut Slot) {
        if let Phase::Loaded(running) = &mut slot.phase {
            running.retiring = true;
            if running.n_held == 0 {
                self.begin_unload(slot);
            }
        }
    }

    /// What is the case with the model.
    pub fn status(&self, unit: &Unit) -> Status {
        let slots = self.slots();
        let Some(slot) = slots.get(&unit.id) else { return Status::default() };
        let goes_in = match &slot.phase {
            Phase::Unloaded | Phase::Starting | Phase::Loading | Phase::Unloading => None,
            Phase::Loaded(running) => match running.keep_alive {
                KeepAlive::Forever => None,
                KeepAlive::For(time) if running.n_held > 0 => Some(time),
                KeepAlive::For(time) => Some(time.saturating_sub(running.last_used.elapsed())),
            },
        };
        Status { goes_in, memory: slot.memory.clone() }
    }

    /// The model, where it is loaded now. It may go while this is held; its memory is then freed later.
    pub fn loaded(&self, unit: &Unit) -> Option<Arc<Loaded>> {
        match &self.slots().get(&unit.id)?.phase {
            Phase::Loaded(running) => Some(Arc::clone(&running.loaded)),
            Phase::Unloaded | Phase::Starting | Phase::Loading | Phase::Unloading => None,
        }
    }

    /// All models that are loaded now.
    pub fn all_loaded(&self) -> Vec<(Arc<Unit>, Arc<Loaded>)> {
        let slots = self.slots();
        let loaded = slots.values().filter_map(|slot| match &slot.phase {
            Phase::Loaded(running) => Some((Arc::clone(&slot.unit), Arc::clone(&running.loaded))),
            Phase::Unloaded | Phase::Starting | Phase::Loading | Phase::Unloading => None,
        });
        loaded.collect()
    }

    /// Whether the models that the server starts with are loaded.
    pub fn has_started(&self) -> bool {
        !self.slots().values().any(|slot| matches!(slot.phase, Phase::Starting))
    }

    /// Loads the models that the server starts with, one after the other.
    pub async fn start(self: &Arc<Self>) -> Result<(), StartFailure> {
        loop {
            let next = self.slots().values().find_map(|slot| match &slot.phase {
                Phase::Starting => Some(Arc::clone(&slot.unit)),
                Phase::Unloaded | Phase::Loading | Phase::Loaded(_) | Phase::Unloading => None,
            });
            let Some(unit) = next else { return Ok(()) };
            // What it takes is known before others look for room; a source that cannot say fails when it loads, as does a
            // model without room.
            let placements = placements_of(&unit).await.unwrap_or_default();
            let placement = self.place(&unit, &placements);
            let loaded = load_on_thread(&unit, placement).await?;
            self.is_loaded(&unit, loaded, Duration::ZERO);
        }
    }

    /// Sets memory aside for a model that is loaded whether there is room or not.
    fn place(&self, unit: &Unit, placements: &[Placement]) -> Placement {
        let mut slots = self.slots();
        let best = self.best(&slots, unit, placements).ok().flatten().map(|(placement, _)| placement);
        let placement = best.or(placements.first()).cloned().unwrap_or_default();
        if let Some(slot) = slots.get_mut(&unit.id) {
            slot.memory.clone_from(&placement);
        }
        placement
    }

    fn begin_load(self: &Arc<Self>, slot: &mut Slot) {
        slot.phase = Phase::Loading;
        self.runtime.spawn(Arc::clone(self).load(Arc::clone(&slot.unit)));
    }

    async fn load(self: Arc<Self>, unit: Arc<Unit>) {
        let begun = Instant::now();
        match self.try_load(&unit).await {
            Ok(loaded) => {
                tracing::info!("loaded {} in {:.2} s", unit.name, begun.elapsed().as_secs_f64());
                self.is_loaded(&unit, loaded, begun.elapsed());
            }
            Err(error) => {
                tracing::warn!("{} was not loaded: {}", unit.name, error.message());
                let mut slots = self.slots();
                let Some(slot) = slots.get_mut(&unit.id) else { return };
                slot.phase = Phase::Unloaded;
                slot.memory.clear();
                let waiters = std::mem::take(&mut slot.waiters);
                if slot.is_removed {
                    slots.remove(&unit.id);
                }
                drop(slots);
                for waiter in waiters {
                    let _ = waiter.send(Err(error.clone()));
                }
                self.changed.notify_waiters();
            }
        }
    }

    async fn try_load(self: &Arc<Self>, unit: &Arc<Unit>) -> Result<Loaded, ApiError> {
        let placements = placements_of(unit).await.map_err(|error| not_loaded(unit, &*error))?;
        let placement = self.make_room(unit, &placements).await?;
        load_on_thread(unit, placement).await.map_err(|failure| match failure {
            StartFailure::Load(error) => not_loaded(unit, &*error),
            StartFailure::Thread(error) => not_loaded(unit, &error),
            StartFailure::Panicked => ApiError::internal(format!("loading the model {:?} met a defect", unit.name)),
        })
    }

    /// The model is there: hands it to the requests that waited for it.
    fn is_loaded(self: &Arc<Self>, unit: &Arc<Unit>, loaded: Loaded, took: Duration) {
        let mut slots = self.slots();
        let Some(slot) = slots.get_mut(&unit.id) else { return };
        let loaded = Arc::new(loaded);
        let waiters = std::mem::take(&mut slot.waiters);
        slot.phase = Phase::Loaded(Running {
            loaded: Arc::clone(&loaded),
            n_held: waiters.len(),
            last_used: Instant::now(),
            keep_alive: unit.keep_alive,
            retiring: false,
        });
        if slot.is_removed {
            self.retire_slot(slot);
        }
        drop(slots);
        for waiter in waiters {
            let (residency, unit, loaded) = (Arc::clone(self), Arc::clone(unit), Arc::clone(&loaded));
            // Where the request is gone the model is released at once.
            drop(waiter.send(Ok(Held { residency, unit, loaded, waited: Some(took) })));
        }
        self.changed.notify_waiters();
    }

    /// Frees memory for the model and sets it aside.
    async fn make_room(self: &Arc<Self>, unit: &Unit, placements: &[Placement]) -> Result<Placement, ApiError> {
        let _turn = self.turn.lock().await;
        loop {
            let mut changed = pin!(self.changed.notified());
            changed.as_mut().enable();
            if let Some(placement) = self.set_aside(unit, placements)? {
                return Ok(placement);
            }
            // Either way it looks again.
            let _ = tokio::time::timeout(LOOK_AGAIN, changed).await;
        }
    }

    /// Sets memory aside where there is room, and gives the placement; else makes models go. None goes where an error says that
    /// there can be no room.
    fn set_aside(self: &Arc<Self>, unit: &Unit, placements: &[Placement]) -> Result<Option<Placement>, ApiError> {
        let mut slots = self.slots();
        let Some((placement, room)) = self.best(&slots, unit, placements)? else { return Ok(Some(Placement::new())) };
        for id in room.to_go {
            if let Some(slot) = slots.get_mut(&id) {
                self.retire_slot(slot);
            }
        }
        if !room.is_free {
            return Ok(None);
        }
        if let Some(slot) = slots.get_mut(&unit.id) {
            slot.memory.clone_from(placement);
        }
        Ok(Some(placement.clone()))
    }

    /// The first placement with room, else the one that gets it at the least cost; an error where none can have room. `None`:
    /// there are no placements.
    fn best<'p>(
        &self,
        slots: &BTreeMap<u64, Slot>,
        unit: &Unit,
        placements: &'p [Placement],
    ) -> Result<Option<(&'p Placement, Room)>, ApiError> {
        let mut best: Option<(&Placement, Room)> = None;
        let mut why = None;
        for placement in placements {
            match self.room(slots, unit, placement) {
                Ok(room) if best.as_ref().is_none_or(|(_, known)| room.cost() < known.cost()) => {
                    best = Some((placement, room));
                }
                Ok(_) => {}
                Err(error) => why = why.or(Some(error)),
            }
        }
        match (best, why) {
            (None, Some(error)) => Err(error),
            (best, _) => Ok(best),
        }
    }

    /// What makes room for the model at the placement; an error where nothing does.
    fn room(&self, slots: &BTreeMap<u64, Slot>, unit: &Unit, placement: &Placement) -> Result<Room, ApiError> {
        let mut room = Room { is_free: true, is_enough: true, to_go: BTreeSet::new(), last_used: None };
        for MemoryNeed { device, bytes, capacity } in placement {
            let Some(capacity) = self.memory.into_iter().chain(*capacity).min() else { continue };
            if *bytes > capacity {
                return Err(too_large(unit, *bytes, device, capacity));
            }
            let sum = |counts: &dyn Fn(&Slot) -> bool| -> u64 {
                slots.values().filter(|slot| counts(slot)).map(|slot| slot.bytes_on(device)).sum()
            };
            if sum(&|slot| slot.unit.resident && !slot.is_going()) + bytes > capacity {
                return Err(no_room(unit, *bytes, device, capacity));
            }
            let lacking = (sum(&|_| true) + bytes).saturating_sub(capacity);
            room.is_free &= lacking == 0;
            let going = sum(&|slot| slot.is_going() || room.to_go.contains(&slot.unit.id));
            let mut lacking = lacking.saturating_sub(going);
            let mut may_go: Vec<_> = slots.values().filter_map(|slot| can_go(slot, device)).collect();
            may_go.retain(|(_, slot)| !room.to_go.contains(&slot.unit.id));
            may_go.sort_by_key(|(usage, _)| *usage);
            for (usage, slot) in may_go {
                if lacking == 0 {
                    break;
                }
                lacking = lacking.saturating_sub(slot.bytes_on(device));
                room.to_go.insert(slot.unit.id);
                room.last_used = room.last_used.max(Some(usage));
            }
            // Those that are being loaded go next.
            room.is_enough &= lacking == 0;
        }
        Ok(room)
    }

    fn begin_unload(self: &Arc<Self>, slot: &mut Slot) {
        let Phase::Loaded(running) = std::mem::replace(&mut slot.phase, Phase::Unloading) else { return };
        self.runtime.spawn(Arc::clone(self).unload(Arc::clone(&slot.unit), running.loaded));
    }

    async fn unload(self: Arc<Self>, unit: Arc<Unit>, loaded: Arc<Loaded>) {
        loaded.scheduler.shut_down(Duration::ZERO).await;
        // Giving back memory takes a moment.
        let give_back = move || {
            drop(loaded);
            give_back_memory();
        };
        let _ = tokio::task::spawn_blocking(give_back).await;
        tracing::info!("unloaded {}", unit.name);
        let mut slots = self.slots();
        let Some(slot) = slots.get_mut(&unit.id) else { return };
        slot.phase = Phase::Unloaded;
        slot.memory.clear();
        slot.waiters.retain(|waiter| !waiter.is_closed());
        if slot.is_removed {
            slots.remove(&unit.id);
        } else if !slot.waiters.is_empty() {
            self.begin_load(slot);
        }
        drop(slots);
        self.changed.notify_waiters();
    }

    /// Unloads models whose time is over, as long as the server runs.
    pub async fn expire(self: Arc<Self>) {
        loop {
            let mut changed = pin!(self.changed.notified());
            changed.as_mut().enable();
            let mut next = None;
            for slot in self.slots().values_mut() {
                let Phase::Loaded(running) = &slot.phase else { continue };
                match running.goes_at() {
                    Some(at) if at <= Instant::now() => self.retire_slot(slot),
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

    /// Takes no more requests, and returns when those of all models are finished; those that are not after `grace` are
    /// cancelled.
    pub async fn shut_down(&self, grace: Duration) {
        let loaded = self.all_loaded();
        join_all(loaded.iter().map(|(_, loaded)| loaded.scheduler.shut_down(grace))).await;
    }

    /// Forgets a model that no entry has any more. It goes when the requests that use it are answered; those that wait until
    /// it is loaded again are told that it is removed.
    pub fn remove(self: &Arc<Self>, unit: &Unit) {
        let mut slots = self.slots();
        let Some(slot) = slots.get_mut(&unit.id) else { return };
        slot.is_removed = true;
        match &slot.phase {
            Phase::Unloaded => drop(slots.remove(&unit.id)),
            Phase::Loaded(_) => {
                slot.waiters.clear();
                self.retire_slot(slot);
            }
            Phase::Unloading => slot.waiters.clear(),
            // Those that wait for this load still get it.
            Phase::Starting | Phase::Loading => {}
        }
    }
}

/// Whether requests use a model, and when one did last: those with the least go first.
type Usage = (bool, Instant);

/// What makes room for a model at a placement.
struct Room {
    /// There is room.
    is_free: bool,
    /// There is when all models went that are going or to go.
    is_enough: bool,
    /// Models to go besides those that are going.
    to_go: BTreeSet<u64>,
    /// The usage of the one of them that is used most.
    last_used: Option<Usage>,
}

impl Room {
    /// The placement with the least is taken: one with room, one where no more models have to go, the one whose models were
    /// used least recently.
    fn cost(&self) -> (bool, bool, Option<Usage>) {
        (!self.is_free, !self.is_enough, self.last_used)
    }
}

/// A model that may go for another on `device`, after its usage.
fn can_go<'s>(slot: &'s Slot, device: &str) -> Option<(Usage, &'s Slot)> {
    if slot.unit.resident || slot.bytes_on(device) == 0 {
        return None;
    }
    let Phase::Loaded(running) = &slot.phase else { return None };
    (!running.retiring).then_some(((running.n_held > 0, running.last_used), slot))
}

/// Where the model can be loaded. It may read the file.
async fn placements_of(unit: &Arc<Unit>) -> Result<Vec<Placement>, SourceError> {
    let unit = Arc::clone(unit);
    tokio::task::spawn_blocking(move || unit.source.placements()).await.unwrap_or_else(|error| Err(error.into()))
}

/// Loads the model on a thread of its own.
async fn load_on_thread(unit: &Arc<Unit>, placement: Placement) -> Result<Loaded, StartFailure> {
    let (sender, receiver) = oneshot::channel();
    let unit = Arc::clone(unit);
    let load = move || drop(sender.send(unit.source.load(&placement)));
    std::thread::Builder::new().name("load".into()).spawn(load).map_err(StartFailure::Thread)?;
    // Where the thread panicked it has said why.
    receiver.await.map_err(|_| StartFailure::Panicked)?.map_err(StartFailure::Load)
}

fn not_loaded(unit: &Unit, why: &dyn std::error::Error) -> ApiError {
    ApiError::internal(format!("the model {:?} cannot be loaded: {why}", unit.name)).with_code("model_not_loaded")
}

fn too_large(unit: &Unit, bytes: u64, device: &str, capacity: u64) -> ApiError {
    let message = format!(
        "the model {:?} needs {bytes} bytes of {device}, which has {capacity} for models: choose a smaller one, or a shorter \
         context",
        unit.name
    );
    ApiError::invalid(message).with_code("model_too_large")
}

fn no_room(unit: &Unit, bytes: u64, device: &str, capacity: u64) -> ApiError {
    let message = format!(
        "the model {:?} needs {bytes} bytes of {device}, which has {capacity} for models, and those that stay loaded leave \
         too few: start the server without one of them",
        unit.name
    );
    ApiError::unavailable("no_room_for_model", message)
}

#[cfg(test)]
mod tests;
