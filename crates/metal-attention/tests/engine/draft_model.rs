//! Drafts of a second model: llama.cpp's, whatever its KV cache has and however sequences share the steps.

use std::sync::{Arc, Mutex};

use metal_attention::gguf::GgufFile;
use metal_attention::speculation::{DraftModel, DraftModelError, DraftModelOptions, DraftRequest, Drafter};
use metal_attention::{
    CacheType, CpuExecutor, CpuOptions, Device, EngineOptions, Error, ForwardError, ForwardPass, HookedExecutor, Hooks,
    Model, ModelOptions, Session, SessionOptions, Step,
};
use metal_attention_testing::models::{draft_models, more_architectures};
use serde::Deserialize;

#[derive(Deserialize)]
struct Reference {
    cases: Vec<Case>,
}

/// What llama.cpp drafts after some tokens.
#[derive(Deserialize)]
struct Case {
    name: String,
    target: String,
    drafter: String,
    tokens: Vec<u32>,
    drafts: Vec<u32>,
    /// The logits from which each draft was taken.
    logits: Option<Vec<Vec<f64>>>,
}

fn cases() -> Vec<Case> {
    metal_attention_testing::reference::read::<Reference>("draft-models").cases
}

fn open(bytes: &[u8]) -> Model {
    Model::from_gguf(GgufFile::from_bytes(bytes).unwrap(), &ModelOptions::default()).unwrap()
}

fn engine(n_seq: usize) -> EngineOptions {
    EngineOptions {
        device: Device::Cpu,
        n_threads: Some(1),
        n_ctx: Some(128),
        n_seq,
        cache_type: CacheType::F32,
        ..Default::default()
    }
}

fn nmse(got: &[f32], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let mean = want.iter().sum::<f64>() / want.len() as f64;
    let error: f64 = got.iter().zip(want).map(|(&g, w)| (f64::from(g) - w).powi(2)).sum();
    error / want.iter().map(|w| (w - mean).powi(2)).sum::<f64>()
}

/// The number of tokens of each step.
#[derive(Clone, Default)]
struct StepSizes(Arc<Mutex<Vec<usize>>>);

impl Hooks for StepSizes {
    fn before_step(&mut self, step: &Step) -> Result<(), ForwardError> {
        self.0.lock().unwrap().push(step.tokens.len());
        Ok(())
    }
}

impl StepSizes {
    /// A drafter of the pair with other vocabularies, whose steps are counted.
    fn drafter(&self, draft: &Model, options: &SessionOptions) -> DraftModel {
        let target = open(&draft_models()["draft-same.gguf"]);
        DraftModel::with_pass(&target, draft, self.pass(draft, options), DraftModelOptions::default()).unwrap()
    }

    fn pass(&self, draft: &Model, options: &SessionOptions) -> Box<dyn ForwardPass> {
        let cpu = CpuOptions { n_threads: 1, ..Default::default() };
        let inner = CpuExecutor::new(&cpu, draft.loaded(), options).unwrap();
        Box::new(Session::new(HookedExecutor::new(inner, self.clone())))
    }

    /// Those since the last call.
    fn take(&self) -> Vec<usize> {
        std::mem::take(&mut *self.0.lock().unwrap())
    }
}

/// The drafts for one sequence, each with the logits from which it was taken.
fn scored(drafter: &mut DraftModel, ids: &[u32], n: usize) -> (Vec<u32>, Vec<Vec<f32>>) {
    let mut logits = Vec::new();
    let mut keep = |request: usize, draft: usize, row: &[f32]| {
        assert_eq!((request, draft), (0, logits.len()));
        logits.push(row.to_vec());
    };
    let drafts = drafter.propose_with_logits(&[DraftRequest { seq: 0, ids, prediction: &[], n }], &mut keep).unwrap();
    (drafts.into_iter().flat_map(|draft| draft.ids).collect(), logits)
}

fn propose(drafter: &mut DraftModel, seq: usize, ids: &[u32], n: usize) -> Vec<u32> {
    drafter.propose(&[DraftRequest { seq, ids, prediction: &[], n }]).unwrap().remove(0).ids
}

#[test]
fn drafts_are_those_of_llama_cpp() {
    let mut n_rows = 0;
    for case in cases() {
        let (target, draft) = (open(&draft_models()[&case.target]), open(&draft_models()[&case.drafter]));
        let mut drafter = DraftModel::new(&target, &draft, &engine(1), DraftModelOptions::default()).unwrap();
        let (drafts, logits) = scored(&mut drafter, &case.tokens, case.drafts.len());
        assert_eq!(drafts, case.drafts, "{}", case.name);
        assert!(logits.iter().flatten().all(|logit| logit.is_finite()), "{}: all tokens are known", case.name);
        for (got, want) in logits.iter().zip(case.logits.iter().flatten()) {
            let error = nmse(got, want);
            // The reference has 13 bits of each.
            assert!(error <= 2e-8, "{}: NMSE {error:e}", case.name);
            n_rows += 1;
        }
        assert_eq!(propose(&mut drafter, 0, &case.tokens, 4), case.drafts, "{}, again", case.name);
        assert_eq!(propose(&mut drafter, 0, &case.tokens, 2), case.drafts[..2], "{}, fewer", case.name);
    }
    assert_eq!(n_rows, 12);
}

