//! A model as data: its embedding, its layers and its output, with all sizes, but without weights.
//!
//! A layer is a mixer (attention or a recurrence), which combines positions, and a feed-forward, which works on each
//! token alone. Most of them have a norm of their input; the results of both join the residual stream. The parts are
//! those of the published models. A file of `architectures/` puts the parts of a model family together. Backends match
//! every part exhaustively, and report by name the parts that they do not support.
//!
//! For example, Llama 3 8B as a [`ModelSpec`] (norms are RMSNorm; fields that are not listed are `None` or `false`, and
//! factors that are not listed are 1):
//!
//! ```text
//! embedding: one table, without token types, positions or a norm
//! layers:    32 of { mixer_norm, Attention (32 heads, 8 KV heads, RoPE), feed_forward_norm, Dense (SiLU, gated), Sequential }
//! output:    norm, head with `output.weight`
//! ```

use metal_attention_gguf::{GgufFile, Metadata};

use crate::architectures;
use crate::attention::{AttentionSpec, KvSource, LatentAttentionSpec};
use crate::metadata_reader::MetadataReader;
use crate::parts::{LayerSpec, Mixer, Residual};
use crate::recurrent::Mamba2Spec;
use crate::state_input::StateInput;
use crate::{ModelError, Rope};

/// Everything that a forward pass needs of a model, except its weights. The tokenizer and the chat template are not in
/// it.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelSpec {
    /// `general.architecture`, e.g. `"llama"`.
    pub architecture: String,
    /// `general.name`, when the file has one.
    pub name: Option<String>,
    /// Tokens in the vocabulary: length of the logits, and rows of the embedding table unless [`InputEmbedding::n_rows`] says
    /// otherwise.
    pub n_vocab: usize,
    /// Context length of the training.
    pub n_ctx_train: usize,
    /// Width of the residual stream.
    pub n_embd: usize,
    /// The embedding: from a token to the input of the first layer.
    pub embedding: InputEmbedding,
    /// The layers, first to last.
    pub layers: Vec<LayerSpec>,
    /// The number of the first layer's block in the file: the tensors of layer `i` are named `blk.{first_block + i}.`. 0 for
    /// all models but prediction heads.
    pub first_block: usize,
    /// Whether it is a block drafter (DFlash). Its sequences then have two kinds of inputs, which it keeps the keys and values of:
    ///
    /// - *Context rows* ([`Batch::context`](crate::Batch::context)), `[n_embd]` in the place of tokens. Each layer makes keys and
    ///   values of the row itself, without its norm; there are no queries, and the rows go through no layer.
    /// - *Blocks*: the inputs of one sequence in any other batch. They go through the layers together, and attend to all that is
    ///   before the block, as far as each one's mask reaches, and to all of the block, both ways. The caller cuts a block back as a
    ///   whole.
    pub takes_context: bool,
    /// From the last layer's hidden states to logits or to an embedding.
    pub output: OutputSpec,
}

/// The embedding of a token: the input of the first layer for token `id` at position `pos` is
/// `norm(scale * table[id] + token_types[0] + positions[pos])`, `[n_embd]`; with a [`StateInput`] it is made of that and a state.
#[derive(Debug, Clone, PartialEq)]
pub struct InputEmbedding {
    /// Factor on the row of the embedding table.
    pub scale: f32,
    /// Rows of the table of token types (BERT's sentences A and B). Only row 0 is used: all tokens are of the first
    /// sentence. `None`: no table.
    pub n_token_types: Option<usize>,
    /// Rows of the table of learned positions. `None`: no table.
    pub n_positions: Option<usize>,
    /// Norm of the sum, if any.
    pub norm: Option<Norm>,
    /// An additional small embedding for each layer (Gemma 3n and 4).
    pub per_layer: Option<PerLayerEmbedding>,
    /// Several residual streams in parallel (Gemma 3n). `None`: one.
    pub streams: Option<ResidualStreams>,
    /// A state of another model that is read, in drafters. `None`: none is.
    pub state: Option<StateInput>,
    /// Rows of the embedding table, where they are not as many as logits ([`ModelSpec::n_vocab`]): a drafter may propose some of
    /// the tokens that it reads.
    pub n_rows: Option<usize>,
    /// The ends of an assistant, which are those of a target model in part. `None`: the model is none.
    pub assistant: Option<AssistantEnds>,
}

