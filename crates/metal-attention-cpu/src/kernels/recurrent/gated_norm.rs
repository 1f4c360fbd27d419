//! The norm of a head's result, multiplied by a gate.

use super::vectors::sum_of_products;
use crate::kernels::vectors::{load, store};
use crate::simd::{Kernel, LANES, Simd, sigmoid};

/// `x[i] = x[i] / sqrt(mean(x^2) + eps) * weight[i] * silu(gate[i])`, one head's result.
pub(crate) struct GatedNorm<'a> {
    pub(crate) x: &'a mut [f32],
    pub(crate) weight: &'a [f32],
    pub(crate) gate: &'a [f32],
    pub(crate) eps: f32,
}

impl Kernel for GatedNorm<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self { x, weight, gate, eps } = self;
        assert!(weight.len() == x.len() && gate.len() == x.len(), "rows of one length");
        let whole = x.len() / LANES * LANES;
        let n = x.len() - whole;
        // SAFETY: vectors lie inside the slices.
        unsafe {
            let factor = S::f_splat(1.0 / (sum_of_products::<S>(x, x, None) / x.len() as f32 + eps).sqrt());
            let (x, weight, gate) = (x.as_mut_ptr(), weight.as_ptr(), gate.as_ptr());
            for i in (0..whole).step_by(LANES) {
                gated::<S, false>(x.add(i), weight.add(i), gate.add(i), factor, LANES);
            }
            if n > 0 {
                gated::<S, true>(x.add(whole), weight.add(whole), gate.add(whole), factor, n);
            }
        }
    }
}

/// 16 elements, or `n` where `PART`.
#[inline(always)]
unsafe fn gated<S: Simd, const PART: bool>(x: *mut f32, weight: *const f32, gate: *const f32, factor: S::F, n: usize) {
    // SAFETY: the caller vouches for the instruction set, and that the elements are there.
    unsafe {
        let gate = load::<S, PART>(gate, n);
        let normed = S::f_mul(S::f_mul(load::<S, PART>(x, n), factor), load::<S, PART>(weight, n));
        store::<S, PART>(x, S::f_mul(normed, S::f_mul(gate, sigmoid::<S>(gate))), n);
    }
}
