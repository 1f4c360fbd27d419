//! The `IQ4` types: codes of 4 bits are indices in a table of 16 values.

use bytemuck::{Pod, Zeroable};

use super::{BlockFormat, UnalignedF16, block};
use crate::TensorType;

/// The values of the 16 codes of the `IQ4` types, which are denser around zero, where most weights are.
pub const IQ4_VALUES: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// 4 bits with a table: `x = IQ4_VALUES[q] * d`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct BlockIq4Nl {
    /// Scale.
    pub d: UnalignedF16,
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

/// Dequantises a nibble plane of 32 `IQ4` codes with the scale `d`.
fn iq4(qs: &[u8], d: f32, dst: &mut [f32]) {
    let (low, high) = dst.split_at_mut(16);
    for ((&q, low), high) in qs.iter().zip(low).zip(high) {
        *low = d * f32::from(IQ4_VALUES[usize::from(q & 15)]);
        *high = d * f32::from(IQ4_VALUES[usize::from(q >> 4)]);
    }
}

/// 4 bits with a table: 8 groups of 32, `x = d * scale * IQ4_VALUES[q]`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct BlockIq4Xs {
    /// Scale of the scales.
    pub d: UnalignedF16,
    /// The upper two bits of the groups' scales; see [`BlockIq4Xs::scale`].
    pub scales_h: [u8; 2],
    /// The lower four bits of the groups' scales.
    pub scales_l: [u8; 4],
    /// For each group a nibble plane of 16 bytes.
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
