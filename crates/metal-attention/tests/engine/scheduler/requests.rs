//! The options of a request, and the ways in which a request ends: limits, stops, deadlines, cancellation, failures.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::support::{Controls, encode, engine, greedy, read, reference, stories};
use metal_attention::sampling::{SamplerOptions, SamplingError};
use metal_attention::scheduler::{
    Client, Event, FinishReason, Request, RequestError, Scheduler, SchedulerOptions, StartError, SubmitError,
};
use metal_attention::{BatchToken, Constraint, EngineOptions, ForwardError, Model};

/// The text that the built-in model generates greedily after "Once upon a time".
const STORY: &str = ", there was a little girl named Lily. She loved to play outside in the park.";

/// A scheduler, and the controls of its forward pass.
fn start_controlled(n: usize, options: SchedulerOptions) -> (Model, Scheduler, Controls) {
    let model = Model::built_in().unwrap();
    let controls = Controls::default();
    let pass = controls.pass(&model, &EngineOptions { n_seq: n, ..engine() });
    let scheduler = Scheduler::start(pass, Arc::new(model.clone()), options).unwrap();
    (model, scheduler, controls)
}

/// Waits until `is_so` returns true, at most a minute. `what` names the condition in the panic's message.
fn wait(what: &str, is_so: impl Fn() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < Duration::from_secs(60), "waited for {what} in vain");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn stop_strings_and_lengths_end_a_sequence() {
    let (model, scheduler) = stories(2);
    let prompt = encode(&model, "Once upon a time");
    let request = Request { stop: ["girl".into()].into(), ..greedy(prompt.clone(), 50) };
    let answer = read(scheduler.submit(request).unwrap());
    assert_eq!((&*answer.text, answer.reason), (", there was a little ", Some(FinishReason::StopString)));
    // If the sequence ends first, the text that was held back as a possible stop string is sent.
    let request = Request { stop: [" girl named Bob".into()].into(), ..greedy(prompt.clone(), 8) };
    let answer = read(scheduler.submit(request).unwrap());
    assert_eq!((&*answer.text, answer.reason), (", there was a little girl", Some(FinishReason::Length)));
    let answer = read(scheduler.submit(greedy(prompt.clone(), 0)).unwrap());
    assert_eq!((&*answer.text, answer.reason), ("", Some(FinishReason::Length)));
    let request = Request { max_tokens: None, ignore_eos: true, ..greedy(prompt, 0) };
    let answer = read(scheduler.submit(request).unwrap());
    assert_eq!(answer.reason, Some(FinishReason::ContextFull));
    assert_eq!(answer.usage.generated_tokens, 256 - 5 + 1);
}

#[test]
fn the_end_token_can_be_biased_and_forbidden() {
    let (model, scheduler) = stories(1);
    let eos = model.tokenizer().unwrap().eos().unwrap();
    let prompt = encode(&model, "Once upon a time");
    let request = |ignore_eos| Request { logit_bias: vec![(eos, 1e6)], ignore_eos, ..greedy(prompt.clone(), 8) };
    let answer = read(scheduler.submit(request(false)).unwrap());
    assert_eq!((answer.reason, answer.ids.len()), (Some(FinishReason::EndOfText), 0));
    let answer = read(scheduler.submit(request(true)).unwrap());
    assert_eq!((&*answer.text, answer.reason), (", there was a little girl", Some(FinishReason::Length)));
    let request = Request { ignore_eos: true, ..greedy(prompt.clone(), 8) };
    assert_eq!(read(scheduler.submit(request).unwrap()).text, ", there was a little girl");
}

#[test]
fn a_sequence_past_its_soft_deadline_ends_with_its_line() {
    let (model, scheduler) = stories(1);
    let prompt = encode(&model, "Once upon a time");
    let text = |line_end_after| {
        let request = Request { line_end_after, ignore_eos: true, ..greedy(prompt.clone(), 200) };
        read(scheduler.submit(request).unwrap())
    };
    let whole = text(None);
    let line = whole.text.find('\n').unwrap() + 1;
    let first_line = text(Some(Duration::ZERO));
    assert_eq!((&*first_line.text, first_line.reason), (&whole.text[..line], Some(FinishReason::Length)));
    assert_eq!(text(Some(Duration::from_secs(3600))).text, whole.text);
}

