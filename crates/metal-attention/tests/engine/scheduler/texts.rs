//! Whatever else runs, every text is the one that its request gets alone.

use std::sync::Arc;
use std::time::Duration;

use super::support::{Wrapped, alone, alone_in, encode, engine, greedy, read, start, stories, windowed};
use metal_attention::sampling::SamplerOptions;
use metal_attention::scheduler::{Client, FinishReason, Request, Scheduler, SchedulerOptions};
use metal_attention::{EngineOptions, Model};
use proptest::prelude::*;

/// A request of the property test.
#[derive(Debug, Clone)]
struct Plan {
    client: usize,
    /// Which of a few texts the prompt begins with, how far, and the tokens that follow.
    base: usize,
    shared: usize,
    own: Vec<u32>,
    max_tokens: usize,
    /// Greedy, or with this seed.
    seed: Option<u64>,
    stop: bool,
    /// The client goes after so many events.
    gone_after: Option<usize>,
    /// Events of the request before that arrive first.
    after: usize,
}

fn plan() -> impl Strategy<Value = Plan> {
    let own = prop::collection::vec(3..512u32, 1..20);
    let gone_after = prop_oneof![4 => Just(None), 1 => (0..6usize).prop_map(Some)];
    let after = prop_oneof![3 => Just(0), 1 => 0..20usize];
    let shared = prop_oneof![0..3usize, 60..70usize, 0..200usize];
    let seed = prop::option::of(0..9u64);
    (0..3usize, 0..2usize, shared, own, 1..40usize, seed, any::<bool>(), gone_after, after).prop_map(
        |(client, base, shared, own, max_tokens, seed, stop, gone_after, after)| Plan {
            client,
            base,
            shared,
            own,
            max_tokens,
            seed,
            stop,
            gone_after,
            after,
        },
    )
}

