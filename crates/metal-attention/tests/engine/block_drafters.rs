//! Block drafters (DFlash, DFlash-2, DSpark): their drafts and logits are llama.cpp's on each backend, also of several sequences at once,
//! with prompts in other chunks, and after drafts were taken or refused.

use std::collections::BTreeMap;

use metal_attention::backends::BackendPass;
use metal_attention::gguf::GgufFile;
use metal_attention::speculation::{DraftFile, DraftRequest, Drafter, Evaluated};
use metal_attention::{
    BatchToken, CacheType, Device, EngineOptions, HiddenRequest, Model, ModelOptions, OutputKind, TracedTokens,
};
use serde::Deserialize;

/// Largest NMSE of a draft's logits, over those that are finite.
const LIMIT: f64 = 1e-6;

/// What llama.cpp drafts for a target.
#[derive(Deserialize)]
pub(crate) struct Case {
    target: String,
    drafter: String,
    /// The target reads all but the last one.
    tokens: Vec<u32>,
    drafts: Vec<u32>,
    /// The logits from which each draft is taken; `None`: the drafter lacks the token.
    logits: Vec<Vec<Option<f32>>>,
}

#[derive(Deserialize)]
struct Cases {
    cases: Vec<Case>,
}

/// The cases of a file of reference data by the names of their drafters, three each.
fn cases(file: &str) -> BTreeMap<String, Vec<Case>> {
    let all: Cases = metal_attention_testing::reference::read(file);
    let mut by_drafter = BTreeMap::<String, Vec<Case>>::new();
    for case in all.cases {
        by_drafter.entry(case.drafter.clone()).or_default().push(case);
    }
    by_drafter
}

fn gguf(name: &str) -> GgufFile {
    GgufFile::from_bytes(&metal_attention_testing::unpacked(&format!("tests/data/drafters/{name}"))).unwrap()
}

/// A target of `tests/data/drafters`.
pub(crate) fn target(name: &str) -> Model {
    Model::from_gguf(gguf(name), &ModelOptions::default()).unwrap()
}

/// A drafter of `tests/data/drafters`.
pub(crate) fn drafter(name: &str) -> DraftFile {
    DraftFile::from_gguf(gguf(name), &ModelOptions::default()).unwrap()
}

fn options(device: Device) -> EngineOptions {
    let (n_ctx, n_ubatch) = (Some(128), Some(8));
    EngineOptions { device, n_ctx, n_ubatch, n_seq: 3, cache_type: CacheType::F32, exact: true, ..Default::default() }
}

/// A target with a drafter.
struct Pair {
    target: Box<dyn BackendPass>,
    drafter: Box<dyn Drafter>,
}

/// The drafts of each request, and their logits.
type Drafted = (Vec<Vec<u32>>, Vec<Vec<Vec<f32>>>);

impl Pair {
    fn new(model: &Model, draft: &DraftFile, target: Box<dyn BackendPass>, options: &EngineOptions) -> Self {
        let drafter = draft.drafter(model, &*target, options, None).unwrap();
        Self { target, drafter }
    }

    fn on_the_cpu(model: &Model, draft: &DraftFile) -> Self {
        let options = options(Device::Cpu);
        Self::new(model, draft, model.backend(&options).unwrap(), &options)
    }

