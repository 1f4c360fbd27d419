//! Mamba-2.

use metal_attention_model::{BatchToken, Mamba2Spec, Mamba2Weights};

use super::Run;
use crate::layers::PreparedLinear;

impl Run<'_> {
    /// Up to the row that the output matrix multiplies, `att`; the states of the tokens' sequences go on to what they are
    /// after them.
    pub(super) fn mamba2(
        &mut self,
        layer: usize,
        spec: &Mamba2Spec,
        w: &Mamba2Weights<PreparedLinear>,
        tokens: &[BatchToken],
    ) {
        todo!("{layer} {spec:?} {} {tokens:?}", w.out.name)
    }
}
