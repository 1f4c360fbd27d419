//! Specs of assistants, which read the keys and values of a target model, and their cache groups.

use metal_attention_gguf::{Metadata, Value};
use metal_attention_model::{CacheGroups, Capacity, KvSource, Mask, ModelError, ModelSpec, SessionOptions, TensorSpec};
use proptest::prelude::*;

/// Metadata of a Gemma 4 of five layers, the last two of which share keys, and of its assistant of three.
fn metadata(assistant: bool) -> Metadata {
    let mut m = Metadata::new();
    let architecture = if assistant { "gemma4-assistant" } else { "gemma4" };
    m.set("general.architecture", architecture);
    let n_layer: u32 = if assistant { 3 } else { 5 };
    let of_both = [
        ("context_length", 512),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 2),
        ("attention.key_length", 32),
        ("attention.value_length", 32),
        ("attention.key_length_swa", 16),
        ("attention.value_length_swa", 16),
        ("rope.dimension_count_swa", 16),
        ("attention.sliding_window", 70),
        ("vocab_size", 320),
        ("block_count", n_layer),
        ("embedding_length", if assistant { 24 } else { 36 }),
        ("feed_forward_length", 40),
        ("attention.shared_kv_layers", if assistant { 3 } else { 2 }),
    ];
    for (key, value) in of_both {
        m.set(format!("{architecture}.{key}"), value);
    }
    m.set(format!("{architecture}.attention.layer_norm_rms_epsilon"), 1e-3_f32);
    m.set(format!("{architecture}.final_logit_softcapping"), 8.0_f32);
    let pattern: &[u32] = if assistant { &[1, 1, 0] } else { &[1, 1, 0, 1, 0] };
    m.set(format!("{architecture}.attention.sliding_window_pattern"), pattern.to_vec());
    if assistant {
        m.set("gemma4-assistant.embedding_length_out", 36_u32);
        m.set("gemma4-assistant.nextn_predict_layers", 3_u32);
    }
    m
}

fn target() -> ModelSpec {
    ModelSpec::from_metadata(&metadata(false)).unwrap()
}

/// The assistant's spec with one changed key.
fn with(key: &str, value: impl Into<Value>) -> Result<ModelSpec, ModelError> {
    let mut m = metadata(true);
    m.set(format!("gemma4-assistant.{key}"), value);
    ModelSpec::assistant_from_metadata(&m, &target())
}

#[test]
fn its_layers_read_what_the_last_two_layers_of_the_target_read() {
    let target = target();
    let spec = ModelSpec::assistant_from_metadata(&metadata(true), &target).unwrap();
    let layers: Vec<_> = spec.layers.iter().map(|layer| layer.mixer.attention().unwrap()).collect();
    // Layers 3 and 4 share the keys of 1 and 2. Windows do not count the token itself, which is in no cache.
    let read: Vec<_> = layers.iter().map(|a| (a.kv, a.mask, a.head_dim)).collect();
    let windowed = (KvSource::Target(1), Mask::Window(69), 16);
    assert_eq!(read, [windowed, windowed, (KvSource::Target(2), Mask::Causal, 32)]);
    assert!(layers.iter().all(|a| (a.scale, a.value_norm) == (1.0, None)));
    assert_eq!(spec.embedding.scale, 6.0, "the square root of the target's width");
    assert_eq!(spec.embedding.assistant.unwrap().target_width, 36);
    assert_eq!(spec.output.head.unwrap().soft_cap, None, "logits are not capped");
    assert_eq!(spec.kv_elements_per_token(), 0);
    let tensor = |name: &str| {
        let found = spec.tensors().into_iter().find(|tensor| tensor.name == name);
        found.map(|TensorSpec { shape, .. }| shape)
    };
    assert_eq!(tensor("token_embd.weight"), Some(vec![24, 320]), "its output head");
    assert_eq!(tensor("nextn.pre_projection.weight"), Some(vec![72, 24]));
    assert_eq!(tensor("nextn.post_projection.weight"), Some(vec![24, 36]));
    assert_eq!((tensor("blk.2.attn_q.weight"), tensor("blk.2.attn_k.weight")), (Some(vec![24, 128]), None));
    // Without shared layers in the target they read the last two themselves; KV heads are the target's.
    let mut m = metadata(false);
    m.set("gemma4.attention.shared_kv_layers", 0_u32);
    m.set("gemma4.attention.head_count_kv", vec![2_u32, 2, 2, 2, 1]);
    let spec = ModelSpec::assistant_from_metadata(&metadata(true), &ModelSpec::from_metadata(&m).unwrap()).unwrap();
    let read: Vec<_> = spec.layers.iter().map(|layer| layer.mixer.attention().unwrap()).collect();
    assert_eq!(read.iter().map(|a| a.kv).collect::<Vec<_>>(), [3, 3, 4].map(KvSource::Target));
    assert_eq!(read.iter().map(|a| a.n_head_kv).collect::<Vec<_>>(), [2, 2, 1]);
}

