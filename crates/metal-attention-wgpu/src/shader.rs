//! Makes the WGSL source of kernels: Jinja templates in `shaders/`, filled in with a kernel's constants and the
//! features of a device.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashSet};
use std::sync::OnceLock;

use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, State, Value, context};

/// A value for a template's variable.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Constant {
    /// A size or a number of things.
    Uint(u32),
    /// A real number, as its bits, so that keys can be compared.
    Float(u32),
    /// A condition.
    Bool(bool),
    /// A name or a list of names: a tensor type, a layout.
    Name(Cow<'static, str>),
}

impl From<u32> for Constant {
    fn from(v: u32) -> Self {
        Self::Uint(v)
    }
}

impl From<usize> for Constant {
    fn from(v: usize) -> Self {
        Self::Uint(u32::try_from(v).expect("sizes of a shader fit 32 bits"))
    }
}

impl From<f32> for Constant {
    fn from(v: f32) -> Self {
        Self::Float(v.to_bits())
    }
}

impl From<bool> for Constant {
    fn from(v: bool) -> Self {
        Self::Bool(v)
    }
}

impl From<&'static str> for Constant {
    fn from(v: &'static str) -> Self {
        Self::Name(v.into())
    }
}

impl From<String> for Constant {
    fn from(v: String) -> Self {
        Self::Name(v.into())
    }
}

impl Constant {
    fn value(&self) -> Value {
        match self {
            Self::Uint(v) => Value::from(*v),
            // In WGSL a float needs an exponent or a point; this form has all digits as well.
            Self::Float(v) => Value::from(format!("{:e}f", f32::from_bits(*v))),
            Self::Bool(v) => Value::from(*v),
            Self::Name(v) => Value::from(v.as_ref()),
        }
    }
}

/// Features of a device that shaders may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
#[allow(clippy::struct_excessive_bools)] // independent features
pub struct ShaderFeatures {
    /// Subgroup operations.
    pub subgroups: bool,
    /// Lanes of a subgroup if all subgroups of the device have the same size, else 0.
    pub subgroup_size: u32,
    /// Number of consecutive invocations that certainly share a subgroup, whatever its size; 0 if that is less than
    /// four.
    pub neighbours: u32,
    /// 16-bit floats.
    pub f16: bool,
    /// Dot products of four bytes in one instruction.
    pub integer_dot: bool,
    /// Matrix units: 16x16x16 products of 16-bit floats, accumulated in 32-bit floats.
    pub cooperative_f16: bool,
    /// Matrix units: 8x8x8 products of 32-bit floats.
    pub cooperative_f32: bool,
}

macro_rules! shaders {
    ($($path:literal),* $(,)?) => {
        /// All files of `shaders/`, as (name, text).
        const SOURCES: &[(&str, &str)] = &[$(($path, include_str!(concat!("../shaders/", $path)))),*];
    };
}

shaders![
    "activation.wgsl",
    "argmax.wgsl",
    "argmax_chunks.wgsl",
    "argmax_reduce.wgsl",
    "attention_gate.wgsl",
    "attention_inputs.wgsl",
    "batch.wgsl",
    "block_conv.wgsl",
    "buffer_copy.wgsl",
    "channel_gate.wgsl",
    "decode_attention.wgsl",
    "decode_attention_merge.wgsl",
    "decode_layers.wgsl",
    "decode_layers_attention.wgsl",
    "element.wgsl",
    "elementwise.wgsl",
    "embedding.wgsl",
    "experts_activation.wgsl",
    "experts_matvec.wgsl",
    "experts_output.wgsl",
    "experts_route.wgsl",
    "experts_sort.wgsl",
    "experts_sum.wgsl",
    "embedding_sum.wgsl",
    "ffn_silu.wgsl",
    "general_attention.wgsl",
    "head_products.wgsl",
    "kv_cache.wgsl",
    "kv_cache_copy.wgsl",
    "latent_inputs.wgsl",
    "logit_key.wgsl",
    "matmul.wgsl",
    "matmul_cooperative.wgsl",
    "matmul_input.wgsl",
    "matmul_output.wgsl",
    "matmul_split.wgsl",
    "matmul_tiled.wgsl",
    "matrix_loops.wgsl",
    "matvec.wgsl",
    "matvec_integer.wgsl",
    "norm.wgsl",
    "place_columns.wgsl",
    "prefill_attention.wgsl",
    "prefill_attention_cooperative.wgsl",
    "rate_floats.wgsl",
    "rate_matrix.wgsl",
    "rate_read.wgsl",
    "recurrent/convolution.wgsl",
    "recurrent/delta_rule.wgsl",
    "recurrent/gates.wgsl",
    "recurrent/group_norm.wgsl",
    "recurrent/heads.wgsl",
    "recurrent/low_rank.wgsl",
    "recurrent/mamba.wgsl",
    "recurrent/mamba2.wgsl",
    "recurrent/rwkv6.wgsl",
    "recurrent/rwkv7.wgsl",
    "recurrent/segments.wgsl",
    "recurrent/token_shift.wgsl",
    "reduce.wgsl",
    "repack.wgsl",
    "residual_add.wgsl",
    "rmsnorm.wgsl",
    "rope.wgsl",
    "rope_append.wgsl",
    "rope_apply.wgsl",
    "rotate_pairs.wgsl",
    "row_gate.wgsl",
    "row_sums.wgsl",
    "scale.wgsl",
    "segment_attention.wgsl",
    "segment_attention_cooperative.wgsl",
    "sequence_run.wgsl",
    "short_conv.wgsl",
    "streams_add.wgsl",
    "streams_mix.wgsl",
    "stretch.wgsl",
    "top_k.wgsl",
    "top_k_chunks.wgsl",
    "top_k_lists.wgsl",
    "types/bf16.wgsl",
    "types/f16.wgsl",
    "types/f32.wgsl",
    "types/fp4.wgsl",
    "types/grid8.wgsl",
    "types/inputs.wgsl",
    "types/inputs32.wgsl",
    "types/iq1.wgsl",
    "types/iq1_m.wgsl",
    "types/iq1_s.wgsl",
    "types/iq2.wgsl",
    "types/iq2_s.wgsl",
    "types/iq2_xs.wgsl",
    "types/iq2_xxs.wgsl",
    "types/iq3_s.wgsl",
    "types/iq3_xxs.wgsl",
    "types/iq4.wgsl",
    "types/iq4_nl.wgsl",
    "types/iq4_xs.wgsl",
    "types/mxfp4.wgsl",
    "types/nibbles.wgsl",
    "types/numbers.wgsl",
    "types/nvfp4.wgsl",
    "types/packed.wgsl",
    "types/q1_0.wgsl",
    "types/q2_0.wgsl",
    "types/q2_k.wgsl",
    "types/q3_k.wgsl",
    "types/q4_0.wgsl",
    "types/q4_1.wgsl",
    "types/q4_k.wgsl",
    "types/q5_0.wgsl",
    "types/q5_1.wgsl",
    "types/q5_k.wgsl",
    "types/q6_k.wgsl",
    "types/q8_0.wgsl",
    "types/signs.wgsl",
    "types/tq1_0.wgsl",
    "types/tq2_0.wgsl",
    "types/two_bits.wgsl",
    "types/unit.wgsl",
    "types/words.wgsl",
];

