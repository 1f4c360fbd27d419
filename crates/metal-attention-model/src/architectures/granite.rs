//! Granite 3 and 4, and MiniCPM: Llama with factors on embeddings, residual additions, scores and logits; Granite 4 H
//! with Mamba-2 in most layers.

use super::decoder::{ExpertDefaults, attention, experts, shared_expert, stack};
use super::deepseek::first_latent;
use super::llama;
use super::mamba::{heads, mamba2_spec};
use crate::attention::Positions;
use crate::feed_forward::{Activation, Dense, RouterScore};
use crate::metadata_reader::MetadataReader;
use crate::parts::{FeedForward, Mixer, Residual};
use crate::recurrent::Mamba2Spec;
use crate::spec::NormKind;
use crate::{ModelError, ModelSpec, OutputHead, Rope, RopeFactors, RopeLayout};

/// Granite, dense or with experts.
pub(super) fn granite(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = llama::neighbours(k)?;
    let divisor = k.positive_f32("logit_scale", 0.0).map_err(|_| k.missing("logit_scale"))?;
    granite_parts(k, &mut m, divisor)?;
    Ok(m)
}

/// Granite 4 H: layers without KV heads are Mamba-2; dense or with experts.
pub(super) fn granite_hybrid(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let norm = k.norm(NormKind::Rms)?;
    let mamba = Mamba2Spec { norm: Some(norm.eps), ..mamba2_spec(k)? };
    let n_ff = k.positive("feed_forward_length")?;
    let feed_forward = if k.n_expert()?.is_some() {
        let defaults = ExpertDefaults { score: RouterScore::Softmax, renormalize: true };
        FeedForward::Experts(Box::new(experts(k, defaults, n_ff)?))
    } else {
        FeedForward::Dense(Dense { n_ff, gated: true, activation: Activation::Silu, fused: false })
    };
    let layer = |(n_head, n_head_kv): (usize, usize)| {
        let mixer = match n_head_kv {
            0 => Mixer::Mamba2(mamba),
            1.. => attention(k, RopeLayout::Interleaved, n_head, (n_head, n_head_kv))?,
        };
        Ok((mixer, feed_forward.clone()))
    };
    let layers = heads(k)?.into_iter().map(layer).collect::<Result<_, ModelError>>()?;
    let mut m = stack(k, norm, layers)?;
    // In these files this flag means that positions are not used.
    if k.opt_bool("rope.scaling.finetuned")? == Some(false) {
        m.set_positions(Positions::None);
    }
    granite_parts(k, &mut m, k.positive_f32("logit_scale", 1.0)?)?;
    Ok(m)
}

/// Granite's factors, and its shared expert.
fn granite_parts(k: &MetadataReader<'_>, m: &mut ModelSpec, divisor: f32) -> Result<(), ModelError> {
    scale(m, k.positive_f32("embedding_scale", 1.0)?, k.positive_f32("residual_scale", 1.0)?, 1.0 / divisor);
    if let Some(scale) = k.opt_f32("attention.scale")?.filter(|&scale| scale != 0.0) {
        m.attention_mut().for_each(|(_, a)| a.scale = scale);
    }
    if let Some(n_ff) = k.opt_size("expert_shared_feed_forward_length")? {
        for layer in &mut m.layers {
            if let FeedForward::Experts(experts) = &mut layer.feed_forward {
                experts.shared = Some(shared_expert(n_ff, false));
            }
        }
    }
    Ok(())
}

/// MiniCPM: Granite's structure; older files lack the factors.
pub(super) fn minicpm(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = llama::neighbours(k)?;
    let residual = k.positive_f32("residual_scale", 1.4 / (m.n_layer() as f32).sqrt())?;
    let divisor = k.positive_f32("logit_scale", 256.0 / m.n_embd as f32)?;
    scale(&mut m, k.positive_f32("embedding_scale", 12.0)?, residual, 1.0 / divisor);
    Ok(m)
}

/// MiniCPM 3: latent attention, with divisors of frequencies as in Phi 3.
pub(super) fn minicpm3(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = first_latent(k, RopeLayout::Halves)?;
    let n_ctx_orig = k.opt_positive("rope.scaling.original_context_length")?.unwrap_or(m.n_ctx_train);
    for layer in &mut m.layers {
        if let Mixer::LatentAttention(a) = &mut layer.mixer {
            a.rope = a.rope.map(|rope| Rope { factors: RopeFactors::ByContext { n_ctx_orig }, ..rope });
        }
    }
    let (residual, logits) = (1.4 / (m.n_layer() as f32).sqrt(), 256.0 / m.n_embd as f32);
    scale(&mut m, 12.0, residual, logits);
    Ok(m)
}

/// Sets the factors on embeddings, residual additions and logits.
fn scale(m: &mut ModelSpec, embedding: f32, residual: f32, logits: f32) {
    m.embedding.scale = embedding;
    m.layers.iter_mut().for_each(|layer| layer.residual = Residual::Sequential { scale: residual });
    m.output.head = m.output.head.map(|head| OutputHead { scale: logits, ..head });
}
