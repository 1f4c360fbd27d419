//! Muse Glimmer: normed embeddings, a gate of attention's result, norms of results, a sliding window in three of four
//! layers, and rotation only there.

use super::decoder::decoder;
use crate::attention::{AttentionGate, GateActivation, GateWidth};
use crate::metadata_reader::MetadataReader;
use crate::spec::{Norm, NormKind};
use crate::{ModelError, ModelSpec, OutputHead, Rope, RopeFactors, RopeLayout, RopeScaling};

/// Epsilon of the norms of results; no key gives it.
const POST_NORM_EPS: f32 = 1e-8;

/// The cap of the logits without the key `final_logit_softcapping`; 0 there means none.
const DEFAULT_CAP: f32 = 30.0;

pub(super) fn muse_glimmer(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = decoder(k, NormKind::Rms, RopeLayout::Interleaved)?;
    let norm = k.norm(NormKind::Rms)?;
    m.embedding.norm = Some(Norm { has_weight: false, ..norm });
    m.add_post_norms(Norm { eps: POST_NORM_EPS, ..norm });
    m.norm_heads(norm.eps);
    m.set_gate(AttentionGate::Tensor { width: GateWidth::Element, activation: GateActivation::Sigmoid });
    let window = k.window()?.ok_or_else(|| k.missing("attention.sliding_window"))?;
    let windowed = k.windowed_layers(m.n_layer(), 4, false)?;
    m.rotate_in_windows_only(&windowed, window);
    let freq_base = k.freq_base("rope.freq_base_swa")?;
    for rope in m.rope_mut() {
        let freq_base = freq_base.unwrap_or(rope.freq_base);
        *rope = Rope { freq_base, scaling: RopeScaling::None, factors: RopeFactors::None, ..*rope };
    }
    let scale = k.opt_f32("logit_scale")?.ok_or_else(|| k.missing("logit_scale"))?;
    let soft_cap = match k.opt_f32("final_logit_softcapping")? {
        None => Some(DEFAULT_CAP),
        Some(_) => k.opt_positive_f32("final_logit_softcapping")?,
    };
    m.output.head = m.output.head.map(|head| OutputHead { scale, soft_cap, ..head });
    m.set_own_head();
    Ok(m)
}