/// What an *assistant* shares with its target model, which it drafts for (Gemma 4). An assistant has no keys and values: its
/// layers attend to those of the target ([`KvSource::Target`]). The input of its first layer is
///
/// `x = pre_projection * [scale * target_table[id] | state]`,
///
/// with the target's embedding table and a state of the target, both `target_width` wide, the factor
/// [`scale`](InputEmbedding::scale), and the matrix `pre_projection`, `[n_embd, 2 * target_width]`. Of the result `h` of its output
/// norm the state for the next draft is
///
/// `state = post_projection * h`,
///
/// with the matrix `post_projection`, `[target_width, n_embd]`. The first state is the target's after its output norm.
///
/// A token of an assistant is in no cache. It has the position that follows its sequence, and attends to what the target has
/// evaluated: a step gives it the *index* of the last token there, so that its masks do not count the token itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AssistantEnds {
    /// Width of the target's residual stream, of a state, and of a row of the embedding table.
    pub target_width: usize,
}

/// An additional embedding of the token for each layer (Gemma 3n, Gemma 4).
///
/// With `e`, `[n_embd]`, the token's [`InputEmbedding`] (after its scale and norm), one row for each token holds the
/// inputs of all layers, `[n_layer * width]`: `(proj_norm(model_proj * e / sqrt(n_embd)) + sqrt(width) *
/// per_layer_table[id]) / sqrt(2)`, where `model_proj` is a matrix `[n_layer * width, n_embd]` and `per_layer_table` a
/// second embedding table, `[n_vocab, n_layer * width]`. Layer `i` reads elements `i * width..(i + 1) * width` as
/// `input`. After its feed-forward the layer computes the following, where `gate(v)` and `proj(v)` multiply `v` by its
/// matrices `[width, n_embd]` and `[n_embd, width]`, and `gelu` is [`Activation::Gelu`](crate::Activation::Gelu):
///
/// `x += post_norm(proj(gelu(gate(x)) * input))`.
///
/// With [`ResidualStreams`] (Gemma 3n) the streams are corrected before. `gate` then reads the active stream times the
/// layer's vector `correct_scale`, `[n_embd]`, and the result is added to all other streams:
///
/// `stream[j] += post_norm(proj(gelu(gate(correct_scale * stream[active])) * input))` for each `j != active`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PerLayerEmbedding {
    /// Elements of one layer's input.
    pub width: usize,
    /// Norm of the product of `model_proj`, over each layer's elements.
    pub proj_norm: Norm,
    /// Norm of the product of `proj`, which is added to `x`, or to the other streams.
    pub post_norm: Norm,
}

/// Several residual streams, as in Gemma 3n, which combines two methods.
///
/// Alternating updates (AltUp, arXiv 2301.13310): a token has `n` streams, each `[n_embd]`, of which layers compute
/// with the active one.
///
/// 1. At first, `stream[0] = e`, the token's embedding. Each other stream is a projection of `e`, scaled to the L2 norm
///    of `e`.
/// 2. Before a layer, each stream is predicted from the values `old` of all streams:
///    `stream[i] = old[i] + sum over j of p[i][j] * old[j]`.
/// 3. Let `prediction = stream[active]`, as predicted in step 2. The layer turns it into `x`.
/// 4. After the layer, each stream is corrected by the error of that prediction:
///    `stream[i] += (1 + c[i]) * (x - prediction)`.
/// 5. After the last layer, the output norm reads the mean of the active stream and of projections of the others, each
///    scaled to the L2 norm of the active stream.
///
/// The coefficients are computed for each token: `p = predict * altup_router(old[active])`, `[n, n]`, and
/// `c = correct * altup_router(x)`, `[n]`, with `altup_router(v) = tanh(W * (router_norm(v) / n_embd))`, `[n]`, and the
/// layer's matrices `predict`, `[n * n, n]`, `correct`, `[n, n]`, and `W`, `[n, n_embd]`.
///
/// Learned augmented residuals (LAuReL, arXiv 2411.07501): a low-rank branch in parallel with the mixer. With the
/// mixer's normed input `h` and the sum `s = x + scale * m(x)` of [`Residual::Sequential`], the residual stream after
/// the mixer is `(s + h + laurel_norm(R * (L * h))) / sqrt(2)`, where `L` is `[laurel_rank, n_embd]` and `R` is
/// `[n_embd, laurel_rank]`.
///
/// All layers have [`Residual::Sequential`], which [`ModelSpec::check_residuals`] checks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ResidualStreams {
    /// Number of streams.
    pub n: usize,
    /// Index of the stream that layers compute with, below `n`.
    pub active: usize,
    /// Rank of LAuReL's matrices.
    pub laurel_rank: usize,
    /// Norm of the input of `altup_router`.
    pub router_norm: Norm,
    /// Norm of LAuReL's product `R (L h)`.
    pub laurel_norm: Norm,
}

