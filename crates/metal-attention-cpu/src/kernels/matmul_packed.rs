//! Products of a repacked quantised matrix and 8-bit activations.

use std::marker::PhantomData;
use std::ops::Range;

use metal_attention_gguf::TensorType;

use crate::activations::{Q8Activations, Q8Row};
use crate::packed::{self, Format, PANEL, PackedMatrix};
use crate::shared::SharedMut;
use crate::simd::{Isa, Kernel, LANES, Simd, prefetch};

/// Bytes of activations, some two a column, that a core's L2 cache holds beside a panel.
const ACTIVATIONS: usize = 256 << 10;
/// Bytes from the weights being read to those being fetched.
const PREFETCH: usize = 4096;

/// Some panels of a product.
pub(crate) struct PackedProduct<'a> {
    pub(crate) matrix: &'a PackedMatrix,
    pub(crate) panels: Range<usize>,
    pub(crate) x: &'a Q8Activations,
    pub(crate) n_tokens: usize,
    /// `[n_tokens, n_out]`
    pub(crate) y: &'a SharedMut<'a, f32>,
    pub(crate) accumulate: bool,
}

/// Computes the panels' rows of `y` for all tokens. No other thread may work on
/// the same panels of the same `y`.
pub(crate) fn run_packed(isa: Isa, p: PackedProduct<'_>) {
    fn with<F: Format>(isa: Isa, product: PackedProduct<'_>) {
        // SAFETY: the CPU has `isa`, as everywhere in this crate; the matrix is in format `F`.
        unsafe { isa.run(Packed { product, format: PhantomData::<F> }) }
    }
    match p.matrix.ty {
        TensorType::Q4_0 => with::<packed::Q4_0>(isa, p),
        TensorType::Q4_1 => with::<packed::Q4_1>(isa, p),
        TensorType::Q5_0 => with::<packed::Q5_0>(isa, p),
        TensorType::Q5_1 => with::<packed::Q5_1>(isa, p),
        TensorType::Q8_0 => with::<packed::Q8_0>(isa, p),
        TensorType::Q2_K => with::<packed::Q2K>(isa, p),
        TensorType::Q3_K => with::<packed::Q3K>(isa, p),
        TensorType::Q4_K => with::<packed::Q4K>(isa, p),
        TensorType::Q5_K => with::<packed::Q5K>(isa, p),
        TensorType::Q6_K => with::<packed::Q6K>(isa, p),
        TensorType::IQ4_NL => with::<packed::Iq4Nl>(isa, p),
        TensorType::IQ4_XS => with::<packed::Iq4Xs>(isa, p),
        TensorType::F32 | TensorType::F16 | TensorType::BF16 => unreachable!("floats are not packed"),
    }
}

struct Packed<'a, F> {
    product: PackedProduct<'a>,
    format: PhantomData<F>,
}

impl<F: Format> Kernel for Packed<'_, F> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let p = self.product;
        // So many tokens at once that their activations stay in the L2 cache for all panels.
        let n_tokens = (ACTIVATIONS / (2 * p.matrix.n_in)).max(8) / 8 * 8;
        for first in (0..p.n_tokens).step_by(n_tokens) {
            let end = p.n_tokens.min(first + n_tokens);
            for panel in p.panels.clone() {
                let mut token = first;
                // SAFETY: panels and tokens are in range; the format is the matrix's.
                unsafe {
                    if S::TILE >= 8 {
                        while end - token >= 8 {
                            tile::<S, F, 8>(&p, panel, token, token == first);
                            token += 8;
                        }
                    }
                    if S::TILE >= 4 {
                        while end - token >= 4 {
                            tile::<S, F, 4>(&p, panel, token, token == first);
                            token += 4;
                        }
                    }
                    while end - token >= 2 {
                        tile::<S, F, 2>(&p, panel, token, token == first);
                        token += 2;
                    }
                    if token < end {
                        tile::<S, F, 1>(&p, panel, token, token == first);
                    }
                }
            }
        }
    }
}

