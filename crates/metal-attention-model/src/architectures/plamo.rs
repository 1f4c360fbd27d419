//! `PLaMo`: Llama with attention and feed-forward side by side from one norm.

use super::decoder::decoder;
use crate::keys::Keys;
use crate::spec::NormKind;
use crate::{ModelError, ModelSpec, RopeLayout};

pub(super) fn plamo(k: &Keys<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = decoder(k, NormKind::Rms, RopeLayout::Halves)?;
    m.side_by_side();
    m.set_own_head();
    Ok(m)
}
