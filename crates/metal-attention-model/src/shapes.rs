//! Sizes of well-known models, and the GGUF metadata of a model of any size, for files without trained weights.

use metal_attention_gguf::Metadata;

use crate::{HeadMatrix, ModelSpec, architectures};

/// The sizes of a model; [`metadata`](Self::metadata) turns them into GGUF keys.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelShape {
    /// Name in lower case, e.g. `"smollm-135m"`.
    pub name: &'static str,
    /// `general.architecture`.
    pub architecture: &'static str,
    /// Layers.
    pub n_layer: usize,
    /// Width of the residual stream.
    pub n_embd: usize,
    /// Query heads.
    pub n_head: usize,
    /// KV heads.
    pub n_head_kv: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Width of the feed-forward.
    pub n_ff: usize,
    /// Tokens in the vocabulary.
    pub n_vocab: usize,
    /// Context length of the training.
    pub n_ctx_train: usize,
    /// Base of the RoPE frequencies.
    pub rope_freq_base: f32,
    /// Divisors of the RoPE frequencies, if the model has a tensor `rope_freqs.weight`.
    pub rope_factors: Option<RopeStretch>,
    /// Epsilon of every RMSNorm.
    pub norm_eps: f32,
    /// Whether the output head is the embedding table.
    pub tied: bool,
    /// Which of the optional biases the files have: those whose tensors' names contain one of these.
    pub biases: &'static [&'static str],
    /// Further keys of the architecture's files, `{architecture}.{key}`. They override the sizes above.
    pub keys: &'static [(&'static str, MetadataValue)],
}

/// A metadata value.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum MetadataValue {
    /// A whole number.
    U(u32),
    /// A float.
    F(f32),
    /// A flag.
    B(bool),
    /// A string.
    S(&'static str),
    /// Whole numbers.
    L(&'static [u32]),
}

/// The stretching of low RoPE frequencies in Llama 3.1 and later: those with fewer than `low_freq_factor` rotations
/// over the original context are divided by `factor`, those with more than `high_freq_factor` are kept, those between
/// are blended (Llama 3 model card and reference code).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RopeStretch {
    /// Largest divisor.
    pub factor: f32,
    /// Rotations over `n_ctx_orig` below which a frequency is divided by `factor`.
    pub low_freq_factor: f32,
    /// Rotations over `n_ctx_orig` above which a frequency is kept.
    pub high_freq_factor: f32,
    /// Training context before the extension.
    pub n_ctx_orig: usize,
}

impl RopeStretch {
    /// The divisor of each pair's frequency, `[n_rot / 2]`.
    pub fn divisors(&self, n_rot: usize, freq_base: f32) -> Vec<f32> {
        let (low, high) = (f64::from(self.low_freq_factor), f64::from(self.high_freq_factor));
        (0..n_rot / 2)
            .map(|i| {
                let frequency = f64::from(freq_base).powf(-2.0 * i as f64 / n_rot as f64);
                let turns = self.n_ctx_orig as f64 * frequency / std::f64::consts::TAU;
                let keep = ((turns - low) / (high - low)).clamp(0.0, 1.0);
                (1.0 / (keep + (1.0 - keep) / f64::from(self.factor))) as f32
            })
            .collect()
    }
}

use MetadataValue::{B, F, L, S, U};

/// No biases.
const NO_BIASES: &[&str] = &[];
/// The convolution's bias.
const CONVOLUTION: &[&str] = &["ssm_conv1d"];
/// The bias for the choice of experts.
const EXPERT_CHOICE: &[&str] = &["exp_probs_b"];
/// All biases.
const ALL_BIASES: &[&str] = &[".bias"];

const LLAMA: ModelShape = ModelShape {
    name: "custom",
    architecture: "llama",
    n_layer: 4,
    n_embd: 256,
    n_head: 4,
    n_head_kv: 2,
    head_dim: 64,
    n_ff: 768,
    n_vocab: 4096,
    n_ctx_train: 2048,
    rope_freq_base: 10_000.0,
    rope_factors: None,
    norm_eps: 1e-5,
    tied: true,
    biases: NO_BIASES,
    keys: &[],
};
const LLAMA_3: ModelShape = ModelShape {
    n_vocab: 128_256,
    n_ctx_train: 131_072,
    rope_freq_base: 500_000.0,
    rope_factors: Some(RopeStretch { factor: 32.0, low_freq_factor: 1.0, high_freq_factor: 4.0, n_ctx_orig: 8192 }),
    ..LLAMA
};
const LLAMA_3_1: ModelShape = ModelShape {
    rope_factors: Some(RopeStretch { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, n_ctx_orig: 8192 }),
    tied: false,
    ..LLAMA_3
};
const QWEN_2: ModelShape = ModelShape {
    architecture: "qwen2",
    n_vocab: 151_936,
    n_ctx_train: 32_768,
    rope_freq_base: 1_000_000.0,
    norm_eps: 1e-6,
    ..LLAMA
};
const QWEN_3: ModelShape = ModelShape { architecture: "qwen3", head_dim: 128, n_ctx_train: 40_960, ..QWEN_2 };
const QWEN_3_5: ModelShape = ModelShape {
    architecture: "qwen35",
    head_dim: 256,
    n_vocab: 248_320,
    n_ctx_train: 262_144,
    rope_freq_base: 10_000_000.0,
    ..QWEN_2
};
const GEMMA_3: ModelShape = ModelShape {
    architecture: "gemma3",
    head_dim: 256,
    n_vocab: 262_144,
    n_ctx_train: 131_072,
    rope_freq_base: 1_000_000.0,
    norm_eps: 1e-6,
    keys: GEMMA_3_KEYS,
    ..LLAMA
};
const GEMMA_3_KEYS: &[(&str, MetadataValue)] =
    &[("attention.sliding_window", U(1024)), ("rope.scaling.type", S("linear")), ("rope.scaling.factor", F(8.0))];