#[test]
fn a_sequence_has_the_requested_minimum_of_tokens() {
    let (model, scheduler) = stories(1);
    let eos = model.tokenizer().unwrap().eos().unwrap();
    let prompt = encode(&model, "Once upon a time");
    let eager = |n| Request { logit_bias: vec![(eos, 1e6)], ..greedy(prompt.clone(), n) };
    for min_tokens in [0, 5] {
        let answer = read(scheduler.submit(Request { min_tokens, ..eager(8) }).unwrap());
        assert_eq!(
            (answer.ids.len(), answer.reason, answer.end_token),
            (min_tokens, Some(FinishReason::EndOfText), Some(eos))
        );
        assert_eq!(answer.usage.generated_tokens, min_tokens);
    }
    let answer = read(scheduler.submit(Request { min_tokens: 9, ..eager(8) }).unwrap());
    assert_eq!((&*answer.text, answer.reason), (", there was a little girl", Some(FinishReason::Length)));
    assert_eq!(answer.end_token, None);
}

#[test]
fn stop_tokens_of_the_request_end_a_sequence() {
    let (model, scheduler) = stories(1);
    let prompt = encode(&model, "Once upon a time");
    let there = *encode(&model, "a there").last().unwrap();
    let stop = |min_tokens, ignore_eos| {
        let request = Request { stop_ids: [there].into(), min_tokens, ignore_eos, ..greedy(prompt.clone(), 12) };
        read(scheduler.submit(request).unwrap())
    };
    let whole = read(scheduler.submit(greedy(prompt.clone(), 12)).unwrap());
    let at = whole.ids.iter().position(|&id| id == there).unwrap();
    for ignore_eos in [false, true] {
        let answer = stop(0, ignore_eos);
        assert_eq!((&*answer.ids, answer.reason), (&whole.ids[..at], Some(FinishReason::EndOfText)));
        assert_eq!(answer.end_token, Some(there));
        // Before the minimum number of tokens it is not sampled.
        let answer = stop(12, ignore_eos);
        assert_eq!((answer.ids.len(), answer.reason), (12, Some(FinishReason::Length)));
        assert!(!answer.ids.contains(&there) && answer.ids[..at] == whole.ids[..at]);
    }
    let outside = Request { stop_ids: [512].into(), ..greedy(prompt, 1) };
    assert_eq!(scheduler.submit(outside).err(), Some(SubmitError::TokenOutOfRange { id: 512, n_vocab: 512 }));
}

#[test]
fn bad_requests_are_refused() {
    let (_, scheduler) = stories(1);
    let refused = |request| scheduler.submit(request).err().unwrap();
    assert_eq!(refused(greedy(vec![], 1)), SubmitError::EmptyPrompt);
    assert_eq!(
        refused(greedy(vec![1; 257], 1)),
        SubmitError::PromptTooLong { n_prompt: 257, n_ctx: 256, n_ctx_train: 512 }
    );
    let outside = SubmitError::TokenOutOfRange { id: 512, n_vocab: 512 };
    assert_eq!(refused(greedy(vec![1, 512], 1)), outside);
    assert_eq!(refused(Request { logit_bias: vec![(512, 1.0)], ..greedy(vec![1], 1) }), outside);
    let sampling = SamplerOptions { temperature: -1.0, ..Default::default() };
    let error = refused(Request { sampling, ..greedy(vec![1], 1) });
    assert!(matches!(error, SubmitError::Sampling(SamplingError::OutOfRange { option: "temperature", .. })));
    assert_eq!(scheduler.embed(Client::Unknown, vec![]).err(), Some(SubmitError::EmptyPrompt));
    assert_eq!(scheduler.metrics().requests.refused, 6);

    let model = Arc::new(Model::built_in().unwrap());
    let default = SchedulerOptions::default();
    for options in [
        SchedulerOptions { n_parallel: 0, ..default.clone() },
        SchedulerOptions { n_parallel: 2, ..default.clone() },
        SchedulerOptions { n_batch: Some(0), ..default.clone() },
        SchedulerOptions { n_queue: 0, ..default },
    ] {
        let pass = model.forward_pass(&engine()).unwrap();
        assert!(matches!(Scheduler::start(pass, model.clone(), options), Err(StartError::Option { .. })));
    }
}

