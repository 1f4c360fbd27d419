//! Mamba-2 (arXiv 2405.21060).

use crate::Linear;
use crate::tensors::{Need, Source};

/// A selective state space with one decay a head.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Mamba2Spec {
    /// Channels.
    pub width: usize,
}

impl Mamba2Spec {
    /// Elements of the state.
    pub fn state_elements(&self) -> usize {
        self.width
    }
}

/// Weights of such a part.
#[derive(Debug, Clone)]
pub struct Mamba2Weights<L = Linear> {
    /// Output, `[n_embd, width]`.
    pub out: L,
}

impl<L> Mamba2Weights<L> {
    pub(crate) fn map<'a, M, E>(&'a self, f: &mut dyn FnMut(&'a L) -> Result<M, E>) -> Result<Mamba2Weights<M>, E> {
        Ok(Mamba2Weights { out: f(&self.out)? })
    }
}

/// The weights whose names begin with `p`, from `source`.
pub(crate) fn build<S: Source>(
    source: &mut S,
    spec: &Mamba2Spec,
    p: &str,
    n_embd: usize,
) -> Result<Mamba2Weights<S::Linear>, S::Error> {
    Ok(Mamba2Weights { out: source.required(&format!("{p}ssm_out"), [spec.width, n_embd], Need::None)? })
}
