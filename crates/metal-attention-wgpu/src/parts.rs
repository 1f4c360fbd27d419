//! The parts of a model on the GPU: a file for each kind of part.
//!
//! Such a file has the part with its weights, how it is prepared from the weights of the file, its limits, the scratch
//! buffers that it needs, and its plan: the dispatches that evaluate it. [`WgpuParts`] is the stage of loading that they
//! make up; [`PartsUploader`] leads to it.

mod attention;
mod block_conv;
mod delta_rule;
mod dense;
mod ends;
mod experts;
mod latent_attention;
mod mamba;
mod rwkv;
mod short_conv;
mod streams;

use metal_attention_model::{
    AttentionAndMamba2Weights, AttentionWeights, BlockConvWeights, CacheGroups, CacheType, ChannelMixWeights,
    DeltaRuleWeights, DenseWeights, ExpertsWeights, FeedForward, LatentAttentionWeights, Layer, LayerEmbeddingWeights,
    LayerSpec, LayerStreamsWeights, Loaded, Mamba2Weights, MambaWeights, Mixer, ModelSpec, NormWeights, OutputSpec,
    Parts, Prepare, Residual, Rwkv6Weights, Rwkv7Weights, ShortConvWeights, StateInputWeights, Weights,
};

use crate::activations::{ActivationWidths, widen};
use crate::weights::{Uploads, WgpuNorm};
use crate::{WgpuDevice, WgpuError};
pub(crate) use attention::{AttentionKernels, UNROTATED_ELEMENTS, WgpuAttention};
pub(crate) use block_conv::WgpuBlockConv;
pub(crate) use delta_rule::WgpuDeltaRule;
pub(crate) use dense::WgpuDense;
pub(crate) use ends::WgpuEnds;
pub(crate) use experts::WgpuExperts;
pub(crate) use latent_attention::WgpuLatentAttention;
pub(crate) use mamba::{WgpuAttentionAndMamba2, WgpuMamba, WgpuMamba2};
pub(crate) use rwkv::{WgpuChannelMix, WgpuRwkv6, WgpuRwkv7};
pub(crate) use short_conv::WgpuShortConv;
pub(crate) use streams::{WgpuLayerEmbedding, WgpuLayerEmbeddingInputs, WgpuLayerStreams, WgpuStreams};

/// The stage of loading in which each part has the sizes of its kernels and its weights on the GPU.
#[derive(Debug)]
pub(crate) enum WgpuParts {}

impl Parts for WgpuParts {
    type Norm = WgpuNorm;
    type Attention = Box<WgpuAttention>;
    type LatentAttention = Box<WgpuLatentAttention>;
    type ShortConv = Box<WgpuShortConv>;
    type Mamba = Box<WgpuMamba>;
    type Mamba2 = Box<WgpuMamba2>;
    type AttentionAndMamba2 = WgpuAttentionAndMamba2;
    type DeltaRule = Box<WgpuDeltaRule>;
    type Rwkv6 = Box<WgpuRwkv6>;
    type Rwkv7 = Box<WgpuRwkv7>;
    type Dense = WgpuDense;
    type Experts = WgpuExperts;
    type ChannelMix = WgpuChannelMix;
    type BlockConv = WgpuBlockConv;
    type LayerEmbedding = WgpuLayerEmbedding;
    type LayerStreams = WgpuLayerStreams;
    type OutputScale = f32;
}

/// Checks that kernels exist for every part of `spec`; the error names the first part without one.
pub(crate) fn supports(spec: &ModelSpec) -> Result<(), WgpuError> {
    // The kernels support every field of the output. Pooling and what follows it is computed outside of the forward
    // pass.
    let OutputSpec { norm: _, head: _, pooling: _, pooled_projections: _, classifier: _ } = &spec.output;
    let check = || {
        streams::supports(&spec.embedding, &spec.layers)?;
        spec.layers.iter().try_for_each(layer_supports)
    };
    check().map_err(|part| WgpuError::UnsupportedPart { part })
}

/// Checks one layer.
fn layer_supports(layer: &LayerSpec) -> Result<(), &'static str> {
    // The streams and the additional embedding of a layer are those of the model.
    let Layer {
        mixer_norm: _,
        // Of any number of taps.
        mixer_conv: _,
        mixer,
        mixer_post_norm: _,
        feed_forward_norm: _,
        feed_forward_conv: _,
        feed_forward,
        feed_forward_post_norm: _,
        residual,
        embedding: _,
        streams: _,
        output_scale: _,
    } = layer;
    match residual {
        Residual::Sequential { scale: _ } | Residual::Parallel | Residual::PostNorm { .. } => {}
    }
    match mixer {
        Mixer::Attention(spec) => attention::supports(spec)?,
        Mixer::AttentionAndMamba2(both) => {
            attention::supports(&both.attention)?;
            if both.attention.gate_rows().is_some() {
                return Err("a gate of attention's result with a tensor of its own, beside Mamba-2");
            }
            mamba::supports_mamba2(&both.mamba2)?;
        }
        Mixer::ShortConv(spec) => short_conv::supports(spec)?,
        Mixer::Mamba(spec) => mamba::supports_mamba(spec)?,
        Mixer::Mamba2(spec) => mamba::supports_mamba2(spec)?,
        Mixer::DeltaRule(spec) => delta_rule::supports(spec)?,
        // All of them.
        Mixer::LatentAttention(_) | Mixer::Rwkv6(_) | Mixer::Rwkv7(_) | Mixer::None => {}
    }
    match feed_forward {
        FeedForward::Experts(spec) => experts::supports(spec),
        // All of them.
        FeedForward::Dense(_) | FeedForward::ChannelMix(_) | FeedForward::None => Ok(()),
    }
}

