//! Prediction heads (multi-token prediction) in models' own files: their drafts and logits are llama.cpp's on each backend, also
//! of several sequences at once, with prompts in other chunks, and after drafts were taken or refused.

use std::collections::BTreeMap;

use metal_attention::backends::BackendPass;
use metal_attention::gguf::GgufFile;
use metal_attention::speculation::{DraftRequest, Drafter, Evaluated, HeadDrafter};
use metal_attention::{
    Batch, BatchToken, CacheType, Device, EngineOptions, ForwardError, ForwardPass, HiddenRequest, Model, ModelOptions,
    OutputKind, TracedTokens,
};
use metal_attention_testing::models;
use serde::Deserialize;

/// Largest NMSE of a draft's logits.
const LIMIT: f64 = 1e-6;

/// What llama.cpp drafts with the head of a model.
#[derive(Deserialize)]
struct Case {
    model: String,
    /// The target reads all but the last one.
    tokens: Vec<u32>,
    drafts: Vec<u32>,
    /// The logits from which each draft is taken.
    logits: Vec<Vec<f32>>,
}

#[derive(Deserialize)]
struct Cases {
    cases: Vec<Case>,
}

/// The cases by the names of their models, three each.
fn cases() -> BTreeMap<String, Vec<Case>> {
    let all: Cases = metal_attention_testing::reference::read("heads");
    let mut by_model = BTreeMap::<String, Vec<Case>>::new();
    for case in all.cases {
        by_model.entry(case.model.clone()).or_default().push(case);
    }
    by_model
}

fn open(name: &str) -> Model {
    Model::from_gguf(GgufFile::from_bytes(&models::with_heads(name)).unwrap(), &ModelOptions::default()).unwrap()
}

fn options(device: Device) -> EngineOptions {
    let (n_ctx, n_ubatch) = (Some(128), Some(8));
    EngineOptions { device, n_ctx, n_ubatch, n_seq: 3, cache_type: CacheType::F32, exact: true, ..Default::default() }
}

/// A target with the drafter of its heads.
struct Pair {
    target: Box<dyn BackendPass>,
    drafter: HeadDrafter,
}

impl Pair {
    fn new(model: &Model, target: Box<dyn BackendPass>, options: &EngineOptions) -> Self {
        let drafter = HeadDrafter::beside(model, &*target, options).unwrap().expect("a model with heads");
        Self { target, drafter }
    }

    fn on_the_cpu(model: &Model) -> Self {
        let options = options(Device::Cpu);
        Self::new(model, model.backend(&options).unwrap(), &options)
    }

    /// Evaluates `tokens`, which may be of several sequences, with the target in batches of at most `n`, and lets the drafter observe
    /// each batch.
    fn evaluate(&mut self, tokens: &[BatchToken], n: usize) {
        let (before, n_embd) = (self.drafter.reads_hidden().to_vec(), self.target.spec().n_embd);
        for batch in tokens.chunks(n) {
            let request = HiddenRequest { before: &before, tokens: TracedTokens::All };
            let (_, rows) = self.target.forward_with_hidden(batch.into(), OutputKind::Hidden, request).unwrap();
            let mut start = 0;
            for run in batch.chunk_by(|a, b| a.seq == b.seq) {
                let ids: Vec<_> = run.iter().map(|token| token.id).collect();
                let rows = &rows.of_layer(0)[start * n_embd..][..run.len() * n_embd];
                let evaluated = Evaluated { seq: run[0].seq, first: run[0].pos, ids: &ids, hidden: &[rows] };
                self.drafter.observe(evaluated).unwrap();
                start += run.len();
            }
        }
    }

    /// Evaluates the tokens of `ids` from position `first` on but the last one, in sequence `seq`.
    fn evaluate_from(&mut self, seq: usize, first: usize, ids: &[u32], n: usize) {
        let evaluated = ids[..ids.len() - 1].iter().enumerate().skip(first);
        let tokens: Vec<_> = evaluated.map(|(pos, &id)| BatchToken { id, seq, pos, output: false }).collect();
        self.evaluate(&tokens, n);
    }

