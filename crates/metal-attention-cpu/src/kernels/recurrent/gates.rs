//! Elementwise steps between the projections of a layer and its recurrence: softplus, decays, L2 norms.

use super::vectors::sum_of_products;
use crate::kernels::vectors::{load, store};
use crate::simd::{Kernel, LANES, Simd, exp, softplus};

/// The kernel `x[i] = softplus(x[i] + bias[i])` of one row, with `softplus(x) = ln(1 + e^x)`.
pub(crate) struct Softplus<'a> {
    pub(crate) x: &'a mut [f32],
    pub(crate) bias: &'a [f32],
}

impl Kernel for Softplus<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self { x, bias } = self;
        assert_eq!(x.len(), bias.len(), "rows of one length");
        let whole = x.len() / LANES * LANES;
        // SAFETY: vectors lie inside the slices.
        unsafe {
            for i in (0..whole).step_by(LANES) {
                let p = x.as_mut_ptr().add(i);
                S::f_store(p, softplus::<S>(S::f_add(S::f_load(p), S::f_load(bias.as_ptr().add(i)))));
            }
            let n = x.len() - whole;
            if n > 0 {
                let (p, bias) = (x.as_mut_ptr().add(whole), bias.as_ptr().add(whole));
                let sum = S::f_add(load::<S, true>(p, n), load::<S, true>(bias, n));
                store::<S, true>(p, softplus::<S>(sum), n);
            }
        }
    }
}

/// The kernel `x[i] = exp(a * softplus(x[i] + bias[i]))` of one row: the decay factor at rate `a` (below 0) over a step of
/// that length.
pub(crate) struct Decays<'a> {
    pub(crate) x: &'a mut [f32],
    pub(crate) bias: &'a [f32],
    pub(crate) a: f32,
}

impl Kernel for Decays<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self { x, bias, a } = self;
        assert_eq!(x.len(), bias.len(), "rows of one length");
        let whole = x.len() / LANES * LANES;
        let n = x.len() - whole;
        let (x, bias) = (x.as_mut_ptr(), bias.as_ptr());
        // SAFETY: vectors lie inside the slices.
        unsafe {
            for i in (0..whole).step_by(LANES) {
                decays::<S, false>(x.add(i), bias.add(i), a, LANES);
            }
            if n > 0 {
                decays::<S, true>(x.add(whole), bias.add(whole), a, n);
            }
        }
    }
}

/// Computes [`Decays`] of 16 elements, or of `n` where `PART` is set.
#[inline(always)]
unsafe fn decays<S: Simd, const PART: bool>(x: *mut f32, bias: *const f32, a: f32, n: usize) {
    // SAFETY: the caller vouches for the instruction set and for the elements.
    unsafe {
        let sum = S::f_add(load::<S, PART>(x, n), load::<S, PART>(bias, n));
        store::<S, PART>(x, exp::<S>(S::f_mul(S::f_splat(a), softplus::<S>(sum))), n);
    }
}

/// The kernel `x[i] = scale * x[i] / sqrt(sum(x^2) + eps)` of one head's query or key.
pub(crate) struct L2Norm<'a> {
    pub(crate) x: &'a mut [f32],
    pub(crate) eps: f32,
    pub(crate) scale: f32,
}

impl Kernel for L2Norm<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self { x, eps, scale } = self;
        // SAFETY: both arguments are the same row; the caller vouches for the instruction set.
        let squares = unsafe { sum_of_products::<S>(x, x, None) };
        let factor = scale / (squares + eps).sqrt();
        for x in x {
            *x *= factor;
        }
    }
}
