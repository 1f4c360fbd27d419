//! RWKV-7 (arXiv 2503.14456).

use crate::Linear;
use crate::tensors::{Need, Source};

/// The time mix of RWKV-7.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rwkv7Spec {
    /// Channels.
    pub width: usize,
}

impl Rwkv7Spec {
    /// Elements of the state.
    pub fn state_elements(&self) -> usize {
        self.width
    }
}

/// Weights of such a part.
#[derive(Debug, Clone)]
pub struct Rwkv7Weights<L = Linear> {
    /// Output, `[n_embd, width]`.
    pub out: L,
}

impl<L> Rwkv7Weights<L> {
    pub(crate) fn map<'a, M, E>(&'a self, f: &mut dyn FnMut(&'a L) -> Result<M, E>) -> Result<Rwkv7Weights<M>, E> {
        Ok(Rwkv7Weights { out: f(&self.out)? })
    }
}

/// The weights whose names begin with `p`, from `source`.
pub(crate) fn build<S: Source>(
    source: &mut S,
    spec: &Rwkv7Spec,
    p: &str,
    n_embd: usize,
) -> Result<Rwkv7Weights<S::Linear>, S::Error> {
    Ok(Rwkv7Weights { out: source.required(&format!("{p}time_mix_output"), [spec.width, n_embd], Need::None)? })
}
