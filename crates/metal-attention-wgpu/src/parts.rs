//! Chooses the kernels for every part of a model, or refuses the part.
//!
//! Each field of a model's description is matched here by name, so that a new one cannot be overlooked. The result is a
//! [`MixerKernels`] for each layer. Softmax attention has two sets of kernels: the *fast* ones (`rope_append`,
//! `prefill_attention`, `decode_attention`) read Q, K and V as the projections leave them and support the common
//! variants; the *general* ones (`attention_inputs`, `general_attention`) first write the queries to a buffer of their
//! own and support all others.

use metal_attention_model::{
    Activation, AttentionSpec, AttentionWeights, CacheGroups, CacheType, DeltaGates, DeltaRuleSpec, Dense,
    DenseWeights, Experts, FeedForward, FeedForwardWeights, InputEmbedding, KvSource, LatentAttentionSpec, LayerSpec,
    LayerWeights, Linear, Mamba2Spec, MambaSpec, Mask, Mixer, MixerWeights, ModelSpec, Norm, NormKind, NormOver,
    NormWeights, OutputHead, OutputScale, OutputSpec, Positions, QkNorm, Residual, RopeLayout, Router, Rwkv6Spec,
    Rwkv7Spec, SharedExpert, ShortConvSpec, Weights,
};

use crate::WgpuError;
use crate::kernels::{
    AttentionInputsShape, AttentionShape, ConvolutionShape, GeneralAttention, KvInputs, LatentInputsShape, MAX_EXPERTS,
    MAX_FAST_HEAD_DIM, MAX_TAPS, MAX_USED_EXPERTS,
};

/// Checks that kernels exist for every part of `spec`; the error names the first part without one.
pub(super) fn supports(spec: &ModelSpec) -> Result<(), WgpuError> {
    // The kernels support every other field of the embedding, and every field of the output. Pooling and what follows
    // it is computed outside of the forward pass.
    let InputEmbedding { scale: _, n_token_types: _, n_positions: _, norm: _, per_layer, streams } = &spec.embedding;
    if let Some(streams) = streams {
        // Gemma 3n's arrangement is the only one that is supported: a layer corrects the streams when it adds its own
        // per-layer embedding.
        let alone = per_layer.is_none() || streams.active != 0;
        let of_a_kind = spec.layers.iter().all(|layer| matches!(layer.residual, Residual::Sequential { .. }));
        if alone || !of_a_kind {
            return Err(WgpuError::UnsupportedPart { part: "residual streams but for those of Gemma 3n" });
        }
    }
    let OutputSpec { norm: _, head: _, pooling: _, pooled_projections: _, classifier: _ } = &spec.output;
    spec.layers.iter().try_for_each(layer).map_err(|part| WgpuError::UnsupportedPart { part })
}

/// Checks one layer.
fn layer(layer: &LayerSpec) -> Result<(), &'static str> {
    let LayerSpec {
        mixer_norm: _,
        mixer,
        mixer_post_norm: _,
        feed_forward_norm: _,
        feed_forward,
        feed_forward_post_norm: _,
        residual,
        output_scale: _,
    } = layer;
    match residual {
        Residual::Sequential { scale: _ } | Residual::Parallel | Residual::PostNorm { .. } => {}
    }
    match mixer {
        Mixer::Attention(AttentionSpec {
            qk_norm: Some(QkNorm { over: NormOver::Row, after_rope: true, kind: _, eps: _ }),
            ..
        }) => return Err("norms of whole rows of queries and keys after RoPE"),
        Mixer::Attention(a) if a.output_gate && fast_attention(a, LayerPages::UNKNOWN).is_none() => {
            return Err("gates of what attention of that kind gives");
        }
        Mixer::Attention(_) | Mixer::LatentAttention(_) | Mixer::Rwkv6(_) | Mixer::Rwkv7(_) | Mixer::None => {}
        Mixer::Mamba(MambaSpec { n_tap, d_state, .. }) | Mixer::Mamba2(Mamba2Spec { n_tap, d_state, .. }) => {
            mamba(*n_tap, *d_state)?;
        }
        Mixer::AttentionAndMamba2(both) => mamba(both.mamba2.n_tap, both.mamba2.d_state)?,
        Mixer::ShortConv(ShortConvSpec { width: _, n_tap }) => {
            if *n_tap > MAX_TAPS {
                return Err("short convolutions with more taps than the kernels support");
            }
        }
        Mixer::DeltaRule(of) => {
            match of.gates {
                DeltaGates::OfHeads { paired: _ } => {}
                DeltaGates::OfChannels { rank: _ } if of.n_decays() == of.n_values() => {}
                DeltaGates::OfChannels { rank: _ } => {
                    return Err("a decay for each channel of keys that are not as long as values");
                }
            }
            if of.n_tap > ConvolutionShape::MAX_WIDTH {
                return Err("short convolutions with more taps than the kernels support");
            }
        }
    }
    match feed_forward {
        FeedForward::Dense(_) | FeedForward::ChannelMix(_) | FeedForward::None => Ok(()),
        FeedForward::Experts(e) => experts(e),
    }
}

