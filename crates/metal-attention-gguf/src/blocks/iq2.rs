//! The `IQ2` types: 8 elements are a point of a codebook, which contains magnitudes, with a sign for each element.

use bytemuck::{Pod, Zeroable};

use super::grids::{CodebookGrid, even_signs};
use super::{BlockFormat, UnalignedF16, block};
use crate::TensorType;

/// Dequantises 8 elements: point `code` of `grid` times `scale`; element `k` is negative where bit `k` of `signs` is set.
fn point(grid: CodebookGrid, code: usize, signs: u8, scale: f32, dst: &mut [f32; 8]) {
    for (k, x) in dst.iter_mut().enumerate() {
        let x_abs = scale * f32::from(grid.value(code, k));
        *x = if signs >> k & 1 == 1 { -x_abs } else { x_abs };
    }
}

/// 8-bit codes, 7 bits of signs for 8 elements, 8 groups of 32: `x = d * (scale + 0.5) / 4 * point`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct BlockIq2Xxs {
    /// Scale of the scales.
    pub d: UnalignedF16,
    /// For each group 8 bytes: the codes of its four points, then a little-endian word with the signs of point `l` from bit
    /// `7 l` on (see [`even_signs`](super::even_signs)), and the scale in the top four bits.
    pub qs: [u8; 64],
}
block!(BlockIq2Xxs, IQ2_XXS, 256 values in 66 bytes);

impl BlockIq2Xxs {
    /// The word with signs and scale of group `g` (below 8).
    pub fn signs_and_scale(&self, g: usize) -> u32 {
        let b = &self.qs[8 * g + 4..][..4];
        u32::from_le_bytes([b[0], b[1], b[2], b[3]])
    }

    /// `x = d * (scale + 0.5) / 4 * point`.
    pub fn dequantize(&self, dst: &mut [f32; 256]) {
        let d = self.d.to_f32();
        for (g, group) in dst.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let word = self.signs_and_scale(g);
            let scale = d * (0.5 + (word >> 28) as f32) * 0.25;
            for (l, x) in group.as_chunks_mut::<8>().0.iter_mut().enumerate() {
                let code = usize::from(self.qs[8 * g + l]);
                point(CodebookGrid::IQ2_XXS, code, even_signs((word >> (7 * l) & 127) as u8), scale, x);
            }
        }
    }
}

/// 9-bit codes, 7 bits of signs for 8 elements, 16 groups of 16: `x = d * (scale + 0.5) / 4 * point`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct BlockIq2Xs {
    /// Scale of the scales.
    pub d: UnalignedF16,
    /// For each 8 elements a little-endian number: the code in the lower nine bits, the signs (see
    /// [`even_signs`](super::even_signs)) in the upper seven.
    pub qs: [[u8; 2]; 32],
    /// The groups' scales, low nibble first.
    pub scales: [u8; 8],
}
block!(BlockIq2Xs, IQ2_XS, 256 values in 74 bytes);

impl BlockIq2Xs {
    /// The code and the signs of elements `8 i..8 i + 8`.
    pub fn code_and_signs(&self, i: usize) -> (usize, u8) {
        let q = u16::from_le_bytes(self.qs[i]);
        (usize::from(q & 511), even_signs((q >> 9) as u8))
    }

    /// `x = d * (scale + 0.5) / 4 * point`.
    pub fn dequantize(&self, dst: &mut [f32; 256]) {
        let d = self.d.to_f32();
        for (i, x) in dst.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let (code, signs) = self.code_and_signs(i);
            point(CodebookGrid::IQ2_XS, code, signs, quarters(d, self.scales, i), x);
        }
    }
}

/// 10-bit codes, 8 bits of signs for 8 elements, 16 groups of 16: `x = d * (scale + 0.5) / 4 * point`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct BlockIq2S {
    /// Scale of the scales.
    pub d: UnalignedF16,
    /// The lower eight bits of the codes, one for 8 elements.
    pub qs: [u8; 32],
    /// Bit `k` of byte `i` is set where element `8 i + k` is negative.
    pub signs: [u8; 32],
    /// The upper two bits of the codes: those of elements `8 i..8 i + 8` in byte `i / 4`, from bit `2 (i % 4)` on.
    pub qh: [u8; 8],
    /// The groups' scales, low nibble first.
    pub scales: [u8; 8],
}
block!(BlockIq2S, IQ2_S, 256 values in 82 bytes);

impl BlockIq2S {
    /// The code of elements `8 i..8 i + 8`.
    pub fn code(&self, i: usize) -> usize {
        usize::from(self.qs[i]) | usize::from(self.qh[i / 4] >> (2 * (i % 4)) & 3) << 8
    }

    /// `x = d * (scale + 0.5) / 4 * point`.
    pub fn dequantize(&self, dst: &mut [f32; 256]) {
        let d = self.d.to_f32();
        for (i, x) in dst.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            point(CodebookGrid::IQ2_S, self.code(i), self.signs[i], quarters(d, self.scales, i), x);
        }
    }
}

/// The scale of elements `8 i..8 i + 8`, `d * (scale + 0.5) / 4`, where 16 elements share a nibble of `scales`.
fn quarters(d: f32, scales: [u8; 8], i: usize) -> f32 {
    let scale = scales[i / 4] >> (4 * (i / 2 % 2)) & 15;
    d * (0.5 + f32::from(scale)) * 0.25
}
