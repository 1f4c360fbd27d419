//! Errors of starting a scheduler, of submitting a request, and of running one.

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
        /// The accepted range.
        allowed: String,
    },
    /// The model has no supported tokenizer.
    #[error(transparent)]
    Model(#[from] Error),
    /// The folder for evicted sequences is not writable.
    #[error("cannot write to {}, where finished texts are to go: {source}", folder.display())]
    CacheDisk {
        /// The folder.
        folder: std::path::PathBuf,
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// The thread could not be started.
    #[error("could not start the scheduler's thread: {0}")]
    Thread(#[from] std::io::Error),
}

/// Why a request was refused: nothing was computed for it.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SubmitError {
    /// The queue is full.
    #[error("{n_queue} requests wait already: try again later")]
    QueueFull {
        /// Requests that may wait.
        n_queue: usize,
    },
    /// The scheduler is shutting down.
    #[error("the server is shutting down")]
    ShuttingDown,
    /// The engine panicked and has ended.
    #[error("the engine met a defect and has ended: it must be started again")]
    EngineFailed,
    /// The model has no causal mask, or no output head.
    #[error("{NO_TEXT}")]
    NoText,
    /// The model has no output head.
    #[error("the model has no logits: its output is for embeddings or for ranking documents")]
    NoLogits,
    /// One request has more sequences than may run and wait at a time.
    #[error(
        "the request has {n_sequences} texts, but no more than {max} fit: {n_parallel} that run (--parallel) and {n_queue} that \
         wait (--queue); send fewer at a time"
    )]
    TooManySequences {
        /// Sequences of the request.
        n_sequences: usize,
        /// Sequences that may run and wait, on all replicas together.
        max: usize,
        /// Slots, on all replicas together.
        n_parallel: usize,
        /// Requests that may wait, on all replicas together.
        n_queue: usize,
    },
    /// The prompt has no tokens.
    #[error("the prompt is empty: give at least one token")]
    EmptyPrompt,
    /// The prompt is longer than the context, or than the whole KV cache.
    #[error(
        "the prompt has {n_prompt} tokens, but the context has room for {n_ctx}: shorten the prompt, or start with a larger \
         context (-c {n_prompt} or more, as far as there is memory; the model was trained with {n_ctx_train})"
    )]
    PromptTooLong {
        /// Tokens in the prompt.
        n_prompt: usize,
        /// Capacity in tokens.
        n_ctx: usize,
        /// Context length of the training.
        n_ctx_train: usize,
    },
    /// A token id, of the prompt, the stop tokens or the logit bias, outside the vocabulary.
    #[error("token id {id} is outside the vocabulary of {n_vocab} tokens")]
    TokenOutOfRange {
        /// The id that was given.
        id: u32,
        /// Size of the vocabulary.
        n_vocab: usize,
    },
    /// A span of embedding rows does not fit the prompt or the model, or the device evaluates none.
    #[error(transparent)]
    Span(ForwardError),
    /// A sampling option is out of range.
    #[error(transparent)]
    Sampling(#[from] SamplingError),
}

/// Why an accepted request could not be finished.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum RequestError {
    /// The forward pass failed.
    #[error(transparent)]
    Forward(#[from] ForwardError),
    /// The request's constraint failed, or allows no token.
    #[error("{CONSTRAINT}: {0}")]
    Constraint(String),
    /// The request's [`LogitsProcessor`](crate::LogitsProcessor) failed, or leaves no token.
    #[error("the logits processor failed: {0}")]
    LogitsProcessor(String),
    /// The model computed NaN or infinity for this request.
    #[error("{NO_NUMBERS}")]
    NoNumbers,
    /// A defect: sampling the request's next token panicked. Other requests are not affected.
    #[error("an internal error ended this request: {0}")]
    Panicked(String),
    /// A defect: the engine's thread panicked, and no request can run any more.
    #[error("the engine met a defect and ended before the request was finished")]
    EngineFailed,
    /// The scheduler was shut down before the request was finished.
    #[error("the server shut down before the request was finished")]
    ShutDown,
}
