//! The scheduler with models that have recurrent states. A sequence can be cut back only to positions where its state was
//! saved (a checkpoint).

use super::support::null::{reference_in, start};
use super::support::{engine, greedy, read};
use metal_attention::gguf::GgufFile;
use metal_attention::scheduler::{Client, Request, SchedulerOptions};
use metal_attention::{EngineOptions, Model, ModelOptions};
use metal_attention_testing::models::more_architectures;

/// Tokens between two checkpoints of a prompt.
const PAGE: usize = 64;

/// A small LFM2, with short convolutions and attention.
pub fn lfm2() -> Model {
    let file = GgufFile::from_bytes(&more_architectures()["lfm2.gguf"]).unwrap();
    Model::from_gguf(file, &ModelOptions::default()).unwrap()
}

/// `n` token ids, which differ for each `seed`.
pub fn token_ids(seed: usize, n: usize) -> Vec<u32> {
    (0..n).map(|i| ((i * i * 7 + i * 13 + seed * 31) % 500 + 3) as u32).collect()
}

#[test]
fn a_prefix_shared_by_clients_is_evaluated_once() {
    const N: usize = 16;
    let model = lfm2();
    let engine = EngineOptions { n_seq: 2 * N, ..engine() };
    let scheduler = start(&model, &engine, SchedulerOptions { n_parallel: N, ..Default::default() });
    let prefix = token_ids(0, 150);
    let request = |i: usize| {
        let prompt = [&prefix[..], &token_ids(i + 1, 5)].concat();
        Request { client: Client::Key(i), ignore_eos: true, ..greedy(prompt, 20) }
    };
    let check = |i: usize, answer: super::support::Answer, cached: usize| {
        assert_eq!((answer.ids, answer.text), reference_in(&model, &engine, &request(i)), "client {i}");
        assert_eq!(answer.usage.cached_tokens, cached, "client {i}");
    };
    check(0, read(scheduler.submit(request(0)).unwrap()), 0);
    let events: Vec<_> = (1..N).map(|i| scheduler.submit(request(i)).unwrap()).collect();
    for (i, events) in (1..).zip(events) {
        check(i, read(events), 2 * PAGE);
    }
    // Only the tokens after the last checkpoint were evaluated again.
    let metrics = scheduler.metrics();
    assert_eq!(metrics.prompt_tokens, (155 + (N - 1) * (155 - 2 * PAGE)) as u64);
    assert_eq!((metrics.preemptions, metrics.requests.failed), (0, 0));
}

/// Requests that arrive together, from one client or from one each: the others wait until the first has evaluated the shared
/// prefix.
#[test]
fn a_prefix_shared_by_simultaneous_requests_is_evaluated_once() {
    const N: usize = 16;
    let model = lfm2();
    let engine = EngineOptions { n_ctx: Some(512), n_seq: 2 * N, ..engine() };
    let prefix = token_ids(0, 450);
    let prompt = |i: usize| [&prefix[..], &token_ids(i + 1, 5)].concat();
    let expected: Vec<_> =
        (0..N).map(|i| reference_in(&model, &engine, &of_client(Client::Key(0), prompt(i)))).collect();
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
        // Seven checkpoints at the ends of shared pages, and at most one before the last token of each prompt. Beside them
        // each finished sequence has its current state.
        let states = metrics.states;
        assert!(states.checkpoints >= 7 && states.checkpoints <= 7 + N, "{states:?}");
        assert_eq!(states.total - states.free - states.checkpoints, N, "{states:?}");
    }
}

/// A request of `client` for ten tokens.
fn of_client(client: Client, prompt: Vec<u32>) -> Request {
    Request { client, ignore_eos: true, ..greedy(prompt, 10) }
}

#[test]
fn equal_prompts_of_one_client_are_evaluated_once() {
    let model = lfm2();
    let engine = EngineOptions { n_seq: 4, ..engine() };
    let scheduler = start(&model, &engine, SchedulerOptions { n_parallel: 4, ..Default::default() });
    let request = || Request { ignore_eos: true, ..greedy(token_ids(3, 150), 10) };
    let events: Vec<_> = (0..4).map(|_| scheduler.submit(request()).unwrap()).collect();
    let expected = reference_in(&model, &engine, &request());
    let answers: Vec<_> = events.into_iter().map(read).collect();
    let cached: Vec<_> = answers.iter().map(|answer| answer.usage.cached_tokens).collect();
    for answer in answers {
        assert_eq!((answer.ids, answer.text), expected);
    }
    assert_eq!(cached[0], 0);
    assert!(cached[1..].iter().all(|&n| n >= 2 * PAGE), "{cached:?}");
}

