//! On whose behalf a request comes: whoever shows a key is that key's, everybody else their address's.

use std::convert::Infallible;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;

use super::peer::Peer;
use crate::scheduler::Client;

impl<S: Send + Sync> FromRequestParts<S> for Client {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        // Set where the key was checked.
        let key = parts.extensions.get::<Self>().copied();
        let address = || parts.extensions.get::<Peer>().map(|peer| Self::Address(peer.0));
        Ok(key.or_else(address).unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use axum::http::Request;

    use super::*;

    #[test]
    fn a_key_comes_before_an_address() {
        let client = |key: Option<Client>, peer: Option<&str>| {
            let mut request = Request::new(());
            if let Some(key) = key {
                request.extensions_mut().insert(key);
            }
            if let Some(peer) = peer {
                request.extensions_mut().insert(Peer::at(peer.parse().unwrap()));
            }
            let (mut parts, ()) = request.into_parts();
            pollster::block_on(Client::from_request_parts(&mut parts, &())).unwrap()
        };
        let address = |text: &str| Client::Address(text.parse().unwrap());
        assert_eq!(client(Some(Client::Key(2)), Some("10.0.0.1")), Client::Key(2));
        assert_eq!(client(None, Some("10.0.0.1")), address("10.0.0.1"));
        assert_eq!(client(None, Some("2001:db8:1:2:3:4:5:6")), address("2001:db8:1:2::"));
        assert_eq!(client(None, None), Client::Unknown);
    }
}
