//! Trinity (Arcee): a gate of attention's result, norms before and after both halves of a layer, a sliding window in
//! three of four layers, rotation in all but every fourth, experts chosen by sigmoid with shared ones.

use super::decoder::decoder;
use super::deepseek::shared_experts;
use crate::attention::{AttentionGate, GateActivation, GateWidth, Mask, Positions};
use crate::feed_forward::RouterScore;
use crate::metadata_reader::MetadataReader;
use crate::spec::NormKind;
use crate::{ModelError, ModelSpec, RopeFactors, RopeLayout};

/// Of this many consecutive layers one has no positions. Its index decides, not the pattern of windows.
const UNROTATED_PERIOD: usize = 4;

pub(super) fn afmoe(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = decoder(k, NormKind::Rms, RopeLayout::Halves)?;
    let norm = k.norm(NormKind::Rms)?;
    m.embedding.scale = (m.n_embd as f32).sqrt();
    m.add_post_norms(norm);
    m.norm_heads(norm.eps);
    m.set_gate(AttentionGate::Tensor { width: GateWidth::Element, activation: GateActivation::Sigmoid });
    m.rope_mut().for_each(|rope| rope.factors = RopeFactors::None);
    if let Some(window) = k.window()? {
        let windowed = k.windowed_layers(m.n_layer(), 4, false)?;
        m.set_windows(&windowed, Mask::Window(window), None);
        // An extension of the context holds in all layers.
        if let Some(freq_base) = k.freq_base("rope.freq_base_swa")? {
            m.window_rope_mut(&windowed).for_each(|rope| rope.freq_base = freq_base);
        }
    }
    for (_, a) in m.attention_mut().filter(|(i, _)| (i + 1).is_multiple_of(UNROTATED_PERIOD)) {
        a.positions = Positions::None;
    }
    let first_sparse = k.opt_usize("leading_dense_block_count")?.unwrap_or(0);
    m.set_experts(first_sparse, &shared_experts(k, RouterScore::Sigmoid)?);
    Ok(m)
}
