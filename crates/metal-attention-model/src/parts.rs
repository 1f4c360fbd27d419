//! A layer and its parts, as one set of types for all stages of loading.
//!
//! A model goes through three stages. Its specification says which parts there are ([`Specs`]). With a file, each part
//! also has its weights ([`Loaded`]). A backend makes its own form of them, for instance buffers of a GPU. [`Layer`],
//! [`Mixer`], [`FeedForward`] and [`Residual`] are the same types in all stages; [`Parts`] says what a part is made of
//! in one of them. [`Prepare`] leads from one stage to the next: it has a method for each kind of part, so that a new
//! kind does not compile until the weights' list and each backend know it.

use std::fmt;
use std::marker::PhantomData;

use crate::attention::{AttentionSpec, LatentAttentionSpec};
use crate::block_conv::{BlockConvSpec, BlockConvWeights};
use crate::feed_forward::{Dense, Experts};
use crate::recurrent::{
    ChannelMixSpec, ChannelMixWeights, DeltaRuleSpec, DeltaRuleWeights, Mamba2Spec, Mamba2Weights, MambaSpec,
    MambaWeights, Rwkv6Spec, Rwkv6Weights, Rwkv7Spec, Rwkv7Weights, ShortConvSpec, ShortConvWeights,
};
use crate::spec::{AttentionAndMamba2Spec, Norm, OutputScale, PerLayerEmbedding, ResidualStreams};
use crate::weights::{
    AttentionAndMamba2Weights, AttentionWeights, DenseWeights, ExpertsWeights, LatentAttentionWeights,
    LayerEmbeddingWeights, LayerStreamsWeights, Linear, NormWeights,
};

/// What each kind of part is made of in one stage of loading.
pub trait Parts {
    /// A norm of rows.
    type Norm;
    /// Softmax attention.
    type Attention;
    /// Latent attention.
    type LatentAttention;
    /// A gated short convolution.
    type ShortConv;
    /// Mamba.
    type Mamba;
    /// Mamba-2.
    type Mamba2;
    /// Attention and Mamba-2 over the same input.
    type AttentionAndMamba2;
    /// The gated delta rule.
    type DeltaRule;
    /// The time mix of RWKV-6.
    type Rwkv6;
    /// The time mix of RWKV-7.
    type Rwkv7;
    /// A dense feed-forward.
    type Dense;
    /// A mixture of experts.
    type Experts;
    /// RWKV's channel mix.
    type ChannelMix;
    /// The convolutions around a mixer or a feed-forward ([`BlockConvSpec`]).
    type BlockConv;
    /// A layer's additional embedding ([`PerLayerEmbedding`]).
    type LayerEmbedding;
    /// A layer's prediction and correction of several residual streams ([`ResidualStreams`]).
    type LayerStreams;
    /// The factor on the residual stream after a layer.
    type OutputScale;
}

/// The stage before a file is read: specifications alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Specs {}

impl Parts for Specs {
    type Norm = Norm;
    type Attention = AttentionSpec;
    type LatentAttention = LatentAttentionSpec;
    type ShortConv = ShortConvSpec;
    type Mamba = MambaSpec;
    type Mamba2 = Mamba2Spec;
    type AttentionAndMamba2 = AttentionAndMamba2Spec;
    type DeltaRule = DeltaRuleSpec;
    type Rwkv6 = Rwkv6Spec;
    type Rwkv7 = Rwkv7Spec;
    type Dense = Dense;
    type Experts = Experts;
    type ChannelMix = ChannelMixSpec;
    type BlockConv = BlockConvSpec;
    type LayerEmbedding = PerLayerEmbedding;
    type LayerStreams = ResidualStreams;
    type OutputScale = OutputScale;
}

/// The stage in which each part has its specification and its weights. `L` is the type of a matrix with its bias:
/// [`Linear`] as found in the file, or a backend's own form of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Loaded<L = Linear>(PhantomData<L>);

