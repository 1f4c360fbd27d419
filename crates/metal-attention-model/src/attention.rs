//! Attention: softmax attention with its masks, positions and norms, and latent attention (MLA).

use crate::{NormKind, Rope};

/// Softmax attention with grouped queries (GQA, arXiv 2305.13245). Queries are `[n_head, head_dim]`, keys and values
/// `[n_head_kv, head_dim]` for each token.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionSpec {
    /// Query heads.
    pub n_head: usize,
    /// KV heads; divides `n_head`. Query head `h` reads KV head `h / (n_head / n_head_kv)`.
    pub n_head_kv: usize,
    /// Elements of a query, key or value head.
    pub head_dim: usize,
    /// Factor on the scores before the softmax; `1 / sqrt(head_dim)` in the paper.
    pub scale: f32,
    /// Which positions a token attends to.
    pub mask: Mask,
    /// Positions in the scores.
    pub positions: Positions,
    /// `Some(cap)`: scores become `cap * tanh(score / cap)` (Gemma 2).
    pub soft_cap: Option<f32>,
    /// Whether each head has an attention sink, `attn_sinks`: a score that takes part in the softmax and has no value
    /// (gpt-oss).
    pub sinks: bool,
    /// Norm of queries and keys, if any.
    pub qk_norm: Option<QkNorm>,
    /// Epsilon of an RMSNorm without weight over each value head, if there is one (Gemma 3n and 4).
    pub value_norm: Option<f32>,
    /// Queries, keys and values are clamped to `-clamp..=clamp` (OLMo).
    pub clamp_qkv: Option<f32>,
    /// Source of keys and values.
    pub kv: KvSource,
    /// Factor on queries that grows with their position.
    pub temperature: Option<QueryTemperature>,
    /// Whether Q, K and V must have biases (Qwen 2). If not, they may.
    pub qkv_bias: bool,
    /// Whether the family's files usually have one matrix for Q, K and V, `attn_qkv`. Both forms are read.
    pub fused_qkv: bool,
    /// Gate of the result, if there is one.
    pub gate: Option<AttentionGate>,
}

impl AttentionSpec {
    /// The RoPE of queries and keys; `None` if they are not rotated.
    pub fn rope(&self) -> Option<&Rope> {
        match &self.positions {
            Positions::Rope(rope) => Some(rope),
            Positions::None | Positions::Alibi { .. } => None,
        }
    }

    /// [`rope`](Self::rope), mutable.
    pub fn rope_mut(&mut self) -> Option<&mut Rope> {
        match &mut self.positions {
            Positions::Rope(rope) => Some(rope),
            Positions::None | Positions::Alibi { .. } => None,
        }
    }

    /// Rows of `attn_q` for each head: the query's, and with [`AttentionGate::InQueries`] as many of its gate.
    pub fn query_rows(&self) -> usize {
        match self.gate {
            None | Some(AttentionGate::Tensor { width: _, activation: _ }) => self.head_dim,
            Some(AttentionGate::InQueries) => 2 * self.head_dim,
        }
    }

    /// Rows of `attn_gate`; `None` if the gate has no tensor of its own.
    pub fn gate_rows(&self) -> Option<usize> {
        match self.gate {
            None | Some(AttentionGate::InQueries) => None,
            Some(AttentionGate::Tensor { width: GateWidth::Element, activation: _ }) => {
                Some(self.n_head * self.head_dim)
            }
            Some(AttentionGate::Tensor { width: GateWidth::Head, activation: _ }) => Some(self.n_head),
        }
    }

    /// Whether the layer writes its own keys and values to the KV cache.
    pub fn owns_cache(&self) -> bool {
        match self.kv {
            KvSource::Own | KvSource::KeysAsValues => true,
            KvSource::Layer(_) | KvSource::Target(_) => false,
        }
    }
}

/// A gate of attention's result (arXiv 2505.06708, position G1): the result `o`, `[n_head, head_dim]`, becomes
/// `activation(g) * o` before `attn_output`, where `g` is a product of the input that queries, keys and values are
/// projected from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttentionGate {
    /// `attn_q` produces `g`: after the rows of each head's query come as many of its gate, `[n_head, 2 * head_dim]`. By
    /// element, with the sigmoid (Qwen 3.5).
    InQueries,
    /// `attn_gate`, a matrix of its own, produces `g`.
    Tensor {
        /// What one number of `g` multiplies.
        width: GateWidth,
        /// From `g` to the factor.
        activation: GateActivation,
    },
}

/// What one number of a gate multiplies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GateWidth {
    /// One element of the result; `g` is `[n_head, head_dim]` (Trinity).
    Element,
    /// A head's result; `g` is `[n_head]` (Step 3.5).
    Head,
}

/// From a gate's product to its factor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GateActivation {
    /// `1 / (1 + exp(-g))`.
    Sigmoid,
    /// `ln(1 + exp(g))` (Laguna).
    Softplus,
}

/// The positions of its sequence that a token at position `p` attends to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mask {
    /// `0..=p`.
    Causal,
    /// Sliding window: the last of `0..=p`, this many, itself included.
    Window(usize),
    /// The positions of its chunk up to itself; the sequence is divided into chunks of this many positions (Llama 4).
    Chunk(usize),
    /// All positions.
    Full,
    /// Symmetric window: all positions at most this far away.
    SymmetricWindow(usize),
}

impl Mask {
    /// Whether a token attends to no later position.
    pub fn is_causal(self) -> bool {
        match self {
            Self::Causal | Self::Window(_) | Self::Chunk(_) => true,
            Self::Full | Self::SymmetricWindow(_) => false,
        }
    }

