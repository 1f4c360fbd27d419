//! `Scheduler::announce` wakes a device that was idle, and nothing else does. Waking ends with the next request or after a
//! limit.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::support::{Controls, encode, engine, greedy, read};
use metal_attention::scheduler::{FinishReason, Scheduler, SchedulerOptions};
use metal_attention::{ASLEEP_AFTER, EngineOptions, Model};

#[test]
fn an_announcement_wakes_a_device_that_was_idle_once() {
    let model = Model::built_in().unwrap();
    let controls = Controls::default();
    let pass = controls.null_pass(&model, &EngineOptions { n_seq: 2, ..engine() });
    let woken = controls.woken;
    let count = || woken.load(Ordering::Relaxed);
    let scheduler = Scheduler::start(pass, Arc::new(model.clone()), SchedulerOptions::default()).unwrap();
    let prompt = || greedy(encode(&model, "Once upon a time"), 4);
    assert_eq!(read(scheduler.submit(prompt()).unwrap()).reason, Some(FinishReason::Length));
    // The device was busy a moment ago.
    scheduler.announce();
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(count(), 0);
    // The device was idle and no request follows: it is woken for a fifth of a second at most.
    std::thread::sleep(ASLEEP_AFTER);
    scheduler.announce();
    let start = Instant::now();
    while count() == 0 {
        assert!(start.elapsed() < Duration::from_secs(60), "nothing woke the device");
        std::thread::sleep(Duration::from_millis(1));
    }
    std::thread::sleep(Duration::from_millis(400));
    let once = count();
    assert!((1..=40).contains(&once), "woken {once} times");
    // Without a request in between it is not woken again by further announcements, and accepts requests as before.
    std::thread::sleep(ASLEEP_AFTER);
    scheduler.announce();
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(count(), once);
    assert_eq!(read(scheduler.submit(prompt()).unwrap()).reason, Some(FinishReason::Length));
    assert_eq!(count(), once);
}

#[test]
fn a_request_ends_waking() {
    let model = Model::built_in().unwrap();
    let controls = Controls::default();
    let pass = controls.null_pass(&model, &EngineOptions { n_seq: 2, ..engine() });
    let woken = controls.woken;
    let scheduler = Scheduler::start(pass, Arc::new(model.clone()), SchedulerOptions::default()).unwrap();
    std::thread::sleep(ASLEEP_AFTER + Duration::from_millis(100));
    scheduler.announce();
    let answer = scheduler.submit(greedy(encode(&model, "Once upon a time"), 4)).unwrap();
    assert_eq!(read(answer).reason, Some(FinishReason::Length));
    let n = woken.load(Ordering::Relaxed);
    assert!(n <= 2, "woken {n} times beside a request");
}
