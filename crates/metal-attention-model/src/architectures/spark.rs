//! Spark 2.5: a gate of each head's result, GELU, sliding windows whose rotation has a base of its own.

use super::decoder::decoder;
use crate::attention::{AttentionGate, GateActivation, GateWidth, Mask};
use crate::feed_forward::Activation;
use crate::metadata_reader::MetadataReader;
use crate::spec::NormKind;
use crate::{ModelError, ModelSpec, RopeFactors, RopeLayout};

pub(super) fn spark2_5(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = decoder(k, NormKind::Rms, RopeLayout::Halves)?;
    m.dense_mut().for_each(|dense| dense.activation = Activation::Gelu);
    m.set_gate(AttentionGate::Tensor { width: GateWidth::Head, activation: GateActivation::Sigmoid });
    m.rope_mut().for_each(|rope| rope.factors = RopeFactors::None);
    let window = k.window()?.ok_or_else(|| k.missing("attention.sliding_window"))?;
    let pattern = "attention.sliding_window_pattern";
    let windowed = k.layer_flags(pattern, m.n_layer())?.ok_or_else(|| k.missing(pattern))?;
    m.set_windows(&windowed, Mask::Window(window), None);
    let (freq_base, n_rot) = (k.freq_base("rope.freq_base_swa")?, k.opt_positive("rope.dimension_count_swa")?);
    // An extension of the context holds in all layers.
    for rope in m.window_rope_mut(&windowed) {
        rope.freq_base = freq_base.unwrap_or(rope.freq_base);
        rope.n_rot = n_rot.unwrap_or(rope.n_rot);
    }
    for (_, a) in m.attention_mut() {
        a.rope().map_or(Ok(()), |rope| k.check_rope(rope, a.head_dim))?;
    }
    Ok(m)
}
