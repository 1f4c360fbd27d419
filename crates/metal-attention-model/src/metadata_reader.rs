//! Typed access to a file's metadata, `{architecture}.{key}`, and the parts of a spec that most families read alike.
//!
//! Every error names the key. Sizes are bounded, so that a damaged file cannot cause huge allocations.

use std::fmt::Display;

use metal_attention_gguf::{Array, GgufFile, Metadata, Tensor, Value};

use crate::{ModelError, Norm, NormKind, Pooling, Rope, RopeFactors, RopeLayout, RopeScaling, RopeSections};

/// Maximum of a size: far above any model's.
const MAX_SIZE: usize = 1 << 28;

/// Maximum taps of a short convolution; files have 3 or 4.
pub(crate) const MAX_TAPS: usize = 16;

/// Maximum layers of a model.
const MAX_LAYERS: usize = 4096;

/// Maximum experts of a layer.
const MAX_EXPERTS: usize = 4096;

/// Reads the metadata of one file, and checks for tensors.
#[derive(Clone)]
pub(crate) struct MetadataReader<'a> {
    /// The metadata.
    metadata: &'a Metadata,
    /// Value of `general.architecture`: the prefix of keys.
    architecture: &'a str,
    /// The file, for checks of tensors; `None` if only the metadata are known.
    file: Option<&'a GgufFile>,
    /// Whether the blocks of the prediction heads count as layers.
    with_heads: bool,
}

impl<'a> MetadataReader<'a> {
    /// A reader. An error if `general.architecture` is missing.
    pub(crate) fn new(metadata: &'a Metadata, file: Option<&'a GgufFile>) -> Result<Self, ModelError> {
        let architecture = metadata
            .str("general.architecture")?
            .ok_or_else(|| ModelError::MissingKey { key: "general.architecture".into() })?;
        Ok(Self { metadata, architecture, file, with_heads: false })
    }

    /// A reader of the same metadata for which the blocks of the prediction heads, which follow the last layer, are layers, too.
    pub(crate) fn with_heads(&self) -> Self {
        Self { with_heads: true, ..self.clone() }
    }

