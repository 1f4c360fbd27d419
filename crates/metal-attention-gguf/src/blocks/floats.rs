//! The float types F32, F16 and BF16: a block is one number.

use bytemuck::{Pod, Zeroable};

use super::{BlockFormat, UnalignedF16, block};
use crate::TensorType;

/// One little-endian `f32`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct BlockF32 {
    /// The number's bytes.
    pub x: [u8; 4],
}
block!(BlockF32, F32, 1 values in 4 bytes);

impl BlockF32 {
    /// Copies the number.
    pub fn dequantize(&self, dst: &mut [f32; 1]) {
        dst[0] = f32::from_le_bytes(self.x);
    }
}

/// One IEEE half-precision number.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct BlockF16 {
    /// The number.
    pub x: UnalignedF16,
}
block!(BlockF16, F16, 1 values in 2 bytes);

impl BlockF16 {
    /// Widens the number.
    pub fn dequantize(&self, dst: &mut [f32; 1]) {
        dst[0] = self.x.to_f32();
    }
}

/// One bfloat16: the upper half of an `f32`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct BlockBf16 {
    /// The number's bytes.
    pub x: [u8; 2],
}
block!(BlockBf16, BF16, 1 values in 2 bytes);

impl BlockBf16 {
    /// Widens the number.
    pub fn dequantize(&self, dst: &mut [f32; 1]) {
        dst[0] = f32::from_bits(u32::from(u16::from_le_bytes(self.x)) << 16);
    }
}

/// One integer of 64 bits.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct BlockI64 {
    /// The integer's bytes.
    pub x: [u8; 8],
}
block!(BlockI64, I64, 1 values in 8 bytes);

impl BlockI64 {
    /// Rounds the integer to a float.
    pub fn dequantize(&self, dst: &mut [f32; 1]) {
        dst[0] = i64::from_le_bytes(self.x) as f32;
    }
}
