//! A model as data: what it is made of, layer by layer.
//!
//! The vocabulary of parts is that of the published models; each family puts them together in a file of
//! `architectures/`. Backends match every part exhaustively and say which they lack.

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
    /// What a token becomes before the first layer.
    pub embedding: Embedding,
    /// The layers, first to last.
    pub layers: Vec<LayerSpec>,
    /// What comes of the last layer's state.
    pub output: Output,
}

/// What a token becomes before the first layer: `norm(scale * table[id] + types[0] + positions[pos])`.
#[derive(Debug, Clone, PartialEq)]
pub struct Embedding {
    /// Factor on the row of the table.
    pub scale: f32,
    /// Rows of the table of token types (BERT's sentences A and B), of which every token gets the first.
    pub token_types: Option<usize>,
    /// Rows of the table of learned positions.
    pub positions: Option<usize>,
    /// Norm of the sum.
    pub norm: Option<Norm>,
    /// A small embedding of the token for each layer (Gemma 3n and 4).
    pub per_layer: Option<PerLayerEmbedding>,
    /// Several residual streams side by side (Gemma 3n).
    pub streams: Option<Streams>,
}

/// Embeddings that a layer adds to its result (Gemma 3n, Gemma 4).
///
/// The input of layer `i` is `(norm(n_embd^-1/2 W x) + n_embd_per_layer^1/2 table[id]) / 2^1/2`, elements
/// `i * n_embd_per_layer..`, of the token's embedding `x`. After the layer
/// `x += norm(proj(gelu(gate(x)) * input))`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PerLayerEmbedding {
    /// Elements of a layer's input.
    pub width: usize,
    /// Norm of each layer's part of the projected embedding.
    pub proj_norm: Norm,
    /// Norm of what a layer adds.
    pub post_norm: Norm,
}

/// Alternating updates (AltUp, arXiv 2301.13310) with learned augmented residuals (LAuReL, arXiv 2411.07501), as Gemma 3n
/// has them: each layer computes with one of several residual streams, predicts the others from it and corrects them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Streams {
    /// Streams.
    pub n: usize,
    /// The one that layers compute with.
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
    /// Tensor of its weight, after `blk.N.` where it belongs to a layer, without `.weight`.
    pub tensor: &'static str,
    /// Whether it has a weight.
    pub weight: bool,
    /// Whether it has a bias.
    pub bias: bool,
    /// What is computed.
    pub kind: NormKind,
    /// Added to the mean of squares.
    pub eps: f32,
    /// Whether files name the weight as `tensor` alone (Falcon-H1).
    pub bare: bool,
}

impl Norm {
    /// The same norm where files name its weight without `.weight`.
    pub(crate) fn bare(self) -> Self {
        Self { bare: true, ..self }
    }

    /// The RMSNorm with that epsilon.
    pub(crate) fn rms(self) -> Self {
        Self { kind: NormKind::Rms, bias: false, ..self }
    }

    /// The same norm with another tensor.
    pub(crate) fn named(self, tensor: &'static str) -> Self {
        Self { tensor, ..self }
    }
}

/// What a norm computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormKind {
    /// `x / sqrt(mean(x^2) + eps) * weight` (arXiv 1910.07467).
    Rms,
    /// `(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias` (arXiv 1607.06450); the bias may be missing.
    Layer,
}

/// One layer: a mixer and a feed-forward, each with its norms, joined as [`Residual`] says.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerSpec {
    /// Norm of the mixer's input.
    pub mixer_norm: Option<Norm>,
    /// What moves information between tokens.
    pub mixer: Mixer,
    /// Norm of the mixer's result.
    pub mixer_post_norm: Option<Norm>,
    /// Norm of the feed-forward's input.
    pub feed_forward_norm: Option<Norm>,
    /// What works on each token alone.
    pub feed_forward: FeedForward,
    /// Norm of the feed-forward's result.
    pub feed_forward_post_norm: Option<Norm>,
    /// How both join the residual stream.
    pub residual: Residual,
    /// Factor on the layer's result.
    pub output_scale: OutputScale,
}

