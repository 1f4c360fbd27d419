//! `OpenELM`: layers of different widths, norms of queries and keys.

use super::decoder::decoder;
use crate::metadata_reader::MetadataReader;
use crate::spec::NormKind;
use crate::{HeadMatrix, ModelError, ModelSpec, OutputHead, RopeLayout};

pub(super) fn openelm(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = decoder(k, NormKind::Rms, RopeLayout::Halves)?;
    m.norm_heads(k.norm(NormKind::Rms)?.eps);
    m.attention_mut().for_each(|(_, a)| a.fused_qkv = true);
    m.output.head = m.output.head.map(|head| OutputHead { matrix: HeadMatrix::EmbeddingTable, ..head });
    Ok(m)
}
