//! [`supports`]: which models the CUDA kernels can run. Every part of a model is matched without a wildcard, here or in its file
//! of `parts/`, so that a new part has to be mapped to kernels or rejected by name.

use metal_attention_model::{Dense, FeedForward, LayerSpec, Mixer, ModelSpec, OutputScale, OutputSpec, Residual};

use crate::CudaError;
use crate::parts::{attention, block_conv, delta_rule, experts, latent_attention, mamba, rwkv, short_conv, streams};

/// Checks that there are kernels for every part of `spec`. The error names the first part without kernels.
pub(crate) fn supports(spec: &ModelSpec) -> Result<(), CudaError> {
    // Pooling and what follows it are computed on the host.
    let OutputSpec { norm: _, head: _, pooling: _, pooled_projections: _, classifier: _ } = &spec.output;
    let check = || {
        streams::supports(&spec.embedding, &spec.layers)?;
        spec.layers.iter().try_for_each(layer_supports)
    };
    check().map_err(|part| CudaError::UnsupportedPart { part })
}

/// Checks a layer.
fn layer_supports(layer: &LayerSpec) -> Result<(), &'static str> {
    let LayerSpec {
        mixer_norm: _,
        mixer_conv: _,
        mixer,
        mixer_post_norm: _,
        feed_forward_norm: _,
        feed_forward_conv: _,
        feed_forward,
        feed_forward_post_norm: _,
        residual,
        // Models with these are those of Gemma 3n and 4, which the kernels support.
        embedding: _,
        streams: _,
        output_scale,
    } = layer;
    block_conv::supports(layer)?;
    match residual {
        Residual::Sequential { scale: _ } | Residual::Parallel | Residual::PostNorm { .. } => {}
    }
    match output_scale {
        OutputScale::Fixed(_) | OutputScale::Stored => {}
    }
    match mixer {
        Mixer::Attention(spec) => attention::supports(spec)?,
        Mixer::LatentAttention(spec) => latent_attention::supports(spec)?,
        Mixer::ShortConv(spec) => short_conv::supports(spec)?,
        Mixer::Mamba(spec) => mamba::supports_mamba(spec)?,
        Mixer::Mamba2(spec) => mamba::supports_mamba2(spec)?,
        Mixer::AttentionAndMamba2(both) => {
            attention::supports(&both.attention)?;
            mamba::supports_mamba2(&both.mamba2)?;
        }
        Mixer::DeltaRule(spec) => delta_rule::supports(spec)?,
        Mixer::Rwkv6(spec) => rwkv::supports_rwkv6(spec)?,
        Mixer::Rwkv7(spec) => rwkv::supports_rwkv7(spec)?,
        Mixer::None => {}
    }
    match feed_forward {
        FeedForward::Experts(spec) => experts::supports(spec),
        // All of them.
        FeedForward::Dense(Dense { n_ff: _, gated: _, activation: _, fused: _ })
        | FeedForward::ChannelMix(_)
        | FeedForward::None => Ok(()),
    }
}
