//! Mamba, Mamba-2 and Jamba: selective state spaces, alone or with attention and experts between them.

use super::decoder::{ExpertDefaults, attention, experts, stack};
use crate::attention::Positions;
use crate::feed_forward::{Activation, Dense, RouterScore};
use crate::metadata_reader::{MAX_TAPS, MetadataReader};
use crate::parts::{FeedForward, Mixer};
use crate::recurrent::{Mamba2Spec, MambaDecay, MambaNorms, MambaSpec};
use crate::spec::NormKind;
use crate::{ModelError, ModelSpec, RopeLayout};

/// Maximum elements of a layer's state: far more than models have.
const MAX_STATE: usize = 1 << 28;

/// Mamba, and Falcon-Mamba, which normalises `dt`, `B` and `C`.
pub(super) fn mamba(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let norm = k.norm(NormKind::Rms)?;
    let normalised = k.opt_bool("ssm.dt_b_c_rms")? == Some(true);
    let norms = normalised.then_some(MambaNorms { weights: false, eps: norm.eps });
    let layer = (Mixer::Mamba(mamba_spec(k, norms)?), FeedForward::None);
    stack(k, norm, vec![layer; k.n_layer()?])
}

/// Mamba-2.
pub(super) fn mamba2(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let norm = k.norm(NormKind::Rms)?;
    let spec = Mamba2Spec { conv_bias: true, ..mamba2_spec(k)? };
    let layer = (Mixer::Mamba2(Mamba2Spec { norm: Some(norm.eps), ..spec }), FeedForward::None);
    stack(k, norm, vec![layer; k.n_layer()?])
}

/// Jamba: Mamba in layers without KV heads, attention without positions in the others, experts in layers that have a
/// router.
pub(super) fn jamba(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let norm = k.norm(NormKind::Rms)?;
    let heads = heads(k)?;
    let n_ff = k.positive("feed_forward_length")?;
    let mamba = mamba_spec(k, Some(MambaNorms { weights: true, eps: norm.eps }))?;
    let defaults = ExpertDefaults { score: RouterScore::Softmax, renormalize: false };
    let experts = k.n_expert()?.map(|_| experts(k, defaults, n_ff)).transpose()?;
    let dense = Dense { n_ff, gated: true, activation: Activation::Silu, fused: false };
    let layer = |(i, &(n_head, n_head_kv)): (usize, &(usize, usize))| {
        let mixer = match n_head_kv {
            0 => Mixer::Mamba(mamba),
            1.. => attention(k, RopeLayout::Halves, n_head, (n_head, n_head_kv))?,
        };
        let sparse = k.has_tensor(&format!("blk.{i}.ffn_gate_inp.weight"), i % 2 == 1);
        let feed_forward = match experts.as_ref().filter(|_| sparse) {
            Some(experts) => FeedForward::Experts(Box::new(experts.clone())),
            None => FeedForward::Dense(dense),
        };
        Ok((mixer, feed_forward))
    };
    let layers = heads.iter().enumerate().map(layer).collect::<Result<_, ModelError>>()?;
    let mut m = stack(k, norm, layers)?;
    m.set_positions(Positions::None);
    Ok(m)
}

/// Query heads and KV heads of each layer. Layers without attention have no KV heads, and may have no query heads.
pub(super) fn heads(k: &MetadataReader<'_>) -> Result<Vec<(usize, usize)>, ModelError> {
    let (n_layer, key) = (k.n_layer()?, "attention.head_count_kv");
    let of_kv = k.per_layer_or_none(key, n_layer)?.ok_or_else(|| k.missing(key))?;
    let key = "attention.head_count";
    let of_queries = k.per_layer_or_none(key, n_layer)?.ok_or_else(|| k.missing(key))?;
    for (&n, &n_kv) in of_queries.iter().zip(&of_kv) {
        k.check(key, n, n > 0 || n_kv == 0, "must be above 0 where there are heads of keys and values")?;
    }
    Ok(of_queries.into_iter().zip(of_kv).collect())
}

/// An error if the state is implausibly large: `width` channels of `d_state` elements, and the inputs of a convolution
/// over `conv_width` channels (`None`: their number overflowed).
fn check_state(
    k: &MetadataReader<'_>,
    width: usize,
    d_state: usize,
    conv_width: Option<usize>,
) -> Result<(), ModelError> {
    let elements = width.checked_mul(d_state).zip(conv_width.and_then(|n| n.checked_mul(MAX_TAPS)));
    let plausible = elements.is_some_and(|(state, inputs)| state.max(inputs) <= MAX_STATE);
    k.check("ssm.state_size", d_state, plausible, "states this large are not plausible")
}

/// Mamba with a decay for each channel.
fn mamba_spec(k: &MetadataReader<'_>, norms: Option<MambaNorms>) -> Result<MambaSpec, ModelError> {
    let (width, d_state) = (k.positive("ssm.inner_size")?, k.positive("ssm.state_size")?);
    let dt_rank = k.positive("ssm.time_step_rank")?;
    check_state(k, width, d_state, Some(width))?;
    Ok(MambaSpec { width, d_state, dt_rank, n_tap: k.taps("ssm.conv_kernel")?, norms, decay: MambaDecay::Channels })
}

/// `PLaMo` 2's Mamba: a decay for each head, and norms with weights.
pub(super) fn mamba_with_heads(k: &MetadataReader<'_>, dt_rank: usize, eps: f32) -> Result<MambaSpec, ModelError> {
    let (width, d_state) = (k.positive("ssm.inner_size")?, k.positive("ssm.state_size")?);
    let n_head = k.positive("ssm.time_step_rank")?;
    k.check("ssm.time_step_rank", n_head, width.is_multiple_of(n_head), "must divide ssm.inner_size")?;
    check_state(k, width, d_state, Some(width))?;
    let norms = Some(MambaNorms { weights: true, eps });
    Ok(MambaSpec {
        width,
        d_state,
        dt_rank,
        n_tap: k.taps("ssm.conv_kernel")?,
        norms,
        decay: MambaDecay::Heads(n_head),
    })
}

/// Mamba-2 without a norm of its result; the convolution may have a bias.
pub(super) fn mamba2_spec(k: &MetadataReader<'_>) -> Result<Mamba2Spec, ModelError> {
    let (width, d_state) = (k.positive("ssm.inner_size")?, k.positive("ssm.state_size")?);
    // The key of Mamba's `dt` rank is Mamba-2's number of heads.
    let n_head = k.positive("ssm.time_step_rank")?;
    k.check("ssm.time_step_rank", n_head, width.is_multiple_of(n_head), "must divide ssm.inner_size")?;
    let n_group = k.positive("ssm.group_count")?;
    k.check("ssm.group_count", n_group, n_head.is_multiple_of(n_group), "must divide ssm.time_step_rank")?;
    let chosen = n_group.checked_mul(d_state).and_then(|n| n.checked_mul(2));
    check_state(k, width, d_state, chosen.and_then(|n| n.checked_add(width)))?;
    let head_dim = width / n_head;
    Ok(Mamba2Spec {
        n_head,
        head_dim,
        d_state,
        n_group,
        n_tap: k.taps("ssm.conv_kernel")?,
        conv_bias: false,
        norm: None,
    })
}