/// Most elements of a row of a Mamba state: the kernels hold a row in registers and workgroup memory.
const MAX_STATE: usize = 512;

/// Checks the taps of a Mamba layer's convolution and the elements of its state for each channel.
fn mamba(n_tap: usize, d_state: usize) -> Result<(), &'static str> {
    if n_tap > ConvolutionShape::MAX_WIDTH {
        return Err("convolutions of Mamba with more taps than the kernels support");
    }
    if d_state > MAX_STATE { Err("states of Mamba with more elements than the kernels support") } else { Ok(()) }
}

/// Checks a mixture of experts.
fn experts(e: &Experts) -> Result<(), &'static str> {
    let Experts { n_expert, n_used, expert, biases: _, latent, router, expert_norms: _, shared } = e;
    if latent.is_some() {
        return Err("experts over a narrower row");
    }
    if *n_used > MAX_USED_EXPERTS || *n_expert > MAX_EXPERTS {
        return Err("more experts than the kernels support");
    }
    let Router { score: _, choice_bias: _, renormalize: _, scale: _, groups: _, weights_inputs: _ } = router;
    match expert.activation {
        Activation::Silu | Activation::Gelu | Activation::ReluSquared | Activation::ClampedSwiglu { limit: _ } => {}
        Activation::SparseGelu { n_std: _ } => return Err("experts with a sparse GELU"),
    }
    match shared {
        Some(SharedExpert { dense: _, gated: _, plain_names: _ }) | None => Ok(()),
    }
}

/// Where the keys and values of a layer are stored.
#[derive(Debug, Clone, Copy)]
struct LayerPages {
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
}

/// The kernels that run a layer's mixer, with their sizes; the sizes of recurrent kernels follow from the spec alone.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum MixerKernels {
    /// Softmax attention.
    Attention(AttentionKernels),
    /// Latent attention (MLA), by the general attention kernel over compressed rows.
    Latent(LatentInputsShape, GeneralAttention),
    /// A gated short convolution.
    ShortConv(ShortConvSpec),
    /// A gated delta rule.
    DeltaRule(DeltaRuleSpec),
    /// Mamba: a selective state space with a decay for each channel.
    Mamba(MambaSpec),
    /// Mamba-2: a selective state space with a decay for each head.
    Mamba2(Mamba2Spec),
    /// Softmax attention and Mamba-2 side by side, on the same input; their results are added.
    AttentionAndMamba2(AttentionKernels, Mamba2Spec),
    /// The time mix of RWKV-6.
    Rwkv6(Rwkv6Spec),
    /// The time mix of RWKV-7.
    Rwkv7(Rwkv7Spec),
    /// The layer has no mixer.
    None,
}

/// The kernels that run softmax attention; see the top of this file.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum AttentionKernels {
    /// `rope_append` or none, then `prefill_attention` or `decode_attention`.
    Fast(AttentionShape),
    /// `attention_inputs`, then `general_attention`.
    General(AttentionInputsShape, GeneralAttention),
}

