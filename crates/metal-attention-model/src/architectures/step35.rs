//! Step 3.5: heads that differ by layer, a gate of each head's result, sliding windows with a rotation of their own,
//! experts chosen by sigmoid with a shared one, and a SwiGLU that is cut in some layers.

use super::decoder::{ExpertDefaults, decoder, experts, shared_expert};
use crate::attention::{AttentionGate, GateActivation, GateWidth, Mask, NormOver, QkNorm};
use crate::feed_forward::{Activation, RouterScore};
use crate::metadata_reader::MetadataReader;
use crate::parts::FeedForward;
use crate::spec::NormKind;
use crate::{ModelError, ModelSpec, Rope, RopeFactors, RopeLayout, RopeScaling};

/// Base of the frequencies in layers with a window, if no key gives it.
const WINDOW_BASE: f32 = 10_000.0;

pub(super) fn step35(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = decoder(k, NormKind::Rms, RopeLayout::Halves)?;
    let (n_layer, eps) = (m.n_layer(), k.norm(NormKind::Rms)?.eps);
    for (i, a) in m.attention_mut() {
        let has = |tensor: &str| k.has_tensor(&format!("blk.{i}.{tensor}.weight"), true);
        let gate = AttentionGate::Tensor { width: GateWidth::Head, activation: GateActivation::Sigmoid };
        a.gate = has("attn_gate").then_some(gate);
        let norm = QkNorm { kind: NormKind::Rms, eps, over: NormOver::Head, after_rope: false };
        a.qk_norm = has("attn_q_norm").then_some(norm);
    }
    rotate(k, &mut m)?;
    add_experts(k, &mut m)?;
    // 0 means no limit. The second list is that of dense layers, too.
    let expert_limits = k.f32_per_layer("swiglu_clamp_exp", n_layer)?;
    let shared_limits = k.f32_per_layer("swiglu_clamp_shexp", n_layer)?;
    let activation = |limit: f32| if limit > 1e-6 { Activation::ClampedSilu { limit } } else { Activation::Silu };
    for (i, layer) in m.layers.iter_mut().enumerate() {
        match &mut layer.feed_forward {
            FeedForward::Dense(dense) => dense.activation = activation(shared_limits[i]),
            FeedForward::Experts(e) => {
                e.expert.activation = activation(expert_limits[i]);
                if let Some(shared) = &mut e.shared {
                    shared.dense.activation = activation(shared_limits[i]);
                }
            }
            FeedForward::ChannelMix(_) | FeedForward::None => {}
        }
    }
    m.set_own_head();
    Ok(m)
}

/// Windows and rotations. `rope.dimension_count` is that of layers with a window. The others rotate half as many
/// elements; they alone have an extension of the context and divisors, which the file stores for the larger number.
fn rotate(k: &MetadataReader<'_>, m: &mut ModelSpec) -> Result<(), ModelError> {
    let window = k.window()?.ok_or_else(|| k.missing("attention.sliding_window"))?;
    let pattern = "attention.sliding_window_pattern";
    let windowed = k.layer_flags(pattern, m.n_layer())?.ok_or_else(|| k.missing(pattern))?;
    m.set_windows(&windowed, Mask::Window(window), None);
    let freq_base = k.freq_base("rope.freq_base_swa")?.unwrap_or(WINDOW_BASE);
    let of_window = k.opt_positive("rope.dimension_count_swa")?;
    for (i, a) in m.attention_mut() {
        let head_dim = a.head_dim;
        let Some(rope) = a.rope_mut() else { continue };
        *rope = if windowed[i] {
            let n_rot = of_window.unwrap_or(rope.n_rot);
            Rope { n_rot, freq_base, scaling: RopeScaling::None, factors: RopeFactors::None, ..*rope }
        } else {
            Rope { n_rot: rope.n_rot / 2, ..*rope }
        };
        k.check_rope(rope, head_dim)?;
    }
    let n = m.rope_mut().map(|rope| rope.n_rot / 2).max().unwrap_or(0);
    for rope in m.rope_mut().filter(|rope| rope.factors == RopeFactors::Tensor) {
        rope.factors = RopeFactors::FirstOfTensor { n };
    }
    Ok(())
}

/// Experts with a shared one, in the layers that have a router.
fn add_experts(k: &MetadataReader<'_>, m: &mut ModelSpec) -> Result<(), ModelError> {
    let first_sparse = k.opt_usize("leading_dense_block_count")?.unwrap_or(0);
    let has_router = |i: usize| k.has_tensor(&format!("blk.{i}.ffn_gate_inp.weight"), i >= first_sparse);
    if !(0..m.n_layer()).any(has_router) {
        return Ok(());
    }
    let mut e = experts(k, ExpertDefaults { score: RouterScore::Sigmoid, renormalize: false }, 0)?;
    e.router.choice_bias = true;
    let shared = k.opt_size("expert_shared_feed_forward_length")?;
    e.shared = shared.map(|n_ff| shared_expert(n_ff, false));
    for (_, layer) in m.layers.iter_mut().enumerate().filter(|(i, _)| has_router(*i)) {
        layer.feed_forward = FeedForward::Experts(Box::new(e.clone()));
    }
    Ok(())
}
