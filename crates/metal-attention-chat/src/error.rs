//! The errors of compiling and rendering a chat template.

use metal_attention_gguf::GgufError;
use minijinja::ErrorKind;

use crate::meter::MAX_STEPS;

/// The maximum length in characters of an error message that comes from a template.
const MAX_MESSAGE: usize = 2000;

/// The reason why a template cannot be compiled, or a conversation not be rendered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TemplateError {
    /// A metadata key of the file has a value of the wrong type.
    #[error(transparent)]
    Metadata(#[from] GgufError),
    /// The template is not valid Jinja, or uses a construct that is not supported.
    #[error("the chat template does not compile: {message}")]
    Syntax {
        /// The error and its line.
        message: String,
    },
    /// The template refuses the conversation, by calling `raise_exception`.
    #[error("the model's chat template refuses this conversation: {message}")]
    Refused {
        /// The message of the template.
        message: String,
        /// The line of the template that raises it, from 1; 0 if it is not known.
        line: usize,
    },
    /// The template exceeds a limit, as a malicious template does that would use too much memory, stack or time.
    #[error("the {template} goes beyond a limit: {limit}")]
    Limit {
        /// The name of the template, for the message.
        template: &'static str,
        /// The limit that is exceeded.
        limit: TemplateLimit,
    },
    /// The operating system refused to start a thread for the template.
    #[error("the chat template cannot run: no thread could be started: {0}")]
    Thread(#[source] std::io::Error),
    /// Rendering failed on this conversation.
    #[error("the chat template fails on this conversation: {message}")]
    Render {
        /// The error and its line.
        message: String,
    },
}

/// A limit that a template exceeds. Published templates stay far below every limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TemplateLimit {
    /// The size of the template's source.
    #[error("it has {bytes} bytes; at most {limit} are read")]
    Source {
        /// The size of the source in bytes.
        bytes: usize,
        /// The maximum size in bytes.
        limit: usize,
    },
    /// The length of a line: minijinja counts columns with 16 bits.
    #[error("line {line} has more than {limit} bytes")]
    Line {
        /// The number of the line, from 1.
        line: usize,
        /// The maximum length in bytes.
        limit: usize,
    },
    /// The number of tokens in a tag, between `{{` and `}}` or `{%` and `%}`.
    #[error("the tag in line {line} has more than {limit} words and signs")]
    Tag {
        /// The line where the tag begins.
        line: usize,
        /// The maximum number of tokens.
        limit: usize,
    },
    /// The length of the name of a variable or attribute.
    #[error("a name in line {line} has more than {limit} bytes")]
    Name {
        /// The line of the name.
        line: usize,
        /// The maximum length in bytes.
        limit: usize,
    },
    /// The nesting of blocks, `elif` branches and operators.
    #[error("blocks or operators are nested more than {limit} deep in line {line}")]
    Nesting {
        /// The line where the nesting gets too deep.
        line: usize,
        /// The maximum depth.
        limit: usize,
    },
    /// The number of attributes of a namespace.
    #[error("a namespace has more than {limit} attributes")]
    Attributes {
        /// The maximum number of attributes.
        limit: usize,
    },
    /// The number of instructions of one rendering.
    #[error("it takes more than {limit} steps")]
    Steps {
        /// The maximum number of instructions.
        limit: u64,
    },
    /// The size of the output of one rendering.
    #[error("it writes more than {limit} bytes")]
    Output {
        /// The maximum size in bytes.
        limit: usize,
    },
    /// The size of the values that one rendering creates, compares and searches.
    #[error("it makes or searches more than {limit} bytes of values")]
    Work {
        /// The maximum size in bytes.
        limit: u64,
    },
    /// The nesting of lists and dictionaries.
    #[error("a value is nested more than {limit} deep")]
    Depth {
        /// The maximum depth.
        limit: u32,
    },
    /// The time of one rendering.
    #[error("it takes more than {seconds} seconds")]
    Time {
        /// The maximum time in seconds.
        seconds: u64,
    },
}

impl From<TemplateLimit> for minijinja::Error {
    fn from(limit: TemplateLimit) -> Self {
        Self::new(ErrorKind::InvalidOperation, "a limit of templates").with_source(limit)
    }
}

/// An exception that a template raised by `raise_exception`, with its message.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct RaisedException(pub String);

impl TemplateError {
    /// The line of the template that the rendering reached, for errors after which another variant of the conversation
    /// may get further; else `None`.
    pub(crate) fn line_of_conversation(&self) -> Option<usize> {
        match self {
            Self::Refused { line, .. } => Some(*line),
            Self::Render { .. } => Some(0),
            Self::Metadata(_) | Self::Syntax { .. } | Self::Limit { .. } | Self::Thread(_) => None,
        }
    }

    /// The error of a rendering, from minijinja's error and its causes.
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

/// The error and its causes, in one line.
pub(crate) fn with_causes(error: &minijinja::Error) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    shortened(text)
}

/// `message` cut to [`MAX_MESSAGE`] characters. A template controls the text of its errors.
fn shortened(mut message: String) -> String {
    if let Some((end, _)) = message.char_indices().nth(MAX_MESSAGE) {
        message.truncate(end);
        message += "...";
    }
    message
}
