//! Texts in the KV cache that are saved, restored and erased by the numbers of their slots.

use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use metal_attention::scheduler::{Client, Replicas, Request, Scheduler, SchedulerOptions, SlotError};
use metal_attention::{EngineOptions, Model};

use super::hybrid::{lfm2, some};
use super::support::{Wrapped, alone_in, engine, few_windows, greedy, read, start, stories, windowed};

/// What a future comes to.
fn wait<T>(future: impl Future<Output = T>) -> T {
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(outcome) => return outcome,
            Poll::Pending => std::thread::yield_now(),
        }
    }
}

/// A request for nine tokens.
fn nine(prompt: &[u32]) -> Request {
    Request { ignore_eos: true, ..greedy(prompt.to_vec(), 9) }
}

/// The answer to `prompt`, and how many of its tokens were in the cache.
fn ask(scheduler: &Scheduler, prompt: &[u32]) -> (Vec<u32>, usize) {
    let answer = read(scheduler.submit(nine(prompt)).unwrap());
    assert_eq!(answer.error, None);
    (answer.ids, answer.usage.cached_tokens)
}

/// Also with layers that see a window alone, and with layers that keep a state.
#[test]
fn restored_texts_go_on_as_they_would_have() {
    let engine = EngineOptions { n_seq: 4, ..engine() };
    for model in [Model::built_in().unwrap(), windowed(40), lfm2()] {
        let new = || start(&model, &engine, SchedulerOptions { n_parallel: 2, ..Default::default() });
        let first = new();
        let prompt = some(1, 150);
        let (answer, _) = ask(&first, &prompt);
        ask(&first, &some(2, 20));
        // The text before the last one.
        let saved = wait(first.save_slot(1)).unwrap();
        let text = [prompt, answer].concat();
        assert_eq!(saved.ids(), &text[..text.len() - 1]);

        let second = new();
        wait(second.restore_slot(Client::Unknown, saved)).unwrap();
        let prompt = [&text[..], &some(3, 20)].concat();
        let (answer, n_cached) = ask(&second, &prompt);
        assert_eq!(n_cached, text.len() - 1);
        assert_eq!(answer, alone_in(&model, &engine, &nine(&prompt)).0);
        assert_eq!(second.metrics().prompt_tokens, 21);
        assert_eq!(wait(second.erase_slot(0)).unwrap(), prompt.len() + 8);
        assert_eq!(ask(&second, &prompt).1, 0);
    }
}

#[test]
fn idle_texts_give_their_windows_and_states_to_a_restored_one() {
    let engine = few_windows();
    for model in [windowed(40), lfm2()] {
        let new = || start(&model, &engine, SchedulerOptions { n_parallel: 1, cache_ram: 0, ..Default::default() });
        let first = new();
        let prompt = some(1, 150);
        let (answer, _) = ask(&first, &prompt);
        let saved = wait(first.save_slot(0)).unwrap();
        let second = new();
        for i in 2..9 {
            ask(&second, &some(i, 20));
        }
        wait(second.restore_slot(Client::Unknown, saved)).unwrap();
        assert_eq!(ask(&second, &[&prompt[..], &answer, &[5]].concat()).1, 150 + 8);
    }
}

#[test]
fn slots_of_ended_texts_are_in_the_order_of_their_ends() {
    let model = Model::built_in().unwrap();
    let engine = EngineOptions { n_seq: 4, ..engine() };
    let scheduler = start(&model, &engine, SchedulerOptions { n_parallel: 1, ..Default::default() });
    let (first, second) = (some(1, 150), some(2, 20));
    ask(&scheduler, &first);
    ask(&scheduler, &second);
    // What shares the beginning of the first text does not make that one end later.
    let third = [&first[..100], &some(3, 20)].concat();
    assert_eq!(ask(&scheduler, &third).1, 100);
    for (slot, prompt) in [third, second, first].iter().enumerate() {
        let saved = wait(scheduler.save_slot(slot)).unwrap();
        assert!(saved.ids().starts_with(prompt), "slot {slot}");
    }
}

#[test]
fn a_text_that_runs_is_saved_as_far_as_it_is_and_not_erased() {
    let (model, other) = stories(1);
    ask(&other, &some(2, 20));
    let saved = wait(other.save_slot(0)).unwrap();
    let levers = Wrapped::new(model.forward_pass(&EngineOptions { n_seq: 2, ..engine() }).unwrap());
    let gate = levers.gate.clone();
    let held = gate.lock().unwrap();
    let scheduler = Scheduler::start(Box::new(levers), Arc::new(model), SchedulerOptions::default()).unwrap();
    let prompt = some(1, 10);
    let events = scheduler.submit(Request { ignore_eos: true, ..greedy(prompt.clone(), 100) }).unwrap();
    while scheduler.metrics().waiting > 0 {
        std::thread::yield_now();
    }
    // The commands wait for the step that the gate holds up.
    let (mut save, mut erase) = (pin!(scheduler.save_slot(0)), pin!(scheduler.erase_slot(0)));
    let context = &mut Context::from_waker(Waker::noop());
    assert!(save.as_mut().poll(context).is_pending() && erase.as_mut().poll(context).is_pending());
    {
        // Nobody waits for this one.
        let restore = pin!(scheduler.restore_slot(Client::Unknown, saved));
        assert!(restore.poll(context).is_pending());
    }
    drop(held);
    assert_eq!(wait(save).unwrap().ids(), prompt);
    assert!(matches!(wait(erase), Err(SlotError::Busy { slot: 0 })));
    assert!(matches!(wait(scheduler.save_slot(1)), Err(SlotError::Empty { slot: 1 })));
    drop(events);
}

#[test]
fn slots_that_are_not_there_are_refused() {
    let (model, scheduler) = stories(2);
    assert!(matches!(wait(scheduler.save_slot(0)), Err(SlotError::Empty { slot: 0 })));
    assert!(matches!(wait(scheduler.erase_slot(usize::MAX)), Err(SlotError::Empty { .. })));
    let pass = || model.forward_pass(&EngineOptions { n_seq: 3, ..engine() }).unwrap();
    let options = SchedulerOptions { n_parallel: 2, ..Default::default() };
    let replicas = Replicas::start(vec![pass(), pass()], &Arc::new(model.clone()), &options).unwrap();
    assert_eq!(replicas.slots(), [None; 4]);
    assert!(matches!(wait(replicas.save_slot(4)), Err(SlotError::NoSuchSlot { slot: 4, last: 3 })));

    // What is restored in the second replica is found by a prompt, and is there alone.
    let prompt = some(1, 150);
    ask(&scheduler, &prompt);
    let saved = wait(scheduler.save_slot(0)).unwrap();
    wait(replicas.restore_slot(3, Client::Unknown, saved.clone())).unwrap();
    assert_eq!(wait(replicas.save_slot(2)).unwrap(), saved);
    assert!(matches!(wait(replicas.save_slot(0)), Err(SlotError::Empty { slot: 0 })));
    let answer = read(replicas.submit(nine(&[saved.ids(), &[5]].concat())).unwrap());
    assert_eq!(answer.usage.cached_tokens, saved.ids().len());
}
