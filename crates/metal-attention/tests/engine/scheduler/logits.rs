//! Logits of whole sequences, and logits processors that change them.

use metal_attention::sampling::SamplerOptions;
use metal_attention::scheduler::{Client, Request, RequestError, Scheduler, SubmitError};
use metal_attention::{EngineOptions, LogitsProcessor, Model};

use super::support::{encode, engine, greedy, reference, stories};

/// The text that the built-in model generates greedily after "Once upon a time".
const STORY: &str = ", there was a little girl";

/// The request with a logits processor.
fn with(processor: impl LogitsProcessor + 'static, request: Request) -> Request {
    Request { logits_processor: Some(Box::new(processor)), ..request }
}

#[test]
fn a_processor_receives_the_tokens_so_far_and_the_logits_of_the_model() {
    let (model, scheduler) = stories(2);
    let prompt = encode(&model, "Once upon a time");
    let expected = reference(&model, &greedy(prompt.clone(), 8)).0;
    let mut pass = model.forward_pass(&engine()).unwrap();
    let mut tokens = prompt.clone();
    let processor = move |ids: &[u32], logits: &mut [f32]| {
        if ids.len() > tokens.len() {
            tokens.push(ids[ids.len() - 1]);
        }
        assert_eq!(ids, tokens);
        for &id in &ids[pass.position()..ids.len() - 1] {
            pass.forward_token(id).unwrap();
        }
        assert_eq!(logits, pass.forward_token(ids[ids.len() - 1]).unwrap());
        Ok(())
    };
    let other = scheduler.submit(greedy(prompt.clone(), 8)).unwrap();
    let completion = scheduler.submit(with(processor, greedy(prompt, 8))).unwrap().blocking_completion().unwrap();
    assert_eq!((&*completion.text, &completion.ids), (STORY, &expected));
    assert_eq!(other.blocking_completion().unwrap().ids, expected);
}

#[test]
fn a_processor_can_be_the_sampler() {
    let (model, scheduler) = stories(1);
    let wanted = encode(&model, " the cat sat on the mat").split_off(1);
    let prompt = encode(&model, "Once upon a time");
    let (n, n_prompt, ids) = (wanted.len(), prompt.len(), wanted.clone());
    let choice = move |tokens: &[u32], logits: &mut [f32]| {
        let next = ids[tokens.len() - n_prompt] as usize;
        let logit = logits[next];
        logits.fill(f32::NEG_INFINITY);
        logits[next] = logit;
        Ok(())
    };
    // The sampler's options make no difference. The log probabilities are the model's, not those of the changed logits.
    let sampling = SamplerOptions { temperature: 2.0, seed: Some(1), ..Default::default() };
    let request = Request { sampling, logprobs: Some(1), ..greedy(prompt, n) };
    let completion = scheduler.submit(with(choice, request)).unwrap().blocking_completion().unwrap();
    assert_eq!(completion.ids, wanted);
    assert!(completion.logprobs.iter().any(|token| token.top[0].1 > token.logprob), "{:?}", completion.logprobs);
}

#[test]
fn a_fault_of_a_processor_fails_its_own_request_only() {
    let (model, scheduler) = stories(4);
    let prompt = encode(&model, "Once upon a time");
    let n_prompt = prompt.len();
    let submit = |fault: fn(&mut [f32]) -> Result<(), String>| {
        let processor =
            move |ids: &[u32], logits: &mut [f32]| if ids.len() > n_prompt { fault(logits) } else { Ok(()) };
        scheduler.submit(with(processor, greedy(prompt.clone(), 8))).unwrap()
    };
    let error = submit(|_| Err("the rule is lost".into()));
    let panic = submit(|_| panic!("a defect in the rule"));
    let nothing = submit(|logits| {
        logits.fill(f32::NEG_INFINITY);
        Ok(())
    });
    let fine = scheduler.submit(greedy(prompt.clone(), 8)).unwrap();
    let failed = |why: &str| Err(RequestError::LogitsProcessor(why.into()));
    assert_eq!(error.blocking_completion(), failed("the rule is lost"));
    assert_eq!(nothing.blocking_completion(), failed("it leaves no token to choose"));
    assert_eq!(panic.blocking_completion(), Err(RequestError::Panicked("a defect in the rule".into())));
    assert_eq!(fine.blocking_completion().unwrap().text, STORY);
}

#[test]
fn logits_of_a_sequence_are_computed_while_others_run() {
    let model = Model::built_in().unwrap();
    let ids: Vec<u32> = (0..90).map(|i| (i * 31 % 500 + 3) as u32).collect();
    let mut pass = model.forward_pass(&engine()).unwrap();
    let n_vocab = pass.spec().n_vocab;
    let mut want = Vec::new();
    for &id in &ids {
        want.extend_from_slice(pass.forward_token(id).unwrap());
    }
    let scheduler = Scheduler::open(&model, &EngineOptions { n_ubatch: Some(16), ..engine() }, 2).unwrap();
    let other = scheduler.submit(greedy(encode(&model, "Once upon a time"), 8)).unwrap();
    for (from, first) in [(0, 0), (89, 89), (90, 90), (200, 90)] {
        let got = scheduler.logits(Client::Unknown, ids.clone(), from).unwrap().blocking_wait().unwrap();
        let want = &want[first * n_vocab..];
        assert_eq!(got.len(), want.len(), "from {from}");
        let error: f64 = got.iter().zip(want).map(|(a, b)| f64::from(a - b).powi(2)).sum();
        let power: f64 = want.iter().map(|b| f64::from(*b).powi(2)).sum();
        assert!(error <= 1e-6 * power, "from {from}: {error} of {power}");
    }
    assert_eq!(other.blocking_completion().unwrap().text, STORY);
    assert_eq!(scheduler.logits(Client::Unknown, vec![], 0).err(), Some(SubmitError::EmptyPrompt));
    let unknown = scheduler.logits(Client::Unknown, vec![1, 512], 0).err();
    assert_eq!(unknown, Some(SubmitError::TokenOutOfRange { id: 512, n_vocab }));
    drop(scheduler.logits(Client::Unknown, ids, 0).unwrap());
}
