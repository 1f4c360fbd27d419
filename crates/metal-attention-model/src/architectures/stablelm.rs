//! StableLM: layer norms, partly rotated heads.

use super::decoder::decoder;
use crate::attention::{NormOver, QkNorm};
use crate::metadata_reader::MetadataReader;
use crate::parts::Residual;
use crate::spec::NormKind;
use crate::{ModelError, ModelSpec, RopeLayout};

/// StableLM 2 and 3B. 12B, which has no second norm, computes attention and feed-forward in parallel and has norms of
/// each head of queries and keys.
pub(super) fn stablelm(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = decoder(k, NormKind::Layer, RopeLayout::Halves)?;
    let eps = k.norm(NormKind::Layer)?.eps;
    m.set_own_head();
    for i in 0..m.n_layer() {
        if !k.has_tensor(&format!("blk.{i}.ffn_norm.weight"), true) {
            (m.layers[i].residual, m.layers[i].feed_forward_norm) = (Residual::Parallel, None);
        }
    }
    if k.has_tensor("blk.0.attn_q_norm.weight", false) {
        m.set_qk_norm(QkNorm { kind: NormKind::Layer, eps, over: NormOver::EachHead, after_rope: false });
    }
    Ok(m)
}
