//! The time mix of RWKV-7.

use metal_attention_model::{BatchToken, Rwkv7Spec, Rwkv7Weights};

use super::Run;
use crate::layers::PreparedLinear;

impl Run<'_> {
    /// Up to the row that the output matrix multiplies, `att`; the states of the tokens' sequences go on to what they are
    /// after them.
    pub(super) fn rwkv7(
        &mut self,
        layer: usize,
        spec: &Rwkv7Spec,
        w: &Rwkv7Weights<PreparedLinear>,
        tokens: &[BatchToken],
    ) {
        todo!("{layer} {spec:?} {} {tokens:?}", w.out.name)
    }
}
