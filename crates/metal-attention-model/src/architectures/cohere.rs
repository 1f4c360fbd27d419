//! Command R, Command A, Aya: attention and feed-forward in parallel, from one layer norm without bias.

use super::decoder::decoder;
use crate::attention::{NormOver, QkNorm};
use crate::metadata_reader::MetadataReader;
use crate::spec::NormKind;
use crate::{HeadMatrix, ModelError, ModelSpec, OutputHead, RopeLayout};

/// Command R, and R+, which is recognised by its 64 layers and has norms of each head of queries and keys.
pub(super) fn command_r(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = parallel(k, k.positive_f32("logit_scale", 1.0)?)?;
    if m.n_layer() >= 64 {
        let eps = k.norm(NormKind::Layer)?.eps;
        m.set_qk_norm(QkNorm { kind: NormKind::Layer, eps, over: NormOver::EachHead, after_rope: false });
    }
    Ok(m)
}

/// Command R7B and A: a sliding window in three of four layers; the fourth has no positions.
pub(super) fn cohere2(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let scale = k.opt_f32("logit_scale")?.ok_or_else(|| k.missing("logit_scale"))?;
    let mut m = parallel(k, scale)?;
    let window = k.window()?.ok_or_else(|| k.missing("attention.sliding_window"))?;
    let windowed = k.windowed_layers(m.n_layer(), 4, false)?;
    m.rotate_in_windows_only(&windowed, window);
    Ok(m)
}

/// The common part.
fn parallel(k: &MetadataReader<'_>, logit_scale: f32) -> Result<ModelSpec, ModelError> {
    let mut m = decoder(k, NormKind::Layer, RopeLayout::Interleaved)?;
    m.side_by_side();
    m.set_norm_biases(false);
    m.output.head =
        m.output.head.map(|head| OutputHead { scale: logit_scale, matrix: HeadMatrix::EmbeddingTable, ..head });
    Ok(m)
}