impl<L> Parts for Loaded<L> {
    type Norm = NormWeights;
    type Attention = AttentionWeights<L>;
    type LatentAttention = LatentAttentionWeights<L>;
    type ShortConv = ShortConvWeights<L>;
    type Mamba = MambaWeights<L>;
    type Mamba2 = Mamba2Weights<L>;
    type AttentionAndMamba2 = AttentionAndMamba2Weights<L>;
    type DeltaRule = DeltaRuleWeights<L>;
    type Rwkv6 = Rwkv6Weights<L>;
    type Rwkv7 = Rwkv7Weights<L>;
    type Dense = DenseWeights<L>;
    type Experts = ExpertsWeights<L>;
    type ChannelMix = ChannelMixWeights<L>;
    type BlockConv = BlockConvWeights<L>;
    type LayerEmbedding = LayerEmbeddingWeights<L>;
    type LayerStreams = LayerStreamsWeights<L>;
    type OutputScale = f32;
}

/// One layer: a mixer and a feed-forward. [`Residual`] defines how they join the residual stream.
pub struct Layer<P: Parts = Specs> {
    /// Norm of the mixer's input. `None`: the mixer reads the residual stream itself.
    pub mixer_norm: Option<P::Norm>,
    /// Convolutions of the mixer's input and of its result, if any (DFlash-2). Only with [`Residual::Sequential`], in models that
    /// [take context](crate::ModelSpec::takes_context); so are those of the feed-forward.
    pub mixer_conv: Option<P::BlockConv>,
    /// The part that combines positions.
    pub mixer: Mixer<P>,
    /// Norm of the mixer's result before it is added to the stream, if any.
    pub mixer_post_norm: Option<P::Norm>,
    /// Norm of the feed-forward's input. `None`: the feed-forward reads the residual stream itself; with
    /// [`Residual::Parallel`] it reads the mixer's normed input.
    pub feed_forward_norm: Option<P::Norm>,
    /// Convolutions of the feed-forward's input and of its result, if any.
    pub feed_forward_conv: Option<P::BlockConv>,
    /// The part that works on each token alone.
    pub feed_forward: FeedForward<P>,
    /// Norm of the feed-forward's result before it is added to the stream, if any.
    pub feed_forward_post_norm: Option<P::Norm>,
    /// How both join the residual stream.
    pub residual: Residual<P::Norm>,
    /// The layer's additional embedding, in models that have one ([`InputEmbedding::per_layer`]).
    ///
    /// [`InputEmbedding::per_layer`]: crate::InputEmbedding::per_layer
    pub embedding: Option<P::LayerEmbedding>,
    /// Prediction and correction of the residual streams, in models with several ([`InputEmbedding::streams`]).
    ///
    /// [`InputEmbedding::streams`]: crate::InputEmbedding::streams
    pub streams: Option<P::LayerStreams>,
    /// Factor on the residual stream after the layer. (That of the logits is
    /// [`OutputHead::scale`](crate::OutputHead::scale).)
    pub output_scale: P::OutputScale,
}

/// The specification of a layer.
pub type LayerSpec = Layer<Specs>;

/// The part of a layer that combines positions.
#[derive(Debug, Clone, PartialEq)]
pub enum Mixer<P: Parts = Specs> {
    /// Softmax attention with a KV cache.
    Attention(P::Attention),
    /// Latent attention: keys and values are compressed to one row for each token (DeepSeek's MLA).
    LatentAttention(P::LatentAttention),
    /// A gated short convolution, with a recurrent state (LFM2).
    ShortConv(P::ShortConv),
    /// A selective state space (Mamba).
    Mamba(P::Mamba),
    /// A selective state space with one decay for each head (Mamba-2).
    Mamba2(P::Mamba2),
    /// Attention and Mamba-2 over the same input; their results are added (Falcon-H1).
    AttentionAndMamba2(Box<P::AttentionAndMamba2>),
    /// The gated delta rule (Qwen 3.5).
    DeltaRule(P::DeltaRule),
    /// The time mix of RWKV-6.
    Rwkv6(P::Rwkv6),
    /// The time mix of RWKV-7.
    Rwkv7(P::Rwkv7),
    /// No mixer: the layer has only a feed-forward (Nemotron-H).
    None,
}

