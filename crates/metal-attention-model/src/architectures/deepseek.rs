//! DeepSeek 1 to 3, R1 and models of the same structure (Kimi K2, GigaChat 3, Mistral 4); `dots.llm1`; PLM.

use super::decoder::{ExpertDefaults, around, check_heads, decoder, experts, shared_expert};
use crate::attention::{LatentAttentionSpec, QueryTemperature};
use crate::feed_forward::{Activation, Experts, RouterScore};
use crate::metadata_reader::MetadataReader;
use crate::parts::Mixer;
use crate::spec::NormKind;
use crate::{HeadMatrix, ModelError, ModelSpec, OutputHead, Rope, RopeLayout, RopeScaling};

/// DeepSeek V2 and V3: latent attention, and after some dense layers experts with shared experts.
pub(super) fn deepseek2(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let eps = k.norm(NormKind::Rms)?.eps;
    let kv_rank = k.positive("attention.kv_lora_rank")?;
    // Older files, in which the expansion to keys is not absorbed into the query, give head sizes by the plain keys.
    let (head_dim, value_dim) = match k.opt_positive("attention.key_length_mla")? {
        Some(n) => (n, k.positive("attention.value_length_mla")?),
        None => (k.positive("attention.key_length")?, k.positive("attention.value_length")?),
    };
    let n_rot = k.positive("rope.dimension_count")?;
    k.check("attention.key_length", head_dim, head_dim > n_rot, "must be larger than rope.dimension_count")?;
    let (mut rope, mut length) = (k.rope(RopeLayout::Interleaved, head_dim)?, 1.0);
    if let RopeScaling::Yarn { factor, log_multiplier, .. } = &mut rope.scaling {
        // The scores' scale makes up for the length of rotated vectors (DeepSeek's `mscale`). The key is the multiplier
        // times 0.1.
        let grown = |m: f32| 1.0 + 0.1 * m * factor.max(1.0).ln();
        length = match *log_multiplier {
            Some(m) => grown(m / 0.1),
            None => grown(1.0),
        };
        if log_multiplier.is_some() {
            *log_multiplier = Some(1.0);
        }
    }
    let q_rank = k.opt_usize("attention.q_lora_rank")?.filter(|&n| n > 0);
    let q_rank = q_rank.filter(|_| !k.has_tensor("blk.0.attn_q.weight", false));
    let temperature = match k.opt_f32("attention.temperature_scale")?.filter(|&s| s != 0.0) {
        Some(scale) => Some(QueryTemperature { scale, length: k.positive("attention.temperature_length")?, offset: 0 }),
        None => None,
    };
    let latent = LatentAttentionSpec {
        n_head: 0,
        q_rank,
        kv_rank,
        n_nope: head_dim - n_rot,
        value_dim,
        shared_dim: n_rot,
        rope: Some(rope),
        scale: length * length / (head_dim as f32).sqrt(),
        eps,
        temperature,
        fused_expansions: false,
    };
    let mut m = of_latent_attention(k, &latent)?;
    let e = shared_experts(k, RouterScore::Softmax)?;
    m.set_experts(k.opt_usize("leading_dense_block_count")?.unwrap_or(0), &e);
    Ok(m)
}

/// A decoder with this latent attention in every layer; numbers of heads are read from the file.
fn of_latent_attention(k: &MetadataReader<'_>, latent: &LatentAttentionSpec) -> Result<ModelSpec, ModelError> {
    let longest = latent.head_dim().max(latent.value_dim).max(latent.kv_rank + latent.shared_dim);
    let n_head = k.per_layer("attention.head_count", k.n_layer()?)?.ok_or_else(|| k.missing("attention.head_count"))?;
    let mixer = |n_head| {
        check_heads(k, n_head, longest)?;
        Ok(Mixer::LatentAttention(LatentAttentionSpec { n_head, ..latent.clone() }))
    };
    around(k, NormKind::Rms, n_head.into_iter().map(mixer).collect::<Result<_, ModelError>>()?)
}

