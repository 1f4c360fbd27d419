//! Block formats: the layout in memory and the exact dequantisation of each.
//!
//! All blocks have alignment 1 and no padding, so any whole number of blocks in a byte slice can
//! be viewed with [`cast`]. Multi-byte fields are little-endian.
//!
//! Notation: `x[i]` is element `i` of the block, `q` its stored integer, `d` and `m` ("minimum")
//! the scales. A "nibble plane" packs two elements per byte: the low nibbles first, then the high
//! nibbles, so byte `j` of a 16-byte plane holds elements `j` and `j + 16`.
//!
//! The formats are those of ggml (`ggml-common.h`); the order of the floating-point operations is
//! that of its reference code, so the results agree bit for bit.

use std::fmt;

use bytemuck::{Pod, Zeroable};

use crate::TensorType;

/// A block format: a plain struct over the bytes in the file.
pub trait Block: Pod {
    /// The type whose tensors consist of these blocks.
    const TYPE: TensorType;
}

/// Views bytes as blocks, without copying.
///
/// # Panics
/// When `bytes` is not a whole number of blocks.
///
/// ```
/// use metal_attention_gguf::blocks::{cast, BlockQ8_0};
/// let blocks: &[BlockQ8_0] = cast(&[0; 68]);
/// assert_eq!(blocks.len(), 2);
/// ```
pub fn cast<B: Block>(bytes: &[u8]) -> &[B] {
    const { assert!(align_of::<B>() == 1) };
    assert!(bytes.len().is_multiple_of(size_of::<B>()), "{} bytes are not whole {} blocks", bytes.len(), B::TYPE);
    bytemuck::cast_slice(bytes)
}

/// An IEEE half-precision number with alignment 1.
#[derive(Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub struct Half(pub [u8; 2]);

impl Half {
    /// The exact value.
    pub fn to_f32(self) -> f32 {
        half::f16::from_le_bytes(self.0).to_f32()
    }

    /// The nearest half-precision number, ties to even.
    pub fn from_f32(value: f32) -> Self {
        Self(half::f16::from_f32(value).to_le_bytes())
    }
}

impl fmt::Debug for Half {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.to_f32())
    }
}

/// Implements [`Block`] and asserts the size that the format prescribes.
macro_rules! block {
    ($block:ident, $ty:ident, $len:literal values in $bytes:literal bytes) => {
        const _: () = assert!(size_of::<$block>() == $bytes && align_of::<$block>() == 1);
        const _: () = assert!(TensorType::$ty.block_len() == $len);
        impl Block for $block {
            const TYPE: TensorType = TensorType::$ty;
        }
    };
}

// ---- plain floats ------------------------------------------------------------------------

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
    pub x: Half,
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

// ---- blocks of 32 ------------------------------------------------------------------------

/// 4 bits, symmetric: `x = (q - 8) * d`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ4_0 {
    /// Scale.
    pub d: Half,
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
    pub d: Half,
    /// The smallest value.
    pub m: Half,
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
    pub d: Half,
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
    pub d: Half,
    /// The smallest value.
    pub m: Half,
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

/// Four low bits and, as the lowest bit of `high`, the fifth.
fn five_bits(low: u8, high: u32) -> i32 {
    (u32::from(low) | (high & 1) << 4) as i32
}

/// 8 bits, symmetric: `x = q * d`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ8_0 {
    /// Scale.
    pub d: Half,
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

/// The values of the 16 codes of the `IQ4` types: denser around zero, where most weights are.
pub const IQ4_VALUES: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// 4 bits through a table: `x = IQ4_VALUES[q] * d`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct BlockIq4Nl {
    /// Scale.
    pub d: Half,
    /// Nibble plane of `q`: byte `j` holds element `j` (low) and `j + 16` (high).
    pub qs: [u8; 16],
}
block!(BlockIq4Nl, IQ4_NL, 32 values in 18 bytes);

impl BlockIq4Nl {
    /// `x = IQ4_VALUES[q] * d`.
    pub fn dequantize(&self, dst: &mut [f32; 32]) {
        iq4(&self.qs, self.d.to_f32(), dst);
    }
}

/// 32 elements from 16 bytes of `IQ4` codes.
fn iq4(qs: &[u8], d: f32, dst: &mut [f32]) {
    let (low, high) = dst.split_at_mut(16);
    for ((&q, low), high) in qs.iter().zip(low).zip(high) {
        *low = d * f32::from(IQ4_VALUES[usize::from(q & 15)]);
        *high = d * f32::from(IQ4_VALUES[usize::from(q >> 4)]);
    }
}

// ---- blocks of 256 -----------------------------------------------------------------------

