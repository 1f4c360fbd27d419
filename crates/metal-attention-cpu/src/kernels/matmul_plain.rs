//! Products of float weights and F32 activations: of repacked F32, F16 and BF16 matrices, and in exact mode of quantised
//! matrices, which are dequantised panel by panel. The 16 rows of a panel lie across the lanes of a vector, so no sums across
//! lanes are needed.

use std::ops::Range;

use half::{bf16, f16};
use metal_attention_gguf::Tensor;

use super::matmul::PanelSlice;
use crate::packed::{FloatType, PANEL, PackedMatrix};
use crate::simd::{Isa, Kernel, Simd, prefetch};

/// Columns that have a partial sum of their own, which keeps the rounding errors of long rows small.
const BLOCK: usize = 128;
/// Bytes of activations that stay in a core's L2 cache beside a panel.
const ACTIVATIONS: usize = 256 << 10;
/// Columns from the weights that are read to those that are prefetched.
const PREFETCH: usize = 64;

/// Computes a slice of the product of a repacked matrix of floats `ty` and `x`, `[n_tokens, n_in]`.
pub(crate) fn run_floats(isa: Isa, matrix: &PackedMatrix, ty: FloatType, x: &[f32], slice: &PanelSlice<'_>) {
    fn with<W: FloatElement>(isa: Isa, matrix: &PackedMatrix, x: &[f32], slice: &PanelSlice<'_>) {
        let weights = matrix.panels(slice.panels()).as_ptr().cast::<W>();
        isa.run(FloatProduct { slice, panels: slice.panels(), weights, x, n_in: matrix.n_in });
    }
    let lengths = (matrix.n_in * slice.n_tokens(), matrix.n_out);
    assert_eq!(lengths, (x.len(), slice.n_out()), "the matrix and the input of the product");
    match ty {
        FloatType::F32 => with::<f32>(isa, matrix, x, slice),
        FloatType::F16 => with::<f16>(isa, matrix, x, slice),
        FloatType::BF16 => with::<bf16>(isa, matrix, x, slice),
    }
}

/// Computes a slice of the product of a matrix whose panels are `panels`, `[n_panels, n_in, PANEL]`, and `x`, `[n_tokens, n_in]`.
pub(crate) fn run_panels(isa: Isa, panels: &[f32], n_in: usize, x: &[f32], slice: &PanelSlice<'_>) {
    let lengths = (n_in * slice.n_tokens(), slice.n_out().div_ceil(PANEL) * PANEL * n_in);
    assert_eq!(lengths, (x.len(), panels.len()), "the matrix and the input of the product");
    let weights = panels[slice.panels().start * PANEL * n_in..].as_ptr();
    isa.run(FloatProduct { slice, panels: slice.panels(), weights, x, n_in });
}

/// Computes a slice of the product of a quantised matrix in the file, dequantised panel by panel, and `x`, `[n_tokens, n_in]`.
pub(crate) fn run_dequantized(isa: Isa, tensor: &Tensor, x: &[f32], slice: &PanelSlice<'_>) {
    let n_in = tensor.row_len();
    let (mut row, mut weights) = (vec![0.0; n_in], vec![0.0; PANEL * n_in]);
    let lengths = (n_in * slice.n_tokens(), tensor.n_rows());
    assert_eq!(lengths, (x.len(), slice.n_out()), "the matrix and the input of the product");
    for panel in slice.panels() {
        for lane in 0..PANEL.min(slice.n_out() - panel * PANEL) {
            tensor.ty().dequantize(tensor.row(panel * PANEL + lane), &mut row);
            for (weights, w) in weights.chunks_exact_mut(PANEL).zip(&row) {
                weights[lane] = *w;
            }
        }
        let (panels, weights) = (panel..panel + 1, weights.as_ptr());
        isa.run(FloatProduct { slice, panels, weights, x, n_in });
    }
}

/// An element type of a float matrix.
trait FloatElement: Copy {
    /// Loads 16 elements as F32.
    ///
    /// # Safety
    ///
    /// `p` points to 16 elements; the CPU has the instruction set.
    unsafe fn load<S: Simd>(p: *const Self) -> S::F;
}

impl FloatElement for f32 {
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const Self) -> S::F {
        // SAFETY: as the trait requires.
        unsafe { S::f_load(p) }
    }
}

