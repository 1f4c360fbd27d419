//! Kimi Linear: Kimi Delta Attention in most layers, latent attention without positions in the others (arXiv
//! 2510.26692).

use super::decoder::{around, check_heads};
use super::deepseek::shared_experts;
use crate::attention::LatentAttentionSpec;
use crate::feed_forward::RouterScore;
use crate::metadata_reader::MetadataReader;
use crate::parts::Mixer;
use crate::recurrent::{DeltaGates, DeltaRuleSpec, KeySharing};
use crate::spec::NormKind;
use crate::{ModelError, ModelSpec};

/// Layers without KV heads have the delta rule; after some dense layers, experts with shared experts.
pub(super) fn kimi_linear(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let (n_layer, eps) = (k.n_layer()?, k.norm(NormKind::Rms)?.eps);
    let head_count = k.per_layer("attention.head_count", n_layer)?.ok_or_else(|| k.missing("attention.head_count"))?;
    let key = "attention.head_count_kv";
    let head_count_kv = k.per_layer_or_none(key, n_layer)?.ok_or_else(|| k.missing(key))?;
    let mixer = |(&n_head, &n_head_kv): (&usize, &usize)| match n_head_kv {
        0 => delta_rule(k, n_head, eps),
        1.. => latent_attention(k, n_head, eps),
    };
    let mixers = head_count.iter().zip(&head_count_kv).map(mixer).collect::<Result<_, _>>()?;
    let mut m = around(k, NormKind::Rms, mixers)?;
    let mut e = shared_experts(k, RouterScore::Sigmoid)?;
    e.router.renormalize = true;
    m.set_experts(k.opt_usize("leading_dense_block_count")?.unwrap_or(0), &e);
    m.set_own_head();
    Ok(m)
}

/// Kimi Delta Attention with `n_head` heads.
fn delta_rule(k: &MetadataReader<'_>, n_head: usize, eps: f32) -> Result<Mixer, ModelError> {
    let dim = k.positive("kda.head_dim")?;
    let n = n_head.checked_mul(dim).and_then(|n| n.checked_mul(dim));
    let plausible = n.is_some_and(|n| n <= 1 << 28);
    k.check("kda.head_dim", dim, plausible, "a state this large is not plausible")?;
    Ok(Mixer::DeltaRule(DeltaRuleSpec {
        n_head_k: n_head,
        n_head_v: n_head,
        key_dim: dim,
        value_dim: dim,
        n_tap: k.taps("ssm.conv_kernel")?,
        sharing: KeySharing::Grouped,
        gates: DeltaGates::OfChannels { rank: dim },
        eps,
    }))
}

/// Latent attention without positions.
fn latent_attention(k: &MetadataReader<'_>, n_head: usize, eps: f32) -> Result<Mixer, ModelError> {
    if let Some(rank) = k.opt_size("attention.q_lora_rank")? {
        return Err(k.unsupported("attention.q_lora_rank", rank, "compressed queries are missing"));
    }
    let head_dim = k.positive("attention.key_length_mla")?;
    // The elements that other models rotate, which all heads' keys share.
    let shared_dim = k.positive("rope.dimension_count")?;
    let fits = head_dim > shared_dim;
    k.check("attention.key_length_mla", head_dim, fits, "must be larger than rope.dimension_count")?;
    let latent = LatentAttentionSpec {
        n_head,
        q_rank: None,
        kv_rank: k.positive("attention.kv_lora_rank")?,
        n_nope: head_dim - shared_dim,
        value_dim: k.positive("attention.value_length_mla")?,
        shared_dim,
        rope: None,
        scale: 1.0 / (head_dim as f32).sqrt(),
        eps,
        temperature: None,
        fused_expansions: false,
    };
    let longest = latent.head_dim().max(latent.value_dim).max(latent.kv_rank + shared_dim);
    check_heads(k, n_head, longest)?;
    Ok(Mixer::LatentAttention(latent))
}
