//! DBRX: experts, layer norms without biases, clamped queries, keys and values.

use super::decoder::{ExpertDefaults, decoder, experts};
use crate::feed_forward::RouterScore;
use crate::metadata_reader::MetadataReader;
use crate::spec::NormKind;
use crate::{ModelError, ModelSpec, RopeLayout};

pub(super) fn dbrx(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = decoder(k, NormKind::Layer, RopeLayout::Halves)?;
    let clamp = k.opt_positive_f32("attention.clamp_kqv")?.ok_or_else(|| k.missing("attention.clamp_kqv"))?;
    m.attention_mut().for_each(|(_, a)| (a.clamp_qkv, a.fused_qkv) = (Some(clamp), true));
    for layer in &mut m.layers {
        layer.feed_forward_norm = layer.feed_forward_norm.map(|norm| norm.with_tensor("attn_output_norm"));
    }
    m.set_norm_biases(false);
    let defaults = ExpertDefaults { score: RouterScore::Softmax, renormalize: true };
    m.set_experts(0, &experts(k, defaults, k.positive("feed_forward_length")?)?);
    m.set_own_head();
    Ok(m)
}
