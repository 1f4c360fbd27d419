//! `ModelSpec` from metadata: the repository's models, every key, invalid and hostile values.

use metal_attention_gguf::{GgufFile, Metadata, Value};
use metal_attention_model::{
    Activation, AttentionSpec, Dense, DflashSpec, Eagle3Spec, FeedForward, KvSource, LoadedModel, Mask, Mixer,
    ModelError, ModelShape, ModelSpec, NormKind, NormOver, Positions, QkNorm, Residual, Rope, RopeFactors, RopeLayout,
    RopeScaling, StateLayout,
};
use proptest::prelude::*;

/// The named shape from which the small model is made.
const TWO_LAYERS: &str = "custom";

/// Metadata of a small model of `architecture`: 2 layers, 48 wide, 6 heads over 2 KV heads of 8.
fn metadata(architecture: &'static str) -> Metadata {
    ModelShape {
        architecture,
        n_layer: 2,
        n_embd: 48,
        n_head: 6,
        n_head_kv: 2,
        head_dim: 8,
        n_ff: 96,
        n_vocab: 100,
        n_ctx_train: 256,
        ..ModelShape::named(TWO_LAYERS).unwrap().clone()
    }
    .metadata()
}

/// The spec of valid metadata.
fn spec(metadata: &Metadata) -> ModelSpec {
    ModelSpec::from_metadata(metadata).unwrap()
}

/// The error message for invalid metadata.
fn error(metadata: &Metadata) -> String {
    ModelSpec::from_metadata(metadata).unwrap_err().to_string()
}

/// Llama's metadata with one changed key.
fn with(key: &str, value: impl Into<Value>) -> Metadata {
    let mut m = metadata("llama");
    m.set(key, value);
    m
}

fn attention(spec: &ModelSpec, layer: usize) -> &AttentionSpec {
    let Mixer::Attention(a) = &spec.layers[layer].mixer else { panic!("layer {layer} is not attention") };
    a
}

fn rope(spec: &ModelSpec, layer: usize) -> Rope {
    *attention(spec, layer).rope().expect("RoPE")
}

/// A gated feed-forward with SiLU.
fn silu(n_ff: usize) -> FeedForward {
    FeedForward::Dense(Dense { n_ff, gated: true, activation: Activation::Silu, fused: false })
}

fn open(name: &str) -> GgufFile {
    GgufFile::read(format!("{}/../../models/{name}", env!("CARGO_MANIFEST_DIR"))).unwrap()
}

#[test]
fn the_models_of_the_repository_have_the_documented_specs() {
    let file = open("stories260K.gguf");
    let s = spec(file.metadata());
    assert_eq!((s.architecture.as_str(), s.name.as_deref()), ("llama", Some("stories260K")));
    assert_eq!((s.n_layer(), s.n_embd, s.n_vocab, s.n_ctx_train, s.output.norm.unwrap().eps), (5, 64, 512, 512, 1e-5));
    assert_eq!(
        *attention(&s, 4),
        AttentionSpec {
            n_head: 8,
            n_head_kv: 4,
            head_dim: 8,
            scale: 1.0 / 8f32.sqrt(),
            mask: Mask::Causal,
            positions: Positions::Rope(Rope {
                n_rot: 8,
                layout: RopeLayout::Interleaved,
                freq_base: 10_000.0,
                scaling: RopeScaling::None,
                attn_factor: 1.0,
                factors: RopeFactors::Tensor,
                sections: None,
            }),
            soft_cap: None,
            sinks: false,
            qk_norm: None,
            value_norm: None,
            clamp_qkv: None,
            kv: KvSource::Own,
            temperature: None,
            qkv_bias: false,
            fused_qkv: false,
            gate: None,
        }
    );
    assert_eq!(s.layers[0].feed_forward, silu(172));
    // Keys and values of 5 layers, 4 KV heads of 8 elements.
    assert_eq!(s.kv_elements_per_token(), 2 * 5 * 4 * 8);
    let model = LoadedModel::with_spec(&file, s.clone()).unwrap();
    let weights = model.weights();
    assert_eq!(weights.layers.len(), 5);
    assert_eq!(weights.output.as_ref().unwrap().weight.name(), "token_embd.weight");
    assert_eq!(weights.output_norm.as_ref().unwrap().weight.len(), 64);
    assert!(weights.rope_factors.is_empty());

    let file = open("tales-4m-q4_0.gguf");
    let s = spec(file.metadata());
    assert_eq!((s.n_layer(), s.n_embd, s.n_vocab), (4, 256, 4096));
    let a = attention(&s, 0);
    assert_eq!((a.n_head, a.n_head_kv, a.head_dim), (4, 2, 64));
    let model = LoadedModel::with_spec(&file, s.clone()).unwrap();
    let weights = model.weights();
    let FeedForward::Dense(dense) = &weights.layers[3].feed_forward else { panic!("it has experts") };
    assert_eq!(dense.down.weight.shape(), [768, 256]);
}