/// Gemma 4 E4B. Layers with a window have heads of half the width and rotate them whole; the others rotate the first 64 of 256 pairs,
/// which are those with more than 679 rotations over the context.
const GEMMA_4_E4B: ModelShape = ModelShape {
    name: "gemma-4-e4b",
    architecture: "gemma4",
    n_layer: 42,
    n_embd: 2560,
    n_head: 8,
    n_head_kv: 2,
    head_dim: 512,
    n_ff: 10_240,
    n_vocab: 262_144,
    rope_factors: Some(RopeStretch {
        factor: 1e30,
        low_freq_factor: 677.0,
        high_freq_factor: 679.0,
        n_ctx_orig: 131_072,
    }),
    keys: GEMMA_4_E4B_KEYS,
    ..GEMMA_3
};
#[rustfmt::skip]
const GEMMA_4_E4B_KEYS: &[(&str, MetadataValue)] = &[
    ("attention.sliding_window", U(512)),
    ("attention.sliding_window_pattern", L(&[1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 0])),
    ("attention.key_length_swa", U(256)),
    ("attention.value_length_swa", U(256)),
    ("attention.shared_kv_layers", U(18)),
    ("rope.dimension_count_swa", U(256)),
    ("rope.freq_base_swa", F(10_000.0)),
    ("embedding_length_per_layer_input", U(256)),
    ("final_logit_softcapping", F(30.0)),
];
const QWEN_3_VL_KEYS: &[(&str, MetadataValue)] =
    &[("rope.dimension_sections", L(&[24, 20, 20, 0])), ("n_deepstack_layers", U(3))];
const BERT: ModelShape = ModelShape {
    architecture: "bert",
    n_vocab: 30_522,
    n_ctx_train: 512,
    norm_eps: 1e-12,
    biases: ALL_BIASES,
    keys: &[("attention.causal", B(false)), ("pooling_type", U(2)), TOKEN_TYPES],
    ..LLAMA
};
/// Keys of Qwen 3.5 with 16, 32 or 48 value heads, and of Qwen3-Next.
const QWEN_3_5_KEYS: &[(&str, MetadataValue)] =
    &[DELTA[0], DELTA[1], DELTA[2], DELTA[3], ROTATED_64, ("ssm.time_step_rank", U(16)), ("ssm.inner_size", U(2048))];
const QWEN_3_5_KEYS_32: &[(&str, MetadataValue)] =
    &[DELTA[0], DELTA[1], DELTA[2], DELTA[3], ROTATED_64, ("ssm.time_step_rank", U(32)), ("ssm.inner_size", U(4096))];
const QWEN_3_5_KEYS_48: &[(&str, MetadataValue)] =
    &[DELTA[0], DELTA[1], DELTA[2], DELTA[3], ROTATED_64, ("ssm.time_step_rank", U(48)), ("ssm.inner_size", U(6144))];
const QWEN_3_5_MOE_KEYS: &[(&str, MetadataValue)] = &[
    DELTA[0],
    DELTA[1],
    DELTA[2],
    DELTA[3],
    ROTATED_64,
    ("ssm.time_step_rank", U(32)),
    ("ssm.inner_size", U(4096)),
    ("expert_count", U(256)),
    ("expert_used_count", U(8)),
    ("expert_feed_forward_length", U(512)),
    ("expert_shared_feed_forward_length", U(512)),
];
const QWEN3_NEXT_KEYS: &[(&str, MetadataValue)] = &[
    DELTA[0],
    DELTA[1],
    DELTA[2],
    ROTATED_64,
    ("ssm.time_step_rank", U(32)),
    ("ssm.inner_size", U(4096)),
    ("expert_count", U(512)),
    ("expert_used_count", U(10)),
    ("expert_feed_forward_length", U(512)),
    ("expert_shared_feed_forward_length", U(512)),
];
const DELTA: [(&str, MetadataValue); 4] = [
    ("ssm.group_count", U(16)),
    ("ssm.state_size", U(128)),
    ("ssm.conv_kernel", U(4)),
    ("rope.dimension_sections", L(&[11, 11, 10, 0])),
];
const ROTATED_64: (&str, MetadataValue) = ("rope.dimension_count", U(64));
const QWEN3_MOE_KEYS: &[(&str, MetadataValue)] =
    &[("expert_count", U(128)), ("expert_used_count", U(8)), ("expert_feed_forward_length", U(768))];
const GPT_OSS_KEYS: &[(&str, MetadataValue)] = &[
    ("attention.sliding_window", U(128)),
    ("rope.scaling.type", S("yarn")),
    ("rope.scaling.factor", F(32.0)),
    ("rope.scaling.original_context_length", U(4096)),
    ("expert_count", U(32)),
    ("expert_used_count", U(4)),
    ("expert_feed_forward_length", U(2880)),
];
const LFM_2_KEYS: &[(&str, MetadataValue)] =
    &[("attention.head_count_kv", L(&[0, 0, 8, 0, 0, 8, 0, 0, 8, 0, 8, 0, 8, 0, 8, 0])), ("shortconv.l_cache", U(3))];
