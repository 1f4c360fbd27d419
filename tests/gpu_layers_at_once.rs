//! All layers of a token in one dispatch give what they give one by one. On a software GPU one workgroup does it, on
//! others as many as they run side by side.
#![cfg(feature = "gpu")]

#[path = "common/gpu.rs"]
mod gpu;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use gpu::{gpu, start};
use metal_attention::gguf::GgufFile;
use metal_attention::kernels::GpuDevice;
use metal_attention::{BatchToken, CacheType, ForwardPass, GpuForwardPassOptions};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// Squared error of `got` over the squares of `want`.
fn nmse(got: &[f32], want: &[f32]) -> f64 {
    let square = |v: f64| v * v;
    let error: f64 = got.iter().zip(want).map(|(&g, &w)| square(f64::from(g) - f64::from(w))).sum();
    error / want.iter().map(|&w| square(f64::from(w))).sum::<f64>()
}

/// Runs `n` tokens of each sequence, each alone, after `filled` others, layer by layer and at once; tells whether the
/// model suits the latter.
fn compare(gpu: &Arc<GpuDevice>, path: &Path, options: &GpuForwardPassOptions, filled: usize, n: usize) -> bool {
    let mut one_by_one = start(
        gpu,
        &GgufFile::open(path).unwrap(),
        &GpuForwardPassOptions { layers_at_once: Some(0), ..options.clone() },
    );
    let software = gpu.summary().vendor() != 0x10de;
    let groups = software.then_some(1);
    let mut at_once = start(
        gpu,
        &GgufFile::open(path).unwrap(),
        &GpuForwardPassOptions { layers_at_once: groups, ..options.clone() },
    );
    if at_once.dispatches(1).len() == one_by_one.dispatches(1).len() {
        return false;
    }
    assert_eq!(at_once.dispatches(1)[1], "decode_layers", "{:?}", at_once.dispatches(1));
    let n_vocab = one_by_one.spec().n_vocab;
    let token = |seq: usize, pos: usize, logits| {
        let id = (seq * 31 + pos * 7919 + 3) % n_vocab;
        BatchToken { id: id as u32, seq, pos, logits }
    };
    for seq in (0..options.n_seq).filter(|_| filled > 0) {
        let prompt: Vec<_> = (0..filled).map(|pos| token(seq, pos, false)).collect();
        one_by_one.forward(&prompt).unwrap();
        at_once.forward(&prompt).unwrap();
    }
    for (pos, seq) in (filled..filled + n).flat_map(|pos| (0..options.n_seq).map(move |seq| (pos, seq))) {
        let token = token(seq, pos, true);
        let want = one_by_one.forward(&[token]).unwrap().row(0).to_vec();
        let got = at_once.forward(&[token]).unwrap().row(0).to_vec();
        let error = nmse(&got, &want);
        // Halves in the cache round some numbers the other way, where sums differ in their last bit.
        let limit = if options.cache_type == CacheType::F16 { 1e-6 } else { 1e-9 };
        assert!(error < limit, "{}, position {pos}: {error:e}", path.display());
    }
    true
}

fn models(folder: &str) -> Vec<PathBuf> {
    let mut paths: Vec<_> = std::fs::read_dir(Path::new(ROOT).join(folder))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|e| e == "gguf"))
        .collect();
    paths.sort();
    assert!(!paths.is_empty(), "{folder}");
    paths
}

#[test]
fn architectures_give_the_same_logits() {
    let Some(gpu) = gpu() else { return };
    let options = GpuForwardPassOptions { n_ctx: 64, cache_type: CacheType::F32, ..Default::default() };
    let mut suited = Vec::new();
    for path in models("tests/data/reference/architectures") {
        if compare(&gpu, &path, &options, 0, 10) {
            suited.push(path.file_stem().unwrap().to_string_lossy().into_owned());
        }
    }
    eprintln!("at once: {suited:?}");
    assert!(suited.len() >= 4, "{suited:?}");
}

#[test]
fn quantised_types_give_the_same_logits() {
    let Some(gpu) = gpu() else { return };
    let options = GpuForwardPassOptions { n_ctx: 64, cache_type: CacheType::F32, ..Default::default() };
    let paths = models("tests/data/reference/quants");
    let n = paths.iter().filter(|path| compare(&gpu, path, &options, 0, 4)).count();
    assert_eq!(n, paths.len());
}

#[test]
fn long_contexts_and_several_sequences_give_the_same_logits() {
    let Some(gpu) = gpu() else { return };
    let path = Path::new(ROOT).join("tests/data/reference/architectures/llama-mha.gguf");
    // Alone, pages lie in order throughout; of two sequences, until both have filled theirs.
    for (cache_type, n_seq) in [(CacheType::F16, 2), (CacheType::F32, 1)] {
        let options = GpuForwardPassOptions { n_ctx: 300, n_seq, cache_type, ..Default::default() };
        assert!(compare(&gpu, &path, &options, 245, 20));
    }
}

#[test]
fn greedy_text_is_the_same() {
    let Some(gpu) = gpu() else { return };
    let path = Path::new(ROOT).join("models/tales-15m-q4_0.gguf");
    let texts = [0, 1].map(|groups| {
        let options = GpuForwardPassOptions { n_ctx: 128, layers_at_once: Some(groups), ..Default::default() };
        let mut model = start(&gpu, &GgufFile::open(&path).unwrap(), &options);
        let mut ids = vec![model.forward_prompt(&[1, 403, 407]).unwrap()];
        while ids.len() < 100 {
            ids.push(model.forward_token_greedy(ids[ids.len() - 1]).unwrap());
        }
        // A cut, another token, and on.
        model.truncate(50);
        ids.push(model.forward_token_greedy(5).unwrap());
        for _ in 0..10 {
            ids.push(model.forward_token_greedy(ids[ids.len() - 1]).unwrap());
        }
        ids
    });
    assert_eq!(texts[0], texts[1]);
}
