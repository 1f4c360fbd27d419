//! Small models with random weights, as GGUF files. `tests/data/models` has their GGUF headers and the distribution of each
//! tensor's values; the weights are generated from seeds, with the same bits on every machine. `tools/reference-models`
//! writes those recipes, and llama.cpp's logits of the models to `tests/data/reference`.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use half::f16;
use metal_attention_gguf::TensorType;
use serde::Deserialize;

/// GGUF files by name, such as `qwen3.gguf`.
pub type Files = BTreeMap<String, Vec<u8>>;

/// A model in each of three K-quants, such as `Q4_K.gguf`: the models of `quants.json`.
pub fn quants() -> &'static Files {
    static FILES: OnceLock<Files> = OnceLock::new();
    FILES.get_or_init(|| generate("quants"))
}

/// Smaller models of nine other tensor types, with one layer, and feed-forwards of 256 where quantisation blocks have 32
/// values: the models of `small-quants.json`.
pub fn small_quants() -> &'static Files {
    static FILES: OnceLock<Files> = OnceLock::new();
    FILES.get_or_init(|| generate("small-quants"))
}

/// Llama and Qwen models, and one for each kind of RoPE scaling, such as `qwen3.gguf`: the models of `architectures.json`.
pub fn architectures() -> &'static Files {
    static FILES: OnceLock<Files> = OnceLock::new();
    FILES.get_or_init(|| generate("architectures"))
}

/// A model of each other architecture, such as `gemma3.gguf`: the models of `more-architectures.json`.
pub fn more_architectures() -> &'static Files {
    static FILES: OnceLock<Files> = OnceLock::new();
    FILES.get_or_init(|| generate("more-architectures"))
}

/// A model with prediction heads, such as `qwen35.gguf`, of those in `tests/data/heads`.
pub fn with_heads(name: &str) -> Vec<u8> {
    crate::unpacked(&format!("tests/data/heads/{name}"))
}

/// A target such as `eagle3.gguf`, or a drafter for one, such as `eagle3-drafter.gguf`, of those in `tests/data/drafters`.
pub fn with_drafters(name: &str) -> Vec<u8> {
    crate::unpacked(&format!("tests/data/drafters/{name}"))
}

/// A target and two draft models for it, one of them with another vocabulary: the models of `draft-models.json`. Their weights are
/// in the file, not generated.
pub fn draft_models() -> &'static Files {
    static FILES: OnceLock<Files> = OnceLock::new();
    FILES.get_or_init(|| generate("draft-models"))
}

/// The names of the collections that `tools/reference-models` writes.
pub const COLLECTIONS: [&str; 4] = ["quants", "small-quants", "architectures", "more-architectures"];

/// Generates the models of one collection.
pub fn generate(collection: &str) -> Files {
    let recipes: Recipes =
        serde_json::from_slice(&crate::unpacked(&format!("tests/data/models/{collection}.json"))).expect("recipes");
    let file = |(name, recipe): (String, FileRecipe)| {
        let bytes = recipe.file(&name);
        (name, bytes)
    };
    recipes.models.into_iter().map(file).collect()
}

/// A file of `tests/data/models`: the recipes of a collection's models by file name.
#[derive(Deserialize)]
struct Recipes {
    models: BTreeMap<String, FileRecipe>,
}

/// The recipe of one GGUF file.
#[derive(Deserialize)]
struct FileRecipe {
    /// The GGUF header up to the tensors' data, in hexadecimal.
    header: String,
    /// Changes the random weights.
    #[serde(default)]
    seed: u64,
    /// The recipes of the tensors in the order of their offsets.
    tensors: Vec<TensorRecipe>,
}

/// The recipe of one tensor's data.
#[derive(Deserialize)]
struct TensorRecipe {
    /// Bytes from the end of the header to the tensor's data.
    offset: usize,
    /// The name of the tensor type, such as `Q4_K`.
    #[serde(rename = "type")]
    ty: String,
    /// Number of values.
    n: usize,
    /// The distribution of the values.
    values: Values,
}

/// The values of a tensor, or their distribution.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Values {
    /// These values, in order.
    Exact(Vec<f64>),
    /// Uniform between two limits.
    Uniform([f64; 2]),
    /// Normal with this mean and standard deviation. Quantised tensors ignore the mean, which is 0.
    Normal([f64; 2]),
}

impl FileRecipe {
    /// Generates the file. Its weights depend on its name.
    fn file(&self, name: &str) -> Vec<u8> {
        let digits = self.header.as_bytes().chunks(2);
        let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).expect("digits"), 16).expect("a byte");
        let mut file: Vec<u8> = digits.map(byte).collect();
        let start = file.len();
        for tensor in &self.tensors {
            file.resize(start + tensor.offset, 0);
            file.extend(tensor.bytes(&mut Random::new(&format!("{name} {}", tensor.offset), self.seed)));
        }
        file
    }
}