#[test]
fn the_queue_is_limited_and_a_cancelled_request_leaves_it() {
    let options = SchedulerOptions { n_queue: 2, ..Default::default() };
    let (model, scheduler, controls) = start_controlled(1, options);
    let prompt = encode(&model, "Once upon a time");
    let long = || Request { max_tokens: None, ignore_eos: true, ..greedy(prompt.clone(), 0) };
    let held = controls.gate.close();
    let running = scheduler.submit(long()).unwrap();
    wait("the first request to run", || scheduler.metrics().waiting == 0);
    let waiting = scheduler.submit(long()).unwrap();
    let last = scheduler.submit(greedy(prompt.clone(), 3)).unwrap();
    assert_eq!(scheduler.submit(long()).err(), Some(SubmitError::QueueFull { n_queue: 2 }));
    drop((running, waiting));
    drop(held);
    assert_eq!(read(last).text, ", there was");
    let metrics = scheduler.metrics();
    assert_eq!((metrics.requests.cancelled, metrics.requests.refused, metrics.requests.length), (2, 1, 1));
    assert!(metrics.generated_tokens <= 4, "{metrics:?}");
}

#[test]
fn deadlines_end_running_and_waiting_requests() {
    let (model, scheduler, controls) = start_controlled(1, SchedulerOptions::default());
    let prompt = encode(&model, "Once upon a time");
    let deadline = Some(Instant::now() + Duration::from_millis(50));
    let request = || Request { max_tokens: None, ignore_eos: true, deadline, ..greedy(prompt.clone(), 0) };
    let held = controls.gate.close();
    let (running, waiting) = (scheduler.submit(request()).unwrap(), scheduler.submit(request()).unwrap());
    let last = scheduler.submit(greedy(prompt.clone(), 3)).unwrap();
    std::thread::sleep(Duration::from_millis(60));
    drop(held);
    let (running, waiting) = (read(running), read(waiting));
    assert_eq!((running.reason, waiting.reason), (Some(FinishReason::Deadline), Some(FinishReason::Deadline)));
    assert_eq!(waiting.usage.generated_tokens, 0);
    assert_eq!(read(last).reason, Some(FinishReason::Length));
    assert_eq!(scheduler.metrics().requests.deadline, 2);
}

#[test]
fn shutting_down_finishes_or_cancels() {
    let (model, scheduler) = stories(1);
    let prompt = encode(&model, "Once upon a time");
    let events: Vec<_> = (0..3).map(|_| scheduler.submit(greedy(prompt.clone(), 20)).unwrap()).collect();
    pollster::block_on(scheduler.shut_down(Duration::from_secs(60)));
    for events in events {
        let answer = read(events);
        assert!(STORY.starts_with(&answer.text) && answer.ids.len() == 20, "{answer:?}");
    }
    assert_eq!(scheduler.submit(greedy(prompt.clone(), 1)).err(), Some(SubmitError::ShuttingDown));

    let (_, scheduler, controls) = start_controlled(1, SchedulerOptions::default());
    let held = controls.gate.close();
    let long = || Request { max_tokens: None, ignore_eos: true, ..greedy(prompt.clone(), 0) };
    let events = [scheduler.submit(long()).unwrap(), scheduler.submit(long()).unwrap()];
    let closing = scheduler.clone();
    let closed = std::thread::spawn(move || pollster::block_on(closing.shut_down(Duration::ZERO)));
    wait("requests to be refused", || scheduler.submit(long()).err() == Some(SubmitError::ShuttingDown));
    drop(held);
    closed.join().unwrap();
    for events in events {
        assert_eq!(read(events).reason, Some(FinishReason::Cancelled));
    }
    // The scheduler's thread also ends when its last handle is dropped.
    let (_, scheduler) = stories(1);
    let events = scheduler.submit(long()).unwrap();
    drop(scheduler);
    assert!(matches!(read(events).reason, Some(FinishReason::Cancelled)));
}

