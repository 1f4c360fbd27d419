//! A model as data: its hyperparameters, layer by layer, read from GGUF metadata.

use std::fmt::Display;

use metal_attention_gguf::Metadata;

use crate::{ModelError, Rope, RopeLayout, RopeScaling};

/// Architecture names that [`ModelSpec::from_metadata`] understands.
const SUPPORTED: &[&str] = &["llama", "qwen2", "qwen3"];

/// Everything about a model except its weights.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelSpec {
    /// `general.architecture`, e.g. `"llama"`.
    pub architecture: String,
    /// `general.name`, when the file has one.
    pub name: Option<String>,
    /// Tokens in the vocabulary: rows of the embedding table and length of the logits.
    pub n_vocab: usize,
    /// Context length of the training.
    pub n_ctx_train: usize,
    /// Width of the residual stream.
    pub n_embd: usize,
    /// Epsilon of every RMSNorm.
    pub norm_eps: f32,
    /// The layers, first to last.
    pub layers: Vec<LayerSpec>,
}

/// One layer: `x += mixer(norm(x)); x += feed_forward(norm(x))`.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerSpec {
    /// What moves information between tokens.
    pub mixer: Mixer,
    /// What works on each token alone.
    pub feed_forward: FeedForward,
}

/// What moves information between tokens.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Mixer {
    /// Softmax attention over the KV cache.
    Attention(AttentionSpec),
}

/// Softmax attention with grouped queries (GQA, arXiv 2305.13245).
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionSpec {
    /// Query heads.
    pub n_head: usize,
    /// Key and value heads; divides `n_head`. Query head `h` reads KV head `h / (n_head / n_head_kv)`.
    pub n_head_kv: usize,
    /// Elements of a query, key or value head.
    pub head_dim: usize,
    /// Factor on the scores before the softmax: `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// Position embedding of queries and keys.
    pub rope: Rope,
    /// Sliding window: a token sees itself and the `window - 1` tokens before it. `None`: all before it.
    pub window: Option<usize>,
    /// RMSNorm over each query and key head before RoPE (Qwen 3).
    pub qk_norm: bool,
    /// Whether the file must have biases on Q, K and V (Qwen 2); others may have them.
    pub qkv_bias: bool,
}

/// What works on each token alone.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum FeedForward {
    /// `down(activation(gate(x)) * up(x))` (arXiv 2002.05202).
    Gated {
        /// Width of gate and up.
        n_ff: usize,
        /// Activation of the gate.
        activation: Activation,
    },
}

/// Activation function of a feed-forward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Activation {
    /// `x / (1 + exp(-x))` (arXiv 1702.03118).
    Silu,
}

