//! Files with hostile metadata and tensors: loading fails with an error, or the model runs.

use crate::support::on_threads;
use metal_attention_cpu::CpuExecutor;
use metal_attention_gguf::{GgufFile, GgufWriter, Metadata, TensorDecl, TensorType, Value};
use metal_attention_model::{
    BatchToken, ForwardPass, LoadedModel, Mixer, ModelError, ModelShape, ModelSpec, SessionOptions, TensorSpec,
};
use proptest::prelude::*;

/// Maximum of elements in a model that is written.
const MAX_ELEMENTS: usize = 1 << 18;

/// Metadata of a small model: 2 layers, 32 wide, 4 heads over 2 KV heads of 8.
fn metadata(architecture: &'static str) -> Metadata {
    ModelShape {
        architecture,
        n_layer: 2,
        n_embd: 32,
        n_head: 4,
        n_head_kv: 2,
        head_dim: 8,
        n_ff: 48,
        n_vocab: 40,
        n_ctx_train: 256,
        ..ModelShape::named("custom").unwrap().clone()
    }
    .metadata()
}

/// A number in [-0.5, 0.5) for each element of each tensor.
fn number(tensor: usize, element: usize) -> f32 {
    let mixed = (tensor * 7919 + element).wrapping_mul(2_654_435_761) >> 8;
    (mixed % 1024) as f32 / 1024.0 - 0.5
}

/// A GGUF file of these tensors in F32. `special` may replace values, by tensor name and element.
fn file(metadata: &Metadata, tensors: &[TensorSpec], special: impl Fn(&str, usize) -> Option<f32>) -> GgufFile {
    let declare = |t: &TensorSpec| TensorDecl { name: t.name.clone(), shape: t.shape.clone(), ty: TensorType::F32 };
    let declared: Vec<_> = tensors.iter().map(declare).collect();
    let mut writer = GgufWriter::new(Vec::new(), 3, metadata, &declared).unwrap();
    for (i, tensor) in tensors.iter().enumerate() {
        for j in 0..tensor.shape.iter().product() {
            let value = special(&tensor.name, j).unwrap_or_else(|| number(i, j));
            writer.write(&value.to_le_bytes()).unwrap();
        }
    }
    GgufFile::from_bytes(&writer.finish().unwrap()).unwrap()
}

/// Values of RoPE factors (divisors of the frequencies), which must be above 0 and must not depend on other tensors. `None`
/// for other tensors.
fn divisors(name: &str, element: usize) -> Option<f32> {
    name.starts_with("rope_f").then_some(1.0 + element as f32)
}

/// Loads the model by the checks that `info` uses, then evaluates `tokens`. Returns the logits, or the loading error; after
/// a successful load nothing may fail.
fn logits(file: &GgufFile, tokens: &[u32]) -> Result<Vec<f32>, ModelError> {
    let spec = ModelSpec::from_metadata(file.metadata())?;
    let n_vocab = spec.n_vocab;
    let model = LoadedModel::with_spec(file, spec)?;
    let options = SessionOptions { n_ctx: 96, n_ubatch: 4, ..SessionOptions::default() };
    let mut model = CpuExecutor::session(&on_threads(2), &model, &options).unwrap();
    let token = |(pos, &id): (usize, &u32)| BatchToken { id: id % n_vocab as u32, seq: 0, pos, output: true };
    let batch: Vec<_> = tokens.iter().enumerate().map(token).collect();
    let (prompt, one) = batch.split_at(batch.len() - 1);
    let mut logits = model.forward(prompt).unwrap().as_slice().to_vec();
    logits.extend_from_slice(model.forward(one).unwrap().as_slice());
    assert_eq!(logits.len(), tokens.len() * n_vocab);
    model.forward_greedy(&[BatchToken { pos: tokens.len(), ..batch[0] }]).unwrap();
    Ok(logits)
}

