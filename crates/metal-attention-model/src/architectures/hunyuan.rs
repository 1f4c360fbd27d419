//! Hunyuan, dense or with experts.

use super::decoder::{ExpertDefaults, decoder, experts, shared_expert};
use crate::attention::{NormOver, QkNorm};
use crate::feed_forward::RouterScore;
use crate::metadata_reader::MetadataReader;
use crate::parts::FeedForward;
use crate::spec::NormKind;
use crate::{ModelError, ModelSpec, RopeLayout};

/// Hunyuan 1: norms of queries and keys after the rotation; experts with a shared expert.
pub(super) fn hunyuan(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = decoder(k, NormKind::Rms, RopeLayout::Halves)?;
    let eps = k.norm(NormKind::Rms)?.eps;
    m.set_qk_norm(QkNorm { kind: NormKind::Rms, eps, over: NormOver::Head, after_rope: true });
    if k.n_expert()?.is_some() {
        let defaults = ExpertDefaults { score: RouterScore::Softmax, renormalize: true };
        let n_ff = k.positive("feed_forward_length")?;
        let mut e = experts(k, defaults, n_ff)?;
        let shared = k.opt_size("expert_shared_feed_forward_length")?.unwrap_or(n_ff);
        e.shared = Some(shared_expert(shared, false));
        m.set_experts(0, &e);
    }
    Ok(m)
}

/// Hunyuan 1 without experts, and the text model of `HunyuanOCR`, whose files have either name: `rope.scaling.alpha`
/// raises the RoPE base to `freq_base * alpha^(dim / (dim - 2))` (NTK-aware scaling).
pub(super) fn hunyuan_dense(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = hunyuan(k)?;
    let Some(alpha) = k.opt_positive_f32("rope.scaling.alpha")? else { return Ok(m) };
    for (_, a) in m.attention_mut() {
        let dim = a.head_dim as f32;
        if let Some(rope) = a.rope_mut() {
            rope.freq_base *= alpha.powf(dim / (dim - 2.0));
        }
    }
    for rope in m.rope_mut() {
        k.check("rope.scaling.alpha", alpha, rope.freq_base > 1.0 && rope.freq_base.is_finite(), "must be plausible")?;
    }
    Ok(m)
}

/// Hunyuan-VL's text model: sections of RoPE, one after the other.
pub(super) fn hunyuan_vl(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = hunyuan_dense(k)?;
    m.set_rope_sections(k, false)?;
    Ok(m)
}

/// Hunyuan 3: norms of queries and keys before the rotation; experts chosen by sigmoid in all layers but the first.
pub(super) fn hunyuan3(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = decoder(k, NormKind::Rms, RopeLayout::Halves)?;
    m.norm_heads(k.norm(NormKind::Rms)?.eps);
    let defaults = ExpertDefaults { score: RouterScore::Sigmoid, renormalize: false };
    let mut e = experts(k, defaults, k.positive("feed_forward_length")?)?;
    e.router.choice_bias = true;
    let shared = k.opt_size("expert_shared_feed_forward_length")?.unwrap_or(e.expert.n_ff);
    e.shared = Some(shared_expert(shared, false));
    for (i, layer) in m.layers.iter_mut().enumerate() {
        if k.has_tensor(&format!("blk.{i}.ffn_gate_inp.weight"), i > 0) {
            layer.feed_forward = FeedForward::Experts(Box::new(e.clone()));
        }
    }
    Ok(m)
}
