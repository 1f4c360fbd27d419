//! ModernBERT: an encoder with norms before its parts, RoPE, and symmetric windows in two of three layers.

use super::decoder::{WindowRope, classifier, decoder};
use crate::attention::Mask;
use crate::feed_forward::Activation;
use crate::metadata_reader::MetadataReader;
use crate::spec::{Classifier, ClassifierActivation, NormKind};
use crate::{ModelError, ModelSpec, Pooling, RopeLayout};

pub(super) fn modern_bert(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = decoder(k, NormKind::Layer, RopeLayout::Halves)?;
    let norm = k.norm(NormKind::Layer)?;
    m.embedding.norm = Some(norm.with_tensor("token_embd_norm"));
    m.set_norm_biases(false);
    let activation = match k.opt_str("hidden_activation")? {
        None | Some("gelu" | "geglu") => Activation::Gelu,
        Some("silu" | "swiglu") => Activation::Silu,
        Some(other) => return Err(k.unsupported("hidden_activation", other, "supported are gelu and silu")),
    };
    m.dense_mut().for_each(|dense| (dense.fused, dense.activation) = (true, activation));
    m.attention_mut().for_each(|(_, a)| (a.mask, a.fused_qkv) = (Mask::Full, true));
    // The embedding is normalised already.
    if !k.has_tensor("blk.0.attn_norm.weight", false) {
        m.layers[0].mixer_norm = None;
    }
    if let Some(window) = k.window()? {
        let freq_base = k.freq_base("rope.freq_base_swa")?.unwrap_or(10_000.0);
        let windowed = k.windowed_layers(m.n_layer(), 3, true)?;
        m.set_windows(&windowed, Mask::SymmetricWindow(window / 2), Some(WindowRope { freq_base }));
    }
    m.output.head = None;
    m.output.classifier =
        classifier(k, Pooling::Mean, norm.eps)?.map(|c| Classifier { activation: ClassifierActivation::Gelu, ..c });
    if m.output.pooling.is_none() {
        m.output.pooling = Some(Pooling::Mean);
    }
    Ok(m)
}
