//! The short causal convolution before a recurrence; each channel has weights of its own.

use super::{StridedRows, StridedRowsMut};
use crate::kernels::vectors::{load, store};
use crate::simd::{Kernel, LANES, Simd, sigmoid};

/// The kernel `out[t][c] = f(bias[c] + sum over j < width of weights[j][c] * x[t - (width - 1) + j][c])` for a range of
/// channels. Inputs before the first token come from the state.
pub(crate) struct Convolution<'a> {
    /// Inputs, `[n_tokens, channels]`.
    pub(crate) x: StridedRows<'a>,
    /// Weights, `[width, channels]`, the token's own last. It is the transpose of the file's tensor, `[channels, width]`.
    pub(crate) weights: StridedRows<'a>,
    /// Bias, `[channels]`.
    pub(crate) bias: Option<&'a [f32]>,
    /// Whether `f(x)` is `x sigmoid(x)`; otherwise it is `x`.
    pub(crate) silu: bool,
    /// The last `width - 1` inputs, the oldest first, `[width - 1, channels]`, zeros before the sequence's first token;
    /// updated.
    pub(crate) state: StridedRowsMut<'a>,
    /// Results, `[n_tokens, channels]`.
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
        // SAFETY: the channels are in range.
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
                // The new state is the end of old state and inputs. Row `i` is copied from row `i + n_tokens`, so ascending
                // order reads every row before it is overwritten.
                std::ptr::copy(self.input(n_tokens + i), self.state.at(i), channels);
            }
        }
    }
}

impl Convolution<'_> {
    /// Row `i` of the concatenation of state and inputs.
    #[inline(always)]
    fn input(&self, i: usize) -> *const f32 {
        if i < self.state.count { self.state.at(i) } else { self.x.at(i - self.state.count) }
    }

    /// Computes 16 channels of a token, or the fewer that are left where `PART` is set.
    #[inline(always)]
    unsafe fn step<S: Simd, const PART: bool>(&self, token: usize, channel: usize) {
        let n = self.x.width - channel;
        // SAFETY: as the caller vouches.
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
