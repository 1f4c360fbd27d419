//! Why a scheduler did not start, refused a request, or gave one up.

use crate::error::{CONSTRAINT, NO_NUMBERS, NO_TEXT};
use crate::sampling::SamplingError;
use crate::{Error, ForwardError};

/// Why a [`Scheduler`](super::Scheduler) could not be started.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// An option outside its range.
    #[error("the scheduler option {option} is {value}, but it must be {allowed}")]
    Option {
        /// The option's name, a field of [`SchedulerOptions`](super::SchedulerOptions).
        option: &'static str,
        /// The number that was given.
        value: usize,
        /// What would be accepted.
        allowed: String,
    },
    /// The model has no tokenizer that can work.
    #[error(transparent)]
    Model(#[from] Error),
    /// Nothing can be written where finished texts are to go.
    #[error("cannot write to {}, where finished texts are to go: {source}", folder.display())]
    CacheDisk {
        /// The folder.
        folder: std::path::PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The system gave no thread.
    #[error("could not start the scheduler's thread: {0}")]
    Thread(#[from] std::io::Error),
}

/// Why a request was refused: nothing was computed for it.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SubmitError {
    /// As many requests wait as may wait.
    #[error("{n_queue} requests wait already: try again later")]
    QueueFull {
        /// Most requests that may wait.
        n_queue: usize,
    },
    /// No new requests are taken.
    #[error("the server is shutting down")]
    ShuttingDown,
    /// The engine panicked and has ended.
    #[error("the engine met a defect and has ended: it must be started again")]
    EngineFailed,
    /// The model sees all tokens of a text at once, or has no output head.
    #[error("{NO_TEXT}")]
    NoText,
    /// The model has no output head.
    #[error("the model has no logits: its output is for embeddings or for ranking documents")]
    NoLogits,
    /// One request has more texts than may run and wait at a time.
    #[error(
        "the request has {n_sequences} texts, but no more than {max} fit: {n_parallel} that run (--parallel) and {n_queue} that \
         wait (--queue); send fewer at a time"
    )]
    TooManySequences {
        /// Texts of the request.
        n_sequences: usize,
        /// Texts that fit, on all replicas together.
        max: usize,
        /// Texts that run at once, on all replicas together.
        n_parallel: usize,
        /// Texts that may wait, on all replicas together.
        n_queue: usize,
    },
    /// There is nothing to continue.
    #[error("the prompt is empty: give at least one token")]
    EmptyPrompt,
    /// A prompt that the context, or the whole KV cache, cannot hold.
    #[error(
        "the prompt has {n_prompt} tokens, but the context has room for {n_ctx}: shorten the prompt, or start with a larger \
         context (-c {n_prompt} or more, as far as there is memory; the model was trained with {n_ctx_train})"
    )]
    PromptTooLong {
        /// Tokens in the prompt.
        n_prompt: usize,
        /// Tokens there is room for.
        n_ctx: usize,
        /// Context length of the training.
        n_ctx_train: usize,
    },
    /// A token, of the prompt or of the logit bias, that the model does not know.
    #[error("token id {id} is outside the vocabulary of {n_vocab} tokens")]
    TokenOutOfRange {
        /// The id that was given.
        id: u32,
        /// Size of the vocabulary.
        n_vocab: usize,
    },
    /// Sampling options that make no sense.
    #[error(transparent)]
    Sampling(#[from] SamplingError),
}

/// Why a request that was taken could not be finished.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum RequestError {
    /// The forward pass failed.
    #[error(transparent)]
    Forward(#[from] ForwardError),
    /// The request's constraint failed, or left no token to choose.
    #[error("{CONSTRAINT}: {0}")]
    Constraint(String),
    /// The request's [`LogitsProcessor`](crate::LogitsProcessor) failed, or left no token to choose.
    #[error("the logits processor failed: {0}")]
    LogitsProcessor(String),
    /// The model computed NaN or infinity for this request.
    #[error("{NO_NUMBERS}")]
    NoNumbers,
    /// A defect: choosing the request's next token panicked.
    #[error("an internal error ended this request: {0}")]
    Panicked(String),
    /// A defect: the engine's thread panicked, and nothing runs any more.
    #[error("the engine met a defect and ended before the request was finished")]
    EngineFailed,
    /// The scheduler ended before the request did.
    #[error("the server shut down before the request was finished")]
    ShutDown,
}
