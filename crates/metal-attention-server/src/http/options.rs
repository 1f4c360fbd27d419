//! How the server is set up.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::http::HeaderValue;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use super::PageTools;
use super::responses::ResponseStore;

/// How the server is set up.
#[derive(Debug, Clone)]
pub struct HttpOptions {
    /// Keys that clients must show one of; empty: everybody may ask.
    pub keys: ApiKeys,
    /// Clients with a key may change models, also where the server does not listen on the loopback alone.
    pub allow_manage: bool,
    /// `/metrics` needs no key, as a scraper that cannot send one wants it.
    pub open_metrics: bool,
    /// The origin whose pages may ask from a browser, `*` for any; `None`: this server's own page only.
    pub cors_origin: Option<HeaderValue>,
    /// Names besides `localhost` and IP addresses of the loopback that the Host header may have, where the server listens
    /// on the loopback and asks for no key: that of `--host`, and those of a proxy (`--allowed-host`).
    pub hosts: Vec<String>,
    /// Conversations that the context has no room for lose their oldest turns, instead of being refused.
    pub context_shift: bool,
    /// The folder for the files of slots; `None`: none is saved.
    pub slot_save_path: Option<PathBuf>,
    /// Most bytes of a request's body.
    pub max_body: usize,
    /// Most bytes of all bodies that are held at a time.
    pub max_bodies: usize,
    /// Where responses are kept.
    pub responses: ResponseStore,
    /// Most connections at a time. Where there are more, those that wait for their clients are given up.
    pub max_connections: usize,
    /// Most connections of one address at a time; `None`: three quarters of all.
    pub max_connections_per_address: Option<usize>,
    /// Longest time between a connection and the end of a request's head, or between two requests.
    pub header_timeout: Duration,
    /// Longest time from a request's head to the end of its body.
    pub read_timeout: Duration,
    /// Longest time that a client may take no data of its answer.
    pub write_timeout: Duration,
    /// Longest time a request may take, waiting included.
    pub timeout: Option<Duration>,
    /// How long requests are still taken after a shutdown was asked for, while `/ready` says that the server ends.
    pub drain_delay: Duration,
    /// How long running requests may go on after that.
    pub grace: Duration,
    /// The tools of MCP servers that the page may call.
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
            max_body: 8 << 20,
            max_bodies: 64 << 20,
            responses: ResponseStore::default(),
            max_connections: 512,
            max_connections_per_address: None,
            header_timeout: Duration::from_secs(10),
            read_timeout: Duration::from_secs(30),
            write_timeout: Duration::from_secs(60),
            timeout: None,
            drain_delay: Duration::ZERO,
            grace: Duration::from_secs(10),
            tools: None,
        }
    }
}

impl HttpOptions {
    /// Most connections of one address.
    pub(super) fn connections_of_one(&self) -> usize {
        self.max_connections_per_address.unwrap_or(self.max_connections - self.max_connections / 4)
    }
}

/// No key can be so: it would match no request, or let everybody in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("an API key is empty")]
pub struct EmptyKey;

/// Keys of which a client must show one. They appear in no log.
#[derive(Clone, Default)]
pub struct ApiKeys(Vec<String>);

impl ApiKeys {
    /// These keys, without the white space around them.
    pub fn new(keys: impl IntoIterator<Item = String>) -> Result<Self, EmptyKey> {
        let key = |key: String| Some(key.trim().to_owned()).filter(|key| !key.is_empty()).ok_or(EmptyKey);
        Ok(Self(keys.into_iter().map(key).collect::<Result<_, _>>()?))
    }

    /// Whether there is no key, so that everybody may ask.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The number of `key`, where it is one of them, in a time that does not tell how much of it is right.
    pub fn number(&self, key: &[u8]) -> Option<usize> {
        let equal = self.0.iter().map(|known| bool::from(known.as_bytes().ct_eq(key)));
        equal.enumerate().fold(None, |found, (i, equal)| if equal { Some(i) } else { found })
    }

    /// A name for key `number` that tells nothing of it, and is the same as long as the key is.
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
    fn any_key_opens_and_nothing_else() {
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
