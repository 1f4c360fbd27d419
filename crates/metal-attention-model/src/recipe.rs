//! Recipes: which tensor of a quantised file gets which type.
//!
//! The names and rules are those of llama.cpp's quantiser (`llama_tensor_get_type`), so that a file made here has the
//! types of one made there. [`Recipe::all`] is the table; a rule names a matrix by its role:
//!
//! | recipe | most matrices | instead |
//! |---|---|---|
//! | `F32`, `F16`, `BF16` | the same | |
//! | `Q8_0`, `Q6_K`, `Q5_1`, `Q4_1`, `Q5_K_S`, `Q3_K_S` | the same, less `_S` | |
//! | `Q4_0`, `Q5_0` | the same | with importance `Q4_1`, `Q5_1`: down in the first eighth |
//! | `Q5_K_M` | `Q5_K` | `Q6_K`: value, down in layers with more bits |
//! | `Q4_K_M` | `Q4_K` | `Q6_K`: value, down in layers with more bits |
//! | `Q4_K_S` | `Q4_K` | `Q5_K`: value in the first 4 layers, down in the first eighth |
//! | `Q3_K_L` | `Q3_K` | `Q5_K`: value, down, output |
//! | `Q3_K_M` | `Q3_K` | `Q5_K`: value in the first 2 layers, down in the first sixteenth; `Q4_K`: the others, output |
//! | `Q2_K` | `Q2_K` | `Q4_K` (GQA 4), else `Q3_K`: value; `Q3_K`: down, output |
//! | `Q2_K_S` | `Q2_K` | `Q4_K`: value (GQA 4), down in the first eighth |
//! | `IQ4_NL`, `IQ4_XS` | the same | `Q5_K`: value (GQA 4); without importance down in the first eighth |
//! | `IQ3_M` | `IQ3_S` | `Q4_K`: value, output, down in the first eighth |
//! | `IQ3_S` | `IQ3_S` | `Q4_K`: value (GQA 4) |
//! | `IQ3_XS` | `IQ3_S` | as `IQ3_S`; `IQ3_XXS`: query, key, gate and up in the middle three quarters |
//! | `IQ3_XXS` | `IQ3_XXS` | `Q4_K`: value (GQA 4); `IQ2_S`: query, key; `IQ3_S`: output; without importance more |
//! | `IQ2_M`, `IQ2_S` | `IQ2_S`, `IQ2_XS` | `Q4_K` (GQA 4), else `IQ3_S`: value; `IQ3_S`: output, down in the first eighth |
//! | `IQ2_XS`, `IQ2_XXS` | the same | `Q4_K` (GQA 4), else `Q2_K`: value; `Q2_K`: down in the first eighth |
//! | `IQ1_M`, `IQ1_S` | the same | as `IQ2_XXS`; `IQ2_XXS`: output |
//! | `TQ2_0`, `TQ1_0`, `Q2_0` | the same | `Q4_K`: embedding |
//! | `Q1_0` | the same | |
//! | `MXFP4_MOE` | `Q8_0` | `MXFP4`: experts |
//! | `Q3_K`, `Q4_K`, `Q5_K`, `MXFP4`, `NVFP4` | the same | |
//!
//! The output head, or the embedding table if it is the head, is `Q6_K`; below 3.4 bits `Q5_K`; in `Q8_0` and
//! `MXFP4_MOE`, and where rows are not whole blocks, `Q8_0`. Models with 8 experts get more bits for attention, 70B
//! models for values. Layers with more bits are the first and the last eighth and every third between. The last row of
//! the table are types, not recipes: llama.cpp uses the first three for `_M`.

use metal_attention_gguf::{Metadata, TensorDecl, TensorType, Value};

use crate::architectures::{QuantizationTraits, quantization_traits};

use MatrixRole::{Down, Gate, Key, Output, Query, Up, Value as Values};
use TensorType::{
    BF16, F16, F32, I64, IQ1_M, IQ1_S, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS, IQ4_NL, IQ4_XS, MXFP4, NVFP4, Q1_0,
    Q2_0, Q2_K, Q3_K, Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0, TQ1_0, TQ2_0,
};

