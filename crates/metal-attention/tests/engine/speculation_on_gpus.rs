//! Texts with and without drafts on GPUs: other kernels evaluate several rows, so that greedy texts are equal up to the first token
//! that the two highest logits leave nearly undecided.
#![cfg(any(feature = "wgpu", feature = "cuda"))]

use metal_attention::sampling::SamplerOptions;
use metal_attention::speculation::{DraftDepth, DraftFile, DrafterKind, Speculation, SpeculativePass};
use metal_attention::{BatchToken, CacheType, Device, EngineOptions, Generator, Model, ModelOptions};
use metal_attention_testing::models::{draft_models, more_architectures, with_drafters, with_heads};

use crate::speculation::{Task, open, tasks, text};

/// Logits that differ by less than this may change places.
const MARGIN: f32 = 0.01;

/// A target and its drafter.
struct Pair {
    name: &'static str,
    target: Model,
    kind: DrafterKind,
    /// The drafter's file, if it has one.
    draft: Option<DraftFile>,
}

impl Pair {
    fn in_one_file(name: &'static str, target: Model, kind: DrafterKind) -> Self {
        Self { name, target, kind, draft: None }
    }

    fn in_two_files(name: &'static str, target: &[u8], draft: &[u8]) -> Self {
        let file = metal_attention::gguf::GgufFile::from_bytes(draft).unwrap();
        let draft = Some(DraftFile::from_gguf(file, &ModelOptions::default()).unwrap());
        Self { name, target: open(target), kind: DrafterKind::Auto, draft }
    }

    fn pass(&self, options: &EngineOptions) -> SpeculativePass {
        let speculation = Speculation { drafter: self.kind, ..Default::default() };
        match &self.draft {
            None => SpeculativePass::new(&self.target, options, speculation),
            Some(draft) => SpeculativePass::with_draft_file(&self.target, draft, options, speculation, None),
        }
        .unwrap()
    }
}

/// Tokens of an answer.
const N: usize = 30;

/// Each kind of drafter, and recurrent layers.
fn pairs() -> Vec<Pair> {
    let drafts = draft_models();
    let with = |target: &str, draft: &str| (with_drafters(target), with_drafters(draft));
    let pair = |name, (target, draft): (Vec<u8>, Vec<u8>)| Pair::in_two_files(name, &target, &draft);
    vec![
        Pair::in_one_file("n-grams", Model::built_in().unwrap(), DrafterKind::Ngram),
        Pair::in_one_file("n-grams, Mamba", open(&more_architectures()["mamba2.gguf"]), DrafterKind::Ngram),
        Pair::in_one_file("heads", open(&with_heads("glm4moe.gguf")), DrafterKind::Mtp),
        Pair::in_one_file("heads, delta rule", open(&with_heads("qwen35.gguf")), DrafterKind::Mtp),
        Pair::in_two_files("a model", &drafts["draft-same.gguf"], &drafts["draft-same.gguf"]),
        pair("EAGLE-3", with("eagle3.gguf", "eagle3-drafter.gguf")),
        pair("DFlash", with("dflash.gguf", "dflash-drafter.gguf")),
        pair("DSpark", with("dflash.gguf", "dspark-drafter.gguf")),
        pair("an assistant", with("gemma4.gguf", "gemma4-assistant.gguf")),
    ]
}

fn options(device: &Device) -> EngineOptions {
    let cache_type = CacheType::F32;
    EngineOptions { device: device.clone(), n_ctx: Some(160), cache_type, exact: true, ..Default::default() }
}

/// How far the highest logit after `ids` is above the next one.
fn margin(model: &Model, device: &Device, ids: &[u32]) -> f32 {
    let mut pass = model.forward_pass(&options(device)).unwrap();
    let token = |(pos, &id): (usize, &u32)| BatchToken { id, seq: 0, pos, output: pos + 1 == ids.len() };
    let batch: Vec<_> = ids.iter().enumerate().map(token).collect();
    let mut logits = pass.forward(&batch).unwrap().as_slice().to_vec();
    logits.sort_unstable_by(|a, b| b.total_cmp(a));
    logits[0] - logits[1]
}

/// Compares texts of each pair; `few`: of some, on a device in software.
fn check(device: &Device, few: bool) {
    let (n, step) = if few { (2, 3) } else { (1000, 1) };
    for pair in pairs().into_iter().step_by(step) {
        let n_vocab = pair.target.spec().n_vocab;
        let greedy = |task: Task| Task { sampling: SamplerOptions::greedy(), ..task };
        let tasks: Vec<_> = tasks(n, n_vocab).into_iter().map(greedy).collect();
        let mut plain = Generator::new(&pair.target, &options(device), SamplerOptions::greedy()).unwrap();
        let SpeculativePass { pass, drafter } = pair.pass(&options(device));
        let mut drafted = Generator::with_pass(&pair.target, pass, SamplerOptions::greedy()).unwrap();
        drafted.set_drafter(drafter, DraftDepth::Fixed(3));
        let mut n_drafted = 0;
        for task in &tasks {
            let (want, ..) = text(&mut plain, task, N);
            let (got, n, _) = text(&mut drafted, task, N);
            n_drafted += n;
            if let Some(i) = want.iter().zip(&got).position(|(want, got)| want != got) {
                let margin = margin(&pair.target, device, &want[..i]);
                assert!(margin < MARGIN, "{}: token {i} is {}, not {}, by {margin}", pair.name, got[i], want[i]);
            } else {
                assert_eq!(want.len(), got.len(), "{}", pair.name);
            }
        }
        assert!(n_drafted > 0, "{}", pair.name);
    }
}

/// Skipped without a GPU; in CI that is a failure.
#[cfg(feature = "wgpu")]
#[test]
fn through_wgpu() {
    let adapters = metal_attention::wgpu::adapter_summaries();
    if adapters.is_empty() {
        assert!(std::env::var_os("CI").is_none(), "this machine has no GPU");
        metal_attention_testing::skip("this machine has no GPU");
        return;
    }
    check(&Device::Wgpu, metal_attention_testing::takes_fewer_cases(adapters[0].is_software()));
}

#[cfg(feature = "cuda")]
#[test]
fn through_cuda() {
    if crate::cuda::has_cuda() {
        check(&Device::Cuda(0), crate::cuda::takes_fewer_cases());
    }
}
