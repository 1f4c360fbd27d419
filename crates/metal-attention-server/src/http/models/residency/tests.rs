//! Models that are removed while requests use them, wait for them, or neither; and models on several devices.

use std::sync::mpsc::{Receiver, channel};

use metal_attention::scheduler::SchedulerOptions;
use metal_attention::{Device, EngineOptions, Model};

use super::super::ModelCard;
use super::loading::CANCEL_POLL;
use super::*;

/// The built-in model. Each load begins when a message is received, or the sender is dropped.
struct Source(Mutex<Receiver<()>>, Vec<Placement>);

impl ModelSource for Source {
    fn card(&self) -> Result<Arc<ModelCard>, SourceError> {
        Ok(Arc::new(ModelCard::of(Model::built_in()?.gguf())))
    }

    fn placements(&self) -> Result<Vec<Placement>, SourceError> {
        Ok(self.1.clone())
    }

    fn load(&self, _: &Placement) -> Result<LoadedModel, SourceError> {
        let _ = self.0.lock().unwrap().recv();
        let model = Model::built_in()?;
        let engine = EngineOptions { device: Device::Cpu, n_threads: Some(1), ..Default::default() };
        let pass = model.forward_pass(&engine)?;
        Ok(LoadedModel::start(model, pass, &SchedulerOptions { n_parallel: 1, ..Default::default() })?)
    }
}

/// A model whose load begins when `receiver` gets a message, or its sender is dropped.
fn add_gated(residency: &Residency, receiver: Receiver<()>) -> Arc<LoadUnit> {
    residency.add("a", Box::new(Source(Mutex::new(receiver), Vec::new())), false, KeepAlive::Forever)
}

/// A model whose load begins at once.
fn add(residency: &Residency) -> Arc<LoadUnit> {
    add_gated(residency, channel().1)
}

/// A model whose first load ends when it is cancelled, with an error; later ones are those of `Source`.
struct Endless {
    source: Source,
    is_cancelled: std::sync::atomic::AtomicBool,
    /// Whether the load gives a model in spite of its cancellation.
    succeeds: bool,
}

impl ModelSource for Endless {
    fn card(&self) -> Result<Arc<ModelCard>, SourceError> {
        self.source.card()
    }

    fn placements(&self) -> Result<Vec<Placement>, SourceError> {
        self.source.placements()
    }

    fn load(&self, placement: &Placement) -> Result<LoadedModel, SourceError> {
        let is_first = !self.is_cancelled.load(Ordering::Relaxed);
        while !self.is_cancelled.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(1));
        }
        if is_first && !self.succeeds { Err("cancelled".into()) } else { self.source.load(placement) }
    }

    fn cancel_load(&self) {
        self.is_cancelled.store(true, Ordering::Relaxed);
    }
}

/// Holds `unit` in a task.
fn hold(residency: &Arc<Residency>, unit: &Arc<LoadUnit>) -> tokio::task::JoinHandle<Option<HeldModel>> {
    let (residency, unit) = (Arc::clone(residency), Arc::clone(unit));
    tokio::spawn(async move { residency.hold(&unit).await.unwrap() })
}

#[tokio::test]
async fn a_load_is_cancelled_when_no_request_waits_for_it() {
    for succeeds in [false, true] {
        let residency = Residency::new(None);
        let need = MemoryNeed { device: "cpu".into(), bytes: 5, capacity: Some(10) };
        let source = Source(Mutex::new(channel().1), vec![vec![need]]);
        let source = Endless { source, is_cancelled: false.into(), succeeds };
        let a = residency.add("a", Box::new(source), false, KeepAlive::Forever);
        let waiting = hold(&residency, &a);
        wait_until(|| residency.memory().is_some()).await;
        // It goes on for the request that waits.
        residency.retire(&a);
        tokio::time::sleep(3 * CANCEL_POLL).await;
        assert_eq!(residency.status(&a).phase, ModelPhase::Loading { progress: None });
        waiting.abort();
        assert!(waiting.await.is_err());
        wait_until(|| residency.status(&a).phase == ModelPhase::Unloaded).await;
        assert_eq!(residency.memory(), None);
        // The next request gets the model.
        let held = hold(&residency, &a).await.unwrap().unwrap();
        assert!(held.waited.is_some(), "{succeeds}");
    }
}

#[tokio::test]
async fn a_model_that_is_unloaded_while_it_loads_is_unloaded_after_those_that_wait() {
    let residency = Residency::new(None);
    let (load, gate) = channel();
    let a = add_gated(&residency, gate);
    let waiting = hold(&residency, &a);
    wait_until(|| n_waiters(&residency, &a) == 1).await;
    residency.retire(&a);
    load.send(()).unwrap();
    let held = waiting.await.unwrap().unwrap();
    assert_eq!(residency.status(&a).phase, ModelPhase::Loaded);
    drop(held);
    wait_until(|| residency.status(&a).phase == ModelPhase::Unloaded).await;
}

fn n_waiters(residency: &Residency, unit: &LoadUnit) -> usize {
    residency.entries()[&unit.id].waiters.len()
}

/// Waits until `done`, for ten seconds at most.
async fn wait_until(done: impl Fn() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < Duration::from_secs(10), "it takes too long");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test]
async fn ids_are_not_reused() {
    let residency = Residency::new(None);
    let (a, b) = (add(&residency), add(&residency));
    residency.remove(&b);
    let c = add(&residency);
    assert_eq!((a.id, b.id, c.id), (0, 1, 2));
    assert_eq!(residency.entries().keys().copied().collect::<Vec<_>>(), [0, 2]);
    assert!(residency.hold(&b).await.unwrap().is_none());
}

