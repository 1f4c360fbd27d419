//! Named shapes: they have as many parameters as the models that they are named after, and their metadata is read back
//! unchanged.

use metal_attention_model::{
    DeltaGates, DeltaRuleSpec, FeedForward, Mask, MetadataValue, Mixer, ModelShape, ModelSpec,
};

#[test]
fn named_shapes_have_the_published_number_of_parameters() {
    for (name, parameters) in [
        ("smollm-135m", 134_515_008),
        ("smollm-360m", 361_821_120),
        ("smollm-1.7b", 1_711_376_384),
        // Only the part that reads text; with 49280 tokens and a head of its own.
        ("smolvlm-500m", 361_821_120 + 128 * 960 + 49_280 * 960),
        ("tinyllama-1.1b", 1_100_048_384),
        ("llama-2-7b", 6_738_415_616),
        ("mistral-7b", 7_248_023_552),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.2-3b", 3_212_749_824),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-1.5b", 1_543_714_304),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-1.7b", 1_720_574_976),
        ("qwen3-4b", 4_022_468_096),
        // Only the part that reads text.
        ("qwen3-vl-4b", 4_022_468_096),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("qwen3-embedding-0.6b", 595_776_512),
        ("llama-3.1-8b", 8_030_261_248),
        ("mistral-small-24b", 23_572_403_200),
        ("gemma-3-1b", 999_885_952),
        ("gemma-3-4b", 3_880_263_168),
        ("gemma-3-27b", 27_009_346_304),
        // Only the part that reads text, without tensors of layers that read the keys and values of others.
        ("gemma-4-e4b", 7_463_013_376),
        ("phi-4", 14_659_507_200),
        ("gpt-oss-20b", 20_914_757_184),
        ("granite-3.1-1b-a400m", 1_334_628_352),
        ("olmoe-1b-7b", 6_919_161_856),
        ("deepseek-v2-lite", 15_706_484_224),
        ("kimi-linear-48b-a3b", 49_122_681_728),
        ("lfm2-1.2b", 1_170_340_608),
        // Only the part that reads text, without the layer for multi-token prediction.
        ("qwen3.5-0.8b", 752_393_024),
        ("qwen3.5-4b", 4_205_751_296),
        ("qwen3.5-27b", 26_895_998_464),
        ("qwen3.5-35b-a3b", 34_660_610_688),
        ("qwen3-next-80b-a3b", 79_674_391_296),
        ("granite-4-h-tiny", 6_939_037_248),
        ("nemotron-h-8b", 8_100_852_736),
        ("falcon-h1-0.5b", 521_411_104),
        ("mamba2-1.3b", 1_343_757_312),
        ("rwkv6-1.6b", 1_599_873_024),
        // Files also have tensors of the first layer that the model does not use: an offset and low-rank matrices.
        ("rwkv7-0.4b", 450_767_872 + 1024 * (1 + 2 * 64)),
        ("rwkv7-1.5b", 1_527_404_544 + 2048 * (1 + 2 * 96)),
        // Without the pooler, which files do not have.
        ("bge-small", 33_360_000 - 384 * 385),
        // With 30522 tokens, not padded to 30528.
        ("nomic-embed-text", 136_731_648 - 6 * 768),
    ] {
        let shape = ModelShape::named(name).unwrap();
        let spec = ModelSpec::from_metadata(&shape.metadata()).unwrap();
        let tensors = shape.tensors(&spec);
        let learned = tensors.iter().filter(|t| t.name != "rope_freqs.weight");
        assert_eq!(learned.map(|t| t.shape.iter().product::<usize>()).sum::<usize>(), parameters, "{name}");
    }
    assert_eq!(ModelShape::all().len(), 46, "a named shape is not in the list above");
    assert!(ModelShape::named("smollm-136m").is_none());
}

