//! Servers of the Model Context Protocol, over HTTP and over pipes.

mod mcp_http;
mod mcp_stdio;
