//! Errors of loading a model and of the forward pass.

/// Why a batch was refused or failed. The KV cache is as before, except as
/// [`ForwardPass::forward_traced`](crate::ForwardPass::forward_traced) says.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ForwardError {
    /// The batch is empty.
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
    /// A sequence index outside the KV cache.
    #[error("sequence {seq} does not exist: the KV cache holds {n_seq} sequences")]
    SequenceOutOfRange {
        /// The index.
        seq: usize,
        /// Number of sequences.
        n_seq: usize,
    },
    /// A token whose position is not the next one of its sequence.
    #[error("position {pos} does not continue sequence {seq}, whose next position is {expected}")]
    PositionGap {
        /// The sequence.
        seq: usize,
        /// The position that was given.
        pos: usize,
        /// The position that would continue the sequence.
        expected: usize,
    },
    /// More tokens than the context.
    #[error(
        "the context is full: sequence {seq} holds {n_past} of {n_ctx} tokens and {n_new} more do not fit; use a larger -c or a shorter prompt"
    )]
    ContextFull {
        /// The sequence.
        seq: usize,
        /// Tokens it holds.
        n_past: usize,
        /// Tokens to be added.
        n_new: usize,
        /// Maximum tokens of a sequence.
        n_ctx: usize,
    },
    /// Not enough free KV pages.
    #[error(
        "the KV cache is out of pages: the batch needs {needed} more pages of {page_len} positions and {free} of {total} are free; end or cut a sequence, or ask for a larger KV cache"
    )]
    OutOfPages {
        /// Pages that the batch needs.
        needed: usize,
        /// Pages that are free.
        free: usize,
        /// Pages in total.
        total: usize,
        /// Positions of a page.
        page_len: usize,
    },
    /// Not enough slots for recurrent states.
    #[error(
        "there is no room for the recurrent states: the batch needs {needed} more and {free} of {total} can be had; end a sequence, or ask for room for more"
    )]
    OutOfStates {
        /// Slots that the batch needs.
        needed: usize,
        /// Slots that are free or hold checkpoints.
        free: usize,
        /// Slots in total.
        total: usize,
    },
    /// Logits were requested of a model without an output head.
    #[error("the model has no output head: it makes embeddings of texts (`embed`, /v1/embeddings) and writes none")]
    NoLogits,
    /// A part of a sequence was given to a model without a causal mask, which needs whole sequences.
    #[error(
        "every token of this model sees the whole text: sequence {seq} must be given in one batch from its start, and it holds {n_past} tokens"
    )]
    NotFromStart {
        /// The sequence.
        seq: usize,
        /// Tokens it holds.
        n_past: usize,
    },
    /// A sequence of a model without a causal mask, which must not be divided, has more output tokens than a step.
    #[error(
        "every token of this model sees the whole text: sequence {seq} has {n_outputs} output tokens, but a step computes \
         the logits of at most {max_outputs}: request fewer"
    )]
    TooManySequenceOutputs {
        /// The sequence.
        seq: usize,
        /// Its output tokens.
        n_outputs: usize,
        /// Maximum output tokens of a step.
        max_outputs: usize,
    },
    /// Hidden rows before a layer that the model does not have.
    #[error("the model has {n_layer} layers and an output norm: there are no hidden rows before layer {layer}")]
    LayerOutOfRange {
        /// The layer.
        layer: usize,
        /// Number of layers. There are rows behind the last one, too: before and after the output norm.
        n_layer: usize,
    },
    /// The states of a batch are not those that the model reads.
    #[error(
        "the batch has {found} values of states, but the model reads {expected}: a row for each token in prediction heads, none in other models"
    )]
    WrongStates {
        /// Values that were given.
        found: usize,
        /// Values that the model reads.
        expected: usize,
    },
    /// A draft of an assistant that is not possible.
    #[error("the assistant cannot draft: {why}")]
    NoAssistantDraft {
        /// The reason.
        why: &'static str,
    },
    /// The context rows of a batch are not those of a block drafter, or not a row for each input.
    #[error(
        "the batch has {found} values of context rows instead of {expected}: a row for each input, and only for a block drafter"
    )]
    WrongContext {
        /// Values that were given.
        found: usize,
        /// Values that are possible.
        expected: usize,
    },
    /// A batch that a block drafter cannot evaluate.
    #[error("a block drafter cannot evaluate the batch: {why}")]
    BadBlock {
        /// The reason.
        why: &'static str,
    },
    /// A span of embedding rows that does not fit the batch or the model.
    #[error("a span of embedding rows cannot be evaluated: {why}")]
    BadSpan {
        /// The reason.
        why: &'static str,
    },
    /// A span with bidirectional attention, which must not be divided, is longer than a micro-batch.
    #[error(
        "a span of {n} rows with bidirectional attention does not fit in a micro-batch of {n_ubatch}: a larger micro-batch \
         is needed"
    )]
    SpanTooLong {
        /// Inputs of the span.
        n: usize,
        /// Maximum tokens of a micro-batch.
        n_ubatch: usize,
    },
    /// A span with bidirectional attention, which must not be divided, has more output tokens than a step.
    #[error(
        "a span of rows with bidirectional attention has {n_outputs} output tokens, but a step computes at most \
         {max_outputs}: request fewer"
    )]
    TooManySpanOutputs {
        /// Output tokens of the span.
        n_outputs: usize,
        /// Maximum output tokens of a step.
        max_outputs: usize,
    },
    /// A position beyond those that a sequence can reach.
    #[error("a position of {position} is beyond the {n_ctx} positions that a sequence can reach")]
    PositionOutOfRange {
        /// The position.
        position: u32,
        /// The positions that a sequence can reach ([`Capacity::n_positions`](crate::Capacity::n_positions)).
        n_ctx: usize,
    },
    /// More tokens to share than the sequence holds.
    #[error("sequence {seq} holds {n_past} tokens: its first {n} cannot be shared")]
    PrefixTooLong {
        /// The sequence.
        seq: usize,
        /// Tokens to be shared.
        n: usize,
        /// Tokens it holds.
        n_past: usize,
    },
    /// Memory could not be allocated.
    #[error("out of memory: {what} needs {bytes} bytes")]
    OutOfMemory {
        /// Purpose of the memory.
        what: &'static str,
        /// Requested bytes.
        bytes: usize,
    },
    /// The device failed, or is gone.
    #[error("{why}")]
    Device {
        /// The cause, and what to do.
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
    /// The architecture in `general.architecture` is not implemented.
    #[error("the architecture {architecture:?} is not supported; {}", match missing {
        Some(part) => format!("this is missing: {part}"),
        None => format!("supported are: {}", supported.join(", ")),
    })]
    UnsupportedArchitecture {
        /// The name in the file.
        architecture: String,
        /// The missing part, if known.
        missing: Option<&'static str>,
        /// The supported names.
        supported: Vec<&'static str>,
    },
    /// The file has a drafter that needs the model for which it was made.
    #[error(
        "the file has a drafter ({architecture}), which is no model by itself: name the model for which it was made (-m), and this file as \
         its drafter (--model-draft)"
    )]
    DrafterAlone {
        /// Its architecture.
        architecture: String,
    },
    /// A drafter was made for another model.
    #[error(
        "this drafter was made for another model: its {key} is {found}, and the model has {expected}; use the drafter of this very model"
    )]
    OtherTarget {
        /// The key of the drafter's file.
        key: String,
        /// Its value.
        found: String,
        /// What would fit the model.
        expected: String,
    },
    /// A drafter's map from its tokens to the model's is wrong.
    #[error("the drafter's tensor `{name}` {why}: the file is damaged, or the drafter was made for another model")]
    DraftTokens {
        /// The tensor.
        name: &'static str,
        /// What is wrong with it.
        why: String,
    },
    /// A tensor of weights holds whole numbers.
    #[error("the tensor `{name}` has the type {ty}, and whole numbers are no weights: convert the model again")]
    TensorOfIntegers {
        /// Its name.
        name: String,
        /// Its type.
        ty: &'static str,
    },
    /// A feature of a supported architecture is not implemented.
    #[error("{key} = {value}: {why}")]
    UnsupportedFeature {
        /// The metadata key of the feature.
        key: String,
        /// Its value.
        value: String,
        /// The reason.
        why: &'static str,
    },
    /// A required metadata key is missing.
    #[error("the file lacks the metadata key {key}, which a model needs (is it a vocabulary-only file?)")]
    MissingKey {
        /// The key.
        key: String,
    },
    /// A metadata value is out of range, or contradicts another.
    #[error("{key} = {value} is not usable: {why}")]
    InvalidValue {
        /// The metadata key.
        key: String,
        /// Its value.
        value: String,
        /// The requirement.
        why: String,
    },
    /// Mixer and feed-forward of a layer cannot join the residual stream as its [`Residual`](crate::Residual) says.
    #[error("layer {layer} cannot join the residual stream: {why}")]
    InvalidResidual {
        /// The layer's index.
        layer: usize,
        /// The reason.
        why: &'static str,
    },
    /// A required tensor is missing.
    #[error("the file lacks the tensor {name} of shape {shape:?} (row length first)")]
    MissingTensor {
        /// The tensor's name.
        name: String,
        /// The expected shape.
        shape: Vec<usize>,
    },
    /// A drafter's file has a tensor that is not known.
    #[error(
        "the file has the tensor {name}, with which this program cannot draft: it may be a newer kind of drafter; use another one, or \
         go without (--spec ngram, --spec off)"
    )]
    UnknownTensor {
        /// The tensor's name.
        name: String,
    },
    /// The first model's embedding table or output head, which the file lacks, does not fit the second model.
    #[error(
        "the file lacks the tensor {name} of shape {expected:?} (row length first), and that of the model beside it has shape \
         {found:?}: use the model that the file was made for"
    )]
    FirstTensorShape {
        /// The tensor's name.
        name: String,
        /// The shape in the first model.
        found: [usize; 2],
        /// The expected shape.
        expected: [usize; 2],
    },
    /// The shape of a tensor contradicts the metadata.
    #[error("the tensor {name} has shape {found:?}, but the metadata asks for {expected:?} (row length first)")]
    TensorShape {
        /// The tensor's name.
        name: String,
        /// The shape in the file.
        found: Vec<usize>,
        /// The expected shape.
        expected: Vec<usize>,
    },
    /// A tensor has a value that cannot be used.
    #[error("the tensor {name} contains {value}: {why}")]
    TensorValue {
        /// The tensor's name.
        name: String,
        /// The value.
        value: f32,
        /// The requirement.
        why: &'static str,
    },
}
