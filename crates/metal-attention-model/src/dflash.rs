//! Block drafters beside a target model: DFlash, DFlash-2 and DSpark.
//!
//! A block drafter is a model of a few layers ([`ModelSpec::takes_context`]). Its context rows are made of the target's hidden rows,
//! `norm(fc * rows)`; the blocks that it evaluates have the last token of the text and mask tokens, in whose places it proposes the
//! tokens that follow.

use metal_attention_gguf::{GgufFile, Metadata, Tensor};

use crate::architectures;
use crate::metadata_reader::MetadataReader;
use crate::tensors::{FileSource, MatrixShape, Presence, WeightSource};
use crate::{LoadedModel, ModelError, ModelSpec};

/// The architecture's name in `general.architecture`.
pub const DFLASH: &str = "dflash";

/// A block drafter as data.
#[derive(Debug, Clone, PartialEq)]
pub struct DflashSpec {
    /// Its layers and its output. The embedding table and the output head are those of the target, unless the file has its own.
    pub model: ModelSpec,
    /// What makes context rows of the target's hidden rows: a model without layers ([`StateInput::Projected`](crate::StateInput)).
    pub projection: ModelSpec,
    /// The layers of the target whose inputs it reads, in the order of their rows in the input of `fc`. The number of the target's
    /// layers stands for the output of the last one.
    pub target_layers: Vec<usize>,
    /// Most tokens of a block.
    pub block_size: usize,
    /// The token in the places of a block whose tokens are not known.
    pub mask_token: u32,
    /// How the drafts are chosen.
    pub choice: BlockChoice,
}

/// How a block drafter chooses drafts. For `n` drafts [`Markov`](Self::Markov) evaluates a block of `n` tokens, and takes draft `i` from
/// place `i`; the others evaluate `n + 1` tokens, and take it from place `i + 1`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockChoice {
    /// Each is the likeliest token of its place (DFlash).
    Likeliest,
    /// The candidate `c` of the place with the highest `logit(c) + successor[c] . (predecessor[p] * (hidden * h))` (DFlash-2), where
    /// `p` is the token before it and `h`, `[n_embd]`, the place's row after the output norm.
    Selector {
        /// Width of `successor[c]`, of `predecessor[p]` and of the product `hidden * h`.
        rank: usize,
        /// Candidates: the tokens with the highest logits.
        top_k: usize,
    },
    /// The likeliest by `logits + w2 w1[p]`, where `p` is the token before it (DSpark).
    Markov {
        /// Width of `w1[p]`.
        rank: usize,
    },
}

impl DflashSpec {
    /// Reads the spec of a file whose architecture is [`DFLASH`], for `target`.
    ///
    /// # Errors
    /// As of [`ModelSpec::from_gguf`]; the drafter was made for another model ([`ModelError::OtherTarget`]).
    pub fn from_gguf(file: &GgufFile, target: &ModelSpec) -> Result<Self, ModelError> {
        architectures::read_dflash(&MetadataReader::new(file.metadata(), Some(file))?, target)
    }

    /// [`from_gguf`](Self::from_gguf) of metadata alone, as [`ModelSpec::from_metadata`] reads those of a model.
    ///
    /// # Errors
    /// As of [`from_gguf`](Self::from_gguf).
    pub fn from_metadata(metadata: &Metadata, target: &ModelSpec) -> Result<Self, ModelError> {
        architectures::read_dflash(&MetadataReader::new(metadata, None)?, target)
    }

    /// Tokens of the block in which it proposes `n` tokens.
    pub fn block_len(&self, n: usize) -> usize {
        n + self.first_draft()
    }

    /// The most tokens that it proposes.
    pub fn max_drafts(&self) -> usize {
        self.block_size - self.first_draft()
    }

    /// The place of a block from which the first draft is taken.
    pub fn first_draft(&self) -> usize {
        match self.choice {
            BlockChoice::Likeliest | BlockChoice::Selector { .. } => 1,
            BlockChoice::Markov { .. } => 0,
        }
    }
}

