//! The short causal convolution of each channel with weights of its own, before a recurrence.

use super::{StridedRows, StridedRowsMut};
use crate::kernels::vectors::{load, store};
use crate::simd::{Kernel, LANES, Simd, sigmoid};

/// `out[t][c] = f(bias[c] + sum over j < width of weights[j][c] * x[t - (width - 1) + j][c])` for a range of channels, where
/// inputs before the first token come from the state.
pub(crate) struct Convolution<'a> {
    /// Of each token, `[n_tokens, channels]`
    pub(crate) x: StridedRows<'a>,
    /// `[width, channels]`, that of the token itself last: the tensor of a file, which is `[channels, width]`, the other way
    /// round
    pub(crate) weights: StridedRows<'a>,
    /// `[channels]`
    pub(crate) bias: Option<&'a [f32]>,
    /// Whether `f(x)` is `x sigmoid(x)`, else `x`.
    pub(crate) silu: bool,
    /// The last `width - 1` inputs, the oldest first, `[width - 1, channels]`: zeros where there were none; changed in place.
    pub(crate) state: StridedRowsMut<'a>,
    /// `[n_tokens, channels]`
    pub(crate) out: StridedRowsMut<'a>,
}

impl Kernel for Convolution<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let (n_tokens, channels, before) = (self.x.count, self.x.width, self.state.count);
        assert_eq!((self.weights.count, self.weights.width), (before + 1, channels), "the weights");
        assert!(self.bias.is_none_or(|bias| bias.len() == channels), "the bias");
        assert_eq!(self.state.width, channels, "the state");
        assert_eq!((self.out.count, self.out.width), (n_tokens, channels), "the output");
        // SAFETY: channels that there are.
        unsafe {
            for t in 0..n_tokens {
                let mut channel = 0;
                while channels - channel >= LANES {
                    self.step::<S, false>(t, channel);
                    channel += LANES;
                }
                if channel < channels {
                    self.step::<S, true>(t, channel);
                }
            }
            for i in 0..before {
                // Rows are read before they are written: each comes from a later one, or from itself where there is no token.
                std::ptr::copy(self.input(n_tokens + i), self.state.at(i), channels);
            }
        }
    }
}

impl Convolution<'_> {
    /// Row `i` of the state and the inputs one after the other.
    #[inline(always)]
    fn input(&self, i: usize) -> *const f32 {
        if i < self.state.count { self.state.at(i) } else { self.x.at(i - self.state.count) }
    }

    /// 16 channels of a token, or those that are left.
    #[inline(always)]
    unsafe fn step<S: Simd, const PART: bool>(&self, token: usize, channel: usize) {
        let n = self.x.width - channel;
        // SAFETY: passed on to the caller.
        unsafe {
            let mut sum = match self.bias {
                Some(bias) => load::<S, PART>(bias.as_ptr().add(channel), n),
                None => S::f_splat(0.0),
            };
            for j in 0..self.weights.count {
                let x = load::<S, PART>(self.input(token + j).add(channel), n);
                sum = S::f_fma(load::<S, PART>(self.weights.at(j).add(channel), n), x, sum);
            }
            if self.silu {
                sum = S::f_mul(sum, sigmoid::<S>(sum));
            }
            store::<S, PART>(self.out.at(token).add(channel), sum, n);
        }
    }
}
