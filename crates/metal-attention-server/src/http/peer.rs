//! The client of a connection, by its address.

use std::net::{IpAddr, Ipv6Addr};

/// The address that a request came from (an extension of every request). Of an IPv6 address only the /64 network is
/// kept: one client has all addresses of its network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Peer(pub IpAddr);

impl Peer {
    /// The peer at `address`.
    pub fn at(address: IpAddr) -> Self {
        Self(match address.to_canonical() {
            IpAddr::V6(v6) => IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits() >> 64 << 64)),
            v4 @ IpAddr::V4(_) => v4,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_has_one_name() {
        let peer = |address: &str| Peer::at(address.parse().unwrap());
        assert_eq!(peer("::ffff:10.1.2.3"), peer("10.1.2.3"));
        assert_ne!(peer("10.1.2.3"), peer("10.1.2.4"));
        assert_eq!(peer("2001:db8::1"), peer("2001:db8::ffff:1"));
        assert_ne!(peer("2001:db8::1"), peer("2001:db8:0:1::1"));
    }
}
