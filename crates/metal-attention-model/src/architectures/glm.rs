//! GLM 3, 4, 4.5, 4.6.

use super::decoder::{ExpertDefaults, decoder, experts, shared_expert};
use crate::feed_forward::RouterScore;
use crate::metadata_reader::MetadataReader;
use crate::spec::NormKind;
use crate::{ModelError, ModelSpec, RopeLayout};

/// `ChatGLM` 3, GLM 4 (9B), GLM-Edge: half of each head rotated; fused Q, K and V, fused gate and up.
pub(super) fn chatglm(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = decoder(k, NormKind::Rms, RopeLayout::Interleaved)?;
    m.attention_mut().for_each(|(_, a)| a.fused_qkv = true);
    m.dense_mut().for_each(|dense| dense.fused = true);
    Ok(m)
}

/// GLM 4 (0414), Z1: also norms of results, half of each head rotated, fused gate and up.
pub(super) fn glm4(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    // GLM 4.1V, which has RoPE sections for images, uses NeoX rotation.
    let layout = if k.rope_sections(false)?.is_some() { RopeLayout::Halves } else { RopeLayout::Interleaved };
    let mut m = decoder(k, NormKind::Rms, layout)?;
    m.set_rope_sections(k, false)?;
    m.add_post_norms(k.norm(NormKind::Rms)?);
    m.dense_mut().for_each(|dense| dense.fused = true);
    Ok(m)
}

/// GLM 4.5, 4.6: after some dense layers, experts chosen by sigmoid and a bias, with a shared expert.
pub(super) fn glm4moe(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = decoder(k, NormKind::Rms, RopeLayout::Halves)?;
    m.set_rope_sections(k, false)?;
    let norm = k.norm(NormKind::Rms)?;
    for layer in &mut m.layers {
        layer.feed_forward_norm = Some(norm.with_tensor("post_attention_norm"));
    }
    // GLM 4.5 Air has no such norm.
    if k.has_tensor("blk.0.attn_q_norm.weight", true) {
        m.norm_heads(norm.eps);
    }
    let defaults = ExpertDefaults { score: RouterScore::Sigmoid, renormalize: false };
    let mut e = experts(k, defaults, 0)?;
    e.router.choice_bias = true;
    let n_shared = k.opt_usize("expert_shared_count")?.unwrap_or(0);
    if n_shared > 0 {
        k.positive("expert_shared_count")?;
        e.shared = Some(shared_expert(e.expert.n_ff.saturating_mul(n_shared), false));
    }
    m.set_experts(k.opt_usize("leading_dense_block_count")?.unwrap_or(0), &e);
    Ok(m)
}
