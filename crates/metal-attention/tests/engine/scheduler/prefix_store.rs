//! The prefix store: sequences that lost their KV pages are restored from host memory or from disk.

use std::net::{IpAddr, Ipv4Addr};
use std::ops::ControlFlow;

use metal_attention::sampling::SamplerOptions;
use metal_attention::scheduler::{CacheDisk, Client, Request, Scheduler, SchedulerOptions, StartError, StoreUse};
use metal_attention::{EngineOptions, GenerateOptions, Generator, Model};

use super::hybrid::{lfm2, token_ids};
use super::support::null::{reference_in, start, start_with_gate};
use super::support::{engine, few_windows, greedy, read, windowed};

const MIB: u64 = 1 << 20;

/// An engine whose KV cache has pages for one sequence of 256 tokens.
fn one_sequence() -> EngineOptions {
    EngineOptions { n_seq: 3, n_cache: Some(256), ..engine() }
}

/// Scheduler options with one slot and `cache_ram` bytes of the prefix store in host memory.
fn store_options(cache_ram: u64) -> SchedulerOptions {
    SchedulerOptions { n_parallel: 1, cache_ram, ..Default::default() }
}

/// Generates nine tokens after `ids`; checks that they equal the reference. Returns the number of cached tokens and the
/// generated ids.
fn generate(model: &Model, scheduler: &Scheduler, client: Client, ids: &[u32]) -> (usize, Vec<u32>) {
    let request = || Request { client, ignore_eos: true, ..greedy(ids.to_vec(), 9) };
    let answer = read(scheduler.submit(request()).unwrap());
    assert_eq!(answer.error, None);
    assert_eq!((answer.ids.clone(), answer.text), reference_in(model, &one_sequence(), &request()));
    (answer.usage.cached_tokens, answer.ids)
}

/// Conversations of two turns each: all first turns, then all second ones. Returns for each second turn the number of cached
/// tokens, and the number of tokens that the first turn evaluated.
fn second_turns(model: &Model, scheduler: &Scheduler, clients: &[Client]) -> Vec<(usize, usize)> {
    let first = |i: usize| {
        let prompt = token_ids(i, 150);
        let (cached, answer) = generate(model, scheduler, clients[i], &prompt);
        assert_eq!(cached, 0);
        [prompt, answer].concat()
    };
    let sequences: Vec<_> = (0..clients.len()).map(first).collect();
    let second = |(i, tokens): (usize, &Vec<u32>)| {
        let prompt = [&tokens[..], &token_ids(i + 100, 20)].concat();
        (generate(model, scheduler, clients[i], &prompt).0, tokens.len() - 1)
    };
    sequences.iter().enumerate().map(second).collect()
}

#[test]
fn more_conversations_continue_than_the_cache_has_pages_for() {
    const N: usize = 6;
    for model in [Model::built_in().unwrap(), windowed(40), lfm2()] {
        let scheduler = start(&model, &one_sequence(), store_options(64 * MIB));
        let turns = second_turns(&model, &scheduler, &[Client::Unknown; N]);
        assert!(turns.iter().all(|(cached, n)| cached == n), "{turns:?}");
        let metrics = scheduler.metrics();
        assert_eq!(metrics.prompt_tokens, (N * 150 + N * 21) as u64);
        // The last first turn may still be in the KV cache when its second turn arrives.
        assert!((N as u64 - 1..=N as u64).contains(&metrics.stored.hits), "{:?}", metrics.stored);
        assert_eq!(metrics.stored.tokens, metrics.stored.hits * 158);
        assert!(metrics.stored.ram_sequences >= N - 1 && metrics.stored.ram_bytes < 64 * MIB, "{:?}", metrics.stored);
        assert_eq!((metrics.stored.disk_sequences, metrics.stored.disk_bytes), (0, 0));
        // Without a store the first turns are evaluated again.
        let scheduler = start(&model, &one_sequence(), store_options(0));
        let turns = second_turns(&model, &scheduler, &[Client::Unknown; N]);
        assert!(turns[..N - 1].iter().all(|(cached, _)| *cached == 0), "{turns:?}");
        assert_eq!(scheduler.metrics().stored, StoreUse::default());
    }
}

