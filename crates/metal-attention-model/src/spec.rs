//! A model as data: its embedding, its layers and its output, with all sizes, but without weights.
//!
//! A layer is a mixer (attention or a recurrence), which combines positions, and a feed-forward, which works on each
//! token alone; each has a norm and joins the residual stream. The parts are those of the published models. A file of
//! `architectures/` puts the parts of a model family together. Backends match every part exhaustively, and report by
//! name the parts that they do not support.

use metal_attention_gguf::{GgufFile, Metadata};

use crate::architectures;
use crate::attention::{AttentionSpec, KvSource, LatentAttentionSpec};
use crate::feed_forward::FeedForward;
use crate::metadata_reader::MetadataReader;
use crate::recurrent::{DeltaRuleSpec, Mamba2Spec, MambaSpec, Rwkv6Spec, Rwkv7Spec, ShortConvSpec};
use crate::{ModelError, Rope};

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
    /// From a token to the input of the first layer.
    pub embedding: Embedding,
    /// The layers, first to last.
    pub layers: Vec<LayerSpec>,
    /// From the last layer's state to logits or to an embedding.
    pub output: OutputSpec,
}

/// The input of the first layer for token `id` at position `pos`:
/// `norm(scale * table[id] + types[0] + positions[pos])`, `[n_embd]`.
#[derive(Debug, Clone, PartialEq)]
pub struct Embedding {
    /// Factor on the row of the embedding table.
    pub scale: f32,
    /// Rows of the table of token types (BERT's sentences A and B). Every token gets row 0. `None`: no table.
    pub token_types: Option<usize>,
    /// Rows of the table of learned positions. `None`: no table.
    pub positions: Option<usize>,
    /// Norm of the sum, if any.
    pub norm: Option<Norm>,
    /// An additional small embedding for each layer (Gemma 3n and 4).
    pub per_layer: Option<PerLayerEmbedding>,
    /// Several residual streams side by side (Gemma 3n).
    pub streams: Option<Streams>,
}

/// An additional embedding of the token for each layer, of `width` elements (Gemma 3n, Gemma 4).
///
/// The input of layer `i` is elements `i * width..(i + 1) * width` of
/// `(norm(n_embd^-1/2 W x) + width^1/2 table[id]) / 2^1/2`, where `x` is the token's embedding. After the layer,
/// `x += norm(proj(gelu(gate(x)) * input))`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PerLayerEmbedding {
    /// Elements of one layer's input.
    pub width: usize,
    /// Norm of the projected embedding, over each layer's elements.
    pub proj_norm: Norm,
    /// Norm of the product that is added to `x`.
    pub post_norm: Norm,
}

/// Alternating updates (AltUp, arXiv 2301.13310) with learned augmented residuals (LAuReL, arXiv 2411.07501), as in
/// Gemma 3n: each layer computes with one of several residual streams, predicts the others from it and corrects them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Streams {
    /// Number of streams.
    pub n: usize,
    /// Index of the stream that layers compute with.
    pub active: usize,
    /// Rank of LAuReL's matrices.
    pub laurel_rank: usize,
    /// Norm of the router's input.
    pub router_norm: Norm,
    /// Norm of LAuReL's result.
    pub laurel_norm: Norm,
}

/// A normalisation over rows.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Norm {
    /// Name of its tensor in the file without `.weight`; in a layer, after `blk.N.`.
    pub tensor: &'static str,
    /// Whether it has a weight; if not, the weight is all ones.
    pub weight: bool,
    /// Whether it has a bias.
    pub bias: bool,
    /// The formula.
    pub kind: NormKind,
    /// Epsilon, added to the mean of squares or the variance.
    pub eps: f32,
    /// Whether files name the weight without the suffix `.weight` (Falcon-H1).
    pub bare: bool,
}

impl Norm {
    /// This norm with a weight that files name without `.weight`.
    pub(crate) fn bare(self) -> Self {
        Self { bare: true, ..self }
    }

    /// The RMSNorm with this norm's epsilon and tensor.
    pub(crate) fn rms(self) -> Self {
        Self { kind: NormKind::Rms, bias: false, ..self }
    }

