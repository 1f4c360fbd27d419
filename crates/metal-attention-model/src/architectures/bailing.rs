//! Ling and Ring: experts with a shared expert.

use super::decoder::{decoder, shared_expert};
use super::deepseek::shared_experts;
use crate::feed_forward::RouterScore;
use crate::metadata_reader::MetadataReader;
use crate::spec::NormKind;
use crate::{ModelError, ModelSpec, RopeLayout};

/// Ling 1, Ling-Coder.
pub(super) fn bailingmoe(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = decoder(k, NormKind::Rms, RopeLayout::Interleaved)?;
    m.set_experts(0, &shared_experts(k, RouterScore::Softmax)?);
    m.set_own_head();
    Ok(m)
}

/// Ling 2, Ring 2: norms of queries and keys, partly rotated heads, grouped experts after some dense layers.
pub(super) fn bailingmoe2(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = decoder(k, NormKind::Rms, RopeLayout::Halves)?;
    m.norm_heads(k.norm(NormKind::Rms)?.eps);
    m.attention_mut().for_each(|(_, a)| a.fused_qkv = true);
    let mut e = shared_experts(k, RouterScore::Sigmoid)?;
    if let Some(n_ff) = k.opt_size("expert_shared_feed_forward_length")? {
        e.shared = Some(shared_expert(n_ff.saturating_mul(k.positive("expert_shared_count")?), false));
    }
    m.set_experts(k.opt_usize("leading_dense_block_count")?.unwrap_or(0), &e);
    m.set_own_head();
    Ok(m)
}
