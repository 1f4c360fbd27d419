//! The parts of a model on the GPU: a file for each kind of part.
//!
//! Such a file has the part with its weights, how it is prepared from the weights of the file, its limits, the scratch rows
//! that it needs, and its launches. [`CudaParts`] is the stage of loading that they make up; [`Loader`] leads to it.

pub(crate) mod attention;
pub(crate) mod block_conv;
pub(crate) mod delta_rule;
pub(crate) mod dense;
pub(crate) mod ends;
pub(crate) mod experts;
pub(crate) mod latent_attention;
pub(crate) mod mamba;
pub(crate) mod rwkv;
pub(crate) mod short_conv;
pub(crate) mod streams;

use metal_attention_model::{
    AttentionAndMamba2Weights, AttentionWeights, BlockConvWeights, ChannelMixWeights, DeltaRuleWeights, DenseWeights,
    ExpertsWeights, FeedForward, LatentAttentionWeights, Layer, LayerEmbeddingWeights, LayerStreamsWeights, Loaded,
    Mamba2Weights, MambaWeights, Mixer, ModelSpec, NormWeights, Parts, Prepare, Rwkv6Weights, Rwkv7Weights,
    ShortConvWeights, StateInput,
};

pub(crate) use attention::CudaAttention;
pub(crate) use block_conv::CudaBlockConv;
pub(crate) use delta_rule::CudaDeltaRule;
pub(crate) use dense::CudaDense;
pub(crate) use ends::CudaEmbedding;
pub(crate) use experts::CudaExperts;
pub(crate) use latent_attention::CudaLatentAttention;
pub(crate) use mamba::{CudaAttentionAndMamba2, CudaMamba, CudaMamba2};
pub(crate) use rwkv::{CudaChannelMix, CudaRwkv6, CudaRwkv7};
pub(crate) use short_conv::CudaShortConv;
pub(crate) use streams::{CudaLayerEmbedding, CudaLayerStreams, CudaPerLayer, CudaStreams};

use crate::CudaError;
use crate::activations::Widths;
use crate::weights::{CudaNorm, Loader};

/// The parts of layers on the device: weights, with the specification or the launches' constants made of it.
#[derive(Debug)]
pub(crate) enum CudaParts {}

impl Parts for CudaParts {
    type Norm = CudaNorm;
    type Attention = Box<CudaAttention>;
    type LatentAttention = Box<CudaLatentAttention>;
    type ShortConv = CudaShortConv;
    type Mamba = Box<CudaMamba>;
    type Mamba2 = Box<CudaMamba2>;
    type AttentionAndMamba2 = CudaAttentionAndMamba2;
    type DeltaRule = Box<CudaDeltaRule>;
    type Rwkv6 = Box<CudaRwkv6>;
    type Rwkv7 = Box<CudaRwkv7>;
    type Dense = CudaDense;
    type Experts = CudaExperts;
    type ChannelMix = CudaChannelMix;
    type BlockConv = CudaBlockConv;
    type LayerEmbedding = CudaLayerEmbedding;
    type LayerStreams = CudaLayerStreams;
    type OutputScale = f32;
}

/// A layer on the device.
pub(crate) type CudaLayer = Layer<CudaParts>;

