//! Quantisation: the nearest block of each type.
//!
//! The 32-element types round as ggml's reference quantisers do, so the results agree with its
//! files. Values that are not finite, or whose scale overflows half precision, give blocks without
//! meaning.

use bytemuck::bytes_of;
use half::bf16;

use crate::blocks::{
    Block, BlockBf16, BlockF16, BlockF32, BlockQ4_0, BlockQ4_1, BlockQ5_0, BlockQ5_1, BlockQ8_0, Half,
};
use crate::quantize_k::{iq4_nl, iq4_xs, q2_k, q3_k, q4_k, q5_k, q6_k};
use crate::{GgufError, Result, TensorType};

impl TensorType {
    /// Appends the blocks of `src`; an error when `src` is not whole blocks, or where this crate only reads the type.
    pub fn quantize(self, src: &[f32], dst: &mut Vec<u8>) -> Result<()> {
        if !src.len().is_multiple_of(self.block_len()) {
            return Err(GgufError::NotWholeBlocks { ty: self, len: src.len() });
        }
        dst.reserve(self.row_bytes(src.len()));
        match self {
            Self::F32 => each(src, dst, |&[x]| BlockF32 { x: x.to_le_bytes() }),
            Self::F16 => each(src, dst, |&[x]| BlockF16 { x: Half::from_f32(x) }),
            Self::BF16 => each(src, dst, |&[x]| BlockBf16 { x: bf16::from_f32(x).to_le_bytes() }),
            Self::Q4_0 => each(src, dst, q4_0),
            Self::Q4_1 => each(src, dst, q4_1),
            Self::Q5_0 => each(src, dst, q5_0),
            Self::Q5_1 => each(src, dst, q5_1),
            Self::Q8_0 => each(src, dst, q8_0),
            Self::Q2_K => each(src, dst, q2_k),
            Self::Q3_K => each(src, dst, q3_k),
            Self::Q4_K => each(src, dst, q4_k),
            Self::Q5_K => each(src, dst, q5_k),
            Self::Q6_K => each(src, dst, q6_k),
            Self::IQ4_NL => each(src, dst, iq4_nl),
            Self::IQ4_XS => each(src, dst, iq4_xs),
            Self::IQ3_S
            | Self::IQ3_XXS
            | Self::IQ2_S
            | Self::IQ2_XS
            | Self::IQ2_XXS
            | Self::IQ1_M
            | Self::IQ1_S
            | Self::MXFP4
            | Self::NVFP4
            | Self::TQ2_0
            | Self::TQ1_0
            | Self::Q2_0
            | Self::Q1_0 => return Err(GgufError::NoQuantizer { ty: self }),
        }
        Ok(())
    }
}

/// Quantises block by block. `N` is the number of elements per block.
fn each<B: Block, const N: usize>(src: &[f32], dst: &mut Vec<u8>, quantize: impl Fn(&[f32; N]) -> B) {
    for x in src.as_chunks().0 {
        dst.extend_from_slice(bytes_of(&quantize(x)));
    }
}

/// `1 / d`, or 0 for a block of zeros.
pub(crate) fn inverse(d: f32) -> f32 {
    if d == 0.0 { 0.0 } else { 1.0 / d }
}

/// The value of the largest magnitude, with its sign; the first of several.
pub(crate) fn extreme(x: &[f32]) -> f32 {
    x.iter().fold(0.0, |extreme: f32, &x| if x.abs() > extreme.abs() { x } else { extreme })
}

fn min_max(x: &[f32]) -> (f32, f32) {
    x.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(min, max), &x| (min.min(x), max.max(x)))
}

/// Packs 32 numbers of 4 bits into a nibble plane: byte `j` gets elements `j` and `j + 16`.
pub(crate) fn nibbles(q: &[u8; 32]) -> [u8; 16] {
    std::array::from_fn(|j| q[j] & 15 | q[j + 16] << 4)
}

/// Collects the fifth bits of 32 numbers.
fn fifth_bits(q: &[u8; 32]) -> [u8; 4] {
    let bits = q.iter().rev().fold(0u32, |bits, &q| bits << 1 | u32::from(q >> 4));
    bits.to_le_bytes()
}

/// The extreme becomes -8, so that it is met exactly whatever its sign.
fn q4_0(x: &[f32; 32]) -> BlockQ4_0 {
    let d = extreme(x) / -8.0;
    let inverse = inverse(d);
    let q = x.map(|x| ((x * inverse + 8.5) as u8).min(15));
    BlockQ4_0 { d: Half::from_f32(d), qs: nibbles(&q) }
}

fn q4_1(x: &[f32; 32]) -> BlockQ4_1 {
    let (min, max) = min_max(x);
    let d = (max - min) / 15.0;
    let inverse = inverse(d);
    let q = x.map(|x| (((x - min) * inverse + 0.5) as u8).min(15));
    BlockQ4_1 { d: Half::from_f32(d), m: Half::from_f32(min), qs: nibbles(&q) }
}

/// The extreme becomes -16.
fn q5_0(x: &[f32; 32]) -> BlockQ5_0 {
    let d = extreme(x) / -16.0;
    let inverse = inverse(d);
    let q = x.map(|x| ((x * inverse + 16.5) as u8).min(31));
    BlockQ5_0 { d: Half::from_f32(d), qh: fifth_bits(&q), qs: nibbles(&q) }
}

fn q5_1(x: &[f32; 32]) -> BlockQ5_1 {
    let (min, max) = min_max(x);
    let d = (max - min) / 31.0;
    let inverse = inverse(d);
    let q = x.map(|x| (((x - min) * inverse + 0.5) as u8).min(31));
    BlockQ5_1 { d: Half::from_f32(d), m: Half::from_f32(min), qh: fifth_bits(&q), qs: nibbles(&q) }
}

/// Rounds half away from zero.
fn q8_0(x: &[f32; 32]) -> BlockQ8_0 {
    let d = extreme(x).abs() / 127.0;
    let inverse = inverse(d);
    BlockQ8_0 { d: Half::from_f32(d), qs: x.map(|x| (x * inverse).round() as i8) }
}
