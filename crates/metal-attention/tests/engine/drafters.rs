//! Drafters in files of their own that read hidden rows of their target: their drafts and logits are llama.cpp's on each backend, also
//! of several sequences at once, with prompts in other chunks, and after drafts were taken or refused.

use std::collections::BTreeMap;

use metal_attention::backends::BackendPass;
use metal_attention::gguf::{GgufFile, GgufWriter, TensorDecl, TensorType};
use metal_attention::speculation::{
    DraftFile, DraftFileError, DraftRequest, Drafter, DrafterKind, Evaluated, Speculation, SpeculativePass,
};
use metal_attention::{
    BatchToken, CacheType, Device, EngineOptions, Error, HiddenRequest, Model, ModelOptions, OutputKind, TracedTokens,
};
use metal_attention_model::ModelError;
use metal_attention_testing::models;
use serde::Deserialize;

/// Largest NMSE of a draft's logits, over those that are finite.
const LIMIT: f64 = 1e-6;

/// What llama.cpp drafts for a target.
#[derive(Deserialize)]
pub(crate) struct Case {
    pub(crate) target: String,
    pub(crate) drafter: String,
    /// The target reads all but the last one.
    pub(crate) tokens: Vec<u32>,
    pub(crate) drafts: Vec<u32>,
    /// The logits from which each draft is taken; `None`: the drafter lacks the token.
    pub(crate) logits: Vec<Vec<Option<f32>>>,
}

#[derive(Deserialize)]
struct Cases {
    cases: Vec<Case>,
}

/// The cases of a file of reference data by the names of their drafters, three each.
pub(crate) fn cases(file: &str) -> BTreeMap<String, Vec<Case>> {
    let all: Cases = metal_attention_testing::reference::read(file);
    let mut by_drafter = BTreeMap::<String, Vec<Case>>::new();
    for case in all.cases {
        by_drafter.entry(case.drafter.clone()).or_default().push(case);
    }
    by_drafter
}

pub(crate) fn gguf(name: &str) -> GgufFile {
    GgufFile::from_bytes(&models::with_drafters(name)).unwrap()
}

/// A target of `tests/data/drafters`.
pub(crate) fn target(name: &str) -> Model {
    Model::from_gguf(gguf(name), &ModelOptions::default()).unwrap()
}

/// A drafter of `tests/data/drafters`.
pub(crate) fn drafter(name: &str) -> DraftFile {
    DraftFile::from_gguf(gguf(name), &ModelOptions::default()).unwrap()
}

pub(crate) fn options(device: Device) -> EngineOptions {
    let (n_ctx, n_ubatch) = (Some(128), Some(8));
    EngineOptions { device, n_ctx, n_ubatch, n_seq: 3, cache_type: CacheType::F32, exact: true, ..Default::default() }
}

/// A target with a drafter.
pub(crate) struct Pair {
    pub(crate) target: Box<dyn BackendPass>,
    pub(crate) drafter: Box<dyn Drafter>,
}

/// The drafts of each request, and their logits.
pub(crate) type Drafted = (Vec<Vec<u32>>, Vec<Vec<Vec<f32>>>);

impl Pair {
    fn new(model: &Model, draft: &DraftFile, mut target: Box<dyn BackendPass>, options: &EngineOptions) -> Self {
        let drafter = draft.drafter(model, &mut *target, options, None).unwrap();
        Self { target, drafter }
    }

    pub(crate) fn on_the_cpu(model: &Model, draft: &DraftFile) -> Self {
        let options = options(Device::Cpu);
        Self::new(model, draft, model.backend(&options).unwrap(), &options)
    }