/// A recipe: which tensor of a file gets which type.
#[derive(Debug)]
pub struct Recipe {
    /// Name in upper case.
    name: &'static str,
    /// `general.file_type`, ggml's number for the recipe.
    file_type: u32,
    /// Type of most matrices.
    base: TensorType,
    /// Type of the embedding table, if the output head has its own table.
    embedding: TensorType,
    /// Type of the output head, if its rows are whole blocks of `base`.
    head: TensorType,
    /// Properties that it shares with other recipes.
    family: Family,
    /// The first rule that applies gives a matrix its type.
    rules: &'static [TypeRule],
}

/// Properties that recipes share, apart from their rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Family {
    /// One type for all matrices except the head.
    Plain,
    /// Models with 8 experts have values and keys in `Q8_0`; 70B models have values in at least `Q5_K`.
    Standard,
    /// Below 3 bits: layers are counted by matrices, even in models with experts.
    Low,
    /// Experts in `MXFP4`, all else in `Q8_0`.
    Mxfp4Experts,
}

/// A type for the matrices of a role at positions for which the condition is true.
type TypeRule = (MatrixRole, fn(&MatrixPosition) -> bool, TensorType);

/// The role of a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MatrixRole {
    /// The embedding table.
    Embedding,
    /// The output head.
    Head,
    /// Queries.
    Query,
    /// Keys.
    Key,
    /// Values, also in a matrix with keys or queries.
    Value,
    /// Attention output.
    Output,
    /// Gate of a feed-forward.
    Gate,
    /// Up projection of a feed-forward.
    Up,
    /// Down projection of a feed-forward.
    Down,
    /// Any other.
    Other,
}

/// The position of a matrix in its model, and the model's properties that rules use.
struct MatrixPosition {
    /// Index of the layer.
    layer: usize,
    /// Number of layers.
    n_layer: usize,
    /// Whether four or more query heads share a key head.
    gqa_4: bool,
    /// Experts of a layer.
    n_expert: usize,
    /// Whether the importance of columns is known.
    importance: bool,
    /// Whether the architecture has Falcon's exceptions.
    falcon: bool,
}

impl MatrixPosition {
    /// In the first `n` layers.
    fn first(&self, n: usize) -> bool {
        self.layer < n
    }

    /// In the first eighth of the layers.
    fn first_eighth(&self) -> bool {
        self.layer < self.n_layer / 8
    }

    /// In the first sixteenth of the layers.
    fn first_sixteenth(&self) -> bool {
        self.layer < self.n_layer / 16
    }

    /// In the middle three quarters of the layers.
    fn middle(&self) -> bool {
        (self.n_layer / 8..7 * self.n_layer / 8).contains(&self.layer)
    }

    /// In the first or the last eighth, or every third layer between.
    fn more_bits(&self) -> bool {
        let (layer, n) = (self.layer, self.n_layer);
        layer < n / 8 || layer >= 7 * n / 8 || (layer - n / 8) % 3 == 2
    }

    /// Eight experts a layer, as in Mixtral.
    fn mixtral(&self) -> bool {
        self.n_expert == 8 && !self.falcon
    }
}

/// The condition that is always true.
fn always(_: &MatrixPosition) -> bool {
    true
}

/// `Q5_K` for the attention output in models with 8 experts, in most recipes.
const MIXTRAL: TypeRule = (Output, MatrixPosition::mixtral, Q5_K);

const GQA_4: fn(&MatrixPosition) -> bool = |p| p.gqa_4;

/// Neither Falcon nor a model with 8 experts: the condition of rules for the attention output.
const DENSE: fn(&MatrixPosition) -> bool = |p| !p.falcon && p.n_expert != 8;

const EARLY_BY_GUESS: fn(&MatrixPosition) -> bool = |p| p.first_eighth() && !p.importance;
const EARLY_BY_IMPORTANCE: fn(&MatrixPosition) -> bool = |p| p.first_eighth() && p.importance;

