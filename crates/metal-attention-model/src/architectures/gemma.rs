//! Gemma 1 to 4, and EmbeddingGemma. (The norm weights in files include the 1 that the papers add.)

use super::decoder::{ExpertDefaults, WindowRope, check_heads, decoder, experts};
use crate::attention::{KvSource, Mask, Positions};
use crate::feed_forward::{Activation, Dense, ExpertNorms, RouterScore, SharedExpert};
use crate::metadata_reader::MetadataReader;
use crate::parts::FeedForward;
use crate::spec::{NormKind, OutputScale, PerLayerEmbedding, PooledProjection, ResidualStreams};
use crate::{ModelError, ModelSpec, RopeFactors, RopeLayout};

/// Base of the RoPE frequencies in layers with a sliding window, from Gemma 3 on.
const WINDOW_BASE: f32 = 10_000.0;

/// Gemma: embeddings multiplied by `sqrt(n_embd)`, GELU.
pub(super) fn gemma(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = decoder(k, NormKind::Rms, RopeLayout::Halves)?;
    m.embedding.scale = (m.n_embd as f32).sqrt();
    m.dense_mut().for_each(|dense| dense.activation = Activation::Gelu);
    Ok(m)
}

/// Gemma 2: also norms of results, caps of scores and logits, a sliding window in every second layer.
pub(super) fn gemma2(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = gemma(k)?;
    m.add_post_norms(k.norm(NormKind::Rms)?);
    let cap = k.opt_positive_f32("attn_logit_softcapping")?.or(Some(50.0));
    m.attention_mut().for_each(|(_, a)| a.soft_cap = cap);
    let logit_cap = k.opt_positive_f32("final_logit_softcapping")?.or(Some(30.0));
    m.output.head = m.output.head.map(|head| crate::OutputHead { soft_cap: logit_cap, ..head });
    // 27B scales scores by the width of the residual stream, not of a head.
    scale_of_27b(&mut m, 46);
    let window = k.window()?.unwrap_or(4096);
    let windowed = k.windowed_layers(m.n_layer(), 2, false)?;
    m.set_windows(&windowed, Mask::Window(window), None);
    Ok(m)
}

/// Gemma 3: Gemma 2 without caps, with norms of queries and keys, full attention in every sixth layer, and another RoPE
/// base in the others.
pub(super) fn gemma3(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = of_gemma3(k)?;
    if let Some(window) = k.window()? {
        let windowed = k.windowed_layers(m.n_layer(), 6, false)?;
        m.set_windows(&windowed, Mask::Window(window), window_rope(k)?);
    }
    Ok(m)
}

/// `EmbeddingGemma`: symmetric windows, and two matrices after pooling.
pub(super) fn embedding(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = of_gemma3(k)?;
    m.attention_mut().for_each(|(_, a)| a.mask = Mask::Full);
    let window = k.window()?.ok_or_else(|| k.missing("attention.sliding_window"))?;
    let windowed = k.windowed_layers(m.n_layer(), 6, false)?;
    m.set_windows(&windowed, Mask::SymmetricWindow(window / 2), window_rope(k)?);
    for (tensor, key) in [("dense_2", "dense_2_feat_out"), ("dense_3", "dense_3_feat_out")] {
        if let Some(n_out) = k.opt_usize(key)?.filter(|&n| n > 0)
            && k.has_tensor(&format!("{tensor}.weight"), true)
        {
            k.positive(key)?;
            m.output.pooled_projections.push(PooledProjection { tensor, n_out });
        }
    }
    Ok(m)
}

/// The common part of Gemma 3 and `EmbeddingGemma`.
fn of_gemma3(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = gemma(k)?;
    let norm = k.norm(NormKind::Rms)?;
    m.add_post_norms(norm);
    m.norm_heads(norm.eps);
    let soft_cap = k.opt_positive_f32("final_logit_softcapping")?;
    m.output.head = m.output.head.map(|head| crate::OutputHead { soft_cap, ..head });
    scale_of_27b(&mut m, 62);
    Ok(m)
}