/// A factor on a layer's result.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum OutputScale {
    /// This one: 1, or a half after every so many layers, where the weights were divided by as much to keep F16 in range
    /// (RWKV-6).
    Fixed(f32),
    /// The number in the file's tensor `layer_output_scale`, where it has it (Gemma 4).
    Stored,
}

/// How mixer and feed-forward join the residual stream `x`. `m` and `f` stand for them with the norms of their input and
/// result.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Residual {
    /// `x += scale m(x); x += scale f(x)`.
    Sequential {
        /// Factor on what is added.
        scale: f32,
    },
    /// `x += m(x) + f(x)`; where the feed-forward has no norm of its own it takes the mixer's input.
    Parallel,
    /// `x = mixer(x + m(x)); x = feed_forward(x + f(x))`, norms of the sums (BERT).
    PostNorm {
        /// Norm after the mixer.
        mixer: Norm,
        /// Norm after the feed-forward.
        feed_forward: Norm,
    },
}

/// What moves information between tokens.
#[derive(Debug, Clone, PartialEq)]
pub enum Mixer {
    /// Softmax attention over the KV cache.
    Attention(AttentionSpec),
    /// Attention whose keys and values are compressed to one row a token (DeepSeek).
    LatentAttention(LatentAttentionSpec),
    /// A gated short convolution, with a recurrent state (LFM2).
    ShortConv(ShortConvSpec),
    /// A selective state space (Mamba).
    Mamba(MambaSpec),
    /// A selective state space with one decay a head (Mamba-2).
    Mamba2(Mamba2Spec),
    /// Attention and Mamba-2 side by side over the same input; their results are added (Falcon-H1).
    AttentionAndMamba2(Box<AttentionAndMamba2Spec>),
    /// The gated delta rule (Qwen 3.5).
    DeltaRule(DeltaRuleSpec),
    /// The time mix of RWKV-6.
    Rwkv6(Rwkv6Spec),
    /// The time mix of RWKV-7.
    Rwkv7(Rwkv7Spec),
    /// Nothing: the layer has a feed-forward alone (Nemotron-H).
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

/// What comes of the last layer's state.
#[derive(Debug, Clone, PartialEq)]
pub struct Output {
    /// Norm of the state.
    pub norm: Option<Norm>,
    /// The logits; `None` for encoders that have none.
    pub head: Option<OutputHead>,
    /// How the states of a text become its embedding, where the file says it.
    pub pooling: Option<Pooling>,
    /// Outputs of the matrices that the pooled state goes through, in order, without anything in between (EmbeddingGemma).
    pub dense: Vec<DenseOutput>,
    /// Whether a classifier's matrices are to be expected: `cls` and `cls.output` (rerankers).
    pub classifier: Option<Classifier>,
}

/// Logits: `cap * tanh(scale * (W x + b) / cap)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OutputHead {
    /// Factor on the products.
    pub scale: f32,
    /// The cap, where there is one.
    pub soft_cap: Option<f32>,
    /// Whether files have a matrix for it beside the embedding table: `None` where they may.
    pub tied: Option<bool>,
    /// Whether the matrix may have a bias.
    pub bias: bool,
}

/// A matrix that a pooled state goes through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DenseOutput {
    /// Name of the tensor without `.weight`.
    pub tensor: &'static str,
    /// Width of its result.
    pub n_out: usize,
}

/// A classifier over the pooled state: `cls.output(norm(activation(cls(x))))`, of which each part may be missing.
#[derive(Debug, Clone, PartialEq)]
pub struct Classifier {
    /// What its results stand for; a reranker's is one, without a name.
    pub labels: Vec<String>,
    /// How the state it works on comes about.
    pub pooling: Pooling,
    /// Whether the activation is GELU, in place of tanh (ModernBERT).
    pub gelu: bool,
    /// Epsilon of the Layer norm.
    pub norm_eps: f32,
    /// Whether softmax goes over the results (Qwen 3).
    pub softmax: bool,
}