#[test]
fn idle_sequences_free_windows_and_states_for_a_restored_one() {
    for model in [windowed(40), lfm2()] {
        let scheduler = start(&model, &few_windows(), store_options(64 * MIB));
        let generate = |ids: &[u32]| generate(&model, &scheduler, Client::Unknown, ids);
        let prompt = token_ids(1, 150);
        let tokens = [&prompt[..], &generate(&prompt).1].concat();
        for i in 2..9 {
            generate(&token_ids(i, 20));
        }
        assert_eq!(generate(&[&tokens[..], &[5]].concat()).0, tokens.len() - 1);
    }
}

#[test]
fn clients_with_keys_find_only_their_own_sequences() {
    let model = Model::built_in().unwrap();
    let address = |n: u8| Client::Address(IpAddr::V4(Ipv4Addr::new(10, 0, 0, n)));
    let prompt = token_ids(1, 150);
    for (from, to, is_found) in [
        (Client::Key(1), Client::Key(1), true),
        (Client::Key(1), Client::Key(2), false),
        (Client::Key(1), Client::Unknown, false),
        (address(1), Client::Key(1), false),
        (address(1), address(2), true),
        (address(1), Client::Unknown, true),
    ] {
        let scheduler = start(&model, &one_sequence(), store_options(64 * MIB));
        generate(&model, &scheduler, from, &prompt);
        // A second prompt takes the KV pages of the first sequence.
        generate(&model, &scheduler, from, &token_ids(2, 200));
        let cached = generate(&model, &scheduler, to, &prompt).0;
        assert_eq!(cached, if is_found { 149 } else { 0 }, "{from:?}, {to:?}");
    }
}

#[test]
fn limits_are_kept_and_sequences_that_exceed_memory_are_written_to_disk() {
    const N: usize = 6;
    let model = Model::built_in().unwrap();
    let clients: Vec<_> = (0..N).map(Client::Key).collect();
    let probe = start(&model, &one_sequence(), store_options(64 * MIB));
    second_turns(&model, &probe, &clients[..2]);
    let sequence_bytes = probe.metrics().stored.ram_bytes / probe.metrics().stored.ram_sequences as u64;
    let folder = tempfile::tempdir().unwrap();
    let disk = |bytes| Some(CacheDisk { folder: folder.path().join("a/b"), bytes });
    for (ram, disk, sequences) in [
        (sequence_bytes * 5 / 2, None, (2, 0)),
        (sequence_bytes * 5 / 2, disk(sequence_bytes * 7 / 2), (2, 3)),
        (0, disk(sequence_bytes * 5 / 2), (0, 2)),
        (sequence_bytes / 2, disk(sequence_bytes * 100), (0, 5)),
        (sequence_bytes * 5 / 2, disk(sequence_bytes / 2), (2, 0)),
    ] {
        let scheduler =
            start(&model, &one_sequence(), SchedulerOptions { cache_disk: disk.clone(), ..store_options(ram) });
        for (i, &client) in clients.iter().enumerate() {
            generate(&model, &scheduler, client, &token_ids(i, 150));
            let stored = scheduler.metrics().stored;
            let disk_limit = disk.as_ref().map_or(0, |disk| disk.bytes);
            assert!(stored.ram_bytes <= ram && stored.disk_bytes <= disk_limit, "{stored:?}");
        }
        let stored = scheduler.metrics().stored;
        assert_eq!((stored.ram_sequences, stored.disk_sequences), sequences);
        // The sequence before the last was evicted last, the first one first.
        assert_eq!(generate(&model, &scheduler, clients[N - 2], &token_ids(N - 2, 150)).0, 149, "{sequences:?}");
        let is_kept = disk.is_some_and(|disk| disk.bytes > sequence_bytes * N as u64);
        assert_eq!(
            generate(&model, &scheduler, clients[0], &token_ids(0, 150)).0,
            if is_kept { 149 } else { 0 },
            "{sequences:?}"
        );
    }
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    let options = SchedulerOptions { cache_disk: Some(CacheDisk { folder: file, bytes: MIB }), ..store_options(0) };
    let refused = Scheduler::start(model.forward_pass(&one_sequence()).unwrap(), model.clone().into(), options);
    assert!(matches!(refused.err(), Some(StartError::CacheDisk { .. })));
    #[cfg(unix)]
    assert_eq!(std::fs::read_dir(folder.path().join("a/b")).unwrap().count(), 0, "files have no names");
}

