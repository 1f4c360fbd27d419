//! [`supports`]: which models the CUDA kernels can run, and which kernels run which attention. Every part of a model is matched
//! here without a wildcard, so that a new part has to be mapped to kernels or rejected by name.

use metal_attention_model::{
    Activation, AttentionSpec, Dense, DenseWeights, Experts, FeedForward, InputEmbedding, KvSource,
    LatentAttentionSpec, LayerSpec, Mamba2Spec, MambaDecay, Mask, Mixer, ModelSpec, NormKind, NormOver, OutputScale,
    OutputSpec, Positions, QkNorm, Residual, RopeLayout, Router,
};

use crate::CudaError;
use crate::args::HeadArgs;
use crate::matrix::WeightLayout;
use crate::slice::DevicePtr;

/// Most elements of a head for the kernels that load whole KV pages.
const MAX_PAGED_HEAD_DIM: usize = 256;
/// Most elements of a head for the general attention kernel.
const MAX_HEAD_DIM: usize = 512;
/// Most residual streams: `MAX_STREAMS` of `streams.cu`.
const MAX_STREAMS: usize = 8;
/// Most elements of a key of a recurrent mixer, as `recurrence.cuh` has kernels for.
const MAX_KEY: usize = 256;
/// Most elements of a channel's state in Mamba, whose scan has four threads for a column.
const MAX_CHANNEL_STATE: usize = 64;
/// Most taps of a convolution: `MAX_TAPS` of `recurrent.cu`.
const MAX_TAPS: usize = 16;
/// Most elements of the value part of a compressed row: `PAIRS` of `latent_attention.cu` for each lane.
const MAX_LATENT: usize = 512;
/// Most experts of a layer.
const MAX_EXPERTS: usize = 1024;
/// Most experts of a token: `MAX_CHOSEN` of `routing.cuh`.
const MAX_CHOSEN: usize = 64;

/// Checks that there are kernels for every part of `spec`. The error names the first part without kernels.
pub(crate) fn supports(spec: &ModelSpec) -> Result<(), CudaError> {
    let parts = || {
        // There are kernels for all of these.
        let InputEmbedding { scale: _, n_token_types: _, n_positions: _, norm: _, per_layer, streams } =
            &spec.embedding;
        if let Some(streams) = streams {
            // As in Gemma 3n files: layers correct the streams where they add their per-layer embedding, so both have to be
            // there, and the first stream is the one that layers compute with.
            let alone = per_layer.is_none() || streams.active != 0 || streams.n > MAX_STREAMS;
            let of_a_kind = spec.layers.iter().all(|layer| matches!(layer.residual, Residual::Sequential { .. }));
            if alone || !of_a_kind {
                return Err("residual streams but for those of Gemma 3n");
            }
        }
        // Pooling and what follows it are computed on the host.
        let OutputSpec { norm: _, head: _, pooling: _, pooled_projections: _, classifier: _ } = &spec.output;
        spec.layers.iter().try_for_each(layer)
    };
    parts().map_err(|part| CudaError::UnsupportedPart { part })
}

/// Checks a layer.
fn layer(layer: &LayerSpec) -> Result<(), &'static str> {
    let LayerSpec {
        mixer_norm: _,
        mixer,
        mixer_post_norm: _,
        feed_forward_norm: _,
        feed_forward,
        feed_forward_post_norm: _,
        residual,
        // Models with these are those of Gemma 3n and 4, which the kernels support.
        embedding: _,
        streams: _,
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

/// Checks a mixture of experts.
fn experts(of: &Experts) -> Result<(), &'static str> {
    let Experts { n_expert, n_used, expert, biases: _, latent: _, router, expert_norms: _, shared: _ } = of;
    let Router { score: _, choice_bias: _, renormalize: _, scale: _, groups: _, weights_inputs: _ } = router;
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

/// Checks latent attention.
fn latent_attention(a: &LatentAttentionSpec) -> Result<(), &'static str> {
    // Grouped products read four elements at a time.
    let unaligned = [a.kv_rank, a.n_nope, a.head_dim()].iter().any(|n| n % 4 != 0);
    if a.kv_rank > MAX_LATENT || !a.shared_dim.is_multiple_of(2) || unaligned {
        return Err("latent attention over rows of that many elements");
    }
    Ok(())
}

/// Checks a Mamba-2 mixer.
fn mamba2(of: &Mamba2Spec) -> Result<(), &'static str> {
    taps(of.n_tap)?;
    keys(of.d_state)
}