const IQ4: &[TypeRule] = &[(Values, GQA_4, Q5_K), (Down, EARLY_BY_GUESS, Q5_K), MIXTRAL];
/// Values and early down projections of the smallest recipes, and their types in models with 8 experts.
const Q2_VALUES: TypeRule = (Values, always, Q2_K);
const IQ3_VALUES: TypeRule = (Values, always, IQ3_S);
const LOW_VALUES: TypeRule = (Values, |p| p.gqa_4 || p.n_expert >= 4, Q4_K);
const LOW_KEYS: TypeRule = (Key, |p| p.n_expert == 8, Q4_K);
const LOW_OUTPUT: TypeRule = (Output, |p| p.n_expert == 8, Q5_K);

#[rustfmt::skip]
static RECIPES: &[Recipe] = &[
    mix("F32", 0, F32, &[]).head(F32),
    mix("F16", 1, F16, &[]).head(F16),
    mix("BF16", 32, BF16, &[]).head(BF16),
    mix("Q8_0", 7, Q8_0, &[]).head(Q8_0),
    mix("Q6_K", 18, Q6_K, &[]),
    mix("Q5_K_M", 17, Q5_K, &[(Values, MatrixPosition::more_bits, Q6_K), (Down, MatrixPosition::more_bits, Q6_K)]),
    mix("Q5_K_S", 16, Q5_K, &[]),
    mix("Q5_1", 9, Q5_1, &[]),
    mix("Q5_0", 8, Q5_0, &[(Down, EARLY_BY_IMPORTANCE, Q5_1)]),
    mix("Q4_K_M", 15, Q4_K, &[
        (Values, MatrixPosition::more_bits, Q6_K),
        (Down, |p| if p.falcon { p.first_sixteenth() } else { p.more_bits() }, Q6_K),
        (Down, |p| p.falcon && p.more_bits(), Q5_K),
        MIXTRAL,
    ]),
    mix("Q4_K_S", 14, Q4_K, &[(Values, |p| p.first(4), Q5_K), (Down, |p| p.first_eighth() && !p.falcon, Q5_K), MIXTRAL]),
    mix("Q4_1", 3, Q4_1, &[]),
    mix("Q4_0", 2, Q4_0, &[(Down, EARLY_BY_IMPORTANCE, Q4_1)]),
    mix("IQ4_NL", 25, IQ4_NL, IQ4),
    mix("IQ4_XS", 30, IQ4_XS, IQ4),
    mix("Q3_K_L", 13, Q3_K, &[
        (Values, always, Q5_K),
        (Down, |p| !p.falcon, Q5_K), (Down, always, Q4_K),
        (Output, DENSE, Q5_K), (Output, |p| p.falcon, Q4_K),
    ]),
    mix("Q3_K_M", 12, Q3_K, &[
        (Values, |p| p.first(2), Q5_K), (Values, always, Q4_K),
        (Down, MatrixPosition::first_sixteenth, Q5_K), (Down, |p| !p.falcon || p.more_bits(), Q4_K),
        (Output, DENSE, Q4_K), MIXTRAL,
    ]),
    mix("Q3_K_S", 11, Q3_K, &[MIXTRAL]),
    mix("IQ3_M", 27, IQ3_S, &[
        (Values, always, Q4_K),
        (Down, |p| p.first_eighth() || (p.n_expert == 8 && p.more_bits()), Q4_K),
        (Output, DENSE, Q4_K), MIXTRAL,
    ]),
    mix("IQ3_S", 26, IQ3_S, &[(Values, GQA_4, Q4_K), MIXTRAL]),
    mix("IQ3_XS", 22, IQ3_S, &[
        (Values, GQA_4, Q4_K),
        (Query, always, IQ3_XXS), (Key, always, IQ3_XXS),
        (Gate, MatrixPosition::middle, IQ3_XXS), (Up, MatrixPosition::middle, IQ3_XXS),
        MIXTRAL,
    ]),
    mix("IQ3_XXS", 23, IQ3_XXS, &[
        (Values, GQA_4, Q4_K), (Values, |p| !p.importance, IQ3_S),
        (Query, always, IQ2_S), (Key, always, IQ2_S),
        (Down, EARLY_BY_GUESS, Q4_K), (Down, |p| !p.importance, Q3_K),
        (Output, DENSE, IQ3_S), MIXTRAL,
    ]).head(Q5_K).embedding(IQ3_S),
    mix("Q2_K", 10, Q2_K, &[
        (Values, GQA_4, Q4_K), (Values, always, Q3_K),
        (Down, always, Q3_K),
        (Output, DENSE, Q3_K), MIXTRAL,
    ]),
    mix("Q2_K_S", 21, Q2_K, &[(Values, GQA_4, Q4_K), (Down, MatrixPosition::first_eighth, Q4_K)]),
    mix("IQ2_M", 29, IQ2_S, &[
        LOW_VALUES, IQ3_VALUES, LOW_KEYS, (Down, MatrixPosition::first_eighth, IQ3_S), LOW_OUTPUT, (Output, always, IQ3_S),
    ]).low().embedding(IQ3_S),
    mix("IQ2_S", 28, IQ2_XS, &[
        LOW_VALUES, IQ3_VALUES, LOW_KEYS, (Down, MatrixPosition::first_eighth, IQ3_S), LOW_OUTPUT, (Output, always, IQ3_S),
    ]).low().embedding(IQ3_S),
    mix("IQ2_XS", 20, IQ2_XS, &[LOW_VALUES, Q2_VALUES, LOW_KEYS, (Down, MatrixPosition::first_eighth, Q2_K), LOW_OUTPUT])
        .low().embedding(Q2_K),
    mix("IQ2_XXS", 19, IQ2_XXS, &[LOW_VALUES, Q2_VALUES, LOW_KEYS, (Down, MatrixPosition::first_eighth, Q2_K), LOW_OUTPUT])
        .low().embedding(Q2_K),
    mix("IQ1_M", 31, IQ1_M, &[
        LOW_VALUES, Q2_VALUES, LOW_KEYS, (Down, MatrixPosition::first_eighth, Q2_K), LOW_OUTPUT, (Output, always, IQ2_XXS),
    ]).low().embedding(Q2_K),
    mix("IQ1_S", 24, IQ1_S, &[
        LOW_VALUES, Q2_VALUES, LOW_KEYS, (Down, MatrixPosition::first_eighth, Q2_K), LOW_OUTPUT, (Output, always, IQ2_XXS),
    ]).low().embedding(Q2_K),
    mix("TQ2_0", 37, TQ2_0, &[]).embedding(Q4_K),
    mix("TQ1_0", 36, TQ1_0, &[]).embedding(Q4_K),
    mix("Q2_0", 41, Q2_0, &[]).embedding(Q4_K),
    mix("Q1_0", 40, Q1_0, &[]),
    Recipe { family: Family::Mxfp4Experts, ..mix("MXFP4_MOE", 38, MXFP4, &[]).head(Q8_0) },
    plain("Q3_K", 11, Q3_K),
    plain("Q4_K", 14, Q4_K),
    plain("Q5_K", 16, Q5_K),
    plain("MXFP4", 38, MXFP4),
    plain("NVFP4", 39, NVFP4),
];

