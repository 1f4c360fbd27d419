//! Errors of setting up a CPU forward pass.

use metal_attention_model::ModelError;

/// Why a [`CpuForwardPass`](crate::CpuForwardPass) could not be set up.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CpuError {
    /// The file does not describe a model that can run.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// Too little memory.
    #[error("out of memory: {what} needs {} MiB", bytes >> 20)]
    OutOfMemory {
        /// The purpose of the memory.
        what: &'static str,
        /// Bytes requested.
        bytes: u64,
    },
    /// The [`Watch`](metal_attention_model::Watch) was cancelled.
    #[error("cancelled")]
    Cancelled,
    /// An option outside its range.
    #[error("{option} must be at least 1{}", if *max == usize::MAX { String::new() } else { format!(" and at most {max}") })]
    Option {
        /// The option's name.
        option: &'static str,
        /// The largest value that can work.
        max: usize,
    },
    /// The system could not start the threads.
    #[error("could not start {n_threads} threads: {source}")]
    Threads {
        /// Threads requested.
        n_threads: usize,
        /// The system's error.
        source: std::io::Error,
    },
}