/// A normalisation of rows. This is its description; the values of its weight and bias are in
/// [`NormWeights`](crate::NormWeights).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Norm {
    /// The stem of the names of its tensors in the file, in a layer after `blk.N.`. The weight is
    /// `{tensor_stem}.weight`, or with [`omits_weight_suffix`](Self::omits_weight_suffix) just `{tensor_stem}`; the
    /// bias is `{tensor_stem}.bias`.
    pub tensor_stem: &'static str,
    /// Whether it has a weight in the file. If not, the weight is all ones, and there is no bias.
    pub has_weight: bool,
    /// Whether it has a bias in the file; only with a weight. (`architectures::read` establishes this; it is not
    /// checked again.)
    pub has_bias: bool,
    /// The formula.
    pub kind: NormKind,
    /// Epsilon, added to the mean of squares or the variance.
    pub eps: f32,
    /// Whether the name of the weight has no `.weight` (some norms of Falcon-H1 and `PLaMo`).
    pub omits_weight_suffix: bool,
}

impl Norm {
    /// Returns this norm with [`omits_weight_suffix`](Self::omits_weight_suffix) set.
    pub(crate) fn without_weight_suffix(self) -> Self {
        Self { omits_weight_suffix: true, ..self }
    }

    /// Returns the RMSNorm with this norm's epsilon and weight, without a bias.
    pub(crate) fn to_rms(self) -> Self {
        Self { kind: NormKind::Rms, has_bias: false, ..self }
    }

    /// Returns this norm with the weight of another tensor.
    pub(crate) fn with_tensor(self, tensor_stem: &'static str) -> Self {
        Self { tensor_stem, ..self }
    }
}

/// The formula of a norm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormKind {
    /// `x / sqrt(mean(x^2) + eps) * weight + bias` (arXiv 1910.07467); the bias is usually missing.
    Rms,
    /// `(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias` (arXiv 1607.06450); the bias may be missing.
    Layer,
}

/// A factor on the residual stream after a layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum OutputScale {
    /// This number: 1, or 1/2 after every n-th layer of RWKV-6. Its files have the weights of the last product of each
    /// mixer and feed-forward halved once for each such layer before it, so that activations stay in the range of F16.
    Fixed(f32),
    /// The number in the layer's tensor `layer_output_scale`; 1 if it is missing (Gemma 4).
    Stored,
}

/// Attention and Mamba-2 over the same input.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionAndMamba2Spec {
    /// The attention.
    pub attention: AttentionSpec,
    /// The state space.
    pub mamba2: Mamba2Spec,
}

/// From the last layer's hidden states to logits or to an embedding.
#[derive(Debug, Clone, PartialEq)]
pub struct OutputSpec {
    /// Norm of the last layer's hidden states. `None`: they are used as they are.
    pub norm: Option<Norm>,
    /// The output head; `None` for encoders, which have no logits.
    pub head: Option<OutputHead>,
    /// How the hidden states of a sequence become its embedding or its scores; generation does not use it. `None`: the
    /// file names no pooling, and the mean is used.
    pub pooling: Option<Pooling>,
    /// Matrices that multiply the pooled hidden state one after the other, without activations between them
    /// (EmbeddingGemma).
    pub pooled_projections: Vec<PooledProjection>,
    /// The classifier of rerankers, in the tensors `cls`, `cls.norm` and `cls.output`, if there is one. It comes after
    /// the pooled projections.
    pub classifier: Option<Classifier>,
}

/// The output head: logits `cap * tanh(scale * (W * x + b) / cap)`, `[n_vocab]`; without a cap, `scale * (W * x + b)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OutputHead {
    /// Factor on the products.
    pub scale: f32,
    /// The cap, if there is one.
    pub soft_cap: Option<f32>,
    /// Where `W` is stored.
    pub matrix: HeadMatrix,
    /// Whether files may have the bias `b`, as `output.bias`. If false, a bias in the file is ignored.
    pub may_have_bias: bool,
}

