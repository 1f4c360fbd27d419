//! Log probabilities of prompts' tokens.

use metal_attention::EngineOptions;
use metal_attention::scheduler::{Client, Event, FinishReason, Request, SchedulerOptions};

use super::support::{Answer, encode, engine, greedy, log_probabilities, read, start, stories};

const TEXT: &str = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park.";

/// A request for log probabilities of the prompt with `n_top` alternatives each, and for `n` tokens.
fn scored(prompt: &[u32], n: usize, n_top: usize) -> Request {
    Request { prompt_logprobs: Some(n_top), ..greedy(prompt.to_vec(), n) }
}

/// Checks an answer's log probabilities of its prompt against `expected`, those computed from the logits of the whole
/// sequence.
fn check(answer: &Answer, expected: &[f32], n_top: usize) {
    let logprobs = answer.prompt_logprobs.as_ref().unwrap();
    assert_eq!(logprobs.len(), expected.len());
    for (token, expected) in logprobs.iter().zip(expected) {
        assert!((token.logprob - expected).abs() < 1e-5, "{token:?} {expected}");
        assert_eq!(token.top.len(), n_top);
        let better = token.top.iter().filter(|(_, logprob)| *logprob > token.logprob).count();
        assert!(if token.rank <= n_top { better + 1 == token.rank } else { better == n_top }, "{token:?}");
    }
}

#[test]
fn prompt_logprobs_equal_those_of_the_whole_sequence() {
    let (model, scheduler) = stories(2);
    let ids = encode(&model, TEXT);
    let expected = log_probabilities(&model, &ids);
    // The first request evaluates the prompt, the later ones could find it in the prefix cache.
    for n in [0, 1, 4] {
        let answer = read(scheduler.submit(scored(&ids, n, 3)).unwrap());
        check(&answer, &expected, 3);
        assert_eq!((answer.ids.len(), answer.reason), (n, Some(FinishReason::Length)));
        assert_eq!((answer.usage.prompt_tokens, answer.usage.cached_tokens), (ids.len(), 0));
    }
    // The tokens that were evaluated for log probabilities are in the prefix cache.
    let answer = read(scheduler.submit(greedy(ids.clone(), 4)).unwrap());
    assert_eq!((answer.prompt_logprobs, answer.usage.cached_tokens), (None, ids.len() - 1));
    // A prompt of one token has none.
    for n in [0, 2] {
        let answer = read(scheduler.submit(scored(&ids[..1], n, 3)).unwrap());
        assert_eq!((answer.prompt_logprobs, answer.ids.len()), (Some(vec![]), n));
    }
    let whole = scheduler.submit(Request { buffer_events: true, ..scored(&ids, 1, 0) }).unwrap();
    assert_eq!(whole.blocking_completion().unwrap().prompt_logprobs.len(), expected.len());
}

#[test]
fn prompt_logprobs_do_not_depend_on_the_batches() {
    let (model, _) = stories(1);
    let engine = EngineOptions { n_seq: 3, ..engine() };
    let ids = encode(&model, TEXT);
    let expected = log_probabilities(&model, &ids);
    for n_batch in [3, 7, 64] {
        let options = SchedulerOptions { n_parallel: 3, n_batch: Some(n_batch), ..Default::default() };
        let scheduler = start(&model, &engine, options);
        let events: Vec<_> = [scored(&ids, 2, 1), greedy(ids.clone(), 8), scored(&ids, 0, 1)]
            .map(|request| scheduler.submit(request).unwrap())
            .into();
        let answers: Vec<_> = events.into_iter().map(read).collect();
        check(&answers[0], &expected, 1);
        check(&answers[2], &expected, 1);
        assert_eq!(answers[0].ids, answers[1].ids[..2]);
    }
}

/// Preempted sequences continue from where they were, and send the log probabilities once.
#[test]
fn prompt_logprobs_are_sent_once_where_the_cache_is_small() {
    let (model, _) = stories(1);
    let ids = encode(&model, TEXT);
    let expected = log_probabilities(&model, &ids);
    let engine = EngineOptions { n_seq: 4, n_cache: Some(128), ..engine() };
    let options = SchedulerOptions { n_parallel: 4, n_batch: Some(4), ..Default::default() };
    let scheduler = start(&model, &engine, options);
    let events: Vec<_> = (0..4)
        .map(|key| scheduler.submit(Request { client: Client::Key(key), ..scored(&ids, 40, 2) }).unwrap())
        .collect();
    for answer in events.into_iter().map(read) {
        check(&answer, &expected, 2);
    }
}

#[test]
fn the_end_token_has_a_log_probability() {
    let (model, scheduler) = stories(1);
    let eos = model.tokenizer().unwrap().eos().unwrap();
    let request = Request { logit_bias: vec![(eos, 1e6)], logprobs: Some(1), ..greedy(encode(&model, TEXT), 4) };
    let mut events = scheduler.submit(request).unwrap();
    let Some(Event::Done { end_token, end_logprobs, .. }) = events.blocking_recv() else { panic!("no end") };
    assert_eq!(end_token, Some(eos));
    // It is the model's, without the bias.
    assert!(end_logprobs.unwrap().logprob < -1.0);
}
