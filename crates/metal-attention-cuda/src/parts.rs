//! What this backend knows of a model: every part is matched here, and is run or refused by name.

use metal_attention_model::{
    Activation, AttentionSpec, Dense, Embedding, Experts, FeedForward, KvSource, LatentAttentionSpec, LayerSpec,
    Mamba2Spec, MambaDecay, Mask, Mixer, ModelSpec, Norm, NormKind, NormOver, Output, OutputScale, Positions, QkNorm,
    Residual, RopeLayout, Router,
};

use crate::CudaError;
use crate::args::HeadArgs;
use crate::weights::ExpertActivation;

/// Elements of a head that attention has room for.
const MAX_HEAD_DIM: usize = 256;
/// Elements of a key of a recurrence: `WALKS` of `recurrence.cuh`.
const MAX_KEY: usize = 256;
/// Elements of a channel's state in Mamba: four threads of `mamba_16`.
const MAX_CHANNEL_STATE: usize = 64;
/// Tokens that a convolution sees: `MAX_TAPS` of `recurrent.cu`.
const MAX_TAPS: usize = 16;
/// Elements of a compressed row that is a value: `PAIRS` of `latent_attention.cu` for each lane.
const MAX_LATENT: usize = 512;
/// Experts, and those of a token: `MAX_EXPERTS` and `MAX_CHOSEN` of `experts.cu`.
const MAX_EXPERTS: usize = 1024;
const MAX_CHOSEN: usize = 64;

/// Whether there are kernels for every part of `spec`; otherwise the part that lacks them.
pub(crate) fn supports(spec: &ModelSpec) -> Result<(), CudaError> {
    let parts = || {
        let Embedding { scale: _, token_types, positions, norm, per_layer, streams } = &spec.embedding;
        if token_types.is_some() || positions.is_some() {
            return Err("embeddings of token types and positions");
        }
        if norm.is_some() {
            return Err("norms of embeddings");
        }
        if per_layer.is_some() || streams.is_some() {
            return Err("embeddings of layers and residual streams");
        }
        let Output { norm, head: _, pooling: _, dense: _, classifier: _ } = &spec.output;
        norm.as_ref().map_or(Err("models without a last norm"), rms)?;
        spec.layers.iter().try_for_each(layer)
    };
    parts().map_err(|part| CudaError::UnsupportedPart { part })
}

fn rms(norm: &Norm) -> Result<(), &'static str> {
    let Norm { tensor: _, weight: _, bias, kind, eps: _, bare: _ } = norm;
    match kind {
        NormKind::Rms if !bias => Ok(()),
        NormKind::Rms | NormKind::Layer => Err("norms but for RMSNorm"),
    }
}

fn layer(layer: &LayerSpec) -> Result<(), &'static str> {
    let LayerSpec {
        mixer_norm,
        mixer,
        mixer_post_norm,
        feed_forward_norm,
        feed_forward,
        feed_forward_post_norm,
        residual,
        output_scale,
    } = layer;
    match residual {
        Residual::Sequential { scale: _ } => {}
        Residual::Parallel | Residual::PostNorm { .. } => return Err("residual streams but for sequential ones"),
    }
    match output_scale {
        OutputScale::Fixed(scale) if *scale == 1.0 => {}
        OutputScale::Fixed(_) | OutputScale::Stored => return Err("factors on a layer's result"),
    }
    if mixer_post_norm.is_some() || feed_forward_post_norm.is_some() {
        return Err("norms of results");
    }
    for (norm, nothing) in
        [(mixer_norm, *mixer == Mixer::None), (feed_forward_norm, *feed_forward == FeedForward::None)]
    {
        if !nothing {
            norm.as_ref().map_or(Err("layers without norms of their inputs"), rms)?;
        }
    }
    match mixer {
        Mixer::Attention(a) => attention(a)?,
        Mixer::LatentAttention(a) => latent_attention(a)?,
        Mixer::ShortConv(of) => taps(of.n_tap)?,
        Mixer::Mamba(of) => {
            taps(of.n_tap)?;
            match of.decay {
                MambaDecay::Channels if of.d_state > MAX_CHANNEL_STATE => {
                    return Err("Mamba with states of that many elements");
                }
                MambaDecay::Channels => {}
                MambaDecay::Heads(_) => keys(of.d_state)?,
            }
        }
        Mixer::Mamba2(of) => mamba2(of)?,
        Mixer::AttentionAndMamba2(of) => {
            attention(&of.attention)?;
            mamba2(&of.mamba2)?;
        }
        Mixer::DeltaRule(of) => {
            taps(of.n_tap)?;
            keys(of.key_dim)?;
        }
        Mixer::Rwkv6(of) => keys(of.head_dim)?,
        Mixer::Rwkv7(of) => keys(of.head_dim)?,
        Mixer::None => {}
    }
    match feed_forward {
        FeedForward::Dense(of) => dense(of),
        FeedForward::Experts(of) => experts(of),
        FeedForward::ChannelMix(_) | FeedForward::None => Ok(()),
    }
}

fn dense(of: &Dense) -> Result<(), &'static str> {
    let Dense { n_ff: _, gated, activation, fused: _ } = of;
    if !gated {
        return Err("feed-forwards without a gate");
    }
    activation_code(*activation).map(|_| ())
}

