//! Gated short convolutions.

use super::StridedRowsMut;
use crate::kernels::vectors::{load, store};
use crate::simd::{Kernel, LANES, Simd};

/// Most taps of a convolution: its window stays in registers.
const MAX_TAPS: usize = 16;

/// The convolution of some tokens of one sequence, over a few channels: `y_t = c_t * sum_j taps[j] * (b x)_(t - n_tap + 1 + j)`.
/// A token's arithmetic does not depend on how many others there are.
pub(crate) struct ShortConv<'a> {
    /// `[n_tokens, 3 * width]`: `b`, `c` and `x` of each token.
    pub(crate) inputs: &'a [f32],
    /// `[n_tap, width]`, the oldest token's first.
    pub(crate) taps: &'a [f32],
    /// The convolution's inputs before the first token, `[n_tap - 1, channels]`, oldest first; afterwards those before the token
    /// that comes next.
    pub(crate) state: StridedRowsMut<'a>,
    /// `[n_tokens, channels]`
    pub(crate) out: StridedRowsMut<'a>,
    pub(crate) width: usize,
    /// The first of the channels.
    pub(crate) first: usize,
}

impl Kernel for ShortConv<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self { inputs, taps, ref state, ref out, width, first } = self;
        let (n_tap, n) = (state.count + 1, state.width);
        assert!(inputs.len() == out.count * 3 * width && taps.len() == n_tap * width, "whole rows");
        assert!(out.width == n && first + n <= width && n_tap <= MAX_TAPS, "channels and taps that there are");
        let mut at = 0;
        // SAFETY: rows of the inputs and taps are `width` long, and the channels lie in them.
        unsafe {
            while at + LANES <= n {
                self.some::<S, false>(at);
                at += LANES;
            }
            if at < n {
                self.some::<S, true>(at);
            }
        }
    }
}

impl ShortConv<'_> {
    /// All tokens of 16 channels from `at` on or, where `PART`, of those that are left.
    #[inline(always)]
    unsafe fn some<S: Simd, const PART: bool>(&self, at: usize) {
        let Self { inputs, taps, ref state, ref out, width, first } = *self;
        let (n_before, n) = (state.count, state.width - at);
        // SAFETY: rows are `width` long and the channels lie in them; they are this kernel's own.
        unsafe {
            let mut window = [S::f_splat(0.0); MAX_TAPS];
            let mut factors = [S::f_splat(0.0); MAX_TAPS];
            for (j, factor) in factors.iter_mut().enumerate().take(n_before + 1) {
                *factor = load::<S, PART>(taps.as_ptr().add(j * width + first + at), n);
            }
            for (j, seen) in window.iter_mut().enumerate().take(n_before) {
                *seen = load::<S, PART>(state.at(j).add(at), n);
            }
            for (t, row) in inputs.chunks_exact(3 * width).enumerate() {
                let row = row.as_ptr().add(first + at);
                let x = S::f_mul(load::<S, PART>(row, n), load::<S, PART>(row.add(2 * width), n));
                let mut sum = S::f_mul(factors[0], window[0]);
                for j in 1..n_before {
                    sum = S::f_fma(factors[j], window[j], sum);
                }
                sum = S::f_fma(factors[n_before], x, sum);
                store::<S, PART>(out.at(t).add(at), S::f_mul(load::<S, PART>(row.add(width), n), sum), n);
                for j in 1..n_before {
                    window[j - 1] = window[j];
                }
                window[n_before - 1] = x;
            }
            for (j, seen) in window.iter().enumerate().take(n_before) {
                store::<S, PART>(state.at(j).add(at), *seen, n);
            }
        }
    }
}