/// RWKV-6 World 1.6B.
const RWKV_6: ModelShape = ModelShape {
    architecture: "rwkv6",
    n_layer: 24,
    n_embd: 2048,
    n_head: 0,
    n_head_kv: 0,
    n_ff: 7168,
    n_vocab: 65_536,
    n_ctx_train: 1 << 20,
    tied: false,
    keys: RWKV_6_KEYS,
    ..LLAMA
};
const RWKV_6_KEYS: &[(&str, MetadataValue)] = &[
    ("wkv.head_size", U(64)),
    ("time_mix_extra_dim", U(32)),
    ("time_decay_extra_dim", U(64)),
    ("rescale_every_n_layers", U(6)),
];
/// RWKV-7 World 1.5B.
const RWKV_7: ModelShape = ModelShape { architecture: "rwkv7", n_ff: 8192, keys: RWKV_7_KEYS, ..RWKV_6 };
const RWKV_7_KEYS: &[(&str, MetadataValue)] = &[
    ("wkv.head_size", U(64)),
    ("attention.decay_lora_rank", U(96)),
    ("attention.iclr_lora_rank", U(96)),
    ("attention.value_residual_mix_lora_rank", U(64)),
    ("attention.gate_lora_rank", U(256)),
];
const RWKV_7_SMALL_KEYS: &[(&str, MetadataValue)] = &[
    ("wkv.head_size", U(64)),
    ("attention.decay_lora_rank", U(64)),
    ("attention.iclr_lora_rank", U(64)),
    ("attention.value_residual_mix_lora_rank", U(32)),
    ("attention.gate_lora_rank", U(128)),
];
const GRANITE_KEYS: &[(&str, MetadataValue)] = &[
    ("embedding_scale", F(12.0)),
    ("residual_scale", F(0.22)),
    ("attention.scale", F(0.015_625)),
    ("logit_scale", F(6.0)),
    ("expert_count", U(32)),
    ("expert_used_count", U(8)),
];
#[rustfmt::skip]
const GRANITE_4_H_KEYS: &[(&str, MetadataValue)] = &[("embedding_scale", F(12.0)), ("residual_scale", F(0.22)), ("attention.scale", F(0.007_812_5)), ("logit_scale", F(6.0)), ("rope.scaling.finetuned", B(false)), ("expert_count", U(64)), ("expert_used_count", U(6)), ("expert_shared_feed_forward_length", U(1024)), ("ssm.conv_kernel", U(4)), ("ssm.inner_size", U(3072)), ("ssm.state_size", U(128)), ("ssm.time_step_rank", U(48)), ("ssm.group_count", U(1)), ("attention.head_count_kv", L(&[0, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0]))];
#[rustfmt::skip]
const NEMOTRON_H_KEYS: &[(&str, MetadataValue)] = &[("ssm.conv_kernel", U(4)), ("ssm.inner_size", U(8192)), ("ssm.state_size", U(128)), ("ssm.time_step_rank", U(128)), ("ssm.group_count", U(8)), ("attention.head_count_kv", L(&[0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0])), ("feed_forward_length", L(&[0, 21_504, 0, 21_504, 0, 21_504, 0, 0, 21_504, 0, 21_504, 0, 21_504, 0, 21_504, 0, 21_504, 0, 0, 21_504, 0, 21_504, 0, 21_504, 0, 21_504, 0, 21_504, 0, 0, 21_504, 0, 21_504, 0, 21_504, 0, 21_504, 0, 21_504, 0, 0, 21_504, 0, 21_504, 0, 21_504, 0, 21_504, 0, 21_504, 0, 21_504]))];
const FALCON_H1_KEYS: &[(&str, MetadataValue)] = &[
    ("ssm.conv_kernel", U(4)),
    ("ssm.inner_size", U(1536)),
    ("ssm.state_size", U(128)),
    ("ssm.time_step_rank", U(24)),
    ("ssm.group_count", U(1)),
];
const MAMBA_2_KEYS: &[(&str, MetadataValue)] = &[
    ("ssm.conv_kernel", U(4)),
    ("ssm.inner_size", U(4096)),
    ("ssm.state_size", U(128)),
    ("ssm.time_step_rank", U(64)),
    ("ssm.group_count", U(1)),
    ("attention.head_count", U(0)),
    ("attention.head_count_kv", U(0)),
    ("feed_forward_length", U(0)),
];
const DEEPSEEK_LITE_KEYS: &[(&str, MetadataValue)] = &[
    ("attention.head_count_kv", U(1)),
    ("attention.key_length", U(576)),
    ("attention.value_length", U(512)),
    ("attention.key_length_mla", U(192)),
    ("attention.value_length_mla", U(128)),
    ("attention.kv_lora_rank", U(512)),
    ("rope.dimension_count", U(64)),
    ("rope.scaling.type", S("yarn")),
    ("rope.scaling.factor", F(40.0)),
    ("rope.scaling.original_context_length", U(4096)),
    ("rope.scaling.yarn_log_multiplier", F(0.0707)),
    ("leading_dense_block_count", U(1)),
    ("expert_count", U(64)),
    ("expert_used_count", U(6)),
    ("expert_feed_forward_length", U(1408)),
    ("expert_shared_count", U(2)),
    ("expert_weights_scale", F(1.0)),
    ("expert_gating_func", U(1)),
];
/// Latent attention in every fourth layer and in the last.
const KIMI_LINEAR_KEYS: &[(&str, MetadataValue)] = &[
    ("attention.head_count_kv", L(&[0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 1])),
    ("attention.key_length", U(576)),
    ("attention.value_length", U(512)),
    ("attention.key_length_mla", U(192)),
    ("attention.value_length_mla", U(128)),
    ("attention.kv_lora_rank", U(512)),
    ("rope.dimension_count", U(64)),
    ("kda.head_dim", U(128)),
    ("ssm.conv_kernel", U(4)),
    ("leading_dense_block_count", U(1)),
    ("expert_count", U(256)),
    ("expert_used_count", U(8)),
    ("expert_feed_forward_length", U(1024)),
    ("expert_shared_count", U(1)),
    ("expert_weights_scale", F(2.446)),
    ("expert_gating_func", U(2)),
];

