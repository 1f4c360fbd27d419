//! EXAONE 4, and EXAONE with experts. (EXAONE 3 is Llama with NeoX rotation.)

use super::decoder::{ExpertDefaults, decoder, experts, shared_expert};
use crate::feed_forward::RouterScore;
use crate::metadata_reader::MetadataReader;
use crate::spec::NormKind;
use crate::{ModelError, ModelSpec, RopeLayout};

/// EXAONE 4: norms of results only, norms of queries and keys. The larger one, recognised by its 64 layers, has a
/// sliding window in three of four layers and rotates only there.
pub(super) fn exaone4(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = decoder(k, NormKind::Rms, RopeLayout::Halves)?;
    let norm = k.norm(NormKind::Rms)?;
    m.only_post_norms(norm);
    m.norm_heads(norm.eps);
    let windowed = k.windowed_layers(m.n_layer(), 4, false)?;
    let window = k.window()?.unwrap_or(4096);
    if m.n_layer() == 64 {
        m.rotate_in_windows_only(&windowed, window);
    }
    Ok(m)
}

/// EXAONE with experts and a shared expert (K-EXAONE): a sliding window in three of four layers, and rotation only
/// there.
pub(super) fn exaone_moe(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = decoder(k, NormKind::Rms, RopeLayout::Halves)?;
    m.norm_heads(k.norm(NormKind::Rms)?.eps);
    let window = k.window()?.ok_or_else(|| k.missing("attention.sliding_window"))?;
    let windowed = k.windowed_layers(m.n_layer(), 4, false)?;
    m.rotate_in_windows_only(&windowed, window);
    let mut e = experts(k, ExpertDefaults { score: RouterScore::Sigmoid, renormalize: false }, 0)?;
    e.router.choice_bias = true;
    let shared = k.opt_size("expert_shared_feed_forward_length")?.unwrap_or(e.expert.n_ff);
    e.shared = Some(shared_expert(shared, false));
    m.set_experts(k.opt_usize("leading_dense_block_count")?.unwrap_or(0), &e);
    m.set_own_head();
    Ok(m)
}