/// A recipe of the family `Standard` with the head in `Q6_K`.
const fn mix(name: &'static str, file_type: u32, base: TensorType, rules: &'static [TypeRule]) -> Recipe {
    Recipe { name, file_type, base, embedding: base, head: Q6_K, family: Family::Standard, rules }
}

/// A type that is no recipe.
const fn plain(name: &'static str, file_type: u32, base: TensorType) -> Recipe {
    Recipe { family: Family::Plain, ..mix(name, file_type, base, &[]) }
}

impl Recipe {
    /// The recipe with another type of the output head.
    const fn head(self, head: TensorType) -> Self {
        Self { head, ..self }
    }

    /// The recipe with another type of the embedding table.
    const fn embedding(self, embedding: TensorType) -> Self {
        Self { embedding, ..self }
    }

    /// The recipe in the family `Low` with the head in `Q5_K`.
    const fn low(self) -> Self {
        Self { family: Family::Low, head: Q5_K, ..self }
    }

    /// Every recipe, largest first, then the names of types that are no recipes.
    pub fn all() -> &'static [Self] {
        RECIPES
    }

    /// The recipe of that name, in any case.
    ///
    /// ```
    /// use metal_attention_gguf::TensorType;
    /// use metal_attention_model::Recipe;
    /// let recipe = Recipe::named("q4_k_m").unwrap();
    /// assert_eq!((recipe.name(), recipe.base(), recipe.file_type()), ("Q4_K_M", TensorType::Q4_K, 15));
    /// ```
    pub fn named(name: &str) -> Option<&'static Self> {
        RECIPES.iter().find(|recipe| recipe.name.eq_ignore_ascii_case(name))
    }

    /// Name in upper case.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The type of most matrices.
    pub fn base(&self) -> TensorType {
        self.base
    }

    /// `general.file_type` of files made by it.
    pub fn file_type(&self) -> u32 {
        self.file_type
    }

    /// Whether the type `ty` of `tensor` needs the importance of its columns; without it, the result would be useless.
    pub fn needs_importance(&self, tensor: &str, ty: TensorType) -> bool {
        let table = matches!(role(tensor), MatrixRole::Embedding | MatrixRole::Head);
        !table
            && match ty {
                IQ1_S | IQ1_M | IQ2_XXS | IQ2_XS | IQ2_S | IQ3_XXS => true,
                Q2_K => self.name == "Q2_K_S",
                F32 | F16 | BF16 | Q4_0 | Q4_1 | Q5_0 | Q5_1 | Q8_0 | Q3_K | Q4_K | Q5_K | Q6_K | IQ3_S | IQ4_NL
                | IQ4_XS | TQ1_0 | TQ2_0 | Q1_0 | Q2_0 | MXFP4 | NVFP4 | I64 => false,
            }
    }

    /// The types of a model's `tensors`, which are given with their present type. Tensors that are not quantised keep
    /// it.
    pub fn types(&self, metadata: &Metadata, tensors: &[TensorDecl], choices: &TypeChoices) -> Vec<TensorType> {
        let model = ModelFacts::new(metadata, tensors);
        let mut seen = RoleCounts::default();
        let mut types: Vec<_> = tensors.iter().map(|tensor| tensor.ty).collect();
        // By layer, then by name: rules count the matrices of a role in this order.
        let mut order: Vec<usize> =
            (0..tensors.len()).filter(|&i| is_quantized(&tensors[i], model.traits.not_quantized)).collect();
        order.sort_by_key(|&i| (layer(&tensors[i].name), &tensors[i].name));
        for i in order {
            let wanted = self.tensor(&tensors[i], &model, &mut seen, choices);
            types[i] = fitting(wanted, tensors[i].shape[0]);
        }
        types
    }

    /// The type of a tensor that is quantised, before rows are considered.
    fn tensor(
        &self,
        tensor: &TensorDecl,
        model: &ModelFacts,
        seen: &mut RoleCounts,
        choices: &TypeChoices,
    ) -> TensorType {
        let role = role(&tensor.name);
        let is_head = role == MatrixRole::Head || (role == MatrixRole::Embedding && model.tied);
        if let Some(ty) = choices.embedding.filter(|_| role == MatrixRole::Embedding) {
            return ty;
        }
        if let Some(ty) = choices.head.filter(|_| is_head) {
            return ty;
        }
        if choices.pure || self.base.block_len() == 1 {
            return self.base;
        }
        if model.traits.at_least_8_bits.iter().any(|part| tensor.name.contains(part)) {
            return Q8_0;
        }
        if is_head {
            let other = model.traits.falcon_exceptions || !tensor.shape[0].is_multiple_of(self.base.block_len());
            return if other { Q8_0 } else { self.head };
        }
        if self.family == Family::Mxfp4Experts {
            let stacked = tensor.shape.get(2).is_some_and(|&n| n > 1);
            let expert = model.traits.stacked_are_experts || matches!(role, Gate | Up | Down);
            return if stacked && expert { MXFP4 } else { Q8_0 };
        }
        if role == MatrixRole::Embedding {
            return self.embedding;
        }
        let count = seen.next(role);
        let by_name = model.n_expert > 1 && self.family != Family::Low && matches!(role, Gate | Up | Down);
        let place = MatrixPosition {
            layer: if by_name { layer(&tensor.name).unwrap_or(0) } else { count },
            n_layer: if role == Values { model.n_values } else { model.n_layer },
            gqa_4: model.gqa >= 4,
            n_expert: model.n_expert,
            importance: choices.importance,
            falcon: model.traits.falcon_exceptions,
        };
        let rule = self.rules.iter().find(|(of, when, _)| *of == role && when(&place));
        let ty = rule.map_or(self.base, |&(_, _, ty)| ty);
        if self.family != Family::Standard {
            return ty;
        }
        match role {
            Values | Key if model.n_expert == 8 => Q8_0,
            Values if model.is_70b && matches!(ty, Q3_K | Q4_K) => Q5_K,
            _ => ty,
        }
    }
}

