//! The events of the KV cache's observer: a prompt finds exactly the pages that the observer was notified of.

use std::collections::BTreeMap;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use super::support::{Controls, encode, engine, greedy, read};
use metal_attention::scheduler::{
    BlockId, CacheEvent, CacheObserver, Request, Scheduler, SchedulerOptions, SchedulerParts,
};
use metal_attention::{EngineOptions, Model};
use proptest::prelude::*;

const PAGE: usize = 64;

/// The blocks that are stored, as the events so far state: the tokens from the beginning of the sequence up to the end of
/// each block.
#[derive(Default)]
struct Replay(BTreeMap<BlockId, Vec<u32>>);

impl Replay {
    /// Applies an event; panics if it contradicts earlier ones.
    fn apply(&mut self, event: CacheEvent) {
        match event {
            CacheEvent::Stored { parent, blocks, tokens, spans } => {
                assert_eq!((tokens.len(), spans.len()), (blocks.len() * PAGE, 0));
                let mut tokens_so_far = parent.map_or_else(Vec::new, |parent| self.0[&parent].clone());
                for (block, tokens) in blocks.into_iter().zip(tokens.chunks(PAGE)) {
                    tokens_so_far.extend_from_slice(tokens);
                    assert_eq!(self.0.insert(block, tokens_so_far.clone()), None);
                }
            }
            CacheEvent::Removed { blocks } => {
                for block in &blocks {
                    assert!(self.0.remove(block).is_some(), "{block:?} was not there");
                }
            }
        }
    }

    /// Number of leading whole pages of `ids` that are stored.
    fn pages_of(&self, ids: &[u32]) -> usize {
        let stored = |n: &usize| self.0.values().any(|tokens_so_far| tokens_so_far == &ids[..n * PAGE]);
        (1..=ids.len() / PAGE).take_while(stored).count()
    }
}

/// A scheduler with one slot for the built-in model, in `n_seq` sequences that share `n_pages` KV pages, and its events.
fn observed(n_seq: usize, n_pages: usize) -> (Model, Scheduler, mpsc::Receiver<CacheEvent>) {
    let model = Model::built_in().unwrap();
    let engine = EngineOptions { n_seq, n_cache: Some(n_pages * PAGE), ..engine() };
    let (sender, receiver) = mpsc::channel();
    let observer: CacheObserver = Box::new(move |event| drop(sender.send(event)));
    let parts = SchedulerParts { observer: Some(observer), ..Default::default() };
    let pass = Controls::default().null_pass(&model, &engine);
    let options = SchedulerOptions::default();
    let scheduler = Scheduler::start_with(pass, Arc::new(model.clone()), options, parts).unwrap();
    (model, scheduler, receiver)
}

/// Waits until the scheduler is idle and has sent its events.
fn settle(scheduler: &Scheduler) {
    while scheduler.metrics().running > 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    // A request counts as finished a moment before the observer is notified of its pages.
    std::thread::sleep(Duration::from_millis(50));
}

#[test]
fn pages_are_reported_when_they_are_full_and_when_they_are_freed() {
    let (model, scheduler, events) = observed(2, 8);
    let story = encode(&model, "Once upon a time, there was a little girl");
    let prompt: Vec<u32> = story.iter().copied().cycle().take(70).collect();
    let answer = read(scheduler.submit(Request { ignore_eos: true, ..greedy(prompt.clone(), 100) }).unwrap());
    settle(&scheduler);
    let tokens_so_far = [&prompt[..], &answer.ids].concat();
    let reported: Vec<_> = events.try_iter().collect();
    let page = |i: usize| tokens_so_far[i * PAGE..(i + 1) * PAGE].to_vec();
    // The last token is not evaluated: 169 tokens are in the KV cache, two whole pages and a part of a third.
    let stored = |i: usize| CacheEvent::Stored {
        parent: i.checked_sub(1).map(|i| BlockId(i as u64)),
        blocks: vec![BlockId(i as u64)],
        tokens: page(i),
        spans: Vec::new(),
    };
    assert_eq!(reported, [stored(0), stored(1)]);
    // Two other requests take both sequences.
    for first in [5, 6] {
        read(scheduler.submit(greedy(vec![first; 3], 2)).unwrap());
    }
    settle(&scheduler);
    let removed = CacheEvent::Removed { blocks: vec![BlockId(1), BlockId(0)] };
    assert_eq!(events.try_iter().collect::<Vec<_>>(), [removed]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..Default::default() })]
    #[test]
    fn a_prompt_finds_the_pages_that_were_reported(
        // For each request: the token series its prompt begins with, how many tokens of it, how many others follow, and how
        // many are generated.
        plans in prop::collection::vec((0..3usize, prop_oneof![0..200usize, 60..70usize], 1..40usize, 1..40usize), 1..12),
        n_seq in 1..5usize,
        n_pages in 4..12usize,
    ) {
        let (_, scheduler, events) = observed(n_seq, n_pages);
        let mut replay = Replay::default();
        for (i, (base, shared, n_suffix, n)) in plans.into_iter().enumerate() {
            let shared = (0..shared).map(|at| ((at * at * 31 + at * 7 + 3 + 11 * base) % 509 + 3) as u32);
            let suffix = (0..n_suffix).map(|at| ((at * 13 + i * 101) % 509 + 3) as u32);
            let prompt: Vec<u32> = shared.chain(suffix).collect();
            settle(&scheduler);
            for event in events.try_iter() {
                replay.apply(event);
            }
            let expected = replay.pages_of(&prompt[..prompt.len() - 1]);
            let answer = read(scheduler.submit(greedy(prompt, n)).unwrap());
            prop_assert_eq!(answer.usage.cached_tokens / PAGE, expected);
        }
    }
}
