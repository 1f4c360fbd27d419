//! OLMo, 1 to 3.

use super::decoder::{ExpertDefaults, WindowRope, decoder, experts};
use crate::attention::{Mask, NormOver, QkNorm};
use crate::feed_forward::RouterScore;
use crate::metadata_reader::MetadataReader;
use crate::spec::NormKind;
use crate::{ModelError, ModelSpec, RopeLayout};

/// OLMo: norms without weights; clamped queries, keys and values.
pub(super) fn olmo(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = decoder(k, NormKind::Layer, RopeLayout::Interleaved)?;
    let clamp = k.opt_positive_f32("attention.clamp_kqv")?;
    m.attention_mut().for_each(|(_, a)| a.clamp_qkv = clamp);
    for layer in &mut m.layers {
        for norm in [&mut layer.mixer_norm, &mut layer.feed_forward_norm].into_iter().flatten() {
            norm.has_weight = false;
        }
    }
    m.output.norm.iter_mut().for_each(|norm| norm.has_weight = false);
    Ok(m)
}

/// OLMo 2 and 3: norms of results only, norms of queries and keys over all heads. OLMo 3 has a sliding window in three
/// of four layers, without an extension of the context.
pub(super) fn olmo2(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = decoder(k, NormKind::Rms, RopeLayout::Halves)?;
    m.only_post_norms(k.norm(NormKind::Rms)?);
    m.set_own_head();
    norm_rows(k, &mut m)?;
    if let Some(window) = k.window()? {
        let freq_base = match k.freq_base("rope.freq_base_swa")? {
            Some(base) => base,
            None => k.freq_base("rope.freq_base")?.unwrap_or(10_000.0),
        };
        let windowed = k.windowed_layers(m.n_layer(), 4, false)?;
        m.set_windows(&windowed, Mask::Window(window), Some(WindowRope { freq_base }));
    }
    Ok(m)
}

/// OLMo with experts, whose weights are not renormalised.
pub(super) fn olmoe(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = decoder(k, NormKind::Rms, RopeLayout::Halves)?;
    norm_rows(k, &mut m)?;
    let defaults = ExpertDefaults { score: RouterScore::Softmax, renormalize: false };
    m.set_experts(0, &experts(k, defaults, k.positive("feed_forward_length")?)?);
    m.set_own_head();
    Ok(m)
}

/// Adds norms of queries and keys over all heads.
fn norm_rows(k: &MetadataReader<'_>, m: &mut ModelSpec) -> Result<(), ModelError> {
    let eps = k.norm(NormKind::Rms)?.eps;
    m.set_qk_norm(QkNorm { kind: NormKind::Rms, eps, over: NormOver::Row, after_rope: false });
    Ok(())
}
