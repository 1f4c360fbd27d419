//! Gated short convolutions (LFM2).

use crate::Linear;
use crate::tensors::{Presence, WeightSource};

/// A gated short convolution (LFM2): `[b, c, x] = W_in h`, `y_t = c_t * sum_j taps[j] * (b x)_(t - n_tap + 1 + j)` for
/// each channel, and then `W_out y`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShortConvSpec {
    /// Channels.
    pub width: usize,
    /// Taps: the tokens that a result depends on, its own included; at least 2.
    pub n_tap: usize,
}

impl ShortConvSpec {
    /// F32 elements of the state: the last inputs of the convolution, oldest first, `[n_tap - 1, width]`.
    pub fn state_elements(&self) -> usize {
        (self.n_tap - 1) * self.width
    }
}

/// The weights of a short convolution.
#[derive(Debug, Clone)]
pub struct ShortConvWeights<L = Linear> {
    /// The specification.
    pub spec: ShortConvSpec,
    /// The gates `b` and `c` and the input `x`, stacked, `[3 * width, n_embd]`.
    pub input: L,
    /// Taps of each channel, those of the oldest token first, `[n_tap, width]`.
    pub taps: Vec<f32>,
    /// Output, `[n_embd, width]`.
    pub out: L,
}

impl<L> ShortConvWeights<L> {
    pub(crate) fn map<'a, M, E>(&'a self, f: &mut dyn FnMut(&'a L) -> Result<M, E>) -> Result<ShortConvWeights<M>, E> {
        Ok(ShortConvWeights { spec: self.spec, input: f(&self.input)?, taps: self.taps.clone(), out: f(&self.out)? })
    }
}

/// The weights with the name prefix `p`.
pub(crate) fn build<S: WeightSource>(
    source: &mut S,
    spec: &ShortConvSpec,
    p: &str,
    n_embd: usize,
) -> Result<ShortConvWeights<S::Linear>, S::Error> {
    let ShortConvSpec { width, n_tap } = *spec;
    let of_channels = source.channels(&format!("{p}shortconv.conv.weight"), n_tap, width)?;
    let taps = (0..n_tap).flat_map(|tap| of_channels.iter().skip(tap).step_by(n_tap)).copied().collect();
    Ok(ShortConvWeights {
        spec: *spec,
        input: source.required(&format!("{p}shortconv.in_proj"), [n_embd, 3 * width], Presence::None)?,
        taps,
        out: source.required(&format!("{p}shortconv.out_proj"), [width, n_embd], Presence::None)?,
    })
}