/// A block drafter with its weights.
#[derive(Debug, Clone)]
pub struct LoadedDflash {
    /// The specification.
    pub spec: DflashSpec,
    /// Its layers and its output.
    pub model: LoadedModel,
    /// What makes context rows.
    pub projection: LoadedModel,
    /// The weights by which drafts are chosen.
    pub choice: BlockChoiceWeights,
}

/// The weights of a [`BlockChoice`].
#[derive(Debug, Clone)]
pub enum BlockChoiceWeights {
    /// There are none.
    Likeliest,
    /// Those of [`BlockChoice::Selector`].
    Selector(Box<SelectorWeights>),
    /// Those of [`BlockChoice::Markov`]: a model without layers, whose logits behind token `p` are `w2 w1[p]`.
    Markov(Box<LoadedModel>),
}

/// The weights of a [`BlockChoice::Selector`].
#[derive(Debug, Clone)]
pub struct SelectorWeights {
    /// Candidates of a place.
    pub top_k: usize,
    /// From a row to `rank` factors, `[rank, n_embd]`.
    pub hidden: Tensor,
    /// A row for each token as the one before, `[n_vocab, rank]`.
    pub predecessor: Tensor,
    /// A row for each token as a candidate, `[n_vocab, rank]`.
    pub successor: Tensor,
}

impl LoadedDflash {
    /// Loads the block drafter of `file` beside `target`, whose embedding table and output head it reads where the file has none.
    ///
    /// # Errors
    /// As of [`DflashSpec::from_gguf`]; a tensor is missing, has another shape, or is of a kind of drafter that is not known.
    pub fn load(file: &GgufFile, target: &LoadedModel) -> Result<Self, ModelError> {
        let spec = DflashSpec::from_gguf(file, target.spec())?;
        check_tensors(file, &spec)?;
        let mut source = FileSource { file, first: None, head_apart: false };
        let (n_embd, n_vocab) = (spec.model.n_embd, spec.model.n_vocab);
        let mut matrix = |name: &str, shape: MatrixShape| source.required(name, shape, Presence::None);
        let choice = match spec.choice {
            BlockChoice::Likeliest => BlockChoiceWeights::Likeliest,
            BlockChoice::Selector { rank, top_k } => BlockChoiceWeights::Selector(Box::new(SelectorWeights {
                top_k,
                hidden: matrix("selector_hidden", [n_embd, rank])?.weight,
                predecessor: matrix("selector_predecessor", [rank, n_vocab])?.weight,
                successor: matrix("selector_successor", [rank, n_vocab])?.weight,
            })),
            BlockChoice::Markov { rank } => {
                let tables = [matrix("markov_w1", [rank, n_vocab])?, matrix("markov_w2", [rank, n_vocab])?];
                BlockChoiceWeights::Markov(Box::new(LoadedModel::bigrams(&spec.model, rank, tables)))
            }
        };
        let model = LoadedModel::of_drafter(file, spec.model.clone(), target)?;
        let projection = LoadedModel::of_drafter(file, spec.projection.clone(), target)?;
        Ok(Self { spec, model, projection, choice })
    }
}

/// An error if the file has tensors that nothing reads: a drafter of another kind would propose other tokens.
fn check_tensors(file: &GgufFile, spec: &DflashSpec) -> Result<(), ModelError> {
    const OTHERS: [&str; 5] = [
        "selector_hidden.weight",
        "selector_predecessor.weight",
        "selector_successor.weight",
        "markov_w1.weight",
        "markov_w2.weight",
    ];
    let known = [spec.model.tensors(), spec.projection.tensors()].concat();
    let is_known = |name: &str| OTHERS.contains(&name) || known.iter().any(|tensor| tensor.name == name);
    match file
        .tensors()
        .iter()
        .find(|tensor| !is_known(tensor.name()) && tensor.name().strip_suffix(".scale").is_none())
    {
        Some(tensor) => Err(ModelError::UnknownTensor { name: tensor.name().to_owned() }),
        None => Ok(()),
    }
}
