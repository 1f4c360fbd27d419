//! Mamba.

use metal_attention_model::{BatchToken, MambaSpec, MambaWeights};

use super::Run;
use crate::layers::PreparedLinear;

impl Run<'_> {
    /// Up to the row that the output matrix multiplies, `att`; the states of the tokens' sequences go on to what they are
    /// after them.
    pub(super) fn mamba(
        &mut self,
        layer: usize,
        spec: &MambaSpec,
        w: &MambaWeights<PreparedLinear>,
        tokens: &[BatchToken],
    ) {
        todo!("{layer} {spec:?} {} {tokens:?}", w.out.name)
    }
}
