//! Products of a matrix as it lies in the file and F32 activations.

use std::ops::Range;

use half::{bf16, f16};
use metal_attention_gguf::Tensor;

use crate::packed::PANEL;
use crate::shared::SharedMut;
use crate::simd::{Isa, Kernel, LANES, Simd};

/// Some panels (groups of [`PANEL`] rows) of a product.
pub(crate) struct PlainProduct<'a> {
    pub(crate) tensor: &'a Tensor,
    pub(crate) panels: Range<usize>,
    /// `[n_tokens, n_in]`
    pub(crate) x: &'a [f32],
    pub(crate) n_tokens: usize,
    /// `[n_tokens, n_out]`
    pub(crate) y: &'a SharedMut<'a, f32>,
    pub(crate) accumulate: bool,
}

/// Computes the panels' rows of `y` for all tokens. No other thread may work on
/// the same panels of the same `y`.
pub(crate) fn run_plain(isa: Isa, p: &PlainProduct<'_>) {
    fn with<W: Weight>(isa: Isa, p: &PlainProduct<'_>, first_row: usize, weights: &[W]) {
        // SAFETY: the CPU has `isa`, as everywhere in this crate.
        unsafe { isa.run(Plain { p, first_row, weights }) }
    }
    let t = p.tensor;
    let n_in = t.row_len();
    let rows = p.panels.start * PANEL..(p.panels.end * PANEL).min(t.n_rows());
    let elements = rows.start * n_in..rows.end * n_in;
    if let Some(weights) = t.as_f32() {
        with(isa, p, rows.start, &weights[elements]);
    } else if let Some(weights) = t.as_f16() {
        with(isa, p, rows.start, &weights[elements]);
    } else if let Some(weights) = t.as_bf16() {
        with(isa, p, rows.start, &weights[elements]);
    } else {
        let mut weights = vec![0.0; PANEL * n_in];
        for first in rows.clone().step_by(PANEL) {
            let n_rows = PANEL.min(rows.end - first);
            for (row, out) in weights.chunks_exact_mut(n_in).take(n_rows).enumerate() {
                t.ty().dequantize(t.row(first + row), out);
            }
            with(isa, p, first, &weights[..n_rows * n_in]);
        }
    }
}

/// An element type of a matrix.
trait Weight: Copy {
    /// 16 elements.
    ///
    /// # Safety
    ///
    /// `p` points to 16 elements; the CPU has the instruction set.
    unsafe fn load<S: Simd>(p: *const Self) -> S::F;
    fn to_f32(self) -> f32;
}

impl Weight for f32 {
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const Self) -> S::F {
        // SAFETY: as the trait asks.
        unsafe { S::f_load(p) }
    }
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
}

impl Weight for f16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const Self) -> S::F {
        // SAFETY: as the trait asks; f16 is a transparent u16.
        unsafe { S::f_load_f16(p.cast()) }
    }
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f16::to_f32(self)
    }
}

impl Weight for bf16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const Self) -> S::F {
        // SAFETY: as the trait asks; bf16 is a transparent u16.
        unsafe { S::f_load_bf16(p.cast()) }
    }
    #[inline(always)]
    fn to_f32(self) -> f32 {
        bf16::to_f32(self)
    }
}

/// The rows `weights`, `[n_rows, n_in]`, times all tokens.
struct Plain<'a, W> {
    p: &'a PlainProduct<'a>,
    first_row: usize,
    weights: &'a [W],
}

impl<W: Weight> Kernel for Plain<'_, W> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let n_in = self.p.tensor.row_len();
        let n_rows = self.weights.len() / n_in;
        // SAFETY: rows and tokens are in range.
        unsafe {
            // As many sums at once as there are registers for.
            let mut row = 0;
            if self.p.n_tokens == 1 || S::TILE >= 8 {
                while n_rows - row >= 4 {
                    self.rows::<S, 4, 4>(row);
                    row += 4;
                }
            } else {
                while n_rows - row >= 2 {
                    self.rows::<S, 2, 2>(row);
                    row += 2;
                }
            }
            while row < n_rows {
                self.rows::<S, 1, 4>(row);
                row += 1;
            }
        }
    }
}

impl<W: Weight> Plain<'_, W> {
    /// `R` rows times all tokens, `T` at a time.
    #[inline(always)]
    unsafe fn rows<S: Simd, const R: usize, const T: usize>(&self, row: usize) {
        let mut token = 0;
        // SAFETY: in range, as the caller vouches.
        unsafe {
            while self.p.n_tokens - token >= T {
                self.tile::<S, R, T>(row, token);
                token += T;
            }
            while token < self.p.n_tokens {
                self.tile::<S, R, 1>(row, token);
                token += 1;
            }
        }
    }

    /// `R` rows times `T` tokens. The order of additions depends on neither.
    #[inline(always)]
    unsafe fn tile<S: Simd, const R: usize, const T: usize>(&self, row: usize, token: usize) {
        let (n_in, n_out) = (self.p.tensor.row_len(), self.p.tensor.n_rows());
        let w: [&[W]; R] = std::array::from_fn(|r| &self.weights[(row + r) * n_in..][..n_in]);
        let x: [&[f32]; T] = std::array::from_fn(|t| &self.p.x[(token + t) * n_in..][..n_in]);
        let whole = n_in / LANES * LANES;
        // SAFETY: vectors lie inside rows of n_in elements; the outputs are this thread's own.
        unsafe {
            let mut acc = [[S::f_splat(0.0); T]; R];
            for i in (0..whole).step_by(LANES) {
                let mut xs = [S::f_splat(0.0); T];
                for t in 0..T {
                    xs[t] = S::f_load(x[t].as_ptr().add(i));
                }
                for r in 0..R {
                    let w = W::load::<S>(w[r].as_ptr().add(i));
                    for t in 0..T {
                        acc[r][t] = S::f_fma(w, xs[t], acc[r][t]);
                    }
                }
            }
            for r in 0..R {
                for t in 0..T {
                    let rest: f32 = w[r][whole..].iter().zip(&x[t][whole..]).map(|(w, x)| w.to_f32() * x).sum();
                    let y = S::f_sum(acc[r][t]) + rest;
                    let out = self.p.y.at((token + t) * n_out + self.first_row + row + r);
                    *out = if self.p.accumulate { *out + y } else { y };
                }
            }
        }
    }
}
