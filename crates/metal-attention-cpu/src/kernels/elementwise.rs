//! Kernels that work on one token's row at a time: RMSNorm, RoPE, the gated
//! activation.

use metal_attention_model::RopeLayout;

use crate::simd::{Kernel, LANES, Simd, sigmoid};

/// `out[i] = x[i] / sqrt(mean(x^2) + eps) * weight[i]` (arXiv 1910.07467).
pub(crate) struct RmsNorm<'a> {
    pub(crate) x: &'a [f32],
    pub(crate) weight: &'a [f32],
    pub(crate) eps: f32,
    pub(crate) out: &'a mut [f32],
}

impl Kernel for RmsNorm<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let (x, weight, out) = (self.x, self.weight, self.out);
        assert!(x.len() == out.len() && weight.len() == out.len(), "rows of one length");
        let whole = x.len() / LANES * LANES;
        // SAFETY: vectors lie inside the slices.
        unsafe {
            let mut sum = S::f_splat(0.0);
            for i in (0..whole).step_by(LANES) {
                let v = S::f_load(x.as_ptr().add(i));
                sum = S::f_fma(v, v, sum);
            }
            let sum = S::f_sum(sum) + x[whole..].iter().map(|v| v * v).sum::<f32>();
            let factor = 1.0 / (sum / x.len() as f32 + self.eps).sqrt();
            let factors = S::f_splat(factor);
            for i in (0..whole).step_by(LANES) {
                let v = S::f_mul(S::f_load(x.as_ptr().add(i)), factors);
                S::f_store(out.as_mut_ptr().add(i), S::f_mul(v, S::f_load(weight.as_ptr().add(i))));
            }
            for i in whole..x.len() {
                out[i] = x[i] * factor * weight[i];
            }
        }
    }
}

/// `gate[i] = gate[i] / (1 + exp(-gate[i])) * up[i]`.
pub(crate) struct FfnSilu<'a> {
    pub(crate) gate: &'a mut [f32],
    pub(crate) up: &'a [f32],
}

impl Kernel for FfnSilu<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let (gate, up) = (self.gate, self.up);
        assert_eq!(gate.len(), up.len(), "rows of one length");
        let whole = gate.len() / LANES * LANES;
        // SAFETY: vectors lie inside the slices.
        unsafe {
            for i in (0..whole).step_by(LANES) {
                let g = gate.as_mut_ptr().add(i);
                S::f_store(g, silu_times::<S>(S::f_load(g), S::f_load(up.as_ptr().add(i))));
            }
            let rest = gate.len() - whole;
            if rest > 0 {
                let (mut g, mut u) = ([0f32; LANES], [0f32; LANES]);
                g[..rest].copy_from_slice(&gate[whole..]);
                u[..rest].copy_from_slice(&up[whole..]);
                S::f_store(g.as_mut_ptr(), silu_times::<S>(S::f_load(g.as_ptr()), S::f_load(u.as_ptr())));
                gate[whole..].copy_from_slice(&g[..rest]);
            }
        }
    }
}

#[inline(always)]
unsafe fn silu_times<S: Simd>(g: S::F, u: S::F) -> S::F {
    // SAFETY: the caller vouches for the instruction set.
    unsafe { S::f_mul(S::f_mul(g, sigmoid::<S>(g)), u) }
}

/// Rotates one head in place: each pair by the angle whose cosine and sine are
/// `cos[i]`, `sin[i]` (`[n_rot / 2]`).
pub(crate) fn rope_apply(layout: RopeLayout, head: &mut [f32], cos: &[f32], sin: &[f32]) {
    let half = cos.len();
    match layout {
        RopeLayout::Interleaved => {
            for ((pair, c), s) in head.as_chunks_mut::<2>().0.iter_mut().zip(cos).zip(sin) {
                *pair = [pair[0] * c - pair[1] * s, pair[0] * s + pair[1] * c];
            }
        }
        RopeLayout::Halves => {
            let (low, high) = head.split_at_mut(half);
            for (((a, b), c), s) in low.iter_mut().zip(high).zip(cos).zip(sin) {
                (*a, *b) = (*a * c - *b * s, *a * s + *b * c);
            }
        }
    }
}
