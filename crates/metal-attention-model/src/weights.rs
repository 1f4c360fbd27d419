//! A model's weights by role: handles into the mapped file, checked against the
//! [`ModelSpec`].

use std::collections::HashMap;

use metal_attention_gguf::{GgufFile, Tensor};

use crate::{Mixer, ModelError, ModelSpec};

/// The tensor that divides the RoPE frequencies.
pub(crate) const ROPE_FREQS: &str = "rope_freqs.weight";

/// `y = W x + b`.
#[derive(Debug, Clone)]
pub struct Linear {
    /// `W`, `[n_out, n_in]` row-major (GGUF shape `[n_in, n_out]`).
    pub weight: Tensor,
    /// `b`, `[n_out]`.
    pub bias: Option<Vec<f32>>,
}

/// Weights of a whole model.
#[derive(Debug, Clone)]
pub struct Weights {
    /// Embedding table, `[n_vocab, n_embd]`.
    pub token_embd: Tensor,
    /// RMSNorm before the output head, `[n_embd]`.
    pub output_norm: Vec<f32>,
    /// Output head, `[n_vocab, n_embd]`; the embedding table itself when tied.
    pub output: Tensor,
    /// Divisors of the RoPE frequencies, `[n_rot / 2]` (Llama 3.1 and later).
    pub rope_freqs: Option<Vec<f32>>,
    /// The layers, first to last.
    pub layers: Vec<LayerWeights>,
}

/// Weights of one layer.
#[derive(Debug, Clone)]
pub struct LayerWeights {
    /// RMSNorm before the mixer, `[n_embd]`.
    pub mixer_norm: Vec<f32>,
    /// Weights of the mixer.
    pub attention: AttentionWeights,
    /// RMSNorm before the feed-forward, `[n_embd]`.
    pub feed_forward_norm: Vec<f32>,
    /// Weights of the feed-forward.
    pub feed_forward: FeedForwardWeights,
}

/// Weights of an attention mixer.
#[derive(Debug, Clone)]
pub struct AttentionWeights {
    /// Queries, `[n_head * head_dim, n_embd]`.
    pub q: Linear,
    /// Keys, `[n_head_kv * head_dim, n_embd]`.
    pub k: Linear,
    /// Values, `[n_head_kv * head_dim, n_embd]`.
    pub v: Linear,
    /// Output, `[n_embd, n_head * head_dim]`.
    pub out: Linear,
    /// RMSNorm of each query head, `[head_dim]`.
    pub q_norm: Option<Vec<f32>>,
    /// RMSNorm of each key head, `[head_dim]`.
    pub k_norm: Option<Vec<f32>>,
}

/// Weights of a gated feed-forward.
#[derive(Debug, Clone)]
pub struct FeedForwardWeights {
    /// Gate, `[n_ff, n_embd]`.
    pub gate: Linear,
    /// Up, `[n_ff, n_embd]`.
    pub up: Linear,
    /// Down, `[n_embd, n_ff]`.
    pub down: Linear,
}

impl Weights {
    /// Finds every tensor of `spec` in `file` and checks its shape. Matrices
    /// stay where they are in the file; vectors are copied to F32.
    pub fn load(file: &GgufFile, spec: &ModelSpec) -> Result<Self, ModelError> {
        let mut found = HashMap::new();
        for wanted in spec.tensors() {
            match file.tensor(&wanted.name) {
                Some(tensor) if tensor.shape() == wanted.shape => {
                    found.insert(wanted.name, tensor.clone());
                }
                Some(tensor) => {
                    return Err(ModelError::TensorShape {
                        name: wanted.name,
                        found: tensor.shape().to_vec(),
                        expected: wanted.shape,
                    });
                }
                None if wanted.required => {
                    return Err(ModelError::MissingTensor { name: wanted.name, shape: wanted.shape });
                }
                None => {}
            }
        }
        for name in found.keys() {
            check_scale(file, name)?;
        }
        // Required tensors are all there: `tensors()` listed them above.
        let matrix = |name: &str| found[name].clone();
        let opt_vector = |name: &str| found.get(name).map(Tensor::to_f32);
        let vector = |name: &str| found[name].to_f32();
        let linear = |name: String| Linear {
            weight: matrix(&format!("{name}.weight")),
            bias: opt_vector(&format!("{name}.bias")),
        };
        let layers = (0..spec.n_layer())
            .map(|i| {
                let role = |role: &str| format!("blk.{i}.{role}");
                LayerWeights {
                    mixer_norm: vector(&role("attn_norm.weight")),
                    attention: AttentionWeights {
                        q: linear(role("attn_q")),
                        k: linear(role("attn_k")),
                        v: linear(role("attn_v")),
                        out: linear(role("attn_output")),
                        q_norm: opt_vector(&role("attn_q_norm.weight")),
                        k_norm: opt_vector(&role("attn_k_norm.weight")),
                    },
                    feed_forward_norm: vector(&role("ffn_norm.weight")),
                    feed_forward: FeedForwardWeights {
                        gate: linear(role("ffn_gate")),
                        up: linear(role("ffn_up")),
                        down: linear(role("ffn_down")),
                    },
                }
            })
            .collect();
        let token_embd = matrix("token_embd.weight");
        let rope_freqs = opt_vector(ROPE_FREQS);
        if let Some(divisors) = &rope_freqs {
            check_rope_freqs(divisors, spec)?;
        }
        Ok(Self {
            output: found.get("output.weight").unwrap_or(&token_embd).clone(),
            token_embd,
            output_norm: vector("output_norm.weight"),
            rope_freqs,
            layers,
        })
    }
}

/// Refuses a factor of the whole matrix `name`, as files in `NVFP4` have them beside their matrices, where it is not 1.
fn check_scale(file: &GgufFile, name: &str) -> Result<(), ModelError> {
    let scale = name.strip_suffix(".weight").and_then(|name| file.tensor(&format!("{name}.scale")));
    let other = scale.and_then(|scale| Some((scale, scale.to_f32().into_iter().find(|x| *x != 1.0)?)));
    match other {
        None => Ok(()),
        Some((scale, value)) => Err(ModelError::TensorValue {
            name: scale.name().to_owned(),
            value,
            why: "factors of whole matrices are not applied yet: use a file without them, in Q4_K_M for instance",
        }),
    }
}

/// Refuses divisors of the RoPE frequencies that do not fit every layer, or that no frequency can be divided by.
fn check_rope_freqs(divisors: &[f32], spec: &ModelSpec) -> Result<(), ModelError> {
    for layer in &spec.layers {
        let Mixer::Attention(a) = &layer.mixer;
        if a.rope.n_rot / 2 != divisors.len() {
            return Err(ModelError::TensorShape {
                name: ROPE_FREQS.into(),
                found: vec![divisors.len()],
                expected: vec![a.rope.n_rot / 2],
            });
        }
    }
    match divisors.iter().find(|d| !(d.is_finite() && **d > 0.0)) {
        None => Ok(()),
        Some(divisor) => Err(ModelError::TensorValue {
            name: ROPE_FREQS.into(),
            value: *divisor,
            why: "frequencies are divided by it: it must be above 0",
        }),
    }
}
