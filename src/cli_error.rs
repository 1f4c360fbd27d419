//! Errors of subcommands: a message for the user and an exit code for scripts.
//!
//! The exit codes are those that `--help` lists. Errors of the library and of the hub get theirs by their variant.

use std::io;

use metal_attention::backends::GpuErrorKind;
use metal_attention::gguf::GgufError;
use metal_attention::{CpuError, Error, ForwardError, RerankError};
use metal_attention_hub::{HubError, ModelName, known_model};

use crate::metadata_text::safe;

/// An error that ends a subcommand.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    /// Any other failure: exit code 1.
    #[error("{0}")]
    General(String),
    /// Flags or input that cannot work: exit code 2.
    #[error("{0}")]
    Usage(String),
    /// An error of the library: exit code 3, 4, 5 or 1 by its variant.
    #[error(transparent)]
    Engine(Error),
    /// An error of the library about a file that its message does not name; the exit code is that of `error`.
    #[error("{file}: {error}")]
    InFile {
        /// The file's name.
        file: String,
        /// The error.
        error: Error,
    },
    /// An error about the model that METAL_ATTENTION_MODEL names; the exit code is that of the inner error.
    #[error("the model that METAL_ATTENTION_MODEL names: {0}")]
    InEnvironment(Box<CliError>),
    /// No model of the given name was found: exit code 3.
    #[error("{0}")]
    NoModel(String),
    /// A well-known model could not be found or downloaded; the exit code is that of `error`.
    #[error("{given} is {name}: {error}")]
    KnownModel {
        /// The name that the user gave.
        given: String,
        /// The repository and file that were tried.
        name: String,
        /// The hub's error.
        error: Box<HubError>,
    },
    /// An error of a model's name, its download, or the cache: exit code 2, 3, 130 or 1 by its variant.
    #[error(transparent)]
    Hub(#[from] HubError),
    /// Output could not be written: exit code 1. If the reader closed the pipe (`| head`), nothing is printed and the exit
    /// code is 0.
    #[error("cannot write {to}: {source}")]
    Write {
        /// The destination, with a preposition: "to stdout".
        to: String,
        /// The system's reason.
        source: io::Error,
    },
    /// Ctrl-C: exit code 130, without a message.
    #[error("interrupted")]
    Interrupted,
}

impl From<Error> for CliError {
    fn from(error: Error) -> Self {
        if error.is_cancelled() { Self::Interrupted } else { Self::Engine(error) }
    }
}

impl CliError {
    /// Wraps the hub's error about the model that the user named `given`. For a well-known name the message includes the
    /// repository that was tried.
    pub fn of_model(given: &str, name: &ModelName, error: HubError) -> Self {
        if known_model(given).is_none() {
            return Self::Hub(error);
        }
        Self::KnownModel { given: safe(given), name: name.to_string(), error: Box::new(error) }
    }

    /// Wraps an error of writing to stdout.
    pub fn stdout(source: io::Error) -> Self {
        Self::Write { to: "to stdout".into(), source }
    }

    /// Whether the error is printed nowhere: Ctrl-C, or a closed pipe.
    pub fn is_quiet(&self) -> bool {
        match self {
            Self::InEnvironment(error) => error.is_quiet(),
            error => error.is_broken_pipe() || matches!(error, Self::Interrupted),
        }
    }

    /// The process's exit code, as documented in `--help`.
    pub fn exit_code(&self) -> u8 {
        match self {
            _ if self.is_broken_pipe() => 0,
            Self::General(_) | Self::Write { .. } => 1,
            Self::Usage(_) => 2,
            Self::Engine(error) | Self::InFile { error, .. } => engine_exit_code(error),
            Self::InEnvironment(error) => error.exit_code(),
            Self::NoModel(_) => 3,
            Self::Hub(error) => hub_exit_code(error),
            Self::KnownModel { error, .. } => hub_exit_code(error),
            Self::Interrupted => 130,
        }
    }

    /// Whether the reader of the output closed the pipe.
    fn is_broken_pipe(&self) -> bool {
        matches!(self, Self::Write { source, .. } if source.kind() == io::ErrorKind::BrokenPipe)
    }
}

/// The exit code of an error of the library.
fn engine_exit_code(error: &Error) -> u8 {
    match error {
        Error::Sampling(_)
        | Error::Rerank(RerankError::NoReranker)
        | Error::UnknownDevice { .. }
        | Error::EmptyPrompt
        | Error::NoText
        | Error::PromptTooLong { .. }
        | Error::Cpu(CpuError::Option { .. })
        | Error::Forward(ForwardError::TokenOutOfRange { .. } | ForwardError::ContextFull { .. }) => 2,
        Error::Gguf(GgufError::OutOfMemory { .. })
        | Error::Cpu(CpuError::OutOfMemory { .. })
        | Error::Forward(ForwardError::OutOfMemory { .. }) => 5,
        Error::Gguf(GgufError::Write { .. }) => 1,
        Error::NoNumbers
        | Error::Gguf(_)
        | Error::Model(_)
        | Error::Tokenizer(_)
        | Error::Rerank(_)
        | Error::Cpu(CpuError::Model(_)) => 3,
        Error::Gpu(error) => match error.kind() {
            GpuErrorKind::Option => 2,
            GpuErrorKind::OutOfMemory => 5,
            GpuErrorKind::Cancelled | GpuErrorKind::Device => 4,
        },
        Error::DeviceUnavailable { .. } | Error::Forward(ForwardError::Device { .. }) => 4,
        _ => 1,
    }
}

/// The exit code of an error of the hub.
fn hub_exit_code(error: &HubError) -> u8 {
    match error {
        HubError::Name { .. } | HubError::Tag { .. } | HubError::Environment { .. } | HubError::Unclear { .. } => 2,
        HubError::NoGguf { .. }
        | HubError::NoSuchModel { .. }
        | HubError::MissingPart { .. }
        | HubError::Offline { .. }
        | HubError::NoSuchRepo { .. }
        | HubError::NoSuchFile { .. }
        | HubError::NotCached { .. }
        | HubError::Checksum { .. } => 3,
        HubError::Interrupted { .. } => 130,
        _ => 1,
    }
}