    /// Evaluates `tokens`, which may be of several sequences, with the target in batches of at most `n`, and lets the drafter observe
    /// each batch.
    pub(crate) fn evaluate(&mut self, tokens: &[BatchToken], n: usize) {
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
    pub(crate) fn evaluate_from(&mut self, seq: usize, first: usize, ids: &[u32], n: usize) {
        let evaluated = ids[..ids.len() - 1].iter().enumerate().skip(first);
        let tokens: Vec<_> = evaluated.map(|(pos, &id)| BatchToken { id, seq, pos, output: false }).collect();
        self.evaluate(&tokens, n);
    }

    pub(crate) fn propose(&mut self, requests: &[DraftRequest<'_>]) -> Drafted {
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

    pub(crate) fn propose_one(&mut self, seq: usize, ids: &[u32], n: usize) -> Drafted {
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

pub(crate) fn request(seq: usize, case: &Case) -> DraftRequest<'_> {
    DraftRequest { seq, ids: &case.tokens, prediction: &[], n: case.drafts.len() }
}

pub(crate) fn check_case(case: &Case, drafts: &[u32], logits: &[Vec<f32>]) {
    let (name, n) = (&case.drafter, case.tokens.len());
    assert_eq!(drafts, case.drafts, "{name}, {n} tokens");
    for (i, (got, want)) in logits.iter().zip(&case.logits).enumerate() {
        let error = nmse(got, want);
        assert!(error <= LIMIT, "{name}, {n} tokens, draft {i}: NMSE {error:e}");
    }
}

/// All cases of a file of reference data: one after the other, and together with other chunks.
pub(crate) fn check(file: &str, set_up: impl Fn(&Model, &DraftFile) -> Pair) {
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
pub(crate) fn check_through_wgpu(file: &str) {
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
pub(crate) fn check_through_cuda(file: &str) {
    if crate::cuda::has_cuda() {
        check(file, |model, draft| {
            let options = options(Device::Cuda(0));
            Pair::new(model, draft, model.backend(&options).unwrap(), &options)
        });
    }
}

#[test]
fn eagle3_gives_llama_cpps_drafts_on_the_cpu() {
    check("eagle3", Pair::on_the_cpu);
}

#[cfg(feature = "wgpu")]
#[test]
fn eagle3_gives_llama_cpps_drafts_through_wgpu() {
    check_through_wgpu("eagle3");
}

#[cfg(feature = "cuda")]
#[test]
fn eagle3_gives_llama_cpps_drafts_through_cuda() {
    check_through_cuda("eagle3");
}

/// The drafts after `ids` of a drafter that has seen nothing else.
pub(crate) fn fresh(model: &Model, draft: &DraftFile, ids: &[u32]) -> Drafted {
    let mut pair = Pair::on_the_cpu(model, draft);
    pair.evaluate_from(0, 0, ids, usize::MAX);
    pair.propose_one(0, ids, 3)
}

/// The target takes some drafts and refuses others; its states then stand in the place of the drafter's own, so that the next drafts
/// are those of a drafter that has read the sequence at once, bit for bit.
#[test]
fn drafts_after_verified_ones_are_those_of_the_whole_sequence() {
    for (name, cases) in cases("eagle3") {
        let (model, draft) = (target(&cases[0].target), drafter(&name));
        let mut pair = Pair::on_the_cpu(&model, &draft);
        let mut ids = cases[1].tokens.clone();
        pair.evaluate_from(1, 0, &ids, 7);
        for n_taken in [1, 0, 3, 2] {
            let (drafts, logits) = pair.propose_one(1, &ids, 3);
            let want = fresh(&model, &draft, &ids);
            assert_eq!(drafts, want.0, "{name}, {} tokens", ids.len());
            assert!(logits == want.1, "{name}, {} tokens: other logits", ids.len());
            // The target evaluates the last token and all drafts, of which some hold; then another token follows.
            let first = ids.len() - 1;
            let verified: Vec<_> = ids[first..].iter().chain(&drafts[0]).copied().collect();
            let token = |(i, &id)| BatchToken { id, seq: 1, pos: first + i, output: true };
            let tokens: Vec<_> = verified.iter().enumerate().map(token).collect();
            pair.evaluate(&tokens, usize::MAX);
            ids.extend_from_slice(&drafts[0][..n_taken]);
            ids.push((drafts[0].get(n_taken).copied().unwrap_or(5) + 1) % 300);
            assert_eq!(pair.target.rewind(1, ids.len() - 1), ids.len() - 1);
        }
    }
}

/// A sequence that is cut back, replaced, or only partly observed still gets drafts, and others are not disturbed.
#[test]
fn sequences_may_be_cut_back_replaced_or_observed_in_part() {
    let (all, name) = (cases("eagle3"), "eagle3-own-drafter.gguf");
    let (cases, draft) = (&all[name], drafter(name));
    let model = target(&cases[0].target);
    let mut pair = Pair::on_the_cpu(&model, &draft);
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
    let want = fresh(&model, &draft, &cut);
    assert!((&drafts[0], &logits[0]) == (&want.0[0], &want.1[0]), "{drafts:?} for {:?}", want.0);
    check_case(short, &drafts[1], &logits[1]);
    // Replaced by another one.
    pair.target.rewind(0, 0);
    pair.evaluate_from(0, 0, &cases[1].tokens, 9);
    let (drafts, logits) = pair.propose(&[request(0, &cases[1])]);
    check_case(&cases[1], &drafts[0], &logits[0]);
    // The first part was evaluated elsewhere: the drafter reads from there on.
    pair.drafter.forget(1);
    let shared = pair.target.share_prefix(0, 1, 10).unwrap();
    let ids = [&cases[1].tokens[..shared], &[3, 5, 8, 13]].concat();
    assert_eq!(pair.propose_one(1, &ids, 3).0, [Vec::<u32>::new()]);
    pair.evaluate_from(1, shared, &ids, 9);
    assert_eq!(pair.propose_one(1, &ids, 3).0[0].len(), 3);
    // The target's states of the last tokens are not known: no drafts, and no error.
    let unseen = [&ids[..], &[4, 4]].concat();
    assert_eq!(pair.propose_one(1, &unseen, 3).0, [Vec::<u32>::new()]);
    // The target has read nothing of a sequence with one token, so that there is no state.
    pair.target.rewind(1, 0);
    assert_eq!(pair.propose_one(1, &[7], 3).0, [Vec::<u32>::new()]);
    // Two tokens are enough.
    pair.evaluate_from(1, 0, &[7, 9], 9);
    let (drafts, logits) = pair.propose_one(1, &[7, 9], 3);
    let want = fresh(&model, &draft, &[7, 9]);
    assert!(drafts[0].len() == 3 && (drafts, logits) == want);
    // Not beyond the context, of 128 tokens.
    let filled: Vec<u32> = (0..127).map(|i| i * 7 % 300).collect();
    pair.target.rewind(1, 0);
    pair.evaluate_from(1, 0, &filled, 50);
    let (drafts, logits) = pair.propose_one(1, &filled, 9);
    let want = fresh(&model, &draft, &filled);
    assert_eq!((drafts[0].len(), &logits[0][..]), (2, &want.1[0][..2]));
}

/// A copy of a file with its metadata and tensors changed by `change`: name, shape, type, bytes.
pub(crate) fn changed(
    name: &str,
    change: impl FnOnce(&mut metal_attention::gguf::Metadata, &mut Vec<(TensorDecl, Vec<u8>)>),
) -> Result<DraftFile, Error> {
    let file = gguf(name);
    let mut metadata = file.metadata().clone();
    let mut tensors: Vec<_> = file
        .tensors()
        .iter()
        .map(|tensor| {
            let decl = TensorDecl { name: tensor.name().into(), shape: tensor.shape().to_vec(), ty: tensor.ty() };
            (decl, tensor.bytes().to_vec())
        })
        .collect();
    change(&mut metadata, &mut tensors);
    let declared: Vec<_> = tensors.iter().map(|(decl, _)| decl.clone()).collect();
    let mut writer = GgufWriter::new(Vec::new(), 3, &metadata, &declared).unwrap();
    for (_, bytes) in &tensors {
        writer.write(bytes).unwrap();
    }
    DraftFile::from_gguf(GgufFile::from_bytes(&writer.finish().unwrap()).unwrap(), &ModelOptions::default())
}

/// The error of setting a drafter up beside the target of the EAGLE-3 drafters.
fn refused(draft: &DraftFile) -> Error {
    let (model, options) = (target("eagle3.gguf"), options(Device::Cpu));
    let mut pass = model.backend(&options).unwrap();
    draft.drafter(&model, &mut *pass, &options, None).err().expect("a refused drafter")
}

/// The drafts that follow a prompt of the EAGLE-3 drafters' target.
fn drafts_of(draft: &DraftFile) -> Drafted {
    fresh(&target("eagle3.gguf"), draft, &[1, 200, 253, 88, 307, 281, 94])
}

#[test]
fn options_of_eagle3_change_its_drafts() {
    let own = "eagle3-own-drafter.gguf";
    let (_, plain) = drafts_of(&drafter(own));
    // The residual stream begins as the state itself.
    let raw = changed(own, |metadata, _| metadata.set("eagle3.norm_before_residual", false)).unwrap();
    assert_ne!(drafts_of(&raw).1, plain);
    // A norm before the projection, whose weights are as many as its input has elements.
    let norm = |metadata: &mut metal_attention::gguf::Metadata, tensors: &mut Vec<(TensorDecl, Vec<u8>)>| {
        metadata.set("eagle3.norm_before_fc", true);
        let decl = TensorDecl { name: "enc.output_norm.weight".into(), shape: vec![96], ty: TensorType::F32 };
        tensors.push((decl, (0..96).flat_map(|i| (0.5 + i as f32 / 96.0).to_le_bytes()).collect()));
    };
    assert_ne!(drafts_of(&changed(own, norm).unwrap()).1, plain);
    let without = changed(own, |metadata, _| metadata.set("eagle3.norm_before_fc", true)).unwrap();
    assert!(
        matches!(refused(&without), Error::Model(ModelError::MissingTensor { name, .. }) if name.starts_with("enc."))
    );
    // Layers in another order are another input, and the last one's output is one, too.
    let layers = |layers: Vec<u32>| changed(own, |metadata, _| metadata.set("eagle3.target_layers", layers)).unwrap();
    assert_ne!(drafts_of(&layers(vec![5, 3, 2])).1, plain);
    assert_ne!(drafts_of(&layers(vec![2, 3, 6])).1, plain);
    assert_ne!(drafts_of(&layers(vec![2, 2, 3])).1, plain);
    // Tokens are those of `d2t`, also if all have one.
    let reversed = changed(own, |_, tensors| {
        let bytes = (0..320_i64).rev().flat_map(i64::to_le_bytes).collect();
        tensors.push((TensorDecl { name: "d2t".into(), shape: vec![320], ty: TensorType::I64 }, bytes));
    });
    let (drafts, logits) = drafts_of(&reversed.unwrap());
    assert!(logits[0][0].iter().eq(plain[0][0].iter().rev()), "the logits belong to other tokens");
    assert_eq!(drafts[0].len(), 3);
    // Without a head of its own the target's is read, which has another width.
    let headless = changed(own, |_, tensors| tensors.retain(|(decl, _)| decl.name != "output.weight"));
    assert!(matches!(refused(&headless.unwrap()), Error::Model(ModelError::FirstTensorShape { .. })));
    let shared = changed("eagle3-drafter.gguf", |_, tensors| {
        tensors.retain(|(decl, _)| decl.name != "output.weight" && decl.name != "d2t");
    });
    assert_eq!(drafts_of(&shared.unwrap()).0[0].len(), 3);
}

#[test]
fn drafters_of_other_targets_and_damaged_ones_are_refused() {
    let with = |key: &str, value: u32| changed("eagle3-drafter.gguf", |metadata, _| metadata.set(key, value)).unwrap();
    for (key, value) in [("eagle3.target_hidden_size", 48), ("eagle3.embedding_length", 64)] {
        let error = refused(&with(key, value));
        assert!(matches!(&error, Error::Model(ModelError::OtherTarget { key: of, .. }) if of == key), "{error}");
        assert!(error.to_string().contains("another model"), "{error}");
    }
    for (key, value) in [("eagle3.block_count", 2), ("eagle3.expert_count", 4)] {
        let error = refused(&with(key, value)).to_string();
        assert!(error.starts_with(key), "{error}");
    }
    for layers in [vec![1_u32, 3, 7], vec![], vec![1; 17]] {
        let error = refused(
            &changed("eagle3-drafter.gguf", |metadata, _| metadata.set("eagle3.target_layers", layers)).unwrap(),
        );
        assert!(error.to_string().contains("eagle3.target_layers"), "{error}");
    }
    let tokens = |change: &dyn Fn(&mut TensorDecl, &mut Vec<u8>)| {
        let draft = changed("eagle3-drafter.gguf", |_, tensors| {
            let (decl, bytes) = tensors.iter_mut().find(|(decl, _)| decl.name == "d2t").unwrap();
            change(decl, bytes);
        });
        match refused(&draft.unwrap()) {
            Error::Model(ModelError::DraftTokens { name: "d2t", why }) => why,
            other => panic!("{other}"),
        }
    };
    assert!(tokens(&|_, bytes| bytes[..8].copy_from_slice(&320_i64.to_le_bytes())).contains("the token 320"));
    assert!(tokens(&|_, bytes| bytes[8..16].copy_from_slice(&(-1_i64).to_le_bytes())).contains("the token -1"));
    assert!(tokens(&|decl, bytes| (decl.shape, *bytes) = (vec![8], vec![0; 64])).contains("8 tokens for 200 rows"));
    assert!(tokens(&|decl, bytes| (decl.ty, *bytes) = (TensorType::F32, vec![0; 800])).contains("F32"));
    assert!(tokens(&|decl, _| decl.name = "d2".into()).contains("is missing"));
    // Whole numbers are no weights.
    let integers = changed("eagle3-drafter.gguf", |_, tensors| {
        let (decl, bytes) = tensors.iter_mut().find(|(decl, _)| decl.name == "fc.weight").unwrap();
        (decl.ty, *bytes) = (TensorType::I64, vec![0; 8 * 96 * 32]);
    });
    assert!(matches!(refused(&integers.unwrap()), Error::Model(ModelError::TensorOfIntegers { .. })));
}

#[test]
fn the_kind_of_a_draft_file_is_its_architecture() {
    let (model, draft, options) = (target("eagle3.gguf"), drafter("eagle3-drafter.gguf"), options(Device::Cpu));
    assert_eq!(draft.kind(), DrafterKind::Eagle3);
    assert!(draft.model().is_none() && draft.gguf().tensor("d2t").is_some());
    let set_up = |draft: &DraftFile, drafter: DrafterKind, device: Option<&Device>| {
        let speculation = Speculation { drafter, ..Default::default() };
        SpeculativePass::with_draft_file(&model, draft, &options, speculation, device)
    };
    let name = |kind| set_up(&draft, kind, None).unwrap().drafter.map(|drafter| drafter.name());
    let names = [DrafterKind::Auto, DrafterKind::Eagle3, DrafterKind::Off].map(name);
    assert_eq!(names, [Some("eagle3"), Some("eagle3"), None]);
    let error = set_up(&draft, DrafterKind::DFlash, None).err().unwrap();
    let (requested, found) = (DrafterKind::DFlash, DrafterKind::Eagle3);
    assert!(
        matches!(error, Error::DraftFile(DraftFileError::OtherKind { requested: r, found: f }) if (r, f) == (requested, found))
    );
    let error = set_up(&draft, DrafterKind::Auto, Some(&Device::Cpu)).err().unwrap();
    assert!(matches!(error, Error::DraftFile(DraftFileError::OwnDevice)), "{error}");
    // A model by itself.
    let other = drafter("eagle3.gguf");
    assert_eq!(set_up(&other, DrafterKind::Draft, Some(&Device::Cpu)).unwrap().drafter.unwrap().name(), "draft");
    // A kind with a file of its own needs that file.
    let speculation = Speculation { drafter: DrafterKind::Eagle3, ..Default::default() };
    let error = SpeculativePass::new(&model, &options, speculation).err().unwrap();
    assert!(matches!(error, Error::DraftFile(DraftFileError::NoFile { kind: DrafterKind::Eagle3 })), "{error}");
    // Alone it is no model.
    let error = Model::from_gguf(gguf("eagle3-drafter.gguf"), &ModelOptions::default()).unwrap_err().to_string();
    assert!(error.contains("--model-draft"), "{error}");
}

/// The table and the head that are the target's are held once, and what is not is counted.
#[test]
fn what_a_drafter_shares_with_its_target_is_held_once() {
    let (model, draft) = (target("eagle3.gguf"), drafter("eagle3-drafter.gguf"));
    let Pair { target, mut drafter } = Pair::on_the_cpu(&model, &draft);
    let memory = drafter.memory_use();
    assert!(memory.weights > 0 && memory.weights < target.memory_use().weights, "{memory:?}");
    drafter.forget(0);
    drafter.forget(99);
}
