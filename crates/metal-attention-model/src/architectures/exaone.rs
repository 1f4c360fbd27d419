//! EXAONE 4: norms of the results only, norms of queries and keys.

use super::decoder::decoder;
use crate::attention::{Mask, NormOver, Positions, QkNorm};
use crate::keys::Keys;
use crate::spec::NormKind;
use crate::{ModelError, ModelSpec, RopeLayout};

/// EXAONE 4; the larger, with its 64 layers, has windows in three of four, and rotates only there.
pub(super) fn exaone4(k: &Keys<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = decoder(k, NormKind::Rms, RopeLayout::Halves)?;
    let norm = k.norm(NormKind::Rms)?;
    m.only_post_norms(norm);
    let windowed = k.windowed_layers(m.n_layer(), 4, false)?;
    let window = k.window()?.unwrap_or(4096);
    let has_windows = m.n_layer() == 64;
    for (i, a) in m.attention_mut() {
        a.qk_norm = Some(QkNorm { kind: NormKind::Rms, eps: norm.eps, over: NormOver::Head, after_rope: false });
        if has_windows && windowed[i] {
            a.mask = Mask::Window(window);
        } else if has_windows {
            a.positions = Positions::None;
        }
    }
    Ok(m)
}
