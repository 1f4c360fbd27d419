//! Finished texts that gave their places in the KV cache up, and come back from main memory or from disk.

use std::net::{IpAddr, Ipv4Addr};
use std::ops::ControlFlow;

use metal_attention::sampling::SamplerOptions;
use metal_attention::scheduler::{CacheDisk, Client, Request, Scheduler, SchedulerOptions, StartError, StoreUse};
use metal_attention::{EngineOptions, GenerateOptions, Generator, Model};

use super::hybrid::{lfm2, some};
use super::support::{alone_in, engine, few_windows, greedy, read, start, windowed};

const MIB: u64 = 1 << 20;

/// Room for one text of 256 tokens in the KV cache.
fn small() -> EngineOptions {
    EngineOptions { n_seq: 3, n_cache: Some(256), ..engine() }
}

fn with_ram(cache_ram: u64) -> SchedulerOptions {
    SchedulerOptions { n_parallel: 1, cache_ram, ..Default::default() }
}

/// The tokens that an answer found, and those it has; it is that of the text alone.
fn ask(model: &Model, scheduler: &Scheduler, client: Client, ids: &[u32]) -> (usize, Vec<u32>) {
    let request = || Request { client, ignore_eos: true, ..greedy(ids.to_vec(), 9) };
    let answer = read(scheduler.submit(request()).unwrap());
    assert_eq!(answer.error, None);
    assert_eq!((answer.ids.clone(), answer.text), alone_in(model, &small(), &request()));
    (answer.usage.cached_tokens, answer.ids)
}

/// Conversations of two turns, side by side; how many tokens each second turn found, and the first one has in the cache.
fn second_turns(model: &Model, scheduler: &Scheduler, clients: &[Client]) -> Vec<(usize, usize)> {
    let first = |i: usize| {
        let prompt = some(i, 150);
        let (cached, answer) = ask(model, scheduler, clients[i], &prompt);
        assert_eq!(cached, 0);
        [prompt, answer].concat()
    };
    let texts: Vec<_> = (0..clients.len()).map(first).collect();
    let second = |(i, text): (usize, &Vec<u32>)| {
        let prompt = [&text[..], &some(i + 100, 20)].concat();
        (ask(model, scheduler, clients[i], &prompt).0, text.len() - 1)
    };
    texts.iter().enumerate().map(second).collect()
}

#[test]
fn more_conversations_go_on_than_the_cache_has_room_for() {
    const N: usize = 6;
    for model in [Model::built_in().unwrap(), windowed(40), lfm2()] {
        let scheduler = start(&model, &small(), with_ram(64 * MIB));
        let turns = second_turns(&model, &scheduler, &[Client::Unknown; N]);
        assert!(turns.iter().all(|(cached, n)| cached == n), "{turns:?}");
        let metrics = scheduler.metrics();
        assert_eq!(metrics.prompt_tokens, (N * 150 + N * 21) as u64);
        // The last first turn is still in the cache as its second turn comes, or is not.
        assert!((N as u64 - 1..=N as u64).contains(&metrics.stored.hits), "{:?}", metrics.stored);
        assert_eq!(metrics.stored.tokens, metrics.stored.hits * 158);
        assert!(metrics.stored.ram_sequences >= N - 1 && metrics.stored.ram_bytes < 64 * MIB, "{:?}", metrics.stored);
        assert_eq!((metrics.stored.disk_sequences, metrics.stored.disk_bytes), (0, 0));
        // Without a store they are evaluated again.
        let scheduler = start(&model, &small(), with_ram(0));
        let turns = second_turns(&model, &scheduler, &[Client::Unknown; N]);
        assert!(turns[..N - 1].iter().all(|(cached, _)| *cached == 0), "{turns:?}");
        assert_eq!(scheduler.metrics().stored, StoreUse::default());
    }
}

#[test]
fn idle_texts_give_their_windows_and_states_to_one_that_comes_back() {
    for model in [windowed(40), lfm2()] {
        let scheduler = start(&model, &few_windows(), with_ram(64 * MIB));
        let ask = |ids: &[u32]| ask(&model, &scheduler, Client::Unknown, ids);
        let prompt = some(1, 150);
        let text = [&prompt[..], &ask(&prompt).1].concat();
        for i in 2..9 {
            ask(&some(i, 20));
        }
        assert_eq!(ask(&[&text[..], &[5]].concat()).0, text.len() - 1);
    }
}