/// The part of a layer that works on each token alone.
#[derive(Debug, Clone, PartialEq)]
pub enum FeedForward<P: Parts = Specs> {
    /// The same matrices for all tokens.
    Dense(P::Dense),
    /// A mixture of experts (MoE): each token goes to a few of many feed-forwards.
    Experts(Box<P::Experts>),
    /// RWKV's channel mix: the input is mixed with that of the previous token, which is a recurrent state.
    ChannelMix(P::ChannelMix),
    /// No feed-forward: the layer has only a mixer (Mamba).
    None,
}

/// How mixer and feed-forward join the residual stream `x`. `N` is a norm.
///
/// In the formulas, `m(x) = mixer_post_norm(mixer(mixer_norm(x)))` and
/// `f(x) = feed_forward_post_norm(feed_forward(feed_forward_norm(x)))`, where a missing norm is the identity, except a
/// missing `feed_forward_norm` of `Parallel`. `Sequential` and `Parallel` occur with and without these four norms.
/// `PostNorm` has two others, of the sums; the models that have it have none of the four.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Residual<N = Norm> {
    /// `x += scale * m(x); x += scale * f(x)`.
    Sequential {
        /// Factor on both results.
        scale: f32,
    },
    /// `x += m(x) + f(x)`, both from the same `x`. Without a `feed_forward_norm`, the feed-forward's input is
    /// `mixer_norm(x)`. Precondition, which [`ModelSpec::check_residuals`](crate::ModelSpec::check_residuals) checks:
    /// the layer has a mixer, and its feed-forward has no recurrent state.
    Parallel,
    /// `x = mixer_sum_norm(x + m(x)); x = feed_forward_sum_norm(x + f(x))`: norms of the sums (BERT).
    PostNorm {
        /// Norm of the stream after the mixer is added.
        mixer_sum_norm: N,
        /// Norm of the stream after the feed-forward is added.
        feed_forward_sum_norm: N,
    },
}

/// Makes the parts of one stage from those of the stage before it, `From`. The methods are called in the order of the
/// layer's fields. Errors: why a part cannot be made.
pub trait Prepare<'a, From: Parts + 'a> {
    /// The stage that it makes.
    type To: Parts;
    /// Why a part cannot be made.
    type Error;