    /// This norm with another tensor.
    pub(crate) fn named(self, tensor: &'static str) -> Self {
        Self { tensor, ..self }
    }
}

/// The formula of a norm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormKind {
    /// `x / sqrt(mean(x^2) + eps) * weight` (arXiv 1910.07467).
    Rms,
    /// `(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias` (arXiv 1607.06450); the bias may be missing.
    Layer,
}

/// One layer: a mixer and a feed-forward, which join the residual stream as [`Residual`] says.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerSpec {
    /// Norm of the mixer's input. `None`: the mixer reads the residual stream itself.
    pub mixer_norm: Option<Norm>,
    /// The part that combines positions.
    pub mixer: Mixer,
    /// Norm of the mixer's result before it is added to the stream, if any.
    pub mixer_post_norm: Option<Norm>,
    /// Norm of the feed-forward's input. `None`: see [`Residual`].
    pub feed_forward_norm: Option<Norm>,
    /// The part that works on each token alone.
    pub feed_forward: FeedForward,
    /// Norm of the feed-forward's result before it is added to the stream, if any.
    pub feed_forward_post_norm: Option<Norm>,
    /// The way in which both join the residual stream.
    pub residual: Residual,
    /// Factor on the residual stream after the layer.
    pub output_scale: OutputScale,
}

/// A factor on the residual stream after a layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum OutputScale {
    /// This number. 1, or (RWKV-6) one half after every few layers, whose weights were divided by as much to keep F16
    /// in range.
    Fixed(f32),
    /// The number in the file's tensor `layer_output_scale`; 1 if the file has none (Gemma 4).
    Stored,
}

/// The way in which mixer and feed-forward join the residual stream `x`.
///
/// In the formulas, `m(x) = mixer_post_norm(mixer(mixer_norm(x)))` and `f(x) =
/// feed_forward_post_norm(feed_forward(feed_forward_norm(x)))`, where a missing norm is the identity. `Sequential` and
/// `Parallel` occur with and without these norms. `PostNorm` has its own norms, and none of these four.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Residual {
    /// `x += scale m(x); x += scale f(x)`.
    Sequential {
        /// Factor on both results.
        scale: f32,
    },
    /// `x += m(x) + f(x)`, both from the same `x`. Without a `feed_forward_norm`, the feed-forward's input is
    /// `mixer_norm(x)`.
    Parallel,
    /// `x = mixer(x + m(x)); x = feed_forward(x + f(x))`, where `mixer` and `feed_forward` are the norms below, over
    /// the sums (BERT).
    PostNorm {
        /// Norm after the mixer.
        mixer: Norm,
        /// Norm after the feed-forward.
        feed_forward: Norm,
    },
}

/// The part of a layer that combines positions.
#[derive(Debug, Clone, PartialEq)]
pub enum Mixer {
    /// Softmax attention with a KV cache.
    Attention(AttentionSpec),
    /// Latent attention: keys and values are compressed to one row for each token (DeepSeek's MLA).
    LatentAttention(LatentAttentionSpec),
    /// A gated short convolution, with a recurrent state (LFM2).
    ShortConv(ShortConvSpec),
    /// A selective state space (Mamba).
    Mamba(MambaSpec),
    /// A selective state space with one decay for each head (Mamba-2).
    Mamba2(Mamba2Spec),
    /// Attention and Mamba-2 over the same input; their results are added (Falcon-H1).
    AttentionAndMamba2(Box<AttentionAndMamba2Spec>),
    /// The gated delta rule (Qwen 3.5).
    DeltaRule(DeltaRuleSpec),
    /// The time mix of RWKV-6.
    Rwkv6(Rwkv6Spec),
    /// The time mix of RWKV-7.
    Rwkv7(Rwkv7Spec),
    /// No mixer: the layer has only a feed-forward (Nemotron-H).
    None,
}

/// Attention and Mamba-2 over the same input.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionAndMamba2Spec {
    /// The attention.
    pub attention: AttentionSpec,
    /// The state space.
    pub mamba2: Mamba2Spec,
}