/// One panel times `T` tokens: the `first` of those that it is multiplied with, or later ones.
#[inline(always)]
unsafe fn tile<S: Simd, F: Format, const T: usize>(p: &PackedProduct<'_>, panel: usize, token: usize, first: bool) {
    let bytes = p.matrix.panel(panel);
    // Few tokens wait for memory, and the hardware's prefetching ends with each page. One token is done with a panel as
    // soon as that is read; several come back to it, so there is time to fetch the next one.
    let ahead = first.then_some(if T == 1 { PREFETCH } else { bytes.len() });
    let n_blocks = p.matrix.n_in / F::BLOCK;
    debug_assert_eq!(bytes.len(), n_blocks * F::BYTES);
    let rows: [Q8Row; T] = std::array::from_fn(|t| p.x.row(token + t));
    // SAFETY: blocks lie inside the panel, activation blocks inside their rows of n_in elements.
    unsafe {
        let mut y = [S::f_splat(0.0); T];
        for b in 0..n_blocks {
            let block = bytes.as_ptr().add(b * F::BYTES);
            if let Some(ahead) = ahead {
                for at in (0..F::BYTES).step_by(64) {
                    prefetch(block.wrapping_add(ahead + at));
                }
            }
            let (block_scale, block_min) = F::block_scale_and_min::<S>(block);
            if F::BLOCK == 32 {
                let codes = F::codes::<S>(block, 0);
                let sums = dots::<S, F, T, 0, 8>(&codes, &rows, b);
                for t in 0..T {
                    let info = &*rows[t].blocks.add(b);
                    y[t] = S::f_fma(S::i_to_f(sums[t]), S::f_mul(block_scale, S::f_splat(info.scale)), y[t]);
                    if F::HAS_MIN {
                        y[t] = S::f_fma(block_min, S::f_splat(info.scaled_sum), y[t]);
                    }
                }
                continue;
            }
            // Of the sub-blocks, in units of the block's scale and min.
            let (mut sum, mut min_sum) = ([S::f_splat(0.0); T], [S::f_splat(0.0); T]);
            let unpacked = F::unpack::<S>(block);
            for i in 0..F::BLOCK / 32 {
                let codes = F::codes::<S>(block, i);
                let at = b * (F::BLOCK / 32) + i;
                if F::SUB == 32 {
                    let (scale, min) = F::scale_and_min::<S>(block, &unpacked, i);
                    let sums = dots::<S, F, T, 0, 8>(&codes, &rows, at);
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
                    let lo = dots::<S, F, T, 0, 4>(&codes, &rows, at);
                    let hi = dots::<S, F, T, 4, 8>(&codes, &rows, at);
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
        for (t, y) in y.into_iter().enumerate() {
            store::<S>(p, panel, token + t, y);
        }
    }
}

/// Sum over steps `FROM..TO` of `(code - OFFSET) * a`, per row, with block `at`
/// of each token's activations.
#[inline(always)]
unsafe fn dots<S: Simd, F: Format, const T: usize, const FROM: usize, const TO: usize>(
    codes: &[S::B; 8],
    rows: &[Q8Row; T],
    at: usize,
) -> [S::I; T] {
    // SAFETY: block `at` lies inside the rows; 32 activations belong to it.
    unsafe {
        let mut acc = [S::i_splat(0); T];
        let mut a = [std::ptr::null(); T];
        for t in 0..T {
            a[t] = rows[t].codes.add(32 * at);
            let info = &*rows[t].blocks.add(at);
            // Minus the sum of the activations, times the offset.
            let sums = S::i_splat(if TO - FROM == 8 { info.neg_sum } else { info.neg_half_sums[FROM / 4] });
            acc[t] = match F::OFFSET_LOG2 {
                // `dot8` takes off the 128 itself.
                Some(_) if F::BITS == 8 && !S::DOT8_UNSIGNED => acc[t],
                Some(2) => S::i_shl::<2>(sums),
                Some(3) => S::i_shl::<3>(sums),
                Some(4) => S::i_shl::<4>(sums),
                Some(5) => S::i_shl::<5>(sums),
                Some(7) => S::i_shl::<7>(sums),
                Some(_) => unreachable!("no format has another offset"),
                None => acc[t],
            };
        }
        match F::BITS {
            8 => S::dots8::<T, FROM, TO>(acc, codes, &a),
            6 => S::dots7::<T, FROM, TO, 2>(acc, codes, &a),
            5 => S::dots7::<T, FROM, TO, 4>(acc, codes, &a),
            _ => S::dots7::<T, FROM, TO, 8>(acc, codes, &a),
        }
    }
}

/// Writes a panel's 16 results for one token.
#[inline(always)]
unsafe fn store<S: Simd>(p: &PackedProduct<'_>, panel: usize, token: usize, y: S::F) {
    let n_out = p.matrix.n_out;
    let row = panel * PANEL;
    let out = p.y.at(token * n_out + row);
    // SAFETY: the panel's rows of this token, which no other thread touches.
    unsafe {
        if n_out - row >= PANEL {
            S::f_store(out, if p.accumulate { S::f_add(S::f_load(out), y) } else { y });
        } else {
            let mut lanes = [0f32; LANES];
            S::f_store(lanes.as_mut_ptr(), y);
            for (lane, y) in lanes[..n_out - row].iter().enumerate() {
                let out = out.add(lane);
                *out = if p.accumulate { *out + y } else { *y };
            }
        }
    }
}
