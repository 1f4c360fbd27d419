//! `GPT-2`, `GPT-NeoX`, Falcon, StarCoder 2: Layer norms with biases and a feed-forward without a gate.

use super::decoder::decoder;
use crate::attention::Positions;
use crate::feed_forward::Activation;
use crate::keys::Keys;
use crate::spec::{NormKind, Residual};
use crate::{ModelError, ModelSpec, RopeLayout};

/// What these share.
fn gpt(k: &Keys<'_>, fused_qkv: bool) -> Result<ModelSpec, ModelError> {
    let mut m = decoder(k, NormKind::Layer, RopeLayout::Halves)?;
    for dense in m.dense_mut() {
        (dense.gated, dense.activation) = (false, Activation::Gelu);
    }
    m.attention_mut().for_each(|(_, a)| a.fused_qkv = fused_qkv);
    Ok(m)
}

/// GPT-2: learned positions.
pub(super) fn gpt2(k: &Keys<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = gpt(k, true)?;
    m.embedding.positions = Some(m.n_ctx_train);
    m.attention_mut().for_each(|(_, a)| a.positions = Positions::None);
    Ok(m)
}

/// `GPT-NeoX`, Pythia: attention and feed-forward side by side, each with its norm, unless the file says otherwise.
pub(super) fn gptneox(k: &Keys<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = gpt(k, true)?;
    m.set_own_head();
    if k.opt_bool("use_parallel_residual")?.unwrap_or(true) {
        m.layers.iter_mut().for_each(|layer| layer.residual = Residual::Parallel);
    }
    Ok(m)
}

/// Falcon: side by side from one norm; 40B has two.
pub(super) fn falcon(k: &Keys<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = gpt(k, true)?;
    let norm = k.norm(NormKind::Layer)?;
    for i in 0..m.n_layer() {
        let layer = &mut m.layers[i];
        (layer.residual, layer.feed_forward_norm) = (Residual::Parallel, None);
        if k.has_tensor(&format!("blk.{i}.attn_norm_2.weight"), false) {
            (layer.mixer_norm, layer.feed_forward_norm) = (Some(norm.named("attn_norm_2")), Some(norm));
        }
    }
    Ok(m)
}

/// StarCoder 2.
pub(super) fn starcoder2(k: &Keys<'_>) -> Result<ModelSpec, ModelError> {
    gpt(k, false)
}
