//! A small model of every architecture against reference logits and embeddings, most of them llama.cpp's, and against itself however its tokens come.

use std::collections::BTreeMap;
#[cfg(feature = "wgpu")]
use std::sync::Arc;

use metal_attention::gguf::GgufFile;
use metal_attention::{
    BatchToken, CacheType, Device, EngineOptions, ForwardError, ForwardPass, HostSnapshot, Model, ModelOptions, Pooler,
    SnapshotError,
};
#[cfg(feature = "wgpu")]
use metal_attention::{ModelSpec, SessionOptions, WgpuExecutor};
use metal_attention_testing::SeenParts;
#[cfg(feature = "wgpu")]
use metal_attention_testing::models::architectures;
use metal_attention_testing::models::more_architectures;
use serde::Deserialize;

#[derive(Deserialize)]
struct Reference {
    tokens: Vec<u32>,
    models: BTreeMap<String, Case>,
}

#[derive(Deserialize)]
struct Case {
    logits_last: Option<Vec<f64>>,
    argmax_all: Option<Vec<usize>>,
    /// How far the best logit is from the second.
    margins: Option<Vec<f64>>,
    embedding: Option<Vec<f64>>,
    #[serde(default)]
    quantized: bool,
}

fn reference() -> Reference {
    metal_attention_testing::reference::read("more-architectures")
}

fn model(name: &str) -> Model {
    let file = GgufFile::from_bytes(&more_architectures()[name]).unwrap();
    Model::from_gguf(file, &ModelOptions::default()).unwrap_or_else(|e| panic!("{name}: {e}"))
}

fn pass(model: &Model, n_ctx: usize, n_seq: usize, exact: bool) -> Box<dyn ForwardPass> {
    pass_on(Device::Cpu, model, n_ctx, n_seq, exact).unwrap()
}

fn pass_on(
    device: Device,
    model: &Model,
    n_ctx: usize,
    n_seq: usize,
    exact: bool,
) -> Result<Box<dyn ForwardPass>, metal_attention::Error> {
    let options = EngineOptions {
        device,
        n_ctx: Some(n_ctx),
        n_seq,
        n_threads: Some(2),
        cache_type: CacheType::F32,
        exact,
        ..Default::default()
    };
    model.forward_pass(&options)
}

fn batch(ids: &[u32], seq: usize, start: usize) -> Vec<BatchToken> {
    ids.iter().enumerate().map(|(i, &id)| BatchToken { id, seq, pos: start + i, output: true }).collect()
}

fn nmse(got: &[f32], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let mean = want.iter().sum::<f64>() / want.len() as f64;
    let error: f64 = got.iter().zip(want).map(|(&g, w)| (f64::from(g) - w).powi(2)).sum();
    error / want.iter().map(|w| (w - mean).powi(2)).sum::<f64>()
}

fn argmax(row: &[f32]) -> usize {
    metal_attention_model::argmax(row) as usize
}

