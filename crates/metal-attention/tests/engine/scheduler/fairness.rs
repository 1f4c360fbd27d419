//! Fairness of the scheduler: clients share slots, batches, KV pages and the queue equally, however many requests each of
//! them submits, and a preempted sequence continues without loss.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use super::support::null::reference;
use super::support::{Controls, engine, greedy, read};
use metal_attention::scheduler::{Client, Event, Events, Request, Scheduler, SchedulerOptions, SubmitError};
use metal_attention::{EngineOptions, Model};

const A: Client = Client::Key(0);
const B: Client = Client::Key(1);
const C: Client = Client::Key(2);

/// A scheduler whose time slice is zero, so that any sequence may be preempted after one step. The third result controls
/// the scheduler's forward pass.
fn start(n_seq: usize, n_pages: usize, options: &SchedulerOptions) -> (Model, Scheduler, Controls) {
    let model = Model::built_in().unwrap();
    let engine = EngineOptions { n_seq, n_cache: Some(64 * n_pages), ..engine() };
    let controls = Controls::default();
    let options = SchedulerOptions { time_slice: Duration::ZERO, ..options.clone() };
    let scheduler = Scheduler::start(controls.null_pass(&model, &engine), Arc::new(model.clone()), options).unwrap();
    (model, scheduler, controls)
}

/// A request of `client` for `n` tokens. The prompt has `n_prompt` tokens and is different for each `i`.
fn long_request(client: Client, i: usize, n_prompt: usize, n: usize) -> Request {
    let prompt = (0..n_prompt).map(|at| ((at * at * 31 + at * 7 + i * 17) % 500 + 3) as u32).collect();
    Request { client, ignore_eos: true, ..greedy(prompt, n) }
}

/// A token id that no prompt of [`long_request`] contains.
const MARK: u32 = 511;

/// The number of steps, counted from step `from`, until `n` tokens `MARK` were evaluated.
fn steps_until(controls: &Controls, from: usize, n: usize) -> usize {
    let log = controls.log.lock().unwrap();
    let mut seen = 0;
    let enough = |step: &Vec<u32>| {
        seen += step.iter().filter(|&&id| id == MARK).count();
        seen >= n
    };
    log[from..].iter().position(enough).expect("they were evaluated") + 1
}

/// Waits until `is_so` returns true, at most a minute. `what` names the condition in the panic's message.
fn wait(what: &str, is_so: impl Fn() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < Duration::from_secs(60), "waited for {what} in vain");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_short_request_does_not_wait_for_250_long_ones() {
    for n_parallel in [1, 4] {
        let options = SchedulerOptions { n_parallel, ..Default::default() };
        let (model, scheduler, controls) = start(n_parallel + 4, 4 * (n_parallel + 4), &options);
        let held = controls.gate.close();
        let long: Vec<_> = (0..250).map(|i| scheduler.submit(long_request(A, i, 20, 200)).unwrap()).collect();
        drop(held);
        wait("the slots to be taken", || scheduler.metrics().generated_tokens > 0);
        for i in 0..5 {
            let held = controls.gate.close();
            let short = || Request { client: B, ignore_eos: true, ..greedy(vec![MARK; 6 + i], 5) };
            let events = scheduler.submit(short()).unwrap();
            let from = controls.log.lock().unwrap().len();
            drop(held);
            assert_eq!(read(events).ids, reference(&model, &short()).0);
            // The first step is the one that waits at the gate. Tokens of the prompt that are cached are not evaluated
            // again.
            let steps = steps_until(&controls, from, 1);
            assert!(steps <= 3, "{steps} steps with {n_parallel} slots");
        }
        let done = scheduler.metrics().requests.length;
        assert!(done < 100, "{done} requests were finished meanwhile");
        drop(long);
    }
}

/// With one slot three sequences alternate. None is evaluated again, because the cache has the pages of all.
#[test]
fn preempted_sequences_are_not_evaluated_again() {
    let options = SchedulerOptions { n_parallel: 1, ..Default::default() };
    let (model, scheduler, controls) = start(3, 12, &options);
    let held = controls.gate.close();
    let requests = [long_request(A, 1, 30, 60), long_request(B, 2, 50, 60), long_request(C, 3, 10, 40)];
    let events: Vec<_> = [long_request(A, 1, 30, 60), long_request(B, 2, 50, 60), long_request(C, 3, 10, 40)]
        .map(|r| scheduler.submit(r).unwrap())
        .into();
    drop(held);
    for (events, request) in events.into_iter().zip(&requests) {
        let answer = read(events);
        assert_eq!((answer.ids, answer.text), reference(&model, request));
    }
    let metrics = scheduler.metrics();
    assert!(metrics.preemptions >= 80, "{metrics:?}");
    assert_eq!((metrics.prompt_tokens, metrics.generated_tokens), (30 + 50 + 10, 160));
    wait("the scheduler to be idle", || {
        let metrics = scheduler.metrics();
        (metrics.running, metrics.waiting) == (0, 0)
    });
}