/// From the last layer's state to logits or to an embedding.
#[derive(Debug, Clone, PartialEq)]
pub struct OutputSpec {
    /// Norm of the last layer's state.
    pub norm: Option<Norm>,
    /// The output head; `None` for encoders, which have no logits.
    pub head: Option<OutputHead>,
    /// Pooling of a sequence's states into its embedding. `None`: the file does not say.
    pub pooling: Option<Pooling>,
    /// The matrices that the pooled state goes through, in order, with nothing in between (EmbeddingGemma).
    pub dense: Vec<DenseOutput>,
    /// The classifier of rerankers, in the tensors `cls` and `cls.output`, if there is one.
    pub classifier: Option<Classifier>,
}

/// The output head: logits `cap * tanh(scale * (W x + b) / cap)`, `[n_vocab]`; without a cap, `scale * (W x + b)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OutputHead {
    /// Factor on the products.
    pub scale: f32,
    /// The cap, if there is one.
    pub soft_cap: Option<f32>,
    /// Whether `W` is the embedding table.
    ///
    /// `Some(true)`: always; an output tensor in the file is not read. `Some(false)`: files of the family have the
    /// tensor `output.weight`. `None`: they may have it. A file without it uses the embedding table in either case;
    /// only writers of files distinguish the two.
    pub tied: Option<bool>,
    /// Whether files may have a bias for `W`; if not, none is read.
    pub bias: bool,
}

/// A matrix that the pooled state goes through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DenseOutput {
    /// Name of its tensor without `.weight`.
    pub tensor: &'static str,
    /// Elements of its result.
    pub n_out: usize,
}

/// A classifier over the pooled state: `cls.output(norm(activation(cls(x))))`. A file may lack each part, which is then
/// the identity.
#[derive(Debug, Clone, PartialEq)]
pub struct Classifier {
    /// Names of its results; empty for a reranker with one unnamed score.
    pub labels: Vec<String>,
    /// Pooling of its input.
    pub pooling: Pooling,
    /// Whether the activation is GELU (ModernBERT); otherwise tanh.
    pub gelu: bool,
    /// Epsilon of the layer norm.
    pub norm_eps: f32,
    /// Whether softmax is applied to the results (Qwen 3).
    pub softmax: bool,
}

/// The pooling of the hidden states of a sequence's tokens into one state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pooling {
    /// The mean of all.
    Mean,
    /// The first token's.
    First,
    /// The last token's.
    Last,
    /// The scores of the [`Classifier`], which names its own pooling.
    Rank,
}

impl ModelSpec {
    /// Reads the spec of a file's model.
    ///
    /// Keys are those of the GGUF specification, `{architecture}.{key}`. A key that is missing, has the wrong type or
    /// contradicts another is an error that names it.
    pub fn from_gguf(file: &GgufFile) -> Result<Self, ModelError> {
        architectures::read(&MetadataReader::new(file.metadata(), Some(file))?)
    }

    /// Reads the spec from metadata alone. In some families the presence of a tensor decides about a part; here the
    /// tensors are assumed to be those that the family's files usually have.
    pub fn from_metadata(metadata: &Metadata) -> Result<Self, ModelError> {
        architectures::read(&MetadataReader::new(metadata, None)?)
    }

    /// Number of layers.
    pub fn n_layer(&self) -> usize {
        self.layers.len()
    }

    /// Whether no layer lets a token attend to later ones, so that a sequence can be evaluated in chunks.
    pub fn is_causal(&self) -> bool {
        // Latent attention and recurrences are always causal.
        self.layers.iter().all(|layer| layer.mixer.attention().is_none_or(|a| a.mask.is_causal()))
    }

    /// Whether the model can generate text: it has an output head and is causal.
    pub fn writes_text(&self) -> bool {
        self.output.head.is_some() && self.is_causal()
    }

    /// Elements that one token adds to the KV cache: keys and values of all layers.
    pub fn kv_elements_per_token(&self) -> usize {
        self.layers
            .iter()
            .filter_map(|layer| layer.mixer.kv_shape())
            .map(|c| c.n_head_kv * (c.key_dim + c.value_dim))
            .sum()
    }
}