/// Every named shape, as in the models' published configurations; `custom` is a small starting point for other sizes.
#[rustfmt::skip]
static NAMED: &[ModelShape] = &[
    LLAMA,
    ModelShape { name: "smollm-135m", n_layer: 30, n_embd: 576, n_head: 9, n_head_kv: 3, n_ff: 1536, n_vocab: 49_152, ..LLAMA },
    ModelShape { name: "smollm-360m", n_layer: 32, n_embd: 960, n_head: 15, n_head_kv: 5, n_ff: 2560, n_vocab: 49_152, ..LLAMA },
    ModelShape { name: "smollm-1.7b", n_layer: 24, n_embd: 2048, n_head: 32, n_head_kv: 32, n_ff: 8192, n_vocab: 49_152, ..LLAMA },
    ModelShape { name: "smolvlm-500m", n_layer: 32, n_embd: 960, n_head: 15, n_head_kv: 5, n_ff: 2560, n_vocab: 49_280, n_ctx_train: 8192, rope_freq_base: 100_000.0, tied: false, ..LLAMA },
    ModelShape { name: "tinyllama-1.1b", n_layer: 22, n_embd: 2048, n_head: 32, n_head_kv: 4, n_ff: 5632, n_vocab: 32_000, tied: false, ..LLAMA },
    ModelShape { name: "llama-2-7b", n_layer: 32, n_embd: 4096, n_head: 32, n_head_kv: 32, head_dim: 128, n_ff: 11_008, n_vocab: 32_000, n_ctx_train: 4096, tied: false, ..LLAMA },
    ModelShape { name: "mistral-7b", n_layer: 32, n_embd: 4096, n_head: 32, n_head_kv: 8, head_dim: 128, n_ff: 14_336, n_vocab: 32_768, n_ctx_train: 32_768, rope_freq_base: 1_000_000.0, tied: false, ..LLAMA },
    ModelShape { name: "mistral-small-24b", n_layer: 40, n_embd: 5120, n_head: 32, n_head_kv: 8, head_dim: 128, n_ff: 32_768, n_vocab: 131_072, n_ctx_train: 32_768, rope_freq_base: 100_000_000.0, tied: false, ..LLAMA },
    ModelShape { name: "llama-3.2-1b", n_layer: 16, n_embd: 2048, n_head: 32, n_head_kv: 8, n_ff: 8192, ..LLAMA_3 },
    ModelShape { name: "llama-3.2-3b", n_layer: 28, n_embd: 3072, n_head: 24, n_head_kv: 8, head_dim: 128, n_ff: 8192, ..LLAMA_3 },
    ModelShape { name: "llama-3.1-8b", n_layer: 32, n_embd: 4096, n_head: 32, n_head_kv: 8, head_dim: 128, n_ff: 14_336, ..LLAMA_3_1 },
    ModelShape { name: "qwen2.5-0.5b", n_layer: 24, n_embd: 896, n_head: 14, n_head_kv: 2, n_ff: 4864, ..QWEN_2 },
    ModelShape { name: "qwen2.5-1.5b", n_layer: 28, n_embd: 1536, n_head: 12, n_head_kv: 2, head_dim: 128, n_ff: 8960, ..QWEN_2 },
    ModelShape { name: "qwen3-0.6b", n_layer: 28, n_embd: 1024, n_head: 16, n_head_kv: 8, n_ff: 3072, ..QWEN_3 },
    ModelShape { name: "qwen3-1.7b", n_layer: 28, n_embd: 2048, n_head: 16, n_head_kv: 8, n_ff: 6144, ..QWEN_3 },
    ModelShape { name: "qwen3-4b", n_layer: 36, n_embd: 2560, n_head: 32, n_head_kv: 8, n_ff: 9728, ..QWEN_3 },
    ModelShape { name: "qwen3-8b", n_layer: 36, n_embd: 4096, n_head: 32, n_head_kv: 8, n_ff: 12_288, tied: false, ..QWEN_3 },
    ModelShape { name: "qwen3-30b-a3b", architecture: "qwen3moe", n_layer: 48, n_embd: 2048, n_head: 32, n_head_kv: 4, n_ff: 6144, tied: false, keys: QWEN3_MOE_KEYS, ..QWEN_3 },
    ModelShape { name: "qwen3-vl-4b", architecture: "qwen3vl", n_layer: 36, n_embd: 2560, n_head: 32, n_head_kv: 8, n_ff: 9728, n_ctx_train: 262_144, rope_freq_base: 5_000_000.0, keys: QWEN_3_VL_KEYS, ..QWEN_3 },
    ModelShape { name: "qwen3-embedding-0.6b", n_layer: 28, n_embd: 1024, n_head: 16, n_head_kv: 8, n_ff: 3072, n_vocab: 151_669, n_ctx_train: 32_768, keys: &[("pooling_type", U(3))], ..QWEN_3 },
    ModelShape { name: "qwen3.5-0.8b", n_layer: 24, n_embd: 1024, n_head: 8, n_head_kv: 2, n_ff: 3584, keys: QWEN_3_5_KEYS, ..QWEN_3_5 },
    ModelShape { name: "qwen3.5-4b", n_layer: 32, n_embd: 2560, n_head: 16, n_head_kv: 4, n_ff: 9216, keys: QWEN_3_5_KEYS_32, ..QWEN_3_5 },
    ModelShape { name: "qwen3.5-27b", n_layer: 64, n_embd: 5120, n_head: 24, n_head_kv: 4, n_ff: 17_408, tied: false, keys: QWEN_3_5_KEYS_48, ..QWEN_3_5 },
    ModelShape { name: "qwen3.5-35b-a3b", architecture: "qwen35moe", n_layer: 40, n_embd: 2048, n_head: 16, n_head_kv: 2, n_ff: 512, tied: false, keys: QWEN_3_5_MOE_KEYS, ..QWEN_3_5 },
    ModelShape { name: "qwen3-next-80b-a3b", architecture: "qwen3next", n_layer: 48, n_embd: 2048, n_head: 16, n_head_kv: 2, n_ff: 5120, n_vocab: 151_936, tied: false, keys: QWEN3_NEXT_KEYS, ..QWEN_3_5 },
    ModelShape { name: "gemma-3-1b", n_layer: 26, n_embd: 1152, n_head: 4, n_head_kv: 1, n_ff: 6912, n_ctx_train: 32_768, keys: &[("attention.sliding_window", U(512))], ..GEMMA_3 },
    ModelShape { name: "gemma-3-4b", n_layer: 34, n_embd: 2560, n_head: 8, n_head_kv: 4, n_ff: 10_240, n_vocab: 262_208, ..GEMMA_3 },
    ModelShape { name: "gemma-3-27b", n_layer: 62, n_embd: 5376, n_head: 32, n_head_kv: 16, head_dim: 128, n_ff: 21_504, n_vocab: 262_208, ..GEMMA_3 },
    GEMMA_4_E4B,
    ModelShape { name: "gpt-oss-20b", architecture: "gpt-oss", n_layer: 24, n_embd: 2880, n_head: 64, n_head_kv: 8, n_ff: 2880, n_vocab: 201_088, n_ctx_train: 131_072, rope_freq_base: 150_000.0, tied: false, biases: ALL_BIASES, keys: GPT_OSS_KEYS, ..LLAMA },
    ModelShape { name: "phi-4", architecture: "phi3", n_layer: 40, n_embd: 5120, n_head: 40, n_head_kv: 10, head_dim: 128, n_ff: 17_920, n_vocab: 100_352, n_ctx_train: 16_384, rope_freq_base: 250_000.0, tied: false, keys: &[("rope.scaling.original_context_length", U(16_384))], ..LLAMA },
    ModelShape { name: "granite-3.1-1b-a400m", architecture: "granitemoe", n_layer: 24, n_embd: 1024, n_head: 16, n_head_kv: 8, n_ff: 512, n_vocab: 49_155, n_ctx_train: 131_072, rope_freq_base: 1_500_000.0, norm_eps: 1e-6, keys: GRANITE_KEYS, ..LLAMA },
    ModelShape { name: "olmoe-1b-7b", architecture: "olmoe", n_layer: 16, n_embd: 2048, n_head: 16, n_head_kv: 16, head_dim: 128, n_ff: 1024, n_vocab: 50_304, n_ctx_train: 4096, tied: false, keys: &[("expert_count", U(64)), ("expert_used_count", U(8))], ..LLAMA },
    ModelShape { name: "deepseek-v2-lite", architecture: "deepseek2", n_layer: 27, n_embd: 2048, n_head: 16, n_head_kv: 16, head_dim: 192, n_ff: 10_944, n_vocab: 102_400, n_ctx_train: 163_840, norm_eps: 1e-6, tied: false, keys: DEEPSEEK_LITE_KEYS, ..LLAMA },
    ModelShape { name: "kimi-linear-48b-a3b", architecture: "kimi-linear", n_layer: 27, n_embd: 2304, n_head: 32, n_head_kv: 1, head_dim: 192, n_ff: 9216, n_vocab: 163_840, n_ctx_train: 1_048_576, tied: false, biases: EXPERT_CHOICE, keys: KIMI_LINEAR_KEYS, ..LLAMA },
    ModelShape { name: "lfm2-1.2b", architecture: "lfm2", n_layer: 16, n_embd: 2048, n_head: 32, n_head_kv: 8, n_ff: 8192, n_vocab: 65_536, n_ctx_train: 128_000, rope_freq_base: 1_000_000.0, keys: LFM_2_KEYS, ..LLAMA },
    ModelShape { name: "granite-4-h-tiny", architecture: "granitehybrid", n_layer: 40, n_embd: 1536, n_head: 12, n_head_kv: 4, head_dim: 128, n_ff: 512, n_vocab: 100_352, n_ctx_train: 1_048_576, biases: CONVOLUTION, keys: GRANITE_4_H_KEYS, ..LLAMA },
    ModelShape { name: "nemotron-h-8b", architecture: "nemotron_h", n_layer: 52, n_embd: 4096, n_head: 32, n_head_kv: 8, head_dim: 128, n_ff: 21_504, n_vocab: 131_072, n_ctx_train: 8192, tied: false, biases: CONVOLUTION, keys: NEMOTRON_H_KEYS, ..LLAMA },
    ModelShape { name: "falcon-h1-0.5b", architecture: "falcon-h1", n_layer: 36, n_embd: 1024, n_head: 8, n_head_kv: 2, n_ff: 2048, n_vocab: 32_784, n_ctx_train: 16_384, rope_freq_base: 100_000_000_000.0, tied: false, biases: CONVOLUTION, keys: FALCON_H1_KEYS, ..LLAMA },
    ModelShape { name: "mamba2-1.3b", architecture: "mamba2", n_layer: 48, n_embd: 2048, n_vocab: 50_288, n_ctx_train: 1_048_576, keys: MAMBA_2_KEYS, ..LLAMA },
    ModelShape { name: "rwkv6-1.6b", ..RWKV_6 },
    ModelShape { name: "rwkv7-0.4b", n_embd: 1024, n_ff: 4096, keys: RWKV_7_SMALL_KEYS, ..RWKV_7 },
    ModelShape { name: "rwkv7-1.5b", ..RWKV_7 },
    ModelShape { name: "bge-small", n_layer: 12, n_embd: 384, n_head: 12, n_head_kv: 12, head_dim: 32, n_ff: 1536, ..BERT },
    ModelShape { name: "nomic-embed-text", architecture: "nomic-bert", n_layer: 12, n_embd: 768, n_head: 12, n_head_kv: 12, n_ff: 3072, n_ctx_train: 2048, rope_freq_base: 1000.0, biases: NO_BIASES, keys: ENCODER, ..BERT },
];

