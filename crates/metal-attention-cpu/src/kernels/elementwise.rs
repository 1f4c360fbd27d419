//! Kernels for one row of one token: norms, RoPE, and the activations of feed-forwards.

use metal_attention_model::{Activation, GateActivation, RopeLayout};

use crate::kernels::vectors::{load, store};
use crate::simd::{Kernel, LANES, Simd, sigmoid, softplus};

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

/// `out[i] = (x[i] - mean(x)) / sqrt(variance(x) + eps) * weight[i] + bias[i]` (arXiv 1607.06450).
pub(crate) struct LayerNorm<'a> {
    pub(crate) x: &'a [f32],
    pub(crate) weight: &'a [f32],
    pub(crate) bias: Option<&'a [f32]>,
    pub(crate) eps: f32,
    pub(crate) out: &'a mut [f32],
}

impl Kernel for LayerNorm<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self { x, weight, bias, eps, out } = self;
        assert!(x.len() == out.len() && weight.len() == out.len(), "rows of one length");
        assert!(bias.is_none_or(|bias| bias.len() == out.len()), "a bias of that length");
        let whole = x.len() / LANES * LANES;
        // SAFETY: vectors lie inside the slices.
        unsafe {
            let mut sum = S::f_splat(0.0);
            for i in (0..whole).step_by(LANES) {
                sum = S::f_add(sum, S::f_load(x.as_ptr().add(i)));
            }
            let mean = (S::f_sum(sum) + x[whole..].iter().sum::<f32>()) / x.len() as f32;
            let means = S::f_splat(mean);
            let mut squares = S::f_splat(0.0);
            for i in (0..whole).step_by(LANES) {
                let v = S::f_sub(S::f_load(x.as_ptr().add(i)), means);
                squares = S::f_fma(v, v, squares);
            }
            let squares = S::f_sum(squares) + x[whole..].iter().map(|v| (v - mean) * (v - mean)).sum::<f32>();
            let factor = 1.0 / (squares / x.len() as f32 + eps).sqrt();
            let factors = S::f_splat(factor);
            for i in (0..whole).step_by(LANES) {
                let v = S::f_mul(S::f_sub(S::f_load(x.as_ptr().add(i)), means), factors);
                let v = S::f_mul(v, S::f_load(weight.as_ptr().add(i)));
                let v = match bias {
                    Some(bias) => S::f_add(v, S::f_load(bias.as_ptr().add(i))),
                    None => v,
                };
                S::f_store(out.as_mut_ptr().add(i), v);
            }
            for i in whole..x.len() {
                out[i] = (x[i] - mean) * factor * weight[i] + bias.map_or(0.0, |bias| bias[i]);
            }
        }
    }
}

/// Multiplies each `x.len() / gate.len()` consecutive elements of `x` by the activation of one element of `gate`: the gate
/// of attention's result, by element or by head.
pub(crate) struct ApplyGate<'a> {
    pub(crate) x: &'a mut [f32],
    pub(crate) gate: &'a [f32],
    pub(crate) activation: GateActivation,
}

impl Kernel for ApplyGate<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self { x, gate, activation } = self;
        assert!(!gate.is_empty() && x.len().is_multiple_of(gate.len()), "as many elements for each gate");
        let per_gate = x.len() / gate.len();
        let whole = gate.len() / LANES * LANES;
        let rest = gate.len() - whole;
        // SAFETY: vectors lie inside the slices.
        unsafe {
            for i in (0..whole).step_by(LANES) {
                gate_vector::<S, false>(&mut x[i * per_gate..], gate.as_ptr().add(i), activation, per_gate, LANES);
            }
            if rest > 0 {
                let (x, gate) = (&mut x[whole * per_gate..], gate.as_ptr().add(whole));
                gate_vector::<S, true>(x, gate, activation, per_gate, rest);
            }
        }
    }
}

