//! The options of the HTTP server, as the command line sets them.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::http::HeaderValue;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use super::PageTools;
use super::page::Page;
use super::pictures::PictureOptions;
use super::responses::ResponseStore;

/// The options of the HTTP server.
#[derive(Debug, Clone)]
pub struct HttpOptions {
    /// API keys, one of which each request must send; empty: no key is required.
    pub keys: ApiKeys,
    /// Whether clients with a key may change models even where the server does not listen on the loopback alone.
    pub allow_manage: bool,
    /// Whether `/metrics` needs no key, for scrapers that cannot send one.
    pub open_metrics: bool,
    /// The origin whose pages may send requests from a browser (CORS), `*` for any; `None`: only this server's own
    /// page.
    pub cors_origin: Option<HeaderValue>,
    /// Host names that requests may have in addition to `localhost` and the loopback's IP addresses, where the server
    /// listens on the loopback without keys: that of `--host`, and those of a proxy (`--allowed-host`).
    pub hosts: Vec<String>,
    /// Whether a conversation that exceeds the context loses its oldest turns instead of being refused.
    pub context_shift: bool,
    /// The folder for saved slots; `None`: saving is disabled.
    pub slot_save_path: Option<PathBuf>,
    /// The limits of pictures.
    pub pictures: PictureOptions,
    /// Maximum bytes of a request's body, without its pictures.
    pub max_body: usize,
    /// Maximum bytes of all bodies in memory.
    pub max_bodies: usize,
    /// The store of responses (Responses interface).
    pub responses: ResponseStore,
    /// Maximum connections. At the limit, connections that wait for their clients are closed for new ones.
    pub max_connections: usize,
    /// Maximum connections of one address; `None`: three quarters of all.
    pub max_connections_per_address: Option<usize>,
    /// Maximum time from the start of a connection, or from the previous response, to the end of a request's head.
    pub header_timeout: Duration,
    /// Maximum time from a request's head to the end of its body.
    pub read_timeout: Duration,
    /// Maximum time in which a client reads nothing of its response.
    pub write_timeout: Duration,
    /// Maximum time of a request, queueing included; `None`: unlimited.
    pub timeout: Option<Duration>,
    /// The time after a shutdown signal in which requests are still accepted while `/ready` fails.
    pub drain_delay: Duration,
    /// The time after that in which running requests may finish.
    pub grace: Duration,
    /// What is at `/`.
    pub page: Page,
    /// The MCP tools that the page may call; `None`: no MCP server is configured.
    pub tools: Option<Arc<PageTools>>,
}

impl Default for HttpOptions {
    fn default() -> Self {
        Self {
            keys: ApiKeys::default(),
            allow_manage: false,
            open_metrics: false,
            cors_origin: None,
            hosts: Vec::new(),
            context_shift: false,
            slot_save_path: None,
            pictures: PictureOptions::default(),
            max_body: 8 << 20,
            max_bodies: 512 << 20,
            responses: ResponseStore::default(),
            max_connections: 512,
            max_connections_per_address: None,
            header_timeout: Duration::from_secs(10),
            read_timeout: Duration::from_secs(30),
            write_timeout: Duration::from_secs(60),
            timeout: None,
            drain_delay: Duration::ZERO,
            grace: Duration::from_secs(10),
            page: Page::default(),
            tools: None,
        }
    }
}

impl HttpOptions {
    /// Maximum connections of one address.
    pub(super) fn connections_of_one(&self) -> usize {
        self.max_connections_per_address.unwrap_or(self.max_connections - self.max_connections / 4)
    }
}

/// The error of an empty API key: it would match no request, or every one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("an API key is empty")]
pub struct EmptyKey;

/// The API keys of the server. Their `Debug` output does not show them.
#[derive(Clone, Default)]
pub struct ApiKeys(Vec<String>);

impl ApiKeys {
    /// Keeps `keys` without surrounding white space. Fails if one is empty.
    pub fn new(keys: impl IntoIterator<Item = String>) -> Result<Self, EmptyKey> {
        let key = |key: String| Some(key.trim().to_owned()).filter(|key| !key.is_empty()).ok_or(EmptyKey);
        Ok(Self(keys.into_iter().map(key).collect::<Result<_, _>>()?))
    }

    /// Whether no key is required.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the index of `key`; `None`: it is no valid key. Takes the same time however much of the key is correct.
    pub fn number(&self, key: &[u8]) -> Option<usize> {
        let equal = self.0.iter().map(|known| bool::from(known.as_bytes().ct_eq(key)));
        equal.enumerate().fold(None, |found, (i, equal)| if equal { Some(i) } else { found })
    }

    /// Returns a stable identifier of key `number` from which the key cannot be derived.
    pub(super) fn fingerprint(&self, number: usize) -> Option<String> {
        let digest = Sha256::new_with_prefix("metal-attention key\n").chain_update(self.0.get(number)?).finalize();
        let digits = digest.iter().flat_map(|byte| [byte >> 4, byte & 15]);
        digits.map(|digit| char::from_digit(digit.into(), 16)).collect()
    }
}

impl std::fmt::Debug for ApiKeys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} keys", self.0.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_key_is_accepted_and_nothing_else() {
        let keys = ApiKeys::new(["one".to_owned(), " three\n".to_owned()]).unwrap();
        assert_eq!((keys.number(b"one"), keys.number(b"three")), (Some(0), Some(1)));
        for wrong in [&b""[..], b"on", b"onee", b"One", b"three "] {
            assert_eq!(keys.number(wrong), None, "{wrong:?}");
        }
        assert_eq!(format!("{keys:?}"), "2 keys");
        assert_eq!(keys.fingerprint(0).map(|name| name.len()), Some(64));
        assert!(keys.fingerprint(0) != keys.fingerprint(1) && keys.fingerprint(2).is_none());
        assert!(ApiKeys::default().is_empty() && ApiKeys::default().number(b"").is_none());
        for empty in ["", " ", "\n"] {
            assert_eq!(ApiKeys::new(["one".to_owned(), empty.to_owned()]).unwrap_err(), EmptyKey);
        }
    }
}