impl ModelSpec {
    /// Reads the hyperparameters of a supported architecture.
    ///
    /// Keys are those of the GGUF specification, `{architecture}.{key}`. A key
    /// that is missing, of the wrong type, or contradicts another is an error
    /// that names it.
    pub fn from_metadata(metadata: &Metadata) -> Result<Self, ModelError> {
        let architecture = metadata
            .str("general.architecture")?
            .ok_or_else(|| ModelError::MissingKey { key: "general.architecture".into() })?
            .to_owned();
        let keys = Keys { metadata, architecture: &architecture };
        let (layout, qkv_bias, qk_norm) = match architecture.as_str() {
            "llama" => (RopeLayout::Interleaved, false, false),
            "qwen2" => (RopeLayout::Halves, true, false),
            "qwen3" => (RopeLayout::Halves, false, true),
            _ => return Err(ModelError::UnsupportedArchitecture { architecture, supported: SUPPORTED }),
        };
        if let Some(n) = keys.opt_usize("expert_count")?.filter(|&n| n > 0) {
            return Err(ModelError::UnsupportedFeature {
                key: keys.key("expert_count"),
                value: n.to_string(),
                why: "mixture-of-experts layers are not supported",
            });
        }
        let n_embd = keys.positive("embedding_length")?;
        let n_layer = keys.positive("block_count")?;
        // Far above any model; bounds what a broken file can make us allocate.
        keys.check("block_count", n_layer, n_layer <= 4096, "at most 4096 layers are plausible")?;
        let head_count =
            keys.per_layer("attention.head_count", n_layer)?.ok_or_else(|| keys.missing("attention.head_count"))?;
        let head_count_kv = keys.per_layer("attention.head_count_kv", n_layer)?.unwrap_or_else(|| head_count.clone());
        let n_ff =
            keys.per_layer("feed_forward_length", n_layer)?.ok_or_else(|| keys.missing("feed_forward_length"))?;
        let key_length = keys.opt_positive("attention.key_length")?;
        let value_length = keys.opt_positive("attention.value_length")?;
        let n_rot = keys.opt_positive("rope.dimension_count")?;
        let freq_base = keys.opt_f32("rope.freq_base")?.unwrap_or(10_000.0);
        keys.check("rope.freq_base", freq_base, freq_base.is_finite() && freq_base > 1.0, "must be a number above 1")?;
        let n_ctx_train = keys.positive("context_length")?;
        let scaling = keys.rope_scaling(n_ctx_train)?;
        let norm_eps = keys
            .opt_f32("attention.layer_norm_rms_epsilon")?
            .ok_or_else(|| keys.missing("attention.layer_norm_rms_epsilon"))?;
        keys.check(
            "attention.layer_norm_rms_epsilon",
            norm_eps,
            norm_eps.is_finite() && norm_eps >= 0.0,
            "must be at least 0",
        )?;
        let window = keys.opt_usize("attention.sliding_window")?.filter(|&w| w > 0);

        for (n_head, n_head_kv) in head_count.iter().zip(&head_count_kv) {
            let divides = n_head.is_multiple_of(*n_head_kv);
            keys.check("attention.head_count_kv", n_head_kv, divides, "must divide attention.head_count")?;
        }
        // One length for all heads: that of the first layer's, where layers have different numbers of heads.
        let head_dim = if let Some(n) = key_length {
            n
        } else {
            let why = "must divide embedding_length where attention.key_length is not given";
            keys.check("attention.head_count", head_count[0], n_embd.is_multiple_of(head_count[0]), why)?;
            n_embd / head_count[0]
        };
        if let Some(v) = value_length {
            keys.check("attention.value_length", v, v == head_dim, "value heads must be as long as key heads")?;
        }
        let n_rot = n_rot.unwrap_or(head_dim);
        keys.check(
            "rope.dimension_count",
            n_rot,
            n_rot <= head_dim && n_rot.is_multiple_of(2),
            "must be even and at most the head's length",
        )?;

        let mut layers = Vec::with_capacity(n_layer);
        for layer in 0..n_layer {
            let (n_head, n_head_kv) = (head_count[layer], head_count_kv[layer]);
            keys.check(
                "attention.key_length",
                head_dim,
                n_head.checked_mul(head_dim).is_some_and(|n| n <= 1 << 28),
                "heads this large are not plausible",
            )?;
            layers.push(LayerSpec {
                mixer: Mixer::Attention(AttentionSpec {
                    n_head,
                    n_head_kv,
                    head_dim,
                    scale: 1.0 / (head_dim as f32).sqrt(),
                    rope: Rope { n_rot, layout, freq_base, scaling },
                    window,
                    qk_norm,
                    qkv_bias,
                }),
                feed_forward: FeedForward::Gated { n_ff: n_ff[layer], activation: Activation::Silu },
            });
        }
        let n_vocab = match metadata.strings("tokenizer.ggml.tokens")? {
            Some(tokens) => tokens.len(),
            None => keys.positive("vocab_size")?,
        };
        keys.check("vocab_size", n_vocab, n_vocab > 0 && n_vocab <= 1 << 28, "the vocabulary must have tokens")?;
        Ok(Self {
            name: metadata.str("general.name")?.map(str::to_owned),
            n_vocab,
            n_ctx_train,
            n_embd,
            norm_eps,
            layers,
            architecture,
        })
    }

    /// Number of layers.
    pub fn n_layer(&self) -> usize {
        self.layers.len()
    }

    /// Elements that one token adds to the KV cache, over all layers, keys and values together.
    pub fn kv_elements_per_token(&self) -> usize {
        self.layers
            .iter()
            .map(|layer| match &layer.mixer {
                Mixer::Attention(a) => 2 * a.n_head_kv * a.head_dim,
            })
            .sum()
    }
}

/// Metadata of one architecture: typed access to `{architecture}.{key}`.
struct Keys<'a> {
    metadata: &'a Metadata,
    architecture: &'a str,
}