/// In a KV cache with the pages of one sequence, sequences that alternate are evaluated again and again, but each makes
/// progress.
#[test]
fn all_requests_finish_where_the_cache_has_pages_for_one() {
    let options = SchedulerOptions { n_parallel: 1, n_batch: Some(32), ..Default::default() };
    let (model, scheduler, _controls) = start(1, 4, &options);
    let requests = || [long_request(A, 1, 150, 12), long_request(B, 2, 180, 12), long_request(C, 3, 90, 12)];
    let events = requests().map(|r| scheduler.submit(r).unwrap());
    for (events, request) in events.into_iter().zip(requests()) {
        assert_eq!(read(events).ids, reference(&model, &request).0);
    }
}

#[test]
fn slots_are_shared_equally_between_clients() {
    let options = SchedulerOptions { n_parallel: 4, ..Default::default() };
    let (_, scheduler, controls) = start(8, 32, &options);
    let held = controls.gate.close();
    let mut events_a: Vec<_> = (0..20).map(|i| scheduler.submit(long_request(A, i, 10, 150)).unwrap()).collect();
    let mut events_b: Vec<_> = (0..20).map(|i| scheduler.submit(long_request(B, 40 + i, 10, 150)).unwrap()).collect();
    drop(held);
    wait("some tokens", || scheduler.metrics().generated_tokens > 400);
    let held = controls.gate.close();
    let count = |events: &mut Vec<Events>| -> usize {
        let mut n = 0;
        for events in events {
            while let Some(Event::Token { .. }) = now(events) {
                n += 1;
            }
        }
        n
    };
    let (a, b) = (count(&mut events_a), count(&mut events_b));
    drop(held);
    assert!(a + b > 400 && a.abs_diff(b) < 100, "{a} and {b} tokens");
}

/// The next event if it has already arrived.
fn now(events: &mut Events) -> Option<Event> {
    match pin!(events.recv()).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(event) => event,
        Poll::Pending => None,
    }
}

/// The batch is shared between a short prompt and long ones: the short one is not evaluated after them.
#[test]
fn prompts_share_a_batch() {
    let options = SchedulerOptions { n_parallel: 4, n_batch: Some(16), ..Default::default() };
    let (model, scheduler, controls) = start(8, 32, &options);
    let short = || Request { client: B, ignore_eos: true, ..greedy(vec![MARK; 20], 3) };
    let held = controls.gate.close();
    let events: Vec<_> = (0..3).map(|i| scheduler.submit(long_request(A, i, 200, 3)).unwrap()).collect();
    let last = scheduler.submit(short()).unwrap();
    let from = controls.log.lock().unwrap().len();
    drop(held);
    let answer = read(last);
    assert_eq!((answer.ids, answer.usage.cached_tokens), (reference(&model, &short()).0, 0));
    // Eight tokens of the short prompt per step, after the step that waits at the gate.
    let steps = steps_until(&controls, from, 20);
    assert!(steps <= 5, "{steps} steps");
    for (i, events) in events.into_iter().enumerate() {
        assert_eq!(read(events).ids, reference(&model, &long_request(A, i, 200, 3)).0);
    }
}

#[test]
fn a_queue_full_of_one_client_accepts_requests_of_others() {
    let options = SchedulerOptions { n_parallel: 1, n_queue: 8, ..Default::default() };
    let (_, scheduler, controls) = start(2, 8, &options);
    let held = controls.gate.close();
    let mut events = vec![scheduler.submit(long_request(A, 0, 5, 5)).unwrap()];
    wait("the first to run", || scheduler.metrics().waiting == 0);
    let full = loop {
        match scheduler.submit(long_request(A, 0, 5, 5)) {
            Ok(one) => events.push(one),
            Err(why) => break why,
        }
    };
    assert_eq!(full, SubmitError::QueueFull { n_queue: 8 });
    let waiting = scheduler.metrics().waiting;
    assert_eq!(waiting, 8);
    for i in 0..4 {
        events.push(scheduler.submit(long_request(B, i, 5, 5)).unwrap());
    }
    assert_eq!(scheduler.submit(long_request(B, 0, 5, 5)).err(), Some(full));
    drop(scheduler.embed(C, vec![1, 2, 3]).unwrap());
    assert_eq!(scheduler.metrics().waiting, 13);
    drop(held);
    assert!(events.into_iter().all(|events| read(events).ids.len() == 5));
    wait("the scheduler to be idle", || scheduler.metrics().running == 0);
    assert_eq!(scheduler.metrics().waiting, 0);
}

