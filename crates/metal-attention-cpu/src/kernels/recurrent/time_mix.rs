//! Elementwise steps of RWKV's time mix and channel mix, for one row of one token: token shift, nonlinearities, decays, and the
//! inputs of the recurrences.

use crate::kernels::vectors::{load, store};
use crate::simd::{Kernel, LANES, Simd, exp, sigmoid};

/// The smallest logarithm of RWKV-7's decay, `-e^(-1/2)`.
const FASTEST_DECAY: f32 = -0.606_530_66;

/// The least L2 norm that RWKV-7's removal key is divided by, so that a key of zeros stays zero.
const SHORTEST_KEY: f32 = 1e-12;

/// The kernel of the token shift, `out = x + (previous - x) * (lerp + more)`. All rows have the same length.
pub(crate) struct TokenLerp<'a> {
    /// The token's input.
    pub(crate) x: &'a [f32],
    /// The input of the token before.
    pub(crate) previous: &'a [f32],
    /// The interpolation factors.
    pub(crate) lerp: &'a [f32],
    /// The token's own addition to the factors (RWKV-6).
    pub(crate) more: Option<&'a [f32]>,
    /// The result.
    pub(crate) out: &'a mut [f32],
}

impl Kernel for TokenLerp<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self { x, previous, lerp, more, out } = self;
        let n = out.len();
        assert!([x, previous, lerp, more.unwrap_or(x)].iter().all(|row| row.len() == n), "rows of one length");
        let mut i = 0;
        // SAFETY: vectors and parts of them inside the slices.
        unsafe {
            while i + LANES <= n {
                shift::<S, false>(x, previous, lerp, more, out, i);
                i += LANES;
            }
            if i < n {
                shift::<S, true>(x, previous, lerp, more, out, i);
            }
        }
    }
}

/// Computes [`TokenLerp`] of elements from `i` on: 16, or those that are left where `PART` is set.
#[inline(always)]
unsafe fn shift<S: Simd, const PART: bool>(
    x: &[f32],
    previous: &[f32],
    lerp: &[f32],
    more: Option<&[f32]>,
    out: &mut [f32],
    i: usize,
) {
    let n = out.len() - i;
    // SAFETY: as the caller vouches.
    unsafe {
        let (x, previous) = (load::<S, PART>(x.as_ptr().add(i), n), load::<S, PART>(previous.as_ptr().add(i), n));
        let mut lerp = load::<S, PART>(lerp.as_ptr().add(i), n);
        if let Some(more) = more {
            lerp = S::f_add(lerp, load::<S, PART>(more.as_ptr().add(i), n));
        }
        store::<S, PART>(out.as_mut_ptr().add(i), S::f_fma(S::f_sub(previous, x), lerp, x), n);
    }
}

/// An elementwise function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Nonlinearity {
    /// The hyperbolic tangent.
    Tanh,
    /// `1 / (1 + e^-x)`
    Sigmoid,
}

/// The kernel `x[i] = nonlinearity(x[i])`.
pub(crate) struct ApplyNonlinearity<'a> {
    pub(crate) x: &'a mut [f32],
    pub(crate) nonlinearity: Nonlinearity,
}

impl Kernel for ApplyNonlinearity<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self { x, nonlinearity } = self;
        let mut i = 0;
        // SAFETY: vectors and parts of them inside the slice.
        unsafe {
            while i + LANES <= x.len() {
                apply_at::<S, false>(x, nonlinearity, i);
                i += LANES;
            }
            if i < x.len() {
                apply_at::<S, true>(x, nonlinearity, i);
            }
        }
    }
}

/// Computes [`ApplyNonlinearity`] of elements from `i` on: 16, or those that are left where `PART` is set.
#[inline(always)]
unsafe fn apply_at<S: Simd, const PART: bool>(x: &mut [f32], nonlinearity: Nonlinearity, i: usize) {
    let n = x.len() - i;
    // SAFETY: as the caller vouches.
    unsafe {
        let p = x.as_mut_ptr().add(i);
        let v = load::<S, PART>(p, n);
        let y = match nonlinearity {
            Nonlinearity::Sigmoid => sigmoid::<S>(v),
            // tanh(x) = 2 sigmoid(2 x) - 1
            Nonlinearity::Tanh => {
                let s = sigmoid::<S>(S::f_add(v, v));
                S::f_sub(S::f_add(s, s), S::f_splat(1.0))
            }
        };
        store::<S, PART>(p, y, n);
    }
}