/// Choices of the user in addition to the recipe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TypeChoices {
    /// Type of the embedding table.
    pub embedding: Option<TensorType>,
    /// Type of the output head; of the embedding table if it is the head.
    pub head: Option<TensorType>,
    /// Use the recipe's base type for everything.
    pub pure: bool,
    /// Whether the importance of columns is known.
    pub importance: bool,
}

/// The properties of a model that rules depend on.
struct ModelFacts {
    /// Those of the architecture.
    traits: QuantizationTraits,
    /// Number of layers.
    n_layer: usize,
    /// Number of matrices with values.
    n_values: usize,
    /// Query heads for each KV head.
    gqa: usize,
    /// Experts of a layer.
    n_expert: usize,
    /// Whether it counts as a 70B model.
    is_70b: bool,
    /// Whether the embedding table is the output head.
    tied: bool,
}

impl ModelFacts {
    /// Missing keys count as 0, since files that are not language models have matrices as well.
    fn new(metadata: &Metadata, tensors: &[TensorDecl]) -> Self {
        let arch = metadata.str("general.architecture").ok().flatten().unwrap_or("");
        let first = |key: &str| {
            let key = format!("{arch}.{key}");
            match metadata.get(&key) {
                Some(Value::Array(_)) => metadata.u32s(&key).ok().flatten()?.first().map(|&n| n as usize),
                _ => metadata.usize(&key).ok().flatten(),
            }
        };
        let n_head = first("attention.head_count").unwrap_or(0);
        let n_head_kv = first("attention.head_count_kv").unwrap_or(n_head);
        let n_layer = first("block_count").unwrap_or(0);
        let n_expert = first("expert_count").unwrap_or(0);
        let traits = quantization_traits(arch);
        let grouped_and_dense = n_head != n_head_kv && n_expert != 8;
        let is_70b =
            traits.of_70b.is_some_and(|of| n_layer == of.n_layer && (grouped_and_dense || !of.grouped_and_dense));
        Self {
            traits,
            n_layer,
            n_values: tensors.iter().filter(|t| role(&t.name) == Values).count(),
            gqa: n_head.checked_div(n_head_kv).unwrap_or(0),
            n_expert,
            is_70b,
            tied: !tensors.iter().any(|t| role(&t.name) == MatrixRole::Head),
        }
    }
}

