//! RWKV: time mix and channel mix, each with a recurrent state; and its descendants with the feed-forwards of Qwen 2.

use super::decoder::around;
use crate::metadata_reader::MetadataReader;
use crate::parts::{FeedForward, Mixer};
use crate::recurrent::{ChannelMixSpec, Rwkv6Spec, Rwkv7Spec};
use crate::spec::{NormKind, OutputScale};
use crate::{ModelError, ModelSpec};

/// RWKV-6.
pub(super) fn rwkv6(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let n_layer = k.n_layer()?;
    let mut m = around(k, NormKind::Layer, vec![Mixer::Rwkv6(time_mix_6(k, true)?); n_layer])?;
    mix_channels(k, &mut m, true)?;
    let period = k.opt_size("rescale_every_n_layers")?.unwrap_or(usize::MAX);
    for layer in m.layers.iter_mut().skip(period - 1).step_by(period) {
        layer.output_scale = OutputScale::Fixed(0.5);
    }
    Ok(m)
}

/// QRWKV-6: Qwen 2 with gated linear attention instead of attention.
pub(super) fn rwkv6qwen2(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    check_shifts(k, 1)?;
    if k.has_tensor("blk.0.time_mix_first.weight", false) {
        let why = "a bonus without a norm of each head is missing";
        return Err(k.unsupported("wkv.head_size", "time_mix_first.weight", why));
    }
    let n_layer = k.n_layer()?;
    let mut m = around(k, NormKind::Rms, vec![Mixer::Rwkv6(time_mix_6(k, false)?); n_layer])?;
    m.set_own_head();
    if let Some(norm) = &mut m.output.norm {
        norm.has_bias = k.has_tensor("output_norm.bias", false);
    }
    Ok(m)
}

/// RWKV-7.
pub(super) fn rwkv7(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let gate_rank = Some(k.positive("attention.gate_lora_rank")?);
    let mut m = around(k, NormKind::Layer, time_mixes_7(k, gate_rank, true)?)?;
    mix_channels(k, &mut m, false)?;
    Ok(m)
}

/// ARWKV-7: Qwen 2 with RWKV-7's time mix instead of attention, with or without gate and norm.
pub(super) fn arwkv7(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    check_shifts(k, 1)?;
    let gate_rank = k.opt_size("attention.gate_lora_rank")?;
    let gate_rank = if k.has_tensor("blk.0.time_mix_g1.weight", gate_rank.is_some()) {
        Some(gate_rank.ok_or_else(|| k.missing("attention.gate_lora_rank"))?)
    } else {
        None
    };
    let norm = k.has_tensor("blk.0.time_mix_ln.weight", false);
    let mut m = around(k, NormKind::Rms, time_mixes_7(k, gate_rank, norm)?)?;
    m.set_own_head();
    Ok(m)
}

/// The time mix of RWKV-6.
fn time_mix_6(k: &MetadataReader<'_>, bonus: bool) -> Result<Rwkv6Spec, ModelError> {
    let (width, head_dim) = heads(k)?;
    let n_head = width / head_dim;
    let n_head_kv = match k.opt_size("attention.head_count_kv")? {
        Some(n) if !bonus => n,
        Some(_) | None => n_head,
    };
    let divides = n_head.is_multiple_of(n_head_kv);
    k.check("attention.head_count_kv", n_head_kv, divides, "must divide embedding_length / wkv.head_size")?;
    Ok(Rwkv6Spec {
        width,
        head_dim,
        n_head_kv,
        mix_rank: k.positive("time_mix_extra_dim")?,
        decay_rank: k.positive("time_decay_extra_dim")?,
        bonus,
        lerps_apart: k.has_tensor("blk.0.time_mix_lerp_w.weight", false),
    })
}

/// The time mix of RWKV-7 for each layer.
fn time_mixes_7(k: &MetadataReader<'_>, gate_rank: Option<usize>, norm: bool) -> Result<Vec<Mixer>, ModelError> {
    let (width, head_dim) = heads(k)?;
    let others = Rwkv7Spec {
        width,
        head_dim,
        decay_rank: k.positive("attention.decay_lora_rank")?,
        rate_rank: k.positive("attention.iclr_lora_rank")?,
        value_rank: k.positive("attention.value_residual_mix_lora_rank")?,
        gate_rank,
        norm,
        first: false,
    };
    Ok((0..k.n_layer()?).map(|i| Mixer::Rwkv7(Rwkv7Spec { first: i == 0, ..others })).collect())
}

/// Channels, and elements of a head.
fn heads(k: &MetadataReader<'_>) -> Result<(usize, usize), ModelError> {
    let (n_embd, head_dim) = (k.positive("embedding_length")?, k.positive("wkv.head_size")?);
    let divides = n_embd.is_multiple_of(head_dim);
    k.check("wkv.head_size", head_dim, divides, "must divide embedding_length")?;
    Ok((n_embd, head_dim))
}

/// Replaces the feed-forwards by channel mixes, and names the norms as in RWKV's files, one of them over the embedding.
fn mix_channels(k: &MetadataReader<'_>, m: &mut ModelSpec, gated: bool) -> Result<(), ModelError> {
    check_shifts(k, 2)?;
    let norm = k.norm(NormKind::Layer)?;
    m.embedding.norm = Some(norm.with_tensor("token_embd_norm"));
    m.set_own_head();
    let widths: Vec<_> = m.dense_mut().map(|dense| dense.n_ff).collect();
    for (layer, width) in m.layers.iter_mut().zip(widths) {
        layer.feed_forward_norm = Some(norm.with_tensor("attn_norm_2"));
        layer.feed_forward = FeedForward::ChannelMix(ChannelMixSpec { n_embd: m.n_embd, width, gated });
    }
    Ok(())
}

/// An error if the file has another number of token shifts than `n`: the time mix, and the channel mix if there is one.
fn check_shifts(k: &MetadataReader<'_>, n: usize) -> Result<(), ModelError> {
    match k.opt_usize("token_shift_count")? {
        Some(other) if other != n => {
            Err(k.unsupported("token_shift_count", other, "the architecture has another number"))
        }
        Some(_) | None => Ok(()),
    }
}