#[test]
fn architectures_differ_in_layout_bias_and_norm() {
    for (architecture, layout, qkv_bias, qk_norm) in [
        ("llama", RopeLayout::Interleaved, false, false),
        ("qwen2", RopeLayout::Halves, true, false),
        ("qwen3", RopeLayout::Halves, false, true),
    ] {
        let s = spec(&metadata(architecture));
        let a = attention(&s, 1);
        assert_eq!((rope(&s, 1).layout, a.qkv_bias), (layout, qkv_bias), "{architecture}");
        let norm = QkNorm { kind: NormKind::Rms, eps: 1e-5, over: NormOver::Head, after_rope: false };
        assert_eq!(a.qk_norm, qk_norm.then_some(norm), "{architecture}");
        let names: Vec<_> = s.tensors().into_iter().filter(|t| t.required).map(|t| t.name).collect();
        assert_eq!(names.contains(&"blk.1.attn_k.bias".into()), qkv_bias);
        assert_eq!(names.contains(&"blk.1.attn_q_norm.weight".into()), qk_norm);
    }
    let mut m = metadata("llama");
    m.set("general.architecture", "gpt-17");
    let message = error(&m);
    assert!(message.starts_with("the architecture \"gpt-17\" is not supported; supported are: "), "{message}");
    assert!(message.contains(" llama, "), "{message}");
    m.set("general.architecture", "minimax-01");
    let missing =
        "\"minimax-01\" is not supported; this is missing: layers with a recurrent state (lightning attention)";
    assert!(error(&m).ends_with(missing), "{}", error(&m));
}

#[test]
fn every_key_that_a_model_needs_is_named_when_it_is_missing() {
    for key in [
        "general.architecture",
        "llama.context_length",
        "llama.embedding_length",
        "llama.block_count",
        "llama.feed_forward_length",
        "llama.attention.head_count",
        "llama.attention.layer_norm_rms_epsilon",
        "llama.vocab_size",
    ] {
        let mut m = metadata("llama");
        m.remove(key).unwrap();
        let e = ModelSpec::from_metadata(&m).unwrap_err();
        assert!(matches!(&e, ModelError::MissingKey { key: named } if named == key), "{key}: {e}");
    }
}

#[test]
fn keys_that_may_be_missing_have_their_defaults() {
    let mut m = metadata("llama");
    for key in ["attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.dimension_count"] {
        m.remove(&format!("llama.{key}")).unwrap();
    }
    m.remove("llama.rope.freq_base").unwrap();
    let s = spec(&m);
    let a = attention(&s, 0);
    let rope = rope(&s, 0);
    assert_eq!((a.n_head, a.n_head_kv, a.head_dim, rope.n_rot, rope.freq_base), (6, 6, 8, 8, 10_000.0));
}

