//! Texts of a model whose layers keep a recurrent state: they can be cut back only to where it was kept.

use super::support::{alone_in, engine, greedy, read, start};
use metal_attention::gguf::GgufFile;
use metal_attention::scheduler::{Client, Request, SchedulerOptions};
use metal_attention::{EngineOptions, Model, ModelOptions};
use metal_attention_testing::models::more_architectures;

/// Tokens between two states that are kept.
const PAGE: usize = 64;

pub fn lfm2() -> Model {
    let file = GgufFile::from_bytes(&more_architectures()["lfm2.gguf"]).unwrap();
    Model::from_gguf(file, &ModelOptions::default()).unwrap()
}

pub fn some(seed: usize, n: usize) -> Vec<u32> {
    (0..n).map(|i| ((i * i * 7 + i * 13 + seed * 31) % 500 + 3) as u32).collect()
}

#[test]
fn clients_with_one_long_beginning_evaluate_it_once() {
    const N: usize = 16;
    let model = lfm2();
    let engine = EngineOptions { n_seq: 2 * N, ..engine() };
    let scheduler = start(&model, &engine, SchedulerOptions { n_parallel: N, ..Default::default() });
    let begin = some(0, 150);
    let request = |i: usize| {
        let prompt = [&begin[..], &some(i + 1, 5)].concat();
        Request { client: Client::Key(i), ignore_eos: true, ..greedy(prompt, 20) }
    };
    let expect = |i: usize, answer: super::support::Answer, cached: usize| {
        assert_eq!((answer.ids, answer.text), alone_in(&model, &engine, &request(i)), "client {i}");
        assert_eq!(answer.usage.cached_tokens, cached, "client {i}");
    };
    expect(0, read(scheduler.submit(request(0)).unwrap()), 0);
    let events: Vec<_> = (1..N).map(|i| scheduler.submit(request(i)).unwrap()).collect();
    for (i, events) in (1..).zip(events) {
        expect(i, read(events), 2 * PAGE);
    }
    // What lies behind the last state that was kept is all that was evaluated again.
    let metrics = scheduler.metrics();
    assert_eq!(metrics.prompt_tokens, (155 + (N - 1) * (155 - 2 * PAGE)) as u64);
    assert_eq!((metrics.preemptions, metrics.requests.failed), (0, 0));
}

/// Requests that come at once, from one address or with keys of their own: the others wait for the first to have evaluated what they share.
#[test]
fn requests_at_once_with_one_long_beginning_evaluate_it_once() {
    const N: usize = 16;
    let model = lfm2();
    let engine = EngineOptions { n_ctx: Some(512), n_seq: 2 * N, ..engine() };
    let begin = some(0, 450);
    let prompt = |i: usize| [&begin[..], &some(i + 1, 5)].concat();
    let expected: Vec<_> = (0..N).map(|i| alone_in(&model, &engine, &of_client(Client::Key(0), prompt(i)))).collect();
    for clients in [[0; N], std::array::from_fn(|i| i)] {
        let scheduler = start(&model, &engine, SchedulerOptions { n_parallel: N, ..Default::default() });
        let submit = |i: usize| scheduler.submit(of_client(Client::Key(clients[i]), prompt(i))).unwrap();
        let events: Vec<_> = (0..N).map(submit).collect();
        let mut cached = Vec::new();
        for (events, expected) in events.into_iter().zip(&expected) {
            let answer = read(events);
            assert_eq!((&answer.ids, &answer.text), (&expected.0, &expected.1));
            cached.push(answer.usage.cached_tokens);
        }
        cached.sort_unstable();
        assert!(cached[0] == 0 && cached[1..].iter().all(|&n| n == 7 * PAGE), "{cached:?}");
        let metrics = scheduler.metrics();
        assert_eq!(metrics.prompt_tokens, (455 + (N - 1) * (455 - 7 * PAGE)) as u64);
        assert_eq!((metrics.preemptions, metrics.requests.failed), (0, 0));
        // Seven ends of pages that all share, the states that texts go on from, and those before their last tokens.
        let states = metrics.states;
        assert!(states.checkpoints >= 7 && states.checkpoints <= 7 + N, "{states:?}");
        assert_eq!(states.total - states.free - states.checkpoints, N, "{states:?}");
    }
}

fn of_client(client: Client, prompt: Vec<u32>) -> Request {
    Request { client, ignore_eos: true, ..greedy(prompt, 10) }
}

#[test]
fn equal_prompts_of_one_client_are_evaluated_once() {
    let model = lfm2();
    let engine = EngineOptions { n_seq: 4, ..engine() };
    let scheduler = start(&model, &engine, SchedulerOptions { n_parallel: 4, ..Default::default() });
    let request = || Request { ignore_eos: true, ..greedy(some(3, 150), 10) };
    let events: Vec<_> = (0..4).map(|_| scheduler.submit(request()).unwrap()).collect();
    let want = alone_in(&model, &engine, &request());
    let answers: Vec<_> = events.into_iter().map(read).collect();
    let cached: Vec<_> = answers.iter().map(|answer| answer.usage.cached_tokens).collect();
    for answer in answers {
        assert_eq!((answer.ids, answer.text), want);
    }
    assert_eq!(cached[0], 0);
    assert!(cached[1..].iter().all(|&n| n >= 2 * PAGE), "{cached:?}");
}

