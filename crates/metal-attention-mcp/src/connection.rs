//! A connection to a server, by one of the transports.

use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::http::Http;
use crate::limits::MAX_UNREAD;
use crate::message::Incoming;
use crate::stdio::Stdio;
use crate::{McpError, ServerOptions, Transport};

/// What comes from a server.
pub enum ServerEvent {
    /// A message.
    Message(Incoming),
    /// The beginning of a line or event that is no message.
    Invalid(String),
    /// The request with this id failed; without an id the connection did.
    Failed(Option<u64>, McpError),
}

/// A connection by one of the transports.
pub enum Connection {
    /// A child process.
    Stdio(Stdio),
    /// HTTP requests.
    Http(Http),
}

impl Connection {
    /// Starts the server's process, or prepares HTTP requests. Returns what the server sends, too, through a bounded queue:
    /// where it is full only the server waits.
    pub fn open(options: &ServerOptions) -> Result<(Self, Receiver<ServerEvent>), McpError> {
        let (sender, events) = sync_channel(MAX_UNREAD);
        let connection = match &options.transport {
            Transport::Stdio { command, args, env, cwd } => {
                Self::Stdio(Stdio::start(&options.name, command, args, env, cwd.as_deref(), sender)?)
            }
            Transport::Http { url, headers } => Self::Http(Http::new(url, headers, sender)?),
        };
        Ok((connection, events))
    }

    /// Sends a message. `id`: it is a request with this id; over HTTP its response, or its failure, is an event within `timeout`.
    pub fn send(&mut self, message: String, id: Option<u64>, timeout: Duration) -> Result<(), McpError> {
        match self {
            Self::Stdio(stdio) => stdio.send(message),
            Self::Http(http) => http.send(message, id, timeout),
        }
    }

    /// Sends a notification that the server must have before the messages that follow.
    pub fn send_in_order(&mut self, message: String, timeout: Duration) -> Result<(), McpError> {
        match self {
            Self::Stdio(stdio) => stdio.send(message),
            Self::Http(http) => http.send_in_order(message, timeout),
        }
    }

    /// The version of the protocol that was agreed on.
    pub fn set_version(&mut self, version: &'static str) {
        match self {
            Self::Stdio(_) => {}
            Self::Http(http) => http.set_version(version),
        }
    }

    /// Where the server's process has exited, ends the processes that it has started: they may hold its stdout open, whose end is
    /// awaited.
    pub fn reap(&mut self) {
        match self {
            Self::Stdio(stdio) => stdio.reap(),
            Self::Http(_) => {}
        }
    }

    /// `error`, for a process that has exited with its exit status.
    pub fn with_exit_status(&mut self, error: McpError) -> McpError {
        match (self, error) {
            (Self::Stdio(stdio), McpError::Ended { .. }) => stdio.exit_error(),
            (Self::Stdio(_) | Self::Http(_), error) => error,
        }
    }

    /// Ends the connection, and the server's process.
    pub fn close(&mut self) {
        match self {
            Self::Stdio(stdio) => stdio.close(),
            Self::Http(http) => http.close(),
        }
    }
}

/// A thread that ends with the connection.
pub fn spawn(work: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, McpError> {
    thread::Builder::new().name("mcp".into()).spawn(work).map_err(McpError::Thread)
}