/// Where the matrix of the output head is stored. Readers treat the last two alike: they read `output.weight`, or the
/// embedding table if the file lacks it. These two differ only in the tensors that are written for test models
/// ([`ModelShape::tensors`](crate::ModelShape::tensors)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeadMatrix {
    /// The embedding table (tied embeddings). A tensor `output.weight` in the file is not read.
    EmbeddingTable,
    /// `output.weight`, which the files of the family have.
    OutputTensor,
    /// `output.weight`, which some files of the family have.
    OutputTensorInSomeFiles,
}

/// A matrix that multiplies the pooled hidden state, `[n_out, n_in]`; `n_in` is `n_embd`, or `n_out` of the matrix
/// before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PooledProjection {
    /// Name of its tensor without `.weight`.
    pub tensor: &'static str,
    /// Number of elements of its product.
    pub n_out: usize,
}

/// A classifier over the pooled hidden state: `cls.output(cls.norm(activation(cls(x))))`. A file may lack any of the
/// tensors, whose steps are then left out. Without `cls`, the activation and `cls.norm` are left out, too.
#[derive(Debug, Clone, PartialEq)]
pub struct Classifier {
    /// Names of the results of `cls.output`, one for each. Empty: it has one result without a name (a reranker's
    /// score).
    pub labels: Vec<String>,
    /// Pooling of its input; never [`Pooling::Classifier`], in whose place `architectures/` sets the family's pooling.
    pub pooling: Pooling,
    /// The activation.
    pub activation: ClassifierActivation,
    /// Epsilon of `cls.norm`, a layer norm.
    pub norm_eps: f32,
    /// Whether softmax is applied to the results (Qwen 3).
    pub softmax: bool,
}

/// The activation of a [`Classifier`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClassifierActivation {
    /// `tanh(x)`.
    Tanh,
    /// GELU (ModernBERT).
    Gelu,
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
    /// The model is a reranker (`rank` in GGUF files and in llama.cpp): its states are pooled as
    /// [`Classifier::pooling`] says, and the result is the scores of [`OutputSpec::classifier`]. Without a classifier
    /// in the file, the result is the state of the first token.
    Classifier,
}

impl ModelSpec {
    /// Reads the spec of a file's model.
    ///
    /// Keys are those of the GGUF specification, `{architecture}.{key}`.
    ///
    /// # Errors
    ///
    /// A required key is missing, or a key has the wrong type or contradicts another (the error names the key); the
    /// architecture is unknown; or no backend implements the residual joins ([`ModelError::InvalidResidual`]).
    pub fn from_gguf(file: &GgufFile) -> Result<Self, ModelError> {
        architectures::read(&MetadataReader::new(file.metadata(), Some(file))?)
    }

    /// Reads the spec from metadata alone. In some families the presence of a tensor decides about a part; here the
    /// tensors are assumed to be those that the family's files usually have. For tests, which have no file. Errors: as
    /// of [`from_gguf`](Self::from_gguf).
    pub fn from_metadata(metadata: &Metadata) -> Result<Self, ModelError> {
        architectures::read(&MetadataReader::new(metadata, None)?)
    }

    /// Reads the specs of a file's prediction heads (multi-token prediction), in the order of their drafts. Each is a model of one
    /// layer with an [`InputEmbedding::state`]. Its vocabulary, and where the file has none for the heads also its embedding table,
    /// output norm and output head, are those of the file's model. Empty if the file has no heads; also if its metadata name some,
    /// but it lacks their tensors.
    ///
    /// # Errors
    ///
    /// As of [`from_gguf`](Self::from_gguf); the heads of the architecture are not implemented.
    pub fn heads_from_gguf(file: &GgufFile) -> Result<Vec<Self>, ModelError> {
        architectures::read_heads(&MetadataReader::new(file.metadata(), Some(file))?)
    }

    /// Reads the spec of the assistant in `file`, which drafts for a model of `target`. Its layers name layers of `target`
    /// ([`KvSource::Target`]).
    ///
    /// # Errors
    ///
    /// As of [`from_gguf`](Self::from_gguf); the file is no assistant, or its target is another model.
    pub fn assistant_from_gguf(file: &GgufFile, target: &Self) -> Result<Self, ModelError> {
        architectures::read_assistant(&MetadataReader::new(file.metadata(), Some(file))?, target)
    }