#[test]
fn invalid_values_are_refused_by_key() {
    for (key, value) in [
        ("block_count", Value::U32(0)),
        ("block_count", Value::U32(1_000_000)),
        ("block_count", Value::I32(-2)),
        ("block_count", Value::F32(2.0)),
        ("embedding_length", Value::U32(0)),
        ("embedding_length", Value::U64(u64::MAX)),
        ("context_length", Value::U32(0)),
        ("attention.head_count", Value::U32(0)),
        ("attention.head_count", vec![6u32].into()),
        ("attention.head_count", vec![6u32, 0].into()),
        ("attention.head_count", vec![6i32, -6].into()),
        ("attention.head_count", vec![6.0f32, 6.0].into()),
        ("attention.head_count_kv", Value::U32(0)),
        ("attention.head_count_kv", Value::U32(4)),
        ("attention.head_count_kv", vec![2u32, 2, 2].into()),
        ("attention.key_length", Value::U32(0)),
        ("attention.value_length", Value::U32(4)),
        ("attention.layer_norm_rms_epsilon", Value::F32(f32::NAN)),
        ("attention.layer_norm_rms_epsilon", Value::F32(-1.0)),
        ("attention.layer_norm_rms_epsilon", "small".into()),
        ("rope.dimension_count", Value::U32(7)),
        ("rope.dimension_count", Value::U32(10)),
        ("rope.dimension_count", Value::U32(0)),
        ("rope.freq_base", Value::F32(0.0)),
        ("rope.freq_base", Value::F32(f32::INFINITY)),
        ("rope.scaling.factor", Value::F32(-2.0)),
        ("rope.scaling.factor", Value::F32(f32::NAN)),
        ("rope.scaling.type", "dynamic".into()),
        ("rope.scaling.type", Value::Bool(true)),
        ("feed_forward_length", Value::U32(0)),
        ("feed_forward_length", vec![96u32].into()),
        ("expert_count", Value::U32(100_000)),
        ("vocab_size", Value::U32(0)),
        ("attention.sliding_window", Value::I32(-1)),
    ] {
        let key = format!("llama.{key}");
        let message = error(&with(&key, value.clone()));
        assert!(message.contains(&key), "{key} = {value:?}: {message}");
    }
    for value in [Value::U32(1), vec![1u32].into()] {
        let message = error(&with("tokenizer.ggml.tokens", value));
        assert!(message.contains("tokenizer.ggml.tokens"), "{message}");
    }
    let mut huge_heads = with("llama.attention.key_length", 1u32 << 28);
    huge_heads.set("llama.attention.value_length", 1u32 << 28);
    let message = error(&huge_heads);
    assert!(message.contains("llama.attention.key_length"), "{message}");
    let message = error(&with("general.architecture", 3u32));
    assert!(message.contains("general.architecture"), "{message}");
}

#[test]
fn residuals_that_no_backend_implements_are_refused() {
    let parallel = |architecture, change: &dyn Fn(&mut ModelSpec)| {
        let mut spec = spec(&metadata(architecture));
        spec.layers[1].residual = Residual::Parallel;
        change(&mut spec);
        spec.check_residuals().map_err(|why| why.to_string())
    };
    assert_eq!(parallel("llama", &|_| {}), Ok(()));
    let refused = |why: &str| Err(format!("layer 1 cannot join the residual stream: {why}"));
    let without_mixer = parallel("llama", &|spec| spec.layers[1].mixer = Mixer::None);
    assert_eq!(without_mixer, refused("there is no mixer to be parallel to"));
    let custom = |architecture| spec(&ModelShape::custom(architecture).unwrap().metadata());
    let channel_mix = custom("rwkv6").layers[1].feed_forward.clone();
    let with_state = parallel("llama", &|spec| spec.layers[1].feed_forward = channel_mix.clone());
    assert_eq!(with_state, refused("a feed-forward with a recurrent state cannot be parallel to the mixer"));
    let streams = custom("gemma3n").embedding.streams;
    assert!(streams.is_some());
    let with_streams = parallel("llama", &|spec| {
        spec.embedding.streams = streams;
        spec.layers.iter_mut().for_each(|layer| layer.streams = streams);
    });
    assert_eq!(with_streams, refused("several residual streams need sequential residuals"));
    let of_one_layer = parallel("llama", &|spec| spec.layers[1].streams = streams);
    let why = "its residual streams or its additional embedding are not those of the model";
    assert_eq!(of_one_layer, refused(why));
}

