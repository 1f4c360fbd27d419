//! gpt-oss: attention sinks, a sliding window in every second layer, experts with biases and a clamped activation.

use super::decoder::{ExpertDefaults, decoder, experts};
use crate::attention::Mask;
use crate::feed_forward::{Activation, RouterScore};
use crate::metadata_reader::MetadataReader;
use crate::spec::NormKind;
use crate::{ModelError, ModelSpec, RopeLayout};

pub(super) fn gpt_oss(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = decoder(k, NormKind::Rms, RopeLayout::Halves)?;
    for layer in &mut m.layers {
        layer.feed_forward_norm = layer.feed_forward_norm.map(|norm| norm.with_tensor("post_attention_norm"));
    }
    m.attention_mut().for_each(|(_, a)| (a.sinks, a.qkv_bias) = (true, true));
    let window = k.window()?.ok_or_else(|| k.missing("attention.sliding_window"))?;
    let windowed = k.windowed_layers(m.n_layer(), 2, false)?;
    m.set_windows(&windowed, Mask::Window(window), None);
    let defaults = ExpertDefaults { score: RouterScore::SoftmaxOfChosen, renormalize: false };
    let mut e = experts(k, defaults, k.positive("feed_forward_length")?)?;
    e.biases = true;
    e.expert.activation = Activation::ClampedSwiglu { limit: 7.0 };
    m.set_experts(0, &e);
    Ok(m)
}
