//! A connection to a server, by either transport.

use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::http::Http;
use crate::limits::MAX_HELD;
use crate::message::Incoming;
use crate::stdio::Stdio;
use crate::{McpError, ServerOptions, Transport};

/// What comes from a server.
pub enum Event {
    /// A message.
    Message(Incoming),
    /// The beginning of something that is none.
    Junk(String),
    /// The request with this id has no answer; without an id no request has one any more.
    Failed(Option<u64>, McpError),
}

/// A way to send messages to a server.
pub enum Connection {
    /// To its standard input.
    Stdio(Stdio),
    /// In HTTP requests.
    Http(Http),
}

impl Connection {
    /// Starts the server's program, or gets ready to send HTTP requests; with what comes from the server. What is not
    /// looked at holds up the server and nothing else.
    pub fn open(options: &ServerOptions) -> Result<(Self, Receiver<Event>), McpError> {
        let (sender, events) = sync_channel(MAX_HELD);
        let connection = match &options.transport {
            Transport::Stdio { command, args, env, cwd } => {
                Self::Stdio(Stdio::start(&options.name, command, args, env, cwd.as_deref(), sender)?)
            }
            Transport::Http { url, headers } => Self::Http(Http::new(url, headers, sender)?),
        };
        Ok((connection, events))
    }

    /// Sends a message. `id`: it is a request with this id; its answer, or a failure, is an event within `timeout` over HTTP.
    pub fn send(&mut self, message: String, id: Option<u64>, timeout: Duration) -> Result<(), McpError> {
        match self {
            Self::Stdio(stdio) => stdio.send(message),
            Self::Http(http) => http.send(message, id, timeout),
        }
    }

    /// Sends a message that has no answer, before any that follows.
    pub fn send_first(&mut self, message: String, timeout: Duration) -> Result<(), McpError> {
        match self {
            Self::Stdio(stdio) => stdio.send(message),
            Self::Http(http) => http.send_first(message, timeout),
        }
    }

    /// The version of the protocol that was agreed on.
    pub fn set_version(&mut self, version: &'static str) {
        match self {
            Self::Stdio(_) => {}
            Self::Http(http) => http.set_version(version),
        }
    }

    /// `error` with what is known of how the server's process ended.
    pub fn explained(&mut self, error: McpError) -> McpError {
        match (self, error) {
            (Self::Stdio(stdio), McpError::Ended { .. }) => stdio.ended(),
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