#[test]
fn a_sequence_too_large_for_the_store_does_not_evict_its_prefix() {
    let model = Model::built_in().unwrap();
    let (prompt, longer, other) = (token_ids(1, 150), token_ids(1, 220), token_ids(2, 220));
    let probe = start(&model, &one_sequence(), store_options(64 * MIB));
    generate(&model, &probe, Client::Unknown, &prompt);
    generate(&model, &probe, Client::Unknown, &other);
    let scheduler = start(&model, &one_sequence(), store_options(probe.metrics().stored.ram_bytes));
    // `other` evicts the prefix, which fits the store. Then it evicts the longer sequence, which does not fit.
    for ids in [&prompt, &other, &longer, &other] {
        generate(&model, &scheduler, Client::Unknown, ids);
    }
    assert_eq!(scheduler.metrics().stored.ram_sequences, 1);
    assert_eq!(generate(&model, &scheduler, Client::Unknown, &prompt).0, 149);
}

#[test]
fn a_waiting_request_evicts_no_finished_sequence() {
    let model = Model::built_in().unwrap();
    let engine = EngineOptions { n_ctx: Some(512), n_cache: Some(512), n_seq: 4, ..engine() };
    let (scheduler, gate) = start_with_gate(&model, &engine, SchedulerOptions { n_parallel: 2, ..Default::default() });
    let request = |ids: Vec<u32>, n| Request { ignore_eos: true, ..greedy(ids, n) };
    let prompt = token_ids(1, 100);
    let finished = read(scheduler.submit(request(prompt.clone(), 5)).unwrap());
    // Two of eight pages belong to the finished sequence. The running one has three or more, and another would need six.
    let held = gate.close();
    let runs = scheduler.submit(request(token_ids(2, 150), 100)).unwrap();
    held.let_one_step_pass();
    let waits = scheduler.submit(request(token_ids(3, 350), 5)).unwrap();
    (0..50).for_each(|_| held.let_one_step_pass());
    drop(waits);
    drop(held);
    assert_eq!(read(runs).error, None);
    let prompt = [prompt, finished.ids, vec![7, 8]].concat();
    assert_eq!(read(scheduler.submit(request(prompt, 5)).unwrap()).usage.cached_tokens, 104);
    assert_eq!(scheduler.metrics().preemptions, 0);
}

/// A sequence that is preempted for lack of pages continues from where it was.
#[test]
fn preempted_sequences_are_restored_from_the_store() {
    let model = Model::built_in().unwrap();
    let engine = EngineOptions { n_cache: Some(256), n_seq: 2, ..engine() };
    let evaluated = |cache_ram: u64| {
        let options = SchedulerOptions { n_parallel: 2, cache_ram, ..Default::default() };
        let (scheduler, gate) = start_with_gate(&model, &engine, options);
        let request = |i: usize| Request { ignore_eos: true, ..greedy(token_ids(i, 60), 100) };
        // Both are submitted before the first step ends.
        let held = gate.close();
        let events = [1, 2].map(|i| scheduler.submit(request(i)).unwrap());
        drop(held);
        for (i, events) in (1..).zip(events) {
            let answer = read(events);
            assert_eq!((answer.ids, answer.text), reference_in(&model, &engine, &request(i)));
        }
        let metrics = scheduler.metrics();
        assert!(metrics.preemptions > 0, "{metrics:?}");
        metrics.prompt_tokens
    };
    assert!(evaluated(0) > 200);
    assert!(evaluated(64 * MIB) < 140);
}

