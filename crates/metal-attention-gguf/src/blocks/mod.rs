//! Block formats: for each tensor type the layout of a quantisation block, and its dequantisation.
//!
//! All blocks have alignment 1 and no padding, so a byte slice of whole blocks can be viewed as blocks with [`cast`].
//! Multi-byte fields are little-endian.
//!
//! Notation: `x` is an element of the block, `q` its code, `d` the scale, `m` the minimum. In a "nibble plane" each byte
//! contains two codes of 4 bits: the low nibbles are the first half of the elements, the high ones the second half. Byte `j`
//! of a plane of 16 bytes is elements `j` and `j + 16`. A *group* is the elements of a block of 256 that share a scale.
//!
//! The formats are those of ggml (`ggml-common.h`); the order of the floating-point operations is that of its reference code,
//! so the results agree bit for bit.

mod bits;
mod floats;
mod fp4;
mod grids;
mod iq1;
mod iq2;
mod iq3;
mod iq4;
mod k;
mod legacy;
mod random;

use std::fmt;

use bytemuck::{Pod, Zeroable};

use crate::TensorType;

pub use bits::{BlockQ1_0, BlockQ2_0, BlockTq1_0, BlockTq2_0};
pub use floats::{BlockBf16, BlockF16, BlockF32, BlockI64};
pub use fp4::{BlockMxfp4, BlockNvfp4, FP4_VALUES, e8m0_half, ue4m3_half};
pub use grids::{CodebookGrid, even_signs};
pub use iq1::{BlockIq1M, BlockIq1S, IQ1_DELTA};
pub use iq2::{BlockIq2S, BlockIq2Xs, BlockIq2Xxs};
pub use iq3::{BlockIq3S, BlockIq3Xxs};
pub use iq4::{BlockIq4Nl, BlockIq4Xs, IQ4_VALUES};
pub use k::{BlockQ2K, BlockQ3K, BlockQ4K, BlockQ5K, BlockQ6K, scale_min_k4};
pub use legacy::{BlockQ4_0, BlockQ4_1, BlockQ5_0, BlockQ5_1, BlockQ8_0};
pub use random::random_blocks;

/// A block format: a struct that lies over the bytes of a block in the file.
pub trait BlockFormat: Pod {
    /// The tensor type.
    const TYPE: TensorType;
}

/// Views bytes as blocks without copying.
///
/// # Panics
/// When `bytes` is not a whole number of blocks.
///
/// ```
/// use metal_attention_gguf::blocks::{cast, BlockQ8_0};
/// let blocks: &[BlockQ8_0] = cast(&[0; 68]);
/// assert_eq!(blocks.len(), 2);
/// ```
pub fn cast<B: BlockFormat>(bytes: &[u8]) -> &[B] {
    const { assert!(align_of::<B>() == 1) };
    assert!(bytes.len().is_multiple_of(size_of::<B>()), "{} bytes are not whole {} blocks", bytes.len(), B::TYPE);
    bytemuck::cast_slice(bytes)
}

/// An IEEE half-precision number with alignment 1.
#[derive(Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub struct UnalignedF16(pub [u8; 2]);

impl UnalignedF16 {
    /// The exact value.
    pub fn to_f32(self) -> f32 {
        half::f16::from_le_bytes(self.0).to_f32()
    }

    /// The nearest half-precision number, ties to even.
    pub fn from_f32(value: f32) -> Self {
        Self(half::f16::from_f32(value).to_le_bytes())
    }
}

impl fmt::Debug for UnalignedF16 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.to_f32())
    }
}

/// Implements [`BlockFormat`] and asserts the size that the format prescribes.
macro_rules! block {
    ($block:ident, $ty:ident, $len:literal values in $bytes:literal bytes) => {
        const _: () = assert!(size_of::<$block>() == $bytes && align_of::<$block>() == 1);
        const _: () = assert!(TensorType::$ty.block_len() == $len);
        impl BlockFormat for $block {
            const TYPE: TensorType = TensorType::$ty;
        }
    };
}
use block;
