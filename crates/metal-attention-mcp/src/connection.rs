//! The connection to a server, over one of the transports.

use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::http::Http;
use crate::limits::MAX_UNREAD;
use crate::message::Incoming;
use crate::stdio::Stdio;
use crate::{McpError, ServerOptions, Transport};

/// An event of a connection.
pub enum ServerEvent {
    /// A message of the server.
    Message(Incoming),
    /// The beginning of a line or event of the server that is no message.
    Invalid(String),
    /// The request with this id has failed; without an id, the connection.
    Failed(Option<u64>, McpError),
}

/// A connection over one of the transports.
pub enum Connection {
    /// A child process.
    Stdio(Stdio),
    /// HTTP requests.
    Http(Http),
}

impl Connection {
    /// Starts the server's process, or prepares HTTP requests. Also returns the events, through a bounded queue: when
    /// it is full, the server has to wait.
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

    /// Sends a message. `id`: the id if it is a request; over HTTP its response, or its failure, is an event within
    /// `timeout`.
    pub fn send(&mut self, message: String, id: Option<u64>, timeout: Duration) -> Result<(), McpError> {
        match self {
            Self::Stdio(stdio) => stdio.send(message),
            Self::Http(http) => http.send(message, id, timeout),
        }
    }

    /// Sends a notification that the server must receive before later messages.
    pub fn send_in_order(&mut self, message: String, timeout: Duration) -> Result<(), McpError> {
        match self {
            Self::Stdio(stdio) => stdio.send(message),
            Self::Http(http) => http.send_in_order(message, timeout),
        }
    }

    /// Sets the negotiated version of the protocol.
    pub fn set_version(&mut self, version: &'static str) {
        match self {
            Self::Stdio(_) => {}
            Self::Http(http) => http.set_version(version),
        }
    }

    /// Kills the child processes of a server that has exited: they may keep its stdout open, whose end is awaited.
    pub fn reap(&mut self) {
        match self {
            Self::Stdio(stdio) => stdio.reap(),
            Self::Http(_) => {}
        }
    }

    /// Adds the exit status to an error of a process that has exited.
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

/// Starts a thread, which must end with the connection.
pub fn spawn(work: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, McpError> {
    thread::Builder::new().name("mcp".into()).spawn(work).map_err(McpError::Thread)
}