#[test]
fn sizes_may_differ_between_layers() {
    let mut m = with("llama.attention.head_count", vec![6u32, 4]);
    m.set("llama.attention.head_count_kv", vec![2i32, 4]);
    m.set("llama.feed_forward_length", vec![96u64, 32]);
    let s = spec(&m);
    assert_eq!((attention(&s, 0).n_head, attention(&s, 0).n_head_kv), (6, 2));
    assert_eq!((attention(&s, 1).n_head, attention(&s, 1).n_head_kv), (4, 4));
    assert_eq!(s.layers[1].feed_forward, silu(32));
    let shapes: Vec<_> = s.tensors().into_iter().filter(|t| t.name.ends_with("attn_output.weight")).collect();
    assert_eq!((shapes[0].shape.as_slice(), shapes[1].shape.as_slice()), (&[48, 48][..], &[32, 48][..]));
}

#[test]
fn context_extensions_and_windows_are_read() {
    let scaling = |m: &Metadata| rope(&spec(m), 0).scaling;
    assert_eq!(scaling(&with("llama.rope.scaling.type", "none")), RopeScaling::None);
    assert_eq!(scaling(&with("llama.rope.scaling.factor", 0.0f32)), RopeScaling::None);
    assert_eq!(scaling(&with("llama.rope.scale_linear", 4.0f32)), RopeScaling::Linear { factor: 4.0 });
    let mut m = with("llama.rope.scaling.type", "linear");
    m.set("llama.rope.scaling.factor", 2.0f32);
    assert_eq!(scaling(&m), RopeScaling::Linear { factor: 2.0 });
    m.set("llama.rope.scaling.type", "yarn");
    m.set("llama.rope.scaling.original_context_length", 64u32);
    assert_eq!(
        scaling(&m),
        RopeScaling::Yarn {
            factor: 2.0,
            n_ctx_orig: 64,
            beta_fast: 32.0,
            beta_slow: 1.0,
            ext_factor: 1.0,
            log_multiplier: None
        }
    );
    assert_eq!(attention(&spec(&with("llama.attention.sliding_window", 128u32)), 0).mask, Mask::Window(128));
    assert_eq!(attention(&spec(&with("llama.attention.sliding_window", 0u32)), 0).mask, Mask::Causal);
}

#[test]
fn alpha_raises_the_rope_base_of_hunyuan() {
    for architecture in ["hunyuan-dense", "hunyuan_vl"] {
        let mut m = metadata(architecture);
        m.set(format!("{architecture}.rope.freq_base"), 10000.0f32);
        m.remove(&format!("{architecture}.rope.scaling.alpha"));
        assert_eq!(rope(&spec(&m), 0).freq_base, 10000.0, "{architecture}");
        m.set(format!("{architecture}.rope.scaling.alpha"), 1000.0f32);
        // Heads of 8: 1000^(8 / 6) is 10^4.
        let base = rope(&spec(&m), 1).freq_base;
        assert!((base / 1e8 - 1.0).abs() < 1e-6, "{architecture}: {base}");
    }
}

#[test]
fn the_tokens_override_the_vocabulary_size_key() {
    let tokens: Vec<String> = (0..7).map(|i| format!("t{i}")).collect();
    assert_eq!(spec(&with("tokenizer.ggml.tokens", tokens)).n_vocab, 7);
    assert_eq!(spec(&metadata("llama")).n_vocab, 100);
}

/// Values of every type, most of them invalid.
fn any_value() -> impl Strategy<Value = Value> {
    let size = prop_oneof![0..20u64, Just(48), Just(1 << 28), Just(u64::from(u32::MAX)), any::<u64>()];
    let float = prop_oneof![any::<f32>(), Just(0.0), Just(1.0), Just(f32::NAN), Just(f32::INFINITY), Just(1e-30)];
    prop_oneof![
        4 => size.prop_map(Value::U64),
        2 => any::<i32>().prop_map(Value::I32),
        2 => float.prop_map(Value::F32),
        1 => any::<f64>().prop_map(Value::F64),
        1 => any::<bool>().prop_map(Value::Bool),
        1 => prop_oneof![Just("none"), Just("linear"), Just("yarn"), Just("x")].prop_map(Value::from),
        1 => prop::collection::vec(0..9u32, 0..4).prop_map(Value::from),
        1 => prop::collection::vec(any::<f32>(), 0..4).prop_map(Value::from),
        1 => prop::collection::vec(any::<i32>(), 0..3).prop_map(Value::from),
    ]
}