impl AttentionKernels {
    /// Elements of a token's queries, keys and values as they are projected, gates of heads included.
    pub(super) fn qkv_len(&self) -> usize {
        match self {
            Self::Fast(shape) => shape.qkv_len(),
            Self::General(inputs, _) => inputs.projected(),
        }
    }

    /// These kernels, for rows of Q, K and V with `n_trailing` more elements behind them: the inputs of the mixer that
    /// runs in parallel with attention.
    fn with_trailing(self, n_trailing: usize) -> Self {
        match self {
            Self::Fast(shape) => Self::Fast(AttentionShape { n_trailing, ..shape }),
            Self::General(inputs, attention) => Self::General(AttentionInputsShape { n_trailing, ..inputs }, attention),
        }
    }
}

impl MixerKernels {
    /// The kernels of each layer.
    ///
    /// # Panics
    /// If `weights` were not loaded for `spec`.
    pub(super) fn of_layers(spec: &ModelSpec, weights: &Weights, groups: &CacheGroups, cache: CacheType) -> Vec<Self> {
        let pages = |i| LayerPages { n_ctx: groups.capacity().n_positions(), group: groups.of_layer(i), cache };
        let of_layer = |(i, (layer, w)): (usize, (&LayerSpec, &LayerWeights))| match (&layer.mixer, &w.mixer) {
            (Mixer::Attention(a), MixerWeights::Attention(w)) => Self::Attention(AttentionKernels::new(a, w, pages(i))),
            (Mixer::LatentAttention(a), MixerWeights::LatentAttention(_)) => Self::of_latent_attention(a, pages(i)),
            (Mixer::ShortConv(of), MixerWeights::ShortConv(_)) => Self::ShortConv(*of),
            (Mixer::DeltaRule(of), MixerWeights::DeltaRule(_)) => Self::DeltaRule(*of),
            (Mixer::Mamba(of), MixerWeights::Mamba(_)) => Self::Mamba(*of),
            (Mixer::Mamba2(of), MixerWeights::Mamba2(_)) => Self::Mamba2(*of),
            (Mixer::AttentionAndMamba2(both), MixerWeights::AttentionAndMamba2(w)) => {
                let attention = AttentionKernels::new(&both.attention, &w.attention, pages(i));
                Self::AttentionAndMamba2(attention.with_trailing(both.mamba2.input_width()), both.mamba2)
            }
            (Mixer::None, MixerWeights::None) => Self::None,
            (Mixer::Rwkv6(of), MixerWeights::Rwkv6(_)) => Self::Rwkv6(*of),
            (Mixer::Rwkv7(of), MixerWeights::Rwkv7(_)) => Self::Rwkv7(*of),
            (
                Mixer::Attention(_)
                | Mixer::LatentAttention(_)
                | Mixer::ShortConv(_)
                | Mixer::Mamba(_)
                | Mixer::Mamba2(_)
                | Mixer::AttentionAndMamba2(_)
                | Mixer::DeltaRule(_)
                | Mixer::Rwkv6(_)
                | Mixer::Rwkv7(_)
                | Mixer::None,
                _,
            ) => {
                panic!("the weights are those of the layers: both were made from one description")
            }
        };
        spec.layers.iter().zip(&weights.layers).enumerate().map(of_layer).collect()
    }
}

