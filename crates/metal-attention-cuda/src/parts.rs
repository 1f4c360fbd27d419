//! What this backend knows of a model: every part is matched here, and goes to fast kernels, to general ones, or is refused by
//! name.

use metal_attention_model::{
    Activation, AttentionSpec, Dense, DenseWeights, Embedding, Experts, FeedForward, KvSource, LatentAttentionSpec,
    LayerSpec, Mamba2Spec, MambaDecay, Mask, Mixer, ModelSpec, NormKind, NormOver, OutputScale, OutputSpec, Positions,
    QkNorm, Residual, RopeLayout, Router,
};

use crate::CudaError;
use crate::args::HeadArgs;
use crate::matrix::Format;

/// Elements of a head that attention over pages has room for, and that of any kind.
const MAX_PAGED_HEAD_DIM: usize = 256;
const MAX_HEAD_DIM: usize = 512;
/// Residual streams that `streams.cu` has room for.
const MAX_STREAMS: usize = 8;
/// Elements of a key of a recurrence: `WALKS` of `recurrence.cuh`.
const MAX_KEY: usize = 256;
/// Elements of a channel's state in Mamba, whose walk has four threads for a column.
const MAX_CHANNEL_STATE: usize = 64;
/// Tokens that a convolution sees: `MAX_TAPS` of `recurrent.cu`.
const MAX_TAPS: usize = 16;
/// Elements of a compressed row that is a value: `PAIRS` of `latent_attention.cu` for each lane.
const MAX_LATENT: usize = 512;
/// Experts, and those of a token: `MAX_CHOSEN` of `experts.cu`.
const MAX_EXPERTS: usize = 1024;
const MAX_CHOSEN: usize = 64;

/// Whether there are kernels for every part of `spec`; otherwise the part that lacks them.
pub(crate) fn supports(spec: &ModelSpec) -> Result<(), CudaError> {
    let parts = || {
        // Scale, token types, positions, norm and embeddings for each layer are all run.
        let Embedding { scale: _, token_types: _, positions: _, norm: _, per_layer, streams } = &spec.embedding;
        if let Some(streams) = streams {
            // What the file's format has of them: a layer corrects the streams when it comes to its own embedding.
            let alone = per_layer.is_none() || streams.active != 0 || streams.n > MAX_STREAMS;
            let of_a_kind = spec.layers.iter().all(|layer| matches!(layer.residual, Residual::Sequential { .. }));
            if alone || !of_a_kind {
                return Err("residual streams but for those of Gemma 3n");
            }
        }
        // What follows pooling is no matter of a forward pass.
        let OutputSpec { norm: _, head: _, pooling: _, dense: _, classifier: _ } = &spec.output;
        spec.layers.iter().try_for_each(layer)
    };
    parts().map_err(|part| CudaError::UnsupportedPart { part })
}

fn layer(layer: &LayerSpec) -> Result<(), &'static str> {
    let LayerSpec {
        mixer_norm: _,
        mixer,
        mixer_post_norm: _,
        feed_forward_norm: _,
        feed_forward,
        feed_forward_post_norm: _,
        residual,
        output_scale,
    } = layer;
    match residual {
        Residual::Sequential { scale: _ } | Residual::Parallel | Residual::PostNorm { .. } => {}
    }
    match output_scale {
        OutputScale::Fixed(_) | OutputScale::Stored => {}
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
        FeedForward::Experts(of) => experts(of),
        FeedForward::Dense(Dense { n_ff: _, gated: _, activation: _, fused: _ })
        | FeedForward::ChannelMix(_)
        | FeedForward::None => Ok(()),
    }
}

fn experts(of: &Experts) -> Result<(), &'static str> {
    let Experts { n_expert, n_used, expert, biases: _, latent: _, router, expert_norms: _, shared: _ } = of;
    let Router { score: _, choice_bias: _, renormalize: _, scale: _, groups: _, weight_input: _ } = router;
    if *n_expert > MAX_EXPERTS || *n_used > MAX_CHOSEN || n_used > n_expert {
        return Err("that many experts");
    }
    match expert.activation {
        Activation::Silu | Activation::Gelu | Activation::ReluSquared | Activation::ClampedSwiglu { limit: _ } => {
            Ok(())
        }
        Activation::SparseGelu { n_std: _ } => Err("experts with sparse GELU"),
    }
}