#[test]
fn metadata_is_read_back_as_the_shape() {
    for shape in ModelShape::all() {
        let spec = ModelSpec::from_metadata(&shape.metadata()).unwrap();
        assert_eq!((spec.architecture.as_str(), spec.name.as_deref()), (shape.architecture, Some(shape.name)));
        assert_eq!((spec.n_layer(), spec.n_embd, spec.n_vocab), (shape.n_layer, shape.n_embd, shape.n_vocab));
        let norm = spec.output.norm.or(spec.embedding.norm);
        assert_eq!((spec.n_ctx_train, norm.unwrap().eps), (shape.n_ctx_train, shape.norm_eps));
        for layer in &spec.layers {
            match &layer.mixer {
                Mixer::Attention(a) => {
                    let of_windows = shape.keys.iter().find(|(name, _)| *name == "attention.key_length_swa");
                    let head_dim = match (of_windows, a.mask) {
                        (Some((_, MetadataValue::U(n))), Mask::Window(_)) => *n as usize,
                        _ => shape.head_dim,
                    };
                    assert_eq!((a.n_head, a.n_head_kv, a.head_dim), (shape.n_head, shape.n_head_kv, head_dim));
                    if let (Some(rope), Mask::Causal) = (a.rope(), a.mask) {
                        let n_rot = shape.keys.iter().find(|(name, _)| *name == "rope.dimension_count");
                        let n_rot = n_rot.map_or(MetadataValue::U(shape.head_dim as u32), |(_, value)| *value);
                        assert_eq!(
                            (MetadataValue::U(rope.n_rot as u32), rope.freq_base),
                            (n_rot, shape.rope_freq_base)
                        );
                    }
                }
                Mixer::LatentAttention(a) => assert_eq!((a.n_head, a.head_dim()), (shape.n_head, shape.head_dim)),
                Mixer::ShortConv(conv) => assert_eq!((conv.width, conv.n_tap), (shape.n_embd, 3)),
                Mixer::DeltaRule(rule) => {
                    let DeltaRuleSpec { n_head_k, n_head_v, key_dim, value_dim, n_tap, .. } = *rule;
                    let (heads, decays) = match rule.gates {
                        DeltaGates::OfHeads { paired: _ } => (16, n_head_v),
                        DeltaGates::OfChannels { rank: _ } => (shape.n_head, 128 * n_head_v),
                    };
                    assert_eq!((n_head_k, rule.n_decays()), (heads, decays));
                    assert_eq!((key_dim, value_dim, n_tap), (128, 128, 4));
                    assert_eq!(layer.state_elements(), 3 * 128 * (2 * heads + n_head_v) + 128 * 128 * n_head_v);
                }
                Mixer::Mamba(_)
                | Mixer::Mamba2(_)
                | Mixer::AttentionAndMamba2(_)
                | Mixer::Rwkv6(_)
                | Mixer::Rwkv7(_)
                | Mixer::None => assert!(layer.state_elements() > 0 || layer.feed_forward != FeedForward::None),
            }
            match &layer.feed_forward {
                FeedForward::Dense(dense) => assert_eq!(dense.n_ff, shape.n_ff),
                FeedForward::Experts(e) => assert!(e.n_used < e.n_expert && e.expert.n_ff <= shape.n_ff),
                FeedForward::ChannelMix(mix) => assert_eq!(mix.width, shape.n_ff),
                FeedForward::None => {}
            }
        }
    }
}

#[test]
fn every_architecture_has_a_small_model() {
    let names = ModelShape::architectures();
    assert!(names.len() > 50, "{names:?}");
    for name in names {
        let shape = ModelShape { n_head_kv: 4, ..ModelShape::custom(name).unwrap() };
        let spec = ModelSpec::from_metadata(&shape.metadata()).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(spec.architecture, name);
        assert!(!shape.tensors(&spec).is_empty());
    }
}

/// The published rule for the RoPE factors of Llama 3: by wavelength, in three cases.
fn divisor_by_wavelength(wavelength: f64) -> f64 {
    let (factor, low, high, n_ctx_orig) = (32.0, 1.0, 4.0, 8192.0);
    if wavelength < n_ctx_orig / high {
        1.0
    } else if wavelength > n_ctx_orig / low {
        factor
    } else {
        let smooth = (n_ctx_orig / wavelength - low) / (high - low);
        1.0 / ((1.0 - smooth) / factor + smooth)
    }
}

#[test]
fn llama_3_divisors_follow_the_published_rule() {
    let shape = ModelShape::named("llama-3.2-1b").unwrap();
    let divisors = shape.rope_factors.unwrap().divisors(64, shape.rope_freq_base);
    assert_eq!(divisors.len(), 32);
    for (i, &divisor) in divisors.iter().enumerate() {
        let wavelength = std::f64::consts::TAU * 500_000f64.powf(i as f64 / 32.0);
        let want = divisor_by_wavelength(wavelength);
        assert!((f64::from(divisor) - want).abs() < 1e-5 * want, "{i}: {divisor} {want}");
    }
    assert_eq!((divisors[0], divisors[31]), (1.0, 32.0));
    assert!(divisors.iter().any(|&d| d > 1.0 && d < 32.0));
}

#[test]
fn sizes_beyond_32_bits_are_refused() {
    let shape = ModelShape { n_ff: usize::MAX, ..ModelShape::named("custom").unwrap().clone() };
    let message = ModelSpec::from_metadata(&shape.metadata()).unwrap_err().to_string();
    assert!(message.contains("llama.feed_forward_length"), "{message}");
}