#[test]
fn a_failed_step_fails_only_the_requests_of_its_batch() {
    let (model, scheduler, controls) = start_controlled(2, SchedulerOptions { n_parallel: 2, ..Default::default() });
    let prompt = encode(&model, "Once upon a time");
    controls.fail.store(true, Ordering::Relaxed);
    let answer = read(scheduler.submit(greedy(prompt.clone(), 8)).unwrap());
    assert!(matches!(answer.error, Some(RequestError::Forward(ForwardError::Device { .. }))), "{answer:?}");
    let answer = read(scheduler.submit(greedy(prompt.clone(), 8)).unwrap());
    assert_eq!(answer.text, ", there was a little girl");
    assert_eq!(scheduler.metrics().requests.failed, 1);
}

/// After a panic of the forward pass nothing runs: waiting, running, streaming and preempted requests fail.
#[test]
fn a_panic_of_the_forward_pass_fails_all_requests() {
    let options = SchedulerOptions { n_parallel: 2, time_slice: Duration::ZERO, ..Default::default() };
    let (model, scheduler, controls) = start_controlled(3, options);
    let prompt = encode(&model, "Once upon a time");
    let request = |key: usize, whole: bool| Request {
        client: Client::Key(key),
        ignore_eos: true,
        buffer_events: whole,
        ..greedy(prompt.clone(), 200)
    };
    assert_eq!(scheduler.defect(), None);
    let mut first = scheduler.submit(request(0, false)).unwrap();
    assert!(matches!(first.blocking_recv(), Some(Event::Token { .. })));
    let held = controls.gate.close();
    let events: Vec<_> = (0..9).map(|i| scheduler.submit(request(i % 4, i % 2 == 0)).unwrap()).collect();
    let embeddings: Vec<_> = (0..4).map(|i| scheduler.embed(Client::Key(i % 2), prompt.clone()).unwrap()).collect();
    controls.panic_in.store(8, Ordering::Relaxed);
    drop(held);
    for events in [first].into_iter().chain(events) {
        let answer = read(events);
        assert_eq!((answer.reason, answer.error), (None, Some(RequestError::EngineFailed)));
    }
    // Each embedding either was computed or reports the failure.
    let embeddings: Vec<_> = embeddings.into_iter().map(pollster::block_on).collect();
    assert!(embeddings.iter().all(|e| matches!(e, Ok(_) | Err(RequestError::EngineFailed))), "{embeddings:?}");
    assert_eq!(scheduler.defect().as_deref(), Some("a defect in the forward pass"));
    assert_eq!(&*pollster::block_on(scheduler.wait_for_defect()), "a defect in the forward pass");
    assert_eq!(scheduler.submit(request(0, true)).err(), Some(SubmitError::EngineFailed));
    assert_eq!(scheduler.embed(Client::Unknown, prompt.clone()).err(), Some(SubmitError::EngineFailed));
    pollster::block_on(scheduler.shut_down(Duration::from_secs(60)));
    let metrics = scheduler.metrics();
    assert_eq!(metrics.requests.failed + metrics.requests.embeddings, 14);
    assert_eq!((metrics.requests.refused, metrics.running, metrics.waiting), (2, 0, 0));
}

/// A constraint that allows only the tokens `ids`, one after the other.
struct AllowedSequence {
    /// The tokens to allow.
    ids: Vec<u32>,
    /// Index of the next one.
    at: usize,
    /// The fault at the second token: "panic", "error" or "nothing", an empty mask.
    fault: Option<&'static str>,
}

impl Constraint for AllowedSequence {
    fn allowed(&mut self, mask: &mut [u32]) -> Result<(), String> {
        match self.fault {
            Some("panic") if self.at == 1 => panic!("a defect in the grammar"),
            Some("error") if self.at == 1 => Err("the grammar is lost".into()),
            Some("nothing") if self.at == 1 => Ok(()),
            _ => {
                let id = self.ids[self.at];
                mask[id as usize / 32] |= 1 << (id % 32);
                Ok(())
            }
        }
    }

    fn accept(&mut self, id: u32) -> Result<(), String> {
        assert_eq!(id, self.ids[self.at]);
        self.at += 1;
        Ok(())
    }

    fn is_complete(&self) -> bool {
        self.at == self.ids.len()
    }
}

