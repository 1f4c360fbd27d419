//! What can be wrong with a template, or with a conversation for it.

use std::fmt;

use metal_attention_gguf::GgufError;
use minijinja::ErrorKind;

/// Why a conversation could not be rendered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TemplateError {
    /// A key of the file has a value of the wrong type.
    #[error(transparent)]
    Metadata(#[from] GgufError),
    /// The template is too large to be one.
    #[error("the chat template has {bytes} bytes; at most {limit} are read")]
    TooLarge {
        /// Its size.
        bytes: usize,
        /// The largest size.
        limit: usize,
    },
    /// The template is not written in Jinja as it is understood here.
    #[error("the chat template does not compile: {message}")]
    Syntax {
        /// What is wrong, and in which line.
        message: String,
    },
    /// The template refuses the conversation, through its `raise_exception`.
    #[error("the model's chat template refuses this conversation: {message}")]
    Refused {
        /// What the template says.
        message: String,
    },
    /// The template takes too many steps, as one that never ends does.
    #[error("the chat template was stopped after {steps} steps")]
    TooManySteps {
        /// How many steps it may take.
        steps: u64,
    },
    /// The template writes too much.
    #[error("the chat template was stopped after it had written {limit} bytes")]
    TooLong {
        /// How much it may write.
        limit: usize,
    },
    /// The template failed on this conversation.
    #[error("the chat template fails on this conversation: {message}")]
    Render {
        /// What went wrong, and in which line.
        message: String,
    },
}

/// What a template passed to `raise_exception`.
#[derive(Debug)]
pub(crate) struct Raised(pub String);

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Raised {}

impl TemplateError {
    /// An error of a template's rendering, with the limits it ran under.
    pub(crate) fn of_rendering(error: &minijinja::Error, steps: u64, limit: usize) -> Self {
        let mut source: Option<&dyn std::error::Error> = Some(error);
        let mut out_of_fuel = false;
        while let Some(error) = source {
            if let Some(Raised(message)) = error.downcast_ref() {
                return Self::Refused { message: message.clone() };
            }
            let kind = error.downcast_ref().map(minijinja::Error::kind);
            if kind == Some(ErrorKind::WriteFailure) {
                return Self::TooLong { limit };
            }
            out_of_fuel |= kind == Some(ErrorKind::OutOfFuel);
            source = error.source();
        }
        if out_of_fuel { Self::TooManySteps { steps } } else { Self::Render { message: with_causes(error) } }
    }
}

/// An error and what caused it, in one line.
pub(crate) fn with_causes(error: &minijinja::Error) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}
