//! Products of float weights and F32 activations. The rows of a panel lie across
//! the lanes of a vector, so that no sum over lanes is needed.

use std::ops::Range;

use half::{bf16, f16};
use metal_attention_gguf::{Tensor, TensorType};

use super::matmul::PanelSlice;
use crate::packed::{PANEL, PackedMatrix};
use crate::simd::{Isa, Kernel, Simd, prefetch};

/// Columns that are summed up by themselves, which keeps rounding errors of long rows small.
const BLOCK: usize = 128;
/// Bytes of activations that a core's L2 cache holds beside a panel.
const ACTIVATIONS: usize = 256 << 10;
/// Columns from the weights being read to those being fetched.
const PREFETCH: usize = 64;

/// Computes a slice of the product of a matrix of floats and `x`, `[n_tokens, n_in]`.
pub(crate) fn run_floats(isa: Isa, matrix: &PackedMatrix, x: &[f32], slice: &PanelSlice<'_>) {
    fn with<W: FloatElement>(isa: Isa, matrix: &PackedMatrix, x: &[f32], slice: &PanelSlice<'_>) {
        let weights = matrix.panels(slice.panels()).as_ptr().cast::<W>();
        isa.run(FloatProduct { slice, panels: slice.panels(), weights, x, n_in: matrix.n_in });
    }
    let lengths = (matrix.n_in * slice.n_tokens(), matrix.n_out);
    assert_eq!(lengths, (x.len(), slice.n_out()), "the matrix and the input of the product");
    match matrix.ty {
        TensorType::F32 => with::<f32>(isa, matrix, x, slice),
        TensorType::F16 => with::<f16>(isa, matrix, x, slice),
        TensorType::BF16 => with::<bf16>(isa, matrix, x, slice),
        ty => unreachable!("{ty} is multiplied by 8-bit activations"),
    }
}

/// The same for a matrix as it lies in the file, dequantised panel by panel.
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

/// An element type of a matrix.
trait FloatElement: Copy {
    /// 16 elements.
    ///
    /// # Safety
    ///
    /// `p` points to 16 elements; the CPU has the instruction set.
    unsafe fn load<S: Simd>(p: *const Self) -> S::F;
}

impl FloatElement for f32 {
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const Self) -> S::F {
        // SAFETY: as the trait asks.
        unsafe { S::f_load(p) }
    }
}

impl FloatElement for f16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const Self) -> S::F {
        // SAFETY: as the trait asks; f16 is a transparent u16.
        unsafe { S::f_load_f16(p.cast()) }
    }
}

impl FloatElement for bf16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const Self) -> S::F {
        // SAFETY: as the trait asks; bf16 is a transparent u16.
        unsafe { S::f_load_bf16(p.cast()) }
    }
}

/// Some panels times all tokens.
struct FloatProduct<'a, W> {
    slice: &'a PanelSlice<'a>,
    /// Of the slice's.
    panels: Range<usize>,
    /// The panels, each `[n_in, PANEL]` and there for as long as this is.
    weights: *const W,
    /// `[n_tokens, n_in]`
    x: &'a [f32],
    n_in: usize,
}

impl<W: FloatElement> Kernel for FloatProduct<'_, W> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // So many tokens at once that their activations stay in the L2 cache for all panels.
        let n_tokens = (ACTIVATIONS / (4 * self.n_in)).max(24) / 24 * 24;
        for first in (0..self.slice.n_tokens()).step_by(n_tokens) {
            let end = self.slice.n_tokens().min(first + n_tokens);
            // SAFETY: panels and tokens are in range.
            unsafe {
                // As many sums at once as there are registers for, of several panels where there are few tokens.
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
    /// All panels, `P` at a time, times tokens from `first` on, `T` at a time as long as there are so many before
    /// `end`. Returns the token after these.
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

    /// `P` panels times `T` tokens. The order of additions depends on neither.
    #[inline(always)]
    unsafe fn tile<S: Simd, const P: usize, const T: usize>(&self, panel: usize, token: usize) {
        let n_in = self.n_in;
        // SAFETY: columns lie inside panels and rows of activations; the outputs are this thread's own.
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
                        // One token waits for memory, and the hardware's prefetching ends with each page, if not with a large one.
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