/// A prompt is evaluated in chunks while an embedding waits for the end of the step, as if another sequence did.
#[test]
fn an_embedding_does_not_wait_for_a_whole_prompt() {
    const N_PROMPT: usize = 200;
    let options = SchedulerOptions { n_parallel: 2, ..Default::default() };
    let (model, scheduler, controls) = start(4, 16, &options);
    let prompt = || Request { client: A, ignore_eos: true, ..greedy(vec![MARK; N_PROMPT], 3) };
    let held = controls.gate.close();
    // A step that waits at the gate, and ends its sequence. Then prompt and embedding begin together.
    let first = scheduler.submit(long_request(C, 0, 1, 1)).unwrap();
    wait("the first to run", || scheduler.metrics().waiting == 0);
    let events = scheduler.submit(prompt()).unwrap();
    let embedding = scheduler.embed(B, (0..250).map(|i| i % 500 + 3).collect()).unwrap();
    drop(held);
    assert_eq!(read(first).ids.len(), 1);
    assert_eq!(read(events).ids, reference(&model, &prompt()).0);
    assert_eq!(pollster::block_on(embedding).unwrap().len(), 64);
    let log = controls.log.lock().unwrap();
    let chunks = log.iter().map(|step| step.iter().filter(|&&id| id == MARK).count()).filter(|&n| n > 1);
    let chunks: Vec<_> = chunks.collect();
    // The estimate of a step's size begins at 64 tokens, and the step before has doubled it at most.
    assert!(chunks.len() > 1 && chunks[0] <= 128, "{chunks:?}");
    assert_eq!(chunks.iter().sum::<usize>(), N_PROMPT);
}

#[test]
fn embeddings_and_requests_share_the_cache() {
    // KV pages for one whole context only: sequences and embeddings compete for them.
    for n_parallel in [1, 2] {
        let options = SchedulerOptions { n_parallel, n_batch: Some(32), ..Default::default() };
        let (model, scheduler, controls) = start(n_parallel + 4, 4, &options);
        let ids = |n: usize| (0..n).map(|i| (i * 31 % 500 + 3) as u32).collect::<Vec<_>>();
        let held = controls.gate.close();
        let long: Vec<_> = (0..40).map(|_| scheduler.embed(A, ids(250)).unwrap()).collect();
        // Steps pass one at a time, so that the counts are those of the moment when a request ends.
        let pass_until = |done: &dyn Fn() -> bool| {
            while !done() {
                held.let_one_step_pass();
            }
        };
        pass_until(&|| scheduler.metrics().embedding_tokens > 0);
        let short = scheduler.embed(B, ids(10)).unwrap();
        let events = scheduler.submit(long_request(C, 1, 100, 5)).unwrap();
        pass_until(&|| scheduler.metrics().requests.length > 0);
        assert!(scheduler.metrics().requests.embeddings < 25, "{:?}", scheduler.metrics());
        assert_eq!(pollster::block_on(short).unwrap().len(), 64);
        assert_eq!(read(events).ids, reference(&model, &long_request(C, 1, 100, 5)).0);
        // Then the reverse: an embedding is requested while sequences fill the cache.
        drop(long);
        let requests: Vec<_> = (0..20).map(|i| scheduler.submit(long_request(A, i, 100, 150)).unwrap()).collect();
        pass_until(&|| scheduler.metrics().generated_tokens > 10);
        let before = scheduler.metrics().requests.embeddings;
        let embedding = scheduler.embed(B, ids(200)).unwrap();
        pass_until(&|| scheduler.metrics().requests.embeddings > before);
        assert!(scheduler.metrics().requests.length < 10, "{:?}", scheduler.metrics());
        assert_eq!(pollster::block_on(embedding).unwrap().len(), 64);
        drop(requests);
        drop(held);
    }
}