/// The kernel that computes the inputs of RWKV-7's recurrence for one head from the projections. In this order, all
/// elementwise:
///
/// - `decay = exp(-e^(-1/2) * sigmoid(decay + decay_bias))`
/// - `rate = sigmoid(rate + rate_bias)`
/// - `kappa = k * removed`, scaled to an L2 norm of 1
/// - `k = k * (1 + (rate - 1) * kept)`
/// - `rate = kappa * rate` (the replacement key), `kappa = -kappa` (the removal key)
pub(crate) struct Rwkv7Inputs<'a> {
    pub(crate) decay: &'a mut [f32],
    pub(crate) decay_bias: &'a [f32],
    pub(crate) rate: &'a mut [f32],
    pub(crate) rate_bias: &'a [f32],
    pub(crate) k: &'a mut [f32],
    pub(crate) removed: &'a [f32],
    pub(crate) kept: &'a [f32],
    /// An output; its old contents are not read.
    pub(crate) kappa: &'a mut [f32],
}

impl Rwkv7Inputs<'_> {
    /// Computes all but the last step for elements from `i` on; returns `squares` plus those of `kappa`.
    #[inline(always)]
    unsafe fn at<S: Simd, const PART: bool>(&mut self, i: usize, squares: S::F) -> S::F {
        let n = self.k.len() - i;
        // SAFETY: as the caller vouches.
        unsafe {
            let one = S::f_splat(1.0);
            let p = self.decay.as_mut_ptr().add(i);
            let x = S::f_add(load::<S, PART>(p, n), load::<S, PART>(self.decay_bias.as_ptr().add(i), n));
            store::<S, PART>(p, exp::<S>(S::f_mul(sigmoid::<S>(x), S::f_splat(FASTEST_DECAY))), n);

            let p = self.rate.as_mut_ptr().add(i);
            let x = S::f_add(load::<S, PART>(p, n), load::<S, PART>(self.rate_bias.as_ptr().add(i), n));
            let rate = sigmoid::<S>(x);
            store::<S, PART>(p, rate, n);

            let p = self.k.as_mut_ptr().add(i);
            let k = load::<S, PART>(p, n);
            let kappa = S::f_mul(k, load::<S, PART>(self.removed.as_ptr().add(i), n));
            store::<S, PART>(self.kappa.as_mut_ptr().add(i), kappa, n);
            let kept = load::<S, PART>(self.kept.as_ptr().add(i), n);
            store::<S, PART>(p, S::f_mul(k, S::f_fma(S::f_sub(rate, one), kept, one)), n);
            S::f_fma(kappa, kappa, squares)
        }
    }

    /// The last step for elements from `i` on: scales `kappa` by `factor`, and computes both keys from it.
    #[inline(always)]
    unsafe fn scale<S: Simd, const PART: bool>(&mut self, i: usize, factor: S::F) {
        let n = self.k.len() - i;
        // SAFETY: as the caller vouches.
        unsafe {
            let (kappa, rate) = (self.kappa.as_mut_ptr().add(i), self.rate.as_mut_ptr().add(i));
            let unit = S::f_mul(load::<S, PART>(kappa, n), factor);
            store::<S, PART>(rate, S::f_mul(load::<S, PART>(rate, n), unit), n);
            store::<S, PART>(kappa, S::f_sub(S::f_splat(0.0), unit), n);
        }
    }
}

impl Kernel for Rwkv7Inputs<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(mut self) {
        let n = self.k.len();
        let lengths = [
            self.decay.len(),
            self.decay_bias.len(),
            self.rate.len(),
            self.rate_bias.len(),
            self.removed.len(),
            self.kept.len(),
            self.kappa.len(),
        ];
        assert!(lengths.iter().all(|len| *len == n), "rows of one length");
        let whole = n / LANES * LANES;
        // SAFETY: vectors and parts of them inside the slices.
        unsafe {
            let mut squares = S::f_splat(0.0);
            for i in (0..whole).step_by(LANES) {
                squares = self.at::<S, false>(i, squares);
            }
            if whole < n {
                squares = self.at::<S, true>(whole, squares);
            }
            let factor = S::f_splat(1.0 / S::f_sum(squares).sqrt().max(SHORTEST_KEY));
            for i in (0..whole).step_by(LANES) {
                self.scale::<S, false>(i, factor);
            }
            if whole < n {
                self.scale::<S, true>(whole, factor);
            }
        }
    }
}