    /// Drafts and their logits.
    fn propose(&mut self, requests: &[DraftRequest<'_>]) -> (Vec<Vec<u32>>, Vec<Vec<Vec<f32>>>) {
        let mut logits = vec![Vec::new(); requests.len()];
        let mut keep = |request: usize, draft: usize, row: &[f32]| {
            assert_eq!(logits[request].len(), draft);
            logits[request].push(row.to_vec());
        };
        let drafts = self.drafter.propose_with_logits(requests, &mut keep).unwrap();
        (drafts.into_iter().map(|draft| draft.ids).collect(), logits)
    }
}

fn nmse(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let error: f64 = want.iter().zip(got).map(|(w, g)| f64::from(w - g).powi(2)).sum();
    error / want.iter().map(|&w| f64::from(w).powi(2)).sum::<f64>()
}

fn request(seq: usize, case: &Case) -> DraftRequest<'_> {
    DraftRequest { seq, ids: &case.tokens, prediction: &[], n: 4 }
}

fn check_case(case: &Case, drafts: &[u32], logits: &[Vec<f32>]) {
    let (name, n) = (&case.model, case.tokens.len());
    assert_eq!(drafts, case.drafts, "{name}, {n} tokens");
    for (i, (got, want)) in logits.iter().zip(&case.logits).enumerate() {
        let error = nmse(got, want);
        assert!(error <= LIMIT, "{name}, {n} tokens, draft {i}: NMSE {error:e}");
    }
}

/// All cases of each of `models`: one after the other, and together with other chunks.
fn check(models: &[&str], set_up: impl Fn(&Model) -> Pair) {
    let all = cases();
    for (name, cases) in all.iter().filter(|(name, _)| models.is_empty() || models.contains(&name.as_str())) {
        let model = open(name);
        let mut pair = set_up(&model);
        for case in cases {
            pair.target.reset();
            pair.evaluate_from(0, 0, &case.tokens, usize::MAX);
            let (drafts, logits) = pair.propose(&[request(0, case)]);
            check_case(case, &drafts[0], &logits[0]);
        }
        pair.target.reset();
        // Batches end within prompts, and have tokens of several sequences.
        let mut tokens = Vec::new();
        for (seq, case) in cases.iter().enumerate() {
            let evaluated = case.tokens[..case.tokens.len() - 1].iter().enumerate();
            tokens.extend(evaluated.map(|(pos, &id)| BatchToken { id, seq, pos, output: false }));
        }
        pair.evaluate(&tokens, 5);
        let requests: Vec<_> = cases.iter().enumerate().map(|(seq, case)| request(seq, case)).collect();
        let (drafts, logits) = pair.propose(&requests);
        for (i, case) in cases.iter().enumerate() {
            check_case(case, &drafts[i], &logits[i]);
        }
    }
}

#[test]
fn every_head_gives_llama_cpps_drafts_on_the_cpu() {
    check(&[], Pair::on_the_cpu);
}

/// Models whose heads have attention with gates, latent attention, and those of a chain with windows.
#[cfg(any(feature = "wgpu", feature = "cuda"))]
const FEWER: [&str; 3] = ["qwen35.gguf", "deepseek2.gguf", "step35.gguf"];

#[cfg(feature = "wgpu")]
#[test]
fn every_head_gives_llama_cpps_drafts_through_wgpu() {
    use metal_attention::WgpuExecutor;

    let Some(gpu) = crate::wgpu::device::gpu() else { return };
    let models: &[&str] = if crate::wgpu::device::takes_fewer_cases(&gpu) { &FEWER } else { &[] };
    check(models, |model| {
        let options = options(Device::Wgpu);
        let session = options.session_options(options.n_ctx_of(model), 8);
        let target = WgpuExecutor::session(std::sync::Arc::clone(&gpu), model.loaded(), &session).unwrap();
        Pair::new(model, Box::new(target), &options)
    });
}

