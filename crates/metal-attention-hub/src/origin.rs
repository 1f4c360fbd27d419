//! The origin of a request's address, and redirects.

use std::fmt::{self, Display, Formatter};

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use ureq::http::Uri;

/// Scheme, host and port of an address: requests to another origin go to another server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Origin {
    /// Whether the scheme is https, not http.
    https: bool,
    /// The host, in lower case.
    host: String,
    /// The port.
    port: u16,
}

impl Origin {
    /// The origin of `url`; `None` if it is no http or https address, or contains a user name.
    pub(crate) fn of(url: &str) -> Option<Self> {
        let uri: Uri = url.parse().ok()?;
        let https = match uri.scheme_str()? {
            "https" => true,
            "http" => false,
            _ => return None,
        };
        let authority = uri.authority()?;
        let host = authority.host().to_ascii_lowercase();
        if host.is_empty() || authority.as_str().contains('@') {
            return None;
        }
        Some(Self { https, host, port: uri.port_u16().unwrap_or(if https { 443 } else { 80 }) })
    }
}

/// Writes the host, with its port unless it is the default one.
impl Display for Origin {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match (self.https, self.port) {
            (true, 443) | (false, 80) => f.write_str(&self.host),
            (_, port) => write!(f, "{}:{port}", self.host),
        }
    }
}

/// The address to which a redirect from `url` leads; `None` if it is invalid, or would leave encryption.
pub(crate) fn redirected(url: &str, location: &str) -> Option<String> {
    let from = Origin::of(url)?;
    let scheme = if from.https { "https:" } else { "http:" };
    let next = if location.starts_with("//") {
        format!("{scheme}{location}")
    } else if location.starts_with('/') {
        let uri: Uri = url.parse().ok()?;
        format!("{scheme}//{}{location}", uri.authority()?)
    } else {
        location.to_owned()
    };
    let to = Origin::of(&next)?;
    (to.https || !from.https).then_some(next)
}

/// Percent-encodes a file's name for an address.
pub(crate) fn encoded(file: &str) -> impl Display {
    const ENCODED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~').remove(b'/');
    utf8_percent_encode(file, ENCODED)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_origin_is_scheme_host_and_port() {
        let same = |a, b| Origin::of(a).unwrap() == Origin::of(b).unwrap();
        assert!(same("https://Hub.co/a", "https://hub.co:443/b?c"));
        assert!(!same("https://hub.co", "http://hub.co"));
        assert!(!same("http://hub.co:1", "http://hub.co:2"));
        assert!(!same("https://hub.co", "https://hub.co.evil.org"));
        let name = |url| Origin::of(url).unwrap().to_string();
        assert_eq!((name("https://Hub.co/a"), name("http://hub.co:8080")), ("hub.co".into(), "hub.co:8080".into()));
        assert_eq!(Origin::of("https://a@hub.co"), None);
        assert_eq!(Origin::of("/path"), None);
    }

    #[test]
    fn redirects_are_resolved() {
        let to = |location| redirected("https://hub.co/a/b?c", location);
        assert_eq!(to("/d/e?f").as_deref(), Some("https://hub.co/d/e?f"));
        assert_eq!(to("//cdn.co/d").as_deref(), Some("https://cdn.co/d"));
        assert_eq!(to("https://cdn.co/d").as_deref(), Some("https://cdn.co/d"));
        assert_eq!(to("http://cdn.co/d"), None);
        assert_eq!(to("file:///etc/passwd"), None);
        assert_eq!(redirected("http://hub.co/a", "http://cdn.co/d").as_deref(), Some("http://cdn.co/d"));
        assert_eq!(encoded("a b/c#1?.gguf").to_string(), "a%20b/c%231%3F.gguf");
    }
}
