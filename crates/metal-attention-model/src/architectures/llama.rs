//! Llama and models of the same structure: Mistral, Mixtral, SmolLM, InternLM 2, ERNIE 4.5, Seed-OSS, EXAONE 3,
//! Baichuan.

use super::decoder::{ExpertDefaults, decoder, experts, shared_expert};
use crate::attention::{Mask, NormOver, Positions, QkNorm, QueryTemperature};
use crate::feed_forward::{Activation, RouterScore};
use crate::metadata_reader::MetadataReader;
use crate::parts::FeedForward;
use crate::spec::NormKind;
use crate::{ModelError, ModelSpec, RopeLayout};

const SOFTMAX: ExpertDefaults = ExpertDefaults { score: RouterScore::Softmax, renormalize: true };

/// Llama, InternLM 2, ERNIE 4.5: NORM rotation (neighbours); experts as in Mixtral, and the sliding window of Mistral
/// 7B v0.1, if the file has them.
pub(super) fn neighbours(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = decoder(k, NormKind::Rms, RopeLayout::Interleaved)?;
    if k.n_expert()?.is_some() {
        let n_ff = k.positive("feed_forward_length")?;
        m.set_experts(0, &experts(k, SOFTMAX, n_ff)?);
    }
    if let Some(window) = k.window()? {
        m.attention_mut().for_each(|(_, a)| a.mask = Mask::Window(window));
    }
    Ok(m)
}

/// EXAONE 3, openPangu Embedded (with its biases): NeoX rotation (halves).
pub(super) fn halves(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    decoder(k, NormKind::Rms, RopeLayout::Halves)
}

/// The text model of `PaddleOCR-VL`: NeoX rotation in sections, one after the other.
pub(super) fn paddleocr(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = halves(k)?;
    m.set_rope_sections(k, false)?;
    Ok(m)
}

/// XVERSE: with its own output head.
pub(super) fn xverse(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = decoder(k, NormKind::Rms, RopeLayout::Interleaved)?;
    m.set_own_head();
    Ok(m)
}

/// Baichuan 1 and 2; 13B, recognised by its 40 layers, uses ALiBi.
pub(super) fn baichuan(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = xverse(k)?;
    if m.n_layer() == 40 {
        m.set_positions(Positions::Alibi { max_bias: 8.0 });
    }
    Ok(m)
}

/// Refact: `ALiBi`.
pub(super) fn refact(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = halves(k)?;
    m.set_positions(Positions::Alibi { max_bias: 8.0 });
    Ok(m)
}

/// Orion: layer norms.
pub(super) fn orion(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = decoder(k, NormKind::Layer, RopeLayout::Halves)?;
    m.set_own_head();
    Ok(m)
}

/// Arcee (AFM 4.5B): squared `ReLU` without a gate.
pub(super) fn arcee(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = decoder(k, NormKind::Rms, RopeLayout::Interleaved)?;
    m.no_gate(Activation::ReluSquared);
    Ok(m)
}

/// Maincoder: norms of each head of queries and keys after the rotation.
pub(super) fn maincoder(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = decoder(k, NormKind::Rms, RopeLayout::Interleaved)?;
    let eps = k.norm(NormKind::Rms)?.eps;
    m.set_qk_norm(QkNorm { kind: NormKind::Rms, eps, over: NormOver::Head, after_rope: true });
    Ok(m)
}

/// ERNIE 4.5 with experts in every `interleave_moe_layer_step`-th layer, after some dense ones.
pub(super) fn ernie_moe(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = decoder(k, NormKind::Rms, RopeLayout::Interleaved)?;
    let mut e = experts(k, SOFTMAX, k.positive("feed_forward_length")?)?;
    e.router.choice_bias = true;
    if let Some(n_ff) = k.opt_size("expert_shared_feed_forward_length")? {
        e.shared = Some(shared_expert(n_ff, false));
    }
    let step = k.opt_positive("interleave_moe_layer_step")?.unwrap_or(1);
    let first = k.opt_usize("leading_dense_block_count")?.unwrap_or(0);
    for (i, layer) in m.layers.iter_mut().enumerate() {
        if i >= first && (i + 1).is_multiple_of(step) {
            layer.feed_forward = FeedForward::Experts(Box::new(e.clone()));
        }
    }
    Ok(m)
}

/// Llama-embed: no causal mask.
pub(super) fn embed(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = neighbours(k)?;
    if !k.opt_bool("attention.causal")?.unwrap_or(false) {
        m.attention_mut().for_each(|(_, a)| a.mask = Mask::Full);
    }
    Ok(m)
}

/// SmolLM 3: every fourth layer has no positions.
pub(super) fn smollm3(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = decoder(k, NormKind::Rms, RopeLayout::Interleaved)?;
    for (_, a) in m.attention_mut().filter(|(i, _)| (i + 1).is_multiple_of(4)) {
        a.positions = Positions::None;
    }
    Ok(m)
}

/// Seed-OSS: biases of queries, keys and values; another name of the norm before the feed-forward.
pub(super) fn seed_oss(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = decoder(k, NormKind::Rms, RopeLayout::Halves)?;
    m.attention_mut().for_each(|(_, a)| a.qkv_bias = true);
    for layer in &mut m.layers {
        layer.feed_forward_norm = layer.feed_forward_norm.map(|norm| norm.with_tensor("post_attention_norm"));
    }
    Ok(m)
}

/// Llama 4: three of four layers attend within chunks; the fourth attends to everything, without rotation and with
/// queries that grow with their position. Every `interleave_moe_layer_step`-th layer has experts, whose weights
/// multiply their input, with a shared expert.
pub(super) fn llama4(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    const CHUNK: usize = 8192;
    let mut m = decoder(k, NormKind::Rms, RopeLayout::Interleaved)?;
    let chunked = k.opt_usize("attention.sliding_window")? != Some(0);
    let windowed = k.windowed_layers(m.n_layer(), 4, false)?;
    let eps = k.norm(NormKind::Rms)?.eps;
    // Maverick, recognised by its 128 experts, has no such norm.
    let qk_norm = k.n_expert()? != Some(128);
    for (i, a) in m.attention_mut() {
        if !chunked || windowed[i] {
            if qk_norm {
                let norm = QkNorm { kind: NormKind::Rms, eps, over: NormOver::Unweighted, after_rope: true };
                a.qk_norm = Some(norm);
            }
            if chunked {
                a.mask = Mask::Chunk(CHUNK);
            }
        } else {
            a.positions = Positions::None;
            a.temperature = Some(QueryTemperature { scale: 0.1, length: CHUNK, offset: 1 });
        }
    }
    if k.n_expert()?.is_some() {
        let mut e = experts(k, ExpertDefaults { score: RouterScore::Sigmoid, renormalize: false }, 0)?;
        e.router.score = RouterScore::Sigmoid;
        e.router.weights_inputs = true;
        e.shared = Some(shared_expert(e.expert.n_ff, false));
        let step = k.positive("interleave_moe_layer_step")?;
        for (i, layer) in m.layers.iter_mut().enumerate() {
            if (i + 1).is_multiple_of(step) {
                layer.feed_forward = FeedForward::Experts(Box::new(e.clone()));
            }
        }
    }
    Ok(m)
}
