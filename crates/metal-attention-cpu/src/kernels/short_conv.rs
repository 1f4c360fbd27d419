//! Gated short convolutions.

use std::ops::Range;

use crate::simd::{Kernel, LANES, Simd};

/// Most taps of a convolution: its window stays in registers.
pub(crate) const MAX_TAPS: usize = 16;

/// The convolution of some tokens of one sequence, over a few channels: `y_t = c_t * sum_j taps[j] * (b x)_(t - n_tap + 1 + j)`.
/// A token's arithmetic does not depend on how many others there are.
pub(crate) struct ShortConv<'a> {
    /// `[n_tokens, 3 * width]`: `b`, `c` and `x` of each token.
    pub(crate) inputs: &'a [f32],
    /// `[n_tap, width]`, the oldest token's first.
    pub(crate) taps: &'a [f32],
    /// The convolution's inputs before the first token, `[n_tap - 1, width]`, oldest first; afterwards those before the token
    /// that comes next.
    pub(crate) state: *mut f32,
    /// `[n_tokens, width]`
    pub(crate) out: *mut f32,
    pub(crate) width: usize,
    pub(crate) channels: Range<usize>,
}

impl<'a> ShortConv<'a> {
    /// # Safety
    ///
    /// `state` and `out` point to as many elements as they should, and nobody else uses these channels of them.
    pub(crate) unsafe fn new(
        inputs: &'a [f32],
        taps: &'a [f32],
        state: *mut f32,
        out: *mut f32,
        width: usize,
        channels: Range<usize>,
    ) -> Self {
        let n_tap = taps.len() / width;
        assert!(inputs.len().is_multiple_of(3 * width) && taps.len() == n_tap * width, "whole rows");
        assert!(channels.end <= width && (2..=MAX_TAPS).contains(&n_tap), "channels and taps that there are");
        Self { inputs, taps, state, out, width, channels }
    }
}

impl Kernel for ShortConv<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self { inputs, taps, state, out, width, channels } = self;
        let n_before = taps.len() / width - 1;
        let mut at = channels.start;
        while at < channels.end {
            let n = LANES.min(channels.end - at);
            // SAFETY: rows are `width` long and `at + n` is no more; the channels are this kernel's own.
            unsafe {
                let mut window = [S::f_splat(0.0); MAX_TAPS];
                let mut factors = [S::f_splat(0.0); MAX_TAPS];
                for (j, factor) in factors.iter_mut().enumerate().take(n_before + 1) {
                    *factor = load::<S>(taps.as_ptr().add(j * width + at), n);
                }
                for (j, seen) in window.iter_mut().enumerate().take(n_before) {
                    *seen = load::<S>(state.add(j * width + at), n);
                }
                for (t, row) in inputs.chunks_exact(3 * width).enumerate() {
                    let row = row.as_ptr().add(at);
                    let x = S::f_mul(load::<S>(row, n), load::<S>(row.add(2 * width), n));
                    let mut sum = S::f_mul(factors[0], window[0]);
                    for j in 1..n_before {
                        sum = S::f_fma(factors[j], window[j], sum);
                    }
                    sum = S::f_fma(factors[n_before], x, sum);
                    store::<S>(out.add(t * width + at), S::f_mul(load::<S>(row.add(width), n), sum), n);
                    for j in 1..n_before {
                        window[j - 1] = window[j];
                    }
                    window[n_before - 1] = x;
                }
                for (j, seen) in window.iter().enumerate().take(n_before) {
                    store::<S>(state.add(j * width + at), *seen, n);
                }
            }
            at += n;
        }
    }
}

/// The first `n` lanes from `p`, zeros in the others.
///
/// # Safety
///
/// `p` points to `n` floats, 16 at most; the CPU has the instruction set.
#[inline(always)]
unsafe fn load<S: Simd>(p: *const f32, n: usize) -> S::F {
    // SAFETY: as the caller vouches.
    unsafe {
        if n == LANES {
            return S::f_load(p);
        }
        let mut lanes = [0.0; LANES];
        lanes[..n].copy_from_slice(std::slice::from_raw_parts(p, n));
        S::f_load(lanes.as_ptr())
    }
}

/// Stores the first `n` lanes at `p`.
///
/// # Safety
///
/// As for [`load`].
#[inline(always)]
unsafe fn store<S: Simd>(p: *mut f32, x: S::F, n: usize) {
    // SAFETY: as the caller vouches.
    unsafe {
        if n == LANES {
            return S::f_store(p, x);
        }
        let mut lanes = [0.0; LANES];
        S::f_store(lanes.as_mut_ptr(), x);
        std::slice::from_raw_parts_mut(p, n).copy_from_slice(&lanes[..n]);
    }
}
