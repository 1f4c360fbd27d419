//! What this backend knows of a model: layers of the plain kind, or the part that it lacks.

use metal_attention_model::{
    Activation, AttentionSpec, AttentionWeights, Dense, DenseWeights, Embedding, FeedForward, FeedForwardWeights, Head,
    KvSource, LayerSpec, LayerWeights, Linear, Mask, Mixer, MixerWeights, ModelSpec, Norm, NormKind, NormOver, Output,
    Positions, QkNorm, Residual, Rope, Weights,
};

/// A layer of causal attention with RoPE and a feed-forward gated by SiLU, with an RMSNorm before each.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct PlainLayer {
    pub(super) n_head: usize,
    pub(super) n_head_kv: usize,
    pub(super) head_dim: usize,
    pub(super) scale: f32,
    pub(super) window: Option<usize>,
    pub(super) rope: Rope,
    pub(super) qk_norm_eps: Option<f32>,
    pub(super) n_ff: usize,
    pub(super) norm_eps: f32,
}

/// The weights of such a layer.
#[derive(Debug, Clone, Copy)]
pub(super) struct PlainWeights<'a> {
    pub(super) mixer_norm: &'a [f32],
    pub(super) attention: &'a AttentionWeights,
    pub(super) k: &'a Linear,
    pub(super) v: &'a Linear,
    pub(super) feed_forward_norm: &'a [f32],
    pub(super) gate: &'a Linear,
    pub(super) up: &'a Linear,
    pub(super) down: &'a Linear,
}

/// The layers of a model all of which this backend knows; otherwise the part that it lacks.
pub(super) fn plain_layers(spec: &ModelSpec) -> Result<Vec<PlainLayer>, &'static str> {
    let Embedding { scale, token_types, positions, norm, per_layer, streams } = &spec.embedding;
    refuse(*scale != 1.0, "scaled embeddings")?;
    refuse(token_types.is_some(), "token types")?;
    refuse(positions.is_some(), "learned positions")?;
    refuse(norm.is_some(), "a norm of the embedding")?;
    refuse(per_layer.is_some(), "embeddings for each layer")?;
    refuse(streams.is_some(), "several residual streams")?;
    let Output { norm, head, pooling: _, dense: _, classifier: _ } = &spec.output;
    let Some(norm) = norm else { return Err("an output without a norm") };
    let eps = rms(norm)?;
    let Some(Head { scale, soft_cap, tied: _, bias }) = head else { return Err("encoders") };
    refuse(*bias, "a bias of the logits")?;
    refuse(*scale != 1.0, "scaled logits")?;
    refuse(soft_cap.is_some(), "capped logits")?;
    let layers: Vec<PlainLayer> = spec.layers.iter().map(plain_layer).collect::<Result<_, _>>()?;
    refuse(layers.iter().any(|layer| layer.norm_eps != eps), "norms with unlike epsilons")?;
    Ok(layers)
}

fn refuse(has: bool, part: &'static str) -> Result<(), &'static str> {
    if has { Err(part) } else { Ok(()) }
}

fn rms(norm: &Norm) -> Result<f32, &'static str> {
    refuse(!norm.weight, "norms without weights")?;
    refuse(norm.bias, "norms with biases")?;
    match norm.kind {
        NormKind::Rms => Ok(norm.eps),
        NormKind::Layer => Err("Layer norms"),
    }
}

fn plain_layer(layer: &LayerSpec) -> Result<PlainLayer, &'static str> {
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
    let (Some(mixer_norm), Some(feed_forward_norm)) = (mixer_norm, feed_forward_norm) else {
        return Err("layers without a norm before attention or feed-forward");
    };
    let norm_eps = rms(mixer_norm)?;
    refuse(rms(feed_forward_norm)? != norm_eps, "norms with unlike epsilons")?;
    refuse(mixer_post_norm.is_some() || feed_forward_post_norm.is_some(), "norms of results")?;
    match residual {
        Residual::Sequential { scale } => refuse(*scale != 1.0, "scaled residuals")?,
        Residual::Parallel => return Err("attention and feed-forward side by side"),
        Residual::PostNorm { .. } => return Err("norms of sums"),
    }
    refuse(*output_scale, "scaled layers")?;
    let a = match mixer {
        Mixer::Attention(a) => a,
        Mixer::LatentAttention(_) => return Err("latent attention"),
    };
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
    } = *a;
    let window = match mask {
        Mask::Causal => None,
        Mask::Window(window) => Some(window),
        Mask::Chunk(_) => return Err("attention in chunks"),
        Mask::Full | Mask::Near(_) => return Err("attention that is not causal"),
    };
    let rope = match positions {
        Positions::Rope(rope) => rope,
        Positions::None => return Err("attention without positions"),
        Positions::Alibi { .. } => return Err("ALiBi"),
    };
    refuse(soft_cap.is_some(), "capped scores")?;
    refuse(sinks, "attention sinks")?;
    let qk_norm_eps = match qk_norm {
        None => None,
        Some(QkNorm { kind: NormKind::Rms, eps, over: NormOver::Head, after_rope: false }) => Some(eps),
        Some(_) => return Err("norms of queries and keys but for an RMSNorm of each head before RoPE"),
    };
    refuse(value_norm.is_some(), "norms of values")?;
    refuse(clamp_qkv.is_some(), "clamped queries, keys and values")?;
    refuse(kv != KvSource::Own, "keys and values that layers share")?;
    refuse(temperature.is_some(), "queries that grow with their position")?;
    let n_ff = match feed_forward {
        FeedForward::Dense(Dense { n_ff, gated: true, activation: Activation::Silu, fused: _ }) => *n_ff,
        FeedForward::Dense(_) => return Err("feed-forwards but for one gated by SiLU"),
        FeedForward::Experts(_) => return Err("experts"),
    };
    Ok(PlainLayer { n_head, n_head_kv, head_dim, scale, window, rope, qk_norm_eps, n_ff, norm_eps })
}

/// The weights of the layers of a model that [`plain_layers`] took.
pub(super) fn plain_weights(weights: &Weights) -> Vec<PlainWeights<'_>> {
    weights.layers.iter().filter_map(layer_weights).collect()
}

fn layer_weights(w: &LayerWeights) -> Option<PlainWeights<'_>> {
    let attention = match &w.mixer {
        MixerWeights::Attention(a) => a,
        MixerWeights::LatentAttention(_) => return None,
    };
    let DenseWeights { gate, up, down } = match &w.feed_forward {
        FeedForwardWeights::Dense(dense) => dense,
        FeedForwardWeights::Experts(_) => return None,
    };
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
