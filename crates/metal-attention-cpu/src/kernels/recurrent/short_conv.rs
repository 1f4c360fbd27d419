//! The gated short convolution of LFM2, with the products before and after it.

use super::StridedRowsMut;
use crate::kernels::vectors::{load, store};
use crate::simd::{Kernel, LANES, Simd};

/// The most taps of a convolution: its window stays in registers.
const MAX_TAPS: usize = 16;

/// The kernel `out[t] = c[t] * sum over j of taps[j] * (b x)[t - n_tap + 1 + j]` for consecutive tokens of one sequence and a
/// range of channels. A token's arithmetic does not depend on the number of tokens.
pub(crate) struct ShortConv<'a> {
    /// `b`, `c` and `x` of each token, `[n_tokens, 3 * width]`, all channels.
    pub(crate) inputs: &'a [f32],
    /// Weights, `[n_tap, width]`, the oldest token's first, all channels.
    pub(crate) taps: &'a [f32],
    /// The last `n_tap - 1` products `b x`, `[n_tap - 1, channels]`, the oldest first; updated.
    pub(crate) state: StridedRowsMut<'a>,
    /// Results, `[n_tokens, channels]`.
    pub(crate) out: StridedRowsMut<'a>,
    /// All channels.
    pub(crate) width: usize,
    /// The first channel of the range.
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
                self.channels::<S, false>(at);
                at += LANES;
            }
            if at < n {
                self.channels::<S, true>(at);
            }
        }
    }
}

impl ShortConv<'_> {
    /// Computes all tokens for 16 channels from `at` on, or for the fewer that are left where `PART` is set.
    #[inline(always)]
    unsafe fn channels<S: Simd, const PART: bool>(&self, at: usize) {
        let Self { inputs, taps, ref state, ref out, width, first } = *self;
        let (n_before, n) = (state.count, state.width - at);
        // SAFETY: rows are `width` long, the channels lie in them and are accessed by this kernel alone.
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
