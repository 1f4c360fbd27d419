//! The `IQ3` types: 4 elements are a point of a codebook, which contains magnitudes, with a sign for each element.

use bytemuck::{Pod, Zeroable};

use super::grids::{CodebookGrid, even_signs};
use super::{BlockFormat, UnalignedF16, block};
use crate::TensorType;

/// Dequantises 8 elements: two points of `grid` times `scale`; element `k` is negative where bit `k` of `signs` is set.
fn points(grid: CodebookGrid, codes: [usize; 2], signs: u8, scale: f32, dst: &mut [f32; 8]) {
    for (k, x) in dst.iter_mut().enumerate() {
        let x_abs = scale * f32::from(grid.value(codes[k / 4], k % 4));
        *x = if signs >> k & 1 == 1 { -x_abs } else { x_abs };
    }
}

/// 8-bit codes, 7 bits of signs for 8 elements, 8 groups of 32: `x = d * (scale + 0.5) / 2 * point`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct BlockIq3Xxs {
    /// Scale of the scales.
    pub d: UnalignedF16,
    /// The codes, one for 4 elements.
    pub qs: [u8; 64],
    /// For each group a little-endian word: the signs of its elements `8 l..8 l + 8` from bit `7 l` on (see
    /// [`even_signs`](super::even_signs)), and the scale in the top four bits.
    pub scales_and_signs: [[u8; 4]; 8],
}
block!(BlockIq3Xxs, IQ3_XXS, 256 values in 98 bytes);

impl BlockIq3Xxs {
    /// The word with signs and scale of group `g` (below 8).
    pub fn signs_and_scale(&self, g: usize) -> u32 {
        u32::from_le_bytes(self.scales_and_signs[g])
    }

    /// `x = d * (scale + 0.5) / 2 * point`.
    pub fn dequantize(&self, dst: &mut [f32; 256]) {
        let d = self.d.to_f32();
        for (i, x) in dst.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let word = self.signs_and_scale(i / 4);
            let scale = d * (0.5 + (word >> 28) as f32) * 0.5;
            let signs = even_signs((word >> (7 * (i % 4)) & 127) as u8);
            points(CodebookGrid::IQ3_XXS, [0, 1].map(|k| usize::from(self.qs[2 * i + k])), signs, scale, x);
        }
    }
}

/// 9-bit codes, 8 bits of signs for 8 elements, 8 groups of 32: `x = d * (2 scale + 1) * point`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct BlockIq3S {
    /// Scale of the scales.
    pub d: UnalignedF16,
    /// The lower eight bits of the codes, one for 4 elements.
    pub qs: [u8; 64],
    /// The ninth bits: bit `j % 8` of byte `j / 8` belongs to code `j`.
    pub qh: [u8; 8],
    /// Bit `k` of byte `i` is set where element `8 i + k` is negative.
    pub signs: [u8; 32],
    /// The groups' scales, low nibble first.
    pub scales: [u8; 4],
}
block!(BlockIq3S, IQ3_S, 256 values in 110 bytes);

impl BlockIq3S {
    /// The code of elements `4 j..4 j + 4`.
    pub fn code(&self, j: usize) -> usize {
        usize::from(self.qs[j]) | usize::from(self.qh[j / 8] >> (j % 8) & 1) << 8
    }

    /// `x = d * (2 scale + 1) * point`.
    pub fn dequantize(&self, dst: &mut [f32; 256]) {
        let d = self.d.to_f32();
        for (i, x) in dst.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let scale = self.scales[i / 8] >> (4 * (i / 4 % 2)) & 15;
            let scale = d * f32::from(1 + 2 * scale);
            points(CodebookGrid::IQ3_S, [0, 1].map(|k| self.code(2 * i + k)), self.signs[i], scale, x);
        }
    }
}