#[cfg(feature = "cuda")]
#[test]
fn every_head_gives_llama_cpps_drafts_through_cuda() {
    if !crate::cuda::has_cuda() {
        return;
    }
    let models: &[&str] = if crate::cuda::takes_fewer_cases() { &FEWER } else { &[] };
    check(models, |model| {
        let options = options(Device::Cuda(0));
        Pair::new(model, model.backend(&options).unwrap(), &options)
    });
}

/// The drafts after `ids` of a drafter that has seen nothing else.
fn fresh(model: &Model, ids: &[u32]) -> (Vec<Vec<u32>>, Vec<Vec<Vec<f32>>>) {
    let mut pair = Pair::on_the_cpu(model);
    pair.evaluate_from(0, 0, ids, usize::MAX);
    pair.propose(&[DraftRequest { seq: 0, ids, prediction: &[], n: 3 }])
}

/// The target takes some drafts and refuses others; its states then stand in the place of the heads' own, so that the next drafts
/// are those of a drafter that has read the sequence at once, bit for bit.
#[test]
fn drafts_after_verified_ones_are_those_of_the_whole_sequence() {
    for (name, cases) in cases() {
        let model = open(&name);
        let mut pair = Pair::on_the_cpu(&model);
        let mut ids = cases[1].tokens.clone();
        pair.evaluate_from(1, 0, &ids, 7);
        for n_taken in [1, 0, 3, 2] {
            let (drafts, logits) = pair.propose(&[DraftRequest { seq: 1, ids: &ids, prediction: &[], n: 3 }]);
            let want = fresh(&model, &ids);
            assert_eq!(drafts, want.0, "{name}, {} tokens", ids.len());
            assert!(logits == want.1, "{name}, {} tokens: other logits", ids.len());
            // The target evaluates the last token and all drafts, of which some hold; then another token follows.
            let first = ids.len() - 1;
            let verified: Vec<_> = ids[first..].iter().chain(&drafts[0]).copied().collect();
            let token = |(i, &id)| BatchToken { id, seq: 1, pos: first + i, output: true };
            let tokens: Vec<_> = verified.iter().enumerate().map(token).collect();
            pair.evaluate(&tokens, usize::MAX);
            let n_taken = n_taken.min(drafts[0].len());
            ids.extend_from_slice(&drafts[0][..n_taken]);
            ids.push((drafts[0].get(n_taken).copied().unwrap_or(5) + 1) % 300);
            // Models with recurrent states go back to the start of the batch, and evaluate again what holds.
            let reached = pair.target.rewind(1, ids.len() - 1);
            pair.evaluate_from(1, reached, &ids, usize::MAX);
        }
    }
}

