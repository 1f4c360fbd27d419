//! Quantisers of the float types and the legacy types of 32 elements with one scale.
//!
//! Without importance they round as ggml's reference quantisers do: the scale follows from the extreme element. With
//! importance, scales are searched.

use half::bf16;

use super::fit::{best_scale, best_scale_min, extreme, inverse, round, weights};
use crate::blocks::{
    BlockBf16, BlockF16, BlockF32, BlockQ4_0, BlockQ4_1, BlockQ5_0, BlockQ5_1, BlockQ8_0, UnalignedF16,
};

/// The importance of a block's columns.
type Columns<'a> = Option<&'a [f32; 32]>;

#[allow(clippy::trivially_copy_pass_by_ref)] // as blocks of more
pub(super) fn f32(&[x]: &[f32; 1]) -> BlockF32 {
    BlockF32 { x: x.to_le_bytes() }
}

#[allow(clippy::trivially_copy_pass_by_ref)] // as blocks of more
pub(super) fn f16(&[x]: &[f32; 1]) -> BlockF16 {
    BlockF16 { x: UnalignedF16::from_f32(x) }
}

#[allow(clippy::trivially_copy_pass_by_ref)] // as blocks of more
pub(super) fn bf16(&[x]: &[f32; 1]) -> BlockBf16 {
    BlockBf16 { x: bf16::from_f32(x).to_le_bytes() }
}

/// The smallest and the largest element.
fn min_max(x: &[f32]) -> (f32, f32) {
    x.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(min, max), &x| (min.min(x), max.max(x)))
}

/// Packs 32 codes of 4 bits to a nibble plane: byte `j` contains elements `j` and `j + 16`.
pub(super) fn nibbles(q: &[u8; 32]) -> [u8; 16] {
    std::array::from_fn(|j| q[j] & 15 | q[j + 16] << 4)
}

/// Packs the fifth bits of 32 codes.
fn fifth_bits(q: &[u8; 32]) -> [u8; 4] {
    let bits = q.iter().rev().fold(0u32, |bits, &q| bits << 1 | u32::from(q >> 4));
    bits.to_le_bytes()
}

/// Scale and codes from 0 to `2 middle - 1` for `x = d * (code - middle)`. Without importance the extreme element is mapped to
/// `-middle`, so that it is exact whatever its sign.
fn symmetric(x: &[f32; 32], columns: Columns, middle: f32) -> (UnalignedF16, [u8; 32]) {
    let largest = 2.0 * middle - 1.0;
    if columns.is_none() {
        let d = extreme(x) / -middle;
        let inverse = inverse(d);
        return (UnalignedF16::from_f32(d), x.map(|x| ((x * inverse + middle + 0.5) as u8).min(largest as u8)));
    }
    let w = weights(x, columns, |x, _| x * x);
    let nearest = |x: f32| round(x.clamp(-middle, middle - 1.0));
    let d = UnalignedF16::from_f32(best_scale(x, &w, -middle, nearest));
    let inverse = inverse(d.to_f32());
    (d, x.map(|x| (nearest(x * inverse) + middle) as u8))
}

/// Scale, minimum and codes from 0 to `largest` for `x = d * code + m`.
fn affine(x: &[f32; 32], columns: Columns, largest: f32) -> (UnalignedF16, UnalignedF16, [u8; 32]) {
    if columns.is_none() {
        let (min, max) = min_max(x);
        let d = (max - min) / largest;
        let inverse = inverse(d);
        let q = x.map(|x| (((x - min) * inverse + 0.5) as u8).min(largest as u8));
        return (UnalignedF16::from_f32(d), UnalignedF16::from_f32(min), q);
    }
    let w = weights(x, columns, |x, _| x * x);
    let (scale, min) = best_scale_min(x, &w, largest, false);
    let (d, m) = (UnalignedF16::from_f32(scale), UnalignedF16::from_f32(-min));
    let inverse = inverse(d.to_f32());
    (d, m, x.map(|x| round(((x - m.to_f32()) * inverse).clamp(0.0, largest)) as u8))
}

/// The block of `Q4_0`.
pub(super) fn q4_0(x: &[f32; 32], columns: Columns) -> BlockQ4_0 {
    let (d, q) = symmetric(x, columns, 8.0);
    BlockQ4_0 { d, qs: nibbles(&q) }
}

/// The block of `Q4_1`.
pub(super) fn q4_1(x: &[f32; 32], columns: Columns) -> BlockQ4_1 {
    let (d, m, q) = affine(x, columns, 15.0);
    BlockQ4_1 { d, m, qs: nibbles(&q) }
}

/// The block of `Q5_0`.
pub(super) fn q5_0(x: &[f32; 32], columns: Columns) -> BlockQ5_0 {
    let (d, q) = symmetric(x, columns, 16.0);
    BlockQ5_0 { d, qh: fifth_bits(&q), qs: nibbles(&q) }
}

/// The block of `Q5_1`.
pub(super) fn q5_1(x: &[f32; 32], columns: Columns) -> BlockQ5_1 {
    let (d, m, q) = affine(x, columns, 31.0);
    BlockQ5_1 { d, m, qh: fifth_bits(&q), qs: nibbles(&q) }
}

/// The block of `Q8_0`; codes are rounded half away from zero, as in ggml.
pub(super) fn q8_0(x: &[f32; 32]) -> BlockQ8_0 {
    let d = extreme(x).abs() / 127.0;
    let inverse = inverse(d);
    BlockQ8_0 { d: UnalignedF16::from_f32(d), qs: x.map(|x| (x * inverse).round() as i8) }
}
