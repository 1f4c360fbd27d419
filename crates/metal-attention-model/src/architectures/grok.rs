//! Grok 1 and 2: experts (in Grok 2 beside a dense feed-forward), also norms of results, caps of scores and logits.

use super::decoder::{ExpertDefaults, decoder, experts};
use crate::feed_forward::{Activation, RouterScore, SharedExpert};
use crate::metadata_reader::MetadataReader;
use crate::parts::FeedForward;
use crate::spec::NormKind;
use crate::{ModelError, ModelSpec, OutputHead, RopeLayout};

pub(super) fn grok(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = decoder(k, NormKind::Rms, RopeLayout::Halves)?;
    let norm = k.norm(NormKind::Rms)?;
    // Files of Grok 1 lack the factors.
    m.embedding.scale = k.positive_f32("embedding_scale", 78.383_67)?;
    let scale = k.positive_f32("logit_scale", 0.577_350_26)?;
    let soft_cap = k.opt_positive_f32("final_logit_softcapping")?;
    m.output.head = m.output.head.map(|head| OutputHead { scale, soft_cap, ..head });
    let scale = k.positive_f32("attention.output_scale", 0.088_388_346)?;
    let soft_cap = Some(k.positive_f32("attn_logit_softcapping", 30.0)?);
    m.attention_mut().for_each(|(_, a)| (a.scale, a.soft_cap) = (scale, soft_cap));
    m.dense_mut().for_each(|dense| dense.activation = Activation::Gelu);
    let defaults = ExpertDefaults { score: RouterScore::Softmax, renormalize: true };
    let mut experts = experts(k, defaults, k.positive("feed_forward_length")?)?;
    experts.expert.activation = Activation::Gelu;
    for (i, layer) in m.layers.iter_mut().enumerate() {
        layer.mixer_post_norm = Some(norm.with_tensor("attn_output_norm"));
        let old = k.has_tensor(&format!("blk.{i}.layer_output_norm.weight"), false);
        let mut post_norm = norm.with_tensor(if old { "layer_output_norm" } else { "post_ffw_norm" });
        let mut experts = experts.clone();
        if let FeedForward::Dense(dense) = layer.feed_forward
            && k.has_tensor(&format!("blk.{i}.ffn_up.weight"), true)
        {
            experts.shared = Some(SharedExpert { dense, gated: false, plain_names: true });
            // Grok 2 divides the sum by the root of 2; the norm cancels that except for its epsilon.
            post_norm.eps *= 2.0;
        }
        layer.feed_forward = FeedForward::Experts(Box::new(experts));
        layer.feed_forward_post_norm = Some(post_norm);
    }
    Ok(m)
}
