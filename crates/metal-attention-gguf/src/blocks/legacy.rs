//! The legacy types of ggml, `Q4_0`, `Q4_1`, `Q5_0`, `Q5_1` and `Q8_0`: 32 elements with one scale and, in `_1`, a minimum.

use bytemuck::{Pod, Zeroable};

use super::{BlockFormat, UnalignedF16, block};
use crate::TensorType;

/// 4 bits, symmetric: `x = (q - 8) * d`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ4_0 {
    /// Scale.
    pub d: UnalignedF16,
    /// Nibble plane of `q`: byte `j` holds element `j` (low) and `j + 16` (high).
    pub qs: [u8; 16],
}
block!(BlockQ4_0, Q4_0, 32 values in 18 bytes);

impl BlockQ4_0 {
    /// `x = (q - 8) * d`.
    pub fn dequantize(&self, dst: &mut [f32; 32]) {
        let d = self.d.to_f32();
        let (low, high) = dst.split_at_mut(16);
        for ((&q, low), high) in self.qs.iter().zip(low).zip(high) {
            *low = (i32::from(q & 15) - 8) as f32 * d;
            *high = (i32::from(q >> 4) - 8) as f32 * d;
        }
    }
}

/// 4 bits with a minimum: `x = q * d + m`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ4_1 {
    /// Scale.
    pub d: UnalignedF16,
    /// The smallest value.
    pub m: UnalignedF16,
    /// Nibble plane of `q`: byte `j` holds element `j` (low) and `j + 16` (high).
    pub qs: [u8; 16],
}
block!(BlockQ4_1, Q4_1, 32 values in 20 bytes);

impl BlockQ4_1 {
    /// `x = q * d + m`.
    pub fn dequantize(&self, dst: &mut [f32; 32]) {
        let (d, m) = (self.d.to_f32(), self.m.to_f32());
        let (low, high) = dst.split_at_mut(16);
        for ((&q, low), high) in self.qs.iter().zip(low).zip(high) {
            *low = f32::from(q & 15) * d + m;
            *high = f32::from(q >> 4) * d + m;
        }
    }
}

/// 5 bits, symmetric: `x = (q - 16) * d`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ5_0 {
    /// Scale.
    pub d: UnalignedF16,
    /// The fifth bits: bit `i` of the little-endian 32-bit number belongs to element `i`.
    pub qh: [u8; 4],
    /// Nibble plane of the lower four bits: byte `j` holds element `j` (low) and `j + 16` (high).
    pub qs: [u8; 16],
}
block!(BlockQ5_0, Q5_0, 32 values in 22 bytes);

impl BlockQ5_0 {
    /// `x = (q - 16) * d`.
    pub fn dequantize(&self, dst: &mut [f32; 32]) {
        let d = self.d.to_f32();
        let qh = u32::from_le_bytes(self.qh);
        let (low, high) = dst.split_at_mut(16);
        for (j, ((&q, low), high)) in self.qs.iter().zip(low).zip(high).enumerate() {
            *low = (five_bits(q & 15, qh >> j) - 16) as f32 * d;
            *high = (five_bits(q >> 4, qh >> (j + 16)) - 16) as f32 * d;
        }
    }
}

/// 5 bits with a minimum: `x = q * d + m`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ5_1 {
    /// Scale.
    pub d: UnalignedF16,
    /// The smallest value.
    pub m: UnalignedF16,
    /// The fifth bits: bit `i` of the little-endian 32-bit number belongs to element `i`.
    pub qh: [u8; 4],
    /// Nibble plane of the lower four bits: byte `j` holds element `j` (low) and `j + 16` (high).
    pub qs: [u8; 16],
}
block!(BlockQ5_1, Q5_1, 32 values in 24 bytes);

impl BlockQ5_1 {
    /// `x = q * d + m`.
    pub fn dequantize(&self, dst: &mut [f32; 32]) {
        let (d, m) = (self.d.to_f32(), self.m.to_f32());
        let qh = u32::from_le_bytes(self.qh);
        let (low, high) = dst.split_at_mut(16);
        for (j, ((&q, low), high)) in self.qs.iter().zip(low).zip(high).enumerate() {
            *low = five_bits(q & 15, qh >> j) as f32 * d + m;
            *high = five_bits(q >> 4, qh >> (j + 16)) as f32 * d + m;
        }
    }
}

/// A code of 5 bits: the four bits of `low`, and the lowest bit of `high` as the fifth.
fn five_bits(low: u8, high: u32) -> i32 {
    (u32::from(low) | (high & 1) << 4) as i32
}

/// 8 bits, symmetric: `x = q * d`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ8_0 {
    /// Scale.
    pub d: UnalignedF16,
    /// `q` of each element.
    pub qs: [i8; 32],
}
block!(BlockQ8_0, Q8_0, 32 values in 34 bytes);

impl BlockQ8_0 {
    /// `x = q * d`.
    pub fn dequantize(&self, dst: &mut [f32; 32]) {
        let d = self.d.to_f32();
        for (x, &q) in dst.iter_mut().zip(&self.qs) {
            *x = f32::from(q) * d;
        }
    }
}
