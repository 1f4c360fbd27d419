//! [`Eagle3`]: a loaded EAGLE-3 drafter.

use metal_attention_gguf::{GgufFile, Metadata};

use crate::architectures::{Eagle3Spec, read_eagle3};
use crate::metadata_reader::MetadataReader;
use crate::{LoadedModel, ModelError, ModelSpec};

/// The tensor with the target's token for each row of the drafter's logits.
const TOKENS: &str = "d2t";

/// An EAGLE-3 drafter with its weights, of which the embedding table and the output head may be its target's.
#[derive(Debug, Clone)]
pub struct Eagle3 {
    /// The layer.
    pub layer: LoadedModel,
    /// What makes its states of the target's rows.
    pub projection: LoadedModel,
    /// The rows of the target that make up a state: [`Eagle3Spec::target_layers`].
    pub target_layers: Vec<usize>,
    /// The target's id for each row of the drafter's logits; `None`: the rows are the target's tokens in order.
    pub tokens: Option<Vec<u32>>,
}

impl Eagle3 {
    /// Loads the drafter of `file` for `target`.
    ///
    /// # Errors
    /// As of [`Eagle3Spec::from_gguf`]; a tensor is missing, or does not fit the drafter or its target.
    pub fn load(file: &GgufFile, target: &LoadedModel) -> Result<Self, ModelError> {
        let Eagle3Spec { layer, projection, target_layers } = Eagle3Spec::from_gguf(file, target.spec())?;
        let tokens = tokens(file, layer.n_vocab, target.spec().n_vocab)?;
        let layer = LoadedModel::of_drafter(file, layer, target)?;
        let projection = LoadedModel::of_drafter(file, projection, target)?;
        Ok(Self { layer, projection, target_layers, tokens })
    }
}

impl Eagle3Spec {
    /// Reads the specifications of the drafter of `file` for `target`.
    ///
    /// # Errors
    /// A key is missing, wrong or not supported, or the drafter was made for another model ([`ModelError::OtherTarget`]).
    pub fn from_gguf(file: &GgufFile, target: &ModelSpec) -> Result<Self, ModelError> {
        read_eagle3(&MetadataReader::new(file.metadata(), Some(file))?, target)
    }

    /// Reads them from metadata alone, as [`ModelSpec::from_metadata`] does. Errors: as of [`from_gguf`](Self::from_gguf).
    pub fn from_metadata(metadata: &Metadata, target: &ModelSpec) -> Result<Self, ModelError> {
        read_eagle3(&MetadataReader::new(metadata, None)?, target)
    }
}

/// The target's tokens for the `n_row` rows of a drafter's logits.
fn tokens(file: &GgufFile, n_row: usize, n_vocab: usize) -> Result<Option<Vec<u32>>, ModelError> {
    let wrong = |why: String| Err(ModelError::DraftTokens { name: TOKENS, why });
    let Some(tensor) = file.tensor(TOKENS) else {
        if n_row == n_vocab {
            return Ok(None);
        }
        return wrong(format!("is missing, although {n_row} of the model's {n_vocab} tokens are proposed"));
    };
    let Some(ids) = tensor.as_i64() else { return wrong(format!("has the type {}, not I64", tensor.ty())) };
    if ids.len() != n_row {
        return wrong(format!("has {} tokens for {n_row} rows of the output head", ids.len()));
    }
    let id = |&id: &i64| u32::try_from(id).ok().filter(|&id| (id as usize) < n_vocab);
    match ids.iter().position(|token| id(token).is_none()) {
        Some(row) => wrong(format!("has the token {}, and the model has {n_vocab} tokens", ids[row])),
        None => Ok(Some(ids.iter().filter_map(id).collect())),
    }
}
