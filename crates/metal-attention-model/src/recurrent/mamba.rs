//! Mamba (arXiv 2312.00752).

use crate::Linear;
use crate::tensors::{Need, Source};

/// A selective state space with a decay of each channel and state element.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MambaSpec {
    /// Channels.
    pub width: usize,
}

impl MambaSpec {
    /// Elements of the state.
    pub fn state_elements(&self) -> usize {
        self.width
    }
}

/// Weights of such a part.
#[derive(Debug, Clone)]
pub struct MambaWeights<L = Linear> {
    /// Output, `[n_embd, width]`.
    pub out: L,
}

impl<L> MambaWeights<L> {
    pub(crate) fn map<'a, M, E>(&'a self, f: &mut dyn FnMut(&'a L) -> Result<M, E>) -> Result<MambaWeights<M>, E> {
        Ok(MambaWeights { out: f(&self.out)? })
    }
}

/// The weights whose names begin with `p`, from `source`.
pub(crate) fn build<S: Source>(
    source: &mut S,
    spec: &MambaSpec,
    p: &str,
    n_embd: usize,
) -> Result<MambaWeights<S::Linear>, S::Error> {
    Ok(MambaWeights { out: source.required(&format!("{p}ssm_out"), [spec.width, n_embd], Need::None)? })
}
