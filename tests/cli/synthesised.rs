//! Small models with random weights, one or more of each architecture that has no file of its own among the references,
//! against llama.cpp's logits: `synth` writes the same model on every machine. `tools/reference-logits` wrote the references.

use std::collections::BTreeSet;
use std::path::Path;

use crate::common::{run, stdout};
use metal_attention::gguf::GgufFile;
use metal_attention::{BatchToken, CacheType, Device, EngineOptions, ForwardPass, Model, ModelOptions, Pooler};
use metal_attention_model::{FeedForward, LayerSpec, ModelShape, ModelSpec};
use metal_attention_testing::models::{architectures, more_architectures};
use serde::Deserialize;
use tempfile::TempDir;

#[derive(Deserialize)]
struct References {
    tokens: Vec<u32>,
    models: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    /// Of `synth`, the architecture first.
    args: Vec<String>,
    of: Kind,
    /// llama.cpp takes GELU from a table of 16 bits.
    gelu: bool,
    mean: f64,
    std: f64,
    /// Evenly spaced.
    samples: Vec<f64>,
}

/// What the numbers are.
#[derive(Deserialize, PartialEq)]
#[serde(rename_all = "lowercase")]
enum Kind {
    /// Of the last token.
    Logits,
    /// Of the text, of length 1.
    Embedding,
}

fn references() -> References {
    metal_attention_testing::reference::read("synthesised")
}

fn model(file: &Path) -> Model {
    Model::from_gguf(GgufFile::read(file).unwrap(), &ModelOptions::default()).unwrap()
}

/// The logits or the embedding of the text.
fn values(model: &Model, kind: &Kind, tokens: &[u32], mut pass: Box<dyn ForwardPass>) -> Vec<f32> {
    if *kind == Kind::Embedding {
        let pooler = Pooler::new(model, None);
        let mut pooled = pooler.begin();
        pooled.add(&pass.forward_hidden(&pooler.batch(tokens, 0)).unwrap());
        return pooler.finish(pooled);
    }
    let last = tokens.len() - 1;
    let batch: Vec<_> =
        tokens.iter().enumerate().map(|(pos, &id)| BatchToken { id, seq: 0, pos, output: pos == last }).collect();
    pass.forward(&batch).unwrap().last().unwrap().to_vec()
}

/// Sets up a model for prompts of a length, exact; `None`: an error that names the CPU, as the backend cannot run it.
type SetUp<'s> = &'s dyn Fn(&Model, usize) -> Option<Box<dyn ForwardPass>>;

/// Holds the models to the references: `limit` is the most that the NMSE may be. With `fewer` these are the models that have a part
/// that neither the models before them have nor those of [`more_architectures`], which tests of the engine hold to references.
fn hold_to_references(fewer: bool, set_up: SetUp<'_>, limit: f64) {
    let References { tokens, models } = references();
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("model.gguf");
    let mut parts = metal_attention_testing::SeenParts::default();
    for bytes in more_architectures().values().filter(|_| fewer) {
        parts.adds(&ModelSpec::from_metadata(GgufFile::from_bytes(bytes).unwrap().metadata()).unwrap());
    }
    for case in models {
        let args: Vec<&str> = case.args.iter().map(String::as_str).collect();
        let to = ["synth", "custom", "--type", "f32", "-o", file.to_str().unwrap()];
        stdout(run(&[&to[..], &args[..]].concat()));
        let model = model(&file);
        if fewer && !parts.adds(model.spec()) {
            continue;
        }
        let Some(pass) = set_up(&model, tokens.len()) else { continue };
        let got = values(&model, &case.of, &tokens, pass);
        let n = case.samples.len();
        let error: f64 = (0..n).map(|i| (f64::from(got[i * got.len() / n]) - case.samples[i]).powi(2)).sum();
        let nmse = error / n as f64 / case.std.powi(2);
        let limit = if case.gelu { 1e-6 } else { limit };
        println!("{args:?}: NMSE {nmse:.1e}");
        assert!(nmse <= limit, "{args:?}: NMSE {nmse:e}");
        let moment = |of: &dyn Fn(f64) -> f64| got.iter().map(|&x| of(x.into())).sum::<f64>() / got.len() as f64;
        let mean = moment(&|x| x);
        let std = moment(&|x| (x - mean).powi(2)).sqrt();
        let apart = (mean - case.mean).abs().max((std - case.std).abs());
        assert!(apart <= 1e-3 * case.std, "{args:?}: mean {mean}, deviation {std}");
    }
}

#[test]
fn small_models_give_llama_cpps_logits() {
    let set_up = |model: &Model, n_ctx| {
        let (device, n_ctx, n_threads) = (Device::Cpu, Some(n_ctx), Some(2));
        let cache_type = CacheType::F32;
        let options = EngineOptions { device, n_ctx, n_threads, cache_type, exact: true, ..Default::default() };
        Some(model.forward_pass(&options).unwrap())
    };
    hold_to_references(false, &set_up, 1e-10);
}

/// All on one device, whose compiled pipelines serve many models.
#[cfg(feature = "wgpu")]
#[test]
fn and_so_they_do_on_a_gpu() {
    use std::sync::Arc;

    use metal_attention::wgpu::{WgpuDevice, WgpuOptions};
    use metal_attention::{SessionOptions, WgpuExecutor};

    if !crate::common::has_gpu() {
        return;
    }
    let gpu = Arc::new(WgpuDevice::open(&WgpuOptions::default()).unwrap());
    let set_up = |model: &Model, n_ctx| -> Option<Box<dyn ForwardPass>> {
        let refused = |layer: &LayerSpec| matches!(&layer.feed_forward, FeedForward::Experts(e) if e.latent.is_some());
        if model.spec().layers.iter().any(refused) {
            let options = EngineOptions { device: Device::Wgpu, ..Default::default() };
            let why = model.forward_pass(&options).err().unwrap().to_string();
            assert!(why.contains("--device cpu"), "{why}");
            return None;
        }
        let options = SessionOptions { n_ctx, cache_type: CacheType::F32, exact: true, ..Default::default() };
        let pass = WgpuExecutor::session(Arc::clone(&gpu), model.loaded(), &options);
        Some(Box::new(pass.unwrap()))
    };
    hold_to_references(metal_attention_testing::takes_fewer_cases(gpu.summary().is_software()), &set_up, 1e-8);
}

#[test]
fn every_architecture_has_a_reference() {
    let mut held: BTreeSet<String> = references().models.into_iter().map(|mut case| case.args.swap_remove(1)).collect();
    for bytes in architectures().values().chain(more_architectures().values()) {
        let file = GgufFile::from_bytes(bytes).unwrap();
        held.extend(file.metadata().str("general.architecture").unwrap().map(str::to_owned));
    }
    let left: Vec<_> = ModelShape::architectures().into_iter().filter(|name| !held.contains(*name)).collect();
    assert!(left.is_empty(), "{left:?}");
}
