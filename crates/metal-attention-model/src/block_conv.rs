//! Convolutions around the parts of a layer, within a block (DFlash-2).

use crate::Linear;
use crate::tensors::{Presence, WeightSource};

/// Two convolutions around a mixer or a feed-forward (DFlash-2): one of its input, one of its result. With the part's normed input
/// `h`, `[n_embd]` for each input of a block, side 0 replaces the part's input `h` and side 1 its result `x` by
///
/// `y[t][c] = sum over k of (base[side][k][c] + taps[t][side][k][c / group_size]) * x[t - k][c]`,
///
/// where `taps = proj * h`, `[2, n_tap, n_embd / group_size]`, for both sides. Inputs before the block count as zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockConvSpec {
    /// The stem of the names of its tensors, `{stem}_base` and `{stem}_proj`.
    pub tensor_stem: &'static str,
    /// Taps: the inputs that a result depends on, its own included.
    pub n_tap: usize,
    /// Channels that share the taps of an input; divides `n_embd`.
    pub group_size: usize,
}

impl BlockConvSpec {
    /// Rows of `proj` for one side: the taps of each group of channels.
    pub fn n_taps_of_side(&self, n_embd: usize) -> usize {
        self.n_tap * (n_embd / self.group_size)
    }
}

/// The weights of the convolutions around a part.
#[derive(Debug, Clone)]
pub struct BlockConvWeights<L = Linear> {
    /// The specification.
    pub spec: BlockConvSpec,
    /// The part of the taps that does not depend on the input, `[2, n_tap, n_embd]`.
    pub base: Vec<f32>,
    /// From the normed input to the other part, `[2 * n_tap * n_embd / group_size, n_embd]`.
    pub proj: L,
}

impl<L> BlockConvWeights<L> {
    pub(crate) fn map<'a, M, E>(&'a self, f: &mut dyn FnMut(&'a L) -> Result<M, E>) -> Result<BlockConvWeights<M>, E> {
        Ok(BlockConvWeights { spec: self.spec, base: self.base.clone(), proj: f(&self.proj)? })
    }
}

/// The weights with the name prefix `p`.
pub(crate) fn build<S: WeightSource>(
    source: &mut S,
    spec: &BlockConvSpec,
    p: &str,
    n_embd: usize,
) -> Result<BlockConvWeights<S::Linear>, S::Error> {
    let stem = format!("{p}{}", spec.tensor_stem);
    let base = source.values(&format!("{stem}_base"), &[n_embd, spec.n_tap, 2], Presence::Required)?;
    let proj = [n_embd, 2 * spec.n_taps_of_side(n_embd)];
    Ok(BlockConvWeights {
        spec: *spec,
        base: base.unwrap_or_default(),
        proj: source.required(&format!("{stem}_proj"), proj, Presence::None)?,
    })
}