#[test]
fn clients_with_keys_find_their_own_texts_alone() {
    let model = Model::built_in().unwrap();
    let address = |n: u8| Client::Address(IpAddr::V4(Ipv4Addr::new(10, 0, 0, n)));
    let prompt = some(1, 150);
    for (from, to, is_found) in [
        (Client::Key(1), Client::Key(1), true),
        (Client::Key(1), Client::Key(2), false),
        (Client::Key(1), Client::Unknown, false),
        (address(1), Client::Key(1), false),
        (address(1), address(2), true),
        (address(1), Client::Unknown, true),
    ] {
        let scheduler = start(&model, &small(), with_ram(64 * MIB));
        ask(&model, &scheduler, from, &prompt);
        // It gives its place up.
        ask(&model, &scheduler, from, &some(2, 200));
        let cached = ask(&model, &scheduler, to, &prompt).0;
        assert_eq!(cached, if is_found { 149 } else { 0 }, "{from:?}, {to:?}");
    }
}

#[test]
fn limits_hold_and_what_memory_has_no_room_for_goes_to_disk() {
    const N: usize = 6;
    let model = Model::built_in().unwrap();
    let clients: Vec<_> = (0..N).map(Client::Key).collect();
    let probe = start(&model, &small(), with_ram(64 * MIB));
    second_turns(&model, &probe, &clients[..2]);
    let one = probe.metrics().stored.ram_bytes / probe.metrics().stored.ram_sequences as u64;
    let folder = tempfile::tempdir().unwrap();
    let disk = |bytes| Some(CacheDisk { folder: folder.path().join("a/b"), bytes });
    for (ram, disk, texts) in [
        (one * 5 / 2, None, (2, 0)),
        (one * 5 / 2, disk(one * 7 / 2), (2, 3)),
        (0, disk(one * 5 / 2), (0, 2)),
        (one / 2, disk(one * 100), (0, 5)),
        (one * 5 / 2, disk(one / 2), (2, 0)),
    ] {
        let scheduler = start(&model, &small(), SchedulerOptions { cache_disk: disk.clone(), ..with_ram(ram) });
        for (i, &client) in clients.iter().enumerate() {
            ask(&model, &scheduler, client, &some(i, 150));
            let stored = scheduler.metrics().stored;
            let most = disk.as_ref().map_or(0, |disk| disk.bytes);
            assert!(stored.ram_bytes <= ram && stored.disk_bytes <= most, "{stored:?}");
        }
        let stored = scheduler.metrics().stored;
        assert_eq!((stored.ram_sequences, stored.disk_sequences), texts);
        // The text before the last was given up last, the first one first.
        assert_eq!(ask(&model, &scheduler, clients[N - 2], &some(N - 2, 150)).0, 149, "{texts:?}");
        let is_kept = disk.is_some_and(|disk| disk.bytes > one * N as u64);
        assert_eq!(ask(&model, &scheduler, clients[0], &some(0, 150)).0, if is_kept { 149 } else { 0 }, "{texts:?}");
    }
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    let options = SchedulerOptions { cache_disk: Some(CacheDisk { folder: file, bytes: MIB }), ..with_ram(0) };
    let refused = Scheduler::start(model.forward_pass(&small()).unwrap(), model.clone().into(), options);
    assert!(matches!(refused.err(), Some(StartError::CacheDisk { .. })));
    #[cfg(unix)]
    assert_eq!(std::fs::read_dir(folder.path().join("a/b")).unwrap().count(), 0, "files have no names");
}

#[test]
fn a_text_too_long_to_be_kept_leaves_its_beginning_there() {
    let model = Model::built_in().unwrap();
    let (prompt, longer, other) = (some(1, 150), some(1, 220), some(2, 220));
    let probe = start(&model, &small(), with_ram(64 * MIB));
    ask(&model, &probe, Client::Unknown, &prompt);
    ask(&model, &probe, Client::Unknown, &other);
    let scheduler = start(&model, &small(), with_ram(probe.metrics().stored.ram_bytes));
    // `other` has the beginning give its place up, which is kept; then the longer text does, which has no room.
    for ids in [&prompt, &other, &longer, &other] {
        ask(&model, &scheduler, Client::Unknown, ids);
    }
    assert_eq!(scheduler.metrics().stored.ram_sequences, 1);
    assert_eq!(ask(&model, &scheduler, Client::Unknown, &prompt).0, 149);
}

#[test]
fn a_request_that_waits_takes_nothing_from_finished_texts() {
    let model = Model::built_in().unwrap();
    let engine = EngineOptions { n_ctx: Some(512), n_cache: Some(512), n_seq: 4, ..engine() };
    let scheduler = start(&model, &engine, SchedulerOptions { n_parallel: 2, ..Default::default() });
    let request = |ids: Vec<u32>, n| Request { ignore_eos: true, ..greedy(ids, n) };
    let prompt = some(1, 100);
    let finished = read(scheduler.submit(request(prompt.clone(), 5)).unwrap());
    // Two pages of eight are those of the finished text; what runs has three and more, and another one would need six.
    let mut runs = scheduler.submit(request(some(2, 150), 100)).unwrap();
    let next = |events: &mut metal_attention::scheduler::Events, n: usize| {
        for _ in 0..n {
            events.blocking_recv().unwrap();
        }
    };
    next(&mut runs, 1);
    let waits = scheduler.submit(request(some(3, 350), 5)).unwrap();
    next(&mut runs, 50);
    drop(waits);
    assert_eq!(read(runs).error, None);
    let prompt = [prompt, finished.ids, vec![7, 8]].concat();
    assert_eq!(read(scheduler.submit(request(prompt, 5)).unwrap()).usage.cached_tokens, 104);
    assert_eq!(scheduler.metrics().preemptions, 0);
}

