//! Nemotron-H: each layer is one of Mamba-2, attention without positions, and a feed-forward with squared `ReLU`. Prediction heads
//! have both attention and a feed-forward.

use super::decoder::{ExpertDefaults, attention, experts_of, shared_expert, stack};
use super::mamba::{heads, mamba2_spec};
use crate::attention::Positions;
use crate::feed_forward::{Activation, Dense, Experts, RouterScore};
use crate::metadata_reader::MetadataReader;
use crate::parts::{FeedForward, Mixer};
use crate::recurrent::Mamba2Spec;
use crate::spec::NormKind;
use crate::{ModelError, ModelSpec, RopeLayout};

/// Nemotron-H, Nemotron Nano 2, and Nemotron 3, which has experts.
pub(super) fn nemotron_h(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let n_layer = k.n_layer()?;
    let kind = match k.opt_f32("attention.layer_norm_rms_epsilon")? {
        Some(_) => NormKind::Rms,
        None => NormKind::Layer,
    };
    let norm = k.norm(kind)?.to_rms();
    let mamba = Mamba2Spec { norm: Some(norm.eps), ..mamba2_spec(k)? };
    let key = "feed_forward_length";
    let widths = k.per_layer_or_none(key, n_layer)?.ok_or_else(|| k.missing(key))?;
    let without_heads = k.n_layer_without_heads()?;
    let layer = |(i, (n_head, n_head_kv)): (usize, (usize, usize))| {
        let attention = || attention(k, RopeLayout::Halves, n_head, (n_head, n_head_kv));
        if i >= without_heads {
            k.check("attention.head_count_kv", n_head_kv, n_head_kv > 0, "prediction heads have attention")?;
            return Ok((attention()?, feed_forward(k, i, widths[i])?));
        }
        Ok(match (n_head_kv, widths[i]) {
            (0, 0) => (Mixer::Mamba2(mamba), FeedForward::None),
            (_, 0) => (attention()?, FeedForward::None),
            (_, n_ff) => (Mixer::None, feed_forward(k, i, n_ff)?),
        })
    };
    let layers = heads(k)?.into_iter().enumerate().map(layer).collect::<Result<_, ModelError>>()?;
    let mut m = stack(k, norm, layers)?;
    m.set_positions(Positions::None);
    for layer in &mut m.layers {
        let norm = if layer.mixer == Mixer::None { norm } else { norm.with_tensor("post_attention_norm") };
        layer.feed_forward_norm = layer.feed_forward_norm.map(|_| norm);
    }
    Ok(m)
}

/// The feed-forward of layer `i`: dense without a gate; or experts chosen by sigmoid and a bias, with a shared expert,
/// in the largest models with a narrower input.
fn feed_forward(k: &MetadataReader<'_>, i: usize, n_ff: usize) -> Result<FeedForward, ModelError> {
    let plain = |n_ff| Dense { n_ff, gated: false, activation: Activation::ReluSquared, fused: false };
    if k.n_expert()?.is_none() {
        return Ok(FeedForward::Dense(plain(n_ff)));
    }
    // Both may differ from layer to layer.
    let n_layer = k.n_layer()?;
    let of_layer = |all: Option<Vec<usize>>| all.map_or(0, |all| all[i]);
    let n_used = of_layer(k.per_layer_or_none("expert_used_count", n_layer)?);
    let width = match of_layer(k.per_layer_or_none("expert_feed_forward_length", n_layer)?) {
        0 => n_ff / n_used.max(1),
        width => width,
    };
    let defaults = ExpertDefaults { score: RouterScore::Sigmoid, renormalize: false };
    let mut e = experts_of(k, defaults, n_used, width)?;
    e.expert = plain(width);
    (e.router.score, e.router.choice_bias) = (RouterScore::Sigmoid, true);
    let shared = k.positive("expert_shared_feed_forward_length")?;
    e.shared = Some(shared_expert(shared, false));
    e.shared.iter_mut().for_each(|e| e.dense = plain(shared));
    Ok(FeedForward::Experts(Box::new(Experts { latent: k.opt_size("moe_latent_size")?, ..e })))
}
