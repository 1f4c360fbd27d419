//! Who is at the other end of a connection.

use std::net::IpAddr;

/// The address that a request came from: an extension of every request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Peer(pub IpAddr);
