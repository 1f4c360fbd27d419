//! Low-rank products: two small matrices in place of a large one (as in arXiv 2106.09685), for RWKV.

use crate::Linear;
use crate::tensors::{Presence, WeightSource};

/// `up f(down x)`, where `f` depends on the use.
#[derive(Debug, Clone)]
pub struct LowRankWeights<L = Linear> {
    /// First matrix, `[rank, n_in]`.
    pub down: L,
    /// Second matrix, `[n_out, rank]`.
    pub up: L,
}

impl<L> LowRankWeights<L> {
    pub(crate) fn map<'a, M, E>(&'a self, f: &mut dyn FnMut(&'a L) -> Result<M, E>) -> Result<LowRankWeights<M>, E> {
        Ok(LowRankWeights { down: f(&self.down)?, up: f(&self.up)? })
    }
}

/// The matrices of these names.
pub(crate) fn build<S: WeightSource>(
    source: &mut S,
    [down, up]: [String; 2],
    [n_in, rank, n_out]: [usize; 3],
) -> Result<LowRankWeights<S::Linear>, S::Error> {
    let down = source.required(&down, [n_in, rank], Presence::None)?;
    Ok(LowRankWeights { down, up: source.required(&up, [rank, n_out], Presence::None)? })
}