#[test]
fn its_cache_groups_are_those_of_the_target() {
    let target = target();
    let spec = ModelSpec::assistant_from_metadata(&metadata(true), &target).unwrap();
    let options = SessionOptions { n_ctx: 512, n_seq: 2, n_ubatch: 8, ..Default::default() };
    let capacity: Capacity = options.capacity(&target);
    let of_target = CacheGroups::new(&target, capacity);
    assert_eq!(of_target.groups().len(), 2);
    let groups = of_target.of_assistant(&spec);
    assert_eq!((groups.groups(), groups.capacity()), (of_target.groups(), of_target.capacity()));
    let of_layers: Vec<_> = (0..3).map(|i| (groups.of_layer(i), groups.memory_of_layer(i))).collect();
    assert_eq!(of_layers, [(1, Some(1)), (1, Some(1)), (0, Some(2))]);
    assert_eq!((groups.n_elements(&spec), groups.states()), (0, None));
}

#[test]
fn what_does_not_fit_the_target_is_refused() {
    let refused = |key: &str, value: u32| match with(key, value) {
        Err(ModelError::InvalidValue { key: named, .. } | ModelError::UnsupportedFeature { key: named, .. }) => {
            assert_eq!(named, format!("gemma4-assistant.{key}"));
        }
        other => panic!("{key} = {value}: {other:?}"),
    };
    refused("embedding_length_out", 35);
    refused("vocab_size", 321);
    refused("attention.key_length_swa", 20);
    refused("attention.shared_kv_layers", 2);
    refused("nextn_predict_layers", 1);
    refused("embedding_length_per_layer_input", 8);
    refused("attention.sliding_window", 1);
    // A longer window than the target keeps; a shorter one is there.
    assert!(matches!(with("attention.sliding_window", 71_u32), Err(ModelError::InvalidValue { .. })));
    assert!(with("attention.sliding_window", 69_u32).is_ok());
    let mut m = metadata(false);
    m.set("general.architecture", "gemma3");
    assert!(matches!(
        ModelSpec::assistant_from_metadata(&m, &target()),
        Err(ModelError::UnsupportedArchitecture { .. })
    ));
    let other = ModelSpec { architecture: "gemma3".into(), ..target() };
    assert!(ModelSpec::assistant_from_metadata(&metadata(true), &other).is_err());
    // A target whose last layer has a window keeps less than a full layer attends to.
    let mut m = metadata(false);
    m.set("gemma4.attention.shared_kv_layers", 0_u32);
    m.set("gemma4.attention.key_length_swa", 32_u32);
    m.set("gemma4.attention.sliding_window_pattern", vec![1_u32; 5]);
    let windowed = ModelSpec::from_metadata(&m).unwrap();
    let mut m = metadata(true);
    m.set("gemma4-assistant.attention.key_length_swa", 32_u32);
    assert!(matches!(ModelSpec::assistant_from_metadata(&m, &windowed), Err(ModelError::InvalidValue { .. })));
}

/// Keys of assistants, and those of the parts that they share with other models.
const KEYS: [&str; 16] = [
    "block_count",
    "embedding_length",
    "embedding_length_out",
    "nextn_predict_layers",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.key_length_swa",
    "attention.value_length",
    "attention.shared_kv_layers",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "rope.dimension_count",
    "rope.dimension_count_swa",
    "embedding_length_per_layer_input",
    "vocab_size",
];

fn any_value() -> impl Strategy<Value = Value> {
    prop_oneof![
        prop::sample::select(vec![0_u32, 1, 2, 3, 4, 16, 24, 36, 70, 320, u32::MAX]).prop_map(Value::from),
        any::<u32>().prop_map(Value::from),
        any::<f32>().prop_map(Value::from),
        any::<bool>().prop_map(Value::from),
        prop::collection::vec(0_u32..4, 0..6).prop_map(Value::from),
    ]
}

proptest! {
    #[test]
    fn hostile_metadata_never_panics(
        changes in prop::collection::vec((0..KEYS.len(), prop::option::weighted(0.9, any_value())), 1..5),
    ) {
        let mut m = metadata(true);
        for (key, value) in changes {
            let key = format!("gemma4-assistant.{}", KEYS[key]);
            match value {
                Some(value) => m.set(key, value),
                None => { m.remove(&key); }
            }
        }
        if let Ok(spec) = ModelSpec::assistant_from_metadata(&m, &target()) {
            prop_assert!(spec.layers.iter().all(|layer| layer.mixer.target_layer().is_some_and(|layer| layer < 5)));
            prop_assert!(spec.tensors().iter().all(|tensor| tensor.shape.iter().all(|&n| n > 0)));
        }
    }
}
