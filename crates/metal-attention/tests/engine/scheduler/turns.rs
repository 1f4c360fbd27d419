//! Clients take turns, however much each of them asks for, and whoever has to wait loses nothing.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use super::support::{Wrapped, alone, engine, greedy, read};
use metal_attention::scheduler::{Client, Event, Events, Request, Scheduler, SchedulerOptions, SubmitError};
use metal_attention::{EngineOptions, Model};

const A: Client = Client::Key(0);
const B: Client = Client::Key(1);
const C: Client = Client::Key(2);

/// A scheduler in which a text has had its turn after one step of its own, and its forward pass with a gate.
fn start(n_seq: usize, n_pages: usize, options: &SchedulerOptions) -> (Model, Scheduler, Wrapped) {
    let model = Model::built_in().unwrap();
    let engine = EngineOptions { n_seq, n_cache: Some(64 * n_pages), ..engine() };
    let levers = Wrapped::new(model.forward_pass(&engine).unwrap());
    let (gate, log) = (levers.gate.clone(), levers.log.clone());
    let inside = Wrapped { gate, log, ..Wrapped::new(model.forward_pass(&engine).unwrap()) };
    let options = SchedulerOptions { time_slice: Duration::ZERO, ..options.clone() };
    let scheduler = Scheduler::start(Box::new(inside), Arc::new(model.clone()), options).unwrap();
    (model, scheduler, levers)
}

/// A text of `n` tokens after a prompt that no other has.
fn text(client: Client, i: usize, n_prompt: usize, n: usize) -> Request {
    let prompt = (0..n_prompt).map(|at| ((at * at * 31 + at * 7 + i * 17) % 500 + 3) as u32).collect();
    Request { client, ignore_eos: true, ..greedy(prompt, n) }
}

/// A token that no such prompt has.
const MARK: u32 = 511;

/// How many steps after the first `from` it took until `n` marks were evaluated.
fn steps_until(levers: &Wrapped, from: usize, n: usize) -> usize {
    let log = levers.log.lock().unwrap();
    let mut seen = 0;
    let enough = |step: &Vec<u32>| {
        seen += step.iter().filter(|&&id| id == MARK).count();
        seen >= n
    };
    log[from..].iter().position(enough).expect("they were evaluated") + 1
}

fn wait(what: &str, is_so: impl Fn() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < Duration::from_secs(60), "waited for {what} in vain");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_short_text_does_not_wait_for_250_long_ones() {
    for n_parallel in [1, 4] {
        let options = SchedulerOptions { n_parallel, ..Default::default() };
        let (model, scheduler, levers) = start(n_parallel + 4, 4 * (n_parallel + 4), &options);
        let held = levers.gate.lock().unwrap();
        let long: Vec<_> = (0..250).map(|i| scheduler.submit(text(A, i, 20, 200)).unwrap()).collect();
        drop(held);
        wait("the places to be taken", || scheduler.metrics().generated_tokens > 0);
        for i in 0..5 {
            let held = levers.gate.lock().unwrap();
            let short = || Request { client: B, ignore_eos: true, ..greedy(vec![MARK; 6 + i], 5) };
            let events = scheduler.submit(short()).unwrap();
            let from = levers.log.lock().unwrap().len();
            drop(held);
            assert_eq!(read(events).ids, alone(&model, &short()).0);
            // The step that waits at the gate is over first. What the cache has of the prompt is not evaluated again.
            let steps = steps_until(&levers, from, 1);
            assert!(steps <= 3, "{steps} steps of {n_parallel} texts");
        }
        let done = scheduler.metrics().requests.length;
        assert!(done < 100, "{done} texts were finished meanwhile");
        drop(long);
    }
}

/// With one place two texts alternate, and none is evaluated again: what the cache holds of them stays.
#[test]
fn whoever_waits_loses_nothing() {
    let options = SchedulerOptions { n_parallel: 1, ..Default::default() };
    let (model, scheduler, levers) = start(3, 12, &options);
    let held = levers.gate.lock().unwrap();
    let requests = [text(A, 1, 30, 60), text(B, 2, 50, 60), text(C, 3, 10, 40)];
    let events: Vec<_> =
        [text(A, 1, 30, 60), text(B, 2, 50, 60), text(C, 3, 10, 40)].map(|r| scheduler.submit(r).unwrap()).into();
    drop(held);
    for (events, request) in events.into_iter().zip(&requests) {
        let answer = read(events);
        assert_eq!((answer.ids, answer.text), alone(&model, request));
    }
    let metrics = scheduler.metrics();
    assert!(metrics.preemptions >= 80, "{metrics:?}");
    assert_eq!((metrics.prompt_tokens, metrics.generated_tokens), (30 + 50 + 10, 160));
    wait("the thread to rest", || scheduler.metrics().running == 0);
    assert_eq!(scheduler.metrics().waiting, 0);
}

/// In a cache that holds one of them only, texts that alternate are evaluated again and again, but each gets on.
#[test]
fn everybody_gets_on_where_the_cache_is_small() {
    let options = SchedulerOptions { n_parallel: 1, n_batch: Some(32), ..Default::default() };
    let (model, scheduler, _levers) = start(1, 4, &options);
    let requests = || [text(A, 1, 150, 12), text(B, 2, 180, 12), text(C, 3, 90, 12)];
    let events = requests().map(|r| scheduler.submit(r).unwrap());
    for (events, request) in events.into_iter().zip(requests()) {
        assert_eq!(read(events).ids, alone(&model, &request).0);
    }
}

