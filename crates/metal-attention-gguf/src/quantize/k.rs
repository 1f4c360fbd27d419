//! Quantisers of the K-quants and the IQ4 types, whose groups have integer scales.
//!
//! For each group of 16 or 32 elements a few scales around that of the extreme element are tried, and the best one is
//! refitted to the codes by weighted least squares. Then the scales are quantised; alternately each group's integer scale is
//! replaced by a better neighbour, and the common factor is refitted. Unlike the quantisers of the legacy types this is not
//! ggml's search, so files differ from ggml's in bits.

use std::array::from_fn;

use super::fit::{Affine, Symmetric, best_scale, inverse, round, weights, whole_scales};
use super::legacy::nibbles;
use crate::blocks::{
    BlockIq4Nl, BlockIq4Xs, BlockQ2K, BlockQ3K, BlockQ4K, BlockQ5K, BlockQ6K, IQ4_VALUES, UnalignedF16,
};

/// The importance of a block's columns.
type Columns<'a, const N: usize> = Option<&'a [f32; N]>;

// ---- symmetric groups: x = scale * code -----------------------------------------------------

/// A function that rounds to an integer from `-largest` to `largest - 1`.
fn linear(largest: f32) -> impl Fn(f32) -> f32 + Copy {
    move |x| round(x.clamp(-largest, largest - 1.0))
}

/// Quantises 256 elements in groups of 16 to codes from 0 to `2 largest - 1`, with an offset of `largest`; returns the codes
/// and the scales.
fn symmetric(x: &[f32; 256], columns: Columns<256>, largest: f32, largest_scale: f32) -> ([u8; 256], Symmetric<16>) {
    let w = weights(x, columns, |x, _| x * x);
    let (groups, group_weights) = (x.as_chunks::<16>().0, w.as_chunks::<16>().0);
    let scales = from_fn(|g| best_scale(&groups[g], &group_weights[g], -largest, linear(largest)));
    let fit = whole_scales(x, &w, scales, largest_scale, linear(largest));
    let inverses = fit.scales.map(|scale| inverse(fit.d.to_f32() * scale as f32));
    let q = from_fn(|i| (linear(largest)(x[i] * inverses[i / 16]) + largest) as u8);
    (q, fit)
}

/// The block of `Q3_K`.
pub(super) fn q3_k(x: &[f32; 256], columns: Columns<256>) -> BlockQ3K {
    let (q, fit) = symmetric(x, columns, 4.0, 32.0);
    let scales = fit.scales.map(|scale| (scale + 32) as u8);
    BlockQ3K {
        hmask: bit_plane(&q, 2),
        qs: two_bit_planes(&q, 0),
        scales: from_fn(|i| match i {
            0..8 => scales[i] & 15 | scales[i + 8] << 4,
            _ => (0..4).fold(0, |byte, k| byte | scales[i - 8 + 4 * k] >> 4 << (2 * k)),
        }),
        d: fit.d,
    }
}

/// The block of `Q6_K`.
pub(super) fn q6_k(x: &[f32; 256], columns: Columns<256>) -> BlockQ6K {
    let (q, fit) = symmetric(x, columns, 32.0, 128.0);
    let scales = fit.scales.map(|scale| scale as i8);
    BlockQ6K { ql: nibble_planes(&q, 64), qh: two_bit_planes(&q, 4), scales, d: fit.d }
}

/// The nearest IQ4 code by steps of one half: entry `i` is for `x` from `(i - 256) / 2` to `(i - 255) / 2`. This is exact,
/// because the midpoint of two neighbouring [`IQ4_VALUES`] is a multiple of one half.
const IQ4_CODES: [u8; 512] = {
    let mut codes = [0; 512];
    let mut i = 0;
    while i < 512 {
        let mut code = 0;
        while code < 15 && IQ4_VALUES[code] as i32 + IQ4_VALUES[code + 1] as i32 <= i as i32 - 256 {
            code += 1;
        }
        codes[i] = code as u8;
        i += 1;
    }
    codes
};

/// The index in [`IQ4_VALUES`] of the value nearest to `x`.
fn iq4_code(x: f32) -> u8 {
    IQ4_CODES[(2.0 * x + 256.0).clamp(0.0, 511.0) as usize]
}

/// The value of [`IQ4_VALUES`] nearest to `x`.
fn iq4_value(x: f32) -> f32 {
    IQ4_VALUES[usize::from(iq4_code(x))].into()
}

/// The block of `IQ4_NL`.
pub(super) fn iq4_nl(x: &[f32; 32], columns: Columns<32>) -> BlockIq4Nl {
    let w = weights(x, columns, |x, _| x * x);
    let d = UnalignedF16::from_f32(best_scale(x, &w, IQ4_VALUES[0].into(), iq4_value));
    let inverse = inverse(d.to_f32());
    BlockIq4Nl { d, qs: nibbles(&x.map(|x| iq4_code(x * inverse))) }
}

