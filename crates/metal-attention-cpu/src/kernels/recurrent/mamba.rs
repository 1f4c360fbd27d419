//! The selective scan of Mamba (arXiv 2312.00752) over a range of channels.
//!
//! `h[s] = exp(dt A[s]) h[s] + dt B[s] x; out = sum over s of C[s] h[s] + D x`
//!
//! The input `x` and `dt` (positive) are per token and channel, `B` and `C` per token, `A` (negative) per channel and element
//! of the state, `D` per channel. Tokens are processed one after the other, 16 channels at a time.

use super::{StridedRows, StridedRowsMut};
use crate::kernels::vectors::{load, store};
use crate::simd::{Kernel, LANES, Simd, exp};

/// Vectors of channels that are taken through all tokens together: their states fit the L1 cache.
const TILE: usize = 4;

/// The kernel for a range of channels.
pub(crate) struct Mamba<'a> {
    /// Inputs, `[n_tokens, channels]`.
    pub(crate) x: StridedRows<'a>,
    /// `dt` after bias and softplus, `[n_tokens, channels]`.
    pub(crate) dt: StridedRows<'a>,
    /// `B`, `[n_tokens, d_state]`.
    pub(crate) b: StridedRows<'a>,
    /// `C`, `[n_tokens, d_state]`.
    pub(crate) c: StridedRows<'a>,
    /// `A`, negative, `[d_state, channels]`: the transpose of the file's tensor.
    pub(crate) a: StridedRows<'a>,
    /// `D`, `[channels]`.
    pub(crate) d: &'a [f32],
    /// The state `h`, `[d_state, channels]`; updated.
    pub(crate) state: StridedRowsMut<'a>,
    /// Results, `[n_tokens, channels]`.
    pub(crate) out: StridedRowsMut<'a>,
}

impl Kernel for Mamba<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let (n_tokens, channels, d_state) = (self.x.count, self.x.width, self.b.width);
        assert_eq!((self.dt.count, self.dt.width), (n_tokens, channels), "dt");
        assert_eq!(self.b.count, n_tokens, "B");
        assert_eq!((self.c.count, self.c.width), (n_tokens, d_state), "C");
        assert_eq!((self.a.count, self.a.width), (d_state, channels), "A");
        assert_eq!(self.d.len(), channels, "D");
        assert_eq!((self.state.count, self.state.width), (d_state, channels), "the state");
        assert_eq!((self.out.count, self.out.width), (n_tokens, channels), "the output");
        for first in (0..channels).step_by(TILE * LANES) {
            let end = channels.min(first + TILE * LANES);
            for token in 0..n_tokens {
                // SAFETY: the channels are in range.
                unsafe {
                    let mut channel = first;
                    while end - channel >= LANES {
                        self.step::<S, false>(token, channel);
                        channel += LANES;
                    }
                    if channel < end {
                        self.step::<S, true>(token, channel);
                    }
                }
            }
        }
    }
}

impl Mamba<'_> {
    /// Computes 16 channels of a token, or the fewer that are left where `PART` is set.
    #[inline(always)]
    unsafe fn step<S: Simd, const PART: bool>(&self, token: usize, channel: usize) {
        let n = self.x.width - channel;
        let (b, c) = (self.b.row(token), self.c.row(token));
        // SAFETY: as the caller vouches.
        unsafe {
            let x = load::<S, PART>(self.x.at(token).add(channel), n);
            let dt = load::<S, PART>(self.dt.at(token).add(channel), n);
            let mut sum = S::f_mul(x, load::<S, PART>(self.d.as_ptr().add(channel), n));
            let x = S::f_mul(dt, x);
            for s in 0..b.len() {
                let p = self.state.at(s).add(channel);
                let decay = exp::<S>(S::f_mul(dt, load::<S, PART>(self.a.at(s).add(channel), n)));
                let h = S::f_fma(decay, load::<S, PART>(p, n), S::f_mul(S::f_splat(b[s]), x));
                store::<S, PART>(p, h, n);
                sum = S::f_fma(S::f_splat(c[s]), h, sum);
            }
            store::<S, PART>(self.out.at(token).add(channel), sum, n);
        }
    }
}