    /// A norm over `n_embd` elements.
    fn norm(&mut self, part: &'a From::Norm) -> Result<<Self::To as Parts>::Norm, Self::Error>;
    /// Softmax attention.
    fn attention(&mut self, part: &'a From::Attention) -> Result<<Self::To as Parts>::Attention, Self::Error>;
    /// Latent attention.
    fn latent_attention(
        &mut self,
        part: &'a From::LatentAttention,
    ) -> Result<<Self::To as Parts>::LatentAttention, Self::Error>;
    /// A short convolution.
    fn short_conv(&mut self, part: &'a From::ShortConv) -> Result<<Self::To as Parts>::ShortConv, Self::Error>;
    /// Mamba.
    fn mamba(&mut self, part: &'a From::Mamba) -> Result<<Self::To as Parts>::Mamba, Self::Error>;
    /// Mamba-2.
    fn mamba2(&mut self, part: &'a From::Mamba2) -> Result<<Self::To as Parts>::Mamba2, Self::Error>;
    /// Attention and Mamba-2 over the same input.
    fn attention_and_mamba2(
        &mut self,
        part: &'a From::AttentionAndMamba2,
    ) -> Result<<Self::To as Parts>::AttentionAndMamba2, Self::Error>;
    /// The gated delta rule.
    fn delta_rule(&mut self, part: &'a From::DeltaRule) -> Result<<Self::To as Parts>::DeltaRule, Self::Error>;
    /// RWKV-6's time mix.
    fn rwkv6(&mut self, part: &'a From::Rwkv6) -> Result<<Self::To as Parts>::Rwkv6, Self::Error>;
    /// RWKV-7's time mix.
    fn rwkv7(&mut self, part: &'a From::Rwkv7) -> Result<<Self::To as Parts>::Rwkv7, Self::Error>;
    /// A dense feed-forward.
    fn dense(&mut self, part: &'a From::Dense) -> Result<<Self::To as Parts>::Dense, Self::Error>;
    /// A mixture of experts.
    fn experts(&mut self, part: &'a From::Experts) -> Result<<Self::To as Parts>::Experts, Self::Error>;
    /// RWKV's channel mix.
    fn channel_mix(&mut self, part: &'a From::ChannelMix) -> Result<<Self::To as Parts>::ChannelMix, Self::Error>;
    /// The convolutions around a mixer or a feed-forward.
    fn block_conv(&mut self, part: &'a From::BlockConv) -> Result<<Self::To as Parts>::BlockConv, Self::Error>;
    /// A layer's additional embedding.
    fn layer_embedding(
        &mut self,
        part: &'a From::LayerEmbedding,
    ) -> Result<<Self::To as Parts>::LayerEmbedding, Self::Error>;
    /// A layer's prediction and correction of residual streams.
    fn layer_streams(&mut self, part: &'a From::LayerStreams)
    -> Result<<Self::To as Parts>::LayerStreams, Self::Error>;
    /// The factor after a layer.
    fn output_scale(&mut self, part: &'a From::OutputScale) -> Result<<Self::To as Parts>::OutputScale, Self::Error>;
}

impl<P: Parts> Layer<P> {
    /// This layer in the next stage, part by part; the first error ends it.
    pub fn prepare<'a, C: Prepare<'a, P>>(&'a self, c: &mut C) -> Result<Layer<C::To>, C::Error> {
        Ok(Layer {
            mixer_norm: self.mixer_norm.as_ref().map(|norm| c.norm(norm)).transpose()?,
            mixer_conv: self.mixer_conv.as_ref().map(|part| c.block_conv(part)).transpose()?,
            mixer: self.mixer.prepare(c)?,
            mixer_post_norm: self.mixer_post_norm.as_ref().map(|norm| c.norm(norm)).transpose()?,
            feed_forward_norm: self.feed_forward_norm.as_ref().map(|norm| c.norm(norm)).transpose()?,
            feed_forward_conv: self.feed_forward_conv.as_ref().map(|part| c.block_conv(part)).transpose()?,
            feed_forward: self.feed_forward.prepare(c)?,
            feed_forward_post_norm: self.feed_forward_post_norm.as_ref().map(|norm| c.norm(norm)).transpose()?,
            residual: match &self.residual {
                Residual::Sequential { scale } => Residual::Sequential { scale: *scale },
                Residual::Parallel => Residual::Parallel,
                Residual::PostNorm { mixer_sum_norm, feed_forward_sum_norm } => Residual::PostNorm {
                    mixer_sum_norm: c.norm(mixer_sum_norm)?,
                    feed_forward_sum_norm: c.norm(feed_forward_sum_norm)?,
                },
            },
            embedding: self.embedding.as_ref().map(|part| c.layer_embedding(part)).transpose()?,
            streams: self.streams.as_ref().map(|part| c.layer_streams(part)).transpose()?,
            output_scale: c.output_scale(&self.output_scale)?,
        })
    }
}

impl<P: Parts> Mixer<P> {
    /// Its softmax attention, if it is nothing else.
    pub fn attention_alone(&self) -> Option<&P::Attention> {
        match self {
            Self::Attention(attention) => Some(attention),
            Self::LatentAttention(_)
            | Self::ShortConv(_)
            | Self::Mamba(_)
            | Self::Mamba2(_)
            | Self::AttentionAndMamba2(_)
            | Self::DeltaRule(_)
            | Self::Rwkv6(_)
            | Self::Rwkv7(_)
            | Self::None => None,
        }
    }

    /// This mixer in the next stage.
    fn prepare<'a, C: Prepare<'a, P>>(&'a self, c: &mut C) -> Result<Mixer<C::To>, C::Error> {
        Ok(match self {
            Self::Attention(part) => Mixer::Attention(c.attention(part)?),
            Self::LatentAttention(part) => Mixer::LatentAttention(c.latent_attention(part)?),
            Self::ShortConv(part) => Mixer::ShortConv(c.short_conv(part)?),
            Self::Mamba(part) => Mixer::Mamba(c.mamba(part)?),
            Self::Mamba2(part) => Mixer::Mamba2(c.mamba2(part)?),
            Self::AttentionAndMamba2(both) => Mixer::AttentionAndMamba2(Box::new(c.attention_and_mamba2(both)?)),
            Self::DeltaRule(part) => Mixer::DeltaRule(c.delta_rule(part)?),
            Self::Rwkv6(part) => Mixer::Rwkv6(c.rwkv6(part)?),
            Self::Rwkv7(part) => Mixer::Rwkv7(c.rwkv7(part)?),
            Self::None => Mixer::None,
        })
    }
}

impl<P: Parts> FeedForward<P> {
    /// This feed-forward in the next stage.
    fn prepare<'a, C: Prepare<'a, P>>(&'a self, c: &mut C) -> Result<FeedForward<C::To>, C::Error> {
        Ok(match self {
            Self::Dense(part) => FeedForward::Dense(c.dense(part)?),
            Self::Experts(part) => FeedForward::Experts(Box::new(c.experts(part)?)),
            Self::ChannelMix(part) => FeedForward::ChannelMix(c.channel_mix(part)?),
            Self::None => FeedForward::None,
        })
    }
}

// The derived implementations would require `P: Clone`, not that the parts are.
impl<P: Parts> Clone for Layer<P>
where
    Mixer<P>: Clone,
    FeedForward<P>: Clone,
    P::Norm: Clone,
    P::BlockConv: Clone,
    P::LayerEmbedding: Clone,
    P::LayerStreams: Clone,
    P::OutputScale: Clone,
{
    fn clone(&self) -> Self {
        Self {
            mixer_norm: self.mixer_norm.clone(),
            mixer_conv: self.mixer_conv.clone(),
            mixer: self.mixer.clone(),
            mixer_post_norm: self.mixer_post_norm.clone(),
            feed_forward_norm: self.feed_forward_norm.clone(),
            feed_forward_conv: self.feed_forward_conv.clone(),
            feed_forward: self.feed_forward.clone(),
            feed_forward_post_norm: self.feed_forward_post_norm.clone(),
            residual: self.residual.clone(),
            embedding: self.embedding.clone(),
            streams: self.streams.clone(),
            output_scale: self.output_scale.clone(),
        }
    }
}

impl<P: Parts> PartialEq for Layer<P>
where
    Mixer<P>: PartialEq,
    FeedForward<P>: PartialEq,
    P::Norm: PartialEq,
    P::BlockConv: PartialEq,
    P::LayerEmbedding: PartialEq,
    P::LayerStreams: PartialEq,
    P::OutputScale: PartialEq,
{
    fn eq(&self, other: &Self) -> bool {
        let Self {
            mixer_norm,
            mixer_conv,
            mixer,
            mixer_post_norm,
            feed_forward_norm,
            feed_forward_conv,
            feed_forward,
            feed_forward_post_norm,
            residual,
            embedding,
            streams,
            output_scale,
        } = self;
        *mixer_norm == other.mixer_norm
            && *mixer_conv == other.mixer_conv
            && *mixer == other.mixer
            && *mixer_post_norm == other.mixer_post_norm
            && *feed_forward_norm == other.feed_forward_norm
            && *feed_forward_conv == other.feed_forward_conv
            && *feed_forward == other.feed_forward
            && *feed_forward_post_norm == other.feed_forward_post_norm
            && *residual == other.residual
            && *embedding == other.embedding
            && *streams == other.streams
            && *output_scale == other.output_scale
    }
}

impl<P: Parts> fmt::Debug for Layer<P>
where
    Mixer<P>: fmt::Debug,
    FeedForward<P>: fmt::Debug,
    P::Norm: fmt::Debug,
    P::BlockConv: fmt::Debug,
    P::LayerEmbedding: fmt::Debug,
    P::LayerStreams: fmt::Debug,
    P::OutputScale: fmt::Debug,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Layer")
            .field("mixer_norm", &self.mixer_norm)
            .field("mixer_conv", &self.mixer_conv)
            .field("mixer", &self.mixer)
            .field("mixer_post_norm", &self.mixer_post_norm)
            .field("feed_forward_norm", &self.feed_forward_norm)
            .field("feed_forward_conv", &self.feed_forward_conv)
            .field("feed_forward", &self.feed_forward)
            .field("feed_forward_post_norm", &self.feed_forward_post_norm)
            .field("residual", &self.residual)
            .field("embedding", &self.embedding)
            .field("streams", &self.streams)
            .field("output_scale", &self.output_scale)
            .finish()
    }
}