/// The RoPE of layers with a sliding window.
fn window_rope(k: &MetadataReader<'_>) -> Result<Option<WindowRope>, ModelError> {
    let freq_base = k.freq_base("rope.freq_base_swa")?.unwrap_or(WINDOW_BASE);
    Ok(Some(WindowRope { freq_base }))
}

/// The largest models of Gemma 2 and 3, recognised by `n_layer`, scale scores by the width of the residual stream.
fn scale_of_27b(m: &mut ModelSpec, n_layer: usize) {
    if m.n_layer() == n_layer {
        let n_embd = m.n_embd;
        m.attention_mut().for_each(|(_, a)| a.scale = 1.0 / ((n_embd / a.n_head) as f32).sqrt());
    }
}

/// The last `n_shared` layers read the KV cache of the last layer before them with the same kind of mask.
fn share_kv(k: &MetadataReader<'_>, m: &mut ModelSpec, windowed: &[bool], n_shared: usize) -> Result<(), ModelError> {
    let n_layer = m.n_layer();
    let n_own = n_layer.saturating_sub(n_shared);
    k.check("attention.shared_kv_layers", n_shared, n_shared == 0 || n_own >= 2, "two layers must have their own")?;
    for (i, a) in m.attention_mut().filter(|(i, _)| *i >= n_own) {
        a.kv = KvSource::Layer(if windowed[i] { n_own - 2 } else { n_own - 1 });
    }
    Ok(())
}

/// Gemma 3n: four residual streams (AltUp) with LAuReL, an embedding for each layer, shared keys and values, sparse
/// activations in the first layers.
pub(super) fn gemma3n(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    /// Number of layers with sparse activations, and the standard deviations above which 5 % of a normal distribution
    /// lie.
    const SPARSE: (usize, f32) = (10, 1.644_853_6);
    let mut m = gemma(k)?;
    let norm = k.norm(NormKind::Rms)?;
    m.add_post_norms(norm);
    m.norm_heads(norm.eps);
    for (_, a) in m.attention_mut() {
        (a.scale, a.value_norm) = (1.0, Some(norm.eps));
    }
    let soft_cap = k.opt_positive_f32("final_logit_softcapping")?.or(Some(30.0));
    m.output.head = m.output.head.map(|head| crate::OutputHead { soft_cap, ..head });
    m.dense_mut().take(SPARSE.0).for_each(|dense| dense.activation = Activation::SparseGelu { n_std: SPARSE.1 });
    let window = k.window()?.ok_or_else(|| k.missing("attention.sliding_window"))?;
    let windowed = k.windowed_layers(m.n_layer(), 5, false)?;
    m.set_windows(&windowed, Mask::Window(window), window_rope(k)?);
    let n_shared = match k.opt_usize("attention.shared_kv_layers")? {
        Some(n) => n,
        None => m.n_layer().saturating_sub(20),
    };
    share_kv(k, &mut m, &windowed, n_shared)?;
    m.set_per_layer_embedding(PerLayerEmbedding {
        width: k.opt_positive("embedding_length_per_layer_input")?.unwrap_or(256),
        proj_norm: norm.with_tensor("per_layer_proj_norm"),
        post_norm: norm.with_tensor("post_norm"),
    });
    let streams = ResidualStreams {
        n: k.opt_positive("altup.num_inputs")?.unwrap_or(4),
        active: k.opt_usize("altup.active_idx")?.unwrap_or(0),
        laurel_rank: k.opt_positive("laurel.rank")?.unwrap_or(64),
        router_norm: norm.with_tensor("altup_router_norm"),
        laurel_norm: norm.with_tensor("laurel_post_norm"),
    };
    k.check("altup.num_inputs", streams.n, (2..=16).contains(&streams.n), "must be 2 to 16")?;
    k.check("altup.active_idx", streams.active, streams.active == 0, "the first stream must be the active one")?;
    m.set_streams(streams);
    Ok(m)
}

