//! Products of repacked quantised weights and 8-bit activations.
//!
//! Weights lie in panels of 16 rows, a lane each (see [`packed`](crate::packed)). A product is a sum over quantisation blocks:
//! an integer dot product of codes and activations, times the scales of both, plus the block's minimum times the sum of the
//! activations. [`PackedProduct::tile`] computes some panels for some tokens at a time, in registers.

use std::marker::PhantomData;

use metal_attention_gguf::TensorType;

use super::matmul::PanelSlice;
use crate::activations::{Q8Activations, Q8Row};
use crate::packed::PackedMatrix;
use crate::packed::codebooks;
use crate::packed::formats::{self, PackedFormat};
use crate::packed::fp4;
use crate::simd::{Isa, Kernel, Simd, prefetch};

/// Bytes of activations (about two per column and token) that stay in a core's L2 cache beside a panel.
const ACTIVATIONS: usize = 256 << 10;
/// Columns beyond which one token's activations compete with the weights for the first-level cache.
const LONG_ROW: usize = 2048;
/// Bytes from the weights that are read to those that are prefetched, for a single token.
const PREFETCH: usize = 8192;

/// Computes a slice of the product of a repacked quantised matrix and `x`.
///
/// # Panics
///
/// When the shapes do not match, or the matrix is one of floats, which [`WeightMatrix::Codes`] never has.
///
/// [`WeightMatrix::Codes`]: super::matmul::WeightMatrix::Codes
pub(crate) fn run_packed(isa: Isa, matrix: &PackedMatrix, x: &Q8Activations, slice: &PanelSlice<'_>) {
    fn with<F: PackedFormat>(isa: Isa, matrix: &PackedMatrix, x: &Q8Activations, slice: &PanelSlice<'_>) {
        isa.run(PackedProduct { matrix, x, slice, format: PhantomData::<F> });
    }
    assert_eq!((matrix.n_in, matrix.n_out), (x.n_in(), slice.n_out()), "the matrix of the product");
    let with = match matrix.ty {
        TensorType::Q4_0 => with::<formats::Q4_0>,
        TensorType::Q4_1 => with::<formats::Q4_1>,
        TensorType::Q5_0 => with::<formats::Q5_0>,
        TensorType::Q5_1 => with::<formats::Q5_1>,
        TensorType::Q8_0 => with::<formats::Q8_0>,
        TensorType::Q2_K => with::<formats::Q2K>,
        TensorType::Q3_K => with::<formats::Q3K>,
        TensorType::Q4_K => with::<formats::Q4K>,
        TensorType::Q5_K => with::<formats::Q5K>,
        TensorType::Q6_K => with::<formats::Q6K>,
        TensorType::IQ4_NL => with::<formats::Iq4Nl>,
        TensorType::IQ4_XS => with::<formats::Iq4Xs>,
        ty @ (TensorType::F32 | TensorType::F16 | TensorType::BF16 | TensorType::I64) => {
            unreachable!("{ty} is no type of packed matrices")
        }
        TensorType::IQ3_S => with::<formats::Iq3S>,
        TensorType::IQ3_XXS => with::<codebooks::Iq3Xxs>,
        TensorType::IQ2_S => with::<codebooks::Iq2S>,
        TensorType::IQ2_XS => with::<codebooks::Iq2Xs>,
        TensorType::IQ2_XXS => with::<codebooks::Iq2Xxs>,
        TensorType::IQ1_M => with::<codebooks::Iq1M>,
        TensorType::IQ1_S => with::<codebooks::Iq1S>,
        TensorType::MXFP4 => with::<fp4::Mxfp4>,
        TensorType::NVFP4 => with::<fp4::Nvfp4>,
        TensorType::TQ2_0 | TensorType::TQ1_0 => with::<formats::Tq>,
        TensorType::Q2_0 => with::<formats::Q2_0>,
        TensorType::Q1_0 => with::<formats::Q1_0>,
    };
    with(isa, matrix, x, slice);
}

/// The kernel for a slice of the product of `matrix`, which has format `F`, and `x`.
struct PackedProduct<'a, F> {
    matrix: &'a PackedMatrix,
    x: &'a Q8Activations,
    slice: &'a PanelSlice<'a>,
    format: PhantomData<F>,
}