/// Computes [`ApplyGate`] for 16 elements of `gate`, or for `n` where `PART` is set. `x` begins with their `n * per_gate`
/// elements.
#[inline(always)]
unsafe fn gate_vector<S: Simd, const PART: bool>(
    x: &mut [f32],
    gate: *const f32,
    activation: GateActivation,
    per_gate: usize,
    n: usize,
) {
    // SAFETY: the caller vouches for the instruction set and for the elements.
    unsafe {
        let gate = load::<S, PART>(gate, n);
        let factors = match activation {
            GateActivation::Sigmoid => sigmoid::<S>(gate),
            GateActivation::Softplus => softplus::<S>(gate),
        };
        if per_gate == 1 {
            let x = x.as_mut_ptr();
            store::<S, PART>(x, S::f_mul(load::<S, PART>(x, n), factors), n);
        } else {
            let mut lanes = [0.0; LANES];
            S::f_store(lanes.as_mut_ptr(), factors);
            for (factor, run) in lanes[..n].iter().zip(x.chunks_exact_mut(per_gate)) {
                for x in run {
                    *x *= factor;
                }
            }
        }
    }
}

/// `gate[i] = activation(gate[i]) * up[i]`; without `up`, `gate[i] = activation(gate[i])`.
pub(crate) struct Activate<'a> {
    pub(crate) activation: Activation,
    pub(crate) gate: &'a mut [f32],
    pub(crate) up: Option<&'a [f32]>,
}

impl Kernel for Activate<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self { activation, gate, up } = self;
        // SAFETY: the caller vouches for the instruction set.
        unsafe {
            match activation {
                Activation::Silu => elementwise::<S, Silu>(gate, up, Silu),
                Activation::Gelu => elementwise::<S, Gelu>(gate, up, Gelu { cutoff: f32::NEG_INFINITY }),
                Activation::ReluSquared => elementwise::<S, ReluSquared>(gate, up, ReluSquared),
                Activation::ClampedSwiglu { limit } => {
                    elementwise::<S, ClampedSwiglu>(gate, up, ClampedSwiglu { limit });
                }
                Activation::ClampedSilu { limit } => elementwise::<S, ClampedSilu>(gate, up, ClampedSilu { limit }),
                Activation::SparseGelu { n_std } => {
                    let cutoff = cutoff(gate, n_std);
                    elementwise::<S, Gelu>(gate, up, Gelu { cutoff });
                }
            }
        }
    }
}

/// The cutoff of sparse GELU: the mean of a row plus `n_std` sample standard deviations.
fn cutoff(row: &[f32], n_std: f32) -> f32 {
    let n = row.len() as f64;
    let mean = row.iter().map(|&x| f64::from(x)).sum::<f64>() / n;
    let squares = row.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>();
    (mean + f64::from(n_std) * (squares / (n - 1.0).max(1.0)).sqrt()) as f32
}

/// An activation function.
trait Elementwise: Copy {
    /// The activation of a vector of the gate, times a vector of `up` where there is one.
    ///
    /// # Safety
    ///
    /// The CPU has the instruction set.
    unsafe fn of<S: Simd>(self, gate: S::F, up: Option<S::F>) -> S::F;
}

/// Applies `activation` to a row.
#[inline(always)]
#[expect(clippy::manual_map, reason = "a closure that is not inlined runs without the instruction set")]
unsafe fn elementwise<S: Simd, A: Elementwise>(gate: &mut [f32], up: Option<&[f32]>, activation: A) {
    assert!(up.is_none_or(|up| up.len() == gate.len()), "rows of one length");
    let whole = gate.len() / LANES * LANES;
    // SAFETY: vectors lie inside the slices.
    unsafe {
        for i in (0..whole).step_by(LANES) {
            let g = gate.as_mut_ptr().add(i);
            let u = match up {
                Some(up) => Some(S::f_load(up.as_ptr().add(i))),
                None => None,
            };
            S::f_store(g, activation.of::<S>(S::f_load(g), u));
        }
        let rest = gate.len() - whole;
        if rest > 0 {
            let (mut g, mut u) = ([0f32; LANES], [0f32; LANES]);
            g[..rest].copy_from_slice(&gate[whole..]);
            let up = match up {
                Some(up) => {
                    u[..rest].copy_from_slice(&up[whole..]);
                    Some(S::f_load(u.as_ptr()))
                }
                None => None,
            };
            S::f_store(g.as_mut_ptr(), activation.of::<S>(S::f_load(g.as_ptr()), up));
            gate[whole..].copy_from_slice(&g[..rest]);
        }
    }
}

