//! Quantisation: from floats to blocks of each tensor type.
//!
//! Without importance the legacy types are rounded as by ggml's reference quantisers, so the results agree with its files.
//! All other quantisers search for the scales and codes with the smallest sum of weighted squared errors. Large elements have
//! larger weights, and with importance (see [`Imatrix`](crate::Imatrix)) so have columns with large inputs. Values that are
//! not finite, or whose scale overflows half precision, give blocks without meaning.

mod codebook;
mod fit;
mod fp4;
mod iq1;
mod iq2;
mod k;
mod legacy;
mod ternary;

use bytemuck::bytes_of;

use crate::blocks::BlockFormat;
use crate::{GgufError, Result, TensorType};

impl TensorType {
    /// Quantises `src` and appends the blocks to `dst`; an error when `src` is not whole blocks.
    pub fn quantize(self, src: &[f32], dst: &mut Vec<u8>) -> Result<()> {
        self.quantize_rows(src, None, dst)
    }

    /// Quantises the rows of a matrix, `src`, and appends the blocks to `dst`. `importance`, `[row_len]`, is the mean square of
    /// the input of each column (see [`Imatrix`](crate::Imatrix)); float types, `Q8_0` and the types of one and two bits ignore
    /// it. An error when `src` is not whole blocks, or not whole rows of the length of `importance`.
    pub fn quantize_rows(self, src: &[f32], importance: Option<&[f32]>, dst: &mut Vec<u8>) -> Result<()> {
        let not_whole = |len: usize| !len.is_multiple_of(self.block_len());
        if not_whole(src.len()) {
            return Err(GgufError::NotWholeBlocks { ty: self, len: src.len() });
        }
        if let Some(row) = importance
            && (not_whole(row.len()) || !src.len().is_multiple_of(row.len().max(1)))
        {
            return Err(GgufError::NotWholeBlocks { ty: self, len: row.len() });
        }
        dst.reserve(self.row_bytes(src.len()));
        match self {
            Self::F32 => each(src, importance, dst, |x, _| legacy::f32(x)),
            Self::F16 => each(src, importance, dst, |x, _| legacy::f16(x)),
            Self::BF16 => each(src, importance, dst, |x, _| legacy::bf16(x)),
            Self::Q4_0 => each(src, importance, dst, legacy::q4_0),
            Self::Q4_1 => each(src, importance, dst, legacy::q4_1),
            Self::Q5_0 => each(src, importance, dst, legacy::q5_0),
            Self::Q5_1 => each(src, importance, dst, legacy::q5_1),
            Self::Q8_0 => each(src, importance, dst, |x, _| legacy::q8_0(x)),
            Self::Q2_K => each(src, importance, dst, k::q2_k),
            Self::Q3_K => each(src, importance, dst, k::q3_k),
            Self::Q4_K => each(src, importance, dst, k::q4_k),
            Self::Q5_K => each(src, importance, dst, k::q5_k),
            Self::Q6_K => each(src, importance, dst, k::q6_k),
            Self::IQ4_NL => each(src, importance, dst, k::iq4_nl),
            Self::IQ4_XS => each(src, importance, dst, k::iq4_xs),
            Self::IQ3_S => each(src, importance, dst, iq2::iq3_s),
            Self::IQ3_XXS => each(src, importance, dst, iq2::iq3_xxs),
            Self::IQ2_S => each(src, importance, dst, iq2::iq2_s),
            Self::IQ2_XS => each(src, importance, dst, iq2::iq2_xs),
            Self::IQ2_XXS => each(src, importance, dst, iq2::iq2_xxs),
            Self::IQ1_M => each(src, importance, dst, iq1::iq1_m),
            Self::IQ1_S => each(src, importance, dst, iq1::iq1_s),
            Self::MXFP4 => each(src, importance, dst, fp4::mxfp4),
            Self::NVFP4 => each(src, importance, dst, fp4::nvfp4),
            Self::TQ2_0 => each(src, importance, dst, |x, _| ternary::tq2_0(x)),
            Self::TQ1_0 => each(src, importance, dst, |x, _| ternary::tq1_0(x)),
            Self::Q2_0 => each(src, importance, dst, |x, _| ternary::q2_0(x)),
            Self::Q1_0 => each(src, importance, dst, |x, _| ternary::q1_0(x)),
            Self::I64 => dst.extend(src.iter().flat_map(|&x| (x.round() as i64).to_le_bytes())),
        }
        Ok(())
    }
}

/// Quantises all blocks of `src` with `quantize`, each with the importance of its columns. `N` is the number of elements of a
/// block.
fn each<B: BlockFormat, const N: usize>(
    src: &[f32],
    importance: Option<&[f32]>,
    dst: &mut Vec<u8>,
    quantize: impl Fn(&[f32; N], Option<&[f32; N]>) -> B,
) {
    let columns = importance.map(|row| row.as_chunks().0);
    for (i, x) in src.as_chunks().0.iter().enumerate() {
        let importance = columns.map(|columns| &columns[i % columns.len()]);
        dst.extend_from_slice(bytes_of(&quantize(x, importance)));
    }
}