    /// Reads the spec of an assistant from metadata alone, as [`from_metadata`](Self::from_metadata) reads that of a model. Errors:
    /// as of [`assistant_from_gguf`](Self::assistant_from_gguf).
    pub fn assistant_from_metadata(metadata: &Metadata, target: &Self) -> Result<Self, ModelError> {
        architectures::read_assistant(&MetadataReader::new(metadata, None)?, target)
    }

    /// Reads the specs of prediction heads from metadata alone, as [`from_metadata`](Self::from_metadata) reads that of the model.
    /// Errors: as of [`heads_from_gguf`](Self::heads_from_gguf).
    pub fn heads_from_metadata(metadata: &Metadata) -> Result<Vec<Self>, ModelError> {
        architectures::read_heads(&MetadataReader::new(metadata, None)?)
    }

    /// Checks that each layer joins the residual stream in a way that the backends implement: [`Residual::Parallel`]
    /// only with a mixer and without a recurrent state in the feed-forward (as RWKV's channel mix has), several
    /// residual streams only with [`Residual::Sequential`], the streams and the additional embedding of the model in
    /// each layer, and [`StateInput::Attended`] only with one layer of attention. It is called for every spec that is read. The CPU backend
    /// calls it again, since its joins rely on it, and tests make specs otherwise.
    ///
    /// # Errors
    ///
    /// [`ModelError::InvalidResidual`] with the first layer that fails.
    pub fn check_residuals(&self) -> Result<(), ModelError> {
        let has_streams = self.embedding.streams.is_some();
        let is_one_attention = || match &self.layers[..] {
            [layer] => matches!((&layer.mixer, layer.residual), (Mixer::Attention(_), Residual::Sequential { .. })),
            _ => false,
        };
        if self.attends_to_state() && (has_streams || !is_one_attention()) {
            let why = "a state is attended to beside the token by one layer of attention alone";
            return Err(ModelError::InvalidResidual { layer: 0, why });
        }
        for (i, layer) in self.layers.iter().enumerate() {
            let has_conv = layer.mixer_conv.is_some() || layer.feed_forward_conv.is_some();
            let why = match layer.residual {
                Residual::Sequential { .. } | Residual::Parallel | Residual::PostNorm { .. }
                    if has_conv && !self.takes_context =>
                {
                    "convolutions around its parts are within blocks, which the model has none of"
                }
                Residual::Parallel | Residual::PostNorm { .. } if has_conv => {
                    "convolutions around its parts need sequential residuals"
                }
                Residual::Parallel | Residual::PostNorm { .. } if has_streams => {
                    "several residual streams need sequential residuals"
                }
                Residual::Parallel if layer.mixer == Mixer::None => "there is no mixer to be parallel to",
                Residual::Parallel if layer.feed_forward.state_elements() > 0 => {
                    "a feed-forward with a recurrent state cannot be parallel to the mixer"
                }
                Residual::Sequential { .. } | Residual::Parallel | Residual::PostNorm { .. }
                    if layer.streams != self.embedding.streams || layer.embedding != self.embedding.per_layer =>
                {
                    "its residual streams or its additional embedding are not those of the model"
                }
                Residual::Sequential { scale: _ } | Residual::Parallel | Residual::PostNorm { .. } => continue,
            };
            return Err(ModelError::InvalidResidual { layer: i, why });
        }
        Ok(())
    }

    /// The different RoPE parameters of the layers, in the order of the first layer that has each.
    pub fn ropes(&self) -> Vec<Rope> {
        let mut ropes = Vec::new();
        for rope in self.layers.iter().filter_map(|layer| layer.mixer.rope()) {
            if !ropes.contains(rope) {
                ropes.push(*rope);
            }
        }
        ropes
    }

    /// Token ids that it reads: rows of the embedding table.
    pub fn n_ids(&self) -> usize {
        self.embedding.n_rows.unwrap_or(self.n_vocab)
    }

    /// Elements of the state that comes with each input; 0 for models that read none.
    pub fn state_width(&self) -> usize {
        self.embedding.state.map_or(0, |state| state.width(self.n_embd))
    }

    /// Whether it reads tokens, and not states alone.
    pub fn reads_tokens(&self) -> bool {
        !matches!(self.embedding.state, Some(StateInput::Projected(_)))
    }

