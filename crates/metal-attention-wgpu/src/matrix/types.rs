//! Properties of tensor types that kernels are chosen by. The code that reads each type is its file in
//! `shaders/types/`.

use metal_attention_gguf::TensorType;

/// The ways in which a type's shader file delivers weights as 8-bit integers for integer dot products; see
/// `types/packed.wgsl`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum IntegerCodes {
    /// Not at all: weights are dequantised to floats.
    No,
    /// A unit of 8 weights at a time.
    Units,
    /// Also a quantisation block of 32 weights at a time, read as vectors of words.
    Vectors,
}

/// The properties of one tensor type.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TypeInfo {
    /// Its name in kernels' names, and that of its file in `shaders/types/`.
    pub(crate) name: &'static str,
    /// Words that a lane reads for a unit of 8 weights, scales included.
    pub(crate) words: usize,
    /// The way in which its weights become 8-bit integers.
    pub(crate) integer_codes: IntegerCodes,
    /// Whether weights can be far beyond the range of 16-bit floats, so that matrix units would overflow. (A scale of
    /// `MXFP4` could make them so; those of real models do not.)
    pub(crate) wide: bool,
}

/// The properties of `ty`.
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
        TensorType::I64 => panic!("weights are no whole numbers, which loading checks"),
    }
}

/// The name of `ty` in kernels' names.
pub(crate) const fn type_name(ty: TensorType) -> &'static str {
    type_info(ty).name
}