/// 2 bits with a minimum: 16 groups of 16, `x = d * scale * q - dmin * min`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ2K {
    /// Of each group the scale (low nibble) and the minimum (high nibble).
    pub scales: [u8; 16],
    /// Two halves of 128 elements, 32 bytes each; bits `2k` and `2k + 1` of byte `j` of a half
    /// belong to its element `32 k + j`.
    pub qs: [u8; 64],
    /// Scale of the scales.
    pub d: Half,
    /// Scale of the minimums.
    pub dmin: Half,
}
block!(BlockQ2K, Q2_K, 256 values in 84 bytes);

impl BlockQ2K {
    /// `x = d * scale * q - dmin * min`.
    pub fn dequantize(&self, dst: &mut [f32; 256]) {
        let (d, dmin) = (self.d.to_f32(), self.dmin.to_f32());
        for (g, (group, &scale)) in dst.as_chunks_mut::<16>().0.iter_mut().zip(&self.scales).enumerate() {
            let (half, k, side) = (g / 8, g % 8 / 2, g % 2);
            let qs = &self.qs[half * 32 + side * 16..][..16];
            let (scale, min) = (d * f32::from(scale & 15), dmin * f32::from(scale >> 4));
            for (x, &q) in group.iter_mut().zip(qs) {
                *x = scale * f32::from(q >> (2 * k) & 3) - min;
            }
        }
    }
}

/// 3 bits, symmetric: 16 groups of 16, `x = d * scale * (q - 4)`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ3K {
    /// The third bits: bit `k` of byte `j` belongs to element `32 k + j`.
    pub hmask: [u8; 32],
    /// The lower two bits, laid out as in [`BlockQ2K::qs`].
    pub qs: [u8; 64],
    /// The groups' 6-bit scales plus 32; see [`BlockQ3K::scale`].
    pub scales: [u8; 12],
    /// Scale of the scales.
    pub d: Half,
}
block!(BlockQ3K, Q3_K, 256 values in 110 bytes);

impl BlockQ3K {
    /// The scale of group `g` (below 16), from -32 to 31: its low four bits are in the nibble
    /// plane `scales[..8]`, its high two bits in `scales[8 + g % 4]`, starting at bit `2 (g / 4)`.
    pub fn scale(&self, g: usize) -> i32 {
        let low = self.scales[g % 8] >> (4 * (g / 8)) & 15;
        let high = self.scales[8 + g % 4] >> (2 * (g / 4)) & 3;
        i32::from(low | high << 4) - 32
    }

    /// `x = d * scale * (q - 4)`.
    pub fn dequantize(&self, dst: &mut [f32; 256]) {
        let d = self.d.to_f32();
        for (g, group) in dst.as_chunks_mut::<16>().0.iter_mut().enumerate() {
            let (half, k, side) = (g / 8, g % 8 / 2, g % 2);
            let qs = &self.qs[half * 32 + side * 16..][..16];
            let hmask = &self.hmask[side * 16..][..16];
            let scale = d * self.scale(g) as f32;
            for (x, (&low, &high)) in group.iter_mut().zip(qs.iter().zip(hmask)) {
                let q = low >> (2 * k) & 3 | (high >> (half * 4 + k) & 1) << 2;
                *x = scale * (i32::from(q) - 4) as f32;
            }
        }
    }
}

/// The scale and minimum, 6 bits each, of group `g` (below 8) in the 12 bytes of the `Q4_K` and
/// `Q5_K` blocks: groups 0 to 3 have their scales in the low 6 bits of bytes 0 to 3 and their
/// minimums in those of bytes 4 to 7; groups 4 to 7 have the low nibbles of both in bytes 8 to 11
/// and the two upper bits in the top of bytes 0 to 3 (scales) and 4 to 7 (minimums).
pub fn scale_min_k4(scales: &[u8; 12], g: usize) -> (u8, u8) {
    if g < 4 {
        (scales[g] & 63, scales[g + 4] & 63)
    } else {
        let low = scales[g + 4];
        (low & 15 | scales[g - 4] >> 6 << 4, low >> 4 | scales[g] >> 6 << 4)
    }
}

/// 4 bits with a minimum: 8 groups of 32, `x = d * scale * q - dmin * min`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ4K {
    /// Scale of the scales.
    pub d: Half,
    /// Scale of the minimums.
    pub dmin: Half,
    /// The groups' 6-bit scales and minimums; see [`scale_min_k4`].
    pub scales: [u8; 12],
    /// Four nibble planes of 32 bytes: byte `32 p + j` holds elements `64 p + j` (low nibble) and
    /// `64 p + 32 + j` (high nibble), so each plane has two groups.
    pub qs: [u8; 128],
}
block!(BlockQ4K, Q4_K, 256 values in 144 bytes);