#[cfg(feature = "wgpu")]
#[test]
fn and_so_they_are_on_a_gpu() {
    let Some(gpu) = crate::wgpu::device::gpu() else { return };
    for case in cases() {
        let (target, draft) = (open(&draft_models()[&case.target]), open(&draft_models()[&case.drafter]));
        let options = SessionOptions { n_ctx: 128, cache_type: CacheType::F32, ..Default::default() };
        let pass = metal_attention::WgpuExecutor::session(Arc::clone(&gpu), draft.loaded(), &options).unwrap();
        let options = DraftModelOptions { p_min: Some(0.0) };
        let mut drafter = DraftModel::with_pass(&target, &draft, Box::new(pass), options).unwrap();
        assert_eq!(propose(&mut drafter, 0, &case.tokens, 4), case.drafts, "{}", case.name);
    }
}

#[test]
fn what_the_cache_has_is_not_evaluated_again() {
    for case in cases().iter().filter(|case| case.tokens.len() == 16) {
        let draft = open(&draft_models()[&case.drafter]);
        let options = SessionOptions { n_ctx: 128, n_ubatch: 10, cache_type: CacheType::F32, ..Default::default() };
        let steps = StepSizes::default();
        let mut drafter = steps.drafter(&draft, &options);
        let mut step = |ids: &[u32], n: usize, sizes: &[usize]| {
            let got = propose(&mut drafter, 0, ids, n);
            assert_eq!(steps.take(), sizes, "{} tokens", ids.len());
            assert_eq!(got, propose(&mut steps.drafter(&draft, &options), 0, ids, n), "as if from the start");
            steps.take();
            got
        };
        let mut ids = case.tokens.clone();
        // The prompt in two chunks; the fourth draft is not evaluated.
        let drafts = step(&ids, 4, &[10, 6, 1, 1, 1]);
        // Two drafts hold.
        ids.extend(&drafts[..2]);
        ids.push(77);
        let drafts = step(&ids, 4, &[1, 1, 1, 1]);
        // All of them do.
        ids.extend(&drafts);
        ids.push(88);
        step(&ids, 4, &[2, 1, 1, 1]);
        // Nothing is wanted, then the same again, then one token.
        step(&ids, 0, &[]);
        step(&ids, 1, &[1]);
        ids.push(99);
        step(&ids, 1, &[1]);
        // The sequence is cut back, and another one takes its place.
        step(&ids[..12], 2, &[1, 1]);
        step(&[&ids[..5], &[30, 31, 32]].concat(), 1, &[3]);
        step(&[9, 8, 7], 1, &[3]);
    }
}

#[test]
fn sequences_share_the_steps() {
    let draft = open(&draft_models()["draft-other-drafter.gguf"]);
    let cases: Vec<_> = cases().into_iter().filter(|case| case.name == "draft-other").collect();
    let options = SessionOptions { n_ctx: 128, n_seq: 4, cache_type: CacheType::F32, ..Default::default() };
    let steps = StepSizes::default();
    let mut drafter = steps.drafter(&draft, &options);
    let request = |seq: usize, case: usize, n| DraftRequest { seq, ids: &cases[case].tokens, prediction: &[], n };
    let requests = [request(3, 0, 4), request(0, 1, 1), request(2, 1, 0), request(1, 2, 3)];
    let drafts: Vec<_> = drafter.propose(&requests).unwrap().into_iter().map(|draft| draft.ids).collect();
    let want = [&cases[0].drafts[..4], &cases[1].drafts[..1], &[], &cases[2].drafts[..3]];
    assert_eq!(drafts, want);
    assert_eq!(steps.take(), [7 + 16 + 29, 2, 2, 1]);
    let error = drafter.propose(&[request(4, 0, 1)]).unwrap_err();
    assert_eq!(error, ForwardError::SequenceOutOfRange { seq: 4, n_seq: 4 });
}

#[test]
fn the_context_of_the_draft_model_is_not_exceeded() {
    let draft = open(&draft_models()["draft-same-drafter.gguf"]);
    let steps = StepSizes::default();
    let options = SessionOptions { n_ctx: 10, cache_type: CacheType::F32, ..Default::default() };
    let mut drafter = steps.drafter(&draft, &options);
    let ids: Vec<u32> = (10..21).collect();
    let lengths: Vec<_> = [8, 10, 11, 9].iter().map(|&n| propose(&mut drafter, 0, &ids[..n], 4).len()).collect();
    assert_eq!(lengths, [3, 1, 0, 2]);
    assert_eq!(steps.take(), [8, 1, 1, 2, 1, 1]);
}

