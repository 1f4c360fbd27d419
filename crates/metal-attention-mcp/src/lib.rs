//! A client of Model Context Protocol (MCP) servers.
//!
//! An [`McpClient`] is connected to one server, over stdio or streamable HTTP. A [`Toolbox`] has the servers of a
//! configuration: it starts them on demand, lists their tools under names that a model can call, and calls them with
//! the user's [`Consent`].
//!
//! Servers are not trusted: each message, list and result is limited in size, each request in time, and a tool's result
//! is converted to plain text ([`ToolResult`]).
//!
//! Why this is not `rmcp`, the protocol's own crate: of the protocol only `initialize`, `ping`, `tools/list` and
//! `tools/call` are needed, from blocking code. `rmcp` 3.11 (61,000 lines with its server half) brings 26 crates that
//! nothing else here needs, such as reqwest, aws-lc and process-wrap. It had three major versions within 2026. The
//! limits of lists, schemas and results, and their plain text, would be code of this crate all the same.

mod client;
mod connection;
mod consents;
mod error;
mod http;
mod limits;
mod message;
mod options;
mod process_groups;
mod result;
mod sse;
mod stdio;
mod text;
mod tool;
mod toolbox;

pub use client::{McpClient, ServerInfo, ToolList};
pub use consents::{Consent, ConsentError, Consents};
pub use error::McpError;
pub use limits::{MAX_MESSAGE, MAX_RESULT, MAX_SCHEMA, MAX_TOOLS};
pub use options::{ServerOptions, Transport};
pub use process_groups::kill_servers;
pub use result::ToolResult;
pub use tool::ServerTool;
pub use toolbox::{OfferedTool, ServerReport, Toolbox};

/// Whether the caller has cancelled the running request. Polled several times a second.
pub type Cancelled<'a> = &'a (dyn Fn() -> bool + Sync);
