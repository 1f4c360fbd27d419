//! Quantisers of the 4-bit floats: of a few scales around that of the extreme element, the one with the smallest error is
//! chosen.

use std::array::from_fn;

use super::fit::{extreme, inverse, weights};
use super::legacy::nibbles;
use crate::blocks::{BlockMxfp4, BlockNvfp4, FP4_VALUES, e8m0_half, ue4m3_half};

/// The code of the value in [`FP4_VALUES`] nearest to `x`.
fn code(x: f32) -> u8 {
    // The midpoints between neighbouring magnitudes. The code of -0 is never used.
    let above = [0.5, 1.5, 2.5, 3.5, 5.0, 7.0, 10.0].iter().filter(|&&border| x.abs() > border).count() as u8;
    if x < 0.0 && above > 0 { above | 8 } else { above }
}

/// The scale with the smallest error, by its code; the first one of several. `scales` are codes and values.
fn best_scale(x: &[f32], w: &[f32], scales: impl Iterator<Item = (u8, f32)>) -> u8 {
    let mut best = (f32::INFINITY, 0);
    for (scale, d) in scales {
        let inverse = inverse(d);
        let value = |x: f32| d * f32::from(FP4_VALUES[usize::from(code(x * inverse))]);
        let error = x.iter().zip(w).map(|(&x, w)| w * (x - value(x)).powi(2)).sum();
        if error < best.0 {
            best = (error, scale);
        }
    }
    best.1
}

/// The block of `MXFP4`.
pub(super) fn mxfp4(x: &[f32; 32], columns: Option<&[f32; 32]>) -> BlockMxfp4 {
    let largest = extreme(x).abs();
    if largest == 0.0 {
        return BlockMxfp4 { e: 0, qs: [0; 16] };
    }
    // The power of two that scales the extreme to between 4 and 8 (the largest value is 6), and both neighbours.
    let middle = largest.log2().floor() as i32 - 2 + 127;
    let w = weights(x, columns, |_, _| 1.0);
    let scales = (middle - 1..=middle + 1).map(|e| e.clamp(0, 254) as u8);
    let e = best_scale(x, &w, scales.map(|e| (e, e8m0_half(e))));
    let inverse = inverse(e8m0_half(e));
    BlockMxfp4 { e, qs: nibbles(&x.map(|x| code(x * inverse))) }
}

/// The block of `NVFP4`.
pub(super) fn nvfp4(x: &[f32; 64], columns: Option<&[f32; 64]>) -> BlockNvfp4 {
    let w = weights(x, columns, |_, _| 1.0);
    let groups = x.as_chunks::<16>().0;
    let d: [u8; 4] = from_fn(|g| {
        let exact = extreme(&groups[g]).abs() / 12.0;
        // Codes are in the order of their values; 126 is the largest.
        let middle = (0..126).take_while(|&code| ue4m3_half(code) < exact).count() as u8;
        let scales = middle.saturating_sub(4)..=(middle + 8).min(126);
        best_scale(&groups[g], &w[16 * g..], scales.map(|code| (code, ue4m3_half(code))))
    });
    let q = |g: usize, i: usize| code(groups[g][i] * inverse(ue4m3_half(d[g])));
    BlockNvfp4 { d, qs: from_fn(|i| q(i / 8, i % 8) | q(i / 8, i % 8 + 8) << 4) }
}
