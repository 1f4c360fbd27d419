//! Sequences of the KV cache that are saved, restored and erased by slot number.

use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use metal_attention::scheduler::{Client, Replicas, Request, Scheduler, SchedulerOptions, SlotError};
use metal_attention::{EngineOptions, Model};

use super::hybrid::{lfm2, token_ids};
use super::support::null::{reference_in, start, start_with_gate, stories};
use super::support::{Controls, engine, few_windows, greedy, read, windowed};

/// The result of a future. Polls it without sleeping.
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

/// The tokens generated after `prompt`, and how many of the prompt's tokens were cached.
fn generate(scheduler: &Scheduler, prompt: &[u32]) -> (Vec<u32>, usize) {
    let answer = read(scheduler.submit(nine(prompt)).unwrap());
    assert_eq!(answer.error, None);
    (answer.ids, answer.usage.cached_tokens)
}

/// With full attention, with a sliding window and with recurrent states.
#[test]
fn restored_sequences_continue_as_the_saved_ones_would() {
    let engine = EngineOptions { n_seq: 4, ..engine() };
    for model in [Model::built_in().unwrap(), windowed(40), lfm2()] {
        let new = || start(&model, &engine, SchedulerOptions { n_parallel: 2, ..Default::default() });
        let first = new();
        let prompt = token_ids(1, 150);
        let (answer, _) = generate(&first, &prompt);
        generate(&first, &token_ids(2, 20));
        // Slot 1 is the sequence that ended before the last one.
        let saved = wait(first.save_slot(1)).unwrap();
        let tokens = [prompt, answer].concat();
        assert_eq!(saved.ids(), &tokens[..tokens.len() - 1]);

        let second = new();
        wait(second.restore_slot(Client::Unknown, saved)).unwrap();
        let prompt = [&tokens[..], &token_ids(3, 20)].concat();
        let (answer, n_cached) = generate(&second, &prompt);
        assert_eq!(n_cached, tokens.len() - 1);
        assert_eq!(answer, reference_in(&model, &engine, &nine(&prompt)).0);
        assert_eq!(second.metrics().prompt_tokens, 21);
        assert_eq!(wait(second.erase_slot(0)).unwrap(), prompt.len() + 8);
        assert_eq!(generate(&second, &prompt).1, 0);
    }
}

#[test]
fn idle_sequences_free_windows_and_states_for_a_restored_one() {
    let engine = few_windows();
    for model in [windowed(40), lfm2()] {
        let new = || start(&model, &engine, SchedulerOptions { n_parallel: 1, cache_ram: 0, ..Default::default() });
        let first = new();
        let prompt = token_ids(1, 150);
        let (answer, _) = generate(&first, &prompt);
        let saved = wait(first.save_slot(0)).unwrap();
        let second = new();
        for i in 2..9 {
            generate(&second, &token_ids(i, 20));
        }
        wait(second.restore_slot(Client::Unknown, saved)).unwrap();
        assert_eq!(generate(&second, &[&prompt[..], &answer, &[5]].concat()).1, 150 + 8);
    }
}

#[test]
fn slots_of_finished_sequences_are_ordered_by_their_ends() {
    let model = Model::built_in().unwrap();
    let engine = EngineOptions { n_seq: 4, ..engine() };
    let scheduler = start(&model, &engine, SchedulerOptions { n_parallel: 1, ..Default::default() });
    let (first, second) = (token_ids(1, 150), token_ids(2, 20));
    generate(&scheduler, &first);
    generate(&scheduler, &second);
    // A sequence that shares the beginning of the first one does not move that one to a later end.
    let third = [&first[..100], &token_ids(3, 20)].concat();
    assert_eq!(generate(&scheduler, &third).1, 100);
    for (slot, prompt) in [third, second, first].iter().enumerate() {
        let saved = wait(scheduler.save_slot(slot)).unwrap();
        assert!(saved.ids().starts_with(prompt), "slot {slot}");
    }
}

#[test]
fn a_running_sequence_is_saved_up_to_its_position_and_not_erased() {
    let (model, other) = stories(1);
    generate(&other, &token_ids(2, 20));
    let saved = wait(other.save_slot(0)).unwrap();
    let engine = EngineOptions { n_seq: 2, ..engine() };
    let (scheduler, gate) = start_with_gate(&model, &engine, SchedulerOptions::default());
    let held = gate.close();
    let prompt = token_ids(1, 10);
    let events = scheduler.submit(Request { ignore_eos: true, ..greedy(prompt.clone(), 100) }).unwrap();
    while scheduler.metrics().waiting > 0 {
        std::thread::yield_now();
    }
    // The commands wait for the end of the step that waits at the gate.
    let (mut save, mut erase) = (pin!(scheduler.save_slot(0)), pin!(scheduler.erase_slot(0)));
    let context = &mut Context::from_waker(Waker::noop());
    assert!(save.as_mut().poll(context).is_pending() && erase.as_mut().poll(context).is_pending());
    {
        // This command's future is dropped before the command runs.
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
fn empty_and_missing_slots_are_refused() {
    let (model, scheduler) = stories(2);
    assert!(matches!(wait(scheduler.save_slot(0)), Err(SlotError::Empty { slot: 0 })));
    assert!(matches!(wait(scheduler.erase_slot(usize::MAX)), Err(SlotError::Empty { .. })));
    let pass = || Controls::default().null_pass(&model, &EngineOptions { n_seq: 3, ..engine() });
    let options = SchedulerOptions { n_parallel: 2, ..Default::default() };
    let replicas = Replicas::start(vec![pass().into(), pass().into()], &Arc::new(model.clone()), &options).unwrap();
    assert_eq!(replicas.slots(), [None; 4]);
    assert!(matches!(wait(replicas.save_slot(4)), Err(SlotError::NoSuchSlot { slot: 4, last: 3 })));

    // A sequence that is restored in the second replica is found there by a prompt, and is not in the first.
    let prompt = token_ids(1, 150);
    generate(&scheduler, &prompt);
    let saved = wait(scheduler.save_slot(0)).unwrap();
    wait(replicas.restore_slot(3, Client::Unknown, saved.clone())).unwrap();
    assert_eq!(wait(replicas.save_slot(2)).unwrap(), saved);
    assert!(matches!(wait(replicas.save_slot(0)), Err(SlotError::Empty { slot: 0 })));
    let answer = read(replicas.submit(nine(&[saved.ids(), &[5]].concat())).unwrap());
    assert_eq!(answer.usage.cached_tokens, saved.ids().len());
}