const WINDOW: (&str, MetadataValue) = ("attention.sliding_window", U(512));
const EXPERTS: [(&str, MetadataValue); 3] =
    [("expert_count", U(8)), ("expert_used_count", U(2)), ("expert_feed_forward_length", U(256))];
const SHARED: (&str, MetadataValue) = ("expert_shared_count", U(1));
const TOKEN_TYPES: (&str, MetadataValue) = ("tokenizer.ggml.token_type_count", U(2));
const ENCODER: &[(&str, MetadataValue)] = &[("attention.causal", B(false)), ("pooling_type", U(1)), TOKEN_TYPES];
#[rustfmt::skip]
const MISTRAL_4: &[(&str, MetadataValue)] = &[EXPERTS[0], EXPERTS[1], EXPERTS[2], SHARED, ("attention.head_count_kv", U(1)), ("attention.key_length", U(96)), ("attention.value_length", U(64)), ("attention.key_length_mla", U(96)), ("attention.value_length_mla", U(64)), ("attention.kv_lora_rank", U(64)), ("attention.q_lora_rank", U(96)), ("rope.dimension_count", U(32)), ("leading_dense_block_count", U(1)), ("expert_gating_func", U(1)), ("attention.temperature_scale", F(0.1)), ("attention.temperature_length", U(8)), ("expert_weights_norm", B(true))];
const SECTIONS: (&str, MetadataValue) = ("rope.dimension_sections", L(&[12, 10, 10, 0]));

/// Sizes of Mamba, and of Mamba-2 with 8 heads.
const MAMBA: [(&str, MetadataValue); 4] =
    [("ssm.conv_kernel", U(4)), ("ssm.inner_size", U(512)), ("ssm.state_size", U(16)), ("ssm.time_step_rank", U(16))];
const MAMBA_2: [(&str, MetadataValue); 5] =
    [MAMBA[0], MAMBA[1], MAMBA[2], ("ssm.time_step_rank", U(8)), ("ssm.group_count", U(2))];
const NO_ATTENTION: [(&str, MetadataValue); 3] =
    [("attention.head_count", U(0)), ("attention.head_count_kv", U(0)), ("feed_forward_length", U(0))];
const SECOND_ATTENDS: (&str, MetadataValue) = ("attention.head_count_kv", L(&[0, 2, 0, 0]));
const SECOND_FEEDS_FORWARD: (&str, MetadataValue) = ("feed_forward_length", L(&[0, 384, 0, 0]));
const THIRD_ATTENDS: (&str, MetadataValue) = ("attention.head_count_kv", L(&[0, 0, 2, 0]));
/// Whether each layer has a sliding window.
const FOURTH_IS_FULL: (&str, MetadataValue) = ("attention.sliding_window_pattern", L(&[1, 1, 1, 0]));
const SHARED_WIDTH: (&str, MetadataValue) = ("expert_shared_feed_forward_length", U(192));

const LFM_2_CUSTOM: &[(&str, MetadataValue)] =
    &[("attention.head_count_kv", L(&[0, 2, 0, 0])), ("shortconv.l_cache", U(3))];

