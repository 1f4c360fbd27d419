//! `MiniMax` M2: experts chosen by sigmoid and a bias, norms of queries and keys over all heads, partly rotated heads.

use super::decoder::{ExpertDefaults, decoder, experts};
use crate::attention::{NormOver, QkNorm};
use crate::feed_forward::RouterScore;
use crate::metadata_reader::MetadataReader;
use crate::spec::NormKind;
use crate::{ModelError, ModelSpec, RopeLayout};

pub(super) fn minimax_m2(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = decoder(k, NormKind::Rms, RopeLayout::Halves)?;
    let eps = k.norm(NormKind::Rms)?.eps;
    m.set_qk_norm(QkNorm { kind: NormKind::Rms, eps, over: NormOver::Row, after_rope: false });
    let defaults = ExpertDefaults { score: RouterScore::Sigmoid, renormalize: true };
    let mut e = experts(k, defaults, k.positive("feed_forward_length")?)?;
    e.router.choice_bias = true;
    m.set_experts(0, &e);
    m.set_own_head();
    Ok(m)
}