impl BlockQ4K {
    /// `x = d * scale * q - dmin * min`.
    pub fn dequantize(&self, dst: &mut [f32; 256]) {
        let (d, dmin) = (self.d.to_f32(), self.dmin.to_f32());
        for (g, group) in dst.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let (scale, min) = scale_min_k4(&self.scales, g);
            let (scale, min) = (d * f32::from(scale), dmin * f32::from(min));
            let qs = &self.qs[g / 2 * 32..][..32];
            for (x, &q) in group.iter_mut().zip(qs) {
                *x = scale * f32::from(q >> (4 * (g % 2)) & 15) - min;
            }
        }
    }
}

/// 5 bits with a minimum: 8 groups of 32, `x = d * scale * q - dmin * min`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ5K {
    /// Scale of the scales.
    pub d: Half,
    /// Scale of the minimums.
    pub dmin: Half,
    /// The groups' 6-bit scales and minimums; see [`scale_min_k4`].
    pub scales: [u8; 12],
    /// The fifth bits: bit `g` of byte `j` belongs to element `32 g + j`.
    pub qh: [u8; 32],
    /// The lower four bits, laid out as in [`BlockQ4K::qs`].
    pub qs: [u8; 128],
}
block!(BlockQ5K, Q5_K, 256 values in 176 bytes);

impl BlockQ5K {
    /// `x = d * scale * q - dmin * min`.
    pub fn dequantize(&self, dst: &mut [f32; 256]) {
        let (d, dmin) = (self.d.to_f32(), self.dmin.to_f32());
        for (g, group) in dst.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let (scale, min) = scale_min_k4(&self.scales, g);
            let (scale, min) = (d * f32::from(scale), dmin * f32::from(min));
            let qs = &self.qs[g / 2 * 32..][..32];
            for (x, (&low, &high)) in group.iter_mut().zip(qs.iter().zip(&self.qh)) {
                let q = low >> (4 * (g % 2)) & 15 | (high >> g & 1) << 4;
                *x = scale * f32::from(q) - min;
            }
        }
    }
}

/// 6 bits, symmetric: 16 groups of 16, `x = d * scale * (q - 32)`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ6K {
    /// The lower four bits, in two halves of 128 elements, 64 bytes each: byte `j` of a half
    /// holds its elements `j` (low nibble) and `j + 64` (high nibble).
    pub ql: [u8; 128],
    /// The upper two bits, laid out as [`BlockQ2K::qs`].
    pub qh: [u8; 64],
    /// The groups' scales.
    pub scales: [i8; 16],
    /// Scale of the scales.
    pub d: Half,
}
block!(BlockQ6K, Q6_K, 256 values in 210 bytes);

impl BlockQ6K {
    /// `x = d * scale * (q - 32)`.
    pub fn dequantize(&self, dst: &mut [f32; 256]) {
        let d = self.d.to_f32();
        for (g, (group, &scale)) in dst.as_chunks_mut::<16>().0.iter_mut().zip(&self.scales).enumerate() {
            let (half, k, side) = (g / 8, g % 8 / 2, g % 2);
            let ql = &self.ql[half * 64 + k % 2 * 32 + side * 16..][..16];
            let qh = &self.qh[half * 32 + side * 16..][..16];
            let scale = d * f32::from(scale);
            for (x, (&low, &high)) in group.iter_mut().zip(ql.iter().zip(qh)) {
                let q = low >> (k / 2 * 4) & 15 | (high >> (2 * k) & 3) << 4;
                *x = scale * (i32::from(q) - 32) as f32;
            }
        }
    }
}

/// 4 bits through a table: 8 groups of 32, `x = d * scale * IQ4_VALUES[q]`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct BlockIq4Xs {
    /// Scale of the scales.
    pub d: Half,
    /// The upper two bits of the groups' scales; see [`BlockIq4Xs::scale`].
    pub scales_h: [u8; 2],
    /// The lower four bits of the groups' scales.
    pub scales_l: [u8; 4],
    /// Per group a nibble plane of 16 bytes.
    pub qs: [u8; 128],
}
block!(BlockIq4Xs, IQ4_XS, 256 values in 136 bytes);

impl BlockIq4Xs {
    /// The scale of group `g` (below 8), from -32 to 31: the low four bits are nibble `g` of
    /// `scales_l`, the high two bits start at bit `2 g` of the little-endian `scales_h`.
    pub fn scale(&self, g: usize) -> i32 {
        let low = self.scales_l[g / 2] >> (4 * (g % 2)) & 15;
        let high = u16::from_le_bytes(self.scales_h) >> (2 * g) & 3;
        i32::from(u16::from(low) | high << 4) - 32
    }

    /// `x = d * scale * IQ4_VALUES[q]`.
    pub fn dequantize(&self, dst: &mut [f32; 256]) {
        let d = self.d.to_f32();
        for (g, group) in dst.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            iq4(&self.qs[g * 16..][..16], d * self.scale(g) as f32, group);
        }
    }
}
