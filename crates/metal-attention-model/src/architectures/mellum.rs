//! Mellum 2: experts, norms of queries and keys, a sliding window in three of four layers.

use super::decoder::{ExpertDefaults, WindowRope, decoder, experts};
use crate::attention::Mask;
use crate::feed_forward::RouterScore;
use crate::metadata_reader::MetadataReader;
use crate::spec::NormKind;
use crate::{ModelError, ModelSpec, RopeLayout};

pub(super) fn mellum(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = decoder(k, NormKind::Rms, RopeLayout::Halves)?;
    m.norm_heads(k.norm(NormKind::Rms)?.eps);
    let defaults = ExpertDefaults { score: RouterScore::Softmax, renormalize: true };
    m.set_experts(0, &experts(k, defaults, k.positive("feed_forward_length")?)?);
    m.set_own_head();
    if let Some(window) = k.window()? {
        let windowed = k.windowed_layers(m.n_layer(), 4, false)?;
        let freq_base = k.freq_base("rope.freq_base")?.unwrap_or(10_000.0);
        m.set_windows(&windowed, Mask::Window(window), Some(WindowRope { freq_base }));
    }
    Ok(m)
}
