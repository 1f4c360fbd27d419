//! Whole models on the CPU against the float64 references in `tests/data/reference`, with every instruction set.

use std::collections::BTreeMap;
use std::path::Path;

use crate::support::on_isa;
use metal_attention_cpu::{CacheType, CpuExecutor, CpuForwardPass, Isa};
use metal_attention_gguf::GgufFile;
use metal_attention_model::{BatchToken, ForwardPass, SessionOptions, argmax};
use metal_attention_testing::models::{Files, quants, small_quants};
use metal_attention_testing::reference::read;
use serde::Deserialize;

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

fn open(path: &Path, isa: Isa, options: &SessionOptions) -> CpuForwardPass {
    let file = GgufFile::read(path).expect("a readable GGUF file");
    CpuExecutor::session_of_file(&on_isa(isa), &file, options).expect("a model that runs")
}

fn options(cache_type: CacheType, exact: bool) -> SessionOptions {
    SessionOptions { n_ctx: 512, cache_type, exact, ..SessionOptions::default() }
}

/// Evaluates `ids` in one batch. Returns the logits of every token.
fn all_logits(model: &mut CpuForwardPass, ids: &[u32]) -> Vec<Vec<f32>> {
    model.reset();
    let batch: Vec<_> = ids.iter().enumerate().map(|(pos, &id)| BatchToken { id, seq: 0, pos, output: true }).collect();
    let logits = model.forward(&batch).expect("a batch that fits");
    (0..logits.n_rows()).map(|i| logits.row(i).to_vec()).collect()
}

/// The `n` ids that greedy decoding generates after `ids`.
fn greedy(model: &mut CpuForwardPass, ids: &[u32], n: usize) -> Vec<u32> {
    model.reset();
    let mut out = vec![model.forward_prompt(ids).expect("a prompt that fits")];
    while out.len() < n {
        out.push(model.forward_token_greedy(out[out.len() - 1]).expect("room for a token"));
    }
    out
}

/// Squared error over the reference's variance.
fn nmse(got: &[f32], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let mean = want.iter().sum::<f64>() / want.len() as f64;
    let error: f64 = got.iter().zip(want).map(|(g, w)| (f64::from(*g) - w).powi(2)).sum();
    error / want.iter().map(|w| (w - mean).powi(2)).sum::<f64>()
}

/// The contents of `stories260K.json` and `tales-4m.json`: prompts with their logits and greedy continuations.
#[derive(Deserialize)]
struct Continuations {
    cases: Vec<Case>,
}

/// Reference values of one prompt.
#[derive(Deserialize)]
struct Case {
    prompt: String,
    /// Token ids of `prompt`.
    tokens: Vec<u32>,
    /// The logits of the last token, `[n_vocab]`.
    logits_last: Vec<f64>,
    /// The token with the largest logit after each token.
    argmax_all: Vec<u32>,
    /// The tokens that greedy decoding generates.
    greedy: Vec<u32>,
    /// The difference of the two largest logits at each of those.
    #[serde(default)]
    greedy_margins: Vec<f64>,
}

/// The contents of `quants.json` and `architectures.json`: reference values of several models for one prompt.
#[derive(Deserialize)]
struct Models {
    tokens: Vec<u32>,
    models: BTreeMap<String, ModelCase>,
}

/// Reference values of one model.
#[derive(Deserialize)]
struct ModelCase {
    logits_last: Vec<f64>,
    argmax_all: Vec<u32>,
}