/// The metadata keys that specs are read from.
const KEYS: &[&str] = &[
    "swiglu_clamp_shexp",
    "swiglu_clamp_exp",
    "shortconv.l_cache",
    "ssm.group_count",
    "kda.head_dim",
    "ssm.state_size",
    "ssm.time_step_rank",
    "ssm.inner_size",
    "ssm.conv_kernel",
    "full_attention_interval",
    "attention.recurrent_layers",
    "ssm.dt_b_c_rms",
    "rope.scaling.finetuned",
    "moe_latent_size",
    "vocab_size",
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "expert_count",
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
    "rope.scaling.yarn_log_multiplier",
    "rope.freq_base_swa",
    "rope.dimension_count_swa",
    "rope.dimension_sections",
    "attention.layer_norm_epsilon",
    "attention.sliding_window_pattern",
    "attention.causal",
    "attention.scale",
    "attention.clamp_kqv",
    "attention.temperature_scale",
    "attention.temperature_length",
    "attention.shared_kv_layers",
    "attention.key_length_swa",
    "attention.key_length_mla",
    "attention.value_length_mla",
    "attention.kv_lora_rank",
    "attention.q_lora_rank",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "embedding_scale",
    "residual_scale",
    "logit_scale",
    "embedding_length_per_layer_input",
    "altup.num_inputs",
    "altup.active_idx",
    "laurel.rank",
    "expert_used_count",
    "expert_feed_forward_length",
    "expert_shared_feed_forward_length",
    "expert_shared_count",
    "expert_gating_func",
    "expert_weights_scale",
    "expert_weights_norm",
    "expert_group_count",
    "expert_group_used_count",
    "leading_dense_block_count",
    "interleave_moe_layer_step",
    "moe_every_n_layers",
    "nextn_predict_layers",
    "pooling_type",
    "classifier.pooling_type",
    "classifier.output_labels",
    "dense_2_feat_out",
    "dense_3_feat_out",
    "hidden_activation",
    "use_parallel_residual",
    "attention.max_alibi_bias",
    "rope.scaling.alpha",
    "wkv.head_size",
    "time_mix_extra_dim",
    "time_decay_extra_dim",
    "rescale_every_n_layers",
    "token_shift_count",
    "attention.decay_lora_rank",
    "attention.iclr_lora_rank",
    "attention.value_residual_mix_lora_rank",
    "attention.gate_lora_rank",
];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(5000))]

    /// Any metadata gives a spec with usable numbers or an error, and never a panic.
    #[test]
    fn hostile_metadata_never_panics(
        architecture in prop::sample::select(ModelShape::architectures()),
        changes in prop::collection::vec((0..KEYS.len(), prop::option::weighted(0.9, any_value())), 1..5),
    ) {
        let shape = ModelShape::custom(architecture).unwrap();
        let mut m = ModelShape { n_layer: 3, n_head_kv: 4, ..shape }.metadata();
        for (key, value) in changes {
            let key = format!("{architecture}.{}", KEYS[key]);
            match value {
                Some(value) => m.set(key, value),
                None => { m.remove(&key); }
            }
        }
        for head in ModelSpec::heads_from_metadata(&m).unwrap_or_default() {
            prop_assert!(head.n_layer() == 1 && head.embedding.state.is_some());
            prop_assert!(head.tensors().iter().all(|t| t.shape.iter().all(|&n| n > 0)));
        }
        if let Ok(s) = ModelSpec::from_metadata(&m) {
            let state_elements = StateLayout::new(&s).n_elements();
            prop_assert!(s.n_layer() > 0 && s.n_embd > 0 && s.n_vocab > 0);
            prop_assert!(s.kv_elements_per_token() > 0 || state_elements > 0);
            for t in s.tensors() {
                prop_assert!(t.shape.iter().all(|&n| n > 0), "{} {:?}", t.name, t.shape);
            }
            let Mixer::Attention(a) = &s.layers[0].mixer else { return Ok(()) };
            prop_assert!(a.n_head.is_multiple_of(a.n_head_kv));
            let Some(rope) = a.rope() else { return Ok(()) };
            prop_assert!(rope.n_rot.is_multiple_of(2) && rope.n_rot <= a.head_dim);
            if rope.n_rot <= 1 << 16 {
                prop_assert_eq!(rope.frequencies(None).0.len(), rope.n_rot / 2);
            }
        }
    }
}