/// How the states of a text's tokens become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pooling {
    /// Their mean.
    Mean,
    /// That of the first token.
    First,
    /// That of the last token.
    Last,
    /// What the [`Classifier`] makes of a pooled state: scores.
    Rank,
}

impl ModelSpec {
    /// Reads what the model of `file` is made of.
    ///
    /// Keys are those of the GGUF specification, `{architecture}.{key}`. A key that is missing, of the wrong type, or
    /// contradicts another is an error that names it.
    pub fn from_gguf(file: &GgufFile) -> Result<Self, ModelError> {
        architectures::read(&MetadataReader::new(file.metadata(), Some(file))?)
    }

    /// Like [`from_gguf`](Self::from_gguf) without the tensors, whose presence decides of a part in some families: these are
    /// taken to have what their files commonly have.
    pub fn from_metadata(metadata: &Metadata) -> Result<Self, ModelError> {
        architectures::read(&MetadataReader::new(metadata, None)?)
    }

    /// Number of layers.
    pub fn n_layer(&self) -> usize {
        self.layers.len()
    }

    /// Whether a token sees no token after it, in any layer: texts can be evaluated piece by piece.
    pub fn is_causal(&self) -> bool {
        // Latent attention and recurrences always are.
        self.layers.iter().all(|layer| layer.mixer.attention().is_none_or(|a| a.mask.is_causal()))
    }

    /// Whether text can be generated: the model has an output head, and a token sees no token after it.
    pub fn writes_text(&self) -> bool {
        self.output.head.is_some() && self.is_causal()
    }

    /// Elements that one token adds to the KV cache, over all layers, keys and values together.
    pub fn kv_elements_per_token(&self) -> usize {
        self.layers
            .iter()
            .filter_map(|layer| layer.mixer.kv_shape())
            .map(|c| c.n_head_kv * (c.key_dim + c.value_dim))
            .sum()
    }
}

/// What a layer keeps of a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvShape {
    /// Heads.
    pub n_head_kv: usize,
    /// Elements of a key.
    pub key_dim: usize,
    /// Elements of a value.
    pub value_dim: usize,
}

impl Mixer {
    /// Its softmax attention, where it has some: alone, or beside something else.
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

    /// Its latent attention, where it is that.
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

    /// The rotation of queries and keys, where there is one.
    pub fn rope(&self) -> Option<&Rope> {
        match (self.attention(), self.latent_attention()) {
            (Some(a), _) => a.rope(),
            (None, Some(a)) => a.rope.as_ref(),
            (None, None) => None,
        }
    }

    /// The layer whose keys and values are read, for the mixer of layer `i`: itself or an earlier one. `None` where none are.
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

    /// What the layer adds to the KV cache for each token; `None` where it reads another layer's, or none.
    pub fn kv_shape(&self) -> Option<KvShape> {
        match (self.attention(), self.latent_attention()) {
            (Some(a), _) => {
                a.owns_cache().then_some(KvShape { n_head_kv: a.n_head_kv, key_dim: a.head_dim, value_dim: a.head_dim })
            }
            (None, Some(a)) => Some(KvShape { n_head_kv: 1, key_dim: a.kv_rank + a.shared_dim, value_dim: a.kv_rank }),
            (None, None) => None,
        }
    }

    /// F32 elements of the state that it keeps of each sequence, however long it is; 0 where it keeps none.
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
    /// F32 elements of the state that the layer keeps of each sequence: the mixer's, and after it the feed-forward's.
    pub fn state_elements(&self) -> usize {
        self.mixer.state_elements().saturating_add(self.feed_forward.state_elements())
    }
}