#[test]
fn unlikely_drafts_end_a_proposal() {
    let (target, draft) = (open(&draft_models()["draft-same.gguf"]), open(&draft_models()["draft-same-drafter.gguf"]));
    let case = &cases()[1];
    let drafter = |p_min| DraftModel::new(&target, &draft, &engine(1), DraftModelOptions { p_min });
    let (_, logits) = scored(&mut drafter(None).unwrap(), &case.tokens, 4);
    let probability = |logits: &[f32]| {
        let ten = metal_attention::highest(logits, 10);
        1.0 / ten.iter().map(|(_, logit)| (logit - ten[0].1).exp()).sum::<f32>()
    };
    let probabilities: Vec<_> = logits.iter().map(|logits| probability(logits)).collect();
    for p_min in [0.0, 1.0, probabilities[0] - 1e-4, probabilities[0] + 1e-4, probabilities[2] + 1e-4] {
        let n = probabilities.iter().take_while(|&&p| p >= p_min).count();
        let got = propose(&mut drafter(Some(p_min)).unwrap(), 0, &case.tokens, 4);
        assert_eq!(got, case.drafts[..n], "{p_min} of {probabilities:?}");
    }
    for p_min in [-0.1, 1.1, f32::NAN] {
        let error = drafter(Some(p_min)).err().unwrap();
        assert!(matches!(error, Error::DraftModel(DraftModelError::NoProbability { .. })), "{error}");
    }
}

#[test]
fn recurrent_states_are_those_of_the_sequence() {
    for name in ["mamba2.gguf", "qwen35.gguf", "rwkv7.gguf", "lfm2.gguf", "mamba.gguf"] {
        let draft = open(&more_architectures()[name]);
        let options = SessionOptions { n_ctx: 128, n_seq: 4, cache_type: CacheType::F32, ..Default::default() };
        let steps = StepSizes::default();
        let new = || {
            DraftModel::with_pass(&draft, &draft, steps.pass(&draft, &options), DraftModelOptions::default()).unwrap()
        };
        let mut drafter = new();
        let mut ids = vec![1, 20, 30, 40, 50];
        for held in [4, 1, 0, 3, 2] {
            let drafts = propose(&mut drafter, 1, &ids, 4);
            let sizes = steps.take();
            assert_eq!(sizes[1..], [1, 1, 1], "{name}");
            assert!(sizes[0] <= 5, "{name}: what was evaluated is kept: {sizes:?}");
            assert_eq!(drafts, propose(&mut new(), 0, &ids, 4), "{name}");
            steps.take();
            ids.extend(&drafts[..held]);
            ids.push(60);
        }
    }
}

#[test]
fn sequences_without_a_request_give_up_their_pages() {
    let draft = open(&draft_models()["draft-same-drafter.gguf"]);
    let case = &cases()[0];
    let options =
        SessionOptions { n_ctx: 64, n_seq: 3, n_cache: Some(128), cache_type: CacheType::F32, ..Default::default() };
    let steps = StepSizes::default();
    let mut drafter = steps.drafter(&draft, &options);
    for seq in [0, 1, 2, 1] {
        assert_eq!(propose(&mut drafter, seq, &case.tokens, 4), case.drafts, "sequence {seq}");
    }
    assert_eq!(steps.take(), [7, 1, 1, 1].repeat(4));
    drafter.forget(1);
    assert_eq!(propose(&mut drafter, 1, &case.tokens, 4), case.drafts);
    assert_eq!(steps.take(), [7, 1, 1, 1], "nothing was kept");
    let all: Vec<_> = (0..3).map(|seq| DraftRequest { seq, ids: &case.tokens, prediction: &[], n: 1 }).collect();
    assert!(matches!(drafter.propose(&all).unwrap_err(), ForwardError::OutOfPages { .. }));
}

#[test]
fn models_that_cannot_draft_are_refused() {
    let target = open(&draft_models()["draft-same.gguf"]);
    let refused = |draft: &Model| DraftModel::new(&target, draft, &engine(1), DraftModelOptions::default()).err();
    let error = refused(&open(&more_architectures()["bert.gguf"])).unwrap();
    assert!(matches!(error, Error::DraftModel(DraftModelError::NoText)), "{error}");
    assert!(refused(&Model::built_in().unwrap()).is_none());
}

#[test]
fn memory_is_that_of_the_draft_model() {
    let (target, draft) = (open(&draft_models()["draft-same.gguf"]), open(&draft_models()["draft-other-drafter.gguf"]));
    let drafter = DraftModel::new(&target, &draft, &engine(2), DraftModelOptions::default()).unwrap();
    let alone = draft.forward_pass(&engine(2)).unwrap().memory_use();
    let memory = drafter.memory_use();
    assert_eq!((memory.weights, memory.kv_cache), (alone.weights, alone.kv_cache));
    // The tables of the vocabularies: two numbers for each token of the target, one for each of the draft model.
    assert_eq!(memory.scratch - alone.scratch, 4 * (2 * 320 + 327));
}