impl Keys<'_> {
    fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture)
    }

    fn missing(&self, key: &str) -> ModelError {
        ModelError::MissingKey { key: self.key(key) }
    }

    fn check(&self, key: &str, value: impl Display, ok: bool, why: &str) -> Result<(), ModelError> {
        if ok {
            return Ok(());
        }
        Err(ModelError::InvalidValue { key: self.key(key), value: value.to_string(), why: why.to_owned() })
    }

    fn opt_usize(&self, key: &str) -> Result<Option<usize>, ModelError> {
        Ok(self.metadata.usize(&self.key(key))?)
    }

    fn opt_f32(&self, key: &str) -> Result<Option<f32>, ModelError> {
        Ok(self.metadata.f32(&self.key(key))?)
    }

    fn opt_positive(&self, key: &str) -> Result<Option<usize>, ModelError> {
        let value = self.opt_usize(key)?;
        if let Some(n) = value {
            self.check(key, n, n > 0 && n <= 1 << 28, "must be a plausible size above 0")?;
        }
        Ok(value)
    }

    fn positive(&self, key: &str) -> Result<usize, ModelError> {
        self.opt_positive(key)?.ok_or_else(|| self.missing(key))
    }

    /// A value that is one number for all layers, or an array with one per layer.
    fn per_layer(&self, key: &str, n_layer: usize) -> Result<Option<Vec<usize>>, ModelError> {
        let full = self.key(key);
        let values = match self.metadata.get(&full) {
            None => return Ok(None),
            Some(metal_attention_gguf::Value::Array(_)) => {
                let values = self.metadata.u32s(&full)?.unwrap_or_default();
                self.check(key, values.len(), values.len() == n_layer, "an array needs one value per layer")?;
                values.iter().map(|&v| v as usize).collect()
            }
            Some(_) => vec![self.positive(key)?; n_layer],
        };
        for &n in &values {
            self.check(key, n, n > 0 && n <= 1 << 28, "must be a plausible size above 0")?;
        }
        Ok(Some(values))
    }

    fn rope_scaling(&self, n_ctx_train: usize) -> Result<RopeScaling, ModelError> {
        let kind = self.metadata.str(&self.key("rope.scaling.type"))?;
        let factor = match self.opt_f32("rope.scaling.factor")? {
            Some(factor) => factor,
            None => self.opt_f32("rope.scale_linear")?.unwrap_or(1.0),
        };
        // 0 stands for "not scaled" in files that carry the key without a use for it.
        let factor = if factor == 0.0 { 1.0 } else { factor };
        self.check("rope.scaling.factor", factor, factor.is_finite() && factor > 0.0, "must be above 0")?;
        match kind {
            Some("none") => Ok(RopeScaling::None),
            None | Some("linear") if factor == 1.0 => Ok(RopeScaling::None),
            None | Some("linear") => Ok(RopeScaling::Linear { factor }),
            Some("yarn") => {
                let positive = |key: &str, default: f32| {
                    let value = self.opt_f32(key)?.unwrap_or(default);
                    self.check(key, value, value.is_finite() && value > 0.0, "must be above 0").map(|()| value)
                };
                let ext_factor = self.opt_f32("rope.scaling.yarn_ext_factor")?.unwrap_or(1.0);
                self.check(
                    "rope.scaling.yarn_ext_factor",
                    ext_factor,
                    (0.0..=1.0).contains(&ext_factor),
                    "must be 0 to 1",
                )?;
                Ok(RopeScaling::Yarn {
                    factor,
                    n_ctx_orig: self.opt_positive("rope.scaling.original_context_length")?.unwrap_or(n_ctx_train),
                    beta_fast: positive("rope.scaling.yarn_beta_fast", 32.0)?,
                    beta_slow: positive("rope.scaling.yarn_beta_slow", 1.0)?,
                    ext_factor,
                    attn_factor: positive("rope.scaling.attn_factor", 1.0)?,
                })
            }
            Some(other) => Err(ModelError::UnsupportedFeature {
                key: self.key("rope.scaling.type"),
                value: other.to_owned(),
                why: "supported are none, linear and yarn (and the rope_freqs.weight tensor of Llama 3)",
            }),
        }
    }
}
