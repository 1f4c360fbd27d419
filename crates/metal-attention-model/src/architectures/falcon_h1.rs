//! Falcon-H1: attention and Mamba-2 in parallel in each layer.

use super::decoder::decoder;
use super::mamba::mamba2_spec;
use crate::metadata_reader::MetadataReader;
use crate::parts::Mixer;
use crate::recurrent::Mamba2Spec;
use crate::spec::{AttentionAndMamba2Spec, Norm, NormKind};
use crate::{ModelError, ModelSpec, RopeLayout};

/// Falcon-H1; some sizes have a norm of Mamba-2's result.
pub(super) fn falcon_h1(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = decoder(k, NormKind::Rms, RopeLayout::Halves)?;
    let eps = k.norm(NormKind::Rms)?.eps;
    let spec = mamba2_spec(k)?;
    if let Some(scale) = k.opt_f32("attention.scale")?.filter(|&scale| scale != 0.0) {
        m.attention_mut().for_each(|(_, a)| a.scale = scale);
    }
    for (i, layer) in m.layers.iter_mut().enumerate() {
        let norm = k.has_tensor(&format!("blk.{i}.ssm_norm.weight"), false).then_some(eps);
        let mamba2 = Mamba2Spec { norm, ..spec };
        if let Some(attention) = layer.mixer.attention().cloned() {
            layer.mixer = Mixer::AttentionAndMamba2(Box::new(AttentionAndMamba2Spec { attention, mamba2 }));
        }
        // Its files name this norm without `.weight`.
        layer.feed_forward_norm = layer.feed_forward_norm.map(Norm::without_weight_suffix);
    }
    Ok(m)
}