fn latent_attention(a: &LatentAttentionSpec) -> Result<(), &'static str> {
    // Products read four elements at once.
    let unaligned = [a.kv_rank, a.n_nope, a.head_dim()].iter().any(|n| n % 4 != 0);
    if a.kv_rank > MAX_LATENT || !a.shared_dim.is_multiple_of(2) || unaligned {
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

/// `Activation` of `common.cuh` and, after it, of `activation.cu`, and its parameter.
pub(crate) fn activation_code(activation: Activation) -> (u32, f32) {
    match activation {
        Activation::Silu => (0, 0.0),
        Activation::Gelu => (1, 0.0),
        Activation::ReluSquared => (2, 0.0),
        Activation::ClampedSwiglu { limit } => (3, limit),
        Activation::SparseGelu { n_std } => (4, n_std),
    }
}

/// Whether the product of gate and up goes through the activation by itself.
pub(crate) fn on_the_way(dense: &Dense, weights: &DenseWeights) -> bool {
    let known = match dense.activation {
        Activation::Silu | Activation::Gelu | Activation::ReluSquared => true,
        Activation::ClampedSwiglu { limit: _ } | Activation::SparseGelu { n_std: _ } => false,
    };
    let DenseWeights { gate, up, down: _ } = weights;
    known
        && gate.as_ref().is_some_and(|gate| {
            let alike = Format::of(gate.weight.ty()) == Format::of(up.weight.ty());
            alike && gate.bias.is_none() && up.bias.is_none()
        })
}

/// `NormKind` of `norm.cu`.
pub(crate) fn norm_kind(kind: NormKind) -> u32 {
    match kind {
        NormKind::Rms => 1,
        NormKind::Layer => 2,
    }
}

/// What makes queries, keys and values of their projections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum InputKernels {
    /// Attention does, or puts into the cache what a batch has.
    OnTheWay,
    /// Attention does of tokens that are alone in their sequences; of others a kernel that knows all parts.
    OnTheWayAlone,
    /// A kernel that knows all parts.
    Apart,
}

/// What runs softmax attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AttentionKernels {
    /// Kernels that take pages as a whole.
    Paged,
    /// One that knows all parts.
    General,
}

/// The kernels that run attention; `norm_bias`: whether norms of queries or keys add something.
pub(crate) fn attention_kernels(a: &AttentionSpec, norm_bias: bool) -> (InputKernels, AttentionKernels) {
    let AttentionSpec {
        n_head: _,
        n_head_kv: _,
        head_dim,
        scale: _,
        mask,
        positions,
        soft_cap: _,
        sinks: _,
        qk_norm,
        value_norm,
        clamp_qkv,
        kv,
        temperature,
        qkv_bias: _,
        fused_qkv: _,
        output_gate,
    } = a;
    let paged = head_dim % 8 == 0
        && *head_dim <= MAX_PAGED_HEAD_DIM
        && mask.is_causal()
        && match positions {
            Positions::None | Positions::Rope(_) => true,
            Positions::Alibi { max_bias: _ } => false,
        };
    let norms = qk_norm.is_none_or(|QkNorm { kind, eps: _, over, after_rope: _ }| {
        kind == NormKind::Rms && over != NormOver::Row && !norm_bias
    });
    let plain = norms && value_norm.is_none() && clamp_qkv.is_none() && temperature.is_none();
    let on_the_way = paged && plain && *kv == KvSource::Own;
    (
        match (on_the_way, output_gate) {
            (true, false) => InputKernels::OnTheWay,
            (true, true) => InputKernels::OnTheWayAlone,
            (false, _) => InputKernels::Apart,
        },
        if paged { AttentionKernels::Paged } else { AttentionKernels::General },
    )
}

fn attention(a: &AttentionSpec) -> Result<(), &'static str> {
    if a.head_dim > MAX_HEAD_DIM {
        return Err("heads of that many elements");
    }
    head_codes(a).map(|_| ())
}

/// `Mask` of the attention kernels, and how far it reaches.
pub(crate) fn mask_code(mask: Mask) -> (u32, u32) {
    // Contexts are no longer than 32 bits count.
    let reach = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    match mask {
        Mask::Causal => (0, 0),
        Mask::Window(n) => (1, reach(n)),
        Mask::Chunk(n) => (2, reach(n)),
        Mask::Full => (3, 0),
        Mask::SymmetricWindow(n) => (4, reach(n)),
    }
}

/// What becomes of queries and keys, without the weights and tables that it takes.
pub(crate) fn head_codes(a: &AttentionSpec) -> Result<HeadArgs, &'static str> {
    let (norm, norm_after_rope, eps) = match a.qk_norm {
        None => (0, false, 0.0),
        Some(QkNorm { over: NormOver::Row, after_rope: true, kind: _, eps: _ }) => {
            return Err("norms of whole rows of queries and keys after RoPE");
        }
        Some(QkNorm { kind: _, eps, over, after_rope }) => {
            let norm = match over {
                NormOver::Head => 1,
                NormOver::EachHead => 2,
                NormOver::Unweighted => 3,
                NormOver::Row => 4,
            };
            (norm, after_rope, eps)
        }
    };
    let (rotation, n_rot) = match a.positions {
        Positions::None | Positions::Alibi { max_bias: _ } => (0, 0),
        Positions::Rope(rope) => match rope.layout {
            RopeLayout::Interleaved => (1, rope.n_rot),
            RopeLayout::Halves => (2, rope.n_rot),
        },
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