#[test]
fn places_are_shared_out_between_clients() {
    let options = SchedulerOptions { n_parallel: 4, ..Default::default() };
    let (_, scheduler, levers) = start(8, 32, &options);
    let held = levers.gate.lock().unwrap();
    let mut of_a: Vec<_> = (0..20).map(|i| scheduler.submit(text(A, i, 10, 150)).unwrap()).collect();
    let mut of_b: Vec<_> = (0..20).map(|i| scheduler.submit(text(B, 40 + i, 10, 150)).unwrap()).collect();
    drop(held);
    wait("some tokens", || scheduler.metrics().generated_tokens > 400);
    let held = levers.gate.lock().unwrap();
    let count = |events: &mut Vec<Events>| -> usize {
        let mut n = 0;
        for events in events {
            while let Some(Event::Token { .. }) = now(events) {
                n += 1;
            }
        }
        n
    };
    let (a, b) = (count(&mut of_a), count(&mut of_b));
    drop(held);
    assert!(a + b > 400 && a.abs_diff(b) < 100, "{a} and {b} tokens");
}

/// The next event, where there is one now.
fn now(events: &mut Events) -> Option<Event> {
    match pin!(events.recv()).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(event) => event,
        Poll::Pending => None,
    }
}

/// A short prompt beside long ones.
#[test]
fn prompts_share_the_room_of_a_step() {
    let options = SchedulerOptions { n_parallel: 4, n_batch: Some(16), ..Default::default() };
    let (model, scheduler, levers) = start(8, 32, &options);
    let short = || Request { client: B, ignore_eos: true, ..greedy(vec![MARK; 20], 3) };
    let held = levers.gate.lock().unwrap();
    let events: Vec<_> = (0..3).map(|i| scheduler.submit(text(A, i, 200, 3)).unwrap()).collect();
    let last = scheduler.submit(short()).unwrap();
    let from = levers.log.lock().unwrap().len();
    drop(held);
    let answer = read(last);
    assert_eq!((answer.ids, answer.usage.cached_tokens), (alone(&model, &short()).0, 0));
    // Eight tokens a step, after the one that waits at the gate.
    let steps = steps_until(&levers, from, 20);
    assert!(steps <= 5, "{steps} steps");
    for (i, events) in events.into_iter().enumerate() {
        assert_eq!(read(events).ids, alone(&model, &text(A, i, 200, 3)).0);
    }
}

#[test]
fn a_full_queue_has_room_for_others() {
    let options = SchedulerOptions { n_parallel: 1, n_queue: 8, ..Default::default() };
    let (_, scheduler, levers) = start(2, 8, &options);
    let held = levers.gate.lock().unwrap();
    let mut events = vec![scheduler.submit(text(A, 0, 5, 5)).unwrap()];
    wait("the first to run", || scheduler.metrics().waiting == 0);
    let full = loop {
        match scheduler.submit(text(A, 0, 5, 5)) {
            Ok(one) => events.push(one),
            Err(why) => break why,
        }
    };
    assert_eq!(full, SubmitError::QueueFull { n_queue: 8 });
    let waiting = scheduler.metrics().waiting;
    assert_eq!(waiting, 8);
    for i in 0..4 {
        events.push(scheduler.submit(text(B, i, 5, 5)).unwrap());
    }
    assert_eq!(scheduler.submit(text(B, 0, 5, 5)).err(), Some(full));
    drop(scheduler.embed(C, vec![1, 2, 3]).unwrap());
    assert_eq!(scheduler.metrics().waiting, 13);
    drop(held);
    assert!(events.into_iter().all(|events| read(events).ids.len() == 5));
    wait("the thread to rest", || scheduler.metrics().running == 0);
    assert_eq!(scheduler.metrics().waiting, 0);
}

#[test]
fn embeddings_and_texts_take_turns_too() {
    // Pages for one whole context only: texts and embeddings are in each other's way.
    for n_parallel in [1, 2] {
        let options = SchedulerOptions { n_parallel, n_batch: Some(32), ..Default::default() };
        let (model, scheduler, levers) = start(n_parallel + 4, 4, &options);
        let ids = |n: usize| (0..n).map(|i| (i * 31 % 500 + 3) as u32).collect::<Vec<_>>();
        let held = levers.gate.lock().unwrap();
        let long: Vec<_> = (0..40).map(|_| scheduler.embed(A, ids(250)).unwrap()).collect();
        drop(held);
        wait("the first of them", || scheduler.metrics().embedding_tokens > 0);
        let short = scheduler.embed(B, ids(10)).unwrap();
        let events = scheduler.submit(text(C, 1, 100, 5)).unwrap();
        assert_eq!(pollster::block_on(short).unwrap().len(), 64);
        assert_eq!(read(events).ids, alone(&model, &text(C, 1, 100, 5)).0);
        assert!(scheduler.metrics().requests.embeddings < 25, "{:?}", scheduler.metrics());
        // And the other way round: an embedding beside texts that fill the cache.
        drop(long);
        let texts: Vec<_> = (0..20).map(|i| scheduler.submit(text(A, i, 100, 150)).unwrap()).collect();
        wait("the texts to run", || scheduler.metrics().generated_tokens > 5);
        let embedding = scheduler.embed(B, ids(200)).unwrap();
        assert_eq!(pollster::block_on(embedding).unwrap().len(), 64);
        assert!(scheduler.metrics().requests.length < 10, "{:?}", scheduler.metrics());
        drop(texts);
    }
}