/// A sequence that is cut back, replaced, or only partly observed still gets drafts, and others are not disturbed.
#[test]
fn sequences_may_be_cut_back_replaced_or_observed_in_part() {
    let (all, name) = (cases(), "glm4moe.gguf");
    let (cases, model) = (&all[name], open(name));
    let mut pair = Pair::on_the_cpu(&model);
    let (short, long) = (&cases[0], &cases[2]);
    pair.evaluate_from(0, 0, &long.tokens, 9);
    pair.evaluate_from(2, 0, &short.tokens, 9);
    let (drafts, logits) = pair.propose(&[request(0, long)]);
    check_case(long, &drafts[0], &logits[0]);
    // Cut back without a word, and continued otherwise.
    let cut: Vec<u32> = long.tokens[..12].iter().copied().chain([7, 9, 250]).collect();
    assert_eq!(pair.target.rewind(0, 12), 12);
    pair.evaluate_from(0, 12, &cut, 9);
    let (drafts, logits) =
        pair.propose(&[DraftRequest { seq: 0, ids: &cut, prediction: &[], n: 3 }, request(2, short)]);
    let want = fresh(&model, &cut);
    assert!((&drafts[0], &logits[0]) == (&want.0[0], &want.1[0]), "{drafts:?} for {:?}", want.0);
    check_case(short, &drafts[1], &logits[1]);
    // Replaced by another one.
    pair.target.rewind(0, 0);
    pair.evaluate_from(0, 0, &cases[1].tokens, 9);
    let (drafts, logits) = pair.propose(&[request(0, &cases[1])]);
    check_case(&cases[1], &drafts[0], &logits[0]);
    // The first part was evaluated elsewhere: the head reads from there on.
    pair.drafter.forget(1);
    let shared = pair.target.share_prefix(0, 1, 10).unwrap();
    let ids = [&cases[1].tokens[..shared], &[3, 5, 8, 13]].concat();
    assert_eq!(pair.propose(&[DraftRequest { seq: 1, ids: &ids, prediction: &[], n: 3 }]).0, [Vec::<u32>::new()]);
    pair.evaluate_from(1, shared, &ids, 9);
    let (drafts, _) = pair.propose(&[DraftRequest { seq: 1, ids: &ids, prediction: &[], n: 3 }]);
    assert_eq!(drafts[0].len(), 3);
    // The target's states of the last tokens are not known: no drafts, and no error.
    let unseen = [&ids[..], &[4, 4]].concat();
    assert_eq!(pair.propose(&[DraftRequest { seq: 1, ids: &unseen, prediction: &[], n: 3 }]).0, [Vec::<u32>::new()]);
    // Not beyond the context, of 128 tokens.
    let filled: Vec<u32> = (0..127).map(|i| i * 7 % 300).collect();
    pair.target.rewind(1, 0);
    pair.evaluate_from(1, 0, &filled, 50);
    let (drafts, logits) = pair.propose(&[DraftRequest { seq: 1, ids: &filled, prediction: &[], n: 9 }]);
    let want = fresh(&model, &filled);
    assert_eq!((drafts[0].len(), &logits[0][..]), (2, &want.1[0][..2]));
}

#[test]
fn states_are_given_to_heads_alone() {
    let model = open("qwen35.gguf");
    let Pair { mut target, .. } = Pair::on_the_cpu(&model);
    let head = &model.prediction_heads().unwrap()[0];
    let mut head = target.beside(head, &options(Device::Cpu)).unwrap();
    let tokens = [BatchToken { id: 3, seq: 0, pos: 0, output: true }];
    let n_embd = target.spec().n_embd;
    let states = vec![0.5; n_embd];
    let with = |states| Batch { states, ..Batch::from(&tokens[..]) };
    let wrong = |found, expected| ForwardError::WrongStates { found, expected };
    assert_eq!(head.forward(&tokens).unwrap_err(), wrong(0, n_embd));
    assert_eq!(head.forward_greedy(&tokens).unwrap_err(), wrong(0, n_embd));
    let short = head.forward_outputs(with(&states[1..]), OutputKind::Ids, &[]).unwrap_err();
    assert_eq!(short, wrong(n_embd - 1, n_embd));
    let refused = target.forward_outputs(with(&states), OutputKind::Ids, &[]).unwrap_err();
    assert_eq!(refused, wrong(n_embd, 0));
    assert_eq!((head.position(), target.position()), (0, 0));
    head.forward_outputs(with(&states), OutputKind::Ids, &[]).unwrap();
    assert_eq!(head.position(), 1);
    // Nothing is repacked twice.
    let weights = |pass: &dyn ForwardPass| pass.memory_use().weights;
    assert!(weights(&*head) < weights(&*target) / 2);
}

#[test]
fn a_file_without_heads_has_no_drafter() {
    let (model, options) = (Model::built_in().unwrap(), options(Device::Cpu));
    let target = model.backend(&options).unwrap();
    assert!(model.prediction_heads().unwrap().is_empty());
    assert!(HeadDrafter::beside(&model, &*target, &options).unwrap().is_none());
}
