//! Which type each tensor of a quantised file gets: the rules of llama.cpp's
//! quantiser, without its mixtures (the `_M` files).

use metal_attention::gguf::{Metadata, TensorType};

/// Flags that choose types.
#[derive(clap::Args)]
pub struct TypeArgs {
    /// Type of the embedding table
    #[arg(long, value_name = "TYPE")]
    embd_type: Option<TensorType>,

    /// Type of the output head; of the embedding table, too, where the model has one table for both
    #[arg(long, value_name = "TYPE")]
    output_type: Option<TensorType>,

    /// Give the embedding table and the output head the same type as the other matrices
    #[arg(long)]
    pure: bool,
}

/// Gives every tensor of a file its type.
pub struct TensorTypes<'a> {
    /// The type of most matrices.
    pub base: TensorType,
    /// Exceptions the user asked for.
    pub args: &'a TypeArgs,
    /// Whether the embedding table is also the output head.
    pub tied: bool,
}

impl TensorTypes<'_> {
    /// The type for the matrix `name` with rows of `row_len` elements.
    ///
    /// The output head gets `Q6_K` where the others get fewer bits; rows that are not whole blocks get the nearest type
    /// that takes them.
    pub fn matrix(&self, name: &str, row_len: usize) -> TensorType {
        let is_embd = name == "token_embd.weight";
        let is_head = name == "output.weight" || (is_embd && self.tied);
        let asked_embd = self.args.embd_type.filter(|_| is_embd);
        let asked = asked_embd.or(self.args.output_type.filter(|_| is_head));
        let wanted = match asked {
            Some(ty) => ty,
            None if is_head && !self.args.pure && is_quantized(self.base) => head_type(self.base, row_len),
            None => self.base,
        };
        fitting(wanted, row_len)
    }

    /// Writes down in `metadata` what the file consists of.
    pub fn describe(&self, metadata: &mut Metadata) {
        metadata.set("general.quantization_version", 2u32);
        metadata.set("general.file_type", file_type(self.base));
    }
}

fn is_quantized(ty: TensorType) -> bool {
    ty.block_len() > 1
}

fn head_type(base: TensorType, row_len: usize) -> TensorType {
    if base == TensorType::Q8_0 || !row_len.is_multiple_of(base.block_len()) {
        TensorType::Q8_0
    } else {
        TensorType::Q6_K
    }
}

/// `ty`, or the type that takes its place where rows are not whole blocks of it.
fn fitting(ty: TensorType, row_len: usize) -> TensorType {
    let fits = |ty: TensorType| row_len.is_multiple_of(ty.block_len());
    if fits(ty) {
        return ty;
    }
    let smaller = match ty {
        TensorType::Q2_K | TensorType::Q3_K => TensorType::Q4_0,
        TensorType::TQ2_0 | TensorType::TQ1_0 | TensorType::Q2_0 => TensorType::Q4_0,
        TensorType::IQ3_S | TensorType::IQ3_XXS | TensorType::IQ2_S | TensorType::IQ2_XS => TensorType::IQ4_NL,
        TensorType::IQ4_XS | TensorType::IQ2_XXS | TensorType::IQ1_M | TensorType::IQ1_S => TensorType::IQ4_NL,
        TensorType::Q4_K => TensorType::Q5_0,
        TensorType::Q5_K => TensorType::Q5_1,
        TensorType::Q6_K => TensorType::Q8_0,
        TensorType::Q1_0 | TensorType::NVFP4 => TensorType::Q4_0,
        other => other,
    };
    if fits(smaller) { smaller } else { TensorType::F16 }
}

/// `general.file_type`: ggml's number for a file whose matrices are mostly of one type.
fn file_type(ty: TensorType) -> u32 {
    match ty {
        TensorType::F32 => 0,
        TensorType::F16 => 1,
        TensorType::Q4_0 => 2,
        TensorType::Q4_1 => 3,
        TensorType::Q8_0 => 7,
        TensorType::Q5_0 => 8,
        TensorType::Q5_1 => 9,
        TensorType::Q2_K => 10,
        TensorType::Q3_K => 11,
        TensorType::Q4_K => 14,
        TensorType::Q5_K => 16,
        TensorType::Q6_K => 18,
        TensorType::IQ4_NL => 25,
        TensorType::IQ4_XS => 30,
        TensorType::BF16 => 32,
        TensorType::IQ2_XXS => 19,
        TensorType::IQ2_XS => 20,
        TensorType::IQ3_XXS => 23,
        TensorType::IQ1_S => 24,
        TensorType::IQ3_S => 26,
        TensorType::IQ2_S => 28,
        TensorType::IQ1_M => 31,
        TensorType::TQ1_0 => 36,
        TensorType::TQ2_0 => 37,
        TensorType::MXFP4 => 38,
        TensorType::NVFP4 => 39,
        TensorType::Q1_0 => 40,
        TensorType::Q2_0 => 41,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use TensorType::{BF16, F16, IQ4_NL, IQ4_XS, Q2_K, Q4_0, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0};

    const PLAIN: TypeArgs = TypeArgs { embd_type: None, output_type: None, pure: false };

    fn types(base: TensorType, args: &TypeArgs, tied: bool) -> impl Fn(&str, usize) -> TensorType {
        move |name, row_len| TensorTypes { base, args, tied }.matrix(name, row_len)
    }

    #[test]
    fn the_output_head_gets_more_bits() {
        let tied = types(Q4_0, &PLAIN, true);
        assert_eq!(tied("blk.0.attn_q.weight", 576), Q4_0);
        assert_eq!(tied("token_embd.weight", 576), Q8_0);
        assert_eq!(tied("token_embd.weight", 2048), Q6_K);
        let untied = types(Q4_0, &PLAIN, false);
        assert_eq!(untied("token_embd.weight", 2048), Q4_0);
        assert_eq!(untied("output.weight", 2048), Q6_K);
        assert_eq!(types(Q4_K, &PLAIN, true)("token_embd.weight", 576), Q8_0);
        assert_eq!(types(Q8_0, &PLAIN, true)("token_embd.weight", 2048), Q8_0);
        assert_eq!(types(BF16, &PLAIN, true)("token_embd.weight", 2048), BF16);
    }

    #[test]
    fn flags_come_before_the_rules() {
        let args = TypeArgs { embd_type: Some(F16), output_type: Some(Q5_0), pure: false };
        assert_eq!(types(Q4_0, &args, true)("token_embd.weight", 64), F16);
        assert_eq!(types(Q4_0, &args, false)("output.weight", 64), Q5_0);
        let output = TypeArgs { embd_type: None, output_type: Some(Q5_0), pure: true };
        assert_eq!(types(Q4_0, &output, true)("token_embd.weight", 64), Q5_0);
        let pure = TypeArgs { pure: true, ..PLAIN };
        assert_eq!(types(Q4_0, &pure, true)("token_embd.weight", 64), Q4_0);
    }

    #[test]
    fn rows_that_are_not_whole_blocks_get_another_type() {
        for (ty, instead) in [(Q2_K, Q4_0), (IQ4_XS, IQ4_NL), (Q4_K, Q5_0), (Q5_K, Q5_1), (Q6_K, Q8_0), (Q5_0, Q5_0)] {
            assert_eq!(fitting(ty, 576), instead);
            assert_eq!(fitting(ty, 512), ty);
            assert_eq!(fitting(ty, 44), F16);
        }
        assert_eq!(fitting(BF16, 43), BF16);
    }
}
