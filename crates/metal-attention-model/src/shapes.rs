//! Sizes of well-known models, and the GGUF metadata of a model of any size:
//! what a writer of files without trained weights needs.

use metal_attention_gguf::Metadata;

use crate::ModelSpec;

/// The sizes that make a model; [`metadata`](Self::metadata) turns them into GGUF keys.
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
    /// Key and value heads.
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
    /// Divisors of the RoPE frequencies, where the model has a `rope_freqs.weight` tensor.
    pub rope_factors: Option<RopeFactors>,
    /// Epsilon of every RMSNorm.
    pub norm_eps: f32,
    /// Whether the output head is the embedding table.
    pub tied: bool,
}

/// How Llama 3.1 and later stretch low RoPE frequencies: those that turn less
/// than `low_freq_factor` times over the original context are divided by
/// `factor`, those that turn more than `high_freq_factor` times are kept, those
/// between are blended (Llama 3 model card and reference code).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RopeFactors {
    /// Largest divisor.
    pub factor: f32,
    /// Turns over `n_ctx_orig` below which a frequency is divided by `factor`.
    pub low_freq_factor: f32,
    /// Turns over `n_ctx_orig` above which a frequency is kept.
    pub high_freq_factor: f32,
    /// Context length of the training before the extension.
    pub n_ctx_orig: usize,
}

impl RopeFactors {
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
};
const LLAMA_3: ModelShape = ModelShape {
    n_vocab: 128_256,
    n_ctx_train: 131_072,
    rope_freq_base: 500_000.0,
    rope_factors: Some(RopeFactors { factor: 32.0, low_freq_factor: 1.0, high_freq_factor: 4.0, n_ctx_orig: 8192 }),
    ..LLAMA
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

/// Every named shape, as in the models' published configurations; `custom` is a
/// small starting point for sizes of one's own.
#[rustfmt::skip]
static NAMED: &[ModelShape] = &[
    LLAMA,
    ModelShape { name: "smollm-135m", n_layer: 30, n_embd: 576, n_head: 9, n_head_kv: 3, n_ff: 1536, n_vocab: 49_152, ..LLAMA },
    ModelShape { name: "smollm-360m", n_layer: 32, n_embd: 960, n_head: 15, n_head_kv: 5, n_ff: 2560, n_vocab: 49_152, ..LLAMA },
    ModelShape { name: "smollm-1.7b", n_layer: 24, n_embd: 2048, n_head: 32, n_head_kv: 32, n_ff: 8192, n_vocab: 49_152, ..LLAMA },
    ModelShape { name: "tinyllama-1.1b", n_layer: 22, n_embd: 2048, n_head: 32, n_head_kv: 4, n_ff: 5632, n_vocab: 32_000, tied: false, ..LLAMA },
    ModelShape { name: "llama-2-7b", n_layer: 32, n_embd: 4096, n_head: 32, n_head_kv: 32, head_dim: 128, n_ff: 11_008, n_vocab: 32_000, n_ctx_train: 4096, tied: false, ..LLAMA },
    ModelShape { name: "mistral-7b", n_layer: 32, n_embd: 4096, n_head: 32, n_head_kv: 8, head_dim: 128, n_ff: 14_336, n_vocab: 32_768, n_ctx_train: 32_768, rope_freq_base: 1_000_000.0, tied: false, ..LLAMA },
    ModelShape { name: "llama-3.2-1b", n_layer: 16, n_embd: 2048, n_head: 32, n_head_kv: 8, n_ff: 8192, ..LLAMA_3 },
    ModelShape { name: "llama-3.2-3b", n_layer: 28, n_embd: 3072, n_head: 24, n_head_kv: 8, head_dim: 128, n_ff: 8192, ..LLAMA_3 },
    ModelShape { name: "qwen2.5-0.5b", n_layer: 24, n_embd: 896, n_head: 14, n_head_kv: 2, n_ff: 4864, ..QWEN_2 },
    ModelShape { name: "qwen2.5-1.5b", n_layer: 28, n_embd: 1536, n_head: 12, n_head_kv: 2, head_dim: 128, n_ff: 8960, ..QWEN_2 },
    ModelShape { name: "qwen3-0.6b", n_layer: 28, n_embd: 1024, n_head: 16, n_head_kv: 8, n_ff: 3072, ..QWEN_3 },
    ModelShape { name: "qwen3-1.7b", n_layer: 28, n_embd: 2048, n_head: 16, n_head_kv: 8, n_ff: 6144, ..QWEN_3 },
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

    /// GGUF metadata from which [`ModelSpec::from_metadata`] reads this shape
    /// back. It has no tokenizer; `{architecture}.vocab_size` gives the
    /// vocabulary's size.
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
            // Sizes beyond 32 bits are clamped to one that reading back refuses.
            m.set(key(name), u32::try_from(value).unwrap_or(u32::MAX));
        }
        m.set(key("attention.layer_norm_rms_epsilon"), self.norm_eps);
        m.set(key("rope.freq_base"), self.rope_freq_base);
        m
    }

    /// The tensors of a file of this shape, whose description `spec` was read
    /// from [`metadata`](Self::metadata): all required ones, `output.weight`
    /// unless tied, and `rope_freqs.weight` where the shape has factors.
    pub fn tensors(&self, spec: &ModelSpec) -> Vec<crate::TensorSpec> {
        let wanted = |tensor: &crate::TensorSpec| match tensor.name.as_str() {
            "output.weight" => !self.tied,
            "rope_freqs.weight" => self.rope_factors.is_some(),
            _ => tensor.required,
        };
        spec.tensors().into_iter().filter(wanted).collect()
    }
}
