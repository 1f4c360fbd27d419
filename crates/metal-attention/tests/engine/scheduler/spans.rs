//! Prompts with spans of embedding rows, such as those of pictures: prefixes are shared by the hash that the caller gives.

use std::ops::{ControlFlow, Range};
use std::sync::Arc;
use std::time::Duration;

use metal_attention::sampling::SamplerOptions;
use metal_attention::scheduler::{
    CacheDisk, Client, FinishReason, Replicas, Request, Scheduler, SchedulerOptions, SubmitError,
};
use metal_attention::{
    ContentHash, EngineOptions, Error, ForwardError, GenerateOptions, Generator, Model, Position, PromptSpan,
    SessionFile, SpanContent,
};
use proptest::prelude::*;

use super::hybrid::{lfm2, token_ids};
use super::support::null::{reference, reference_in, start, start_with_gate, stories};
use super::support::{Controls, engine, greedy, read, windowed};

/// The id in the place of rows; no text has it.
const STAND_IN: u32 = 508;

/// Rows for `n` inputs: a grid of seven columns, whose text goes on behind its rows or columns. All layers see it whole, or
/// none does. `picture` is what its rows are of.
fn content(model: &Model, picture: u8, n: usize, is_bidirectional: bool) -> Arc<SpanContent> {
    let n_embd = model.spec().n_embd;
    let rows = (0..n * n_embd).map(|i| ((i * 13 + 7 * usize::from(picture)) % 101) as f32 / 50.0 - 1.0).collect();
    Arc::new(SpanContent {
        hash: ContentHash([picture; 32]),
        rows,
        deepstack: Vec::new(),
        positions: (0..n as u32).map(|i| Position([0, i / 7, i % 7])).collect(),
        bidirectional_in: vec![is_bidirectional; model.spec().n_layer()],
    })
}

/// The tokens of `text`, with `content` in the place of its inputs `inputs`.
fn with_span(text: &[u32], inputs: Range<usize>, content: &Arc<SpanContent>) -> Request {
    let mut prompt = text.to_vec();
    prompt[inputs.clone()].fill(STAND_IN);
    let spans = [PromptSpan { inputs, content: Arc::clone(content) }].into();
    Request { spans, ignore_eos: true, ..greedy(prompt, 9) }
}

/// An equal request.
fn again(request: &Request) -> Request {
    Request {
        client: request.client,
        prompt: Arc::clone(&request.prompt),
        spans: Arc::clone(&request.spans),
        sampling: request.sampling.clone(),
        max_tokens: request.max_tokens,
        ignore_eos: request.ignore_eos,
        ..Default::default()
    }
}

/// Runs a request, whose results are those of a generator. Returns the number of cached tokens.
fn cached(scheduler: &Scheduler, model: &Model, engine: &EngineOptions, request: &Request) -> usize {
    let answer = read(scheduler.submit(again(request)).unwrap());
    assert_eq!(answer.error, None);
    assert_eq!((answer.ids, answer.text), reference_in(model, engine, request));
    assert_eq!(answer.usage.prompt_tokens, request.prompt.len());
    answer.usage.cached_tokens
}

/// Evaluated prompt tokens so far.
fn evaluated(scheduler: &Scheduler) -> u64 {
    scheduler.metrics().prompt_tokens
}

#[test]
fn a_model_given_its_own_embeddings_writes_the_same_text() {
    let model = Model::built_in().unwrap();
    let text = super::support::encode(&model, "Once upon a time, there was a little girl named Lily");
    let table = &model.weights().token_embd.as_ref().unwrap().weight;
    let mut rows = vec![0.0; 6 * model.spec().n_embd];
    for (row, &id) in rows.chunks_mut(model.spec().n_embd).zip(&text[3..9]) {
        table.ty().dequantize(table.row(id as usize), row);
    }
    let hash = ContentHash([1; 32]);
    let content = Arc::new(SpanContent { hash, rows, deepstack: vec![], positions: vec![], bidirectional_in: vec![] });
    let engine = EngineOptions { n_seq: 3, ..engine() };
    let scheduler = super::support::start(&model, &engine, SchedulerOptions::default());
    let request = with_span(&text, 3..9, &content);
    let want = read(scheduler.submit(Request { ignore_eos: true, ..greedy(text.clone(), 9) }).unwrap());
    for n_cached in [3, text.len() - 1] {
        let answer = read(scheduler.submit(again(&request)).unwrap());
        assert_eq!((&answer.ids, answer.usage.cached_tokens), (&want.ids, n_cached));
    }
    assert_eq!(super::support::reference(&model, &request).0, want.ids);
}