/// Where the keys and values of a layer are stored.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LayerPages {
    /// Positions of one sequence at most.
    n_ctx: usize,
    /// The cache group that the layer belongs to.
    group: usize,
    /// Element type of the KV cache.
    cache: CacheType,
}

impl LayerPages {
    /// Stands in where only the choice of kernels matters, which does not depend on the pages.
    const UNKNOWN: Self = Self { n_ctx: 1, group: 0, cache: CacheType::F16 };

    /// The pages of `n_layer` layers.
    pub(crate) fn of_layers(groups: &CacheGroups, n_layer: usize, cache: CacheType) -> Vec<Self> {
        let n_ctx = groups.capacity().n_positions();
        (0..n_layer).map(|i| Self { n_ctx, group: groups.of_layer(i), cache }).collect()
    }
}

/// Bytes of a page of each layer's keys, and of its values, large enough for all layers that share its memory. `None`: the
/// layer has no KV cache, or shares another layer's memory ([`CacheGroups::memory_of_layer`]). `pages`: those of each layer.
pub(crate) fn page_bytes(weights: &Weights, pages: &[LayerPages], groups: &CacheGroups) -> Vec<Option<[u64; 2]>> {
    let of_layer = |(layer, &pages): (&Layer<Loaded>, &LayerPages)| match &layer.mixer {
        Mixer::Attention(w) => AttentionKernels::new(w, pages).page_bytes(),
        Mixer::AttentionAndMamba2(both) => AttentionKernels::new(&both.attention, pages).page_bytes(),
        Mixer::LatentAttention(w) => Some(latent_attention::page_bytes(&w.spec, pages)),
        Mixer::ShortConv(_)
        | Mixer::Mamba(_)
        | Mixer::Mamba2(_)
        | Mixer::DeltaRule(_)
        | Mixer::Rwkv6(_)
        | Mixer::Rwkv7(_)
        | Mixer::None => None,
    };
    let mut largest = vec![None; pages.len()];
    for (i, of_layer) in weights.layers.iter().zip(pages).map(of_layer).enumerate() {
        if let (Some(owner), Some(bytes)) = (groups.memory_of_layer(i), of_layer) {
            let [keys, values] = largest[owner].unwrap_or(bytes);
            largest[owner] = Some([keys.max(bytes[0]), values.max(bytes[1])]);
        }
    }
    largest
}

/// Widens the scratch buffers for all parts of a model with streams of `n_embd` elements. `pages`: those of each layer.
pub(crate) fn widen_for_parts(widths: &mut ActivationWidths, n_embd: usize, weights: &Weights, pages: &[LayerPages]) {
    if let Some(assistant) = &weights.assistant {
        let width = assistant.spec.target_width;
        widen(&mut widths.states, width);
        widen(&mut widths.joined, 2 * width);
        widen(&mut widths.target_rows, width);
    }
    match &weights.state {
        None => {}
        Some(StateInputWeights::Joined { .. } | StateInputWeights::Attended { .. }) => {
            widen(&mut widths.states, n_embd);
            widen(&mut widths.joined, 2 * n_embd);
        }
        Some(StateInputWeights::Projected { norm, fc }) => {
            widen(&mut widths.states, fc.weight.row_len());
            widen(&mut widths.joined, norm.as_ref().map_or(0, |norm| norm.weight.len()));
        }
    }
    for (layer, &pages) in weights.layers.iter().zip(pages) {
        // Norms and factors have no buffers of their own.
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
            embedding,
            streams,
            output_scale: _,
        } = layer;
        for conv in [mixer_conv, feed_forward_conv].into_iter().flatten() {
            block_conv::widen_for_block_conv(widths, &conv.spec, n_embd);
        }
        match mixer {
            Mixer::Attention(w) => AttentionKernels::new(w, pages).widen(widths),
            Mixer::LatentAttention(w) => latent_attention::widen_for_latent_attention(widths, &w.spec, pages),
            Mixer::ShortConv(w) => short_conv::widen_for_short_conv(widths, &w.spec),
            Mixer::Mamba(w) => mamba::widen_for_mamba(widths, &w.spec),
            Mixer::Mamba2(w) => mamba::widen_for_mamba2(widths, &w.spec),
            Mixer::AttentionAndMamba2(w) => mamba::widen_for_both(widths, w, pages),
            Mixer::DeltaRule(w) => delta_rule::widen_for_delta_rule(widths, &w.spec),
            Mixer::Rwkv6(w) => rwkv::widen_for_rwkv6(widths, &w.spec),
            Mixer::Rwkv7(w) => rwkv::widen_for_rwkv7(widths, &w.spec),
            Mixer::None => {}
        }
        match feed_forward {
            FeedForward::Dense(w) => dense::widen_for_dense(widths, &w.spec),
            FeedForward::Experts(w) => experts::widen_for_experts(widths, &w.spec, n_embd),
            FeedForward::ChannelMix(w) => rwkv::widen_for_channel_mix(widths, &w.spec),
            FeedForward::None => {}
        }
        if let Some(w) = embedding {
            streams::widen_for_layer_embeddings(widths, &w.spec, weights.layers.len());
        }
        if let Some(w) = streams {
            streams::widen_for_streams(widths, &w.spec, n_embd);
        }
    }
}