impl AttentionKernels {
    fn new(a: &AttentionSpec, w: &AttentionWeights, pages: LayerPages) -> Self {
        let has_bias = |norm: &Option<NormWeights>| norm.as_ref().is_some_and(|norm| norm.bias.is_some());
        let qk_norm_bias = has_bias(&w.q_norm) || has_bias(&w.k_norm);
        if let Some(shape) = fast_attention(a, pages).filter(|_| !qk_norm_bias) {
            return Self::Fast(shape);
        }
        let AttentionSpec {
            n_head,
            n_head_kv,
            head_dim,
            scale,
            mask,
            positions,
            soft_cap,
            sinks,
            qk_norm,
            value_norm,
            clamp_qkv,
            kv,
            temperature,
            qkv_bias: _,
            fused_qkv: _,
            output_gate,
        } = *a;
        assert!(!output_gate, "gates of such attention are refused before its kernels are chosen");
        let (rope, slopes) = match positions {
            Positions::None => (None, false),
            Positions::Rope(rope) => (Some((rope.n_rot, rope.layout)), false),
            Positions::Alibi { max_bias: _ } => (None, true),
        };
        let kv = match kv {
            KvSource::Own => KvInputs::Own,
            KvSource::KeysAsValues => KvInputs::KeysAsValues,
            KvSource::Layer(_) => KvInputs::None,
        };
        let LayerPages { n_ctx, group, cache } = pages;
        let inputs = AttentionInputsShape {
            n_head,
            n_head_kv,
            head_dim,
            rope,
            qk_norm,
            qk_norm_bias,
            value_norm,
            clamp: clamp_qkv,
            kv,
            n_ctx,
            group,
            cache,
            n_trailing: 0,
        };
        let attention = GeneralAttention {
            n_head,
            n_head_kv,
            key_dim: head_dim,
            value_dim: head_dim,
            scale,
            mask,
            soft_cap,
            sinks,
            slopes,
            temperature,
            n_ctx,
            group,
            cache,
        };
        Self::General(inputs, attention)
    }
}

impl MixerKernels {
    fn of_latent_attention(a: &LatentAttentionSpec, pages: LayerPages) -> Self {
        let LatentAttentionSpec {
            n_head,
            q_rank: _,
            kv_rank,
            n_nope,
            value_dim: _,
            shared_dim,
            rope,
            scale,
            eps,
            temperature,
            fused_expansions: _,
        } = *a;
        let LayerPages { n_ctx, group, cache } = pages;
        let inputs = LatentInputsShape {
            n_head,
            n_nope,
            shared_dim,
            layout: rope.map(|rope| rope.layout),
            rank: kv_rank,
            eps,
            n_ctx,
            group,
            cache,
        };
        let attention = GeneralAttention {
            n_head,
            n_head_kv: 1,
            key_dim: kv_rank + shared_dim,
            value_dim: kv_rank,
            scale,
            mask: Mask::Causal,
            soft_cap: None,
            sinks: false,
            slopes: false,
            temperature,
            n_ctx,
            group,
            cache,
        };
        Self::Latent(inputs, attention)
    }

    /// Bytes of a page of the layer's keys, and of its values. `None`: the layer has no KV cache, or reads another
    /// layer's.
    pub(super) fn page_bytes(&self) -> Option<[u64; 2]> {
        match self {
            Self::Attention(attention) | Self::AttentionAndMamba2(attention, _) => match attention {
                AttentionKernels::Fast(shape) => Some([shape.cache_bytes(1); 2]),
                AttentionKernels::General(inputs, attention) => {
                    (inputs.kv != KvInputs::None).then(|| attention.page_bytes())
                }
            },
            Self::Latent(_, attention) => Some(attention.page_bytes()),
            Self::ShortConv(_)
            | Self::DeltaRule(_)
            | Self::Mamba(_)
            | Self::Mamba2(_)
            | Self::Rwkv6(_)
            | Self::Rwkv7(_)
            | Self::None => None,
        }
    }

    /// Bytes of the partial results of split-KV attention for a decode step of `n_tokens` sequences.
    pub(super) fn partial_bytes(&self, n_tokens: usize) -> u64 {
        match self {
            Self::Attention(attention) | Self::AttentionAndMamba2(attention, _) => match attention {
                AttentionKernels::Fast(shape) => crate::kernels::partial_bytes(shape, n_tokens),
                AttentionKernels::General(_, attention) => attention.partial_bytes(n_tokens),
            },
            Self::Latent(_, attention) => attention.partial_bytes(n_tokens),
            Self::ShortConv(_)
            | Self::DeltaRule(_)
            | Self::Mamba(_)
            | Self::Mamba2(_)
            | Self::Rwkv6(_)
            | Self::Rwkv7(_)
            | Self::None => 0,
        }
    }
}

