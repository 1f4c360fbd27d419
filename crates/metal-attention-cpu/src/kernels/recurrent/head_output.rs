//! The steps from a recurrence's result to the output projection: norm, bonus, gate.

use metal_attention_model::NormKind;

use super::vectors::sum_of_products;
use crate::kernels::vectors::{load, store};
use crate::simd::{Kernel, LANES, Simd, sigmoid};

/// The function of the gate that a head's result is multiplied by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Gate {
    /// `gate`
    Identity,
    /// `gate sigmoid(gate)`
    Silu,
    /// `sigmoid(gate)`
    Sigmoid,
}

/// The kernel `out = gate * (norm(out) * weight + bias + v * sum(r k factor))` of one head's row, or of a range of channels.
/// All rows have the same length; each step may be missing.
pub(crate) struct HeadOutput<'a> {
    /// The recurrence's result; updated in place.
    pub(crate) out: &'a mut [f32],
    /// The norm, with weight and bias.
    pub(crate) norm: Option<HeadNorm<'a>>,
    /// RWKV-7's bonus.
    pub(crate) bonus: Option<Bonus<'a>>,
    /// The gate and the function that is applied to it.
    pub(crate) gate: Option<(Gate, &'a [f32])>,
}

/// The norm of one head's result.
pub(crate) struct HeadNorm<'a> {
    pub(crate) kind: NormKind,
    pub(crate) weight: &'a [f32],
    pub(crate) bias: Option<&'a [f32]>,
    pub(crate) eps: f32,
}

/// RWKV-7's bonus: the token's own value `v` times `sum(r k factor)`.
pub(crate) struct Bonus<'a> {
    pub(crate) r: &'a [f32],
    pub(crate) k: &'a [f32],
    pub(crate) factor: &'a [f32],
    pub(crate) v: &'a [f32],
}

impl Kernel for HeadOutput<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self { out, norm, bonus, gate } = self;
        let n = out.len();
        // SAFETY: the caller vouches for the instruction set.
        unsafe {
            if let Some(HeadNorm { kind, weight, bias, eps }) = norm {
                assert!(weight.len() == n && bias.is_none_or(|bias| bias.len() == n), "rows of one length");
                match kind {
                    NormKind::Layer => {
                        let mean = sum::<S>(out) / n as f32;
                        for x in out.iter_mut() {
                            *x -= mean;
                        }
                    }
                    NormKind::Rms => {}
                }
                let factor = 1.0 / (sum_of_products::<S>(out, out, None) / n as f32 + eps).sqrt();
                for i in 0..n {
                    out[i] = out[i] * factor * weight[i];
                }
                if let Some(bias) = bias {
                    for i in 0..n {
                        out[i] += bias[i];
                    }
                }
            }
            if let Some(Bonus { r, k, factor, v }) = bonus {
                assert!([r, k, factor, v].iter().all(|row| row.len() == n), "rows of one length");
                let bonus = sum_of_products::<S>(r, k, Some(factor));
                for i in 0..n {
                    out[i] += bonus * v[i];
                }
            }
            if let Some((kind, gate)) = gate {
                assert_eq!(gate.len(), n, "rows of one length");
                let whole = n / LANES * LANES;
                for i in (0..whole).step_by(LANES) {
                    times_gate::<S, false>(out, kind, gate, i);
                }
                if whole < n {
                    times_gate::<S, true>(out, kind, gate, whole);
                }
            }
        }
    }
}

/// Multiplies elements from `i` on by the gate: 16, or those that are left where `PART` is set.
#[inline(always)]
unsafe fn times_gate<S: Simd, const PART: bool>(out: &mut [f32], kind: Gate, gate: &[f32], i: usize) {
    let n = out.len() - i;
    // SAFETY: as the caller vouches.
    unsafe {
        let g = load::<S, PART>(gate.as_ptr().add(i), n);
        let factor = match kind {
            Gate::Identity => g,
            Gate::Silu => S::f_mul(g, sigmoid::<S>(g)),
            Gate::Sigmoid => sigmoid::<S>(g),
        };
        let p = out.as_mut_ptr().add(i);
        store::<S, PART>(p, S::f_mul(load::<S, PART>(p, n), factor), n);
    }
}

/// The sum of a row.
#[inline(always)]
unsafe fn sum<S: Simd>(x: &[f32]) -> f32 {
    let whole = x.len() / LANES * LANES;
    // SAFETY: vectors and parts of them inside the slice.
    unsafe {
        let mut sum = S::f_splat(0.0);
        for i in (0..whole).step_by(LANES) {
            sum = S::f_add(sum, S::f_load(x.as_ptr().add(i)));
        }
        if whole < x.len() {
            sum = S::f_add(sum, load::<S, true>(x.as_ptr().add(whole), x.len() - whole));
        }
        S::f_sum(sum)
    }
}