fn experts(of: &Experts) -> Result<(), &'static str> {
    let Experts { n_expert, n_used, expert, biases: _, latent: _, router, own_norms, shared } = of;
    let Router { score: _, choice_bias: _, renormalize: _, scale: _, groups: _, weight_input: _ } = router;
    if *n_expert > MAX_EXPERTS || *n_used > MAX_CHOSEN || n_used > n_expert {
        return Err("that many experts");
    }
    ExpertActivation::of(expert.activation)?;
    if let Some(own) = own_norms {
        [own.input, own.result, own.shared_result].iter().try_for_each(rms)?;
    }
    shared.as_ref().map_or(Ok(()), |shared| dense(&shared.dense))
}

fn latent_attention(a: &LatentAttentionSpec) -> Result<(), &'static str> {
    let of_values = 4;
    let unaligned = [a.kv_rank, a.n_nope, a.head_dim(), a.kv_rank + a.shared_dim].iter().any(|n| n % of_values != 0);
    if a.kv_rank > MAX_LATENT || a.shared_dim % 2 != 0 || unaligned {
        return Err("latent attention over rows of that many elements");
    }
    Ok(())
}

fn mamba2(of: &Mamba2Spec) -> Result<(), &'static str> {
    taps(of.n_tap)?;
    keys(of.d_state)
}

fn taps(n: usize) -> Result<(), &'static str> {
    if n > MAX_TAPS { Err("convolutions over that many tokens") } else { Ok(()) }
}

fn keys(n: usize) -> Result<(), &'static str> {
    if n > MAX_KEY { Err("recurrent states of that many rows") } else { Ok(()) }
}

/// `Activation` of `common.cuh`.
pub(crate) fn activation_code(activation: Activation) -> Result<u32, &'static str> {
    match activation {
        Activation::Silu => Ok(0),
        Activation::Gelu => Ok(1),
        Activation::ReluSquared => Ok(2),
        Activation::ClampedSwiglu { limit: _ } => Err("clamped SwiGLU"),
        Activation::SparseGelu { n_std: _ } => Err("sparse GELU"),
    }
}

fn attention(a: &AttentionSpec) -> Result<(), &'static str> {
    let AttentionSpec {
        n_head: _,
        n_head_kv: _,
        head_dim,
        scale: _,
        mask,
        positions: _,
        soft_cap: _,
        sinks: _,
        qk_norm: _,
        value_norm,
        clamp_qkv,
        kv,
        temperature,
        qkv_bias: _,
        fused_qkv: _,
        output_gate,
    } = a;
    if head_dim % 8 != 0 || *head_dim > MAX_HEAD_DIM {
        return Err("heads of that many elements");
    }
    mask_code(*mask)?;
    match kv {
        KvSource::Own => {}
        KvSource::KeysAsValues | KvSource::Layer(_) => return Err("keys and values of other layers"),
    }
    if value_norm.is_some() || clamp_qkv.is_some() {
        return Err("norms and limits of values");
    }
    if temperature.is_some() {
        return Err("queries that grow with their position");
    }
    if *output_gate {
        return Err("gates of attention's result");
    }
    head_codes(a).map(|_| ())
}

/// `Mask` of `attention.cu`, and how far it reaches.
pub(crate) fn mask_code(mask: Mask) -> Result<(u32, u32), &'static str> {
    // Contexts are no longer than 32 bits count.
    let reach = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    match mask {
        Mask::Causal => Ok((0, 0)),
        Mask::Window(n) => Ok((1, reach(n))),
        Mask::Chunk(n) => Ok((2, reach(n))),
        Mask::Full | Mask::Near(_) => Err("tokens that see those after them"),
    }
}

/// What becomes of queries and keys, without the weights and tables that it takes.
pub(crate) fn head_codes(a: &AttentionSpec) -> Result<HeadArgs, &'static str> {
    let (norm, norm_after_rope, eps) = match a.qk_norm {
        None => (0, false, 0.0),
        Some(QkNorm { kind: NormKind::Layer, .. }) => return Err("norms but for RMSNorm"),
        Some(QkNorm { kind: NormKind::Rms, eps, over, after_rope }) => {
            let norm = match over {
                NormOver::Head => 1,
                NormOver::EachHead => 2,
                NormOver::Unweighted => 3,
                NormOver::Row => return Err("norms of whole rows of queries and keys"),
            };
            (norm, after_rope, eps)
        }
    };
    let (rotation, n_rot) = match a.positions {
        Positions::None => (0, 0),
        Positions::Rope(rope) => match rope.layout {
            RopeLayout::Interleaved => (1, rope.n_rot),
            RopeLayout::Halves => (2, rope.n_rot),
        },
        Positions::Alibi { max_bias: _ } => return Err("scores that fall with the distance"),
    };
    Ok(HeadArgs {
        q_norm: 0,
        k_norm: 0,
        rope: 0,
        norm,
        norm_after_rope: u32::from(norm_after_rope),
        rotation,
        n_rot: n_rot as u32,
        eps,
        scale: a.scale,
    })
}
