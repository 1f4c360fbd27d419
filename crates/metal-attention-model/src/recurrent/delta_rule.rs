//! The gated delta rule (arXiv 2412.06464).

use crate::Linear;
use crate::tensors::{Need, Source};

/// A gated delta rule.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DeltaRuleSpec {
    /// Channels.
    pub width: usize,
}

impl DeltaRuleSpec {
    /// Elements of the state.
    pub fn state_elements(&self) -> usize {
        self.width
    }
}

/// Weights of such a part.
#[derive(Debug, Clone)]
pub struct DeltaRuleWeights<L = Linear> {
    /// Output, `[n_embd, width]`.
    pub out: L,
}

impl<L> DeltaRuleWeights<L> {
    pub(crate) fn map<'a, M, E>(&'a self, f: &mut dyn FnMut(&'a L) -> Result<M, E>) -> Result<DeltaRuleWeights<M>, E> {
        Ok(DeltaRuleWeights { out: f(&self.out)? })
    }
}

/// The weights whose names begin with `p`, from `source`.
pub(crate) fn build<S: Source>(
    source: &mut S,
    spec: &DeltaRuleSpec,
    p: &str,
    n_embd: usize,
) -> Result<DeltaRuleWeights<S::Linear>, S::Error> {
    Ok(DeltaRuleWeights { out: source.required(&format!("{p}ssm_out"), [spec.width, n_embd], Need::None)? })
}
