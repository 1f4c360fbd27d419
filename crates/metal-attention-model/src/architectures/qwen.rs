//! Qwen 1 to 3, with and without experts; of the vision models, the text part.

use super::decoder::{ExpertDefaults, classifier, decoder, experts, shared_expert};
use crate::feed_forward::RouterScore;
use crate::metadata_reader::MetadataReader;
use crate::spec::{Classifier, NormKind};
use crate::{ModelError, ModelSpec, Pooling, RopeLayout};

/// Qwen 1: fused Q, K and V with a bias; the width counts gate and up together.
pub(super) fn qwen(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = decoder(k, NormKind::Rms, RopeLayout::Halves)?;
    m.attention_mut().for_each(|(_, a)| (a.fused_qkv, a.qkv_bias) = (true, true));
    for dense in m.dense_mut() {
        k.check("feed_forward_length", dense.n_ff, dense.n_ff.is_multiple_of(2), "must be even")?;
        dense.n_ff /= 2;
    }
    m.set_own_head();
    Ok(m)
}

/// Qwen 2, 2.5, 2-VL: biases of queries, keys and values.
pub(super) fn qwen2(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = decoder(k, NormKind::Rms, RopeLayout::Halves)?;
    m.attention_mut().for_each(|(_, a)| a.qkv_bias = true);
    Ok(m)
}

/// Qwen 2-VL and 2.5-VL: sections of RoPE, one after the other.
pub(super) fn qwen2vl(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = qwen2(k)?;
    m.set_rope_sections(k, false)?;
    Ok(m)
}

/// Qwen 1.5 and 2 with experts, and a gated shared expert.
pub(super) fn qwen2moe(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = decoder(k, NormKind::Rms, RopeLayout::Halves)?;
    let n_ff = k.positive("feed_forward_length")?;
    let defaults = ExpertDefaults { score: RouterScore::Softmax, renormalize: false };
    let mut e = experts(k, defaults, n_ff / k.positive("expert_used_count")?)?;
    let shared = k.opt_size("expert_shared_feed_forward_length")?.unwrap_or(n_ff);
    e.shared = Some(shared_expert(shared, true));
    m.set_experts(0, &e);
    Ok(m)
}

/// Qwen 3-VL.
pub(super) fn qwen3vl(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = qwen3(k)?;
    m.set_rope_sections(k, true)?;
    Ok(m)
}

/// Qwen 3-VL with experts.
pub(super) fn qwen3vlmoe(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = qwen3moe(k)?;
    m.set_rope_sections(k, true)?;
    Ok(m)
}

/// Qwen 3: norms of each head of queries and keys.
pub(super) fn qwen3(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = decoder(k, NormKind::Rms, RopeLayout::Halves)?;
    let eps = k.norm(NormKind::Rms)?.eps;
    m.norm_heads(eps);
    m.output.classifier = classifier(k, Pooling::Last, eps)?.map(|c| Classifier { softmax: true, ..c });
    Ok(m)
}

/// Qwen 3 with experts.
pub(super) fn qwen3moe(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = qwen3(k)?;
    let defaults = ExpertDefaults { score: RouterScore::Softmax, renormalize: true };
    let n_ff = k.positive("feed_forward_length")? / k.positive("expert_used_count")?;
    m.set_experts(0, &experts(k, defaults, n_ff)?);
    Ok(m)
}
