//! Tests of the client of the Model Context Protocol (MCP), with servers over HTTP and over stdio.

mod mcp_http;
mod mcp_stdio;