/// Uploads the parts of one layer, except the rows of their matrices, which are left to `uploads`.
pub(crate) struct PartsUploader<'u> {
    /// The GPU.
    pub(crate) gpu: &'u WgpuDevice,
    /// Receives the matrices.
    pub(crate) uploads: &'u mut Uploads,
    /// Width of the residual stream.
    pub(crate) n_embd: usize,
    /// Where the layer's keys and values are stored.
    pub(crate) pages: LayerPages,
}

impl Prepare<'_, Loaded> for PartsUploader<'_> {
    type To = WgpuParts;
    type Error = WgpuError;

    fn norm(&mut self, w: &NormWeights) -> Result<WgpuNorm, WgpuError> {
        WgpuNorm::new(self.gpu, w)
    }

    fn block_conv(&mut self, w: &BlockConvWeights) -> Result<WgpuBlockConv, WgpuError> {
        WgpuBlockConv::new(self.gpu, w, self.uploads)
    }

    fn attention(&mut self, w: &AttentionWeights) -> Result<Box<WgpuAttention>, WgpuError> {
        Ok(Box::new(WgpuAttention::new(self.gpu, w, None, self.pages, self.uploads)?))
    }

    fn latent_attention(&mut self, w: &LatentAttentionWeights) -> Result<Box<WgpuLatentAttention>, WgpuError> {
        Ok(Box::new(WgpuLatentAttention::new(self.gpu, w, self.pages, self.uploads)?))
    }

    fn short_conv(&mut self, w: &ShortConvWeights) -> Result<Box<WgpuShortConv>, WgpuError> {
        Ok(Box::new(WgpuShortConv::new(self.gpu, w, self.uploads)?))
    }

    fn mamba(&mut self, w: &MambaWeights) -> Result<Box<WgpuMamba>, WgpuError> {
        Ok(Box::new(WgpuMamba::new(self.gpu, w, self.uploads)?))
    }

    fn mamba2(&mut self, w: &Mamba2Weights) -> Result<Box<WgpuMamba2>, WgpuError> {
        Ok(Box::new(WgpuMamba2::new(self.gpu, w, self.uploads)?))
    }

    fn attention_and_mamba2(&mut self, w: &AttentionAndMamba2Weights) -> Result<WgpuAttentionAndMamba2, WgpuError> {
        WgpuAttentionAndMamba2::new(self.gpu, w, self.pages, self.uploads)
    }

    fn delta_rule(&mut self, w: &DeltaRuleWeights) -> Result<Box<WgpuDeltaRule>, WgpuError> {
        Ok(Box::new(WgpuDeltaRule::new(self.gpu, w, self.uploads)?))
    }

    fn rwkv6(&mut self, w: &Rwkv6Weights) -> Result<Box<WgpuRwkv6>, WgpuError> {
        Ok(Box::new(WgpuRwkv6::new(self.gpu, w, self.uploads)?))
    }

    fn rwkv7(&mut self, w: &Rwkv7Weights) -> Result<Box<WgpuRwkv7>, WgpuError> {
        Ok(Box::new(WgpuRwkv7::new(self.gpu, w, self.uploads)?))
    }

    fn dense(&mut self, w: &DenseWeights) -> Result<WgpuDense, WgpuError> {
        WgpuDense::new(self.gpu, w, self.uploads)
    }

    fn experts(&mut self, w: &ExpertsWeights) -> Result<WgpuExperts, WgpuError> {
        WgpuExperts::new(self.gpu, w, self.n_embd, self.uploads)
    }

    fn channel_mix(&mut self, w: &ChannelMixWeights) -> Result<WgpuChannelMix, WgpuError> {
        WgpuChannelMix::new(self.gpu, w, self.uploads)
    }

    fn layer_embedding(&mut self, w: &LayerEmbeddingWeights) -> Result<WgpuLayerEmbedding, WgpuError> {
        WgpuLayerEmbedding::new(self.gpu, w, self.uploads)
    }

    fn layer_streams(&mut self, w: &LayerStreamsWeights) -> Result<WgpuLayerStreams, WgpuError> {
        WgpuLayerStreams::new(self.gpu, w, self.uploads)
    }

    fn output_scale(&mut self, scale: &f32) -> Result<f32, WgpuError> {
        Ok(*scale)
    }
}
