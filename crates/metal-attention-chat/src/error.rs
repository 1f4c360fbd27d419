//! What can be wrong with a template, or with a conversation for it.

use metal_attention_gguf::GgufError;
use minijinja::ErrorKind;

use crate::meter::MAX_STEPS;

/// Characters of an error message that come from a template.
const MAX_MESSAGE: usize = 2000;

/// Why a conversation could not be rendered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TemplateError {
    /// A key of the file has a value of the wrong type.
    #[error(transparent)]
    Metadata(#[from] GgufError),
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
        /// The line of the template that says it, from 1; 0 where it is not known.
        line: usize,
    },
    /// The template goes beyond a limit, as one does that was written to take memory, stack or time.
    #[error("the {template} goes beyond a limit: {limit}")]
    Limit {
        /// Which of the model's templates.
        template: &'static str,
        /// The limit.
        limit: TemplateLimit,
    },
    /// There is no thread for the template to run on.
    #[error("the chat template cannot run: no thread could be started: {0}")]
    Thread(#[source] std::io::Error),
    /// The template failed on this conversation.
    #[error("the chat template fails on this conversation: {message}")]
    Render {
        /// What went wrong, and in which line.
        message: String,
    },
}

/// What a template may not exceed. Real templates stay far below each of these.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TemplateLimit {
    /// The length of its text.
    #[error("it has {bytes} bytes; at most {limit} are read")]
    Source {
        /// Its size.
        bytes: usize,
        /// The largest size.
        limit: usize,
    },
    /// The length of a line, which minijinja counts with 16 bits.
    #[error("line {line} has more than {limit} bytes")]
    Line {
        /// The line.
        line: usize,
        /// How many it may have.
        limit: usize,
    },
    /// What stands between `{{` and `}}`, or `{%` and `%}`.
    #[error("the tag in line {line} has more than {limit} words and signs")]
    Tag {
        /// Where it begins.
        line: usize,
        /// How many there may be.
        limit: usize,
    },
    /// A variable's or an attribute's name.
    #[error("a name in line {line} has more than {limit} bytes")]
    Name {
        /// Where it is.
        line: usize,
        /// How many it may have.
        limit: usize,
    },
    /// Blocks in blocks, branches after branches, and operators in operators.
    #[error("blocks or operators are nested more than {limit} deep in line {line}")]
    Nesting {
        /// Where it gets too deep.
        line: usize,
        /// How deep it may be.
        limit: usize,
    },
    /// Attributes of a namespace.
    #[error("a namespace has more than {limit} attributes")]
    Attributes {
        /// How many there may be.
        limit: usize,
    },
    /// Instructions that one rendering runs.
    #[error("it takes more than {limit} steps")]
    Steps {
        /// How many it may take.
        limit: u64,
    },
    /// What one rendering writes.
    #[error("it writes more than {limit} bytes")]
    Output {
        /// How much it may write.
        limit: usize,
    },
    /// What one rendering makes, compares and searches.
    #[error("it makes or searches more than {limit} bytes of values")]
    Work {
        /// How much it may handle.
        limit: u64,
    },
    /// Lists and dictionaries in each other.
    #[error("a value is nested more than {limit} deep")]
    Depth {
        /// How deep it may be.
        limit: u32,
    },
    /// How long one rendering takes.
    #[error("it takes more than {seconds} seconds")]
    Time {
        /// How long it may take.
        seconds: u64,
    },
}

impl From<TemplateLimit> for minijinja::Error {
    fn from(limit: TemplateLimit) -> Self {
        Self::new(ErrorKind::InvalidOperation, "a limit of templates").with_source(limit)
    }
}

/// What a template passed to `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct RaisedException(pub String);

impl TemplateError {
    /// How far into the template the conversation got, where another form of it may get further.
    pub(crate) fn line_of_conversation(&self) -> Option<usize> {
        match self {
            Self::Refused { line, .. } => Some(*line),
            Self::Render { .. } => Some(0),
            Self::Metadata(_) | Self::Syntax { .. } | Self::Limit { .. } | Self::Thread(_) => None,
        }
    }

    /// An error of a template's rendering.
    pub(crate) fn of_rendering(template: &'static str, error: &minijinja::Error) -> Self {
        let line = error.line().unwrap_or(0);
        let mut source: Option<&dyn std::error::Error> = Some(error);
        let mut out_of_fuel = false;
        while let Some(error) = source {
            if let Some(RaisedException(message)) = error.downcast_ref() {
                return Self::Refused { message: shortened(message.clone()), line };
            }
            if let Some(&limit) = error.downcast_ref() {
                return Self::Limit { template, limit };
            }
            out_of_fuel |= error.downcast_ref().map(minijinja::Error::kind) == Some(ErrorKind::OutOfFuel);
            source = error.source();
        }
        if out_of_fuel {
            return Self::Limit { template, limit: TemplateLimit::Steps { limit: MAX_STEPS } };
        }
        Self::Render { message: with_causes(error) }
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
    shortened(text)
}

/// `message` with at most [`MAX_MESSAGE`] characters: a template chooses what its errors say.
fn shortened(mut message: String) -> String {
    if let Some((end, _)) = message.char_indices().nth(MAX_MESSAGE) {
        message.truncate(end);
        message += "...";
    }
    message
}
