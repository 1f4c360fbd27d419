//! `GPT-2`, `GPT-NeoX`, Falcon, StarCoder, BLOOM, MPT, Jais, Nemotron: layer norms, most without a gate in the
//! feed-forward.

use super::decoder::decoder;
use crate::attention::{NormOver, Positions, QkNorm};
use crate::feed_forward::Activation;
use crate::metadata_reader::MetadataReader;
use crate::parts::Residual;
use crate::spec::NormKind;
use crate::{ModelError, ModelSpec, RopeLayout};

/// The common part.
fn gpt(k: &MetadataReader<'_>, fused_qkv: bool) -> Result<ModelSpec, ModelError> {
    let mut m = decoder(k, NormKind::Layer, RopeLayout::Halves)?;
    m.no_gate(Activation::Gelu);
    m.attention_mut().for_each(|(_, a)| a.fused_qkv = fused_qkv);
    Ok(m)
}

/// GPT-2, StarCoder: learned positions.
pub(super) fn gpt2(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = gpt(k, true)?;
    m.embedding.n_positions = Some(m.n_ctx_train);
    m.set_positions(Positions::None);
    Ok(m)
}

/// `GPT-NeoX`, Pythia: attention and feed-forward in parallel, each with its norm, unless the file says otherwise.
pub(super) fn gptneox(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = gpt(k, true)?;
    m.set_own_head();
    if k.opt_bool("use_parallel_residual")?.unwrap_or(true) {
        m.layers.iter_mut().for_each(|layer| layer.residual = Residual::Parallel);
    }
    Ok(m)
}

/// Falcon: attention and feed-forward in parallel from one norm; 40B has two norms.
pub(super) fn falcon(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = gpt(k, true)?;
    let norm = k.norm(NormKind::Layer)?;
    for i in 0..m.n_layer() {
        let layer = &mut m.layers[i];
        (layer.residual, layer.feed_forward_norm) = (Residual::Parallel, None);
        if k.has_tensor(&format!("blk.{i}.attn_norm_2.weight"), false) {
            (layer.mixer_norm, layer.feed_forward_norm) = (Some(norm.with_tensor("attn_norm_2")), Some(norm));
        }
    }
    Ok(m)
}

/// StarCoder 2.
pub(super) fn starcoder2(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    gpt(k, false)
}

/// `CodeShell`: with its own output head.
pub(super) fn codeshell(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = gpt(k, true)?;
    m.set_own_head();
    Ok(m)
}

/// BLOOM: `ALiBi`, a norm of the embedding.
pub(super) fn bloom(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = gpt(k, true)?;
    m.embedding.norm = m.output.norm.map(|norm| norm.with_tensor("token_embd_norm"));
    m.set_positions(Positions::Alibi { max_bias: 8.0 });
    Ok(m)
}

/// MPT: `ALiBi` or learned positions. 7B has no biases; 30B and others clamp queries, keys and values.
pub(super) fn mpt(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = gpt(k, true)?;
    m.set_norm_biases(k.has_tensor("blk.0.attn_norm.bias", false));
    m.set_positions(alibi(k)?);
    if k.has_tensor("position_embd.weight", false) {
        m.embedding.n_positions = Some(m.n_ctx_train);
    }
    let clamp = k.opt_positive_f32("attention.clamp_kqv")?;
    m.attention_mut().for_each(|(_, a)| a.clamp_qkv = clamp);
    if k.has_tensor("blk.0.attn_q_norm.weight", false) {
        let eps = k.norm(NormKind::Layer)?.eps;
        m.set_qk_norm(QkNorm { kind: NormKind::Layer, eps, over: NormOver::Row, after_rope: false });
    }
    if k.has_tensor("blk.0.ffn.act.scales", false) {
        return Err(k.unsupported("ffn.act.scales", "a tensor", "factors of the activation (AWQ) are not implemented"));
    }
    Ok(m)
}

/// Jais: `ALiBi`, a gate with SiLU, scores divided by the head size instead of its root.
pub(super) fn jais(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = decoder(k, NormKind::Layer, RopeLayout::Halves)?;
    m.set_positions(alibi(k)?);
    m.attention_mut().for_each(|(_, a)| (a.scale, a.fused_qkv) = (1.0 / a.head_dim as f32, true));
    m.set_own_head();
    Ok(m)
}

/// `ALiBi` with the file's bias; no positions if it has none.
fn alibi(k: &MetadataReader<'_>) -> Result<Positions, ModelError> {
    let max_bias = k.opt_positive_f32("attention.max_alibi_bias")?;
    Ok(max_bias.map_or(Positions::None, |max_bias| Positions::Alibi { max_bias }))
}

/// Nemotron 3 and 4, Minitron: `ReLU` squared.
pub(super) fn nemotron(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = gpt(k, false)?;
    m.no_gate(Activation::ReluSquared);
    m.set_own_head();
    Ok(m)
}

/// Jais 2: squared `ReLU`.
pub(super) fn jais2(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = gpt(k, false)?;
    m.no_gate(Activation::ReluSquared);
    Ok(m)
}
