//! The scheduler's results equal those of a `Generator` that evaluates one request only, whichever other requests run at the
//! same time, and prompts find what earlier sequences left in the prefix cache.

use std::sync::Arc;
use std::time::Duration;

use super::support::{
    Controls, encode, engine, greedy, read, reference, reference_in, start, start_with_gate, stories, windowed,
};
use metal_attention::sampling::SamplerOptions;
use metal_attention::scheduler::{Client, FinishReason, Request, Scheduler, SchedulerOptions, SchedulerParts};
use metal_attention::speculation::{DraftDepth, Drafter, NgramDrafter};
use metal_attention::{EngineOptions, Model};
use proptest::prelude::*;

/// A request of the property test.
#[derive(Debug, Clone)]
struct RequestPlan {
    /// Number of the client.
    client: usize,
    /// Which of two token series the prompt begins with.
    base: usize,
    /// Number of tokens from that series.
    shared: usize,
    /// Tokens of the prompt that follow.
    suffix: Vec<u32>,
    /// Maximum of generated tokens.
    max_tokens: usize,
    /// Seed of the sampler; `None`: greedy.
    seed: Option<u64>,
    /// Whether "the" is a stop string.
    stop: bool,
    /// Number of events after which the client drops the channel; `None`: it reads all of them.
    gone_after: Option<usize>,
    /// Number of events of the previous request that are awaited before this one is submitted.
    after: usize,
}

/// Random requests.
fn plan() -> impl Strategy<Value = RequestPlan> {
    let suffix = prop::collection::vec(3..512u32, 1..20);
    let gone_after = prop_oneof![4 => Just(None), 1 => (0..6usize).prop_map(Some)];
    let after = prop_oneof![3 => Just(0), 1 => 0..20usize];
    let shared = prop_oneof![0..3usize, 60..70usize, 0..200usize];
    let seed = prop::option::of(0..9u64);
    (0..3usize, 0..2usize, shared, suffix, 1..40usize, seed, any::<bool>(), gone_after, after).prop_map(
        |(client, base, shared, suffix, max_tokens, seed, stop, gone_after, after)| RequestPlan {
            client,
            base,
            shared,
            suffix,
            max_tokens,
            seed,
            stop,
            gone_after,
            after,
        },
    )
}

