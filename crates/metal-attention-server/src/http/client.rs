//! Extracts the scheduler's [`Client`] from a request: the unit of fair queueing. Requests with the same API key are
//! one client; without a key, those from one address.

use std::convert::Infallible;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use metal_attention::scheduler::Client;

use super::App;
use super::peer::Peer;

impl FromRequestParts<App> for Client {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &App) -> Result<Self, Infallible> {
        Ok(client(parts))
    }
}

fn client(parts: &Parts) -> Client {
    // Set by `guard::check_key`.
    let key = parts.extensions.get::<Client>().copied();
    let address = || parts.extensions.get::<Peer>().map(|peer| Client::Address(peer.0));
    key.or_else(address).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use axum::http::Request;

    use super::*;

    #[test]
    fn a_key_comes_before_an_address() {
        let client_with = |key: Option<Client>, peer: Option<&str>| {
            let mut request = Request::new(());
            if let Some(key) = key {
                request.extensions_mut().insert(key);
            }
            if let Some(peer) = peer {
                request.extensions_mut().insert(Peer::at(peer.parse().unwrap()));
            }
            let (parts, ()) = request.into_parts();
            client(&parts)
        };
        let address = |text: &str| Client::Address(text.parse().unwrap());
        assert_eq!(client_with(Some(Client::Key(2)), Some("10.0.0.1")), Client::Key(2));
        assert_eq!(client_with(None, Some("10.0.0.1")), address("10.0.0.1"));
        assert_eq!(client_with(None, Some("2001:db8:1:2:3:4:5:6")), address("2001:db8:1:2::"));
        assert_eq!(client_with(None, None), Client::Unknown);
    }
}
