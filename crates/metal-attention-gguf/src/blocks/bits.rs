//! The types of one and two bits, `Q1_0`, `Q2_0`, `TQ1_0` and `TQ2_0`: one scale per block, and values -1, 0, 1 (and 2) times
//! it.

use bytemuck::{Pod, Zeroable};

use super::{BlockFormat, UnalignedF16, block};
use crate::TensorType;

/// 1 bit: `x = d` or `x = -d`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ1_0 {
    /// Scale.
    pub d: UnalignedF16,
    /// Bit `i % 8` of byte `i / 8` is set where element `i` is `d`.
    pub qs: [u8; 16],
}
block!(BlockQ1_0, Q1_0, 128 values in 18 bytes);

impl BlockQ1_0 {
    /// `x = (2 q - 1) * d`.
    pub fn dequantize(&self, dst: &mut [f32; 128]) {
        let d = self.d.to_f32();
        for (i, x) in dst.iter_mut().enumerate() {
            *x = if self.qs[i / 8] >> (i % 8) & 1 == 1 { d } else { -d };
        }
    }
}

/// 2 bits: `x = (q - 1) * d`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ2_0 {
    /// Scale.
    pub d: UnalignedF16,
    /// Bits `2 (i % 4)` and up of byte `i / 4` are `q` of element `i`.
    pub qs: [u8; 16],
}
block!(BlockQ2_0, Q2_0, 64 values in 18 bytes);

impl BlockQ2_0 {
    /// `x = (q - 1) * d`.
    pub fn dequantize(&self, dst: &mut [f32; 64]) {
        let d = self.d.to_f32();
        for (i, x) in dst.iter_mut().enumerate() {
            *x = (i32::from(self.qs[i / 4] >> (2 * (i % 4)) & 3) - 1) as f32 * d;
        }
    }
}

/// 2 bits: `x = (q - 1) * d`, for models whose weights are -1, 0 and 1.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct BlockTq2_0 {
    /// Two halves of 128 elements, 32 bytes each, laid out as in [`BlockQ2K::qs`](super::BlockQ2K::qs).
    pub qs: [u8; 64],
    /// Scale.
    pub d: UnalignedF16,
}
block!(BlockTq2_0, TQ2_0, 256 values in 66 bytes);

impl BlockTq2_0 {
    /// `x = (q - 1) * d`.
    pub fn dequantize(&self, dst: &mut [f32; 256]) {
        let d = self.d.to_f32();
        for (i, x) in dst.iter_mut().enumerate() {
            let q = self.qs[i / 128 * 32 + i % 32] >> (2 * (i / 32 % 4)) & 3;
            *x = (i32::from(q) - 1) as f32 * d;
        }
    }
}

/// Ternary digits, five or four per byte: `x = (q - 1) * d`.
///
/// The byte divided by 256 is a fraction whose first five digits in base 3 are the codes, rounded up. Multiplied by `3^n`
/// modulo 256 the fraction begins with digit `n`, which is the integer part of that times 3 / 256.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct BlockTq1_0 {
    /// Five digits each: digit `n` of byte `j` belongs to element `32 n + j` for `j` below 32, and to element
    /// `160 + 16 n + j - 32` for the others.
    pub qs: [u8; 48],
    /// Four digits each: digit `n` of byte `j` belongs to element `240 + 4 n + j`.
    pub qh: [u8; 4],
    /// Scale.
    pub d: UnalignedF16,
}
block!(BlockTq1_0, TQ1_0, 256 values in 54 bytes);

impl BlockTq1_0 {
    /// The code, 0 to 2, of element `i` (below 256).
    pub fn code(&self, i: usize) -> u8 {
        let (byte, n) = match i {
            0..160 => (self.qs[i % 32], i / 32),
            160..240 => (self.qs[32 + i % 16], (i - 160) / 16),
            240.. => (self.qh[i % 4], (i - 240) / 4),
        };
        let rest = byte.wrapping_mul([1, 3, 9, 27, 81][n]);
        ((u16::from(rest) * 3) >> 8) as u8
    }

    /// `x = (q - 1) * d`.
    pub fn dequantize(&self, dst: &mut [f32; 256]) {
        let d = self.d.to_f32();
        for (i, x) in dst.iter_mut().enumerate() {
            *x = (i32::from(self.code(i)) - 1) as f32 * d;
        }
    }
}