/// The keys and values that a layer caches for each token: `n_head_kv * (key_dim + value_dim)` elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvShape {
    /// KV heads.
    pub n_head_kv: usize,
    /// Elements of a key head.
    pub key_dim: usize,
    /// Elements of a value head.
    pub value_dim: usize,
}

impl Mixer {
    /// The softmax attention in this mixer, alone or beside a recurrence; `None` if it has none.
    pub fn attention(&self) -> Option<&AttentionSpec> {
        match self {
            Self::Attention(a) => Some(a),
            Self::AttentionAndMamba2(both) => Some(&both.attention),
            Self::LatentAttention(_)
            | Self::ShortConv(_)
            | Self::Mamba(_)
            | Self::Mamba2(_)
            | Self::DeltaRule(_)
            | Self::Rwkv6(_)
            | Self::Rwkv7(_)
            | Self::None => None,
        }
    }

    /// The latent attention; `None` if it is another mixer.
    pub fn latent_attention(&self) -> Option<&LatentAttentionSpec> {
        match self {
            Self::LatentAttention(a) => Some(a),
            Self::Attention(_)
            | Self::AttentionAndMamba2(_)
            | Self::ShortConv(_)
            | Self::Mamba(_)
            | Self::Mamba2(_)
            | Self::DeltaRule(_)
            | Self::Rwkv6(_)
            | Self::Rwkv7(_)
            | Self::None => None,
        }
    }

    /// The RoPE of queries and keys; `None` if they are not rotated.
    pub fn rope(&self) -> Option<&Rope> {
        match (self.attention(), self.latent_attention()) {
            (Some(a), _) => a.rope(),
            (None, Some(a)) => a.rope.as_ref(),
            (None, None) => None,
        }
    }

    /// The layer whose KV cache the mixer of layer `i` reads: `i` or an earlier one. `None` if it reads none.
    pub fn cache_of(&self, i: usize) -> Option<usize> {
        match (self.attention(), self.latent_attention()) {
            (Some(a), _) => match a.kv {
                KvSource::Own | KvSource::KeysAsValues => Some(i),
                KvSource::Layer(layer) => Some(layer),
            },
            (None, Some(_)) => Some(i),
            (None, None) => None,
        }
    }

    /// The keys and values that the layer caches for each token. `None` if it reads another layer's cache, or has no
    /// attention.
    ///
    /// Latent attention has one KV head. Its key is the compressed row (`kv_rank`) followed by the shared rotated key
    /// (`shared_dim`). Its value is the compressed row again: that is stored twice, as the layouts of keys and values
    /// differ.
    pub fn kv_shape(&self) -> Option<KvShape> {
        match (self.attention(), self.latent_attention()) {
            (Some(a), _) => {
                a.owns_cache().then_some(KvShape { n_head_kv: a.n_head_kv, key_dim: a.head_dim, value_dim: a.head_dim })
            }
            (None, Some(a)) => Some(KvShape { n_head_kv: 1, key_dim: a.kv_rank + a.shared_dim, value_dim: a.kv_rank }),
            (None, None) => None,
        }
    }

    /// F32 elements of the recurrent state of one sequence, independent of its length; 0 if the mixer has none.
    pub fn state_elements(&self) -> usize {
        match self {
            Self::Attention(_) | Self::LatentAttention(_) | Self::None => 0,
            Self::ShortConv(conv) => conv.state_elements(),
            Self::Mamba(mamba) => mamba.state_elements(),
            Self::Mamba2(mamba) => mamba.state_elements(),
            Self::AttentionAndMamba2(both) => both.mamba2.state_elements(),
            Self::DeltaRule(rule) => rule.state_elements(),
            Self::Rwkv6(mix) => mix.state_elements(),
            Self::Rwkv7(mix) => mix.state_elements(),
        }
    }
}

impl LayerSpec {
    /// F32 elements of the layer's recurrent state of one sequence: the mixer's, followed by the feed-forward's.
    pub fn state_elements(&self) -> usize {
        self.mixer.state_elements().saturating_add(self.feed_forward.state_elements())
    }
}