#[test]
fn prefixes_are_shared_as_far_as_ids_and_hashes_are_equal() {
    let engine = EngineOptions { n_seq: 9, ..engine() };
    for (model, has_states) in [(Model::built_in().unwrap(), false), (windowed(40), false), (lfm2(), true)] {
        for is_bidirectional in [false, true] {
            let scheduler = start(&model, &engine, SchedulerOptions::default());
            let cached = |request: &Request| cached(&scheduler, &model, &engine, request);
            let text = token_ids(1, 85);
            let (one, other) = (content(&model, 1, 35, is_bidirectional), content(&model, 2, 35, is_bidirectional));
            assert_eq!(cached(&with_span(&text, 20..55, &one)), 0);
            assert_eq!(evaluated(&scheduler), 85);
            // A sequence with states continues from the end of its first page.
            let n = if has_states { 64 } else { 84 };
            assert_eq!(cached(&with_span(&text, 20..55, &one)), n);
            assert_eq!(evaluated(&scheduler), (85 + 85 - n) as u64, "no row is evaluated again");
            let n = if has_states { 0 } else { 20 };
            assert_eq!(cached(&with_span(&text, 20..55, &other)), n, "another hash");
            let mut ids = text.clone();
            ids[20..55].fill(STAND_IN);
            assert_eq!(cached(&Request { ignore_eos: true, ..greedy(ids.clone(), 9) }), n, "no span");
            ids[54] = 7;
            let shorter = content(&model, 1, 34, is_bidirectional);
            assert_eq!(cached(&with_span(&ids, 20..54, &shorter)), n, "another place");
            // Both spans are shared, or only the first.
            let two = |second: &Arc<SpanContent>| {
                let first = with_span(&text, 20..55, &one);
                let mut prompt = [&first.prompt[..], &token_ids(2, 60)].concat();
                prompt[90..125].fill(STAND_IN);
                let second = PromptSpan { inputs: 90..125, content: Arc::clone(second) };
                Request { prompt: prompt.into(), spans: [first.spans[0].clone(), second].into(), ..first }
            };
            assert_eq!(cached(&two(&one)), if has_states { 64 } else { 85 });
            assert_eq!(cached(&two(&other)), if has_states { 64 } else { 90 });
            assert_eq!(cached(&two(&one)), if has_states { 128 } else { 144 });
        }
    }
}

/// A sequence with recurrent states could be cut back to the end of its first page, which is within the span.
#[test]
fn no_prefix_ends_within_a_span() {
    let engine = EngineOptions { n_seq: 4, ..engine() };
    for (model, expected) in [(Model::built_in().unwrap(), 105), (lfm2(), 0)] {
        for is_bidirectional in [false, true] {
            let scheduler = start(&model, &engine, SchedulerOptions::default());
            let content = content(&model, 1, 60, is_bidirectional);
            let request = |seed| with_span(&[token_ids(1, 105), token_ids(seed, 20)].concat(), 40..100, &content);
            assert_eq!(cached(&scheduler, &model, &engine, &request(2)), 0);
            assert_eq!(cached(&scheduler, &model, &engine, &request(3)), expected);
        }
    }
}

