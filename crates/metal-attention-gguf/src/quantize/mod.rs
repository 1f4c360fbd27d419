//! Quantisation: blocks of each type that come close to given numbers.
//!
//! Without importance the 32-element types round as ggml's reference quantisers do, so the results agree with its
//! files. All others search, each by the squares of the errors, weighted: large elements count more, and where it is known how
//! large the input of each column is, important columns do. Values that are not finite, or whose scale overflows half
//! precision, give blocks without meaning.

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
    /// Appends the blocks of `src`; an error when `src` is not whole blocks.
    pub fn quantize(self, src: &[f32], dst: &mut Vec<u8>) -> Result<()> {
        self.quantize_rows(src, None, dst)
    }

    /// The same for the rows of a matrix whose columns are of different importance: the mean squares of their inputs,
    /// `[row_len]` (see [`Imatrix`](crate::Imatrix)). Floats, `Q8_0` and the ternary types take no account of it.
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
        }
        Ok(())
    }
}

/// Quantises block by block, each with the importance of its columns. `N` is the number of elements per block.
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
