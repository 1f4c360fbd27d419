//! BERT and its successors: encoders with `PostNorm`.

use super::decoder::{ExpertDefaults, classifier, decoder, experts};
use crate::attention::{Mask, NormOver, Positions, QkNorm};
use crate::feed_forward::{Activation, RouterScore};
use crate::metadata_reader::MetadataReader;
use crate::parts::{FeedForward, Residual};
use crate::spec::NormKind;
use crate::{ModelError, ModelSpec, Pooling, RopeLayout};

/// The common part: no causal mask, a norm of the embedding, norms after the residual additions, no logits.
fn encoder(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = decoder(k, NormKind::Layer, RopeLayout::Halves)?;
    let norm = k.norm(NormKind::Layer)?;
    m.embedding.norm = Some(norm.with_tensor("token_embd_norm"));
    if k.has_tensor("token_types.weight", true) {
        m.embedding.n_token_types = Some(k.n_token_types()?);
    }
    if k.opt_bool("attention.causal")? != Some(true) {
        m.attention_mut().for_each(|(_, a)| a.mask = Mask::Full);
    }
    for layer in &mut m.layers {
        (layer.mixer_norm, layer.feed_forward_norm) = (None, None);
        let (mixer_sum_norm, feed_forward_sum_norm) =
            (norm.with_tensor("attn_output_norm"), norm.with_tensor("layer_output_norm"));
        layer.residual = Residual::PostNorm { mixer_sum_norm, feed_forward_sum_norm };
    }
    (m.output.norm, m.output.head) = (None, None);
    m.output.classifier = classifier(k, Pooling::First, norm.eps)?;
    Ok(m)
}

/// BERT: learned positions, no gate.
pub(super) fn bert(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = encoder(k)?;
    m.embedding.n_positions = Some(m.n_ctx_train);
    m.attention_mut().for_each(|(_, a)| a.positions = Positions::None);
    m.no_gate(Activation::Gelu);
    Ok(m)
}

/// Jina's embeddings 2: ALiBi.
pub(super) fn jina_v2(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = encoder(k)?;
    let eps = k.norm(NormKind::Layer)?.eps;
    if k.has_tensor("blk.0.attn_norm_2.weight", false) {
        return Err(k.unsupported("attn_norm_2", "a tensor", "a second norm after attention is not implemented"));
    }
    let norm = k.has_tensor("blk.0.attn_q_norm.weight", false);
    for (_, a) in m.attention_mut() {
        a.positions = Positions::Alibi { max_bias: 8.0 };
        a.qk_norm = norm.then_some(QkNorm { kind: NormKind::Layer, eps, over: NormOver::Row, after_rope: false });
    }
    for (i, dense) in m.dense_mut().enumerate() {
        dense.activation = Activation::Gelu;
        dense.fused = !k.has_tensor(&format!("blk.{i}.ffn_gate.weight"), true);
    }
    Ok(m)
}

/// Jina's embeddings 3: RoPE, no gate.
pub(super) fn jina_v3(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = encoder(k)?;
    m.no_gate(Activation::Gelu);
    Ok(m)
}

/// Nomic's embeddings 1: RoPE, a gate with SiLU.
pub(super) fn nomic(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = encoder(k)?;
    m.attention_mut().for_each(|(_, a)| a.fused_qkv = true);
    Ok(m)
}

/// Nomic's embeddings 2: experts without a gate in every `moe_every_n_layers`-th layer.
pub(super) fn nomic_moe(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = encoder(k)?;
    m.attention_mut().for_each(|(_, a)| a.fused_qkv = true);
    m.no_gate(Activation::Gelu);
    let every = k.opt_usize("moe_every_n_layers")?.unwrap_or(0);
    if every > 0 {
        let defaults = ExpertDefaults { score: RouterScore::Softmax, renormalize: false };
        let mut e = experts(k, defaults, k.positive("feed_forward_length")?)?;
        (e.expert.gated, e.expert.activation, e.router.renormalize) = (false, Activation::Gelu, false);
        for layer in m.layers.iter_mut().skip(1).step_by(every) {
            layer.feed_forward = FeedForward::Experts(Box::new(e.clone()));
        }
    }
    Ok(m)
}