#[test]
fn chunks_do_not_divide_spans() {
    let model = Model::built_in().unwrap();
    for is_bidirectional in [false, true] {
        let controls = Controls::default();
        let options = SchedulerOptions { n_parallel: 4, n_batch: Some(16), ..Default::default() };
        let pass = controls.null_pass(&model, &EngineOptions { n_seq: 6, n_ubatch: Some(100), ..engine() });
        let scheduler = Scheduler::start(pass, Arc::new(model.clone()), options).unwrap();
        let content = |picture| content(&model, picture, 35, is_bidirectional);
        let requests: Vec<_> = (0..4)
            .map(|i: u8| match i {
                0 => Request { ignore_eos: true, ..greedy(token_ids(9, 70), 60) },
                i => with_span(&token_ids(usize::from(i), 80), 20..55, &content(i)),
            })
            .collect();
        let held = controls.gate.close();
        let events: Vec<_> = requests.iter().map(|request| scheduler.submit(again(request)).unwrap()).collect();
        drop(held);
        for (events, request) in events.into_iter().zip(&requests) {
            assert_eq!(read(events).ids, reference(&model, request).0);
        }
        let log = controls.log.lock().unwrap();
        let n_rows = |step: &Vec<u32>| step.iter().filter(|&&id| id == STAND_IN).count();
        assert_eq!(log.iter().map(n_rows).sum::<usize>(), 3 * 35);
        assert!(log.iter().all(|step| [0, 35].contains(&n_rows(step))), "{log:?}");
        // A step with a span has no other chunks than those before it.
        assert!(log.iter().all(|step| step.len() <= 16 + 35), "{log:?}");
    }
}

#[test]
fn bad_spans_are_refused_and_harm_no_other_request() {
    let model = Model::built_in().unwrap();
    let engine = EngineOptions { n_seq: 3, n_ubatch: Some(34), ..engine() };
    let (scheduler, gate) = start_with_gate(&model, &engine, SchedulerOptions { n_parallel: 2, ..Default::default() });
    let text = || Request { ignore_eos: true, ..greedy(token_ids(3, 50), 20) };
    let held = gate.close();
    let running = scheduler.submit(text()).unwrap();
    let good = content(&model, 1, 35, false);
    let spans = |spans: Vec<PromptSpan>| Request { spans: spans.into(), ..greedy(token_ids(1, 85), 9) };
    let placed = |inputs, content: &Arc<SpanContent>| PromptSpan { inputs, content: Arc::clone(content) };
    let changed = |change: fn(&mut SpanContent)| {
        let mut content = SpanContent::clone(&good);
        change(&mut content);
        spans(vec![placed(20..55, &Arc::new(content))])
    };
    #[allow(clippy::reversed_empty_ranges, reason = "a range that is refused")]
    let reversed = 55..20;
    let bad = [
        spans(vec![placed(20..54, &good)]),
        spans(vec![placed(reversed, &good)]),
        spans(vec![placed(0..usize::MAX, &good)]),
        spans(vec![placed(60..95, &good)]),
        spans(vec![placed(usize::MAX - 35..usize::MAX, &good)]),
        spans(vec![placed(50..85, &good)]),
        spans(vec![placed(20..55, &good), placed(30..65, &good)]),
        spans(vec![placed(45..80, &good), placed(5..40, &good)]),
        changed(|content| content.rows.truncate(7)),
        changed(|content| content.deepstack.push(Vec::new())),
        changed(|content| content.positions.truncate(7)),
        changed(|content| content.bidirectional_in.push(false)),
        Request { prompt_logprobs: Some(1), ..changed(|_| ()) },
        Request { spans: [placed(0..35, &good)].into(), ..greedy(token_ids(1, 20), 9) },
    ];
    let n_bad = bad.len() as u64;
    for request in bad {
        let error = scheduler.submit(request).unwrap_err();
        assert!(matches!(error, SubmitError::Span(ForwardError::BadSpan { .. })), "{error}");
    }
    let error = scheduler.submit(changed(|content| content.bidirectional_in.fill(true))).unwrap_err();
    assert_eq!(error, SubmitError::Span(ForwardError::SpanTooLong { n: 35, n_ubatch: 34 }));
    let error = scheduler.submit(changed(|content| content.positions[3] = Position([0, 250, 0]))).unwrap_err();
    assert!(matches!(error, SubmitError::Span(ForwardError::PositionOutOfRange { .. })), "{error}");
    drop(held);
    assert_eq!(read(running).ids, reference(&model, &text()).0);
    let outcomes = scheduler.metrics().requests;
    assert_eq!((outcomes.refused, outcomes.failed), (n_bad + 2, 0));
}

