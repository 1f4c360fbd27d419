//! The errors of a server. The messages do not name the server: the caller does.

use std::io;
use std::time::Duration;

use crate::ConsentError;
use crate::limits::MAX_MESSAGE;
use crate::message::VERSIONS;

/// The reason why a server could not be used.
#[derive(Debug, thiserror::Error)]
pub enum McpError {
    /// Its process cannot be started.
    #[error("cannot start {command:?}: {source}")]
    Start {
        /// The program.
        command: String,
        /// The system's error.
        source: io::Error,
    },
    /// Its URL is invalid.
    #[error("{url:?} is no http or https URL")]
    Url {
        /// The URL.
        url: String,
    },
    /// A header is invalid.
    #[error("the header {name:?} has a name or a value that no header can have")]
    Header {
        /// The header's name. The value may be a secret.
        name: String,
    },
    /// The HTTP connection failed.
    #[error("cannot reach {url}: {source}")]
    Connection {
        /// The URL without its query.
        url: String,
        /// The cause.
        source: Box<ureq::Error>,
    },
    /// An HTTP status that is no success.
    #[error("{url} answered with status {status}{}", quoted(text))]
    Status {
        /// The URL without its query.
        url: String,
        /// The status.
        status: u16,
        /// The beginning of the body.
        text: String,
    },
    /// The HTTP session has ended.
    #[error("its session has ended; the next call opens another one")]
    SessionEnded,
    /// Its process or its stream of events ended.
    #[error("it ended{}{}", status.as_ref().map(|status| format!(" with {status}")).unwrap_or_default(), quoted(last_line))]
    Ended {
        /// The process's exit status.
        status: Option<String>,
        /// The last line of its stderr.
        last_line: String,
    },
    /// No response in time.
    #[error("it did not answer {method} within {} seconds (timeout in the configuration)", limit.as_secs_f64())]
    Timeout {
        /// The request.
        method: &'static str,
        /// The timeout.
        limit: Duration,
    },
    /// The caller cancelled the request.
    #[error("{method} was cancelled")]
    Cancelled {
        /// The request.
        method: &'static str,
    },
    /// A message beyond the limit.
    #[error("it sent a message longer than {MAX_MESSAGE} bytes")]
    MessageTooLong,
    /// Too many lines or events that are no messages.
    #[error("it sends what is no JSON-RPC message{}", quoted(text))]
    Invalid {
        /// The beginning of one of them.
        text: String,
    },
    /// Too many messages are queued for it, or too many requests under way.
    #[error("it does not read what is sent to it")]
    NotReading,
    /// The response is an error.
    #[error("it refused {method}: {message} (code {code})")]
    Refused {
        /// The request.
        method: &'static str,
        /// JSON-RPC's code.
        code: i64,
        /// The server's message.
        message: String,
    },
    /// The result of a request is not as the protocol defines it.
    #[error("its answer to {method} does not follow the protocol: {problem}")]
    Answer {
        /// The request.
        method: &'static str,
        /// The problem.
        problem: String,
    },
    /// An unknown version of the protocol.
    #[error("it speaks version {version:?} of the protocol; known are {}", VERSIONS.join(", "))]
    Version {
        /// Its version.
        version: String,
    },
    /// The system has no thread left.
    #[error("cannot start a thread: {0}; the limit of processes (ulimit -u) or of memory is too low")]
    Thread(io::Error),
    /// An unknown server.
    #[error("no MCP server {name:?} is configured; there are: {known}")]
    NoServer {
        /// The name.
        name: String,
        /// The names of the servers.
        known: String,
    },
    /// The server has no such tool, or the configuration does not select it.
    #[error("it has no tool {name:?}; there are: {known}")]
    NoTool {
        /// The name.
        name: String,
        /// The names of the tools.
        known: String,
    },
    /// The user has not consented to the call.
    #[error("a call of {tool} needs the user's consent")]
    NoConsent {
        /// The tool.
        tool: String,
    },
    /// The consent to all calls could not be written, so the tool was not called.
    #[error(transparent)]
    Consent(#[from] ConsentError),
}

impl McpError {
    /// Whether the connection cannot be used any more: the next request needs a new one.
    pub(crate) fn ends_connection(&self) -> bool {
        match self {
            Self::Start { .. }
            | Self::Url { .. }
            | Self::Header { .. }
            | Self::Connection { .. }
            // A server may answer 400 after it has lost the session.
            | Self::Status { .. }
            | Self::SessionEnded
            | Self::Ended { .. }
            | Self::MessageTooLong
            | Self::Invalid { .. }
            | Self::NotReading
            | Self::Version { .. }
            | Self::Thread(_) => true,
            Self::Timeout { .. }
            | Self::Cancelled { .. }
            | Self::Refused { .. }
            | Self::Answer { .. }
            | Self::NoServer { .. }
            | Self::NoTool { .. }
            | Self::NoConsent { .. }
            | Self::Consent(_) => false,
        }
    }
}

/// Returns `text` after a colon; an empty string for an empty text.
fn quoted(text: &str) -> String {
    let text = text.trim();
    if text.is_empty() { String::new() } else { format!(": {text}") }
}