#[test]
fn a_fault_of_a_constraint_fails_its_own_request_only() {
    for max_top_k in [0, 16] {
        let model = Model::built_in().unwrap();
        let controls = Controls { max_top_k, ..Default::default() };
        let pass = controls.pass(&model, &EngineOptions { n_seq: 4, ..engine() });
        let options = SchedulerOptions { n_parallel: 4, ..Default::default() };
        let scheduler = Scheduler::start(pass, Arc::new(model.clone()), options).unwrap();
        let prompt = encode(&model, "Once upon a time");
        let ids = encode(&model, " the cat sat on the mat").split_off(1);
        let request = |fault, sampling: SamplerOptions| {
            let constraint: Box<dyn Constraint> = Box::new(AllowedSequence { ids: ids.clone(), at: 0, fault });
            Request { constraint: Some(constraint), sampling, ..greedy(prompt.clone(), 50) }
        };
        let faults = [None, Some("panic"), Some("error"), Some("nothing")];
        let events = faults.map(|fault| scheduler.submit(request(fault, SamplerOptions::greedy())).unwrap());
        let seeded = SamplerOptions { seed: Some(1), ..Default::default() };
        let sampled = scheduler.submit(request(None, seeded)).unwrap();
        let [fine, panicked, error, nothing] = events.map(read);
        for fine in [fine, read(sampled)] {
            assert_eq!((fine.reason, &fine.ids), (Some(FinishReason::EndOfText), &ids));
        }
        assert_eq!(panicked.error, Some(RequestError::Panicked("a defect in the grammar".into())));
        assert_eq!(error.error, Some(RequestError::Constraint("the grammar is lost".into())));
        assert_eq!(nothing.error, Some(RequestError::Constraint("no token may come next".into())));
        assert_eq!(panicked.ids, ids[..1]);
        let plain = read(scheduler.submit(greedy(prompt.clone(), 8)).unwrap());
        assert_eq!(plain.text, ", there was a little girl");
    }
}

#[test]
fn logprobs_are_those_of_the_model() {
    let (model, scheduler) = stories(2);
    let prompt = encode(&model, "Once upon a time");
    let other = scheduler.submit(greedy(prompt.clone(), 12)).unwrap();
    let sampling = SamplerOptions { temperature: 1.5, seed: Some(5), ..Default::default() };
    let request = || Request { sampling: sampling.clone(), logprobs: Some(3), ..greedy(prompt.clone(), 12) };
    let answer = read(scheduler.submit(request()).unwrap());
    assert_eq!(answer.ids, reference(&model, &request()).0, "log probabilities change no tokens");
    assert_eq!(read(other).logprobs, []);
    assert_eq!(answer.logprobs.len(), 12);
    let mut pass = model.forward_pass(&engine()).unwrap();
    pass.forward_prompt(&prompt[..4]).unwrap();
    let mut last = prompt[4];
    for (&id, token) in answer.ids.iter().zip(&answer.logprobs) {
        let logits: Vec<f64> = pass.forward_token(last).unwrap().iter().map(|&l| f64::from(l)).collect();
        let sum = logits.iter().map(|l| l.exp()).sum::<f64>().ln();
        assert!((f64::from(token.logprob) - (logits[id as usize] - sum)).abs() < 1e-5);
        assert_eq!(token.top.len(), 3);
        for (i, &(id, logprob)) in token.top.iter().enumerate() {
            assert!((f64::from(logprob) - (logits[id as usize] - sum)).abs() < 1e-5);
            assert_eq!(logits.iter().filter(|&&l| l > logits[id as usize]).count(), i);
        }
        last = id;
    }
}

