//! Limits on the messages of a server, and on the queues of a connection.

/// Bytes of a message.
pub const MAX_MESSAGE: usize = 4 << 20;
/// Tools of a server; further ones are left out.
pub const MAX_TOOLS: usize = 128;
/// Bytes of the JSON schema of a tool's arguments; a tool with a longer one is left out.
pub const MAX_SCHEMA: usize = 32 << 10;
/// Bytes of a result's text; the rest is cut off.
pub const MAX_RESULT: usize = 64 << 10;
/// Bytes of a tool's name; a tool with a longer one is left out.
pub(crate) const MAX_NAME: usize = 128;
/// Bytes of a tool's description; the rest is cut off.
pub(crate) const MAX_DESCRIPTION: usize = 4 << 10;
/// Pages of a list of tools.
pub(crate) const MAX_PAGES: usize = 64;
/// Invalid messages during one request.
pub(crate) const MAX_INVALID: usize = 100;
/// Messages of a server that are queued.
pub(crate) const MAX_UNREAD: usize = 4;
/// Messages that are queued for a server's stdin.
pub(crate) const MAX_UNSENT: usize = 16;
/// Concurrent HTTP requests to a server.
pub(crate) const MAX_REQUESTS: usize = 8;
/// Bytes of a server's output that an error quotes.
pub(crate) const MAX_QUOTED: usize = 300;
