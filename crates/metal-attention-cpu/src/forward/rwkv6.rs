//! The time mix of RWKV-6.

use metal_attention_model::{BatchToken, Rwkv6Spec, Rwkv6Weights};

use super::Run;
use crate::layers::PreparedLinear;

impl Run<'_> {
    /// Up to the row that the output matrix multiplies, `att`; the states of the tokens' sequences go on to what they are
    /// after them.
    pub(super) fn rwkv6(
        &mut self,
        layer: usize,
        spec: &Rwkv6Spec,
        w: &Rwkv6Weights<PreparedLinear>,
        tokens: &[BatchToken],
    ) {
        todo!("{layer} {spec:?} {} {tokens:?}", w.out.name)
    }
}