/// Keys of drafters.
const DRAFTER_KEYS: [&str; 11] = [
    "block_count",
    "embedding_length",
    "target_layers",
    "target_hidden_size",
    "norm_before_residual",
    "norm_before_fc",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "expert_count",
    "rope.scaling.type",
];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Any metadata of a drafter give specs with usable numbers or an error, and never a panic.
    #[test]
    fn hostile_metadata_of_drafters_never_panics(
        changes in prop::collection::vec((0..DRAFTER_KEYS.len(), prop::option::weighted(0.9, any_value())), 0..4),
    ) {
        let target = ModelSpec::from_metadata(&ModelShape::custom("llama").unwrap().metadata()).unwrap();
        let mut m = crate::heads::eagle3(&target);
        for (key, value) in changes {
            let key = format!("eagle3.{}", DRAFTER_KEYS[key]);
            match value {
                Some(value) => m.set(key, value),
                None => { m.remove(&key); }
            }
        }
        if let Ok(spec) = Eagle3Spec::from_metadata(&m, &target) {
            prop_assert!(spec.target_layers.iter().all(|&layer| layer <= target.n_layer()));
            prop_assert_eq!(spec.projection.state_width(), spec.target_layers.len() * target.n_embd);
            for t in spec.layer.tensors().into_iter().chain(spec.projection.tensors()) {
                prop_assert!(t.shape.iter().all(|&n| n > 0), "{} {:?}", t.name, t.shape);
            }
        }
    }

    /// The same of a block drafter.
    #[test]
    fn hostile_metadata_of_block_drafters_never_panics(
        changes in prop::collection::vec((0..BLOCK_DRAFTER_KEYS.len(), prop::option::weighted(0.9, any_value())), 0..4),
        selects in any::<bool>(),
    ) {
        let target = crate::dflash::target();
        let mut m = crate::dflash::dflash(&target, selects);
        for (key, value) in changes {
            match value {
                Some(value) => m.set(BLOCK_DRAFTER_KEYS[key], value),
                None => { m.remove(BLOCK_DRAFTER_KEYS[key]); }
            }
        }
        if let Ok(spec) = DflashSpec::from_metadata(&m, &target) {
            prop_assert!(spec.target_layers.iter().all(|&layer| layer <= target.n_layer()));
            prop_assert!(spec.max_drafts() > 0 && (spec.mask_token as usize) < target.n_vocab);
            for t in spec.model.tensors().into_iter().chain(spec.projection.tensors()) {
                prop_assert!(t.shape.iter().all(|&n| n > 0), "{} {:?}", t.name, t.shape);
            }
        }
    }
}

/// Keys of block drafters.
const BLOCK_DRAFTER_KEYS: [&str; 14] = [
    "dflash.block_count",
    "dflash.embedding_length",
    "dflash.target_layers",
    "dflash.block_size",
    "dflash.conv_kernel_size",
    "dflash.conv_group_size",
    "dflash.selector_rank",
    "dflash.selector_top_k",
    "dflash.attention.head_count",
    "dflash.attention.key_length",
    "dflash.attention.sliding_window",
    "dflash.attention.sliding_window_pattern",
    "dflash.rope.freq_base_swa",
    "tokenizer.ggml.mask_token_id",
];