    /// The positions that a token at `pos` attends to in a sequence of `n` tokens.
    pub fn seen(self, pos: usize, n: usize) -> std::ops::Range<usize> {
        match self {
            Self::Causal => 0..pos + 1,
            Self::Window(window) => (pos + 1).saturating_sub(window)..pos + 1,
            Self::Chunk(len) => pos / len * len..pos + 1,
            Self::Full => 0..n,
            Self::SymmetricWindow(distance) => {
                pos.saturating_sub(distance)..n.min(pos.saturating_add(distance).saturating_add(1))
            }
        }
    }
}

/// The way in which positions enter the attention scores.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Positions {
    /// Not at all.
    None,
    /// Queries and keys are rotated.
    Rope(Rope),
    /// Scores decrease linearly with the distance (ALiBi, arXiv 2108.12409).
    Alibi {
        /// Exponent of the slopes: for `n` heads, a power of two, head `h` has the slope `2^(-max_bias (h + 1) / n)`.
        max_bias: f32,
    },
}

/// The slopes of ALiBi (arXiv 2108.12409, appendix), `[n_head]`. They are a geometric series; if `n_head` is not a
/// power of two, the other heads get every second slope of the series with twice as many.
pub fn alibi_slopes(n_head: usize, max_bias: f32) -> Vec<f32> {
    let n_power_of_two = if n_head.is_power_of_two() { n_head } else { n_head.next_power_of_two() / 2 };
    let slope = |h: usize| {
        let exponent = if h < n_power_of_two { (h + 1) as f64 } else { (h - n_power_of_two) as f64 + 0.5 };
        (-f64::from(max_bias) * exponent / n_power_of_two as f64).exp2() as f32
    };
    (0..n_head).map(slope).collect()
}

/// Norm of queries and keys.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QkNorm {
    /// The formula.
    pub kind: NormKind,
    /// Epsilon, added to the mean of squares or the variance.
    pub eps: f32,
    /// The elements that are normalised together.
    pub over: NormOver,
    /// Whether it is applied after the rotation (Hunyuan); otherwise before.
    pub after_rope: bool,
}

/// The elements that a norm of queries or keys covers, and its weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormOver {
    /// Each head, with one weight for all heads, `[head_dim]`.
    Head,
    /// Each head, with a weight for each, `[n_head, head_dim]`.
    EachHead,
    /// Each head, without a weight.
    Unweighted,
    /// All heads together, with a weight `[n_head * head_dim]`.
    Row,
}

/// The source of a layer's keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvSource {
    /// Projections of the layer's input.
    Own,
    /// Keys are projected; values are the projected keys before norm and rotation (Gemma 4).
    KeysAsValues,
    /// The KV cache of this layer, an earlier one (Gemma 3n and 4).
    Layer(usize),
    /// The KV cache of this layer of the target model, in an assistant ([`AssistantEnds`](crate::AssistantEnds)).
    Target(usize),
}

/// A factor on queries at position `p`: `1 + scale * ln(1 + floor((p + offset) / length))`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QueryTemperature {
    /// Growth of the factor.
    pub scale: f32,
    /// Positions over which the factor is constant.
    pub length: usize,
    /// Added to the position.
    pub offset: usize,
}

impl QueryTemperature {
    /// The factor at position `pos`.
    pub fn factor(&self, pos: usize) -> f32 {
        let steps = (pos + self.offset) / self.length;
        (1.0 + f64::from(self.scale) * (1.0 + steps as f64).ln()) as f32
    }
}

/// Multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434, section 2.1), with the expansion to keys absorbed
/// into the query. Only `c = norm(W_kva x)`, `[kv_rank]`, and one rotated key that all heads share, `[shared_dim]`, are
/// cached.
#[derive(Debug, Clone, PartialEq)]
pub struct LatentAttentionSpec {
    /// Query heads.
    pub n_head: usize,
    /// Width to which queries are compressed first; `None`: they are projected directly.
    pub q_rank: Option<usize>,
    /// Width of `c`.
    pub kv_rank: usize,
    /// Elements of a query or key head that are not rotated.
    pub n_nope: usize,
    /// Elements of a value head.
    pub value_dim: usize,
    /// The other elements of a query head, and the elements of the key that all heads share.
    pub shared_dim: usize,
    /// Rotation of the shared elements; `None` if positions do not enter (Kimi Linear).
    pub rope: Option<Rope>,
    /// Factor on the scores before the softmax.
    pub scale: f32,
    /// Epsilon of the RMSNorm of compressed queries, and of that of `c`.
    pub eps: f32,
    /// Factor on queries that grows with their position.
    pub temperature: Option<QueryTemperature>,
    /// Whether the family's files usually have each head's expansions to keys and to values in one matrix, `attn_kv_b`.
    /// Both forms are read.
    pub fused_expansions: bool,
}

impl LatentAttentionSpec {
    /// Elements of a query head: those that are not rotated, then those that are.
    pub fn head_dim(&self) -> usize {
        self.n_nope + self.shared_dim
    }
}

#[cfg(test)]
mod tests {
    use super::alibi_slopes;

    #[test]
    fn slopes_are_those_of_the_paper() {
        assert_eq!(alibi_slopes(8, 8.0), [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625]);
        // 4 slopes of 2^-2 each, then 2 of the slopes that 8 heads would have: 2^-1, 2^-3.
        assert_eq!(alibi_slopes(6, 8.0), [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]);
    }
}