#[test]
fn stories_continuations_argmaxes_and_logits() {
    let path = Path::new(ROOT).join("models/stories260K.gguf");
    let cases = read::<Continuations>("stories260K").cases;
    for isa in Isa::available() {
        let mut f32_cache = open(&path, isa, &options(CacheType::F32, false));
        let mut f16_cache = open(&path, isa, &options(CacheType::F16, false));
        for case in &cases {
            let logits = all_logits(&mut f32_cache, &case.tokens);
            let argmaxes: Vec<_> = logits.iter().map(|row| argmax(row)).collect();
            assert_eq!(argmaxes, case.argmax_all, "{isa:?} {:?}", case.prompt);
            for (got, want) in logits[logits.len() - 1].iter().zip(&case.logits_last) {
                assert!((f64::from(*got) - want).abs() <= 1e-3, "{isa:?} {:?}: {got} {want}", case.prompt);
            }
            assert_eq!(
                greedy(&mut f32_cache, &case.tokens, case.greedy.len()),
                case.greedy,
                "{isa:?} {:?}",
                case.prompt
            );
            let logits = all_logits(&mut f16_cache, &case.tokens);
            let error = nmse(&logits[logits.len() - 1], &case.logits_last);
            assert!(error <= 1e-5, "{isa:?} {:?}: NMSE {error:e} with an F16 cache", case.prompt);
        }
    }
}

#[test]
fn tales_continuations() {
    let path = Path::new(ROOT).join("models/tales-4m-q4_0.gguf");
    let mut exact = open(&path, Isa::best(), &options(CacheType::F32, true));
    let mut fast = open(&path, Isa::best(), &options(CacheType::F16, false));
    for case in read::<Continuations>("tales-4m").cases {
        let error = nmse(&all_logits(&mut exact, &case.tokens)[case.tokens.len() - 1], &case.logits_last);
        assert!(error <= 1e-6, "{:?}: NMSE {error:e}", case.prompt);
        // Greedy ids are compared up to the first where the two largest logits are nearly equal.
        let certain = case.greedy_margins.iter().position(|m| *m < 0.01).unwrap_or(case.greedy.len());
        assert_eq!(greedy(&mut exact, &case.tokens, certain), case.greedy[..certain], "{:?} exact", case.prompt);
        let n = certain.min(16);
        assert_eq!(greedy(&mut fast, &case.tokens, n), case.greedy[..n], "{:?} with 8-bit activations", case.prompt);
    }
}

#[test]
fn quantised_types() {
    check_quantised_types("quants", quants(), 3);
    check_quantised_types("small-quants", small_quants(), 9);
}

/// Compares the models in `files` with their logits in `reference`, which may also have other models.
fn check_quantised_types(reference: &str, files: &Files, n: usize) {
    let Models { tokens, mut models } = read(reference);
    models.retain(|name, _| files.contains_key(name));
    assert_eq!((models.len(), files.len()), (n, n));
    for (name, case) in models {
        let file = GgufFile::from_bytes(&files[&name]).expect("a readable GGUF file");
        for isa in Isa::available() {
            for (exact, limit) in [(true, 1e-6), (false, 2e-3)] {
                let options = options(CacheType::F32, exact);
                let mut model = CpuExecutor::session_of_file(&on_isa(isa), &file, &options).expect("a model that runs");
                let logits = all_logits(&mut model, &tokens);
                let error = nmse(&logits[logits.len() - 1], &case.logits_last);
                println!("{name} {isa:?} exact {exact}: NMSE {error:.1e}");
                assert!(error <= limit, "{name} {isa:?} exact {exact}: NMSE {error:e}");
            }
        }
    }
}

#[test]
fn architectures() {
    let Models { tokens, models } = read("architectures");
    assert_eq!(models.len(), metal_attention_testing::models::architectures().len());
    for (name, case) in models {
        let file = GgufFile::from_bytes(&metal_attention_testing::models::architectures()[&name])
            .expect("a readable GGUF file");
        for isa in Isa::available() {
            let options = options(CacheType::F32, false);
            let mut model = CpuExecutor::session_of_file(&on_isa(isa), &file, &options).expect("a model that runs");
            let logits = all_logits(&mut model, &tokens);
            let argmaxes: Vec<_> = logits.iter().map(|row| argmax(row)).collect();
            let error = nmse(&logits[logits.len() - 1], &case.logits_last);
            println!("{name} {isa:?}: NMSE {error:.1e}");
            assert_eq!(argmaxes, case.argmax_all, "{name} {isa:?}");
            assert!(error <= 1e-9, "{name} {isa:?}: NMSE {error:e}");
        }
    }
}