/// Holds the models to the references: `limit` is the most that the NMSE may be. With `seen` these are the models that have a part
/// that is not among `seen` and that no model before them has.
/// `set_up` takes a model, the length of its context and whether to compute exactly.
fn hold_to_references(
    mut seen: Option<SeenParts>,
    set_up: &dyn Fn(&Model, usize, bool) -> Box<dyn ForwardPass>,
    limit: f64,
) {
    let Reference { tokens, models } = reference();
    assert_eq!(models.len(), more_architectures().len());
    for (name, case) in models {
        let model = model(&name);
        if seen.as_mut().is_some_and(|parts| !parts.adds(model.spec())) {
            continue;
        }
        // Where experts are quantised the reference took their numbers as floats.
        let mut pass = set_up(&model, tokens.len(), case.quantized);
        let limit = if case.quantized { 1e-6 } else { limit };
        if let Some(want) = case.embedding {
            let pooler = Pooler::new(&model, None);
            let mut pooled = pooler.begin();
            pooled.add(&pass.forward_hidden(&pooler.batch(&tokens, 0)).unwrap());
            let length = want.iter().map(|x| x * x).sum::<f64>().sqrt();
            let want: Vec<f64> = want.iter().map(|x| x / length).collect();
            let error = nmse(&pooler.finish(pooled), &want);
            assert!(error <= limit, "{name}: NMSE {error:e}");
            continue;
        }
        let (want, choices) = (case.logits_last.unwrap(), case.argmax_all.unwrap());
        let logits = pass.forward(&batch(&tokens, 0, 0)).unwrap();
        let error = nmse(logits.last().unwrap(), &want);
        assert!(error <= limit, "{name}: NMSE {error:e}");
        for (i, (choice, margin)) in choices.iter().zip(case.margins.unwrap()).enumerate() {
            assert!(argmax(logits.row(i)) == *choice || margin <= 0.01, "{name}: the choice after token {i}");
        }
    }
}

#[test]
fn every_architecture_gives_llama_cpps_logits_or_embeddings() {
    hold_to_references(None, &|model, n_ctx, exact| pass(model, n_ctx, 1, exact), 1e-8);
}

/// All on one device, whose compiled pipelines serve many models.
#[cfg(feature = "wgpu")]
#[test]
fn and_so_it_does_on_a_gpu() {
    let Some(gpu) = crate::wgpu::device::gpu() else { return };
    let set_up = |model: &Model, n_ctx, exact| -> Box<dyn ForwardPass> {
        let options = SessionOptions { n_ctx, cache_type: CacheType::F32, exact, ..Default::default() };
        Box::new(WgpuExecutor::session(Arc::clone(&gpu), model.loaded(), &options).unwrap())
    };
    // Tests of `wgpu::correctness` hold these models to references.
    let mut seen = SeenParts::default();
    for bytes in architectures().values() {
        seen.adds(&ModelSpec::from_metadata(GgufFile::from_bytes(bytes).unwrap().metadata()).unwrap());
    }
    hold_to_references(crate::wgpu::device::takes_fewer_cases(&gpu).then_some(seen), &set_up, 1e-6);
}

#[cfg(feature = "cuda")]
#[test]
fn and_so_it_does_through_cuda() {
    let built_in = Model::built_in().unwrap();
    match pass_on(Device::Cuda(0), &built_in, 32, 1, false) {
        Ok(_) => {
            let set_up = |model: &Model, n_ctx, exact| pass_on(Device::Cuda(0), model, n_ctx, 1, exact).unwrap();
            hold_to_references(crate::cuda::takes_fewer_cases().then(SeenParts::default), &set_up, 1e-6);
        }
        Err(why) => assert!(std::env::var_os("METAL_ATTENTION_TEST_CUDA").is_none(), "{why}"),
    }
}

/// One model of each kind: windows, latent attention, experts of several makes, caches and embeddings that layers share,
/// several streams, side by side, positions that come otherwise, recurrent states.
const KINDS: &[&str] = &[
    "gemma3.gguf",
    "deepseek2.gguf",
    "qwen3moe.gguf",
    "gpt-oss.gguf",
    "gemma4.gguf",
    "gemma4-moe.gguf",
    "gemma3n.gguf",
    "cohere2.gguf",
    "mistral3.gguf",
    "lfm2.gguf",
    "lfm2moe.gguf",
    "qwen35.gguf",
    "qwen3next.gguf",
    "mamba.gguf",
    "jamba.gguf",
    "granitehybrid.gguf",
    "nemotron_h.gguf",
    "falcon-h1.gguf",
    "rwkv6.gguf",
    "rwkv7.gguf",
    "step35.gguf",
    "laguna-element.gguf",
];