/// `a * up`, or `a` alone.
#[inline(always)]
unsafe fn times<S: Simd>(a: S::F, up: Option<S::F>) -> S::F {
    match up {
        // SAFETY: the caller vouches for the instruction set.
        Some(up) => unsafe { S::f_mul(a, up) },
        None => a,
    }
}

/// `g * sigmoid(g) * up`
#[derive(Clone, Copy)]
struct Silu;

impl Elementwise for Silu {
    #[inline(always)]
    unsafe fn of<S: Simd>(self, g: S::F, up: Option<S::F>) -> S::F {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { times::<S>(S::f_mul(g, sigmoid::<S>(g)), up) }
    }
}

/// GELU (tanh approximation) of `max(g - cutoff, 0)`, or of `g` where the cutoff is minus infinity; times `up`.
#[derive(Clone, Copy)]
struct Gelu {
    cutoff: f32,
}

impl Elementwise for Gelu {
    #[inline(always)]
    unsafe fn of<S: Simd>(self, g: S::F, up: Option<S::F>) -> S::F {
        // SAFETY: the caller vouches for the instruction set.
        unsafe {
            let g = if self.cutoff > f32::NEG_INFINITY {
                S::f_max(S::f_sub(g, S::f_splat(self.cutoff)), S::f_splat(0.0))
            } else {
                g
            };
            // x / 2 (1 + tanh(z)) = x sigmoid(2 z)
            let cubed = S::f_mul(S::f_mul(g, g), g);
            let z = S::f_fma(cubed, S::f_splat(0.044_715), g);
            let twice = S::f_mul(z, S::f_splat(2.0 * (2.0 / std::f32::consts::PI).sqrt()));
            times::<S>(S::f_mul(g, sigmoid::<S>(twice)), up)
        }
    }
}

/// `max(g, 0)^2 * up`
#[derive(Clone, Copy)]
struct ReluSquared;

impl Elementwise for ReluSquared {
    #[inline(always)]
    unsafe fn of<S: Simd>(self, g: S::F, up: Option<S::F>) -> S::F {
        // SAFETY: the caller vouches for the instruction set.
        unsafe {
            let g = S::f_max(g, S::f_splat(0.0));
            times::<S>(S::f_mul(g, g), up)
        }
    }
}

/// The clamped `SwiGLU` of gpt-oss: `g sigmoid(1.702 g) * (up + 1)`, with `g` at most `limit` and `up` between `-limit` and
/// `limit`.
#[derive(Clone, Copy)]
struct ClampedSwiglu {
    limit: f32,
}

impl Elementwise for ClampedSwiglu {
    #[inline(always)]
    #[expect(clippy::manual_map, reason = "a closure that is not inlined runs without the instruction set")]
    unsafe fn of<S: Simd>(self, g: S::F, up: Option<S::F>) -> S::F {
        // SAFETY: the caller vouches for the instruction set.
        unsafe {
            let (limit, one) = (S::f_splat(self.limit), S::f_splat(1.0));
            let g = S::f_min(g, limit);
            let a = S::f_mul(g, sigmoid::<S>(S::f_mul(g, S::f_splat(1.702))));
            let up = match up {
                Some(up) => Some(S::f_add(one, S::f_max(S::f_min(up, limit), S::f_splat(-self.limit)))),
                None => None,
            };
            times::<S>(a, up)
        }
    }
}

/// `min(g sigmoid(g), limit) * up`, with `up` between `-limit` and `limit`.
#[derive(Clone, Copy)]
struct ClampedSilu {
    limit: f32,
}

impl Elementwise for ClampedSilu {
    #[inline(always)]
    #[expect(clippy::manual_map, reason = "a closure that is not inlined runs without the instruction set")]
    unsafe fn of<S: Simd>(self, g: S::F, up: Option<S::F>) -> S::F {
        // SAFETY: the caller vouches for the instruction set.
        unsafe {
            let limit = S::f_splat(self.limit);
            let a = S::f_min(S::f_mul(g, sigmoid::<S>(g)), limit);
            let up = match up {
                Some(up) => Some(S::f_max(S::f_min(up, limit), S::f_splat(-self.limit))),
                None => None,
            };
            times::<S>(a, up)
        }
    }
}

/// Applies RoPE to one head in place: rotates pair `i` by the angle with cosine `cos[i]` and sine `sin[i]`, `[n_rot / 2]` each.
/// Elements from `n_rot` on stay as they are.
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
