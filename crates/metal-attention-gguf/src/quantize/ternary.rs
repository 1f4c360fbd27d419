//! One and two bits with one scale a block, as ggml's reference quantisers have them: for weights that are -1, 0 and 1
//! (or -1 and 1) times a scale already.

use std::array::from_fn;

use super::fit::{extreme, inverse};
use super::k::two_bit_planes;
use crate::blocks::{BlockQ1_0, BlockQ2_0, BlockTq1_0, BlockTq2_0, UnalignedF16};

/// The largest magnitude, and codes 0 to 2 of -1, 0 and 1 times it.
fn ternary<const N: usize>(x: &[f32; N]) -> (UnalignedF16, [u8; N]) {
    let d = extreme(x).abs();
    let inverse = inverse(d);
    (UnalignedF16::from_f32(d), x.map(|x| ((x * inverse).round() as i32 + 1).clamp(0, 2) as u8))
}

pub(super) fn tq2_0(x: &[f32; 256]) -> BlockTq2_0 {
    let (d, q) = ternary(x);
    BlockTq2_0 { qs: two_bit_planes(&q, 0), d }
}

pub(super) fn tq1_0(x: &[f32; 256]) -> BlockTq1_0 {
    let (d, q) = ternary(x);
    // A fraction of 256, rounded up, whose first digits in base 3 are those of the elements, the first one first.
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

pub(super) fn q2_0(x: &[f32; 64]) -> BlockQ2_0 {
    let (d, q) = ternary(x);
    BlockQ2_0 { d, qs: from_fn(|i| (0..4).fold(0, |byte, k| byte | q[4 * i + k] << (2 * k))) }
}

/// The mean magnitude, and signs.
pub(super) fn q1_0(x: &[f32; 128]) -> BlockQ1_0 {
    let d = UnalignedF16::from_f32(x.iter().map(|x| x.abs()).sum::<f32>() / 128.0);
    BlockQ1_0 { d, qs: from_fn(|i| (0..8).fold(0, |byte, k| byte | u8::from(x[8 * i + k] >= 0.0) << k)) }
}
