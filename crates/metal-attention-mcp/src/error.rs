//! Why a server could not be used.

use std::io;
use std::time::Duration;

use crate::limits::MAX_MESSAGE;
use crate::message::VERSIONS;

/// Why a server could not be used. The messages do not name the server.
#[derive(Debug, thiserror::Error)]
pub enum McpError {
    /// Its program does not run.
    #[error("cannot start {command:?}: {source}")]
    Start {
        /// The program.
        command: String,
        /// The system's reason.
        source: io::Error,
    },
    /// Its address is none.
    #[error("{url:?} is no http or https URL")]
    Url {
        /// The address.
        url: String,
    },
    /// A header that is sent to it cannot be one.
    #[error("the header {name:?} has a name or a value that no header can have")]
    Header {
        /// The header's name. The value may be a secret.
        name: String,
    },
    /// There is no connection to it, or the connection broke.
    #[error("cannot reach {url}: {source}")]
    Connection {
        /// The address.
        url: String,
        /// Why.
        source: Box<ureq::Error>,
    },
    /// An HTTP status that is no success.
    #[error("{url} answered with status {status}{}", quoted(text))]
    Status {
        /// The address.
        url: String,
        /// The status.
        status: u16,
        /// The beginning of the answer.
        text: String,
    },
    /// The HTTP session is over.
    #[error("its session is over; the next call begins another one")]
    SessionEnded,
    /// Its process or its stream of events ended.
    #[error("it ended{}{}", status.as_ref().map(|status| format!(" with {status}")).unwrap_or_default(), quoted(last_words))]
    Ended {
        /// How its process ended.
        status: Option<String>,
        /// The end of what it wrote to stderr.
        last_words: String,
    },
    /// No answer in time.
    #[error("it did not answer {method} within {} seconds (timeout in the configuration)", limit.as_secs_f64())]
    Timeout {
        /// The request.
        method: &'static str,
        /// The time that it had.
        limit: Duration,
    },
    /// The caller wanted no answer any more.
    #[error("{method} was stopped before it had an answer")]
    Cancelled {
        /// The request.
        method: &'static str,
    },
    /// A message beyond the limit.
    #[error("it sent a message longer than {MAX_MESSAGE} bytes")]
    MessageTooLong,
    /// Too much that is no message.
    #[error("it sends what is no JSON-RPC message{}", quoted(text))]
    Junk {
        /// The beginning of a part of it.
        text: String,
    },
    /// It reads nothing, or answers nothing, and messages wait for it.
    #[error("it does not read what is sent to it")]
    Deaf,
    /// An error as the answer.
    #[error("it refused {method}: {message} (code {code})")]
    Refused {
        /// The request.
        method: &'static str,
        /// The kind of error.
        code: i64,
        /// What the server says.
        message: String,
    },
    /// An answer without what the protocol wants of it.
    #[error("its answer to {method} is not what the protocol wants: {problem}")]
    Answer {
        /// The request.
        method: &'static str,
        /// What is wrong.
        problem: String,
    },
    /// A version of the protocol that is not known here.
    #[error("it speaks version {version:?} of the protocol; known are {}", VERSIONS.join(", "))]
    Version {
        /// Its version.
        version: String,
    },
    /// The system gave no thread.
    #[error("cannot start a thread: {0}; the limit of processes (ulimit -u) or of memory is too low")]
    Thread(io::Error),
    /// There is no such server.
    #[error("no MCP server {name:?} is configured; there are: {known}")]
    NoServer {
        /// The name.
        name: String,
        /// The names there are.
        known: String,
    },
    /// The server has no such tool, or the configuration leaves it out.
    #[error("it has no tool {name:?}; there are: {known}")]
    NoTool {
        /// The name.
        name: String,
        /// The names there are.
        known: String,
    },
}

impl McpError {
    /// Whether the connection is of no more use: the next request needs a new one.
    pub(crate) fn ends_connection(&self) -> bool {
        match self {
            Self::Start { .. }
            | Self::Url { .. }
            | Self::Header { .. }
            | Self::Connection { .. }
            | Self::SessionEnded
            | Self::Ended { .. }
            | Self::MessageTooLong
            | Self::Junk { .. }
            | Self::Deaf
            | Self::Version { .. }
            | Self::Thread(_) => true,
            Self::Status { .. }
            | Self::Timeout { .. }
            | Self::Cancelled { .. }
            | Self::Refused { .. }
            | Self::Answer { .. }
            | Self::NoServer { .. }
            | Self::NoTool { .. } => false,
        }
    }
}

/// `text` where there is some, after a colon.
fn quoted(text: &str) -> String {
    let text = text.trim();
    if text.is_empty() { String::new() } else { format!(": {text}") }
}
