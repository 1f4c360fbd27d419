//! The gated delta rule.

use metal_attention_model::{BatchToken, DeltaRuleSpec, DeltaRuleWeights};

use super::Run;
use crate::layers::PreparedLinear;

impl Run<'_> {
    /// Up to the row that the output matrix multiplies, `att`; the states of the tokens' sequences go on to what they are
    /// after them.
    pub(super) fn delta_rule(
        &mut self,
        layer: usize,
        spec: &DeltaRuleSpec,
        w: &DeltaRuleWeights<PreparedLinear>,
        tokens: &[BatchToken],
    ) {
        todo!("{layer} {spec:?} {} {tokens:?}", w.out.name)
    }
}