/// Counts the matrices of each role.
#[derive(Default)]
struct RoleCounts([usize; 4]);

impl RoleCounts {
    /// The number of earlier matrices of a role.
    fn next(&mut self, role: MatrixRole) -> usize {
        let count = match role {
            Values => &mut self.0[0],
            Down => &mut self.0[1],
            Gate => &mut self.0[2],
            Up => &mut self.0[3],
            MatrixRole::Embedding | MatrixRole::Head | Query | Key | Output | MatrixRole::Other => return 0,
        };
        *count += 1;
        *count - 1
    }
}

/// The number in `blk.N.`.
fn layer(name: &str) -> Option<usize> {
    name.strip_prefix("blk.")?.split_once('.')?.0.parse().ok()
}

/// The role of a tensor by its name.
fn role(name: &str) -> MatrixRole {
    const ROLES: [(&str, MatrixRole); 9] = [
        ("attn_qkv.weight", Values),
        ("attn_kv_b.weight", Values),
        ("attn_v.weight", Values),
        ("attn_k.weight", Key),
        ("attn_q.weight", Query),
        ("attn_output.weight", Output),
        ("ffn_up", Up),
        ("ffn_gate", Gate),
        ("ffn_down", Down),
    ];
    if name == "output.weight" {
        return MatrixRole::Head;
    }
    if matches!(name, "token_embd.weight" | "per_layer_token_embd.weight") {
        return MatrixRole::Embedding;
    }
    ROLES.iter().find(|(part, _)| name.contains(part)).map_or(MatrixRole::Other, |&(_, role)| role)
}