/// A decoder with latent attention in its older form: both expansions are one matrix.
pub(super) fn first_latent(k: &MetadataReader<'_>, layout: RopeLayout) -> Result<ModelSpec, ModelError> {
    let n_embd = k.positive("embedding_length")?;
    let n_head = k.per_layer("attention.head_count", k.n_layer()?)?.ok_or_else(|| k.missing("attention.head_count"))?;
    let default = (n_embd / n_head[0]).max(1);
    let head_dim = k.opt_positive("attention.key_length")?.unwrap_or(default);
    let rope = k.rope(layout, head_dim)?;
    k.check("attention.key_length", head_dim, head_dim > rope.n_rot, "must be larger than rope.dimension_count")?;
    let latent = LatentAttentionSpec {
        n_head: 0,
        q_rank: k.opt_size("attention.q_lora_rank")?,
        kv_rank: k.positive("attention.kv_lora_rank")?,
        n_nope: head_dim - rope.n_rot,
        value_dim: k.opt_positive("attention.value_length")?.unwrap_or(default),
        shared_dim: rope.n_rot,
        rope: Some(rope),
        scale: 1.0 / (head_dim as f32).sqrt(),
        eps: k.norm(NormKind::Rms)?.eps,
        temperature: None,
        fused_expansions: true,
    };
    of_latent_attention(k, &latent)
}

/// PLM: latent attention without compression of queries, squared `ReLU` without a gate.
pub(super) fn plm(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = first_latent(k, RopeLayout::Interleaved)?;
    m.no_gate(Activation::ReluSquared);
    m.output.head = m.output.head.map(|head| OutputHead { matrix: HeadMatrix::EmbeddingTable, ..head });
    Ok(m)
}

/// DeepSeek 1: after some dense layers, experts with shared experts.
pub(super) fn deepseek(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    with_experts(k, RopeLayout::Interleaved)
}

/// The text model of DeepSeek-OCR: DeepSeek 1 with NeoX rotation without scaling.
pub(super) fn deepseek_ocr(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = with_experts(k, RopeLayout::Halves)?;
    m.rope_mut().for_each(|rope| *rope = Rope::new(rope.n_rot, RopeLayout::Halves, rope.freq_base));
    Ok(m)
}

/// DeepSeek 1 with a rotation of the given layout.
fn with_experts(k: &MetadataReader<'_>, layout: RopeLayout) -> Result<ModelSpec, ModelError> {
    let mut m = decoder(k, NormKind::Rms, layout)?;
    let e = shared_experts(k, RouterScore::Softmax)?;
    m.set_experts(k.opt_usize("leading_dense_block_count")?.unwrap_or(0), &e);
    Ok(m)
}

/// `dots.llm1`: DeepSeek's experts with plain attention and norms of queries and keys.
pub(super) fn dots1(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = decoder(k, NormKind::Rms, RopeLayout::Halves)?;
    m.norm_heads(k.norm(NormKind::Rms)?.eps);
    let e = shared_experts(k, RouterScore::Softmax)?;
    m.set_experts(k.opt_usize("leading_dense_block_count")?.unwrap_or(0), &e);
    m.set_own_head();
    Ok(m)
}

/// Experts with shared experts, which together are `expert_shared_count` times as wide as one.
pub(super) fn shared_experts(k: &MetadataReader<'_>, score: RouterScore) -> Result<Experts, ModelError> {
    let mut e = experts(k, ExpertDefaults { score, renormalize: false }, 0)?;
    e.router.choice_bias = true;
    let n_shared = k.opt_usize("expert_shared_count")?.unwrap_or(0);
    if n_shared > 0 {
        k.positive("expert_shared_count")?;
        e.shared = Some(shared_expert(e.expert.n_ff.saturating_mul(n_shared), false));
    }
    Ok(e)
}