/// The positions of the text are ahead of its indices: the sequence ends where they leave the context, and no other does.
#[test]
fn text_ends_where_its_positions_leave_the_context() {
    let model = Model::built_in().unwrap();
    let engine = EngineOptions { n_seq: 2, ..engine() };
    let scheduler = start(&model, &engine, SchedulerOptions { n_parallel: 2, ..Default::default() });
    let mut far = SpanContent::clone(&content(&model, 1, 35, false));
    far.positions[34] = Position([134, 0, 0]);
    let request = Request { max_tokens: None, ..with_span(&token_ids(1, 85), 20..55, &Arc::new(far)) };
    let text = || Request { max_tokens: Some(150), ignore_eos: true, ..greedy(token_ids(3, 50), 150) };
    let events = [request, text()].map(|request| scheduler.submit(request).unwrap());
    let [answer, other] = events.map(read);
    // The last generated token is not evaluated. The others and the prompt reach position 255: 156 inputs, 100 further on.
    assert_eq!((answer.reason, answer.ids.len()), (Some(FinishReason::ContextFull), 256 - 100 - 85 + 1));
    assert_eq!(other.ids, reference(&model, &text()).0);
}

#[test]
fn preempted_sequences_evaluate_no_row_again() {
    let model = Model::built_in().unwrap();
    let engine = EngineOptions { n_seq: 3, n_cache: Some(12 * 64), ..engine() };
    let options = SchedulerOptions { time_slice: Duration::ZERO, ..Default::default() };
    let (scheduler, gate) = start_with_gate(&model, &engine, options);
    let requests = [1, 2, 3].map(|i: u8| {
        let span = with_span(&token_ids(0, 60), 10..45, &content(&model, i, 35, true));
        Request { client: Client::Key(i.into()), max_tokens: Some(30), ..span }
    });
    let held = gate.close();
    let events: Vec<_> = requests.iter().map(|request| scheduler.submit(again(request)).unwrap()).collect();
    drop(held);
    for (events, request) in events.into_iter().zip(&requests) {
        assert_eq!(read(events).ids, reference(&model, request).0);
    }
    let metrics = scheduler.metrics();
    assert!(metrics.preemptions >= 30, "{metrics:?}");
    assert_eq!((metrics.prompt_tokens + metrics.cached_tokens, metrics.generated_tokens), (180, 90));
}

#[test]
fn evicted_sequences_return_from_memory_and_from_disk() {
    let engine = EngineOptions { n_seq: 3, n_cache: Some(256), ..engine() };
    let folder = tempfile::tempdir().unwrap();
    for model in [Model::built_in().unwrap(), windowed(40), lfm2()] {
        for cache_ram in [64 << 20, 0] {
            let cache_disk = (cache_ram == 0).then(|| CacheDisk { folder: folder.path().into(), bytes: 64 << 20 });
            let options = SchedulerOptions { cache_ram, cache_disk, ..Default::default() };
            let scheduler = start(&model, &engine, options);
            let request = |picture, more: usize| {
                let text = [token_ids(1, 150), token_ids(2, more)].concat();
                with_span(&text, 80..115, &content(&model, picture, 35, true))
            };
            assert_eq!(cached(&scheduler, &model, &engine, &request(1, 0)), 0);
            let other = Request { ignore_eos: true, ..greedy(token_ids(5, 200), 9) };
            assert_eq!(cached(&scheduler, &model, &engine, &other), 0, "it takes all pages");
            let metrics = scheduler.metrics().stored;
            assert_eq!((metrics.ram_sequences, metrics.disk_sequences), if cache_ram > 0 { (1, 0) } else { (0, 1) });
            // Another picture: the text before it, where a sequence can be continued from there.
            let n = cached(&scheduler, &model, &engine, &request(2, 0));
            assert!(n <= 80, "{n}");
            assert!(cached(&scheduler, &model, &engine, &other) >= 192);
            let n_before = evaluated(&scheduler);
            let n = cached(&scheduler, &model, &engine, &request(1, 20));
            assert!(n >= 128, "{n}");
            assert_eq!(evaluated(&scheduler) - n_before, (170 - n) as u64);
            assert!(scheduler.metrics().stored.hits >= 1);
        }
    }
}

