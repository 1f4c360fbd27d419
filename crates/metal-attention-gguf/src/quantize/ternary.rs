//! Quantisers of the types of one and two bits, with one scale per block, as in ggml: for weights that are already -1, 0 and
//! 1 (or -1 and 1) times a scale.

use std::array::from_fn;

use super::fit::{extreme, inverse};
use super::k::two_bit_planes;
use crate::blocks::{BlockQ1_0, BlockQ2_0, BlockTq1_0, BlockTq2_0, UnalignedF16};

/// The scale, which is the largest magnitude, and the codes 0 to 2 for -1, 0 and 1 times it.
fn ternary<const N: usize>(x: &[f32; N]) -> (UnalignedF16, [u8; N]) {
    let d = extreme(x).abs();
    let inverse = inverse(d);
    (UnalignedF16::from_f32(d), x.map(|x| ((x * inverse).round() as i32 + 1).clamp(0, 2) as u8))
}

/// The block of `TQ2_0`.
pub(super) fn tq2_0(x: &[f32; 256]) -> BlockTq2_0 {
    let (d, q) = ternary(x);
    BlockTq2_0 { qs: two_bit_planes(&q, 0), d }
}

/// The block of `TQ1_0`.
pub(super) fn tq1_0(x: &[f32; 256]) -> BlockTq1_0 {
    let (d, q) = ternary(x);
    // A byte is 256 times the fraction whose digits in base 3 are the codes, rounded up.
    let digits = |first: usize, step: usize, n: usize| {
        let number = (0..5).fold(0u16, |number, k| 3 * number + if k < n { q[first + step * k].into() } else { 0 });
        (number * 256).div_ceil(243) as u8
    };
    BlockTq1_0 {
        qs: from_fn(|j| if j < 32 { digits(j, 32, 5) } else { digits(160 + j - 32, 16, 5) }),
        qh: from_fn(|j| digits(240 + j, 4, 4)),
        d,
    }
}

/// The block of `Q2_0`.
pub(super) fn q2_0(x: &[f32; 64]) -> BlockQ2_0 {
    let (d, q) = ternary(x);
    BlockQ2_0 { d, qs: from_fn(|i| (0..4).fold(0, |byte, k| byte | q[4 * i + k] << (2 * k))) }
}

/// The block of `Q1_0`: the scale is the mean magnitude, the codes are the signs.
pub(super) fn q1_0(x: &[f32; 128]) -> BlockQ1_0 {
    let d = UnalignedF16::from_f32(x.iter().map(|x| x.abs()).sum::<f32>() / 128.0);
    BlockQ1_0 { d, qs: from_fn(|i| (0..8).fold(0, |byte, k| byte | u8::from(x[8 * i + k] >= 0.0) << k)) }
}