impl RequestPlan {
    fn request(&self) -> Request {
        let base = |i: usize| ((i * i * 31 + i * 7 + 3 + 11 * self.base) % 509 + 3) as u32;
        let mut prompt: Vec<u32> = (0..self.shared).map(base).collect();
        prompt.extend_from_slice(&self.suffix);
        let sampling = match self.seed {
            None => SamplerOptions::greedy(),
            Some(seed) => SamplerOptions { seed: Some(seed), temperature: 1.1, ..Default::default() },
        };
        let stop = if self.stop { vec!["the".to_owned()] } else { vec![] };
        let client = Client::Key(self.client);
        let (prompt, stop) = (prompt.into(), stop.into());
        Request { client, prompt, sampling, max_tokens: Some(self.max_tokens), stop, ..Default::default() }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, ..Default::default() })]
    #[test]
    fn results_equal_those_of_a_generator(
        plans in prop::collection::vec(plan(), 1..10),
        n_parallel in 1..5usize,
        n_idle in 0..3usize,
        n_batch in prop_oneof![4..9usize, 100..200usize],
        n_pages in 4..12usize,
        max_top_k in prop_oneof![Just(0), Just(8), Just(128)],
        time_slice in prop_oneof![Just(Duration::ZERO), Just(Duration::from_millis(3)), Just(Duration::from_secs(100))],
        window in prop::option::of(Just(40)),
        n_drafts in prop::option::of(1..9usize),
    ) {
        let model = window.map_or_else(|| Model::built_in().unwrap(), windowed);
        let n_seq = n_parallel + n_idle;
        let n_windows = Some(n_parallel);
        let engine = EngineOptions { n_seq, n_cache: Some(64 * n_pages), n_windows, n_ubatch: Some(16), ..engine() };
        let pass = Controls { max_top_k, ..Default::default() }.pass(&model, &engine);
        let n_batch = Some(n_batch);
        let draft_depth = DraftDepth::Fixed(n_drafts.unwrap_or(0));
        let options = SchedulerOptions { n_parallel, n_batch, time_slice, draft_depth, ..Default::default() };
        let drafter = n_drafts.map(|_| Box::<NgramDrafter>::default() as Box<dyn Drafter>);
        let parts = SchedulerParts { drafter, ..Default::default() };
        let scheduler = Scheduler::start_with(pass, Arc::new(model.clone()), options, parts).unwrap();
        let mut answers: Vec<std::thread::JoinHandle<_>> = Vec::new();
        let (mut received, mut last) = (None, 0);
        for plan in &plans {
            let mut events = scheduler.submit(plan.request()).unwrap();
            // This request is submitted while the previous one runs, after `plan.after` of its events.
            if let Some(received) = received.replace(std::sync::mpsc::channel::<()>()) {
                let _ = received.1.iter().take(plan.after.min(last)).count();
            }
            last = plan.max_tokens;
            let (notify, gone_after) = (received.as_ref().unwrap().0.clone(), plan.gone_after);
            answers.push(std::thread::spawn(move || {
                if let Some(n) = gone_after {
                    for _ in 0..n {
                        events.blocking_recv();
                        let _ = notify.send(());
                    }
                    return None;
                }
                drop(notify);
                Some(read(events))
            }));
            let (notify, receiver) = received.take().unwrap();
            drop(notify);
            received = Some((std::sync::mpsc::channel().0, receiver));
        }
        for (plan, answer) in plans.iter().zip(answers) {
            let Some(answer) = answer.join().unwrap() else { continue };
            let (ids, text) = reference(&model, &plan.request());
            prop_assert_eq!(&answer.ids, &ids, "{:?}", plan);
            prop_assert_eq!(&answer.text, &text);
            prop_assert_eq!(answer.usage.generated_tokens, ids.len());
            prop_assert_eq!(answer.usage.prompt_tokens, plan.request().prompt.len());
            prop_assert!(answer.usage.accepted_tokens <= answer.usage.drafted_tokens.min(ids.len()));
            prop_assert!(answer.usage.drafted_tokens == 0 || n_drafts.is_some());
        }
        pollster::block_on(scheduler.shut_down(Duration::from_secs(60)));
        let metrics = scheduler.metrics();
        prop_assert_eq!((metrics.running, metrics.waiting, metrics.requests.failed), (0, 0, 0));
        prop_assert_eq!(metrics.pages_running, 0);
        let ended = metrics.requests;
        let n = ended.end_of_text + ended.length + ended.stop_string + ended.context_full + ended.cancelled;
        prop_assert_eq!(n, plans.len() as u64);
    }
}

#[test]
fn eight_requests_in_four_slots_get_their_reference_results() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-4m-q4_0.gguf");
    let model = Model::open(path).unwrap();
    let options = SchedulerOptions { n_parallel: 4, n_batch: Some(16), ..Default::default() };
    let scheduler = start(&model, &EngineOptions { n_seq: 6, ..engine() }, options);
    let prompts = ["Once upon a time", "The dog", "Lily went to the park. She saw", "Once upon a time there was a"];
    let requests: Vec<Request> = (0..8).map(|i| greedy(encode(&model, prompts[i % 4]), 6 + 2 * i)).collect();
    let events: Vec<_> =
        requests.iter().map(|r| scheduler.submit(greedy(r.prompt.to_vec(), r.max_tokens.unwrap())).unwrap()).collect();
    for (events, request) in events.into_iter().zip(&requests) {
        let answer = read(events);
        let (ids, text) = reference(&model, request);
        assert_eq!((answer.ids, answer.text), (ids, text));
        assert_eq!(answer.reason, Some(FinishReason::Length));
    }
    let metrics = scheduler.metrics();
    assert_eq!(metrics.requests.length, 8);
    assert!(metrics.batch_tokens > metrics.steps, "several sequences share a step: {metrics:?}");
}

