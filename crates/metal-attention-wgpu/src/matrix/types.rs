//! What kernels need to know of a tensor type besides its file in `shaders/types/`.

use metal_attention_gguf::TensorType;

/// Whether the file of a type has weights as whole numbers of a byte, as `types/packed.wgsl` wants them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum IntegerCodes {
    /// Only as floats.
    No,
    /// Those of a unit of 8.
    Units,
    /// Those of a block of 32, too, read as vectors of words.
    Vectors,
}

/// A type, to the kernels.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TypeInfo {
    /// Its name in names of kernels and of files in `shaders/types/`.
    pub(crate) name: &'static str,
    /// Words that a lane fetches for a unit of 8 elements, scales included.
    pub(crate) words: usize,
    /// Whether its file has whole numbers of a byte.
    pub(crate) integer_codes: IntegerCodes,
    /// Whether weights can be far beyond the range of 16-bit floats. (A scale of `MXFP4` could make them so; those of
    /// models do not.)
    pub(crate) wide: bool,
}

/// The table of types.
pub(crate) const fn type_info(ty: TensorType) -> TypeInfo {
    match ty {
        TensorType::F32 => TypeInfo { name: "f32", words: 8, integer_codes: IntegerCodes::No, wide: true },
        TensorType::F16 => TypeInfo { name: "f16", words: 4, integer_codes: IntegerCodes::No, wide: false },
        TensorType::BF16 => TypeInfo { name: "bf16", words: 4, integer_codes: IntegerCodes::No, wide: true },
        TensorType::Q4_0 => TypeInfo { name: "q4_0", words: 2, integer_codes: IntegerCodes::Vectors, wide: false },
        TensorType::Q4_1 => TypeInfo { name: "q4_1", words: 2, integer_codes: IntegerCodes::Vectors, wide: false },
        TensorType::Q5_0 => TypeInfo { name: "q5_0", words: 3, integer_codes: IntegerCodes::Vectors, wide: false },
        TensorType::Q5_1 => TypeInfo { name: "q5_1", words: 3, integer_codes: IntegerCodes::Vectors, wide: false },
        TensorType::Q8_0 => TypeInfo { name: "q8_0", words: 3, integer_codes: IntegerCodes::Vectors, wide: false },
        TensorType::Q2_K => TypeInfo { name: "q2_k", words: 3, integer_codes: IntegerCodes::Vectors, wide: false },
        TensorType::Q3_K => TypeInfo { name: "q3_k", words: 4, integer_codes: IntegerCodes::Vectors, wide: false },
        TensorType::Q4_K => TypeInfo { name: "q4_k", words: 3, integer_codes: IntegerCodes::Vectors, wide: false },
        TensorType::Q5_K => TypeInfo { name: "q5_k", words: 4, integer_codes: IntegerCodes::Vectors, wide: false },
        TensorType::Q6_K => TypeInfo { name: "q6_k", words: 4, integer_codes: IntegerCodes::Vectors, wide: false },
        TensorType::IQ4_NL => TypeInfo { name: "iq4_nl", words: 2, integer_codes: IntegerCodes::No, wide: false },
        TensorType::IQ4_XS => TypeInfo { name: "iq4_xs", words: 3, integer_codes: IntegerCodes::No, wide: false },
        TensorType::IQ3_S => TypeInfo { name: "iq3_s", words: 3, integer_codes: IntegerCodes::Units, wide: false },
        TensorType::IQ3_XXS => TypeInfo { name: "iq3_xxs", words: 4, integer_codes: IntegerCodes::Units, wide: false },
        TensorType::IQ2_S => TypeInfo { name: "iq2_s", words: 5, integer_codes: IntegerCodes::Units, wide: false },
        TensorType::IQ2_XS => TypeInfo { name: "iq2_xs", words: 3, integer_codes: IntegerCodes::Units, wide: false },
        TensorType::IQ2_XXS => TypeInfo { name: "iq2_xxs", words: 4, integer_codes: IntegerCodes::Units, wide: false },
        TensorType::IQ1_M => TypeInfo { name: "iq1_m", words: 4, integer_codes: IntegerCodes::Units, wide: false },
        TensorType::IQ1_S => TypeInfo { name: "iq1_s", words: 4, integer_codes: IntegerCodes::Units, wide: false },
        TensorType::MXFP4 => TypeInfo { name: "mxfp4", words: 2, integer_codes: IntegerCodes::Vectors, wide: false },
        TensorType::NVFP4 => TypeInfo { name: "nvfp4", words: 2, integer_codes: IntegerCodes::Vectors, wide: false },
        TensorType::TQ2_0 => TypeInfo { name: "tq2_0", words: 2, integer_codes: IntegerCodes::Units, wide: false },
        TensorType::TQ1_0 => TypeInfo { name: "tq1_0", words: 2, integer_codes: IntegerCodes::Units, wide: false },
        TensorType::Q2_0 => TypeInfo { name: "q2_0", words: 2, integer_codes: IntegerCodes::Units, wide: false },
        TensorType::Q1_0 => TypeInfo { name: "q1_0", words: 2, integer_codes: IntegerCodes::Units, wide: false },
    }
}

/// The name of `ty` in names of kernels.
pub(crate) const fn type_name(ty: TensorType) -> &'static str {
    type_info(ty).name
}