/// Parts of the names of matrices that are not quantised: small ones, and those used otherwise than in products.
const NOT_QUANTIZED: &[&str] = &[
    // Routers, and tables of experts by token.
    "ffn_gate_inp.weight",
    "ffn_gate_tid2eid.weight",
    // Gemma 3n.
    "altup",
    "laurel",
    "per_layer_model_proj",
    // Convolutions.
    "ssm_conv1d",
    "shortconv.conv.weight",
    // Sparse attention's indexer.
    "indexer.k_proj.weight",
    "indexer.q_proj.weight",
    // RWKV.
    "time_mix_first.weight",
    "time_mix_w0.weight",
    "time_mix_w1.weight",
    "time_mix_w2.weight",
    "time_mix_v0.weight",
    "time_mix_v1.weight",
    "time_mix_v2.weight",
    "time_mix_a0.weight",
    "time_mix_a1.weight",
    "time_mix_a2.weight",
    "time_mix_g1.weight",
    "time_mix_g2.weight",
    "time_mix_decay_w1.weight",
    "time_mix_decay_w2.weight",
    "time_mix_lerp_fused.weight",
    // Positions, images and audio.
    "attn_rel_b.weight",
    ".position_embd",
    "sam.pos_embd",
    "sam.neck.",
    "sam.net_",
    ".rel_pos",
    ".patch_embd",
    ".patch_merger",
    "a.rvq.codebook",
    "mm.a.code_embd",
];

/// Whether a tensor is quantised: weights with rows, except norms, those of [`NOT_QUANTIZED`] and those of
/// `not_quantized`, both parts of names.
fn is_quantized(tensor: &TensorDecl, not_quantized: &[&str]) -> bool {
    let name = tensor.name.as_str();
    let has_rows = tensor.shape.iter().skip(1).any(|&n| n > 1);
    let kept = |parts: &[&str]| parts.iter().any(|part| name.contains(part));
    let other = !matches!(name, "position_embd.weight" | "token_types.weight") && !name.contains("_norm.weight");
    let kept = kept(NOT_QUANTIZED) || kept(not_quantized);
    has_rows && name.ends_with("weight") && other && !kept
}

/// `ty`, or its replacement if rows of `row_len` elements are not whole blocks of it.
fn fitting(ty: TensorType, row_len: usize) -> TensorType {
    let fits = |ty: TensorType| row_len.is_multiple_of(ty.block_len());
    if fits(ty) {
        return ty;
    }
    let smaller = match ty {
        IQ1_S | IQ1_M | IQ2_XXS | IQ2_XS | IQ2_S | IQ3_XXS | IQ3_S | IQ4_XS => IQ4_NL,
        Q2_K | Q3_K | TQ1_0 | TQ2_0 | Q2_0 | Q1_0 | NVFP4 => Q4_0,
        Q4_K => Q5_0,
        Q5_K => Q5_1,
        Q6_K => Q8_0,
        F32 | F16 | BF16 | Q4_0 | Q4_1 | Q5_0 | Q5_1 | Q8_0 | IQ4_NL | MXFP4 | I64 => F16,
    };
    if fits(smaller) { smaller } else { F16 }
}
