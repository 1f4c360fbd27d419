//! The K-quants: blocks of 256 elements in groups of 16 or 32, whose scales and minimums are quantised, too.

use bytemuck::{Pod, Zeroable};

use super::{BlockFormat, UnalignedF16, block};
use crate::TensorType;

/// 2 bits with a minimum: 16 groups of 16, `x = d * scale * q - dmin * min`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ2K {
    /// For each group the scale (low nibble) and the minimum (high nibble).
    pub scales: [u8; 16],
    /// Two halves of 128 elements, 32 bytes each; bits `2k` and `2k + 1` of byte `j` of a half
    /// belong to its element `32 k + j`.
    pub qs: [u8; 64],
    /// Scale of the scales.
    pub d: UnalignedF16,
    /// Scale of the minimums.
    pub dmin: UnalignedF16,
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
    pub d: UnalignedF16,
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
    pub d: UnalignedF16,
    /// Scale of the minimums.
    pub dmin: UnalignedF16,
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
    pub d: UnalignedF16,
    /// Scale of the minimums.
    pub dmin: UnalignedF16,
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
    pub d: UnalignedF16,
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