#[test]
fn the_bits_do_not_depend_on_how_tokens_come() {
    let ids = reference().tokens;
    for name in KINDS {
        let model = model(name);
        let n = ids.len();
        let rows = |pass: &mut dyn ForwardPass, batch: &[BatchToken]| pass.forward(batch).unwrap().as_slice().to_vec();
        let whole = rows(&mut *pass(&model, 256, 1, false), &batch(&ids, 0, 0));
        let n_vocab = whole.len() / n;
        for step in [1, 7] {
            let mut one = pass(&model, 256, 1, false);
            let mut found = Vec::new();
            for (i, part) in ids.chunks(step).enumerate() {
                found.extend(rows(&mut *one, &batch(part, 0, i * step)));
            }
            assert!(found == whole, "{name}: in steps of {step}");
        }
        // A prefix that is shared, beside another text, in one batch.
        let mut several = pass(&model, 256, 3, false);
        several.forward(&batch(&ids[..20], 0, 0)).unwrap();
        assert_eq!(several.share_prefix(0, 2, 19).unwrap(), 19, "{name}");
        let other: Vec<u32> = ids.iter().rev().copied().collect();
        let both = [batch(&other, 1, 0), batch(&ids[19..], 2, 19)].concat();
        let found = rows(&mut *several, &both);
        assert!(found[n * n_vocab..] == whole[19 * n_vocab..], "{name}: after a shared prefix");
        // Greedy ids, and what is cut off and written anew.
        let mut greedy = pass(&model, 256, 1, false);
        let mut texts = Vec::new();
        for _ in 0..2 {
            greedy.truncate(10);
            let from = greedy.position();
            let mut text = vec![greedy.forward_prompt(&ids[from..]).unwrap()];
            for _ in 0..12 {
                text.push(greedy.forward_token_greedy(text[text.len() - 1]).unwrap());
            }
            texts.push(text);
        }
        assert_eq!(texts[0], texts[1], "{name}: cut back and written anew");
        assert_eq!(texts[0][0] as usize, argmax(&whole[(n - 1) * n_vocab..]), "{name}");
    }
}

#[test]
fn encoders_take_whole_texts_and_give_no_logits() {
    let ids = reference().tokens;
    for name in ["bert.gguf", "modern-bert.gguf", "jina-bert-v2.gguf"] {
        let model = model(name);
        let mut pass = pass(&model, 64, 3, false);
        let pooler = Pooler::new(&model, None);
        assert_eq!(pass.forward(&batch(&ids, 0, 0)).unwrap_err(), ForwardError::NoLogits, "{name}");
        let alone: Vec<_> = [&ids[..], &ids[5..20]]
            .map(|ids| {
                pass.reset();
                pass.forward_hidden(&pooler.batch(ids, 0)).unwrap()
            })
            .into();
        pass.reset();
        let together = [pooler.batch(&ids, 0), pooler.batch(&ids[5..20], 2)].concat();
        assert!(pass.forward_hidden(&together).unwrap() == alone.concat(), "{name}: several texts in a batch");
        let more = [BatchToken { id: 1, seq: 0, pos: ids.len(), output: true }];
        let error = pass.forward_hidden(&more).unwrap_err();
        assert_eq!(error, ForwardError::NotFromStart { seq: 0, n_past: ids.len() }, "{name}");
    }
}