/// Two key heads, each read by two value heads.
const DELTA_CUSTOM: [(&str, MetadataValue); 7] = [
    ("ssm.group_count", U(2)),
    ("ssm.state_size", U(32)),
    ("ssm.time_step_rank", U(4)),
    ("ssm.inner_size", U(128)),
    ("ssm.conv_kernel", U(4)),
    ("rope.dimension_count", U(16)),
    ("rope.dimension_sections", L(&[4, 2, 2, 0])),
];
#[rustfmt::skip]
const KIMI_LINEAR: &[(&str, MetadataValue)] = &[EXPERTS[0], EXPERTS[1], EXPERTS[2], SHARED, ("attention.head_count_kv", L(&[0, 1, 0, 0])), ("attention.key_length", U(96)), ("attention.value_length", U(64)), ("attention.key_length_mla", U(96)), ("attention.value_length_mla", U(64)), ("attention.kv_lora_rank", U(64)), ("rope.dimension_count", U(32)), ("leading_dense_block_count", U(1)), ("expert_gating_func", U(2)), ("expert_weights_scale", F(2.5)), ("kda.head_dim", U(32)), ("ssm.conv_kernel", U(4))];
const NO_HEADS: [(&str, MetadataValue); 2] = [("attention.head_count", U(0)), ("attention.head_count_kv", U(0))];
const HEAD_SIZE: (&str, MetadataValue) = ("wkv.head_size", U(64));
const RWKV_6_RANKS: [(&str, MetadataValue); 2] = [("time_mix_extra_dim", U(16)), ("time_decay_extra_dim", U(24))];
const RWKV_7_RANKS: [(&str, MetadataValue); 4] = [
    ("attention.decay_lora_rank", U(24)),
    ("attention.iclr_lora_rank", U(16)),
    ("attention.value_residual_mix_lora_rank", U(8)),
    ("attention.gate_lora_rank", U(40)),
];
const ONE_SHIFT: (&str, MetadataValue) = ("token_shift_count", U(1));

type ExtraKeys = &'static [(&'static str, MetadataValue)];