#[tokio::test]
async fn the_phase_of_a_model_is_that_of_its_load() {
    let residency = Residency::new(None);
    let (load, gate) = channel();
    let a = add_gated(&residency, gate);
    let phase = || residency.status(&a).phase;
    assert_eq!((phase(), residency.memory()), (ModelPhase::Unloaded, None));
    let held = tokio::spawn({
        let (residency, a) = (Arc::clone(&residency), Arc::clone(&a));
        async move { residency.hold(&a).await.unwrap().unwrap() }
    });
    wait_until(|| phase() == ModelPhase::Loading { progress: None }).await;
    load.send(()).unwrap();
    drop(held.await.unwrap());
    assert_eq!(phase(), ModelPhase::Loaded);
    residency.retire(&a);
    wait_until(|| phase() == ModelPhase::Unloaded).await;
}

#[tokio::test]
async fn a_model_in_use_is_removed_when_its_requests_end() {
    let residency = Residency::new(None);
    let a = add(&residency);
    let held = residency.hold(&a).await.unwrap().unwrap();
    residency.remove(&a);
    assert!(residency.hold(&a).await.unwrap().is_none());
    assert_eq!(residency.all_loaded().len(), 1);
    drop(held);
    wait_until(|| residency.entries().is_empty()).await;
}

#[tokio::test]
async fn requests_that_wait_learn_that_the_model_is_removed() {
    let residency = Residency::new(None);
    let a = add(&residency);
    let held = residency.hold(&a).await.unwrap().unwrap();
    residency.retire(&a);
    let wait = || {
        let (residency, a) = (Arc::clone(&residency), Arc::clone(&a));
        tokio::spawn(async move { residency.hold(&a).await.unwrap().is_some() })
    };
    let given_up = wait();
    wait_until(|| n_waiters(&residency, &a) == 1).await;
    given_up.abort();
    assert!(given_up.await.is_err());
    let waiting = wait();
    // The waiter of the request that has ended is dropped.
    tokio::task::yield_now().await;
    wait_until(|| n_waiters(&residency, &a) == 1).await;
    residency.remove(&a);
    assert!(!waiting.await.unwrap());
    drop(held);
    wait_until(|| residency.entries().is_empty()).await;
}

#[tokio::test]
async fn requests_that_wait_for_a_load_get_the_model_though_it_is_removed() {
    let residency = Residency::new(None);
    let (open, gate) = channel();
    let a = add_gated(&residency, gate);
    let waiting = {
        let (residency, a) = (Arc::clone(&residency), Arc::clone(&a));
        tokio::spawn(async move { residency.hold(&a).await.unwrap() })
    };
    wait_until(|| n_waiters(&residency, &a) == 1).await;
    residency.remove(&a);
    assert!(residency.hold(&a).await.unwrap().is_none());
    open.send(()).unwrap();
    let held = waiting.await.unwrap();
    assert!(held.is_some() && residency.entries().len() == 1);
    drop(held);
    wait_until(|| residency.entries().is_empty()).await;
}

/// A model that needs 50 of the 80 bytes of the first device with enough free memory.
fn add_on_devices(residency: &Residency) -> Arc<LoadUnit> {
    let on = |card: usize| MemoryNeed { device: format!("cuda:{card}"), bytes: 50, capacity: Some(80) };
    let source = Source(Mutex::new(channel().1), vec![vec![on(0)], vec![on(1)]]);
    residency.add("a", Box::new(source), false, KeepAlive::Forever)
}

#[tokio::test]
async fn a_model_is_loaded_on_the_first_device_with_enough_memory() {
    let residency = Residency::new(None);
    let card = |unit: &LoadUnit| residency.status(unit).memory.first().map(|need| need.device.clone());
    let models = [(); 3].map(|()| add_on_devices(&residency));
    let [a, b, c] = &models;
    for unit in [a, b, a] {
        drop(residency.hold(unit).await.unwrap().unwrap());
    }
    assert_eq!((card(a), card(b)), (Some("cuda:0".into()), Some("cuda:1".into())));
    // Where no device has enough, only the least recently used model is evicted.
    let held = residency.hold(c).await.unwrap().unwrap();
    assert_eq!((card(a), card(b), card(c)), (Some("cuda:0".into()), None, Some("cuda:1".into())));
    // A model in use is evicted last.
    drop(residency.hold(b).await.unwrap().unwrap());
    assert_eq!((card(a), card(b), card(c)), (None, Some("cuda:0".into()), Some("cuda:1".into())));
    drop(held);
}

#[tokio::test]
async fn models_of_the_start_are_on_different_devices() {
    let residency = Residency::new(None);
    let on = |card: usize| MemoryNeed { device: format!("cuda:{card}"), bytes: 50, capacity: Some(80) };
    let models = [(); 3].map(|()| {
        let source = Source(Mutex::new(channel().1), vec![vec![on(0)], vec![on(1)]]);
        residency.add("a", Box::new(source), true, KeepAlive::Forever)
    });
    assert!(residency.start().await.is_ok());
    // The last one exceeds the capacity: where it is loaded all the same, it fails itself.
    assert_eq!(models.map(|unit| residency.status(&unit).memory), [[on(0)], [on(1)], [on(0)]]);
}