/// The block of `IQ4_XS`.
pub(super) fn iq4_xs(x: &[f32; 256], columns: Columns<256>) -> BlockIq4Xs {
    let w = weights(x, columns, |x, _| x * x);
    let (groups, group_weights) = (x.as_chunks::<32>().0, w.as_chunks::<32>().0);
    let scales = from_fn(|g| best_scale(&groups[g], &group_weights[g], IQ4_VALUES[0].into(), iq4_value));
    let fit: Symmetric<8> = whole_scales(x, &w, scales, 32.0, iq4_value);
    let inverses = fit.scales.map(|scale| inverse(fit.d.to_f32() * scale as f32));
    let q = from_fn(|i| iq4_code(x[i] * inverses[i / 32]));
    let scales = fit.scales.map(|scale| (scale + 32) as u8);
    let high = (0..8).fold(0u16, |bits, g| bits | u16::from(scales[g] >> 4) << (2 * g));
    BlockIq4Xs {
        d: fit.d,
        scales_h: high.to_le_bytes(),
        scales_l: from_fn(|i| scales[2 * i] & 15 | scales[2 * i + 1] << 4),
        qs: nibble_planes(&q, 16),
    }
}

// ---- groups with a minimum: x = scale * code - min ------------------------------------------

/// Quantises 256 elements to codes from 0 to `largest`, with scales and minimums from 0 to `largest_scale`.
fn affine<const GROUPS: usize>(
    x: &[f32; 256],
    columns: Columns<256>,
    largest: f32,
    largest_scale: f32,
) -> ([u8; 256], Affine<GROUPS>) {
    let w = weights(x, columns, |x, rms| rms + x);
    let fit = Affine::new(x, &w, largest, largest_scale);
    let code = fit.codes(x, largest);
    (from_fn(|i| code(i) as u8), fit)
}

/// The inverse of [`scale_min_k4`](crate::blocks::scale_min_k4).
fn pack_scale_min_k4(scales: [f32; 8], mins: [f32; 8]) -> [u8; 12] {
    let (scales, mins) = (scales.map(|scale| scale as u8), mins.map(|min| min as u8));
    from_fn(|i| match i {
        0..4 => scales[i] | scales[i + 4] >> 4 << 6,
        4..8 => mins[i - 4] | mins[i] >> 4 << 6,
        _ => scales[i - 4] & 15 | mins[i - 4] << 4,
    })
}

/// The block of `Q2_K`.
pub(super) fn q2_k(x: &[f32; 256], columns: Columns<256>) -> BlockQ2K {
    let (q, Affine { d, dmin, scales, mins }) = affine::<16>(x, columns, 3.0, 15.0);
    BlockQ2K { scales: from_fn(|g| scales[g] as u8 | (mins[g] as u8) << 4), qs: two_bit_planes(&q, 0), d, dmin }
}

/// The block of `Q4_K`.
pub(super) fn q4_k(x: &[f32; 256], columns: Columns<256>) -> BlockQ4K {
    let (q, Affine { d, dmin, scales, mins }) = affine::<8>(x, columns, 15.0, 63.0);
    BlockQ4K { d, dmin, scales: pack_scale_min_k4(scales, mins), qs: nibble_planes(&q, 32) }
}

/// The block of `Q5_K`.
pub(super) fn q5_k(x: &[f32; 256], columns: Columns<256>) -> BlockQ5K {
    let (q, Affine { d, dmin, scales, mins }) = affine::<8>(x, columns, 31.0, 63.0);
    let scales = pack_scale_min_k4(scales, mins);
    BlockQ5K { d, dmin, scales, qh: bit_plane(&q, 4), qs: nibble_planes(&q, 32) }
}

// ---- packing --------------------------------------------------------------------------------

/// Packs the low four bits of 256 codes to nibble planes of `plane` bytes: byte `j` of plane `p` contains elements
/// `2 plane p + j` and `2 plane p + plane + j`.
fn nibble_planes(q: &[u8; 256], plane: usize) -> [u8; 128] {
    from_fn(|i| {
        let low = i / plane * 2 * plane + i % plane;
        q[low] & 15 | q[low + plane] << 4
    })
}

/// Packs bits `shift` and `shift + 1` of 256 codes as in [`BlockQ2K::qs`].
pub(super) fn two_bit_planes(q: &[u8; 256], shift: u32) -> [u8; 64] {
    from_fn(|i| {
        let first = i / 32 * 128 + i % 32;
        (0..4).fold(0, |byte, k| byte | (q[first + 32 * k] >> shift & 3) << (2 * k))
    })
}

/// Packs bit `shift` of 256 codes: bit `k` of byte `j` belongs to element `32 k + j`.
fn bit_plane(q: &[u8; 256], shift: u32) -> [u8; 32] {
    from_fn(|j| (0..8).fold(0, |byte, k| byte | (q[32 * k + j] >> shift & 1) << k))
}