#[test]
fn equal_prompts_are_evaluated_once() {
    let model = Model::built_in().unwrap();
    let options = SchedulerOptions { n_parallel: 4, n_batch: Some(32), ..Default::default() };
    let scheduler = start(&model, &EngineOptions { n_seq: 4, ..engine() }, options);
    let prompt: Vec<u32> = (0..150).map(|i| (i * 37 % 500 + 3) as u32).collect();
    let events: Vec<_> = (0..4).map(|_| scheduler.submit(greedy(prompt.clone(), 10)).unwrap()).collect();
    let answers: Vec<_> = events.into_iter().map(read).collect();
    assert_eq!(answers.iter().map(|a| a.usage.cached_tokens).collect::<Vec<_>>(), [0, 149, 149, 149]);
    assert!(answers.iter().all(|a| a.ids == answers[0].ids));
    assert_eq!(answers[0].ids, reference(&model, &greedy(prompt, 10)).0);
    let metrics = scheduler.metrics();
    assert_eq!((metrics.prompt_tokens, metrics.cached_tokens, metrics.generated_tokens), (150 + 3, 3 * 149, 40));
}

#[test]
fn a_conversation_continues_from_its_cached_tokens() {
    let (model, scheduler) = stories(1);
    let mut ids = encode(&model, "Once upon a time");
    let mut cached = 0;
    for _ in 0..3 {
        let answer = read(scheduler.submit(greedy(ids.clone(), 9)).unwrap());
        assert_eq!(answer.usage.cached_tokens, cached);
        ids.extend(&answer.ids);
        // The last generated token was not evaluated.
        cached = ids.len() - 1;
        ids.extend(encode(&model, " The end.").split_off(1));
    }
}

/// `n` token ids, which differ for each `from`.
fn token_ids(from: u32, n: u32) -> Vec<u32> {
    (from..from + n).map(|i| (i * i * 31 + i * 7 + 3) % 509 + 3).collect()
}

#[test]
fn conversations_continue_from_a_cached_window() {
    let model = windowed(40);
    let engine = EngineOptions { n_ctx: Some(512), n_seq: 3, n_ubatch: Some(16), ..engine() };
    let scheduler = start(&model, &engine, SchedulerOptions { n_parallel: 1, n_batch: Some(64), ..Default::default() });
    let generate = |ids: &[u32]| {
        let request = || greedy(ids.to_vec(), 9);
        let answer = read(scheduler.submit(request()).unwrap());
        let large_batches = EngineOptions { n_ubatch: Some(512), ..engine.clone() };
        let reference = reference_in(&model, &large_batches, &request());
        assert_eq!((&answer.ids, answer.text), (&reference.0, reference.1));
        (answer.usage.cached_tokens, answer.ids)
    };
    let mut ids = token_ids(0, 300);
    let mut expected = 0;
    for round in 0..4 {
        let (cached, answer) = generate(&ids);
        assert_eq!(cached, expected, "round {round}");
        ids.extend(&answer);
        // The last generated token was not evaluated.
        expected = ids.len() - 1;
        ids.extend(token_ids(1000 * (round + 1), 20));
    }
    // The last prompt again, and the same with another question: the cached sequence can be cut back by a few tokens.
    let n_prompt = ids.len() - 29;
    assert_eq!(generate(&ids[..n_prompt]).0, n_prompt - 1);
    assert_eq!(generate(&[&ids[..n_prompt - 10], &[7; 10][..]].concat()).0, n_prompt - 10);
    // Only the first 200 tokens are shared, and their window is no longer cached.
    assert_eq!(generate(&[&ids[..200], &[9; 30][..]].concat()).0, 0);
}

#[test]
fn windows_of_idle_sequences_are_freed_in_the_order_of_last_use() {
    let model = windowed(40);
    // KV pages for all positions of five sequences, but windows of two only.
    let engine = EngineOptions { n_ctx: Some(512), n_seq: 5, n_windows: Some(2), n_ubatch: Some(16), ..engine() };
    let scheduler = start(&model, &engine, SchedulerOptions { n_parallel: 1, n_batch: Some(64), ..Default::default() });
    let mut sequences: Vec<_> = (0..3).map(|i| token_ids(1000 * i, 250)).collect();
    let mut generate = |i: usize| {
        let request = || greedy(sequences[i].clone(), 9);
        let answer = read(scheduler.submit(request()).unwrap());
        let large_batches = EngineOptions { n_ubatch: Some(512), n_windows: None, ..engine.clone() };
        let reference = reference_in(&model, &large_batches, &request());
        assert_eq!((&answer.ids, answer.text), (&reference.0, reference.1), "sequence {i}");
        sequences[i].extend(&answer.ids);
        answer.usage.cached_tokens
    };
    let n = 250 + 9 - 1;
    // The third sequence takes the window of the first. The second's is still cached, and then the last used.
    for (i, cached) in [(0, 0), (1, 0), (2, 0), (1, n), (0, 0), (1, n + 9), (2, 0)] {
        assert_eq!(generate(i), cached, "sequence {i}");
    }
    let metrics = scheduler.metrics();
    assert_eq!((metrics.preemptions, metrics.requests.failed), (0, 0));
    assert!(metrics.pages_free > metrics.pages_used, "{metrics:?}");
}