const TOKENS: [u32; 6] = [1, 7, 39, 0, 7, 20];

#[test]
fn layers_with_other_numbers_of_heads_have_heads_as_long_as_the_first() {
    for (heads, kv) in [([8u32, 4], Some([8u32, 4])), ([4, 8], Some([2, 1])), ([1, 2], None), ([4, 1], Some([4, 1]))] {
        let mut without = metadata("llama");
        without.set("llama.attention.head_count", heads.to_vec());
        match kv {
            Some(kv) => without.set("llama.attention.head_count_kv", kv.to_vec()),
            None => drop(without.remove("llama.attention.head_count_kv")),
        }
        let mut with = without.clone();
        for key in ["attention.key_length", "attention.value_length", "rope.dimension_count"] {
            without.remove(&format!("llama.{key}")).unwrap();
            with.set(format!("llama.{key}"), 32 / heads[0]);
        }
        let spec = ModelSpec::from_metadata(&without).unwrap();
        assert_eq!(spec, ModelSpec::from_metadata(&with).unwrap());
        for layer in &spec.layers {
            let Mixer::Attention(a) = &layer.mixer else { panic!("not attention") };
            assert_eq!(
                (a.head_dim, a.rope().unwrap().n_rot),
                (32 / heads[0] as usize, 32 / heads[0] as usize),
                "{heads:?}"
            );
        }
        // With RoPE factors, whose number is the same for each layer.
        let tensors = spec.tensors();
        assert!(tensors.iter().any(|t| t.name == "rope_freqs.weight"));
        let found = logits(&file(&without, &tensors, divisors), &TOKENS).unwrap();
        assert!(found.iter().all(|x| x.is_finite()), "{heads:?}");
        assert_eq!(found, logits(&file(&with, &tensors, divisors), &TOKENS).unwrap(), "{heads:?}");
    }
    // Only the second layer's heads would divide the width.
    let mut odd = metadata("llama");
    odd.remove("llama.attention.key_length").unwrap();
    odd.set("llama.attention.head_count", vec![5u32, 4]);
    odd.set("llama.attention.head_count_kv", vec![5u32, 4]);
    let error = ModelSpec::from_metadata(&odd).unwrap_err().to_string();
    assert!(error.contains("llama.attention.head_count = 5"), "{error}");
}

#[test]
fn divisors_of_frequencies_fit_every_layer_and_are_above_0() {
    let metadata = metadata("llama");
    let mut spec = ModelSpec::from_metadata(&metadata).unwrap();
    let tensors = spec.tensors();
    for value in [0.0, -0.0, -1.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let file = file(
            &metadata,
            &tensors,
            |name, i| if i == 2 { divisors(name, i).map(|_| value) } else { divisors(name, i) },
        );
        let error = logits(&file, &TOKENS).unwrap_err();
        assert!(matches!(&error, ModelError::TensorValue { name, .. } if name == "rope_freqs.weight"), "{error}");
    }
    for value in [f32::MIN_POSITIVE, f32::MAX, 1e-45] {
        let file = file(&metadata, &tensors, |name, i| divisors(name, i).map(|_| value));
        logits(&file, &TOKENS).unwrap();
    }
    // A spec that was not read from metadata may rotate fewer elements in one layer.
    let file = file(&metadata, &tensors, divisors);
    for layer in [0, 1] {
        let Mixer::Attention(a) = &mut spec.layers[layer].mixer else { panic!("not attention") };
        a.rope_mut().unwrap().n_rot = 4;
        let error = LoadedModel::with_spec(&file, spec.clone()).unwrap_err();
        let named = matches!(&error, ModelError::TensorShape { name, .. } if name == "rope_freqs.weight");
        assert!(named, "{error}");
        let Mixer::Attention(a) = &mut spec.layers[layer].mixer else { panic!("not attention") };
        a.rope_mut().unwrap().n_rot = 8;
    }
}

