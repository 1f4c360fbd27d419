//! Typed errors of model loading and of the forward pass.

/// Why a forward pass was refused or failed. The KV cache is as it was before.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ForwardError {
    /// No tokens were given.
    #[error("the prompt is empty: give at least one token")]
    EmptyPrompt,
    /// An id outside the vocabulary.
    #[error("token id {id} is outside the vocabulary of {n_vocab} tokens")]
    TokenOutOfRange {
        /// The id that was given.
        id: u32,
        /// Size of the vocabulary.
        n_vocab: usize,
    },
    /// A sequence number the KV cache was not made for.
    #[error("sequence {seq} does not exist: the KV cache holds {n_seq} sequences")]
    SequenceOutOfRange {
        /// The sequence that was named.
        seq: usize,
        /// Number of sequences there are.
        n_seq: usize,
    },
    /// A token whose position does not continue its sequence.
    #[error("position {pos} does not continue sequence {seq}, whose next position is {expected}")]
    PositionGap {
        /// The sequence.
        seq: usize,
        /// The position that was given.
        pos: usize,
        /// The position that would continue the sequence.
        expected: usize,
    },
    /// More tokens than the context has room for.
    #[error(
        "the context is full: sequence {seq} holds {n_past} of {n_ctx} tokens and {n_new} more do not fit; use a larger -c or a shorter prompt"
    )]
    ContextFull {
        /// The sequence.
        seq: usize,
        /// Tokens it holds.
        n_past: usize,
        /// Tokens that were to be added.
        n_new: usize,
        /// Tokens it has room for.
        n_ctx: usize,
    },
    /// More tokens than the KV cache, which all sequences share, has pages for.
    #[error(
        "the KV cache is out of pages: the batch needs {needed} more pages of {page_len} positions and {free} of {total} are free; end or cut a sequence, or ask for a larger KV cache"
    )]
    OutOfPages {
        /// Pages that the batch needs.
        needed: usize,
        /// Pages that are free.
        free: usize,
        /// Pages there are.
        total: usize,
        /// Positions of a page.
        page_len: usize,
    },
    /// More sequences than there are recurrent states for.
    #[error(
        "there is no room for the recurrent states: the batch needs {needed} more and {free} of {total} can be had; end a sequence, or ask for room for more"
    )]
    OutOfStates {
        /// States that the batch needs.
        needed: usize,
        /// States that are free, or that sequences could only be cut back to.
        free: usize,
        /// States there are.
        total: usize,
    },
    /// Logits of a model that has none.
    #[error("the model has no output head: it makes embeddings of texts (`embed`, /v1/embeddings) and writes none")]
    NoLogits,
    /// A piece of a text to a model whose tokens see those after them.
    #[error(
        "every token of this model sees the whole text: sequence {seq} must be given in one batch from its start, and it holds {n_past} tokens"
    )]
    NotFromStart {
        /// The sequence.
        seq: usize,
        /// Tokens it holds.
        n_past: usize,
    },
    /// More tokens to share than the sequence holds.
    #[error("sequence {seq} holds {n_past} tokens: its first {n} cannot be shared")]
    PrefixTooLong {
        /// The sequence.
        seq: usize,
        /// Tokens that were to be shared.
        n: usize,
        /// Tokens it holds.
        n_past: usize,
    },
    /// Memory for the batch could not be had.
    #[error("out of memory: {what} needs {bytes} bytes")]
    OutOfMemory {
        /// What the memory was for.
        what: &'static str,
        /// Bytes asked for.
        bytes: usize,
    },
    /// The device that runs the model failed or is gone.
    #[error("{why}")]
    Device {
        /// What happened, and what to do.
        why: String,
    },
    /// The [`Watch`](crate::Watch) was cancelled.
    #[error("cancelled")]
    Cancelled,
}

/// Why a GGUF file does not describe a model that can run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The file itself could not be read.
    #[error(transparent)]
    Gguf(#[from] metal_attention_gguf::GgufError),
    /// `general.architecture` names a model family that is not implemented.
    #[error("the architecture {architecture:?} is not supported; {}", match missing {
        Some(part) => format!("this is missing: {part}"),
        None => format!("supported are: {}", supported.join(", ")),
    })]
    UnsupportedArchitecture {
        /// The name in the file.
        architecture: String,
        /// What it needs that is not implemented, where that is known.
        missing: Option<&'static str>,
        /// The names that would work.
        supported: Vec<&'static str>,
    },
    /// A feature of a supported architecture that is not implemented.
    #[error("{key} = {value}: {why}")]
    UnsupportedFeature {
        /// The metadata key that asks for it.
        key: String,
        /// Its value.
        value: String,
        /// What is missing.
        why: &'static str,
    },
    /// A metadata key that a model needs is not in the file.
    #[error("the file lacks the metadata key {key}, which a model needs (is it a vocabulary-only file?)")]
    MissingKey {
        /// The key.
        key: String,
    },
    /// Metadata values that contradict each other or make no model.
    #[error("{key} = {value} is not usable: {why}")]
    InvalidValue {
        /// The metadata key.
        key: String,
        /// Its value.
        value: String,
        /// What it should have been.
        why: String,
    },
    /// A tensor that the model needs is not in the file.
    #[error("the file lacks the tensor {name} of shape {shape:?} (row length first)")]
    MissingTensor {
        /// The tensor's name.
        name: String,
        /// The shape that the metadata asks for.
        shape: Vec<usize>,
    },
    /// A tensor whose shape contradicts the metadata.
    #[error("the tensor {name} has shape {found:?}, but the metadata asks for {expected:?} (row length first)")]
    TensorShape {
        /// The tensor's name.
        name: String,
        /// The shape in the file.
        found: Vec<usize>,
        /// The shape that the metadata asks for.
        expected: Vec<usize>,
    },
    /// A tensor with a number that nothing can be computed with.
    #[error("the tensor {name} contains {value}: {why}")]
    TensorValue {
        /// The tensor's name.
        name: String,
        /// The number.
        value: f32,
        /// What it should have been.
        why: &'static str,
    },
}