#[test]
fn embeddings_are_the_mean_of_the_normalised_hidden_states() {
    let model = Model::built_in().unwrap();
    let ids: Vec<u32> = (0..90).map(|i| (i * 31 % 500 + 3) as u32).collect();
    let mut pass = model.forward_pass(&engine()).unwrap();
    let (n_embd, last) = (pass.spec().n_embd, pass.spec().n_layer() - 1);
    let mut want = vec![0f64; n_embd];
    let batch: Vec<_> =
        ids.iter().enumerate().map(|(pos, &id)| BatchToken { id, seq: 0, pos, output: false }).collect();
    let eps = f64::from(pass.spec().output.norm.unwrap().eps);
    let weight = &model.weights().output_norm.as_ref().unwrap().weight;
    let mut add = |layer: usize, states: &[f32]| {
        for state in states.chunks_exact(n_embd).filter(|_| layer == last) {
            let mean = state.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>() / n_embd as f64;
            for i in 0..n_embd {
                want[i] += f64::from(state[i]) / (mean + eps).sqrt() * f64::from(weight[i]);
            }
        }
    };
    pass.forward_traced(&batch, Some(&mut add)).unwrap();
    let length = want.iter().map(|x| x * x).sum::<f64>().sqrt();

    // Computed in prefill chunks, beside a running sequence, with only the KV pages that the two of them need.
    let engine = EngineOptions { n_seq: 2, n_cache: Some(4 * 64), ..engine() };
    let options = SchedulerOptions { n_parallel: 1, n_batch: Some(16), ..Default::default() };
    let scheduler = super::support::start(&model, &engine, options);
    let prompt = encode(&model, "Once upon a time");
    let text = scheduler.submit(greedy(prompt, 20)).unwrap();
    let embeddings = [
        scheduler.embed(Client::Unknown, ids.clone()).unwrap(),
        scheduler.embed(Client::Unknown, ids.clone()).unwrap(),
    ];
    drop(scheduler.embed(Client::Unknown, ids.clone()).unwrap());
    for embedding in embeddings {
        let embedding = pollster::block_on(embedding).unwrap();
        assert_eq!(embedding.len(), n_embd);
        for (got, want) in embedding.iter().zip(&want) {
            assert!((f64::from(*got) - want / length).abs() < 1e-6, "{got} {}", want / length);
        }
    }
    assert!(STORY.starts_with(&read(text).text));
    wait("the counters", || scheduler.metrics().requests.embeddings == 2);
    pollster::block_on(scheduler.shut_down(Duration::ZERO));
    let metrics = scheduler.metrics();
    assert!(metrics.embedding_tokens >= 180 && metrics.pages_used + metrics.pages_free == 4, "{metrics:?}");
}

#[test]
fn buffered_events_arrive_at_the_end() {
    let (model, scheduler) = stories(2);
    let prompt = encode(&model, "Once upon a time");
    let streamed = read(scheduler.submit(greedy(prompt.clone(), 30)).unwrap());
    let mut events = scheduler.submit(Request { buffer_events: true, ..greedy(prompt.clone(), 30) }).unwrap();
    let first = pollster::block_on(events.recv());
    assert!(matches!(first, Some(Event::Token { .. })), "{first:?}");
    // The sequence was finished before its first event arrived.
    assert_eq!(scheduler.metrics().generated_tokens, 60);
    let whole = read(scheduler.submit(Request { buffer_events: true, ..greedy(prompt.clone(), 30) }).unwrap());
    assert_eq!((&whole.text, &whole.ids), (&streamed.text, &streamed.ids));
    // Dropping the events cancels the request.
    drop(scheduler.submit(Request { buffer_events: true, ..greedy(prompt, 400) }).unwrap());
    wait("the scheduler to be idle", || scheduler.metrics().running == 0);
    assert!(scheduler.metrics().generated_tokens < 450);
}

#[test]
fn the_last_event_has_usage_and_timings() {
    let (model, scheduler) = stories(1);
    let prompt = encode(&model, "Once upon a time");
    let mut events = scheduler.submit(greedy(prompt, 3)).unwrap();
    let mut seen = Vec::new();
    while let Some(event) = pollster::block_on(events.recv()) {
        seen.push(event);
    }
    let [Event::Token { .. }, Event::Token { .. }, Event::Token { .. }, Event::Done { usage, timings, .. }] = &seen[..]
    else {
        panic!("{seen:?}");
    };
    assert_eq!((usage.prompt_tokens, usage.cached_tokens, usage.generated_tokens), (5, 0, 3));
    assert!(timings.prefill > Duration::ZERO && timings.decode > Duration::ZERO, "{timings:?}");
    wait("the scheduler to be idle", || scheduler.metrics().running == 0);
    let metrics = scheduler.metrics();
    assert_eq!((metrics.steps, metrics.batch_tokens), (3, 5 + 2));
    assert_eq!((metrics.batch_sizes[0], metrics.batch_sizes[3]), (2, 1));
    assert_eq!((metrics.prompt_tokens, metrics.generated_tokens, metrics.pages_used), (5, 3, 1));
}
