//! The parts of attention.

use crate::{NormKind, Rope};

/// Softmax attention with grouped queries (GQA, arXiv 2305.13245).
#[derive(Debug, Clone, PartialEq)]
#[expect(clippy::struct_excessive_bools, reason = "each is an option of its own")]
pub struct AttentionSpec {
    /// Query heads.
    pub n_head: usize,
    /// Key and value heads; divides `n_head`. Query head `h` reads KV head `h / (n_head / n_head_kv)`.
    pub n_head_kv: usize,
    /// Elements of a query, key or value head.
    pub head_dim: usize,
    /// Factor on the scores before the softmax, `1 / sqrt(head_dim)` in the paper.
    pub scale: f32,
    /// Which tokens see which.
    pub mask: Mask,
    /// How positions enter.
    pub positions: Positions,
    /// Scores become `cap * tanh(score / cap)` (Gemma 2).
    pub soft_cap: Option<f32>,
    /// Whether each head has a score of its own, `attn_sinks`, which takes part in the softmax and has no value (gpt-oss).
    pub sinks: bool,
    /// Norm of queries and keys.
    pub qk_norm: Option<QkNorm>,
    /// Epsilon of an RMSNorm without weight over each value head (Gemma 3n and 4).
    pub value_norm: Option<f32>,
    /// Queries, keys and values are cut to `-clamp..=clamp` (OLMo).
    pub clamp_qkv: Option<f32>,
    /// Where keys and values come from.
    pub kv: KvSource,
    /// Queries grow with their position.
    pub temperature: Option<QueryTemperature>,
    /// Whether the file must have biases on Q, K and V (Qwen 2); others may have them.
    pub qkv_bias: bool,
    /// Whether files of the family have one matrix for Q, K and V, `attn_qkv`. Either form is read.
    pub fused_qkv: bool,
    /// Whether `attn_q` gives each head a gate after its query, `[n_head, 2 * head_dim]`, whose sigmoid multiplies the
    /// head's result (Qwen 3.5).
    pub output_gate: bool,
}

impl AttentionSpec {
    /// The rotation of queries and keys, where there is one.
    pub fn rope(&self) -> Option<&Rope> {
        match &self.positions {
            Positions::Rope(rope) => Some(rope),
            Positions::None | Positions::Alibi { .. } => None,
        }
    }

    /// The same, to be changed.
    pub fn rope_mut(&mut self) -> Option<&mut Rope> {
        match &mut self.positions {
            Positions::Rope(rope) => Some(rope),
            Positions::None | Positions::Alibi { .. } => None,
        }
    }

    /// Whether it has keys and values of its own.
    pub fn owns_cache(&self) -> bool {
        match self.kv {
            KvSource::Own | KvSource::KeysAsValues => true,
            KvSource::Layer(_) => false,
        }
    }
}

/// Which tokens a token at position `p` sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mask {
    /// `0..=p`.
    Causal,
    /// The last of these, so many.
    Window(usize),
    /// Those of its chunk of so many positions, up to itself (Llama 4).
    Chunk(usize),
    /// All of its text.
    Full,
    /// Those of its text that are at most so far away.
    SymmetricWindow(usize),
}

impl Mask {
    /// Whether a token sees none after it.
    pub fn is_causal(self) -> bool {
        match self {
            Self::Causal | Self::Window(_) | Self::Chunk(_) => true,
            Self::Full | Self::SymmetricWindow(_) => false,
        }
    }

    /// Positions that a token at `pos` sees of a text of `n` tokens.
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

/// How positions enter into attention.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Positions {
    /// Not at all.
    None,
    /// Queries and keys are rotated.
    Rope(Rope),
    /// Scores fall with the distance (ALiBi, arXiv 2108.12409).
    Alibi {
        /// Exponent of the slopes: head `h` of `n`, a power of two, falls by `2^(-max_bias (h + 1) / n)`.
        max_bias: f32,
    },
}

/// The slopes of ALiBi (arXiv 2108.12409, appendix), `[n_head]`: a geometric series, of which every second of a finer one goes
/// between where `n_head` is no power of two.
pub fn alibi_slopes(n_head: usize, max_bias: f32) -> Vec<f32> {
    let whole = if n_head.is_power_of_two() { n_head } else { n_head.next_power_of_two() / 2 };
    let slope = |h: usize| {
        let exponent = if h < whole { (h + 1) as f64 } else { (h - whole) as f64 + 0.5 };
        (-f64::from(max_bias) * exponent / whole as f64).exp2() as f32
    };
    (0..n_head).map(slope).collect()
}

/// Norm of queries and keys.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QkNorm {
    /// What is computed.
    pub kind: NormKind,
    /// Added to the mean of squares.
    pub eps: f32,
    /// Over what.
    pub over: NormOver,
    /// Whether it comes after the rotation (Hunyuan).
    pub after_rope: bool,
}

/// What a norm of queries or keys goes over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormOver {
    /// Each head, with a weight for all, `[head_dim]`.
    Head,
    /// Each head, with weights of its own, `[n_head, head_dim]`.
    EachHead,
    /// Each head, without a weight.
    Unweighted,
    /// All heads together, `[n_head * head_dim]`.
    Row,
}

/// Where keys and values come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvSource {
    /// Projections of their own.
    Own,
    /// Values are the projected keys before norm and rotation (Gemma 4).
    KeysAsValues,
    /// The cache of that layer, an earlier one (Gemma 3n and 4).
    Layer(usize),
}

/// Queries at position `p` are multiplied by `1 + scale * ln(1 + floor((p + offset) / length))`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QueryTemperature {
    /// Growth.
    pub scale: f32,
    /// Positions of a step.
    pub length: usize,
    /// Added to positions.
    pub offset: usize,
}

impl QueryTemperature {
    /// The factor at position `pos`.
    pub fn factor(&self, pos: usize) -> f32 {
        let steps = (pos + self.offset) / self.length;
        (1.0 + f64::from(self.scale) * (1.0 + steps as f64).ln()) as f32
    }
}

/// Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), with the key's expansion taken into the
/// query: `c = norm(W_kva x)` is all that is cached, beside one rotated key for all heads.
#[derive(Debug, Clone, PartialEq)]
pub struct LatentAttentionSpec {
    /// Query heads.
    pub n_head: usize,
    /// Width that queries are compressed to on the way; `None`: they are projected at once.
    pub q_rank: Option<usize>,
    /// Width of `c`.
    pub kv_rank: usize,
    /// Elements of a query or key head that are not rotated.
    pub n_nope: usize,
    /// Elements of a value head.
    pub value_dim: usize,
    /// The other elements of a query head, and as many of the key that all heads share.
    pub shared_dim: usize,
    /// Rotation of these; none where positions do not enter (Kimi Linear).
    pub rope: Option<Rope>,
    /// Factor on the scores before the softmax.
    pub scale: f32,
    /// Epsilon of the RMSNorm of compressed queries, and of that of `c`.
    pub eps: f32,
    /// Queries grow with their position.
    pub temperature: Option<QueryTemperature>,
    /// Whether files of the family have each head's expansions to keys and to values in one matrix, `attn_kv_b`. Either form
    /// is read.
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
        // 4 slopes of 2^-2 and, between them, 2 of the 8 that 8 heads would have: 2^-1, 2^-3.
        assert_eq!(alibi_slopes(6, 8.0), [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]);
    }
}
