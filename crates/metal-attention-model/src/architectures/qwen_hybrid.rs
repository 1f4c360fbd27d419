//! Qwen 3.5 (and 3.6) and Qwen3-Next: the gated delta rule in most layers, attention with a gated result and partly
//! rotated heads in the others.

use super::decoder::{ExpertDefaults, around, attention, experts, shared_expert};
use crate::attention::AttentionGate;
use crate::feed_forward::RouterScore;
use crate::metadata_reader::MetadataReader;
use crate::parts::Mixer;
use crate::recurrent::{DeltaGates, DeltaRuleSpec, KeySharing};
use crate::spec::NormKind;
use crate::{ModelError, ModelSpec, RopeLayout};

/// Qwen 3.5 with dense feed-forwards.
pub(super) fn qwen35(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = hybrid(k, KeySharing::Interleaved, DeltaGates::OfHeads { paired: false })?;
    m.set_rope_sections(k, true)?;
    Ok(m)
}

/// Qwen 3.5 with experts.
pub(super) fn qwen35moe(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = qwen35(k)?;
    add_experts(k, &mut m).map(|()| m)
}

/// Qwen3-Next: groups of value heads share a key head.
pub(super) fn qwen3next(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = hybrid(k, KeySharing::Grouped, DeltaGates::OfHeads { paired: true })?;
    add_experts(k, &mut m).map(|()| m)
}

/// The common part.
fn hybrid(k: &MetadataReader<'_>, sharing: KeySharing, gates: DeltaGates) -> Result<ModelSpec, ModelError> {
    let n_layer = k.n_layer()?;
    let norm = k.norm(NormKind::Rms)?;
    let head_count = k.per_layer("attention.head_count", n_layer)?.ok_or_else(|| k.missing("attention.head_count"))?;
    let head_count_kv = k.per_layer_or_none("attention.head_count_kv", n_layer)?.unwrap_or_else(|| head_count.clone());
    let recurrent = recurrent_layers(k, n_layer)?;
    let rule = Mixer::DeltaRule(delta_rule(k, sharing, gates, norm.eps)?);
    let mixer = |i: usize| {
        if recurrent[i] {
            return Ok(rule.clone());
        }
        let kv = head_count_kv[i];
        k.check("attention.head_count_kv", kv, kv > 0, "layers with attention must have heads of keys")?;
        attention(k, RopeLayout::Halves, head_count[0], (head_count[i], kv))
    };
    let mixers = (0..n_layer).map(mixer).collect::<Result<_, _>>()?;
    let mut m = around(k, NormKind::Rms, mixers)?;
    m.norm_heads(norm.eps);
    let scale = k.opt_positive_f32("attention.scale")?;
    for (_, a) in m.attention_mut() {
        a.gate = Some(AttentionGate::InQueries);
        a.scale = scale.unwrap_or(a.scale);
    }
    for layer in &mut m.layers {
        layer.feed_forward_norm = Some(norm.with_tensor("post_attention_norm"));
    }
    Ok(m)
}

/// Whether each layer has the delta rule: flags in `attention.recurrent_layers`, or all but every
/// `full_attention_interval`-th. Prediction heads have attention.
fn recurrent_layers(k: &MetadataReader<'_>, n_layer: usize) -> Result<Vec<bool>, ModelError> {
    let without_heads = k.n_layer_without_heads()?;
    let mut recurrent = if let Some(flags) = k.layer_flags("attention.recurrent_layers", without_heads)? {
        flags
    } else {
        let interval = k.opt_positive("full_attention_interval")?.unwrap_or(4);
        (0..without_heads).map(|i| !(i + 1).is_multiple_of(interval)).collect()
    };
    recurrent.resize(n_layer, false);
    Ok(recurrent)
}

/// The gated delta rule of the file.
fn delta_rule(
    k: &MetadataReader<'_>,
    sharing: KeySharing,
    gates: DeltaGates,
    eps: f32,
) -> Result<DeltaRuleSpec, ModelError> {
    let (n_head_k, n_head_v) = (k.positive("ssm.group_count")?, k.positive("ssm.time_step_rank")?);
    let (key_dim, n_values) = (k.positive("ssm.state_size")?, k.positive("ssm.inner_size")?);
    let divides = n_head_v.is_multiple_of(n_head_k);
    k.check("ssm.group_count", n_head_k, divides, "must divide ssm.time_step_rank")?;
    k.check("ssm.time_step_rank", n_head_v, n_values.is_multiple_of(n_head_v), "must divide ssm.inner_size")?;
    let n_tap = k.taps("ssm.conv_kernel")?;
    let plausible = |a: usize, b: usize| a.checked_mul(b).is_some_and(|n| n <= 1 << 28);
    let fits = plausible(n_head_k, key_dim) && plausible(n_values, key_dim);
    k.check("ssm.state_size", key_dim, fits, "a state this large is not plausible")?;
    let value_dim = n_values / n_head_v;
    Ok(DeltaRuleSpec { n_head_k, n_head_v, key_dim, value_dim, n_tap, sharing, gates, eps })
}

/// Adds experts to every layer, with a gated shared expert.
fn add_experts(k: &MetadataReader<'_>, m: &mut ModelSpec) -> Result<(), ModelError> {
    let defaults = ExpertDefaults { score: RouterScore::Softmax, renormalize: true };
    let n_ff = k.opt_size("feed_forward_length")?;
    let mut e = experts(k, defaults, n_ff.unwrap_or(0) / k.positive("expert_used_count")?)?;
    let shared = k.opt_size("expert_shared_feed_forward_length")?.or(n_ff).unwrap_or(e.expert.n_ff);
    e.shared = Some(shared_expert(shared, true));
    m.set_experts(0, &e);
    Ok(())
}
