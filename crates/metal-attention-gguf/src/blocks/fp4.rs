//! 4-bit floats (E2M1: a sign, two bits of exponent, one bit of mantissa) with 8-bit scales: the formats MXFP4 of the Open
//! Compute Project and NVFP4 of NVIDIA.

use bytemuck::{Pod, Zeroable};

use super::{BlockFormat, block};
use crate::TensorType;

/// Twice the values of the 16 codes of E2M1, which are then integers.
pub const FP4_VALUES: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Half the value of an E8M0 scale, `2^(e - 128)`: with [`FP4_VALUES`] the factor 2 cancels. The code 255, NaN in the standard,
/// is a number like the others, as in ggml.
pub fn e8m0_half(e: u8) -> f32 {
    // Numbers below 2^-126 are subnormal.
    f32::from_bits(if e < 2 { 0x0020_0000 << e } else { u32::from(e - 1) << 23 })
}

/// Half the value of an unsigned E4M3 scale: 4 bits of exponent, 3 bits of mantissa; the top bit is ignored. The code 127,
/// NaN in the standard, is 0, as in ggml.
pub fn ue4m3_half(code: u8) -> f32 {
    let (exponent, mantissa) = (code >> 3 & 15, f32::from(code & 7));
    match (code, exponent) {
        (0x7f, _) => 0.0,
        // Subnormal: 2^-6 * mantissa / 8.
        (_, 0) => mantissa / 1024.0,
        _ => (1.0 + mantissa / 8.0) * f32::from_bits((u32::from(exponent) + 127 - 8) << 23),
    }
}

/// MXFP4: 32 4-bit floats and a power of two, `x = FP4_VALUES[q] * e8m0_half(e)`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct BlockMxfp4 {
    /// Scale; see [`e8m0_half`].
    pub e: u8,
    /// Nibble plane of `q`: byte `j` holds element `j` (low) and `j + 16` (high).
    pub qs: [u8; 16],
}
block!(BlockMxfp4, MXFP4, 32 values in 17 bytes);

impl BlockMxfp4 {
    /// `x = FP4_VALUES[q] * e8m0_half(e)`.
    pub fn dequantize(&self, dst: &mut [f32; 32]) {
        fp4(&self.qs, e8m0_half(self.e), dst);
    }
}

/// NVFP4: 4 groups of 16 4-bit floats, each with a scale, `x = FP4_VALUES[q] * ue4m3_half(d)`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct BlockNvfp4 {
    /// The groups' scales; see [`ue4m3_half`].
    pub d: [u8; 4],
    /// Per group a nibble plane of 8 bytes: byte `j` holds its elements `j` (low) and `j + 8` (high).
    pub qs: [u8; 32],
}
block!(BlockNvfp4, NVFP4, 64 values in 36 bytes);

impl BlockNvfp4 {
    /// `x = FP4_VALUES[q] * ue4m3_half(d)`.
    pub fn dequantize(&self, dst: &mut [f32; 64]) {
        for ((group, qs), &d) in dst.as_chunks_mut::<16>().0.iter_mut().zip(self.qs.as_chunks::<8>().0).zip(&self.d) {
            fp4(qs, ue4m3_half(d), group);
        }
    }
}

/// Dequantises a nibble plane of 4-bit floats with the scale `d`; `dst` is twice as long as `qs`.
fn fp4(qs: &[u8], d: f32, dst: &mut [f32]) {
    let (low, high) = dst.split_at_mut(qs.len());
    for ((&q, low), high) in qs.iter().zip(low).zip(high) {
        *low = f32::from(FP4_VALUES[usize::from(q & 15)]) * d;
        *high = f32::from(FP4_VALUES[usize::from(q >> 4)]) * d;
    }
}