#[test]
fn saved_slots_and_sessions_keep_the_hashes() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a session");
    let engine = EngineOptions { n_seq: 3, ..engine() };
    for model in [Model::built_in().unwrap(), windowed(40), lfm2()] {
        let request = |picture| with_span(&token_ids(1, 85), 20..55, &content(&model, picture, 35, true));
        let first = start(&model, &engine, SchedulerOptions::default());
        cached(&first, &model, &engine, &request(1));
        let saved = pollster::block_on(first.save_slot(0)).unwrap();
        assert_eq!((saved.ids().len(), saved.spans()), (93, &[request(1).spans[0].key()][..]));
        SessionFile::write_copy(&path, &model, &saved).unwrap();
        let second = start(&model, &engine, SchedulerOptions::default());
        let read = SessionFile::open(&path).unwrap().read(&model, second.cache_capacity()).unwrap();
        assert_eq!(read, saved);
        pollster::block_on(second.restore_slot(Client::Unknown, read)).unwrap();
        let answer = super::support::read(second.submit(request(1)).unwrap());
        let expected = answer.usage.cached_tokens;
        assert!(expected >= 64, "{expected}");
        assert!(cached(&second, &model, &engine, &request(2)) <= 20);
        assert_eq!(pollster::block_on(second.erase_slot(0)).unwrap(), 93);

        // A generator.
        let generator = || {
            let pass = Controls::default().null_pass(&model, &engine);
            Generator::with_pass(&model, pass, SamplerOptions::greedy()).unwrap()
        };
        let prompt = |generator: &mut Generator, request: &Request| {
            generator
                .prompt_with_spans(&request.prompt, &request.spans, |_, _| ControlFlow::Continue(()))
                .map(|()| generator.timings().cached_tokens)
        };
        let nine = |generator: &mut Generator| {
            let options = GenerateOptions { n_predict: Some(9), ignore_eos: true, ..Default::default() };
            generator.generate(options).map(|token| token.map(|token| token.id)).collect::<Result<Vec<_>, _>>()
        };
        let want = reference_in(&model, &engine, &request(1)).0;
        let mut writer = generator();
        prompt(&mut writer, &request(1)).unwrap();
        assert_eq!(nine(&mut writer).unwrap(), want);
        writer.save(&path, b"").unwrap();
        let mut reader = generator();
        assert_eq!(reader.restore(SessionFile::open(&path).unwrap()).unwrap(), 93);
        assert!(prompt(&mut reader, &request(2)).unwrap() <= 20);
        reader.restore(SessionFile::open(&path).unwrap()).unwrap();
        assert!(prompt(&mut reader, &request(1)).unwrap() >= 64);
        assert_eq!(nine(&mut reader).unwrap(), want);
        // A session has no rows: where they are needed, the prompt has to be given again.
        reader.restore(SessionFile::open(&path).unwrap()).unwrap();
        let (tail, ids) = (&want[..8], reader.ids().to_vec());
        assert_eq!(&ids[85..], tail);
        let goes_on = nine(&mut reader).unwrap();
        assert_eq!(goes_on[0], want[8]);
        // Refused spans change nothing.
        let bad = Request { spans: [PromptSpan { inputs: 0..9, ..request(1).spans[0].clone() }].into(), ..request(1) };
        let before = reader.ids().to_vec();
        let error = prompt(&mut reader, &bad).unwrap_err();
        assert!(matches!(error, Error::Forward(ForwardError::BadSpan { .. })), "{error}");
        assert_eq!(reader.ids(), before);
    }
}

