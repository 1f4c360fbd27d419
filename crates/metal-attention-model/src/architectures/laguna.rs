//! Laguna (Poolside): a softplus gate of attention's result, experts chosen by sigmoid with a shared one, and, in its
//! smaller models, a sliding window with a rotation of its own in three of four layers.

use super::decoder::{ExpertDefaults, decoder, experts, shared_expert};
use crate::attention::{AttentionGate, GateActivation, GateWidth, Mask};
use crate::feed_forward::RouterScore;
use crate::metadata_reader::MetadataReader;
use crate::spec::NormKind;
use crate::{ModelError, ModelSpec, Rope, RopeFactors, RopeLayout, RopeScaling};

pub(super) fn laguna(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = decoder(k, NormKind::Rms, RopeLayout::Halves)?;
    m.norm_heads(k.norm(NormKind::Rms)?.eps);
    // No key says whether the gate is by element or by head: the width of its tensor does.
    for (i, a) in m.attention_mut() {
        let by_element = k.tensor_rows(&format!("blk.{i}.attn_gate.weight")) == Some(a.n_head * a.head_dim);
        let width = if by_element { GateWidth::Element } else { GateWidth::Head };
        a.gate = Some(AttentionGate::Tensor { width, activation: GateActivation::Softplus });
    }
    for rope in m.rope_mut() {
        rope.factors = RopeFactors::None;
        // Only YaRN's factor and original context are read, as in llama.cpp; the rest has the values of the paper.
        if let RopeScaling::Yarn { factor, n_ctx_orig, .. } = rope.scaling {
            let (beta_fast, beta_slow, ext_factor) = (32.0, 1.0, 1.0);
            rope.scaling =
                RopeScaling::Yarn { factor, n_ctx_orig, beta_fast, beta_slow, ext_factor, log_multiplier: None };
        }
    }
    if let Some(window) = k.window()? {
        let windowed = k.windowed_layers(m.n_layer(), 4, true)?;
        m.set_windows(&windowed, Mask::Window(window), None);
        let (freq_base, n_rot) = (k.freq_base("rope.freq_base_swa")?, k.opt_positive("rope.dimension_count_swa")?);
        // Without any extension of the context.
        for rope in m.window_rope_mut(&windowed) {
            *rope = Rope::new(n_rot.unwrap_or(rope.n_rot), rope.layout, freq_base.unwrap_or(rope.freq_base));
        }
        for (_, a) in m.attention_mut() {
            a.rope().map_or(Ok(()), |rope| k.check_rope(rope, a.head_dim))?;
        }
    }
    let mut e = experts(k, ExpertDefaults { score: RouterScore::Sigmoid, renormalize: false }, 0)?;
    e.router.choice_bias = true;
    let n_shared = k.opt_size("expert_shared_count")?.unwrap_or(1);
    let shared = k.opt_size("expert_shared_feed_forward_length")?;
    e.shared = Some(shared_expert(shared.unwrap_or(e.expert.n_ff.saturating_mul(n_shared)), false));
    let first_sparse = k.opt_usize("leading_dense_block_count")?;
    m.set_experts(first_sparse.ok_or_else(|| k.missing("leading_dense_block_count"))?, &e);
    Ok(m)
}
