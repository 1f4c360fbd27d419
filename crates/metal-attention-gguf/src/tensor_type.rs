//! The table of tensor types.

use std::fmt;
use std::str::FromStr;

use half::slice::HalfFloatSliceExt;

use crate::blocks::{
    Block, BlockBf16, BlockF16, BlockF32, BlockIq1M, BlockIq1S, BlockIq2S, BlockIq2Xs, BlockIq2Xxs, BlockIq3S,
    BlockIq3Xxs, BlockIq4Nl, BlockIq4Xs, BlockMxfp4, BlockNvfp4, BlockQ1_0, BlockQ2_0, BlockQ2K, BlockQ3K, BlockQ4_0,
    BlockQ4_1, BlockQ4K, BlockQ5_0, BlockQ5_1, BlockQ5K, BlockQ6K, BlockQ8_0, BlockTq1_0, BlockTq2_0, cast,
};
use crate::{GgufError, Result};

/// How the numbers of a tensor are stored. The discriminants are ggml's type ids.
///
/// ```
/// use metal_attention_gguf::TensorType;
/// let ty: TensorType = "q4_0".parse()?;
/// assert_eq!((ty.block_len(), ty.block_bytes()), (32, 18));
/// assert_eq!(ty.to_string(), "Q4_0");
/// # Ok::<(), metal_attention_gguf::GgufError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(non_camel_case_types, missing_docs)]
#[repr(u32)]
pub enum TensorType {
    F32 = 0,
    F16 = 1,
    BF16 = 30,
    Q4_0 = 2,
    Q4_1 = 3,
    Q5_0 = 6,
    Q5_1 = 7,
    Q8_0 = 8,
    Q2_K = 10,
    Q3_K = 11,
    Q4_K = 12,
    Q5_K = 13,
    Q6_K = 14,
    IQ4_NL = 20,
    IQ4_XS = 23,
    IQ3_S = 21,
    IQ3_XXS = 18,
    IQ2_S = 22,
    IQ2_XS = 17,
    IQ2_XXS = 16,
    IQ1_M = 29,
    IQ1_S = 19,
    MXFP4 = 39,
    NVFP4 = 40,
    TQ2_0 = 35,
    TQ1_0 = 34,
    Q2_0 = 42,
    Q1_0 = 41,
}

/// Types that ggml has or had and this crate does not read, so that an error can name them.
const UNSUPPORTED: [(u32, &str); 15] = [
    (4, "Q4_2"),
    (5, "Q4_3"),
    (9, "Q8_1"),
    (15, "Q8_K"),
    (24, "I8"),
    (25, "I16"),
    (26, "I32"),
    (27, "I64"),
    (28, "F64"),
    (31, "Q4_0_4_4"),
    (32, "Q4_0_4_8"),
    (33, "Q4_0_8_8"),
    (36, "IQ4_NL_4_4"),
    (37, "IQ4_NL_4_8"),
    (38, "IQ4_NL_8_8"),
];