/// Checks the number of taps of a convolution.
fn taps(n: usize) -> Result<(), &'static str> {
    if n > MAX_TAPS { Err("convolutions over that many tokens") } else { Ok(()) }
}

/// Checks the key size of a recurrent state.
fn keys(n: usize) -> Result<(), &'static str> {
    if n > MAX_KEY { Err("recurrent states of that many rows") } else { Ok(()) }
}

/// The activation's number in the kernels (`Activation` of `common.cuh`; the last one only in `activation.cu`), and its
/// parameter.
pub(crate) fn activation_code(activation: Activation) -> (u32, f32) {
    match activation {
        Activation::Silu => (0, 0.0),
        Activation::Gelu => (1, 0.0),
        Activation::ReluSquared => (2, 0.0),
        Activation::ClampedSwiglu { limit } => (3, limit),
        Activation::SparseGelu { n_std } => (4, n_std),
    }
}

/// Whether the epilogue of the product of gate and up can apply the activation: a known activation, equal weight layouts, and
/// no biases.
pub(crate) fn fuses_activation(weights: &DenseWeights) -> bool {
    let DenseWeights { spec, gate, up, down: _ } = weights;
    let known = match spec.activation {
        Activation::Silu | Activation::Gelu | Activation::ReluSquared => true,
        Activation::ClampedSwiglu { limit: _ } | Activation::SparseGelu { n_std: _ } => false,
    };
    known
        && gate.as_ref().is_some_and(|gate| {
            let alike = WeightLayout::of(gate.weight.ty()) == WeightLayout::of(up.weight.ty());
            alike && gate.bias.is_none() && up.bias.is_none()
        })
}

/// The norm's number in the kernels: `NormKind` of `norm.cu`.
pub(crate) fn norm_kind(kind: NormKind) -> u32 {
    match kind {
        NormKind::Rms => 1,
        NormKind::Layer => 2,
    }
}

/// The kernel that makes queries, keys and values of their projections: norm, RoPE, and the append to the KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum QkvKernels {
    /// In decode steps the attention kernel itself; in prefill a small one before it (`append_*`).
    Fused,
    /// In decode steps the attention kernel itself; in prefill the separate kernel, since `append_*` knows no gates.
    FusedInDecode,
    /// A separate kernel that knows all norms, clamps and scales (`attention_inputs.cu`).
    Separate,
}

/// The kernels that compute softmax attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AttentionKernels {
    /// Kernels that load whole KV pages: `attention.cu`, `attention_on_units.cu`, `prefill_attention.cu`.
    Paged,
    /// The kernel for every mask and head size, and ALiBi: `general_attention.cu`.
    General,
}

/// The kernels for an attention. `norm_bias`: whether the norms of queries or keys have a bias.
pub(crate) fn attention_kernels(a: &AttentionSpec, norm_bias: bool) -> (QkvKernels, AttentionKernels) {
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
    let fuses_activation = paged && plain && *kv == KvSource::Own;
    (
        match (fuses_activation, output_gate) {
            (true, false) => QkvKernels::Fused,
            (true, true) => QkvKernels::FusedInDecode,
            (false, _) => QkvKernels::Separate,
        },
        if paged { AttentionKernels::Paged } else { AttentionKernels::General },
    )
}

/// Checks softmax attention.
fn attention(a: &AttentionSpec) -> Result<(), &'static str> {
    if a.head_dim > MAX_HEAD_DIM {
        return Err("heads of that many elements");
    }
    head_codes(a).map(|_| ())
}

/// The mask's number in the kernels (`masks.cuh`), and the positions of its window or chunk.
pub(crate) fn mask_code(mask: Mask) -> (u32, u32) {
    // Longer contexts than u32 counts do not fit in memory.
    let reach = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    match mask {
        Mask::Causal => (0, 0),
        Mask::Window(n) => (1, reach(n)),
        Mask::Chunk(n) => (2, reach(n)),
        Mask::Full => (3, 0),
        Mask::SymmetricWindow(n) => (4, reach(n)),
    }
}

/// Norm and RoPE of queries and keys, as kernels take them, without the addresses of weights and tables. An error for a
/// combination without a kernel.
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
        q_norm: DevicePtr::NULL,
        k_norm: DevicePtr::NULL,
        rope: DevicePtr::NULL,
        norm,
        norm_after_rope: u32::from(norm_after_rope),
        rotation,
        n_rot: n_rot as u32,
        eps,
        scale: a.scale,
    })
}