/// The kernel `v += (first - v) * sigmoid(mix + bias)`, which mixes the first layer's values into those of another layer.
pub(crate) struct MixFirst<'a> {
    pub(crate) v: &'a mut [f32],
    pub(crate) first: &'a [f32],
    pub(crate) mix: &'a [f32],
    pub(crate) bias: &'a [f32],
}

impl Kernel for MixFirst<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self { v, first, mix, bias } = self;
        assert!([first, mix, bias].iter().all(|row| row.len() == v.len()), "rows of one length");
        let mut i = 0;
        // SAFETY: vectors and parts of them inside the slices.
        unsafe {
            while i + LANES <= v.len() {
                mix_first::<S, false>(v, first, mix, bias, i);
                i += LANES;
            }
            if i < v.len() {
                mix_first::<S, true>(v, first, mix, bias, i);
            }
        }
    }
}

/// Computes [`MixFirst`] of elements from `i` on: 16, or those that are left where `PART` is set.
#[inline(always)]
unsafe fn mix_first<S: Simd, const PART: bool>(v: &mut [f32], first: &[f32], mix: &[f32], bias: &[f32], i: usize) {
    let n = v.len() - i;
    // SAFETY: as the caller vouches.
    unsafe {
        let mix = S::f_add(load::<S, PART>(mix.as_ptr().add(i), n), load::<S, PART>(bias.as_ptr().add(i), n));
        let (p, first) = (v.as_mut_ptr().add(i), load::<S, PART>(first.as_ptr().add(i), n));
        let v = load::<S, PART>(p, n);
        store::<S, PART>(p, S::f_fma(S::f_sub(first, v), sigmoid::<S>(mix), v), n);
    }
}

/// The kernel of RWKV-6's decays, `decay = exp(-exp(decay + bias))`.
pub(crate) struct Rwkv6Decay<'a> {
    pub(crate) decay: &'a mut [f32],
    pub(crate) bias: &'a [f32],
}

impl Kernel for Rwkv6Decay<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self { decay, bias } = self;
        assert_eq!(decay.len(), bias.len(), "rows of one length");
        let mut i = 0;
        // SAFETY: vectors and parts of them inside the slices.
        unsafe {
            while i + LANES <= decay.len() {
                decay_6::<S, false>(decay, bias, i);
                i += LANES;
            }
            if i < decay.len() {
                decay_6::<S, true>(decay, bias, i);
            }
        }
    }
}

/// Computes [`Rwkv6Decay`] of elements from `i` on: 16, or those that are left where `PART` is set.
#[inline(always)]
unsafe fn decay_6<S: Simd, const PART: bool>(decay: &mut [f32], bias: &[f32], i: usize) {
    let n = decay.len() - i;
    // SAFETY: as the caller vouches.
    unsafe {
        let p = decay.as_mut_ptr().add(i);
        let x = S::f_add(load::<S, PART>(p, n), load::<S, PART>(bias.as_ptr().add(i), n));
        store::<S, PART>(p, exp::<S>(S::f_sub(S::f_splat(0.0), exp::<S>(x))), n);
    }
}

/// The kernel of the inputs of gated linear attention for one head: `k = key * (1 - decay)`, `r = scale * r`.
pub(crate) struct LinearInputs<'a> {
    pub(crate) r: &'a mut [f32],
    pub(crate) scale: f32,
    pub(crate) key: &'a [f32],
    pub(crate) decay: &'a [f32],
    /// An output; its old contents are not read.
    pub(crate) k: &'a mut [f32],
}

impl Kernel for LinearInputs<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self { r, scale, key, decay, k } = self;
        let n = k.len();
        assert!([r.len(), key.len(), decay.len()].iter().all(|len| *len == n), "rows of one length");
        for i in 0..n {
            k[i] = key[i] * (1.0 - decay[i]);
            r[i] *= scale;
        }
    }
}
