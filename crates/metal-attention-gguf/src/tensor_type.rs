//! The table of tensor types: ids, block lengths, block formats and names, and dequantisation by type.

use std::fmt;
use std::str::FromStr;

use half::slice::HalfFloatSliceExt;

use crate::blocks::{
    BlockBf16, BlockF16, BlockF32, BlockFormat, BlockI64, BlockIq1M, BlockIq1S, BlockIq2S, BlockIq2Xs, BlockIq2Xxs,
    BlockIq3S, BlockIq3Xxs, BlockIq4Nl, BlockIq4Xs, BlockMxfp4, BlockNvfp4, BlockQ1_0, BlockQ2_0, BlockQ2K, BlockQ3K,
    BlockQ4_0, BlockQ4_1, BlockQ4K, BlockQ5_0, BlockQ5_1, BlockQ5K, BlockQ6K, BlockQ8_0, BlockTq1_0, BlockTq2_0, cast,
};
use crate::{GgufError, Result};

/// Declares [`TensorType`] from its table.
macro_rules! types {
    (
        weights { $($weight:ident = $id:literal, $len:literal in $block:ident;)* }
        integers { $($integer:ident = $integer_id:literal, $integer_len:literal in $integer_block:ident;)* }
    ) => {
        /// A tensor type: how the numbers of a tensor are stored. The discriminants are ggml's type ids.
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
            $($weight = $id,)*
            $($integer = $integer_id,)*
        }

        impl TensorType {
            /// All types of weights: floats, the legacy types (`Q4_0` to `Q8_0`), K-quants, `IQ4`, codebooks, 4-bit floats, one and
            /// two bits.
            pub const ALL: &'static [Self] = &[$(Self::$weight,)*];

            /// The types of whole numbers, which no kernel multiplies.
            pub const INTEGERS: &'static [Self] = &[$(Self::$integer,)*];

            /// Elements of a block: 1, 32, 64, 128 or 256. Rows are whole blocks.
            pub const fn block_len(self) -> usize {
                #[allow(clippy::match_same_arms)] // a table
                match self {
                    $(Self::$weight => $len,)*
                    $(Self::$integer => $integer_len,)*
                }
            }

            /// Bytes of a block.
            pub const fn block_bytes(self) -> usize {
                match self {
                    $(Self::$weight => size_of::<$block>(),)*
                    $(Self::$integer => size_of::<$integer_block>(),)*
                }
            }

            /// The upper-case name as in GGUF tools, such as `Q4_0`; `Display` writes it, and `FromStr` reads it in any case.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$weight => stringify!($weight),)*
                    $(Self::$integer => stringify!($integer),)*
                }
            }

            /// Dequantises whole blocks from `src` to `dst`; `src.len() == row_bytes(dst.len())`. The results agree bit for bit
            /// with ggml's reference code. Whole numbers are rounded.
            ///
            /// # Panics
            /// When the lengths do not match.
            pub fn dequantize(self, src: &[u8], dst: &mut [f32]) {
                if let (Self::F16, Ok(halves)) = (self, bytemuck::try_cast_slice::<u8, half::f16>(src)) {
                    // The conversion of a slice uses vector instructions.
                    return halves.convert_to_f32_slice(dst);
                }
                match self {
                    $(Self::$weight => each(src, dst, $block::dequantize),)*
                    $(Self::$integer => each(src, dst, $integer_block::dequantize),)*
                }
            }
        }
    };
}

types! {
    weights {
        // Name = id, elements of a block in the block format.
        F32 = 0, 1 in BlockF32;
        F16 = 1, 1 in BlockF16;
        BF16 = 30, 1 in BlockBf16;
        Q4_0 = 2, 32 in BlockQ4_0;
        Q4_1 = 3, 32 in BlockQ4_1;
        Q5_0 = 6, 32 in BlockQ5_0;
        Q5_1 = 7, 32 in BlockQ5_1;
        Q8_0 = 8, 32 in BlockQ8_0;
        Q2_K = 10, 256 in BlockQ2K;
        Q3_K = 11, 256 in BlockQ3K;
        Q4_K = 12, 256 in BlockQ4K;
        Q5_K = 13, 256 in BlockQ5K;
        Q6_K = 14, 256 in BlockQ6K;
        IQ4_NL = 20, 32 in BlockIq4Nl;
        IQ4_XS = 23, 256 in BlockIq4Xs;
        IQ3_S = 21, 256 in BlockIq3S;
        IQ3_XXS = 18, 256 in BlockIq3Xxs;
        IQ2_S = 22, 256 in BlockIq2S;
        IQ2_XS = 17, 256 in BlockIq2Xs;
        IQ2_XXS = 16, 256 in BlockIq2Xxs;
        IQ1_M = 29, 256 in BlockIq1M;
        IQ1_S = 19, 256 in BlockIq1S;
        MXFP4 = 39, 32 in BlockMxfp4;
        NVFP4 = 40, 64 in BlockNvfp4;
        TQ2_0 = 35, 256 in BlockTq2_0;
        TQ1_0 = 34, 256 in BlockTq1_0;
        Q2_0 = 42, 64 in BlockQ2_0;
        Q1_0 = 41, 128 in BlockQ1_0;
    }
    integers {
        I64 = 27, 1 in BlockI64;
    }
}

/// Types of ggml that this crate does not read, so that an error can name them.
const UNSUPPORTED: [(u32, &str); 14] = [
    (4, "Q4_2"),
    (5, "Q4_3"),
    (9, "Q8_1"),
    (15, "Q8_K"),
    (24, "I8"),
    (25, "I16"),
    (26, "I32"),
    (28, "F64"),
    (31, "Q4_0_4_4"),
    (32, "Q4_0_4_8"),
    (33, "Q4_0_8_8"),
    (36, "IQ4_NL_4_4"),
    (37, "IQ4_NL_4_8"),
    (38, "IQ4_NL_8_8"),
];

impl TensorType {
    /// ggml's id of the type, as stored in files.
    pub const fn id(self) -> u32 {
        self as u32
    }

    /// The type with this id; `None` if it is not supported.
    pub fn from_id(id: u32) -> Option<Self> {
        Self::ALL.iter().chain(Self::INTEGERS).copied().find(|ty| ty.id() == id)
    }

    /// Whether it holds whole numbers, not weights.
    pub fn is_integer(self) -> bool {
        Self::INTEGERS.contains(&self)
    }

    /// The error for a tensor with an id that is not supported.
    pub(crate) fn unsupported(tensor: &str, id: u32) -> GgufError {
        let tensor = tensor.to_owned();
        match UNSUPPORTED.iter().find(|(known, _)| *known == id) {
            Some(&(_, name)) => GgufError::UnsupportedTensorType { tensor, name },
            None => GgufError::UnknownTensorType { tensor, id },
        }
    }

    /// Bits per weight, scales included: 4.5 for `Q4_0`.
    pub const fn bits_per_weight(self) -> f32 {
        (self.block_bytes() * 8) as f32 / self.block_len() as f32
    }

    /// All names, for messages.
    pub(crate) fn names() -> String {
        Self::ALL.iter().map(|ty| ty.name()).collect::<Vec<_>>().join(", ")
    }

    /// Bytes of `n` elements, where `n` is a multiple of [`block_len`](Self::block_len).
    pub const fn row_bytes(self, n: usize) -> usize {
        n / self.block_len() * self.block_bytes()
    }
}

/// Dequantises all blocks of `src` with `dequantize`. `N` is the number of elements of a block.
fn each<B: BlockFormat, const N: usize>(src: &[u8], dst: &mut [f32], dequantize: impl Fn(&B, &mut [f32; N])) {
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