/// The fast kernels for `a`, if they support it: causal attention, with or without a window, with RoPE or no positions,
/// with an optional RMSNorm of each head before RoPE, and either a cap on the scores or sinks.
fn fast_attention(a: &AttentionSpec, pages: LayerPages) -> Option<AttentionShape> {
    let AttentionSpec {
        n_head,
        n_head_kv,
        head_dim,
        scale,
        mask,
        positions,
        soft_cap,
        sinks,
        qk_norm,
        value_norm,
        clamp_qkv,
        kv,
        temperature,
        qkv_bias: _,
        fused_qkv: _,
        output_gate,
    } = *a;
    let window = match mask {
        Mask::Causal => None,
        Mask::Window(window) => Some(window),
        Mask::Chunk(_) | Mask::Full | Mask::SymmetricWindow(_) => return None,
    };
    let (n_rot, rope_layout) = match positions {
        Positions::Rope(rope) => (rope.n_rot, rope.layout),
        Positions::None => (UNROTATED_ELEMENTS, RopeLayout::Halves),
        Positions::Alibi { max_bias: _ } => return None,
    };
    let qk_norm_eps = match qk_norm {
        None => None,
        Some(QkNorm { kind: NormKind::Rms, eps, over: NormOver::Head, after_rope: false }) => Some(eps),
        Some(QkNorm { kind: NormKind::Rms | NormKind::Layer, eps: _, over: _, after_rope: _ }) => return None,
    };
    let own = match kv {
        KvSource::Own => true,
        KvSource::KeysAsValues | KvSource::Layer(_) => false,
    };
    let LayerPages { n_ctx, group, cache } = pages;
    let others = value_norm.is_some() || clamp_qkv.is_some() || temperature.is_some() || sinks && qk_norm.is_some();
    let fits = n_rot <= head_dim && head_dim <= MAX_FAST_HEAD_DIM;
    (own && !others && fits).then_some(AttentionShape {
        n_head,
        n_head_kv,
        head_dim,
        scale,
        soft_cap,
        sinks,
        window,
        n_ctx,
        group,
        n_rot,
        rope_layout,
        qk_norm_eps,
        gated: output_gate,
        cache,
        n_trailing: 0,
    })
}

/// Elements of each head that RoPE turns by an angle of 0 in layers without RoPE. The fast kernels need at least one
/// pair.
pub(super) const UNROTATED_ELEMENTS: usize = 2;

/// A layer that the persistent kernel supports: fast attention, then a dense feed-forward gated by `SiLU`, each with an
/// RMSNorm before it and a plain residual join.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct PlainLayer {
    /// Sizes of the attention.
    pub(super) attention: AttentionShape,
    /// Width of the feed-forward.
    pub(super) n_ff: usize,
    /// Epsilon of both norms.
    pub(super) norm_eps: f32,
}

/// The weights of such a layer in the file.
#[derive(Debug, Clone, Copy)]
pub(super) struct PlainWeights<'a> {
    /// Weight of the norm before attention, `[n_embd]`.
    pub(super) mixer_norm: &'a [f32],
    /// Weights of the attention.
    pub(super) attention: &'a AttentionWeights,
    /// The key projection.
    pub(super) k: &'a Linear,
    /// The value projection.
    pub(super) v: &'a Linear,
    /// Weight of the norm before the feed-forward, `[n_embd]`.
    pub(super) feed_forward_norm: &'a [f32],
    /// The gate projection.
    pub(super) gate: &'a Linear,
    /// The up projection.
    pub(super) up: &'a Linear,
    /// The down projection.
    pub(super) down: &'a Linear,
}

/// All layers with their weights, if every one is a [`PlainLayer`]; else `None`.
pub(super) fn plain_layers<'a>(
    spec: &ModelSpec,
    weights: &'a Weights,
    mixers: &[MixerKernels],
) -> Option<Vec<(PlainLayer, PlainWeights<'a>)>> {
    let InputEmbedding { scale: _, n_token_types: _, n_positions: _, norm: _, per_layer, streams } = &spec.embedding;
    if per_layer.is_some() || streams.is_some() {
        return None;
    }
    let layers = spec.layers.iter().zip(&weights.layers).zip(mixers);
    layers.map(|((layer, w), mixer)| Some((plain_layer(layer, mixer)?, plain_weights(w)?))).collect()
}