    /// Evaluates `tokens`, which may be of several sequences, with the target in batches of at most `n`, and lets the drafter observe
    /// each batch.
    fn evaluate(&mut self, tokens: &[BatchToken], n: usize) {
        let before = self.drafter.reads_hidden().to_vec();
        for batch in tokens.chunks(n) {
            let request = HiddenRequest { before: &before, tokens: TracedTokens::All };
            let (_, rows) = self.target.forward_with_hidden(batch.into(), OutputKind::Hidden, request).unwrap();
            let mut start = 0;
            for run in batch.chunk_by(|a, b| a.seq == b.seq) {
                let ids: Vec<_> = run.iter().map(|token| token.id).collect();
                let range = start..start + run.len();
                let hidden: Vec<_> = (0..before.len()).map(|i| rows.rows_of_layer(i, range.clone())).collect();
                let evaluated = Evaluated { seq: run[0].seq, first: run[0].pos, ids: &ids, hidden: &hidden };
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

    fn propose(&mut self, requests: &[DraftRequest<'_>]) -> Drafted {
        let mut logits = vec![Vec::new(); requests.len()];
        let mut keep = |request: usize, draft: usize, row: &[f32]| {
            assert_eq!(logits[request].len(), draft);
            logits[request].push(row.to_vec());
        };
        let drafts = self.drafter.propose_with_logits(requests, &mut keep).unwrap();
        let drafts: Vec<_> = drafts.into_iter().map(|draft| draft.ids).collect();
        // Without logits the device chooses them.
        let chosen = self.drafter.propose(requests).unwrap();
        assert!(chosen.iter().zip(&drafts).all(|(chosen, ids)| chosen.ids == *ids), "{chosen:?} for {drafts:?}");
        (drafts, logits)
    }

    fn propose_one(&mut self, seq: usize, ids: &[u32], n: usize) -> Drafted {
        self.propose(&[DraftRequest { seq, ids, prediction: &[], n }])
    }
}

fn nmse(got: &[f32], want: &[Option<f32>]) -> f64 {
    assert_eq!(got.len(), want.len());
    let (mut error, mut sum) = (0.0, 0.0);
    for (&got, want) in got.iter().zip(want) {
        match want {
            None => assert_eq!(got, f32::NEG_INFINITY),
            Some(want) => {
                error += f64::from(want - got).powi(2);
                sum += f64::from(*want).powi(2);
            }
        }
    }
    error / sum
}

fn request(seq: usize, case: &Case) -> DraftRequest<'_> {
    DraftRequest { seq, ids: &case.tokens, prediction: &[], n: case.drafts.len() }
}

fn check_case(case: &Case, drafts: &[u32], logits: &[Vec<f32>]) {
    let (name, n) = (&case.drafter, case.tokens.len());
    assert_eq!(drafts, case.drafts, "{name}, {n} tokens");
    for (i, (got, want)) in logits.iter().zip(&case.logits).enumerate() {
        let error = nmse(got, want);
        assert!(error <= LIMIT, "{name}, {n} tokens, draft {i}: NMSE {error:e}");
    }
}

/// All cases of a file of reference data: one after the other, and together with other chunks.
fn check(file: &str, set_up: impl Fn(&Model, &DraftFile) -> Pair) {
    for (name, cases) in cases(file) {
        let (model, draft) = (target(&cases[0].target), drafter(&name));
        let mut pair = set_up(&model, &draft);
        for case in &cases {
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

/// [`check`] through wgpu.
#[cfg(feature = "wgpu")]
fn check_through_wgpu(file: &str) {
    let Some(gpu) = crate::wgpu::device::gpu() else { return };
    check(file, |model, draft| {
        let options = options(Device::Wgpu);
        let session = options.session_options(options.n_ctx_of(model), 8);
        let gpu = std::sync::Arc::clone(&gpu);
        let target = metal_attention::WgpuExecutor::session(gpu, model.loaded(), &session).unwrap();
        Pair::new(model, draft, Box::new(target), &options)
    });
}

/// [`check`] through CUDA.
#[cfg(feature = "cuda")]
fn check_through_cuda(file: &str) {
    if crate::cuda::has_cuda() {
        check(file, |model, draft| {
            let options = options(Device::Cuda(0));
            Pair::new(model, draft, model.backend(&options).unwrap(), &options)
        });
    }
}

#[test]
fn block_drafters_give_llama_cpps_drafts_on_the_cpu() {
    check("dflash", Pair::on_the_cpu);
}

#[cfg(feature = "wgpu")]
#[test]
fn block_drafters_give_llama_cpps_drafts_through_wgpu() {
    check_through_wgpu("dflash");
}

#[cfg(feature = "cuda")]
#[test]
fn block_drafters_give_llama_cpps_drafts_through_cuda() {
    check_through_cuda("dflash");
}
