//! `EuroBERT` and `NeoBERT`: Llama layers without a causal mask.

use super::decoder::{classifier, decoder};
use crate::attention::Mask;
use crate::metadata_reader::MetadataReader;
use crate::spec::NormKind;
use crate::{ModelError, ModelSpec, Pooling, RopeLayout};

/// `EuroBERT`.
pub(super) fn eurobert(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    encoder(k, RopeLayout::Halves)
}

/// `NeoBERT`: fused matrices.
pub(super) fn neo_bert(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = encoder(k, RopeLayout::Interleaved)?;
    m.attention_mut().for_each(|(_, a)| a.fused_qkv = true);
    m.dense_mut().for_each(|dense| dense.fused = true);
    m.output.norm = m.output.norm.map(|norm| norm.with_tensor("enc.output_norm"));
    m.output.classifier = classifier(k, Pooling::First, k.norm(NormKind::Rms)?.eps)?;
    Ok(m)
}

/// The common part.
fn encoder(k: &MetadataReader<'_>, layout: RopeLayout) -> Result<ModelSpec, ModelError> {
    let mut m = decoder(k, NormKind::Rms, layout)?;
    m.attention_mut().for_each(|(_, a)| a.mask = Mask::Full);
    m.output.head = None;
    Ok(m)
}