impl Plan {
    fn request(&self) -> Request {
        let base = |i: usize| ((i * i * 31 + i * 7 + 3 + 11 * self.base) % 509 + 3) as u32;
        let mut prompt: Vec<u32> = (0..self.shared).map(base).collect();
        prompt.extend_from_slice(&self.own);
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
    fn texts_are_those_of_a_generator(
        plans in prop::collection::vec(plan(), 1..10),
        n_parallel in 1..5usize,
        n_idle in 0..3usize,
        n_batch in prop_oneof![4..9usize, 100..200usize],
        n_pages in 4..12usize,
        max_top_k in prop_oneof![Just(0), Just(8), Just(128)],
        turn in prop_oneof![Just(Duration::ZERO), Just(Duration::from_millis(3)), Just(Duration::from_secs(100))],
        window in prop::option::of(Just(40)),
    ) {
        let model = window.map_or_else(|| Model::built_in().unwrap(), windowed);
        let n_seq = n_parallel + n_idle;
        let n_windows = Some(n_parallel);
        let engine = EngineOptions { n_seq, n_cache: Some(64 * n_pages), n_windows, n_ubatch: Some(16), ..engine() };
        let pass = Wrapped { max_top_k, ..Wrapped::new(model.forward_pass(&engine).unwrap()) };
        let options = SchedulerOptions { n_parallel, n_batch: Some(n_batch), time_slice: turn, ..Default::default() };
        let scheduler = Scheduler::start(Box::new(pass), Arc::new(model.clone()), options).unwrap();
        let mut answers: Vec<std::thread::JoinHandle<_>> = Vec::new();
        let (mut heard, mut last) = (None, 0);
        for plan in &plans {
            let mut events = scheduler.submit(plan.request()).unwrap();
            // So many events of the request before: this one comes while that one runs.
            if let Some(heard) = heard.replace(std::sync::mpsc::channel::<()>()) {
                let _ = heard.1.iter().take(plan.after.min(last)).count();
            }
            last = plan.max_tokens;
            let (tell, gone_after) = (heard.as_ref().unwrap().0.clone(), plan.gone_after);
            answers.push(std::thread::spawn(move || {
                if let Some(n) = gone_after {
                    for _ in 0..n {
                        events.blocking_recv();
                        let _ = tell.send(());
                    }
                    return None;
                }
                drop(tell);
                Some(read(events))
            }));
            let (tell, hear) = heard.take().unwrap();
            drop(tell);
            heard = Some((std::sync::mpsc::channel().0, hear));
        }
        for (plan, answer) in plans.iter().zip(answers) {
            let Some(answer) = answer.join().unwrap() else { continue };
            let (ids, text) = alone(&model, &plan.request());
            prop_assert_eq!(&answer.ids, &ids, "{:?}", plan);
            prop_assert_eq!(&answer.text, &text);
            prop_assert_eq!(answer.usage.generated_tokens, ids.len());
            prop_assert_eq!(answer.usage.prompt_tokens, plan.request().prompt.len());
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
fn eight_stories_in_four_places() {
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
        let (ids, text) = alone(&model, request);
        assert_eq!((answer.ids, answer.text), (ids, text));
        assert_eq!(answer.reason, Some(FinishReason::Length));
    }
    let metrics = scheduler.metrics();
    assert_eq!(metrics.requests.length, 8);
    assert!(metrics.batch_tokens > metrics.steps, "several texts share a step: {metrics:?}");
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
    assert_eq!(answers[0].ids, alone(&model, &greedy(prompt, 10)).0);
    let metrics = scheduler.metrics();
    assert_eq!((metrics.prompt_tokens, metrics.cached_tokens, metrics.generated_tokens), (150 + 3, 3 * 149, 40));
}

#[test]
fn a_conversation_goes_on_in_its_cache() {
    let (model, scheduler) = stories(1);
    let mut ids = encode(&model, "Once upon a time");
    let mut cached = 0;
    for _ in 0..3 {
        let answer = read(scheduler.submit(greedy(ids.clone(), 9)).unwrap());
        assert_eq!(answer.usage.cached_tokens, cached);
        ids.extend(&answer.ids);
        // The last token that was generated was not evaluated.
        cached = ids.len() - 1;
        ids.extend(encode(&model, " The end.").split_off(1));
    }
}

/// `n` ids, others for each `from`.
fn some(from: u32, n: u32) -> Vec<u32> {
    (from..from + n).map(|i| (i * i * 31 + i * 7 + 3) % 509 + 3).collect()
}

#[test]
fn conversations_go_on_in_the_cache_of_a_window() {
    let model = windowed(40);
    let engine = EngineOptions { n_ctx: Some(512), n_seq: 3, n_ubatch: Some(16), ..engine() };
    let scheduler = start(&model, &engine, SchedulerOptions { n_parallel: 1, n_batch: Some(64), ..Default::default() });
    let ask = |ids: &[u32]| {
        let request = || greedy(ids.to_vec(), 9);
        let answer = read(scheduler.submit(request()).unwrap());
        let room_for_all = EngineOptions { n_ubatch: Some(512), ..engine.clone() };
        let alone = alone_in(&model, &room_for_all, &request());
        assert_eq!((&answer.ids, answer.text), (&alone.0, alone.1));
        (answer.usage.cached_tokens, answer.ids)
    };
    let mut ids = some(0, 300);
    let mut expected = 0;
    for turn in 0..4 {
        let (cached, answer) = ask(&ids);
        assert_eq!(cached, expected, "turn {turn}");
        ids.extend(&answer);
        // The last token that was generated was not evaluated.
        expected = ids.len() - 1;
        ids.extend(some(1000 * (turn + 1), 20));
    }
    // The last answer once more, and one to another last question: what these add to can still be cut back.
    let asked = ids.len() - 29;
    assert_eq!(ask(&ids[..asked]).0, asked - 1);
    assert_eq!(ask(&[&ids[..asked - 10], &[7; 10][..]].concat()).0, asked - 10);
    // Only the beginning in common: the window there is gone.
    assert_eq!(ask(&[&ids[..200], &[9; 30][..]].concat()).0, 0);
}

#[test]
fn finished_texts_give_their_windows_up_the_oldest_first() {
    let model = windowed(40);
    // All positions of five texts, and windows of two.
    let engine = EngineOptions { n_ctx: Some(512), n_seq: 5, n_windows: Some(2), n_ubatch: Some(16), ..engine() };
    let scheduler = start(&model, &engine, SchedulerOptions { n_parallel: 1, n_batch: Some(64), ..Default::default() });
    let mut texts: Vec<_> = (0..3).map(|i| some(1000 * i, 250)).collect();
    let mut ask = |i: usize| {
        let request = || greedy(texts[i].clone(), 9);
        let answer = read(scheduler.submit(request()).unwrap());
        let room_for_all = EngineOptions { n_ubatch: Some(512), n_windows: None, ..engine.clone() };
        let alone = alone_in(&model, &room_for_all, &request());
        assert_eq!((&answer.ids, answer.text), (&alone.0, alone.1), "text {i}");
        texts[i].extend(&answer.ids);
        answer.usage.cached_tokens
    };
    let n = 250 + 9 - 1;
    // The third takes the window of the first; that of the second is still there, and then used last.
    for (i, cached) in [(0, 0), (1, 0), (2, 0), (1, n), (0, 0), (1, n + 9), (2, 0)] {
        assert_eq!(ask(i), cached, "text {i}");
    }
    let metrics = scheduler.metrics();
    assert_eq!((metrics.preemptions, metrics.requests.failed), (0, 0));
    assert!(metrics.pages_free > metrics.pages_used, "{metrics:?}");
}

#[test]
fn many_conversations_go_on_in_fewer_windows() {
    let model = windowed(40);
    let engine = EngineOptions { n_ctx: Some(512), n_seq: 9, n_windows: Some(3), n_ubatch: Some(16), ..engine() };
    let turn = Duration::from_secs(100);
    let options = SchedulerOptions { n_parallel: 3, n_batch: Some(48), time_slice: turn, ..Default::default() };
    let scheduler = start(&model, &engine, options);
    let room_for_all = EngineOptions { n_seq: 1, n_windows: None, n_ubatch: Some(512), ..engine };
    let mut texts: Vec<_> = (0..6).map(|i| [some(0, 128), some(1000 * (i + 1), 30 * i)].concat()).collect();
    for round in 0..4 {
        let request = |i: usize| Request { client: Client::Key(i), ..greedy(texts[i].clone(), 20) };
        let events: Vec<_> = (0..texts.len()).map(|i| scheduler.submit(request(i)).unwrap()).collect();
        let answers: Vec<_> = events.into_iter().map(read).collect();
        for (i, answer) in answers.iter().enumerate() {
            let alone = alone_in(&model, &room_for_all, &request(i));
            assert_eq!((&answer.ids, &answer.text), (&alone.0, &alone.1), "text {i} in round {round}");
        }
        for (i, (text, answer)) in (0..).zip(texts.iter_mut().zip(answers)) {
            text.extend(answer.ids);
            text.extend(some(100 * i + round, 10));
        }
    }
    let metrics = scheduler.metrics();
    assert_eq!((metrics.preemptions, metrics.requests.failed, metrics.requests.length), (0, 0, 24));
}

#[test]
fn texts_that_need_more_than_there_is_take_turns() {
    let model = Model::built_in().unwrap();
    // Four texts of three pages each at their end, in a cache of six.
    let engine = EngineOptions { n_seq: 4, n_cache: Some(6 * 64), ..engine() };
    let options = SchedulerOptions { n_parallel: 4, n_batch: Some(64), ..Default::default() };
    let scheduler = start(&model, &engine, options);
    let request =
        |i: u32| Request { ignore_eos: true, ..greedy((0..40).map(|n| (n * 13 + i * 7) % 500 + 3).collect(), 100) };
    let events: Vec<_> = (0..4).map(|i| scheduler.submit(request(i)).unwrap()).collect();
    for (i, events) in (0..).zip(events) {
        let answer = read(events);
        assert_eq!((answer.ids, answer.text), alone(&model, &request(i)));
        assert_eq!(answer.reason, Some(FinishReason::Length));
    }
    assert!(scheduler.metrics().preemptions > 0, "{:?}", scheduler.metrics());
}

#[test]
fn a_text_that_fills_the_whole_cache_ends() {
    let model = Model::built_in().unwrap();
    let engine = EngineOptions { n_seq: 2, n_cache: Some(128), ..engine() };
    let scheduler = start(&model, &engine, SchedulerOptions { n_parallel: 2, ..Default::default() });
    let request = || Request { max_tokens: None, ignore_eos: true, ..greedy(vec![1, 403], 0) };
    let (first, second) = (scheduler.submit(request()).unwrap(), scheduler.submit(request()).unwrap());
    for answer in [read(first), read(second)] {
        assert_eq!(answer.reason, Some(FinishReason::ContextFull));
        // The token chosen after the last position is told, too.
        assert_eq!(answer.usage.generated_tokens, 128 - 2 + 1);
    }
}