impl FloatElement for f16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const Self) -> S::F {
        // SAFETY: as the trait requires; f16 is a transparent u16.
        unsafe { S::f_load_f16(p.cast()) }
    }
}

impl FloatElement for bf16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const Self) -> S::F {
        // SAFETY: as the trait requires; bf16 is a transparent u16.
        unsafe { S::f_load_bf16(p.cast()) }
    }
}

/// The kernel for some panels and all tokens of a slice.
struct FloatProduct<'a, W> {
    slice: &'a PanelSlice<'a>,
    /// The panels to compute, some of those of the slice.
    panels: Range<usize>,
    /// The weights of these panels, `[n_in, PANEL]` each, valid while this kernel runs.
    weights: *const W,
    /// `[n_tokens, n_in]`
    x: &'a [f32],
    n_in: usize,
}

impl<W: FloatElement> Kernel for FloatProduct<'_, W> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // As many tokens at a time as keep their activations in the L2 cache while all panels are multiplied.
        let n_tokens = (ACTIVATIONS / (4 * self.n_in)).max(24) / 24 * 24;
        for first in (0..self.slice.n_tokens()).step_by(n_tokens) {
            let end = self.slice.n_tokens().min(first + n_tokens);
            // SAFETY: panels and tokens are in range.
            unsafe {
                // As many sums at a time as fit the registers; with few tokens, of several panels.
                let token =
                    if S::TILE >= 8 { self.tokens::<S, 2, 8>(first, end) } else { self.tokens::<S, 1, 6>(first, end) };
                let token = self.tokens::<S, 2, 4>(token, end);
                let token = self.tokens::<S, 2, 2>(token, end);
                self.tokens::<S, 4, 1>(token, end);
            }
        }
    }
}

impl<W: FloatElement> FloatProduct<'_, W> {
    /// Computes all panels, `P` at a time, for tokens from `first` on, `T` at a time while at least `T` are left before `end`.
    /// Returns the first token that is left.
    #[inline(always)]
    unsafe fn tokens<S: Simd, const P: usize, const T: usize>(&self, first: usize, end: usize) -> usize {
        let after = first + (end - first) / T * T;
        let mut panel = self.panels.start;
        // SAFETY: in range, as the caller vouches.
        unsafe {
            while self.panels.end - panel >= P {
                for token in (first..after).step_by(T) {
                    self.tile::<S, P, T>(panel, token);
                }
                panel += P;
            }
            while panel < self.panels.end {
                for token in (first..after).step_by(T) {
                    self.tile::<S, 1, T>(panel, token);
                }
                panel += 1;
            }
        }
        after
    }

    /// Computes `P` panels for `T` tokens. The order of additions depends neither on `P` nor on `T`.
    #[inline(always)]
    unsafe fn tile<S: Simd, const P: usize, const T: usize>(&self, panel: usize, token: usize) {
        let n_in = self.n_in;
        // SAFETY: columns lie inside panels and rows of activations; the outputs are accessed by this slice alone.
        unsafe {
            let w = self.weights.add((panel - self.panels.start) * n_in * PANEL);
            let x = self.x.as_ptr().add(token * n_in);
            let mut sum = [[S::f_splat(0.0); T]; P];
            for start in (0..n_in).step_by(BLOCK) {
                let mut acc = [[S::f_splat(0.0); T]; P];
                for i in start..n_in.min(start + BLOCK) {
                    let mut ws = [S::f_splat(0.0); P];
                    for p in 0..P {
                        let w = w.add((p * n_in + i) * PANEL);
                        // With one token the loads of weights limit the speed, and the hardware's prefetching stops at each
                        // page that is not a large one.
                        if T == 1 && !S::STREAMS {
                            prefetch(w.wrapping_add(PREFETCH * PANEL).cast());
                        }
                        ws[p] = W::load::<S>(w);
                    }
                    for t in 0..T {
                        let x = S::f_splat(*x.add(t * n_in + i));
                        for p in 0..P {
                            acc[p][t] = S::f_fma(ws[p], x, acc[p][t]);
                        }
                    }
                }
                for p in 0..P {
                    for t in 0..T {
                        sum[p][t] = S::f_add(sum[p][t], acc[p][t]);
                    }
                }
            }
            for p in 0..P {
                for t in 0..T {
                    self.slice.store::<S>(panel + p, token + t, sum[p][t]);
                }
            }
        }
    }
}