#[test]
fn conversations_continue_and_answers_can_be_regenerated() {
    let model = lfm2();
    let engine = EngineOptions { n_seq: 3, ..engine() };
    let scheduler = start(&model, &engine, SchedulerOptions { n_parallel: 1, ..Default::default() });
    let generate = |ids: &[u32]| {
        let request = || Request { ignore_eos: true, ..greedy(ids.to_vec(), 9) };
        let answer = read(scheduler.submit(request()).unwrap());
        assert_eq!((answer.ids.clone(), answer.text), reference_in(&model, &engine, &request()));
        (answer.usage.cached_tokens, answer.ids)
    };
    let mut ids = token_ids(0, 100);
    let mut expected = 0;
    for round in 0..3 {
        let (cached, answer) = generate(&ids);
        assert_eq!(cached, expected, "round {round}");
        ids.extend(&answer);
        expected = ids.len() - 1;
        ids.extend(token_ids(1000 * (round + 1), 20));
    }
    // The last prompt again, and another question in the place of the second one: both continue from the checkpoint before.
    let n_prompt = ids.len() - 29;
    assert_eq!(generate(&ids[..n_prompt]).0, n_prompt / PAGE * PAGE);
    assert_eq!(generate(&[&ids[..110], &[7; 10][..]].concat()).0, PAGE);
}

#[test]
fn requests_finish_where_memory_has_few_states() {
    let model = lfm2();
    let engine = EngineOptions { n_seq: 8, n_windows: Some(2), state_cache: 0, ..engine() };
    let scheduler = start(&model, &engine, SchedulerOptions { n_parallel: 2, ..Default::default() });
    for round in 0..2 {
        let request = |i: usize| Request { client: Client::Key(i), ignore_eos: true, ..greedy(token_ids(i, 90), 20) };
        let events: Vec<_> = (0..8).map(|i| scheduler.submit(request(i)).unwrap()).collect();
        for (i, events) in events.into_iter().enumerate() {
            let answer = read(events);
            assert_eq!(answer.error, None, "sequence {i} in round {round}");
            assert_eq!(
                (answer.ids, answer.text),
                reference_in(&model, &engine, &request(i)),
                "sequence {i} in round {round}"
            );
        }
    }
    assert_eq!(scheduler.metrics().requests.failed, 0);
}

/// The chat template drops the reasoning of earlier answers, so that a prompt shares tokens with the sequence before up to
/// the beginning of an answer. Each turn evaluates its new tokens and less than a page before them, although memory has few
/// states and each answer is pages long.
#[test]
fn states_are_saved_where_answers_begin() {
    const N_REASONING: usize = 900;
    let file = GgufFile::from_bytes(&more_architectures()["qwen35.gguf"]).unwrap();
    let model = Model::from_gguf(file, &ModelOptions::default()).unwrap();
    let engine = EngineOptions { n_ctx: Some(4096), n_seq: 2, n_windows: Some(1), ..engine() };
    let state = model.forward_pass(&engine).unwrap().cache().layout().state_bytes as usize;
    let engine = EngineOptions { state_cache: 9 * state, ..engine };
    let scheduler = start(&model, &engine, SchedulerOptions { n_parallel: 1, ..Default::default() });
    let generate = |ids: &[u32], n: usize| {
        let answer = read(scheduler.submit(Request { ignore_eos: true, ..greedy(ids.to_vec(), n) }).unwrap());
        assert_eq!((answer.error, answer.ids.len()), (None, n));
        (ids.len() - answer.usage.cached_tokens, answer.ids)
    };
    let mut history = token_ids(0, 150);
    let mut tokens = Vec::new();
    for turn in 1..6 {
        history.extend(token_ids(turn, 50 + 20 * turn));
        // The tokens that begin an answer; the last two of them begin the reasoning.
        let prompt = [&history[..], &[1, 2, 3, 4, 5]].concat();
        let n_common = prompt.iter().zip(&tokens).take_while(|(a, b)| a == b).count();
        let (n_evaluated, answer) = generate(&prompt, N_REASONING);
        let n_new = prompt.len() - n_common;
        assert!(n_evaluated < n_new + PAGE, "turn {turn}: {n_evaluated} tokens evaluated for {n_new} new ones");
        // The same prompt again, which changes nothing for the next turn.
        let (n_evaluated, _) = generate(&prompt, N_REASONING / 2);
        assert!(n_evaluated <= PAGE, "turn {turn}: {n_evaluated} tokens evaluated for none");
        tokens = [&prompt[..], &answer].concat();
        history.extend([1, 2, 3]);
        history.extend(&answer[N_REASONING - 40..]);
    }
}
