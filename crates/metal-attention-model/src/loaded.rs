//! [`LoadedModel`]: a specification with the weights that belong to it.

use std::collections::HashMap;

use metal_attention_gguf::GgufFile;

use crate::tensors::FileSource;
use crate::weights::build;
use crate::{HeadMatrix, Linear, ModelError, ModelSpec, OutputHead, OutputSpec, Weights};

/// A model's specification and its weights, which have the shapes that the specification says. Only loading makes one,
/// so that backends can rely on the shapes.
#[derive(Debug, Clone)]
pub struct LoadedModel {
    /// The specification.
    spec: ModelSpec,
    /// The weights.
    weights: Weights,
}

impl LoadedModel {
    /// Loads the model of `file`: reads its specification, finds every tensor and checks its shape. Matrices stay in the
    /// file; vectors are copied to F32. Errors: as of [`ModelSpec::from_gguf`], or a tensor is missing or has another
    /// shape.
    pub fn load(file: &GgufFile) -> Result<Self, ModelError> {
        Self::with_spec(file, ModelSpec::from_gguf(file)?)
    }

    /// Loads a model beside `first`, whose embedding table and output head it may read, as drafters do. If `file` lacks
    /// `token_embd.weight`, the table is that of `first`; if it lacks `output.weight`, too, the head with its bias is that of
    /// `first`, unless the architecture ties the head to the table. A file that has a table of its own has a head as in
    /// [`load`](Self::load).
    ///
    /// Errors: as of [`load`](Self::load); [`ModelError::FirstTensorShape`] if the vocabulary or the width of `first` is
    /// another one.
    pub fn load_beside(file: &GgufFile, first: &Self) -> Result<Self, ModelError> {
        Self::from_source(
            ModelSpec::from_gguf(file)?,
            FileSource { file, first: Some(first.weights()), head_apart: false },
        )
    }

    /// Loads the prediction heads (multi-token prediction) of `file`, each a model of its own, in the order of their drafts: see
    /// [`ModelSpec::heads_from_gguf`]. Empty if it has none. What they share with the model of the file, an executor that is set up
    /// beside that model's does not hold again.
    ///
    /// Errors: as of [`ModelSpec::heads_from_gguf`], or a tensor is missing or has another shape.
    pub fn load_heads(file: &GgufFile) -> Result<Vec<Self>, ModelError> {
        let specs = ModelSpec::heads_from_gguf(file)?;
        specs.into_iter().map(|spec| Self::with_spec(file, spec)).collect()
    }

    /// Loads the assistant in `file`, which drafts for `target`.
    ///
    /// Errors: as of [`ModelSpec::assistant_from_gguf`], or a tensor is missing or has another shape.
    pub fn load_assistant(file: &GgufFile, target: &Self) -> Result<LoadedAssistant, ModelError> {
        let spec = ModelSpec::assistant_from_gguf(file, target.spec())?;
        Ok(LoadedAssistant(Self::from_source(
            spec,
            FileSource { file, first: Some(target.weights()), head_apart: false },
        )?))
    }

    /// [`load`](Self::load) with another specification than that of the file's metadata.
    pub fn with_spec(file: &GgufFile, spec: ModelSpec) -> Result<Self, ModelError> {
        Self::from_source(spec, FileSource { file, first: None, head_apart: false })
    }

    /// Loads a part of a drafter for `target` with this specification: an embedding table and an output head, each that `file` lacks,
    /// are those of `target`. Errors: as of [`load_beside`](Self::load_beside).
    pub(crate) fn of_drafter(file: &GgufFile, spec: ModelSpec, target: &Self) -> Result<Self, ModelError> {
        Self::from_source(spec, FileSource { file, first: Some(target.weights()), head_apart: true })
    }

    /// The model without layers whose logits behind token `p` are `w2 w1[p]`, with `tables`: `w1` and `w2`, `[n_vocab, rank]`. For a
    /// drafter `of`, whose vocabulary it has.
    pub(crate) fn bigrams(of: &ModelSpec, rank: usize, tables: [Linear; 2]) -> Self {
        let head = OutputHead { scale: 1.0, soft_cap: None, matrix: HeadMatrix::OutputTensor, may_have_bias: false };
        let output = OutputSpec { norm: None, head: Some(head), ..of.output.clone() };
        let spec = ModelSpec { n_embd: rank, layers: Vec::new(), takes_context: false, output, ..of.clone() };
        let [token_embd, output] = tables;
        let weights = Weights {
            token_embd: Some(token_embd),
            token_type: None,
            positions: None,
            embedding_norm: None,
            per_layer: None,
            streams: None,
            state: None,
            assistant: None,
            layers: Vec::new(),
            output_norm: None,
            output: Some(output),
            pooled_projections: Vec::new(),
            classifier: None,
            rope_factors: HashMap::new(),
        };
        Self { spec, weights }
    }

    /// Loads the model of `spec` from `source`.
    pub(crate) fn from_source(spec: ModelSpec, mut source: FileSource<'_>) -> Result<Self, ModelError> {
        spec.check_residuals()?;
        let weights = build(&spec, &mut source)?;
        Ok(Self { spec, weights })
    }

    /// The specification.
    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// The weights.
    pub fn weights(&self) -> &Weights {
        &self.weights
    }

    /// The output head with its matrix, `[n_vocab, n_embd]`, and bias. `None`: the model has no logits. A loaded model has
    /// either both [`OutputSpec::head`](crate::OutputSpec::head) and [`Weights::output`], or neither.
    pub fn output_head(&self) -> Option<(OutputHead, &Linear)> {
        self.spec.output.head.zip(self.weights.output.as_ref())
    }
}

/// An assistant with its weights: layers without keys and values of their own, which an executor can only run beside that of the
/// target model ([`AssistantEnds`](crate::AssistantEnds)).
#[derive(Debug, Clone)]
pub struct LoadedAssistant(LoadedModel);

impl LoadedAssistant {
    /// Its specification.
    pub fn spec(&self) -> &ModelSpec {
        self.0.spec()
    }

    /// Specification and weights. An executor for it needs the KV cache of the target's; one without would not find its keys.
    pub fn as_model(&self) -> &LoadedModel {
        &self.0
    }
}