/// Additional keys and biases of the small shape `custom`, for architectures that need them.
#[rustfmt::skip]
static CUSTOM: &[(&str, ExtraKeys, &[&str])] = &[
    ("afmoe", &[WINDOW, EXPERTS[0], EXPERTS[1], EXPERTS[2], SHARED, ("leading_dense_block_count", U(1)), ("expert_gating_func", U(2)), ("expert_weights_norm", B(true)), ("expert_weights_scale", F(2.5))], EXPERT_CHOICE),
    ("arwkv7", &[NO_HEADS[0], NO_HEADS[1], HEAD_SIZE, ONE_SHIFT, RWKV_7_RANKS[0], RWKV_7_RANKS[1], RWKV_7_RANKS[2], RWKV_7_RANKS[3]], NO_BIASES),
    ("bailingmoe", &[EXPERTS[0], EXPERTS[1], EXPERTS[2], SHARED, ("expert_weights_norm", B(true))], NO_BIASES),
    ("bailingmoe2", &[EXPERTS[0], EXPERTS[1], EXPERTS[2], SHARED, ("leading_dense_block_count", U(1)), ("expert_gating_func", U(2)), ("expert_weights_norm", B(true)), ("expert_group_count", U(4)), ("expert_group_used_count", U(2)), ("expert_weights_scale", F(2.5)), ("rope.dimension_count", U(32))], &["exp_probs_b"]),
    ("bert", ENCODER, ALL_BIASES),
    ("bloom", &[], ALL_BIASES),
    ("chatglm", &[("rope.dimension_count", U(32))], &["attn_qkv"]),
    ("codeshell", &[], ALL_BIASES),
    ("cohere2", &[WINDOW, ("logit_scale", F(0.25))], NO_BIASES),
    ("command-r", &[("logit_scale", F(0.25))], NO_BIASES),
    ("dbrx", &[EXPERTS[0], EXPERTS[1], ("attention.clamp_kqv", F(1.5))], NO_BIASES),
    ("deepseek", &[EXPERTS[0], EXPERTS[1], EXPERTS[2], SHARED, ("leading_dense_block_count", U(1))], NO_BIASES),
    ("deepseek2", &[EXPERTS[0], EXPERTS[1], EXPERTS[2], SHARED, ("attention.head_count_kv", U(1)), ("attention.key_length", U(96)), ("attention.value_length", U(64)), ("attention.key_length_mla", U(96)), ("attention.value_length_mla", U(64)), ("attention.kv_lora_rank", U(64)), ("attention.q_lora_rank", U(96)), ("rope.dimension_count", U(32)), ("leading_dense_block_count", U(1)), ("expert_gating_func", U(2))], NO_BIASES),
    ("deepseek2-ocr", &[EXPERTS[0], EXPERTS[1], EXPERTS[2], SHARED, ("leading_dense_block_count", U(1)), ("attention.head_count_kv", U(4))], NO_BIASES),
    ("dots1", &[EXPERTS[0], EXPERTS[1], EXPERTS[2], SHARED, ("leading_dense_block_count", U(1)), ("expert_gating_func", U(2))], NO_BIASES),
    ("ernie4_5-moe", &[EXPERTS[0], EXPERTS[1], EXPERTS[2], ("interleave_moe_layer_step", U(1)), ("leading_dense_block_count", U(1))], NO_BIASES),
    ("eurobert", ENCODER, NO_BIASES),
    ("exaone-moe", &[WINDOW, EXPERTS[0], EXPERTS[1], EXPERTS[2], SHARED, ("leading_dense_block_count", U(1)), ("expert_gating_func", U(2)), ("expert_weights_norm", B(true)), ("expert_weights_scale", F(2.5))], &["exp_probs_b"]),
    ("falcon-h1", &MAMBA_2, CONVOLUTION),
    ("gemma2", &[WINDOW], NO_BIASES),
    ("gemma3", &[WINDOW], NO_BIASES),
    ("gemma3n", &[WINDOW, ("embedding_length_per_layer_input", U(64)), ("attention.shared_kv_layers", U(2))], NO_BIASES),
    ("gemma4", &[WINDOW, ("embedding_length_per_layer_input", U(64)), ("attention.shared_kv_layers", U(0))], NO_BIASES),
    ("gemma-embedding", &[WINDOW, ("pooling_type", U(1)), ("dense_2_feat_out", U(512)), ("dense_3_feat_out", U(256))], NO_BIASES),
    ("glm4moe", &[EXPERTS[0], EXPERTS[1], EXPERTS[2], SHARED, ("leading_dense_block_count", U(1))], ALL_BIASES),
    ("gpt2", &[], ALL_BIASES),
    ("gptneox", &[("use_parallel_residual", B(true))], ALL_BIASES),
    ("gpt-oss", &[WINDOW, EXPERTS[0], EXPERTS[1], EXPERTS[2]], ALL_BIASES),
    ("granite", &GRANITE, NO_BIASES),
    ("granitemoe", &[GRANITE[0], GRANITE[1], GRANITE[2], GRANITE[3], EXPERTS[0], EXPERTS[1]], NO_BIASES),
    ("granitehybrid", &[GRANITE[0], GRANITE[1], GRANITE[2], GRANITE[3], MAMBA_2[0], MAMBA_2[1], MAMBA_2[2], MAMBA_2[3], MAMBA_2[4], EXPERTS[0], EXPERTS[1], SHARED_WIDTH, SECOND_ATTENDS, ("rope.scaling.finetuned", B(false))], CONVOLUTION),
    ("grok", &[EXPERTS[0], EXPERTS[1], EXPERTS[2]], NO_BIASES),
    ("hunyuan-moe", &[EXPERTS[0], EXPERTS[1], ("expert_feed_forward_length", U(768))], NO_BIASES),
    ("hunyuan_vl", &[("rope.scaling.alpha", F(1000.0)), SECTIONS], NO_BIASES),
    ("hy_v3", &[EXPERTS[0], EXPERTS[1], EXPERTS[2], ("expert_weights_norm", B(true))], NO_BIASES),
    ("jais", &[("attention.max_alibi_bias", F(8.0))], ALL_BIASES),
    ("jais2", &[], ALL_BIASES),
    ("jamba", &[MAMBA[0], MAMBA[1], MAMBA[2], MAMBA[3], EXPERTS[0], EXPERTS[1], SECOND_ATTENDS], NO_BIASES),
    ("jina-bert-v2", ENCODER, ALL_BIASES),
    ("jina-bert-v3", ENCODER, ALL_BIASES),
    ("kimi-linear", KIMI_LINEAR, EXPERT_CHOICE),
    ("laguna", &[WINDOW, EXPERTS[0], EXPERTS[1], EXPERTS[2], SHARED_WIDTH, ("leading_dense_block_count", U(1)), ("expert_weights_norm", B(true)), ("expert_weights_scale", F(2.5)), ("rope.freq_base_swa", F(20_000.0)), ("rope.dimension_count_swa", U(32))], EXPERT_CHOICE),
    ("lfm2", LFM_2_CUSTOM, NO_BIASES),
    ("lfm2moe", &[LFM_2_CUSTOM[0], LFM_2_CUSTOM[1], EXPERTS[0], EXPERTS[1], EXPERTS[2], ("leading_dense_block_count", U(1)), ("expert_gating_func", U(2))], &["exp_probs_b"]),
    ("llama4", &[EXPERTS[0], EXPERTS[1], EXPERTS[2], ("interleave_moe_layer_step", U(2))], NO_BIASES),
    ("llama-embed", ENCODER, NO_BIASES),
    ("mamba", &[MAMBA[0], MAMBA[1], MAMBA[2], MAMBA[3], NO_ATTENTION[0], NO_ATTENTION[1], NO_ATTENTION[2]], NO_BIASES),
    ("mamba2", &[MAMBA_2[0], MAMBA_2[1], MAMBA_2[2], MAMBA_2[3], MAMBA_2[4], NO_ATTENTION[0], NO_ATTENTION[1], NO_ATTENTION[2]], NO_BIASES),
    ("mellum", &[WINDOW, EXPERTS[0], EXPERTS[1], EXPERTS[2], ("rope.scaling.type", S("yarn")), ("rope.scaling.factor", F(4.0)), ("rope.scaling.original_context_length", U(512))], NO_BIASES),
    ("minicpm3", &[("attention.key_length", U(96)), ("attention.value_length", U(64)), ("attention.q_lora_rank", U(96)), ("attention.kv_lora_rank", U(64)), ("attention.head_count_kv", U(4)), ("rope.dimension_count", U(32))], NO_BIASES),
    ("minimax-m2", &[EXPERTS[0], EXPERTS[1], ("expert_feed_forward_length", U(768)), ("expert_gating_func", U(2)), ("rope.dimension_count", U(32))], &["exp_probs_b"]),
    ("mistral3", &[("attention.temperature_scale", F(0.1)), ("rope.scaling.original_context_length", U(512))], NO_BIASES),
    ("mistral4", MISTRAL_4, NO_BIASES),
    ("modern-bert", &[WINDOW, ENCODER[0], ENCODER[1]], NO_BIASES),
    ("mpt", &[("attention.max_alibi_bias", F(8.0)), ("attention.clamp_kqv", F(1.5))], NO_BIASES),
    ("muse-glimmer", &[WINDOW, ("logit_scale", F(0.25)), ("final_logit_softcapping", F(8.0))], NO_BIASES),
    ("nemotron", &[("rope.dimension_count", U(32))], NO_BIASES),
    ("nemotron_h", &[MAMBA_2[0], MAMBA_2[1], MAMBA_2[2], MAMBA_2[3], MAMBA_2[4], SECOND_FEEDS_FORWARD, THIRD_ATTENDS], CONVOLUTION),
    ("nemotron_h_moe", &[MAMBA_2[0], MAMBA_2[1], MAMBA_2[2], MAMBA_2[3], MAMBA_2[4], SECOND_FEEDS_FORWARD, THIRD_ATTENDS, EXPERTS[0], EXPERTS[1], EXPERTS[2], SHARED, SHARED_WIDTH, ("expert_weights_norm", B(true)), ("expert_weights_scale", F(2.5)), ("moe_latent_size", U(128))], &["exp_probs_b", "ssm_conv1d"]),
    ("neo-bert", ENCODER, NO_BIASES),
    ("nomic-bert", ENCODER, NO_BIASES),
    ("nomic-bert-moe", &[ENCODER[0], ENCODER[1], TOKEN_TYPES, EXPERTS[0], EXPERTS[1], ("moe_every_n_layers", U(2))], ALL_BIASES),
    ("olmoe", &[EXPERTS[0], EXPERTS[1]], NO_BIASES),
    ("paddleocr", &[SECTIONS], NO_BIASES),
    ("pangu-embedded", &[], &["attn"]),
    ("phi2", &[], ALL_BIASES),
    ("phimoe", &[EXPERTS[0], EXPERTS[1]], ALL_BIASES),
    ("plamo2", &[MAMBA_2[0], MAMBA_2[1], MAMBA_2[2], MAMBA_2[3], ("ssm.group_count", U(0)), SECOND_ATTENDS], NO_BIASES),
    ("plm", &[("attention.key_length", U(96)), ("attention.value_length", U(64)), ("attention.kv_lora_rank", U(64)), ("attention.head_count_kv", U(4)), ("rope.dimension_count", U(32))], NO_BIASES),
    ("qwen", &[("attention.head_count_kv", U(4))], NO_BIASES),
    ("qwen2moe", &[EXPERTS[0], EXPERTS[1], EXPERTS[2], ("expert_shared_feed_forward_length", U(256))], NO_BIASES),
    ("qwen2vl", &[SECTIONS], NO_BIASES),
    ("qwen35", &DELTA_CUSTOM, NO_BIASES),
    ("qwen35moe", &[DELTA_CUSTOM[0], DELTA_CUSTOM[1], DELTA_CUSTOM[2], DELTA_CUSTOM[3], DELTA_CUSTOM[4], DELTA_CUSTOM[5], DELTA_CUSTOM[6], EXPERTS[0], EXPERTS[1], EXPERTS[2], SHARED_WIDTH], NO_BIASES),
    ("qwen3moe", &EXPERTS, NO_BIASES),
    ("qwen3next", &[DELTA_CUSTOM[0], DELTA_CUSTOM[1], DELTA_CUSTOM[2], DELTA_CUSTOM[3], DELTA_CUSTOM[4], DELTA_CUSTOM[5], DELTA_CUSTOM[6], EXPERTS[0], EXPERTS[1], EXPERTS[2], SHARED_WIDTH], NO_BIASES),
    ("qwen3vl", &[SECTIONS], NO_BIASES),
    ("qwen3vlmoe", &[EXPERTS[0], EXPERTS[1], EXPERTS[2], SECTIONS], NO_BIASES),
    ("rwkv6", &[NO_HEADS[0], NO_HEADS[1], HEAD_SIZE, RWKV_6_RANKS[0], RWKV_6_RANKS[1], ("rescale_every_n_layers", U(2))], NO_BIASES),
    ("rwkv6qwen2", &[NO_HEADS[0], HEAD_SIZE, ONE_SHIFT, RWKV_6_RANKS[0], RWKV_6_RANKS[1]], &["time_mix"]),
    ("rwkv7", &[NO_HEADS[0], NO_HEADS[1], HEAD_SIZE, RWKV_7_RANKS[0], RWKV_7_RANKS[1], RWKV_7_RANKS[2], RWKV_7_RANKS[3]], NO_BIASES),
    ("spark2_5", &[WINDOW, FOURTH_IS_FULL, ("rope.freq_base_swa", F(20_000.0))], NO_BIASES),
    ("stablelm", &[], ALL_BIASES),
    ("starcoder", &[], ALL_BIASES),
    ("starcoder2", &[], ALL_BIASES),
    ("step35", &[WINDOW, FOURTH_IS_FULL, EXPERTS[0], EXPERTS[1], EXPERTS[2], SHARED_WIDTH, ("leading_dense_block_count", U(1)), ("expert_weights_norm", B(true)), ("rope.freq_base_swa", F(20_000.0)), ("swiglu_clamp_exp", F(0.5)), ("swiglu_clamp_shexp", F(0.5))], EXPERT_CHOICE),
];