/// Holds the hidden states of each encoder to those of the CPU, for two texts in one batch and for batches one after the
/// other, and its KV cache to the size of one layer's. `set_up` takes a model and the length of its context; the cache has
/// three sequences, and elements of F32.
fn hold_encoders_to_the_memory_of_one_layer(set_up: &dyn Fn(&Model, usize) -> Box<dyn ForwardPass>, limit: f64) {
    let ids = &reference().tokens;
    // Longer than a page.
    let long: Vec<u32> = ids.iter().cycle().copied().take(150).collect();
    let mut n_encoders = 0;
    for name in more_architectures().keys() {
        let model = model(name);
        let spec = model.spec();
        if spec.is_causal() {
            continue;
        }
        n_encoders += 1;
        let n_ctx = spec.embedding.n_positions.unwrap_or(usize::MAX).min(192);
        let long = &long[..n_ctx.min(150)];
        let mut reference = pass(&model, n_ctx, 1, true);
        let mut alone = |ids: &[u32]| {
            reference.reset();
            reference.forward_hidden(&batch(ids, 0, 0)).unwrap()
        };
        let want: Vec<_> = [long, &ids[..], &ids[3..20]].map(&mut alone).into();
        let mut pass = set_up(&model, n_ctx);
        let close = |got: &[f32], want: &[f32], what: &str| {
            let error = nmse(got, &want.iter().map(|&x| x.into()).collect::<Vec<_>>());
            assert!(error <= limit, "{name}, {what}: NMSE {error:e}");
        };
        let together = [batch(long, 2, 0), batch(ids, 0, 0), batch(&ids[3..20], 1, 0)].concat();
        close(&pass.forward_hidden(&together).unwrap(), &want.concat(), "three texts in a batch");
        // Each sequence again, on pages that another one has written.
        for (seq, n) in [(1, 0), (0, 2), (2, 1), (1, 2)] {
            pass.rewind(seq, 0);
            let text = [long, &ids[..], &ids[3..20]][n];
            close(&pass.forward_hidden(&batch(text, seq, 0)).unwrap(), &want[n], "a text after others");
        }
        let kv = spec.layers[0].mixer.kv_shape().unwrap();
        // The CPU pads values to 16 elements, and wgpu keys and values to 4: heads of 16 or 32 are not padded.
        assert_eq!((kv.key_dim % 16, kv.value_dim % 16), (0, 0), "{name}");
        let row = kv.n_head_kv * (kv.key_dim + kv.value_dim) * size_of::<f32>();
        assert_eq!(pass.kv_cache_bytes(), 3 * n_ctx.next_multiple_of(64) * row, "{name}: one layer's bytes");
        let refused = HostSnapshot::copy(&mut *pass, 1, ids[3..20].to_vec());
        assert!(matches!(refused, Err(SnapshotError::NotCausal)), "{name}");
    }
    assert!(n_encoders >= 5, "{n_encoders} encoders");
}

#[test]
fn encoders_have_a_cache_of_one_layer() {
    hold_encoders_to_the_memory_of_one_layer(&|model, n_ctx| pass(model, n_ctx, 3, true), 1e-12);
    // Small models are evaluated sequence by sequence, on several threads at once.
    hold_encoders_to_the_memory_of_one_layer(&|model, n_ctx| pass(model, n_ctx, 3, false), 1e-4);
}

#[cfg(feature = "wgpu")]
#[test]
fn encoders_have_a_cache_of_one_layer_on_a_gpu() {
    let Some(gpu) = crate::wgpu::device::gpu() else { return };
    let set_up = |model: &Model, n_ctx| -> Box<dyn ForwardPass> {
        let options = SessionOptions { n_ctx, n_seq: 3, cache_type: CacheType::F32, exact: true, ..Default::default() };
        let needed = WgpuExecutor::memory_needed(model.loaded(), &options, gpu.summary().max_binding);
        let pass = WgpuExecutor::session(Arc::clone(&gpu), model.loaded(), &options).unwrap();
        assert_eq!(needed.kv_cache, pass.memory_use().kv_cache);
        Box::new(pass)
    };
    hold_encoders_to_the_memory_of_one_layer(&set_up, 1e-9);
}

#[cfg(feature = "cuda")]
#[test]
fn encoders_have_a_cache_of_one_layer_through_cuda() {
    if crate::cuda::has_cuda() {
        let set_up = |model: &Model, n_ctx| pass_on(Device::Cuda(0), model, n_ctx, 3, true).unwrap();
        hold_encoders_to_the_memory_of_one_layer(&set_up, 1e-9);
    }
}