fn plain_layer(layer: &LayerSpec, mixer_kernels: &MixerKernels) -> Option<PlainLayer> {
    let LayerSpec {
        mixer_norm,
        mixer: _,
        mixer_post_norm,
        feed_forward_norm,
        feed_forward,
        feed_forward_post_norm,
        residual,
        output_scale,
    } = layer;
    let (Some(mixer_norm), Some(feed_forward_norm)) = (mixer_norm, feed_forward_norm) else { return None };
    let rms = |norm: &Norm| norm.kind == NormKind::Rms;
    let alike = rms(mixer_norm) && rms(feed_forward_norm) && mixer_norm.eps == feed_forward_norm.eps;
    let added_as_it_is = *residual == Residual::Sequential { scale: 1.0 };
    let more =
        mixer_post_norm.is_some() || feed_forward_post_norm.is_some() || *output_scale != OutputScale::Fixed(1.0);
    if !alike || !added_as_it_is || more {
        return None;
    }
    let attention = match mixer_kernels {
        MixerKernels::Attention(AttentionKernels::Fast(shape))
            if shape.soft_cap.is_none() && !shape.sinks && !shape.gated =>
        {
            *shape
        }
        MixerKernels::Attention(_)
        | MixerKernels::Latent(..)
        | MixerKernels::ShortConv(_)
        | MixerKernels::DeltaRule(_)
        | MixerKernels::Mamba(_)
        | MixerKernels::Mamba2(_)
        | MixerKernels::AttentionAndMamba2(..)
        | MixerKernels::Rwkv6(_)
        | MixerKernels::Rwkv7(_)
        | MixerKernels::None => return None,
    };
    match feed_forward {
        FeedForward::Dense(Dense { n_ff, gated: true, activation: Activation::Silu, fused: _ }) => {
            Some(PlainLayer { attention, n_ff: *n_ff, norm_eps: mixer_norm.eps })
        }
        FeedForward::Dense(_) | FeedForward::Experts(_) | FeedForward::ChannelMix(_) | FeedForward::None => None,
    }
}

fn plain_weights(w: &LayerWeights) -> Option<PlainWeights<'_>> {
    let attention = match &w.mixer {
        MixerWeights::Attention(a) => a,
        MixerWeights::LatentAttention(_)
        | MixerWeights::ShortConv(_)
        | MixerWeights::Mamba(_)
        | MixerWeights::Mamba2(_)
        | MixerWeights::AttentionAndMamba2(_)
        | MixerWeights::DeltaRule(_)
        | MixerWeights::Rwkv6(_)
        | MixerWeights::Rwkv7(_)
        | MixerWeights::None => return None,
    };
    let DenseWeights { gate, up, down } = match &w.feed_forward {
        FeedForwardWeights::Dense(dense) => dense,
        FeedForwardWeights::Experts(_) | FeedForwardWeights::ChannelMix(_) | FeedForwardWeights::None => return None,
    };
    let without_bias = |norm: &Option<NormWeights>| norm.as_ref().is_some_and(|norm| norm.bias.is_none());
    if !without_bias(&w.mixer_norm) || !without_bias(&w.feed_forward_norm) {
        return None;
    }
    Some(PlainWeights {
        mixer_norm: &w.mixer_norm.as_ref()?.weight,
        attention,
        k: attention.k.as_ref()?,
        v: attention.v.as_ref()?,
        feed_forward_norm: &w.feed_forward_norm.as_ref()?.weight,
        gate: gate.as_ref()?,
        up,
        down,
    })
}

/// The factor and the cap on the logits, if they are more than a product.
pub(super) fn scaled_logits(head: &OutputHead) -> Option<(f32, Option<f32>)> {
    let OutputHead { scale, soft_cap, matrix: _, may_have_bias: _ } = *head;
    (scale != 1.0 || soft_cap.is_some()).then_some((scale, soft_cap))
}
