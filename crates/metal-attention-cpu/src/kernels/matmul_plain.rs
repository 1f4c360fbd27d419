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
/// Tokens that are multiplied by all panels before the next ones, which come from the L3 cache. A multiple of 24.
const CHUNK: usize = 288;
/// Tokens from which on weights of 16 bits are converted once for all tokens of a chunk instead of in each tile.
const MIN_CONVERTED: usize = 96;
/// Panels that are converted at a time: those of a tile.
const CONVERTED: usize = 2;
/// Columns from the weights that are read to those that are prefetched.
const PREFETCH: usize = 64;

/// Computes a slice of the product of a repacked matrix of floats `ty` and `x`, `[n_tokens, n_in]`.
pub(crate) fn run_floats(isa: Isa, matrix: &PackedMatrix, ty: FloatType, x: &[f32], slice: &PanelSlice<'_>) {
    fn with<W: FloatElement>(isa: Isa, matrix: &PackedMatrix, x: &[f32], slice: &PanelSlice<'_>) {
        let (n_in, n_tokens, all) = (matrix.n_in, slice.n_tokens(), slice.panels());
        let weights = |panels: Range<usize>| matrix.panels(panels).as_ptr().cast::<W>();
        if W::IS_F32 || n_tokens < MIN_CONVERTED {
            let (weights, panels) = (weights(all.clone()), all);
            isa.run(FloatProduct { slice, panels, tokens: 0..n_tokens, weights, stride: n_in * PANEL, x, n_in });
            return;
        }
        // Panels a few cache lines further apart than their length, which mostly is a multiple of 4096 bytes: otherwise all lines that a
        // tile reads at a time lie in the same set of the L1 cache.
        let stride = (n_in + 4) * PANEL;
        let mut converted = vec![0.0; CONVERTED * stride];
        for first in (0..n_tokens).step_by(CHUNK) {
            for panel in all.clone().step_by(CONVERTED) {
                let panels = panel..all.end.min(panel + CONVERTED);
                for (panel, out) in panels.clone().zip(converted.chunks_exact_mut(stride)) {
                    // SAFETY: a panel has as many weights.
                    isa.run(unsafe { Conversion::new(weights(panel..panel + 1), &mut out[..n_in * PANEL]) });
                }
                let (tokens, weights) = (first..n_tokens.min(first + CHUNK), converted.as_ptr());
                isa.run(FloatProduct { slice, panels, tokens, weights, stride, x, n_in });
            }
        }
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
    let (tokens, stride) = (0..slice.n_tokens(), n_in * PANEL);
    isa.run(FloatProduct { slice, panels: slice.panels(), tokens, weights, stride, x, n_in });
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
        let (panels, tokens, weights) = (panel..panel + 1, 0..slice.n_tokens(), weights.as_ptr());
        isa.run(FloatProduct { slice, panels, tokens, weights, stride: n_in * PANEL, x, n_in });
    }
}

/// An element type of a float matrix.
trait FloatElement: Copy {
    /// Whether it needs no conversion.
    const IS_F32: bool;

    /// Loads 16 elements as F32.
    ///
    /// # Safety
    ///
    /// `p` points to 16 elements; the CPU has the instruction set.
    unsafe fn load<S: Simd>(p: *const Self) -> S::F;
}

impl FloatElement for f32 {
    const IS_F32: bool = true;

    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const Self) -> S::F {
        // SAFETY: as the trait requires.
        unsafe { S::f_load(p) }
    }
}

impl FloatElement for f16 {
    const IS_F32: bool = false;

    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const Self) -> S::F {
        // SAFETY: as the trait requires; f16 is a transparent u16.
        unsafe { S::f_load_f16(p.cast()) }
    }
}

impl FloatElement for bf16 {
    const IS_F32: bool = false;

    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const Self) -> S::F {
        // SAFETY: as the trait requires; bf16 is a transparent u16.
        unsafe { S::f_load_bf16(p.cast()) }
    }
}

/// Converts weights to F32.
struct Conversion<'a, W> {
    /// As many weights as `out` has elements, whole vectors, valid while this kernel runs.
    weights: *const W,
    out: &'a mut [f32],
}

impl<'a, W> Conversion<'a, W> {
    /// The conversion of `weights` to `out`.
    ///
    /// # Safety
    ///
    /// There are as many weights as `out` has elements, and that number is a multiple of [`PANEL`].
    unsafe fn new(weights: *const W, out: &'a mut [f32]) -> Self {
        Self { weights, out }
    }
}

impl<W: FloatElement> Kernel for Conversion<'_, W> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        for i in (0..self.out.len()).step_by(PANEL) {
            // SAFETY: the vectors lie inside the weights and `out`, as the constructor requires.
            unsafe { S::f_store(self.out.as_mut_ptr().add(i), W::load::<S>(self.weights.add(i))) };
        }
    }
}

/// The kernel for some panels and some tokens of a slice.
struct FloatProduct<'a, W> {
    slice: &'a PanelSlice<'a>,
    /// The panels to compute, some of those of the slice.
    panels: Range<usize>,
    /// The tokens to compute.
    tokens: Range<usize>,
    /// The weights of these panels, `[n_in, PANEL]` each, valid while this kernel runs.
    weights: *const W,
    /// Weights from one panel to the next.
    stride: usize,
    /// `[n_tokens, n_in]`
    x: &'a [f32],
    n_in: usize,
}

impl<W: FloatElement> Kernel for FloatProduct<'_, W> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        for first in self.tokens.clone().step_by(CHUNK) {
            let end = self.tokens.end.min(first + CHUNK);
            // SAFETY: panels and tokens are in range.
            unsafe {
                // As many sums at a time as fit the registers; with few tokens, of several panels.
                let token = if const { S::TILE >= 8 } {
                    self.tokens::<S, 2, 8>(first, end)
                } else {
                    self.tokens::<S, 1, 6>(first, end)
                };
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
            let w = self.weights.add((panel - self.panels.start) * self.stride);
            let x = self.x.as_ptr().add(token * n_in);
            let mut sum = [[S::f_splat(0.0); T]; P];
            for start in (0..n_in).step_by(BLOCK) {
                let mut acc = [[S::f_splat(0.0); T]; P];
                for i in start..n_in.min(start + BLOCK) {
                    let mut ws = [S::f_splat(0.0); P];
                    for p in 0..P {
                        let w = w.add(p * self.stride + i * PANEL);
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
