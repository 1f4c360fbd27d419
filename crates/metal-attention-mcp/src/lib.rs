#![doc = include_str!("../README.md")]

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