impl TensorType {
    /// Every type: plain floats, the older types, K, tables, codebooks, 4-bit floats, one and two bits.
    pub const ALL: &'static [Self] = &[
        Self::F32,
        Self::F16,
        Self::BF16,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q2_K,
        Self::Q3_K,
        Self::Q4_K,
        Self::Q5_K,
        Self::Q6_K,
        Self::IQ4_NL,
        Self::IQ4_XS,
        Self::IQ3_S,
        Self::IQ3_XXS,
        Self::IQ2_S,
        Self::IQ2_XS,
        Self::IQ2_XXS,
        Self::IQ1_M,
        Self::IQ1_S,
        Self::MXFP4,
        Self::NVFP4,
        Self::TQ2_0,
        Self::TQ1_0,
        Self::Q2_0,
        Self::Q1_0,
    ];

    /// ggml's id of the type, as stored in files.
    pub const fn id(self) -> u32 {
        self as u32
    }

    /// The type with this id, if it is supported.
    pub fn from_id(id: u32) -> Option<Self> {
        Self::ALL.iter().copied().find(|ty| ty.id() == id)
    }

    /// The error for a tensor with an id that [`from_id`](Self::from_id) does not know.
    pub(crate) fn unsupported(tensor: &str, id: u32) -> GgufError {
        let tensor = tensor.to_owned();
        match UNSUPPORTED.iter().find(|(known, _)| *known == id) {
            Some(&(_, name)) => GgufError::UnsupportedTensorType { tensor, name },
            None => GgufError::UnknownTensorType { tensor, id },
        }
    }

    /// Elements per block: 1, 32, 64, 128 or 256. Rows are whole blocks.
    pub const fn block_len(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::BF16 => 1,
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 | Self::Q8_0 | Self::IQ4_NL | Self::MXFP4 => 32,
            Self::NVFP4 | Self::Q2_0 => 64,
            Self::Q1_0 => 128,
            Self::Q2_K | Self::Q3_K | Self::Q4_K | Self::Q5_K | Self::Q6_K => 256,
            Self::IQ4_XS | Self::IQ3_S | Self::IQ3_XXS | Self::IQ2_S | Self::IQ2_XS | Self::IQ2_XXS => 256,
            Self::IQ1_M | Self::IQ1_S | Self::TQ2_0 | Self::TQ1_0 => 256,
        }
    }

    /// Bytes per block.
    pub const fn block_bytes(self) -> usize {
        match self {
            Self::F32 => size_of::<BlockF32>(),
            Self::F16 => size_of::<BlockF16>(),
            Self::BF16 => size_of::<BlockBf16>(),
            Self::Q4_0 => size_of::<BlockQ4_0>(),
            Self::Q4_1 => size_of::<BlockQ4_1>(),
            Self::Q5_0 => size_of::<BlockQ5_0>(),
            Self::Q5_1 => size_of::<BlockQ5_1>(),
            Self::Q8_0 => size_of::<BlockQ8_0>(),
            Self::Q2_K => size_of::<BlockQ2K>(),
            Self::Q3_K => size_of::<BlockQ3K>(),
            Self::Q4_K => size_of::<BlockQ4K>(),
            Self::Q5_K => size_of::<BlockQ5K>(),
            Self::Q6_K => size_of::<BlockQ6K>(),
            Self::IQ4_NL => size_of::<BlockIq4Nl>(),
            Self::IQ4_XS => size_of::<BlockIq4Xs>(),
            Self::IQ3_S => size_of::<BlockIq3S>(),
            Self::IQ3_XXS => size_of::<BlockIq3Xxs>(),
            Self::IQ2_S => size_of::<BlockIq2S>(),
            Self::IQ2_XS => size_of::<BlockIq2Xs>(),
            Self::IQ2_XXS => size_of::<BlockIq2Xxs>(),
            Self::IQ1_M => size_of::<BlockIq1M>(),
            Self::IQ1_S => size_of::<BlockIq1S>(),
            Self::MXFP4 => size_of::<BlockMxfp4>(),
            Self::NVFP4 => size_of::<BlockNvfp4>(),
            Self::TQ2_0 => size_of::<BlockTq2_0>(),
            Self::TQ1_0 => size_of::<BlockTq1_0>(),
            Self::Q2_0 => size_of::<BlockQ2_0>(),
            Self::Q1_0 => size_of::<BlockQ1_0>(),
        }
    }

    /// Bits per weight, scales included: 4.5 for `Q4_0`.
    pub const fn bits_per_weight(self) -> f32 {
        (self.block_bytes() * 8) as f32 / self.block_len() as f32
    }

    /// Upper-case name as in GGUF tools, such as `Q4_0`; also what `Display` writes.
    /// `FromStr` takes it in any case.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::BF16 => "BF16",
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q5_0 => "Q5_0",
            Self::Q5_1 => "Q5_1",
            Self::Q8_0 => "Q8_0",
            Self::Q2_K => "Q2_K",
            Self::Q3_K => "Q3_K",
            Self::Q4_K => "Q4_K",
            Self::Q5_K => "Q5_K",
            Self::Q6_K => "Q6_K",
            Self::IQ4_NL => "IQ4_NL",
            Self::IQ4_XS => "IQ4_XS",
            Self::IQ3_S => "IQ3_S",
            Self::IQ3_XXS => "IQ3_XXS",
            Self::IQ2_S => "IQ2_S",
            Self::IQ2_XS => "IQ2_XS",
            Self::IQ2_XXS => "IQ2_XXS",
            Self::IQ1_M => "IQ1_M",
            Self::IQ1_S => "IQ1_S",
            Self::MXFP4 => "MXFP4",
            Self::NVFP4 => "NVFP4",
            Self::TQ2_0 => "TQ2_0",
            Self::TQ1_0 => "TQ1_0",
            Self::Q2_0 => "Q2_0",
            Self::Q1_0 => "Q1_0",
        }
    }

    /// All names, for messages.
    pub(crate) fn names() -> String {
        Self::ALL.iter().map(|ty| ty.name()).collect::<Vec<_>>().join(", ")
    }

    /// Bytes of a row of `n` elements (`n` a multiple of [`block_len`](Self::block_len)).
    pub const fn row_bytes(self, n: usize) -> usize {
        n / self.block_len() * self.block_bytes()
    }

    /// Exact dequantisation of whole blocks: `src.len() == row_bytes(dst.len())`.
    ///
    /// # Panics
    /// When the lengths do not match.
    pub fn dequantize(self, src: &[u8], dst: &mut [f32]) {
        match self {
            Self::F32 => each(src, dst, BlockF32::dequantize),
            Self::F16 => match bytemuck::try_cast_slice::<u8, half::f16>(src) {
                // Several numbers per instruction where the machine can.
                Ok(halves) => halves.convert_to_f32_slice(dst),
                Err(_) => each(src, dst, BlockF16::dequantize),
            },
            Self::BF16 => each(src, dst, BlockBf16::dequantize),
            Self::Q4_0 => each(src, dst, BlockQ4_0::dequantize),
            Self::Q4_1 => each(src, dst, BlockQ4_1::dequantize),
            Self::Q5_0 => each(src, dst, BlockQ5_0::dequantize),
            Self::Q5_1 => each(src, dst, BlockQ5_1::dequantize),
            Self::Q8_0 => each(src, dst, BlockQ8_0::dequantize),
            Self::Q2_K => each(src, dst, BlockQ2K::dequantize),
            Self::Q3_K => each(src, dst, BlockQ3K::dequantize),
            Self::Q4_K => each(src, dst, BlockQ4K::dequantize),
            Self::Q5_K => each(src, dst, BlockQ5K::dequantize),
            Self::Q6_K => each(src, dst, BlockQ6K::dequantize),
            Self::IQ4_NL => each(src, dst, BlockIq4Nl::dequantize),
            Self::IQ4_XS => each(src, dst, BlockIq4Xs::dequantize),
            Self::IQ3_S => each(src, dst, BlockIq3S::dequantize),
            Self::IQ3_XXS => each(src, dst, BlockIq3Xxs::dequantize),
            Self::IQ2_S => each(src, dst, BlockIq2S::dequantize),
            Self::IQ2_XS => each(src, dst, BlockIq2Xs::dequantize),
            Self::IQ2_XXS => each(src, dst, BlockIq2Xxs::dequantize),
            Self::IQ1_M => each(src, dst, BlockIq1M::dequantize),
            Self::IQ1_S => each(src, dst, BlockIq1S::dequantize),
            Self::MXFP4 => each(src, dst, BlockMxfp4::dequantize),
            Self::NVFP4 => each(src, dst, BlockNvfp4::dequantize),
            Self::TQ2_0 => each(src, dst, BlockTq2_0::dequantize),
            Self::TQ1_0 => each(src, dst, BlockTq1_0::dequantize),
            Self::Q2_0 => each(src, dst, BlockQ2_0::dequantize),
            Self::Q1_0 => each(src, dst, BlockQ1_0::dequantize),
        }
    }
}

/// Dequantises block by block. `N` is the number of elements per block.
fn each<B: Block, const N: usize>(src: &[u8], dst: &mut [f32], dequantize: impl Fn(&B, &mut [f32; N])) {
    let blocks = cast::<B>(src);
    let len = dst.len();
    let (rows, rest) = dst.as_chunks_mut::<N>();
    assert!(
        blocks.len() == rows.len() && rest.is_empty(),
        "{} blocks of {} do not hold {len} values",
        blocks.len(),
        B::TYPE,
    );
    for (block, row) in blocks.iter().zip(rows) {
        dequantize(block, row);
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for TensorType {
    type Err = GgufError;

    fn from_str(name: &str) -> Result<Self> {
        let found = Self::ALL.iter().find(|ty| ty.name().eq_ignore_ascii_case(name));
        found.copied().ok_or_else(|| GgufError::UnknownTypeName { name: name.to_owned() })
    }
}