impl<F: PackedFormat> Kernel for PackedProduct<'_, F> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // As many tokens at a time as keep their activations in the L2 cache while all panels are multiplied.
        let n_tokens = (ACTIVATIONS / (2 * self.matrix.n_in)).max(8) / 8 * 8;
        let mut panels = self.slice.panels();
        if const { S::STREAMS && F::STREAMS } && self.slice.n_tokens() == 1 && self.matrix.n_in > LONG_ROW {
            // Two panels at a time share the loads of the activations. Each is from another half of the slice, so that both
            // halves are read sequentially.
            let half = panels.len() / 2;
            for panel in panels.start..panels.start + half {
                // SAFETY: panels are in range; the format is the matrix's.
                unsafe { self.tile::<S, 2, 1>([panel, panel + half], 0, false) };
            }
            panels.start += 2 * half;
        }
        for first in (0..self.slice.n_tokens()).step_by(n_tokens) {
            let end = self.slice.n_tokens().min(first + n_tokens);
            for panel in panels.clone() {
                let mut token = first;
                // SAFETY: panels and tokens are in range; the format is the matrix's.
                unsafe {
                    if const { S::TILE >= 8 } {
                        while end - token >= 8 {
                            self.tile::<S, 1, 8>([panel], token, token == first);
                            token += 8;
                        }
                    }
                    if const { S::TILE >= 4 } {
                        while end - token >= 4 {
                            self.tile::<S, 1, 4>([panel], token, token == first);
                            token += 4;
                        }
                    }
                    while end - token >= 2 {
                        self.tile::<S, 1, 2>([panel], token, token == first);
                        token += 2;
                    }
                    if token < end {
                        self.tile::<S, 1, 1>([panel], token, token == first && !(S::STREAMS && F::STREAMS));
                    }
                }
            }
        }
    }
}

impl<F: PackedFormat> PackedProduct<'_, F> {
    /// Computes `P` panels for tokens `token..token + T`. `fetch`: whether the next weights are prefetched.
    #[inline(always)]
    unsafe fn tile<S: Simd, const P: usize, const T: usize>(&self, panels: [usize; P], token: usize, fetch: bool) {
        let bytes = panels.map(|panel| self.matrix.panels(panel..panel + 1));
        // With few tokens the loads of weights limit the speed, and the hardware's prefetching stops at each page that is not a
        // large one. A single token reads a panel once, so a short distance is enough. Several tokens read it again in the next
        // tiles, so there is time to prefetch the whole next panel.
        let ahead = fetch.then_some(if T == 1 { PREFETCH } else { bytes[0].len() });
        let n_blocks = self.matrix.n_in / F::BLOCK;
        debug_assert_eq!(bytes[0].len(), n_blocks * F::BYTES);
        let rows: [Q8Row; T] = std::array::from_fn(|t| self.x.row(self.slice.first_row() + token + t));
        // SAFETY: blocks lie inside the panels, activation blocks inside their rows of n_in elements.
        unsafe {
            let mut y = [[S::f_splat(0.0); T]; P];
            for b in 0..n_blocks {
                for p in 0..P {
                    add_block::<S, F, T>(bytes[p].as_ptr().add(b * F::BYTES), &rows, b, ahead, &mut y[p]);
                }
            }
            for p in 0..P {
                for t in 0..T {
                    self.slice.store::<S>(panels[p], token + t, y[p][t]);
                }
            }
        }
    }
}

/// Adds the products of block `b` of a panel and `T` rows of activations to `y`.
///
/// # Safety
///
/// `block` points to a whole block, and block `b` lies inside the rows; the CPU has the instruction set.
#[inline(always)]
unsafe fn add_block<S: Simd, F: PackedFormat, const T: usize>(
    block: *const u8,
    rows: &[Q8Row; T],
    b: usize,
    ahead: Option<usize>,
    y: &mut [S::F; T],
) {
    // SAFETY: as the caller vouches.
    unsafe {
        let (block_scale, block_min) = F::block_scale_and_min::<S>(block);
        if const { F::BLOCK == 32 } {
            fetch::<F>(block, 0, ahead);
            let codes = F::codes::<S>(block, 0);
            let sums = dots::<S, F, T, 0, 8>(&codes, rows, b);
            for t in 0..T {
                let info = &*rows[t].blocks.add(b);
                y[t] = S::f_fma(S::i_to_f(sums[t]), S::f_mul(block_scale, S::f_splat(info.scale)), y[t]);
                if F::HAS_MIN {
                    y[t] = S::f_fma(block_min, S::f_splat(info.scaled_sum), y[t]);
                }
            }
            return;
        }
        // The sums over the sub-blocks, in units of the block's scale and of its minimum.
        let (mut sum, mut min_sum) = ([S::f_splat(0.0); T], [S::f_splat(0.0); T]);
        let unpacked = F::unpack::<S>(block);
        for i in 0..F::BLOCK / 32 {
            fetch::<F>(block, i, ahead);
            let codes = F::codes::<S>(block, i);
            let at = b * (F::BLOCK / 32) + i;
            if const { F::SUB == 32 } {
                let (scale, min) = F::scale_and_min::<S>(block, &unpacked, i);
                let sums = dots::<S, F, T, 0, 8>(&codes, rows, at);
                for t in 0..T {
                    let info = &*rows[t].blocks.add(at);
                    sum[t] = S::f_fma(S::i_to_f(sums[t]), S::f_mul(scale, S::f_splat(info.scale)), sum[t]);
                    if F::HAS_MIN {
                        min_sum[t] = S::f_fma(min, S::f_splat(info.scaled_sum), min_sum[t]);
                    }
                }
            } else {
                let (scale0, min0) = F::scale_and_min::<S>(block, &unpacked, 2 * i);
                let (scale1, min1) = F::scale_and_min::<S>(block, &unpacked, 2 * i + 1);
                let lo = dots::<S, F, T, 0, 4>(&codes, rows, at);
                let hi = dots::<S, F, T, 4, 8>(&codes, rows, at);
                for t in 0..T {
                    let info = &*rows[t].blocks.add(at);
                    let both = S::f_fma(S::i_to_f(lo[t]), scale0, S::f_mul(S::i_to_f(hi[t]), scale1));
                    sum[t] = S::f_fma(both, S::f_splat(info.scale), sum[t]);
                    if F::HAS_MIN {
                        min_sum[t] = S::f_fma(min0, S::f_splat(info.scaled_half_sums[0]), min_sum[t]);
                        min_sum[t] = S::f_fma(min1, S::f_splat(info.scaled_half_sums[1]), min_sum[t]);
                    }
                }
            }
        }
        for t in 0..T {
            y[t] = S::f_fma(sum[t], block_scale, y[t]);
            if F::HAS_MIN {
                y[t] = S::f_fma(min_sum[t], block_min, y[t]);
            }
        }
    }
}