impl TensorRecipe {
    /// Generates the tensor's data in its type.
    fn bytes(&self, random: &mut Random) -> Vec<u8> {
        let quantised = Quantised::of(&self.ty);
        match (&self.values, quantised) {
            (Values::Normal([_, deviation]), Some(quantised)) => quantised.bytes(self.n, *deviation, random),
            (_, Some(_)) => panic!("{}: random codes have a standard deviation", self.ty),
            (Values::Exact(values), None) => values.iter().flat_map(|&x| self.stored(x)).collect(),
            (&Values::Uniform([low, high]), None) => {
                (0..self.n).flat_map(|_| self.stored(low + (high - low) * random.unit())).collect()
            }
            (&Values::Normal([mean, deviation]), None) => {
                (0..self.n).flat_map(|_| self.stored(mean + deviation * random.normal())).collect()
            }
        }
    }

    /// The bytes of one value.
    fn stored(&self, x: f64) -> Vec<u8> {
        match self.ty.as_str() {
            "F32" => (x as f32).to_le_bytes().to_vec(),
            "F16" => f16::from_f64(x).to_le_bytes().to_vec(),
            "I32" => (x as i32).to_le_bytes().to_vec(),
            "I64" => (x as i64).to_le_bytes().to_vec(),
            other => panic!("{other}: no type of single values"),
        }
    }
}

/// A tensor type of quantisation blocks, which are filled with random codes.
struct Quantised {
    /// Values of a block.
    n_values: usize,
    /// Bytes of a block.
    n_bytes: usize,
    scale: Scale,
    /// The standard deviation of dequantised random codes with scale 1.
    deviation: f64,
}

/// Offsets of a block's scale, in bytes.
enum Scale {
    /// A 16-bit float.
    Half(usize),
    /// A 16-bit float, and the offset of the block's minimum, another one, which is this multiple of the scale, so that the
    /// values' mean is zero.
    HalfAndMinimum(usize, usize, f64),
    /// An 8-bit exponent of a power of two.
    Exponent(usize),
}

impl Quantised {
    /// `None` for types without quantisation blocks.
    fn of(ty: &str) -> Option<Self> {
        use Scale::{Exponent, Half, HalfAndMinimum};
        let (scale, deviation) = match ty {
            "F32" | "F16" | "I32" | "I64" => return None,
            "Q4_0" => (Half(0), 4.61),
            "Q4_1" => (HalfAndMinimum(0, 2, -7.5), 4.61),
            "Q5_0" => (Half(0), 9.23),
            "Q5_1" => (HalfAndMinimum(0, 2, -15.5), 9.23),
            "Q8_0" => (Half(0), 73.9),
            "Q2_K" => (HalfAndMinimum(80, 82, 1.5), 14.0),
            "Q3_K" => (Half(108), 42.6),
            "Q4_K" => (HalfAndMinimum(0, 2, 7.5), 253.0),
            "Q5_K" => (HalfAndMinimum(0, 2, 15.5), 515.0),
            "Q6_K" => (Half(208), 1366.0),
            "IQ4_NL" => (Half(0), 69.0),
            "IQ4_XS" => (Half(0), 1280.0),
            "MXFP4" => (Exponent(0), 3.1),
            other => panic!("{other}: no random codes of this type"),
        };
        let known = TensorType::ALL.iter().find(|known| known.name() == ty).expect("a type of GGUF files");
        Some(Self { n_values: known.block_len(), n_bytes: known.block_bytes(), scale, deviation })
    }

    /// `n` values in blocks, with the standard deviation `deviation`.
    fn bytes(&self, n: usize, deviation: f64, random: &mut Random) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(n / self.n_values * self.n_bytes);
        for _ in 0..n / self.n_values {
            let start = bytes.len();
            bytes.extend((0..self.n_bytes).map(|_| (random.next() >> 56) as u8));
            let block = &mut bytes[start..];
            // Scales differ from block to block.
            let d = deviation / self.deviation * (0.75 + 0.5 * random.unit());
            let mut put = |at: usize, x: f64| block[at..at + 2].copy_from_slice(&f16::from_f64(x).to_le_bytes());
            match self.scale {
                Scale::Half(at) => put(at, d),
                Scale::HalfAndMinimum(at, minimum, multiple) => {
                    put(at, d);
                    put(minimum, multiple * d);
                }
                Scale::Exponent(at) => block[at] = (127.0 + d.log2().round()) as u8,
            }
        }
        bytes
    }
}

/// Random numbers by splitmix64. Only integers and sums are used, so that every machine generates the same.
struct Random(u64);

impl Random {
    /// Starts from the FNV-1a hash of `name`.
    fn new(name: &str, seed: u64) -> Self {
        let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
        Self(name.bytes().fold(0xcbf2_9ce4_8422_2325, step) ^ seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number in [0, 1).
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// A number with mean 0 and standard deviation 1, nearly normal: the sum of four 16-bit numbers.
    fn normal(&mut self) -> f64 {
        let bits = self.next();
        let sum: u64 = (0..4).map(|i| (bits >> (16 * i)) & 0xFFFF).sum();
        (sum as f64 / 65536.0 - 2.0) * 3_f64.sqrt()
    }
}