/// A text that loses its place for want of pages goes on from where it was.
#[test]
fn what_is_put_off_is_not_evaluated_again() {
    let model = Model::built_in().unwrap();
    let engine = EngineOptions { n_cache: Some(256), n_seq: 2, ..engine() };
    let evaluated = |cache_ram: u64| {
        let options = SchedulerOptions { n_parallel: 2, cache_ram, ..Default::default() };
        let scheduler = start(&model, &engine, options);
        let request = |i: usize| Request { ignore_eos: true, ..greedy(some(i, 60), 100) };
        let events = [1, 2].map(|i| scheduler.submit(request(i)).unwrap());
        for (i, events) in (1..).zip(events) {
            let answer = read(events);
            assert_eq!((answer.ids, answer.text), alone_in(&model, &engine, &request(i)));
        }
        let metrics = scheduler.metrics();
        assert!(metrics.preemptions > 0, "{metrics:?}");
        metrics.prompt_tokens
    };
    assert!(evaluated(0) > 200);
    assert!(evaluated(64 * MIB) < 140);
}

/// A template drops the thoughts of earlier answers, which are longer than the window and what can be taken back: each turn
/// evaluates what is new in its prompt alone.
#[test]
fn windows_are_kept_where_answers_begin() {
    const THOUGHTS: usize = 160;
    let model = windowed(40);
    let engine = EngineOptions { n_ctx: Some(1024), n_seq: 2, n_ubatch: Some(16), ..engine() };
    for cache_ram in [64 * MIB, 0] {
        let scheduler = start(&model, &engine, SchedulerOptions { n_batch: Some(64), ..with_ram(cache_ram) });
        let (mut history, mut text) = (some(0, 150), Vec::new());
        for turn in 1..4 {
            history.extend(some(turn, 30));
            // What begins an answer; the last two of these begin thoughts.
            let prompt = [&history[..], &[11, 12, 13, 14, 15]].concat();
            let n_common = n_common(&prompt, &text);
            let request = || Request { ignore_eos: true, ..greedy(prompt.clone(), THOUGHTS) };
            let answer = read(scheduler.submit(request()).unwrap());
            let room_for_all = EngineOptions { n_ubatch: Some(512), ..engine.clone() };
            assert_eq!((&answer.ids, &answer.text), (&alone_in(&model, &room_for_all, &request()).0, &answer.text));
            let expected = if cache_ram > 0 { n_common } else { 0 };
            assert_eq!(answer.usage.cached_tokens, expected, "turn {turn} with {cache_ram} bytes");
            text = [&prompt[..], &answer.ids].concat();
            history.extend([11, 12, 13]);
            history.extend(&answer.ids[THOUGHTS - 20..]);
        }
    }
}

fn n_common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

#[test]
fn a_generator_keeps_windows_too() {
    const THOUGHTS: usize = 160;
    let model = windowed(40);
    let engine = EngineOptions { n_ctx: Some(1024), n_ubatch: Some(16), ..engine() };
    let room_for_all = EngineOptions { n_ubatch: Some(512), ..engine.clone() };
    let mut generator = Generator::new(&model, &engine, SamplerOptions::greedy()).unwrap();
    for kept in [64 * MIB, 0] {
        generator.keep_prompt_ends(kept);
        let (mut history, mut text) = (some(0, 150), Vec::new());
        for turn in 1..4 {
            history.extend(some(turn, 30));
            let prompt = [&history[..], &[11, 12, 13, 14, 15]].concat();
            let n_common = n_common(&prompt, &text);
            generator.prompt(&prompt, |_, _| ControlFlow::Continue(())).unwrap();
            let options = GenerateOptions { n_predict: Some(THOUGHTS), ignore_eos: true, ..Default::default() };
            let mut generation = generator.generate(options);
            let answer: Vec<u32> = generation.by_ref().map(|token| token.unwrap().id).collect();
            let cached = generation.timings().cached_tokens;
            let request = Request { ignore_eos: true, ..greedy(prompt.clone(), THOUGHTS) };
            assert_eq!(answer, alone_in(&model, &room_for_all, &request).0);
            assert_eq!(cached, if kept > 0 { n_common } else { 0 }, "turn {turn} with {kept} bytes");
            text = [&prompt[..], &answer].concat();
            history.extend([11, 12, 13]);
            history.extend(&answer[THOUGHTS - 20..]);
        }
        generator.prompt(&[9], |_, _| ControlFlow::Continue(())).unwrap();
    }
}