    /// Value of `general.architecture`.
    pub(crate) fn architecture(&self) -> &'a str {
        self.architecture
    }

    /// Whether the file has a tensor of that name; `by_default` if only the metadata are known.
    pub(crate) fn has_tensor(&self, name: &str, by_default: bool) -> bool {
        self.file.map_or(by_default, |file| file.tensor(name).is_some())
    }

    /// The names of all tensors; none if only the metadata are known.
    pub(crate) fn tensor_names(&self) -> impl Iterator<Item = &'a str> {
        self.file.into_iter().flat_map(GgufFile::tensors).map(Tensor::name)
    }

    /// Rows of a matrix in the file; `None` without a file or the tensor.
    pub(crate) fn tensor_rows(&self, name: &str) -> Option<usize> {
        self.file?.tensor(name)?.shape().get(1).copied()
    }

    /// The length of a tensor's rows in the file; `None` without a file or the tensor.
    pub(crate) fn row_len(&self, name: &str) -> Option<usize> {
        self.file?.tensor(name)?.shape().first().copied()
    }

    /// The full name of a key.
    pub(crate) fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture)
    }

    /// The error for a missing key.
    pub(crate) fn missing(&self, key: &str) -> ModelError {
        ModelError::MissingKey { key: self.key(key) }
    }

    /// The error for a value that is not supported.
    pub(crate) fn unsupported(&self, key: &str, value: impl Display, why: &'static str) -> ModelError {
        ModelError::UnsupportedFeature { key: self.key(key), value: value.to_string(), why }
    }

    /// An error for a value unless `ok`.
    pub(crate) fn check(&self, key: &str, value: impl Display, ok: bool, why: &str) -> Result<(), ModelError> {
        if ok {
            return Ok(());
        }
        Err(ModelError::InvalidValue { key: self.key(key), value: value.to_string(), why: why.to_owned() })
    }

    /// A whole number; `None` if the key is missing.
    pub(crate) fn opt_usize(&self, key: &str) -> Result<Option<usize>, ModelError> {
        Ok(self.metadata.usize(&self.key(key))?)
    }

    /// A finite number; `None` if the key is missing.
    pub(crate) fn opt_f32(&self, key: &str) -> Result<Option<f32>, ModelError> {
        let value = self.metadata.f32(&self.key(key))?;
        if let Some(x) = value {
            self.check(key, x, x.is_finite(), "must be a number")?;
        }
        Ok(value)
    }

    /// A flag; `None` if the key is missing.
    pub(crate) fn opt_bool(&self, key: &str) -> Result<Option<bool>, ModelError> {
        Ok(self.metadata.bool(&self.key(key))?)
    }

    /// A string; `None` if the key is missing.
    pub(crate) fn opt_str(&self, key: &str) -> Result<Option<&'a str>, ModelError> {
        Ok(self.metadata.str(&self.key(key))?)
    }

    /// A number above 0; `default` if it is missing or 0.
    pub(crate) fn positive_f32(&self, key: &str, default: f32) -> Result<f32, ModelError> {
        let value = self.opt_f32(key)?.filter(|&x| x != 0.0).unwrap_or(default);
        self.check(key, value, value.is_finite() && value > 0.0, "must be above 0").map(|()| value)
    }

    /// A number above 0; `None` if it is missing or 0.
    pub(crate) fn opt_positive_f32(&self, key: &str) -> Result<Option<f32>, ModelError> {
        let value = self.opt_f32(key)?.filter(|&x| x != 0.0);
        if let Some(x) = value {
            self.check(key, x, x > 0.0, "must be above 0")?;
        }
        Ok(value)
    }

    /// A size above 0; `None` if the key is missing.
    pub(crate) fn opt_positive(&self, key: &str) -> Result<Option<usize>, ModelError> {
        let value = self.opt_usize(key)?;
        if let Some(n) = value {
            self.check(key, n, n > 0 && n <= MAX_SIZE, "must be a plausible size above 0")?;
        }
        Ok(value)
    }

    /// A size above 0; `None` if it is missing or 0.
    pub(crate) fn opt_size(&self, key: &str) -> Result<Option<usize>, ModelError> {
        match self.opt_usize(key)? {
            None | Some(0) => Ok(None),
            Some(_) => self.opt_positive(key),
        }
    }

    /// A size above 0 that must be there.
    pub(crate) fn positive(&self, key: &str) -> Result<usize, ModelError> {
        self.opt_positive(key)?.ok_or_else(|| self.missing(key))
    }

    /// Number of layers. The blocks of prediction heads count only for a reader [`with_heads`](Self::with_heads).
    pub(crate) fn n_layer(&self) -> Result<usize, ModelError> {
        let n_head = if self.with_heads { 0 } else { self.n_prediction_heads()? };
        Ok(self.n_block()? - n_head)
    }

    /// Number of layers without the blocks of prediction heads.
    pub(crate) fn n_layer_without_heads(&self) -> Result<usize, ModelError> {
        Ok(self.n_block()? - self.n_prediction_heads()?)
    }

    /// Number of blocks: layers and prediction heads.
    fn n_block(&self) -> Result<usize, ModelError> {
        let blocks = self.positive("block_count")?;
        self.check("block_count", blocks, blocks <= MAX_LAYERS, "at most 4096 layers are plausible").map(|()| blocks)
    }

    /// Number of prediction heads; less than the number of blocks.
    pub(crate) fn n_prediction_heads(&self) -> Result<usize, ModelError> {
        let (key, blocks) = ("nextn_predict_layers", self.n_block()?);
        let n_head = self.opt_usize(key)?.unwrap_or(0);
        self.check(key, n_head, n_head < blocks, "must be less than block_count").map(|()| n_head)
    }

    /// A list of whole numbers; `None` if the key is missing.
    pub(crate) fn opt_sizes(&self, key: &str) -> Result<Option<Vec<usize>>, ModelError> {
        let values = self.metadata.u32s(&self.key(key))?;
        Ok(values.map(|values| values.into_iter().map(|n| n as usize).collect()))
    }

    /// A list of numbers; `None` if the key is missing.
    pub(crate) fn opt_f32s(&self, key: &str) -> Result<Option<Vec<f32>>, ModelError> {
        Ok(self.metadata.f32s(&self.key(key))?)
    }

    /// A size for each layer: one number for all, or an array with one for each (and possibly for the layers after the
    /// last).
    pub(crate) fn per_layer(&self, key: &str, n_layer: usize) -> Result<Option<Vec<usize>>, ModelError> {
        let values = self.per_layer_or_none(key, n_layer)?;
        for &n in values.iter().flatten() {
            self.check(key, n, n > 0, "must be a plausible size above 0")?;
        }
        Ok(values)
    }

    /// [`per_layer`](Self::per_layer) where 0 is allowed.
    pub(crate) fn per_layer_or_none(&self, key: &str, n_layer: usize) -> Result<Option<Vec<usize>>, ModelError> {
        let full = self.key(key);
        let mut values: Vec<usize> = match self.metadata.get(&full) {
            None => return Ok(None),
            Some(Value::Array(_)) => {
                let values = self.metadata.u32s(&full)?.unwrap_or_default();
                let n_block = self.opt_usize("block_count")?.unwrap_or(n_layer);
                let fits = values.len() == n_layer || values.len() == n_block;
                self.check(key, values.len(), fits, "an array needs one value per layer")?;
                values.iter().map(|&v| v as usize).collect()
            }
            Some(_) => vec![self.positive(key)?; n_layer],
        };
        values.truncate(n_layer);
        for &n in &values {
            self.check(key, n, n <= MAX_SIZE, "must be a plausible size above 0")?;
        }
        Ok(Some(values))
    }

    /// A number for each layer: one for all, or an array with one for each (and possibly for the layers after the last).
    /// 0 for all if the key is missing.
    pub(crate) fn f32_per_layer(&self, key: &str, n_layer: usize) -> Result<Vec<f32>, ModelError> {
        let full = self.key(key);
        let values = match self.metadata.get(&full) {
            Some(Value::Array(_)) => self.metadata.f32s(&full)?.unwrap_or_default(),
            None | Some(_) => vec![self.opt_f32(key)?.unwrap_or(0.0); n_layer],
        };
        self.check(key, values.len(), values.len() >= n_layer, "an array needs one value per layer")?;
        let values = values[..n_layer].to_vec();
        for &x in &values {
            self.check(key, x, x.is_finite(), "must be a number")?;
        }
        Ok(values)
    }

    /// Whether each layer has a sliding window, by `attention.sliding_window_pattern`: an array of flags, or a period
    /// in which one layer is full. Without that key the period is `period`. The full layer is the first of a period or
    /// the last. Period 0: all have a window.
    pub(crate) fn windowed_layers(
        &self,
        n_layer: usize,
        period: usize,
        full_first: bool,
    ) -> Result<Vec<bool>, ModelError> {
        let key = "attention.sliding_window_pattern";
        if let Some(flags) = self.layer_flags(key, n_layer)? {
            return Ok(flags);
        }
        let period = self.opt_usize(key)?.unwrap_or(period);
        let full_at = if full_first { 0 } else { period.saturating_sub(1) };
        Ok((0..n_layer).map(|i| period == 0 || i % period != full_at).collect())
    }

    /// Taps of a short convolution: the tokens that it covers, its own included.
    pub(crate) fn taps(&self, key: &str) -> Result<usize, ModelError> {
        let n_tap = self.positive(key)?;
        self.check(key, n_tap, (2..=MAX_TAPS).contains(&n_tap), "must be 2 to 16").map(|()| n_tap)
    }

    /// A flag for each layer, from an array (possibly longer, for layers after the last); `None` if there is no array.
    pub(crate) fn layer_flags(&self, key: &str, n_layer: usize) -> Result<Option<Vec<bool>>, ModelError> {
        let full = self.key(key);
        let flags: Vec<bool> = match self.metadata.get(&full) {
            Some(Value::Array(Array::Bool(flags))) => flags.clone(),
            Some(Value::Array(_)) => self.metadata.u32s(&full)?.unwrap_or_default().iter().map(|&n| n != 0).collect(),
            None | Some(_) => return Ok(None),
        };
        self.check(key, flags.len(), flags.len() >= n_layer, "an array needs one value per layer")?;
        Ok(Some(flags[..n_layer].to_vec()))
    }

    /// Size of the sliding window; `None` if there is none.
    pub(crate) fn window(&self) -> Result<Option<usize>, ModelError> {
        Ok(self.opt_usize("attention.sliding_window")?.filter(|&w| w > 0))
    }

    /// The norm before mixers, with the epsilon from the key of its kind.
    pub(crate) fn norm(&self, kind: NormKind) -> Result<Norm, ModelError> {
        let key = match kind {
            NormKind::Rms => "attention.layer_norm_rms_epsilon",
            NormKind::Layer => "attention.layer_norm_epsilon",
        };
        let eps = self.opt_f32(key)?.ok_or_else(|| self.missing(key))?;
        self.check(key, eps, eps >= 0.0, "must be at least 0")?;
        Ok(Norm {
            tensor_stem: "attn_norm",
            has_weight: true,
            has_bias: kind == NormKind::Layer,
            kind,
            eps,
            omits_weight_suffix: false,
        })
    }

    /// The RoPE of heads of `head_dim` elements.
    pub(crate) fn rope(&self, layout: RopeLayout, head_dim: usize) -> Result<Rope, ModelError> {
        let n_rot = self.opt_positive("rope.dimension_count")?.unwrap_or(head_dim);
        let n_ctx_train = self.positive("context_length")?;
        let factors = if self.opt_str("rope.scaling.type")? == Some("longrope") {
            let n_ctx_orig = self.opt_positive("rope.scaling.original_context_length")?.unwrap_or(n_ctx_train);
            RopeFactors::ByContext { n_ctx_orig }
        } else {
            RopeFactors::Tensor
        };
        let rope = Rope {
            n_rot,
            layout,
            freq_base: self.freq_base("rope.freq_base")?.unwrap_or(10_000.0),
            scaling: self.rope_scaling(n_ctx_train)?,
            attn_factor: self.positive_f32("rope.scaling.attn_factor", 1.0)?,
            factors,
            sections: None,
        };
        self.check_rope(&rope, head_dim).map(|()| rope)
    }

    /// The sections of RoPE; `None` if the file has none. Architectures whose rotation has none do not read them.
    pub(crate) fn rope_sections(&self, interleaved: bool) -> Result<Option<RopeSections>, ModelError> {
        let key = "rope.dimension_sections";
        let numbers = self.opt_numbers(key)?;
        if numbers.iter().all(|&n| n == 0) {
            return Ok(None);
        }
        let mut sizes = [0; 4];
        for (size, &n) in sizes.iter_mut().zip(&numbers) {
            *size = n;
            self.check(key, n, *size <= 1 << 16, "sections this large are not plausible")?;
        }
        Ok(Some(RopeSections { sizes, interleaved }))
    }

    /// Checks that the rotated elements fit in a head.
    pub(crate) fn check_rope(&self, rope: &Rope, head_dim: usize) -> Result<(), ModelError> {
        let n_rot = rope.n_rot;
        let fits = n_rot <= head_dim && n_rot.is_multiple_of(2);
        self.check("rope.dimension_count", n_rot, fits, "must be even and at most the head's length")
    }

    /// A base of RoPE frequencies, above 1; `None` if the key is missing.
    pub(crate) fn freq_base(&self, key: &str) -> Result<Option<f32>, ModelError> {
        let base = self.opt_f32(key)?;
        if let Some(base) = base {
            self.check(key, base, base > 1.0, "must be a number above 1")?;
        }
        Ok(base)
    }

    /// The scaling of positions.
    fn rope_scaling(&self, n_ctx_train: usize) -> Result<RopeScaling, ModelError> {
        let kind = self.opt_str("rope.scaling.type")?;
        let factor = match self.opt_f32("rope.scaling.factor")? {
            Some(factor) => factor,
            None => self.opt_f32("rope.scale_linear")?.unwrap_or(1.0),
        };
        // Some files have the key with 0, which means "not scaled".
        let factor = if factor == 0.0 { 1.0 } else { factor };
        self.check("rope.scaling.factor", factor, factor.is_finite() && factor > 0.0, "must be above 0")?;
        match kind {
            // longrope's factors are tensors.
            Some("none" | "longrope") => Ok(RopeScaling::None),
            None | Some("linear") if factor == 1.0 => Ok(RopeScaling::None),
            None | Some("linear") => Ok(RopeScaling::Linear { factor }),
            Some("yarn") => {
                let ext_factor = self.opt_f32("rope.scaling.yarn_ext_factor")?.unwrap_or(1.0);
                self.check(
                    "rope.scaling.yarn_ext_factor",
                    ext_factor,
                    (0.0..=1.0).contains(&ext_factor),
                    "must be 0 to 1",
                )?;
                Ok(RopeScaling::Yarn {
                    factor,
                    n_ctx_orig: self.opt_positive("rope.scaling.original_context_length")?.unwrap_or(n_ctx_train),
                    beta_fast: self.positive_f32("rope.scaling.yarn_beta_fast", 32.0)?,
                    beta_slow: self.positive_f32("rope.scaling.yarn_beta_slow", 1.0)?,
                    ext_factor,
                    log_multiplier: self.opt_f32("rope.scaling.yarn_log_multiplier")?.filter(|&m| m != 0.0),
                })
            }
            Some(other) => Err(self.unsupported(
                "rope.scaling.type",
                other,
                "supported are none, linear, longrope and yarn (and the rope_freqs.weight tensor of Llama 3)",
            )),
        }
    }

    /// Number of experts of a layer; `None` if there are none.
    pub(crate) fn n_expert(&self) -> Result<Option<usize>, ModelError> {
        let n = self.opt_usize("expert_count")?.filter(|&n| n > 0);
        if let Some(n) = n {
            self.check("expert_count", n, n <= MAX_EXPERTS, "at most 4096 experts are plausible")?;
        }
        Ok(n)
    }

    /// Size of the vocabulary: the number of tokens, or of `vocab_size` without a tokenizer.
    pub(crate) fn n_vocab(&self) -> Result<usize, ModelError> {
        let n_vocab = match self.metadata.strings("tokenizer.ggml.tokens")? {
            Some(tokens) => tokens.len(),
            None => self.positive("vocab_size")?,
        };
        let plausible = n_vocab > 0 && n_vocab <= MAX_SIZE;
        self.check("vocab_size", n_vocab, plausible, "the vocabulary must have tokens").map(|()| n_vocab)
    }

    /// A special token of a vocabulary of `n_vocab` tokens, by its key without `tokenizer.ggml.`, which must be there.
    pub(crate) fn special_token(&self, key: &str, n_vocab: usize) -> Result<u32, ModelError> {
        let key = format!("tokenizer.ggml.{key}");
        match self.metadata.u32(&key)? {
            None => Err(ModelError::MissingKey { key }),
            Some(id) if (id as usize) < n_vocab => Ok(id),
            Some(id) => {
                let why = "must be a token of the vocabulary".to_owned();
                Err(ModelError::InvalidValue { key, value: id.to_string(), why })
            }
        }
    }

    /// Rows of the table of token types.
    pub(crate) fn n_token_types(&self) -> Result<usize, ModelError> {
        let key = "tokenizer.ggml.token_type_count";
        match self.metadata.usize(key)? {
            // BERT's number.
            None => Ok(2),
            Some(n) if n > 0 && n <= MAX_SIZE => Ok(n),
            Some(n) => Err(ModelError::InvalidValue {
                key: key.into(),
                value: n.to_string(),
                why: "must be a plausible size above 0".into(),
            }),
        }
    }

    /// Name of the model, if the file has one.
    pub(crate) fn name(&self) -> Result<Option<String>, ModelError> {
        Ok(self.metadata.str("general.name")?.map(str::to_owned))
    }

    /// An array of whole numbers; empty if the key is missing.
    pub(crate) fn opt_numbers(&self, key: &str) -> Result<Vec<u32>, ModelError> {
        Ok(self.metadata.u32s(&self.key(key))?.unwrap_or_default())
    }

    /// An array of strings; empty if the key is missing.
    pub(crate) fn strings(&self, key: &str) -> Result<Vec<String>, ModelError> {
        let strings = self.metadata.strings(&self.key(key))?;
        Ok(strings.map(|all| all.iter().map(str::to_owned).collect()).unwrap_or_default())
    }

    /// The pooling of hidden states; `None` if the file does not say.
    pub(crate) fn pooling(&self) -> Result<Option<Pooling>, ModelError> {
        self.pooling_by("pooling_type")
    }

    /// The pooling that a key names.
    pub(crate) fn pooling_by(&self, key: &str) -> Result<Option<Pooling>, ModelError> {
        Ok(match self.opt_usize(key)? {
            None | Some(0) => None,
            Some(1) => Some(Pooling::Mean),
            Some(2) => Some(Pooling::First),
            Some(3) => Some(Pooling::Last),
            Some(4) => Some(Pooling::Classifier),
            Some(other) => {
                let why = "the poolings are 0 (none), 1 (mean), 2 (first token), 3 (last token) and 4 (rank)";
                return Err(self.unsupported(key, other, why));
            }
        })
    }
}