#[test]
fn requests_go_to_the_replica_that_has_their_span() {
    let model = Arc::new(Model::built_in().unwrap());
    let engine = EngineOptions { n_seq: 8, n_ctx: Some(512), ..engine() };
    let controls = [Controls::default(), Controls::default()];
    let passes = controls.iter().map(|controls| controls.null_pass(&model, &engine).into()).collect();
    let replicas = Replicas::start(passes, &model, &SchedulerOptions { n_parallel: 4, ..Default::default() }).unwrap();
    let request = |picture| with_span(&token_ids(0, 300), 30..240, &content(&model, picture, 210, true));
    let held = controls.each_ref().map(|controls| controls.gate.close());
    let events = [1, 2].map(|picture| replicas.submit(request(picture)).unwrap());
    drop(held);
    for events in events {
        assert_eq!(read(events).usage.cached_tokens, 0);
    }
    // The observers are notified a moment after the last events.
    std::thread::sleep(Duration::from_millis(100));
    for picture in [2, 1, 2, 2, 1, 1] {
        let answer = read(replicas.submit(request(picture)).unwrap());
        assert_eq!(answer.usage.cached_tokens, 299, "picture {picture}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A request of the property test.
#[derive(Debug, Clone)]
struct RequestPlan {
    client: usize,
    /// Tokens before the span, and behind it.
    n: [usize; 2],
    /// Which picture; `None`: text alone.
    picture: Option<u8>,
    is_bidirectional: bool,
    /// What the text behind the span begins with.
    seed: usize,
    max_tokens: usize,
}

fn plan() -> impl Strategy<Value = RequestPlan> {
    let n = [prop_oneof![0..3usize, 20..70usize].boxed(), (1..60usize).boxed()];
    (0..3usize, n, prop::option::of(1..3u8), any::<bool>(), 0..3usize, 1..30usize).prop_map(
        |(client, n, picture, is_bidirectional, seed, max_tokens)| RequestPlan {
            client,
            n,
            picture,
            is_bidirectional,
            seed,
            max_tokens,
        },
    )
}

impl RequestPlan {
    fn request(&self, model: &Model) -> Request {
        const N: usize = 33;
        let [before, behind] = self.n;
        let text = [token_ids(7, before), vec![STAND_IN; N], token_ids(self.seed, behind)].concat();
        let request = match self.picture {
            None => Request { ignore_eos: true, ..greedy(text, 0) },
            // The hash covers how layers see the rows.
            Some(picture) => {
                let picture = picture + if self.is_bidirectional { 100 } else { 0 };
                with_span(&text, before..before + N, &content(model, picture, N, self.is_bidirectional))
            }
        };
        Request { client: Client::Key(self.client), max_tokens: Some(self.max_tokens), ..request }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..Default::default() })]
    #[test]
    fn results_equal_those_of_a_generator(
        plans in prop::collection::vec(plan(), 1..10),
        n_parallel in 1..5usize,
        n_idle in 0..3usize,
        n_batch in prop_oneof![4..9usize, 30..60usize],
        n_pages in 4..12usize,
        n_ubatch in 33..60usize,
        cache_ram in prop_oneof![Just(0), Just(1 << 20)],
        time_slice in prop_oneof![Just(Duration::ZERO), Just(Duration::from_secs(100))],
        model in 0..3usize,
    ) {
        let model = match model {
            0 => Model::built_in().unwrap(),
            1 => windowed(40),
            _ => lfm2(),
        };
        let n_seq = n_parallel + n_idle;
        let engine = EngineOptions { n_seq, n_cache: Some(64 * n_pages), n_ubatch: Some(n_ubatch), ..engine() };
        let options = SchedulerOptions { n_parallel, n_batch: Some(n_batch), cache_ram, time_slice, ..Default::default() };
        let scheduler = start(&model, &engine, options);
        let events: Vec<_> = plans.iter().map(|plan| scheduler.submit(plan.request(&model)).unwrap()).collect();
        for (plan, events) in plans.iter().zip(events) {
            let answer = read(events);
            prop_assert_eq!(answer.error, None);
            if answer.reason != Some(FinishReason::ContextFull) {
                prop_assert_eq!(&answer.ids, &reference(&model, &plan.request(&model)).0, "{:?}", plan);
            }
        }
        prop_assert_eq!(scheduler.metrics().requests.failed, 0);
    }
}

/// Requests of text beside those with spans have the results and the counters of requests alone.
#[test]
fn text_beside_spans_is_as_alone() {
    let (model, scheduler) = stories(3);
    let text = || Request { ignore_eos: true, ..greedy(token_ids(4, 60), 40) };
    let spans: Vec<_> = (1..3u8).map(|i| with_span(&token_ids(1, 80), 20..55, &content(&model, i, 35, true))).collect();
    let events: Vec<_> = spans.iter().map(|request| scheduler.submit(again(request)).unwrap()).collect();
    let answer = read(scheduler.submit(text()).unwrap());
    assert_eq!((answer.ids, answer.usage.cached_tokens), (reference(&model, &text()).0, 0));
    for (events, request) in events.into_iter().zip(&spans) {
        assert_eq!(read(events).ids, reference(&model, request).0);
    }
    assert_eq!(read(scheduler.submit(text()).unwrap()).usage.cached_tokens, 59);
}
