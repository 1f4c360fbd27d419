//! Products of two small matrices in the place of a large one (as in arXiv 2106.09685), as RWKV has them.

use crate::Linear;
use crate::tensors::{Presence, WeightSource};

/// `up f(down x)`; what `f` is depends on what it is used for.
#[derive(Debug, Clone)]
pub struct LowRankWeights<L = Linear> {
    /// `[rank, n_in]`
    pub down: L,
    /// `[n_out, rank]`
    pub up: L,
}

impl<L> LowRankWeights<L> {
    pub(crate) fn map<'a, M, E>(&'a self, f: &mut dyn FnMut(&'a L) -> Result<M, E>) -> Result<LowRankWeights<M>, E> {
        Ok(LowRankWeights { down: f(&self.down)?, up: f(&self.up)? })
    }
}

/// The matrices of these names, from `n_in` elements through `rank` to `n_out`.
pub(crate) fn build<S: WeightSource>(
    source: &mut S,
    [down, up]: [String; 2],
    [n_in, rank, n_out]: [usize; 3],
) -> Result<LowRankWeights<S::Linear>, S::Error> {
    let down = source.required(&down, [n_in, rank], Presence::None)?;
    Ok(LowRankWeights { down, up: source.required(&up, [rank, n_out], Presence::None)? })
}