    /// Whether the mixer of the only layer reads the token beside a state in the place of the normed residual stream
    /// ([`StateInput::Attended`]).
    pub fn attends_to_state(&self) -> bool {
        matches!(self.embedding.state, Some(StateInput::Attended(_)))
    }

    /// Number of layers.
    pub fn n_layer(&self) -> usize {
        self.layers.len()
    }

    /// Whether every token attends only to itself and earlier ones, so that a sequence can be evaluated in chunks.
    pub fn is_causal(&self) -> bool {
        // Latent attention and recurrences are always causal.
        self.layers.iter().all(|layer| layer.mixer.attention().is_none_or(|a| a.mask.is_causal()))
    }

    /// Whether the model can generate text: it has an output head, is causal, and is no block drafter. Other models only make
    /// embeddings or scores, or propose drafts.
    pub fn generates_text(&self) -> bool {
        self.output.head.is_some() && self.is_causal() && !self.takes_context
    }

    /// Elements of one token's keys and values, of all layers that compute their own. The KV cache holds them all, but for
    /// layers that [share memory](crate::CacheGroups::memory_of_layer). Saturates instead of overflowing, since the sizes
    /// come from a file.
    pub fn kv_elements_per_token(&self) -> usize {
        let shapes = self.layers.iter().filter_map(|layer| layer.mixer.kv_shape());
        shapes.fold(0, |sum, kv| sum.saturating_add(kv.n_elements()))
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

impl KvShape {
    /// Elements of keys and values of one token. Saturates instead of overflowing.
    fn n_elements(self) -> usize {
        self.n_head_kv.saturating_mul(self.key_dim.saturating_add(self.value_dim))
    }
}

impl Mixer {
    /// The softmax attention in this mixer, alone or in parallel with a recurrence; `None` if it has none.
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

    /// The layer whose KV cache the mixer of layer `i` reads: `i`, or the earlier one that [`KvSource::Layer`] names.
    /// `None` if it reads none of this model.
    pub fn kv_cache_layer(&self, i: usize) -> Option<usize> {
        match (self.attention(), self.latent_attention()) {
            (Some(a), _) => match a.kv {
                KvSource::Own | KvSource::KeysAsValues => Some(i),
                KvSource::Layer(layer) => Some(layer),
                KvSource::Target(_) => None,
            },
            (None, Some(_)) => Some(i),
            (None, None) => None,
        }
    }

    /// The layer of the target model whose KV cache the mixer of an assistant reads. `None` in other models.
    pub fn target_layer(&self) -> Option<usize> {
        match self.attention()?.kv {
            KvSource::Target(layer) => Some(layer),
            KvSource::Own | KvSource::KeysAsValues | KvSource::Layer(_) => None,
        }
    }

    /// The keys and values that the layer caches for each token. `None` if it reads another layer's cache, or has no
    /// attention. A layer whose values are its keys ([`KvSource::KeysAsValues`]) caches both, since only the keys are
    /// rotated.
    ///
    /// In softmax attention, keys and values have `head_dim` elements alike. Latent attention has one KV head. Its key
    /// is the compressed row (`kv_rank`, `kv_lora_rank` in the paper's code) followed by the shared rotated key
    /// (`shared_dim`, `qk_rope_head_dim`). Its value is the compressed row again. The row is counted and stored twice,
    /// since backends keep keys and values in separate buffers with different layouts.
    pub fn kv_shape(&self) -> Option<KvShape> {
        match (self.attention(), self.latent_attention()) {
            (Some(a), _) => {
                a.owns_cache().then_some(KvShape { n_head_kv: a.n_head_kv, key_dim: a.head_dim, value_dim: a.head_dim })
            }
            (None, Some(a)) => {
                let key_dim = a.kv_rank.saturating_add(a.shared_dim);
                Some(KvShape { n_head_kv: 1, key_dim, value_dim: a.kv_rank })
            }
            (None, None) => None,
        }
    }

    /// F32 elements of the recurrent state of one sequence, independent of its length; 0 if the mixer has none. Does
    /// not overflow for specs that were read: `architectures/` refuses implausible sizes.
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
    /// F32 elements of the layer's recurrent state of one sequence: the mixer's, followed by the feed-forward's. 0 if
    /// the layer has none. The sum saturates.
    pub fn state_elements(&self) -> usize {
        self.mixer.state_elements().saturating_add(self.feed_forward.state_elements())
    }
}