/// Plausible sizes of a small model, and impossible ones.
fn any_size() -> impl Strategy<Value = u64> {
    prop_oneof![
        12 => prop::sample::select(vec![1u64, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64]),
        1 => prop::sample::select(vec![0, 96, 255, 4096, 4097, 1 << 28, (1 << 28) + 1, u64::from(u32::MAX), u64::MAX]),
    ]
}

fn any_value() -> impl Strategy<Value = Value> {
    let float = prop::sample::select(vec![
        0.0f32,
        1.0,
        1.000_000_1,
        2.0,
        0.5,
        1e-38,
        1e-45,
        1e30,
        f32::MAX,
        -1.0,
        f32::NAN,
        f32::INFINITY,
        1e4,
    ]);
    prop_oneof![
        5 => any_size().prop_map(Value::U64),
        4 => prop::collection::vec(any_size().prop_map(|n| n.min(1 << 30) as u32), 2).prop_map(Value::from),
        1 => prop::collection::vec(0u32..9, 0..4).prop_map(Value::from),
        1 => prop::collection::vec(-2i32..9, 2).prop_map(Value::from),
        4 => float.prop_map(Value::F32),
        1 => any::<f64>().prop_map(Value::F64),
        1 => any::<bool>().prop_map(Value::Bool),
        2 => prop::sample::select(vec!["none", "linear", "yarn", "longrope", ""]).prop_map(Value::from),
        1 => prop::collection::vec("[a-c]{0,2}", 0..50).prop_map(Value::from),
    ]
}

/// The metadata keys that sizes are read from; "" is the list of tokens.
const KEYS: &[&str] = &[
    "",
    "vocab_size",
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "expert_count",
    "attention.head_count",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scaling.yarn_ext_factor",
    "rope.scaling.attn_factor",
];

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    /// With any metadata a model that loads also runs.
    #[test]
    fn models_that_load_run(
        architecture in prop::sample::select(vec!["llama", "qwen2", "qwen3"]),
        // Removed keys, so that the sizes below are consistent more often.
        without in prop::collection::vec(prop::sample::select(vec![
            "attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.dimension_count",
        ]), 0..5),
        changes in prop::collection::vec((0..KEYS.len(), prop::option::weighted(0.9, any_value())), 0..4),
        optional in any::<u64>(),
        odd in prop::sample::select(vec![None, None, None, Some(f32::NAN), Some(f32::INFINITY), Some(0.0), Some(1e38)]),
        has_original_tensors in prop::bool::weighted(0.2),
    ) {
        let original = metadata(architecture);
        let mut m = original.clone();
        for key in without {
            m.remove(&format!("{architecture}.{key}"));
        }
        for (key, value) in changes {
            let key = match KEYS[key] {
                "" => "tokenizer.ggml.tokens".to_owned(),
                key => format!("{architecture}.{key}"),
            };
            match value {
                Some(value) => m.set(key, value),
                None => drop(m.remove(&key)),
            }
        }
        // The tensors that the metadata describe, or those of the original model.
        let spec = ModelSpec::from_metadata(if has_original_tensors { &original } else { &m });
        let Ok(spec) = spec else { return Ok(()) };
        let mut tensors = spec.tensors();
        let mut i = 0;
        tensors.retain(|t| {
            i += 1;
            t.required || optional >> (i % 64) & 1 == 1
        });
        let elements = tensors.iter().try_fold(0usize, |n, t| {
            t.shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d))?.checked_add(n)
        });
        if elements.is_none_or(|n| n > MAX_ELEMENTS) {
            return Ok(());
        }
        let special = |name: &str, i: usize| odd.filter(|_| i % 5 == 3).or_else(|| divisors(name, i));
        let opened = logits(&file(&m, &tensors, special), &TOKENS);
        if !has_original_tensors && odd.is_none() {
            prop_assert!(opened.is_ok(), "{}", opened.unwrap_err());
        }
    }
}