#[test]
fn conversations_go_on_where_they_ended_and_answers_can_be_taken_back() {
    let model = lfm2();
    let engine = EngineOptions { n_seq: 3, ..engine() };
    let scheduler = start(&model, &engine, SchedulerOptions { n_parallel: 1, ..Default::default() });
    let ask = |ids: &[u32]| {
        let request = || Request { ignore_eos: true, ..greedy(ids.to_vec(), 9) };
        let answer = read(scheduler.submit(request()).unwrap());
        assert_eq!((answer.ids.clone(), answer.text), alone_in(&model, &engine, &request()));
        (answer.usage.cached_tokens, answer.ids)
    };
    let mut ids = some(0, 100);
    let mut expected = 0;
    for turn in 0..3 {
        let (cached, answer) = ask(&ids);
        assert_eq!(cached, expected, "turn {turn}");
        ids.extend(&answer);
        expected = ids.len() - 1;
        ids.extend(some(1000 * (turn + 1), 20));
    }
    // The last answer once more, and another question in the place of the second one: from the page before.
    let asked = ids.len() - 29;
    assert_eq!(ask(&ids[..asked]).0, asked / PAGE * PAGE);
    assert_eq!(ask(&[&ids[..110], &[7; 10][..]].concat()).0, PAGE);
}

#[test]
fn texts_take_turns_where_there_are_states_for_few() {
    let model = lfm2();
    let engine = EngineOptions { n_seq: 8, n_windows: Some(2), state_cache: 0, ..engine() };
    let scheduler = start(&model, &engine, SchedulerOptions { n_parallel: 2, ..Default::default() });
    for round in 0..2 {
        let request = |i: usize| Request { client: Client::Key(i), ignore_eos: true, ..greedy(some(i, 90), 20) };
        let events: Vec<_> = (0..8).map(|i| scheduler.submit(request(i)).unwrap()).collect();
        for (i, events) in events.into_iter().enumerate() {
            let answer = read(events);
            assert_eq!(answer.error, None, "text {i} in round {round}");
            assert_eq!((answer.ids, answer.text), alone_in(&model, &engine, &request(i)), "text {i} in round {round}");
        }
    }
    assert_eq!(scheduler.metrics().requests.failed, 0);
}

/// A template drops the thoughts of earlier answers. Each turn evaluates what is new in its prompt and less than a page before
/// it, though there is room for few states and each answer is pages long.
#[test]
fn states_are_kept_where_turns_begin() {
    const THOUGHTS: usize = 900;
    let file = GgufFile::from_bytes(&more_architectures()["qwen35.gguf"]).unwrap();
    let model = Model::from_gguf(file, &ModelOptions::default()).unwrap();
    let engine = EngineOptions { n_ctx: Some(4096), n_seq: 2, n_windows: Some(1), ..engine() };
    let state = model.forward_pass(&engine).unwrap().cache().layout().state_bytes as usize;
    let engine = EngineOptions { state_cache: 9 * state, ..engine };
    let scheduler = start(&model, &engine, SchedulerOptions { n_parallel: 1, ..Default::default() });
    let ask = |ids: &[u32], n: usize| {
        let answer = read(scheduler.submit(Request { ignore_eos: true, ..greedy(ids.to_vec(), n) }).unwrap());
        assert_eq!((answer.error, answer.ids.len()), (None, n));
        (ids.len() - answer.usage.cached_tokens, answer.ids)
    };
    let mut history = some(0, 150);
    let mut text = Vec::new();
    for turn in 1..6 {
        history.extend(some(turn, 50 + 20 * turn));
        // What begins an answer; the last two of these begin thoughts.
        let prompt = [&history[..], &[1, 2, 3, 4, 5]].concat();
        let n_common = prompt.iter().zip(&text).take_while(|(a, b)| a == b).count();
        let (n_evaluated, answer) = ask(&prompt, THOUGHTS);
        let n_new = prompt.len() - n_common;
        assert!(n_evaluated < n_new + PAGE, "turn {turn}: {n_evaluated} tokens evaluated for {n_new} new ones");
        // Once more, which changes nothing but the answer.
        let (n_evaluated, _) = ask(&prompt, THOUGHTS / 2);
        assert!(n_evaluated <= PAGE, "turn {turn}: {n_evaluated} tokens evaluated for none");
        text = [&prompt[..], &answer].concat();
        history.extend([1, 2, 3]);
        history.extend(&answer[THOUGHTS - 40..]);
    }
}