/// Prefetches the bytes `ahead` of columns `32 i..32 i + 32` of a block; nothing where `ahead` is `None`. It is called for each
/// 32 columns and not once per block: a core that has as many cache lines in flight as it can track stalls.
#[inline(always)]
fn fetch<F: PackedFormat>(block: *const u8, i: usize, ahead: Option<usize>) {
    let n = F::BLOCK / 32;
    if let Some(ahead) = ahead {
        for at in (F::BYTES * i / n..F::BYTES * (i + 1) / n).step_by(64) {
            prefetch(block.wrapping_add(ahead + at));
        }
    }
}

/// The integer sums of `(code - OFFSET) * a` over steps `FROM..TO` (4 columns each), per row of the panel and token, with block
/// `at` of the activations.
#[inline(always)]
unsafe fn dots<S: Simd, F: PackedFormat, const T: usize, const FROM: usize, const TO: usize>(
    codes: &[S::B; 8],
    rows: &[Q8Row; T],
    at: usize,
) -> [S::I; T] {
    const {
        assert!(
            matches!(F::OFFSET_LOG2, None | Some(0..=7)) && matches!(F::BITS, 1..=8),
            "offset and bits of the format"
        );
    }
    // SAFETY: block `at` lies inside the rows; 32 activations belong to it.
    unsafe {
        let mut acc = [S::i_splat(0); T];
        let mut a = [std::ptr::null(); T];
        for t in 0..T {
            a[t] = rows[t].codes.add(32 * at);
            let info = &*rows[t].blocks.add(at);
            // The accumulator begins with minus the offset times the sum of the activations.
            let sums = S::i_splat(if TO - FROM == 8 { info.neg_sum } else { info.neg_half_sums[FROM / 4] });
            acc[t] = match F::OFFSET_LOG2 {
                // Without unsigned dot products the 128 is already subtracted from the codes.
                Some(_) if F::BITS == 8 && !S::DOT8_UNSIGNED => acc[t],
                Some(0) => sums,
                Some(1) => S::i_shl::<1>(sums),
                Some(2) => S::i_shl::<2>(sums),
                Some(3) => S::i_shl::<3>(sums),
                Some(4) => S::i_shl::<4>(sums),
                Some(5) => S::i_shl::<5>(sums),
                Some(6) => S::i_shl::<6>(sums),
                Some(7) => S::i_shl::<7>(sums),
                Some(8..) => unreachable!("refused at compile time"),
                None => acc[t],
            };
        }
        match F::BITS {
            8 => S::dots8::<T, FROM, TO>(acc, codes, &a),
            7 => S::dots7::<T, FROM, TO, 1>(acc, codes, &a),
            6 => S::dots7::<T, FROM, TO, 2>(acc, codes, &a),
            5 => S::dots7::<T, FROM, TO, 4>(acc, codes, &a),
            1..=4 => S::dots7::<T, FROM, TO, 8>(acc, codes, &a),
            0 | 9.. => unreachable!("refused at compile time"),
        }
    }
}