#[test]
fn conversations_continue_with_fewer_windows_than_conversations() {
    let model = windowed(40);
    let engine = EngineOptions { n_ctx: Some(512), n_seq: 9, n_windows: Some(3), n_ubatch: Some(16), ..engine() };
    let time_slice = Duration::from_secs(100);
    let options = SchedulerOptions { n_parallel: 3, n_batch: Some(48), time_slice, ..Default::default() };
    let scheduler = start(&model, &engine, options);
    let large_batches = EngineOptions { n_seq: 1, n_windows: None, n_ubatch: Some(512), ..engine };
    let mut sequences: Vec<_> =
        (0..6).map(|i| [token_ids(0, 128), token_ids(1000 * (i + 1), 30 * i)].concat()).collect();
    for round in 0..4 {
        let request = |i: usize| Request { client: Client::Key(i), ..greedy(sequences[i].clone(), 20) };
        let events: Vec<_> = (0..sequences.len()).map(|i| scheduler.submit(request(i)).unwrap()).collect();
        let answers: Vec<_> = events.into_iter().map(read).collect();
        for (i, answer) in answers.iter().enumerate() {
            let reference = reference_in(&model, &large_batches, &request(i));
            assert_eq!((&answer.ids, &answer.text), (&reference.0, &reference.1), "sequence {i} in round {round}");
        }
        for (i, (tokens, answer)) in (0..).zip(sequences.iter_mut().zip(answers)) {
            tokens.extend(answer.ids);
            tokens.extend(token_ids(100 * i + round, 10));
        }
    }
    let metrics = scheduler.metrics();
    assert_eq!((metrics.preemptions, metrics.requests.failed, metrics.requests.length), (0, 0, 24));
}

#[test]
fn sequences_that_do_not_fit_the_cache_together_preempt_each_other() {
    let model = Model::built_in().unwrap();
    // Four sequences of three pages each at their ends, in a KV cache of six pages.
    let engine = EngineOptions { n_seq: 4, n_cache: Some(6 * 64), ..engine() };
    let options = SchedulerOptions { n_parallel: 4, n_batch: Some(64), ..Default::default() };
    let (scheduler, gate) = start_with_gate(&model, &engine, options);
    let request =
        |i: u32| Request { ignore_eos: true, ..greedy((0..40).map(|n| (n * 13 + i * 7) % 500 + 3).collect(), 100) };
    let held = gate.close();
    let events: Vec<_> = (0..4).map(|i| scheduler.submit(request(i)).unwrap()).collect();
    drop(held);
    for (i, events) in (0..).zip(events) {
        let answer = read(events);
        assert_eq!((answer.ids, answer.text), reference(&model, &request(i)));
        assert_eq!(answer.reason, Some(FinishReason::Length));
    }
    assert!(scheduler.metrics().preemptions > 0, "{:?}", scheduler.metrics());
}

#[test]
fn a_sequence_that_fills_the_whole_cache_ends() {
    let model = Model::built_in().unwrap();
    let engine = EngineOptions { n_seq: 2, n_cache: Some(128), ..engine() };
    let scheduler = start(&model, &engine, SchedulerOptions { n_parallel: 2, ..Default::default() });
    let request = || Request { max_tokens: None, ignore_eos: true, ..greedy(vec![1, 403], 0) };
    let (first, second) = (scheduler.submit(request()).unwrap(), scheduler.submit(request()).unwrap());
    for answer in [read(first), read(second)] {
        assert_eq!(answer.reason, Some(FinishReason::ContextFull));
        // The token that is sampled after the last position is sent, too.
        assert_eq!(answer.usage.generated_tokens, 128 - 2 + 1);
    }
}
