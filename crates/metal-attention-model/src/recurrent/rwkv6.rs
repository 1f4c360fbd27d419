//! RWKV-6 (arXiv 2404.05892).

use crate::Linear;
use crate::tensors::{Need, Source};

/// The time mix of RWKV-6.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rwkv6Spec {
    /// Channels.
    pub width: usize,
}

impl Rwkv6Spec {
    /// Elements of the state.
    pub fn state_elements(&self) -> usize {
        self.width
    }
}

/// Weights of such a part.
#[derive(Debug, Clone)]
pub struct Rwkv6Weights<L = Linear> {
    /// Output, `[n_embd, width]`.
    pub out: L,
}

impl<L> Rwkv6Weights<L> {
    pub(crate) fn map<'a, M, E>(&'a self, f: &mut dyn FnMut(&'a L) -> Result<M, E>) -> Result<Rwkv6Weights<M>, E> {
        Ok(Rwkv6Weights { out: f(&self.out)? })
    }
}

/// The weights whose names begin with `p`, from `source`.
pub(crate) fn build<S: Source>(
    source: &mut S,
    spec: &Rwkv6Spec,
    p: &str,
    n_embd: usize,
) -> Result<Rwkv6Weights<S::Linear>, S::Error> {
    Ok(Rwkv6Weights { out: source.required(&format!("{p}time_mix_output"), [spec.width, n_embd], Need::None)? })
}