/// The parsed templates of all files.
fn templates() -> &'static Environment<'static> {
    static TEMPLATES: OnceLock<Environment<'static>> = OnceLock::new();
    TEMPLATES.get_or_init(|| {
        let mut env = Environment::new();
        env.set_undefined_behavior(minijinja::UndefinedBehavior::Strict);
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        env.set_syntax(syntax.expect("plain Jinja syntax"));
        for &(name, text) in SOURCES {
            env.add_template(name, text).expect("the templates of this crate parse");
        }
        env.add_function("matrix", matrix_functions);
        env
    })
}

/// Declarations of the file `types/{ty}.wgsl` for one of several matrices that a kernel reads from one buffer `w`.
/// Every name gets the prefix `prefix`, and the matrix begins at word `{prefix}_at` of `w`. The template function
/// `matrix` of `decode_layers.wgsl`.
fn matrix_functions(state: &State, prefix: &str, ty: &str, n_in: u32, n_rows: u32) -> Result<String, minijinja::Error> {
    let template = state.env().get_template(&format!("types/{ty}.wgsl"))?;
    let integer = state.lookup("integer");
    Ok(scoped(&template.render(context! { n_in, n_rows, integer, in_blocks => false, scoped => true })?, prefix))
}

/// `source` with `prefix` before every name that it declares at module scope, and `{prefix}_at` added to every index of
/// `w`.
fn scoped(source: &str, prefix: &str) -> String {
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let words: Vec<&str> = source.split_inclusive(|c| !is_word(c)).collect();
    let names: HashSet<&str> = words
        .windows(2)
        .filter(|pair| matches!(pair[0], "fn " | "const " | "struct "))
        .map(|pair| pair[1].trim_end_matches(|c| !is_word(c)))
        .collect();
    let mut text = String::new();
    for word in words {
        if word == "w[" {
            text.extend(["w[", prefix, "_at + "]);
            continue;
        }
        if names.contains(word.trim_end_matches(|c| !is_word(c))) {
            text += prefix;
            text.push('_');
        }
        text += word;
    }
    text
}

/// The WGSL source of the file `{kernel}.wgsl` with `constants`, for a device with `features`.
///
/// # Panics
/// If the template uses a variable that is not among the constants: a defect of the kernel's Rust function.
pub fn wgsl(kernel: &str, constants: &[(&'static str, Constant)], features: ShaderFeatures) -> String {
    let mut values: BTreeMap<&str, Value> = constants.iter().map(|(name, c)| (*name, c.value())).collect();
    values.insert("scoped", false.into());
    values.entry("integer").or_insert(false.into());
    values.entry("in_blocks").or_insert(false.into());
    values.insert("subgroups", features.subgroups.into());
    values.insert("subgroup_size", features.subgroup_size.into());
    values.insert("neighbours", features.neighbours.into());
    values.insert("f16", features.f16.into());
    values.insert("cooperative_f16", features.cooperative_f16.into());
    values.insert("cooperative_f32", features.cooperative_f32.into());
    let template = templates().get_template(&format!("{kernel}.wgsl")).expect("kernels have a file");
    template.render(values).unwrap_or_else(|e| {
        let cause = std::error::Error::source(&e).map(|e| format!(": {e}")).unwrap_or_default();
        panic!("{kernel}.wgsl: {e}{cause}")
    })
}