/// Gemma 4: another head size in layers with a sliding window, norms of values, shared keys and values, an embedding
/// for each layer, experts beside the dense feed-forward.
pub(super) fn gemma4(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let (mut m, windowed) = gemma4_with_own_keys(k)?;
    share_kv(k, &mut m, &windowed, k.opt_usize("attention.shared_kv_layers")?.unwrap_or(0))?;
    Ok(m)
}

/// Gemma 4 before its last layers share keys and values, and which of its layers have a sliding window.
pub(super) fn gemma4_with_own_keys(k: &MetadataReader<'_>) -> Result<(ModelSpec, Vec<bool>), ModelError> {
    let mut m = gemma(k)?;
    let norm = k.norm(NormKind::Rms)?;
    m.add_post_norms(norm);
    m.norm_heads(norm.eps);
    let soft_cap = k.opt_positive_f32("final_logit_softcapping")?;
    m.output.head = m.output.head.map(|head| crate::OutputHead { soft_cap, ..head });
    let n_layer = m.n_layer();
    let window = k.window()?.ok_or_else(|| k.missing("attention.sliding_window"))?;
    let windowed = k.windowed_layers(n_layer, 6, false)?;
    m.set_windows(&windowed, Mask::Window(window), window_rope(k)?);
    let window_dim = k.opt_positive("attention.key_length_swa")?;
    let window_rot = k.opt_positive("rope.dimension_count_swa")?;
    for (i, a) in m.attention_mut() {
        (a.scale, a.value_norm) = (1.0, Some(norm.eps));
        if windowed[i] {
            a.head_dim = window_dim.unwrap_or(a.head_dim);
            check_heads(k, a.n_head, a.head_dim)?;
            if let Positions::Rope(rope) = &mut a.positions {
                rope.n_rot = window_rot.unwrap_or(rope.n_rot.min(a.head_dim));
                k.check_rope(rope, a.head_dim)?;
            }
        } else if !k.has_tensor(&format!("blk.{i}.attn_v.weight"), true)
            && !k.has_tensor(&format!("blk.{i}.attn_qkv.weight"), false)
        {
            a.kv = KvSource::KeysAsValues;
        }
    }
    if let Some(width) = k.opt_usize("embedding_length_per_layer_input")?.filter(|&n| n > 0) {
        k.positive("embedding_length_per_layer_input")?;
        let (proj_norm, post_norm) = (norm.with_tensor("per_layer_proj_norm"), norm.with_tensor("post_norm"));
        m.set_per_layer_embedding(PerLayerEmbedding { width, proj_norm, post_norm });
    }
    let defaults = ExpertDefaults { score: RouterScore::Softmax, renormalize: true };
    let experts = k.n_expert()?.map(|_| experts(k, defaults, 0)).transpose()?;
    for (i, layer) in m.layers.iter_mut().enumerate() {
        layer.output_scale = OutputScale::Stored;
        let (Some(experts), FeedForward::Dense(dense)) = (&experts, &layer.feed_forward) else { continue };
        if !k.has_tensor(&format!("blk.{i}.ffn_gate_inp.weight"), true) {
            continue;
        }
        let mut experts = experts.clone();
        experts.expert = Dense { activation: Activation::Gelu, fused: true, ..experts.expert };
        experts.shared = Some(SharedExpert { dense: *dense, gated: false, plain_names: true });
        experts.expert_norms = Some(ExpertNorms {
            input: norm.with_tensor("pre_ffw_norm_2"),
            result: norm.with_tensor("post_ffw_norm_2"),
            shared_result: norm.with_tensor("post_ffw_norm_1"),
            router_eps: norm.eps,
        });
        layer.feed_forward = FeedForward::Experts(Box::new(experts));
    }
    // Divisors of frequencies apply to the full layers.
    for (i, a) in m.attention_mut() {
        if let (true, Positions::Rope(rope)) = (windowed[i], &mut a.positions) {
            rope.factors = RopeFactors::None;
        }
    }
    Ok((m, windowed))
}
