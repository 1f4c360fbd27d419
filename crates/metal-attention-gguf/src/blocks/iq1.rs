//! The `IQ1` types: 8 elements are a point of a codebook with elements -1, 0 and 1, shifted by 1/8.

use bytemuck::{Pod, Zeroable};

use super::grids::CodebookGrid;
use super::{BlockFormat, UnalignedF16, block};
use crate::TensorType;

/// The shift that is added to, or subtracted from, each element of a point.
pub const IQ1_DELTA: f32 = 0.125;

/// Dequantises 8 elements: point `code`, shifted up or `down`, times `scale`.
fn point(code: usize, down: bool, scale: f32, dst: &mut [f32; 8]) {
    let delta = if down { -IQ1_DELTA } else { IQ1_DELTA };
    for (k, x) in dst.iter_mut().enumerate() {
        *x = scale * (f32::from(CodebookGrid::IQ1.value(code, k)) + delta);
    }
}

/// 11-bit codes for 8 elements, 8 groups of 32: `x = d * (2 scale + 1) * (point ± 1/8)`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct BlockIq1S {
    /// Scale of the scales.
    pub d: UnalignedF16,
    /// The lower eight bits of the codes.
    pub qs: [u8; 32],
    /// For each group a little-endian number: the upper three bits of code `l` (of four) from bit `3 l` on, the scale in bits
    /// 12 to 14, and bit 15 set where the points are shifted down.
    pub qh: [[u8; 2]; 8],
}
block!(BlockIq1S, IQ1_S, 256 values in 50 bytes);

impl BlockIq1S {
    /// The entry of group `g` (below 8) in [`qh`](Self::qh).
    pub fn high(&self, g: usize) -> u16 {
        u16::from_le_bytes(self.qh[g])
    }

    /// The code of elements `8 i..8 i + 8`.
    pub fn code(&self, i: usize) -> usize {
        usize::from(self.qs[i]) | usize::from(self.high(i / 4) >> (3 * (i % 4)) & 7) << 8
    }

    /// `x = d * (2 scale + 1) * (point ± 1/8)`.
    pub fn dequantize(&self, dst: &mut [f32; 256]) {
        let d = self.d.to_f32();
        for (i, x) in dst.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let high = self.high(i / 4);
            point(self.code(i), high >> 15 == 1, d * f32::from(2 * (high >> 12 & 7) + 1), x);
        }
    }
}

/// 11-bit codes for 8 elements, 16 groups of 16: `x = d * (2 scale + 1) * (point ± 1/8)`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct BlockIq1M {
    /// The lower eight bits of the codes.
    pub qs: [u8; 32],
    /// For each 8 elements a nibble, the low one first: the upper three bits of the code, and bit 3 set where the point is
    /// shifted down.
    pub qh: [u8; 16],
    /// Four little-endian numbers: the scale of group `g` is in number `g / 4`, from bit `3 (g % 4)` on. Their top nibbles, the
    /// first one lowest, are the half-precision scale of the scales.
    pub scales: [[u8; 2]; 4],
}
block!(BlockIq1M, IQ1_M, 256 values in 56 bytes);

impl BlockIq1M {
    /// Scale of the scales.
    pub fn d(&self) -> UnalignedF16 {
        let bits = self.scales.iter().rev().fold(0, |bits, &s| bits << 4 | u16::from_le_bytes(s) >> 12);
        UnalignedF16(bits.to_le_bytes())
    }

    /// The scale, 0 to 7, of group `g` (below 16).
    pub fn scale(&self, g: usize) -> u8 {
        (u16::from_le_bytes(self.scales[g / 4]) >> (3 * (g % 4)) & 7) as u8
    }

    /// The upper bits of the code of elements `8 i..8 i + 8`, and bit 3 set where the point is shifted down.
    pub fn high(&self, i: usize) -> u8 {
        self.qh[i / 2] >> (4 * (i % 2)) & 15
    }

    /// The code of elements `8 i..8 i + 8`.
    pub fn code(&self, i: usize) -> usize {
        usize::from(self.qs[i]) | usize::from(self.high(i) & 7) << 8
    }

    /// `x = d * (2 scale + 1) * (point ± 1/8)`.
    pub fn dequantize(&self, dst: &mut [f32; 256]) {
        let d = self.d().to_f32();
        for (i, x) in dst.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            point(self.code(i), self.high(i) >> 3 == 1, d * f32::from(2 * self.scale(i / 2) + 1), x);
        }
    }
}