/// The chat template drops the reasoning of earlier answers, which is longer than the window and the number of tokens by
/// which a sequence can be cut back. Each turn evaluates only the new tokens of its prompt.
#[test]
fn windows_are_saved_where_answers_begin() {
    const N_REASONING: usize = 160;
    let model = windowed(40);
    let engine = EngineOptions { n_ctx: Some(1024), n_seq: 2, n_ubatch: Some(16), ..engine() };
    for cache_ram in [64 * MIB, 0] {
        let scheduler = start(&model, &engine, SchedulerOptions { n_batch: Some(64), ..store_options(cache_ram) });
        let (mut history, mut tokens) = (token_ids(0, 150), Vec::new());
        for turn in 1..4 {
            history.extend(token_ids(turn, 30));
            // The tokens that begin an answer; the last two of them begin the reasoning.
            let prompt = [&history[..], &[11, 12, 13, 14, 15]].concat();
            let n_common = n_common(&prompt, &tokens);
            let request = || Request { ignore_eos: true, ..greedy(prompt.clone(), N_REASONING) };
            let answer = read(scheduler.submit(request()).unwrap());
            let large_batches = EngineOptions { n_ubatch: Some(512), ..engine.clone() };
            assert_eq!(
                (&answer.ids, &answer.text),
                (&reference_in(&model, &large_batches, &request()).0, &answer.text)
            );
            let expected = if cache_ram > 0 { n_common } else { 0 };
            assert_eq!(answer.usage.cached_tokens, expected, "turn {turn} with {cache_ram} bytes");
            tokens = [&prompt[..], &answer.ids].concat();
            history.extend([11, 12, 13]);
            history.extend(&answer.ids[N_REASONING - 20..]);
        }
    }
}

/// The length of the common prefix.
fn n_common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

#[test]
fn a_generator_saves_windows_where_answers_begin() {
    const N_REASONING: usize = 160;
    let model = windowed(40);
    let engine = EngineOptions { n_ctx: Some(1024), n_ubatch: Some(16), ..engine() };
    let large_batches = EngineOptions { n_ubatch: Some(512), ..engine.clone() };
    let mut generator = Generator::new(&model, &engine, SamplerOptions::greedy()).unwrap();
    for kept in [64 * MIB, 0] {
        generator.keep_prompt_ends(kept);
        let (mut history, mut tokens) = (token_ids(0, 150), Vec::new());
        for turn in 1..4 {
            history.extend(token_ids(turn, 30));
            let prompt = [&history[..], &[11, 12, 13, 14, 15]].concat();
            let n_common = n_common(&prompt, &tokens);
            generator.prompt(&prompt, |_, _| ControlFlow::Continue(())).unwrap();
            let options = GenerateOptions { n_predict: Some(N_REASONING), ignore_eos: true, ..Default::default() };
            let mut generation = generator.generate(options);
            let answer: Vec<u32> = generation.by_ref().map(|token| token.unwrap().id).collect();
            let cached = generation.timings().cached_tokens;
            let request = Request { ignore_eos: true, ..greedy(prompt.clone(), N_REASONING) };
            assert_eq!(answer, super::support::reference_in(&model, &large_batches, &request).0);
            assert_eq!(cached, if kept > 0 { n_common } else { 0 }, "turn {turn} with {kept} bytes");
            tokens = [&prompt[..], &answer].concat();
            history.extend([11, 12, 13]);
            history.extend(&answer[N_REASONING - 20..]);
        }
        generator.prompt(&[9], |_, _| ControlFlow::Continue(())).unwrap();
    }
}