const GRANITE: [(&str, MetadataValue); 4] = [
    ("embedding_scale", F(12.0)),
    ("residual_scale", F(0.22)),
    ("attention.scale", F(0.015_625)),
    ("logit_scale", F(6.0)),
];

impl ModelShape {
    /// Every named shape.
    pub fn all() -> &'static [Self] {
        NAMED
    }

    /// The shape of that name.
    pub fn named(name: &str) -> Option<&'static Self> {
        NAMED.iter().find(|shape| shape.name == name)
    }

    /// The small shape `custom` in an architecture; `None` if there is no such architecture.
    pub fn custom(architecture: &str) -> Option<Self> {
        let architecture = architectures::names().find(|name| *name == architecture)?;
        let additions = CUSTOM.iter().find(|(name, ..)| *name == architecture);
        let (keys, biases) = additions.map_or((&[][..], NO_BIASES), |(_, keys, biases)| (*keys, *biases));
        Some(Self { architecture, biases, keys, ..LLAMA })
    }

    /// The names of all architectures, sorted.
    pub fn architectures() -> Vec<&'static str> {
        architectures::names().collect()
    }

    /// GGUF metadata from which [`ModelSpec::from_metadata`] reads this shape back. There is no tokenizer;
    /// `{architecture}.vocab_size` is the size of the vocabulary.
    pub fn metadata(&self) -> Metadata {
        let mut m = Metadata::new();
        m.set("general.architecture", self.architecture);
        m.set("general.name", self.name);
        let key = |key: &str| format!("{}.{key}", self.architecture);
        for (name, value) in [
            ("vocab_size", self.n_vocab),
            ("context_length", self.n_ctx_train),
            ("embedding_length", self.n_embd),
            ("block_count", self.n_layer),
            ("feed_forward_length", self.n_ff),
            ("attention.head_count", self.n_head),
            ("attention.head_count_kv", self.n_head_kv),
            ("attention.key_length", self.head_dim),
            ("attention.value_length", self.head_dim),
            ("rope.dimension_count", self.head_dim),
        ] {
            // Larger sizes are clamped to a value that is refused when it is read back.
            m.set(key(name), u32::try_from(value).unwrap_or(u32::MAX));
        }
        // The family's norms decide which of the two is read.
        m.set(key("attention.layer_norm_rms_epsilon"), self.norm_eps);
        m.set(key("attention.layer_norm_epsilon"), self.norm_eps);
        m.set(key("rope.freq_base"), self.rope_freq_base);
        for (name, value) in self.keys {
            // Keys of the tokenizer have no architecture prefix.
            let key = |name: &str| if name.starts_with("tokenizer.") { name.to_owned() } else { key(name) };
            match *value {
                U(n) => m.set(key(name), n),
                F(x) => m.set(key(name), x),
                B(flag) => m.set(key(name), flag),
                S(text) => m.set(key(name), text),
                L(numbers) => m.set(key(name), numbers.to_vec()),
            }
        }
        m
    }

    /// The tensors of a file of this shape; `spec` was read from its [`metadata`](Self::metadata). All required ones,
    /// `output.weight` unless tied, `rope_freqs.weight` if the shape has divisors, and the biases that it has.
    pub fn tensors(&self, spec: &ModelSpec) -> Vec<crate::TensorSpec> {
        let wanted = |tensor: &crate::TensorSpec| match tensor.name.as_str() {
            "output.weight" => {
                !self.tied || spec.output.head.is_some_and(|head| head.matrix == HeadMatrix::OutputTensor)
            }
            "rope_freqs.weight" => self.rope_factors.is_some(),
            _ if tensor.is_bias() => tensor.required || self.biases.iter().any(|part| tensor.name.contains(part)),
            _ => tensor.required,
        };
        spec.tensors().into_iter().filter(wanted).collect()
    }
}