/// Widens the buffers of intermediate results for all parts of a model.
pub(crate) fn widen_for_parts(widths: &mut Widths, spec: &ModelSpec) {
    for layer in &spec.layers {
        // Norms, joins and factors have no buffers of their own. The additional embedding and the streams are the model's, below.
        let Layer {
            mixer_norm: _,
            mixer_conv,
            mixer,
            mixer_post_norm: _,
            feed_forward_norm: _,
            feed_forward_conv,
            feed_forward,
            feed_forward_post_norm: _,
            residual: _,
            embedding: _,
            streams: _,
            output_scale: _,
        } = layer;
        for conv in [mixer_conv, feed_forward_conv].into_iter().flatten() {
            block_conv::widen_for_block_conv(widths, conv, spec.n_embd);
        }
        match mixer {
            Mixer::Attention(spec) => attention::widen_for_attention(widths, spec),
            Mixer::LatentAttention(spec) => latent_attention::widen_for_latent_attention(widths, spec),
            Mixer::ShortConv(spec) => short_conv::widen_for_short_conv(widths, spec),
            Mixer::Mamba(spec) => mamba::widen_for_mamba(widths, spec),
            Mixer::Mamba2(spec) => mamba::widen_for_mamba2(widths, spec),
            Mixer::AttentionAndMamba2(both) => {
                attention::widen_for_attention(widths, &both.attention);
                mamba::widen_for_mamba2(widths, &both.mamba2);
            }
            Mixer::DeltaRule(spec) => delta_rule::widen_for_delta_rule(widths, spec),
            Mixer::Rwkv6(spec) => rwkv::widen_for_rwkv6(widths, spec),
            Mixer::Rwkv7(spec) => rwkv::widen_for_rwkv7(widths, spec),
            Mixer::None => {}
        }
        match feed_forward {
            FeedForward::Dense(dense) => dense::widen_for_dense(widths, dense),
            FeedForward::Experts(experts) => experts::widen_for_experts(widths, experts, spec.n_embd),
            FeedForward::ChannelMix(channel_mix) => rwkv::widen_for_channel_mix(widths, channel_mix),
            FeedForward::None => {}
        }
    }
    if let Some(per_layer) = &spec.embedding.per_layer {
        streams::widen_for_layer_embeddings(widths, per_layer, spec.n_layer());
    }
    if let Some(streams) = &spec.embedding.streams {
        streams::widen_for_streams(widths, streams);
    }
    if let Some(assistant) = spec.embedding.assistant {
        let width = assistant.target_width;
        widths.widen_scratch_rows([width, 2 * width]);
        widths.widen_scratch_rows([spec.n_embd]);
    }
    match spec.embedding.state {
        None => {}
        Some(StateInput::Joined(_) | StateInput::Attended(_)) => widths.widen_scratch_rows([2 * spec.n_embd]),
        Some(StateInput::Projected(projected)) => widths.widen_scratch_rows([projected.width]),
    }
}

impl Prepare<'_, Loaded> for Loader<'_> {
    type To = CudaParts;
    type Error = CudaError;

    fn norm(&mut self, w: &NormWeights) -> Result<CudaNorm, CudaError> {
        CudaNorm::new(self, w)
    }

    fn attention(&mut self, w: &AttentionWeights) -> Result<Box<CudaAttention>, CudaError> {
        Ok(Box::new(CudaAttention::new(self, w)?))
    }

    fn latent_attention(&mut self, w: &LatentAttentionWeights) -> Result<Box<CudaLatentAttention>, CudaError> {
        Ok(Box::new(CudaLatentAttention::new(self, w)?))
    }

    fn short_conv(&mut self, w: &ShortConvWeights) -> Result<CudaShortConv, CudaError> {
        CudaShortConv::new(self, w)
    }

    fn mamba(&mut self, w: &MambaWeights) -> Result<Box<CudaMamba>, CudaError> {
        Ok(Box::new(CudaMamba::new(self, w)?))
    }

    fn mamba2(&mut self, w: &Mamba2Weights) -> Result<Box<CudaMamba2>, CudaError> {
        Ok(Box::new(CudaMamba2::new(self, w)?))
    }

    fn attention_and_mamba2(&mut self, w: &AttentionAndMamba2Weights) -> Result<CudaAttentionAndMamba2, CudaError> {
        CudaAttentionAndMamba2::new(self, w)
    }

    fn delta_rule(&mut self, w: &DeltaRuleWeights) -> Result<Box<CudaDeltaRule>, CudaError> {
        Ok(Box::new(CudaDeltaRule::new(self, w)?))
    }

    fn rwkv6(&mut self, w: &Rwkv6Weights) -> Result<Box<CudaRwkv6>, CudaError> {
        Ok(Box::new(CudaRwkv6::new(self, w)?))
    }

    fn rwkv7(&mut self, w: &Rwkv7Weights) -> Result<Box<CudaRwkv7>, CudaError> {
        Ok(Box::new(CudaRwkv7::new(self, w)?))
    }

    fn dense(&mut self, w: &DenseWeights) -> Result<CudaDense, CudaError> {
        CudaDense::new(self, w)
    }

    fn experts(&mut self, w: &ExpertsWeights) -> Result<CudaExperts, CudaError> {
        CudaExperts::new(self, w)
    }

    fn channel_mix(&mut self, w: &ChannelMixWeights) -> Result<CudaChannelMix, CudaError> {
        CudaChannelMix::new(self, w)
    }

    fn block_conv(&mut self, w: &BlockConvWeights) -> Result<CudaBlockConv, CudaError> {
        CudaBlockConv::new(self, w)
    }

    fn layer_embedding(&mut self, w: &LayerEmbeddingWeights) -> Result<CudaLayerEmbedding, CudaError> {
        CudaLayerEmbedding::new(self, w)
    }

    fn layer_streams(&mut self, w: &LayerStreamsWeights) -> Result<CudaLayerStreams, CudaError> {
        CudaLayerStreams::new(self, w)
    }

    fn output_scale(&mut self, scale: &f32) -> Result<f32, CudaError> {
        Ok(*scale)
    }
}
