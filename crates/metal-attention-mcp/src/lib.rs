//! A client of Model Context Protocol (MCP) servers.
//!
//! A [`Client`] speaks with one server, over its standard streams or streamable HTTP. A [`Toolbox`] has the servers of a
//! configuration: it starts them when they are needed, lists their tools under names that a model can call, calls them,
//! and knows which ones the user has allowed ([`Consents`]).
//!
//! A server is not trusted: each message, list and result is bounded in size, each request in time, and what a tool gives
//! becomes plain text ([`ToolResult`]).

mod client;
mod connection;
mod consents;
mod error;
mod event_stream;
mod http;
mod limits;
mod message;
mod options;
mod result;
mod stdio;
mod text;
mod tool;
mod toolbox;

pub use client::{Client, Identity, ToolList};
pub use consents::{ConsentError, Consents};
pub use error::McpError;
pub use limits::{MAX_MESSAGE, MAX_RESULT, MAX_SCHEMA, MAX_TOOLS};
pub use options::{ServerOptions, Transport};
pub use result::ToolResult;
pub use tool::ServerTool;
pub use toolbox::{OfferedTool, ServerReport, Toolbox};

/// Whether the user or the caller no longer wants what is under way. It is asked several times a second.
pub type Cancelled<'a> = &'a (dyn Fn() -> bool + Sync);
