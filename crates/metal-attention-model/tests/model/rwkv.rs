//! Specs of RWKV models from metadata, and metadata that is refused.

use metal_attention_gguf::Metadata;
use metal_attention_model::{
    ChannelMixSpec, FeedForward, Mixer, ModelShape, ModelSpec, OutputScale, Rwkv6Spec, Rwkv7Spec, StateLayout,
};

/// Metadata of the small custom shape of `architecture` with `more` keys.
fn metadata(architecture: &str, more: &[(&str, u32)]) -> Metadata {
    let mut metadata = ModelShape::custom(architecture).unwrap().metadata();
    for (key, value) in more {
        metadata.set(format!("{architecture}.{key}"), *value);
    }
    metadata
}

fn spec(architecture: &str, more: &[(&str, u32)]) -> ModelSpec {
    ModelSpec::from_metadata(&metadata(architecture, more)).unwrap()
}

/// The error message for such metadata.
fn refusal(architecture: &str, more: &[(&str, u32)]) -> String {
    ModelSpec::from_metadata(&metadata(architecture, more)).unwrap_err().to_string()
}

#[test]
fn layers_are_a_time_mix_and_a_channel_mix() {
    let s = spec("rwkv7", &[]);
    for (i, layer) in s.layers.iter().enumerate() {
        let mix = Rwkv7Spec {
            width: 256,
            head_dim: 64,
            decay_rank: 24,
            rate_rank: 16,
            value_rank: 8,
            gate_rank: Some(40),
            norm: true,
            first: i == 0,
        };
        assert_eq!((&layer.mixer, mix.n_head(), mix.n_mix()), (&Mixer::Rwkv7(mix), 4, 6));
        let mix = ChannelMixSpec { n_embd: 256, width: 768, gated: false };
        assert_eq!((&layer.feed_forward, layer.output_scale), (&FeedForward::ChannelMix(mix), OutputScale::Fixed(1.0)));
        assert_eq!(layer.state_elements(), 256 * 64 + 256 + 256);
    }
    assert_eq!((StateLayout::new(&s).n_elements(), s.kv_elements_per_token()), (4 * (256 * 66), 0));
    assert!(s.is_causal() && s.embedding.norm.is_some_and(|norm| norm.has_bias));

    let s = spec("rwkv6", &[("rescale_every_n_layers", 3)]);
    let scales: Vec<_> = s.layers.iter().map(|layer| layer.output_scale).collect();
    assert_eq!(scales, [1.0, 1.0, 0.5, 1.0].map(OutputScale::Fixed));
    let mix = ChannelMixSpec { n_embd: 256, width: 768, gated: true };
    assert_eq!(s.layers[3].feed_forward, FeedForward::ChannelMix(mix));
    let s = spec("rwkv6", &[("rescale_every_n_layers", 0)]);
    assert!(s.layers.iter().all(|layer| layer.output_scale == OutputScale::Fixed(1.0)));
}

#[test]
fn derived_architectures_have_a_time_mix_only() {
    let s = spec("rwkv6qwen2", &[("attention.head_count_kv", 1)]);
    let mix = Rwkv6Spec {
        width: 256,
        head_dim: 64,
        n_head_kv: 1,
        mix_rank: 16,
        decay_rank: 24,
        bonus: false,
        lerps_apart: false,
    };
    assert_eq!((&s.layers[1].mixer, s.layers[1].state_elements()), (&Mixer::Rwkv6(mix), 256 * 65));
    let Mixer::Rwkv6(mix) = spec("rwkv6qwen2", &[("attention.head_count_kv", 0)]).layers[0].mixer else {
        panic!("a time mix")
    };
    assert_eq!(mix.n_head_kv, 4);
    for (rank, gate_rank) in [(0, None), (5, Some(5))] {
        let s = spec("arwkv7", &[("attention.gate_lora_rank", rank)]);
        let Mixer::Rwkv7(mix) = s.layers[0].mixer else { panic!("a time mix") };
        assert_eq!((mix.gate_rank, mix.norm, mix.n_mix()), (gate_rank, false, 5 + usize::from(rank > 0)));
        assert!(matches!(s.layers[0].feed_forward, FeedForward::Dense(dense) if dense.gated));
    }
}

#[test]
fn keys_with_invalid_values_are_named() {
    for (architecture, key, value) in [
        ("rwkv6", "wkv.head_size", 0),
        ("rwkv6", "wkv.head_size", 48),
        ("rwkv6", "time_mix_extra_dim", 0),
        ("rwkv6", "time_decay_extra_dim", u32::MAX),
        ("rwkv6", "rescale_every_n_layers", u32::MAX),
        ("rwkv6", "token_shift_count", 1),
        ("rwkv6qwen2", "attention.head_count_kv", 3),
        ("rwkv6qwen2", "token_shift_count", 2),
        ("rwkv7", "attention.gate_lora_rank", 0),
        ("rwkv7", "attention.decay_lora_rank", 0),
        ("arwkv7", "attention.iclr_lora_rank", u32::MAX),
        ("arwkv7", "attention.value_residual_mix_lora_rank", 0),
    ] {
        let message = refusal(architecture, &[(key, value)]);
        assert!(message.contains(&format!("{architecture}.{key}")), "{message}");
    }
    for (architecture, key) in
        [("rwkv6", "wkv.head_size"), ("rwkv6qwen2", "time_mix_extra_dim"), ("rwkv7", "attention.gate_lora_rank")]
    {
        let mut metadata = metadata(architecture, &[]);
        let key = format!("{architecture}.{key}");
        metadata.remove(&key).unwrap();
        let message = ModelSpec::from_metadata(&metadata).unwrap_err().to_string();
        assert!(message.contains(&key), "{message}");
    }
}
