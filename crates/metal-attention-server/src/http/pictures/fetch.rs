//! Pictures at addresses: fetched over HTTPS from hosts that the server's options name.
//!
//! A request must not make the server reach what its client cannot reach: addresses that names resolve to are checked
//! before a connection is made, and redirects stay on their host.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;
use std::time::{Duration, Instant};

use ureq::Agent;
use ureq::config::Config;
use ureq::http::Uri;
use ureq::http::header::LOCATION;
use ureq::unversioned::resolver::{DefaultResolver, ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::{DefaultConnector, NextTimeout};

use crate::http::{ApiError, task_outcome};

/// Maximum time of a fetch, redirects included.
const MAX_TIME: Duration = Duration::from_secs(10);
/// Maximum bytes of a file.
const MAX_BYTES: u64 = 20_000_000;
/// Maximum redirects.
const MAX_REDIRECTS: usize = 3;

/// A host whose pictures are fetched: a name, `*.` and a name for all names below it, or `*` for all hosts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostName(String);

impl FromStr for HostName {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let name = text.to_ascii_lowercase();
        let rest = name.strip_prefix("*.").unwrap_or(&name);
        let is_name = |name: &str| {
            !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b'_'))
        };
        if name == "*" || is_name(rest) {
            Ok(Self(name))
        } else {
            Err("expected the name of a host, such as upload.wikimedia.org or *.wikimedia.org")
        }
    }
}

impl HostName {
    /// Whether a host, in lower case, has this name.
    fn matches(&self, host: &str) -> bool {
        match self.0.strip_prefix('*') {
            Some(end) => host.len() > end.len() && host.ends_with(end),
            None => host == self.0,
        }
    }
}

impl fmt::Display for HostName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The address of a picture on an allowed host.
#[derive(Debug, Clone, PartialEq)]
pub struct PictureUrl(Uri);

impl PictureUrl {
    /// Checks an address. Nothing is looked up.
    pub fn new(url: &str, allowed: &[HostName]) -> Result<Self, ApiError> {
        let refused = |message: String| Err(ApiError::field("image", message));
        let shown: String = url.chars().take(100).collect();
        let Ok(uri) = Uri::try_from(url) else {
            return refused(format!("{shown:?} is no address: send the picture itself, as data:image/png;base64,..."));
        };
        match uri.scheme_str() {
            Some("https") => {}
            Some(scheme) => {
                return refused(format!(
                    "pictures are not fetched over {scheme}: send the picture itself, as data:image/png;base64,..., or an https: address"
                ));
            }
            None => return refused(format!("{shown:?} has no scheme: send the picture as data:image/png;base64,...")),
        }
        let host = uri.host().unwrap_or_default().to_ascii_lowercase();
        let has_user = uri.authority().is_some_and(|authority| authority.as_str().contains('@'));
        if has_user || uri.port_u16().is_some_and(|port| port != 443) {
            return refused("an address of a picture may have neither a user nor a port".into());
        }
        if !allowed.iter().any(|name| name.matches(&host)) {
            return refused(format!(
                "this server fetches no pictures from {host:?}: send the picture itself, as data:image/png;base64,..., or start the \
                 server with --allow-image-urls {host}"
            ));
        }
        Ok(Self(uri))
    }
}

/// Fetches a picture on a blocking thread, which holds `permit` also if nobody waits for it any more. Returns both.
pub async fn fetch<P: Send + 'static>(url: PictureUrl, permit: P) -> Result<(Vec<u8>, P), ApiError> {
    let blocking = tokio::task::spawn_blocking(move || {
        let host = url.0.host().unwrap_or_default().to_owned();
        let bytes = get(url.0, &agent(OnlyPublic::default()));
        bytes
            .map(|bytes| (bytes, permit))
            .map_err(|why| ApiError::field("image", format!("the picture at {host} could not be fetched: {why}")))
    });
    task_outcome(blocking.await)
}

/// A client with this resolver.
fn agent(resolver: OnlyPublic) -> Agent {
    let config = Agent::config_builder()
        .user_agent(concat!("metal-attention/", env!("CARGO_PKG_VERSION")))
        .http_status_as_error(false)
        // A proxy would resolve names itself.
        .proxy(None)
        .max_redirects(0)
        .max_redirects_will_error(false)
        .build();
    Agent::with_parts(config, DefaultConnector::default(), resolver)
}

/// Sends a request, and follows redirects on the same host. Fails with the reason.
fn get(mut uri: Uri, agent: &Agent) -> Result<Vec<u8>, String> {
    let deadline = Instant::now() + MAX_TIME;
    for _ in 0..=MAX_REDIRECTS {
        let left = deadline.saturating_duration_since(Instant::now());
        let request = agent.get(uri.clone()).config().timeout_global(Some(left)).build();
        let mut response = request.call().map_err(|error| error.to_string())?;
        match response.status().as_u16() {
            200 => {
                let body = response.body_mut().with_config().limit(MAX_BYTES);
                return body.read_to_vec().map_err(|error| error.to_string());
            }
            status @ (301 | 302 | 303 | 307 | 308) => {
                let to = response.headers().get(LOCATION).and_then(|to| to.to_str().ok()).unwrap_or_default();
                uri = redirected(&uri, to).ok_or_else(|| format!("status {status} leads to another host"))?;
            }
            status => return Err(format!("its server answers with status {status}")),
        }
    }
    Err(format!("it has more than {MAX_REDIRECTS} redirects"))
}

/// The address that a redirect of `from` leads to; `None`: it is on another host, or no address.
fn redirected(from: &Uri, to: &str) -> Option<Uri> {
    if to.starts_with('/') && !to.starts_with("//") {
        let mut parts = from.clone().into_parts();
        parts.path_and_query = Some(to.parse().ok()?);
        return Uri::from_parts(parts).ok();
    }
    let to = Uri::try_from(to).ok()?;
    (to.scheme() == from.scheme() && to.authority() == from.authority()).then_some(to)
}

/// Resolves names to public addresses only.
#[derive(Debug, Default)]
struct OnlyPublic(DefaultResolver);

impl Resolver for OnlyPublic {
    fn resolve(&self, uri: &Uri, config: &Config, timeout: NextTimeout) -> Result<ResolvedSocketAddrs, ureq::Error> {
        let addresses = self.0.resolve(uri, config, timeout)?;
        if addresses.iter().all(|address| is_public(address.ip())) {
            Ok(addresses)
        } else {
            Err(ureq::Error::Other("its address is not a public one".into()))
        }
    }
}

/// Whether an address is reachable from everywhere, by IANA's registries of special-purpose addresses.
fn is_public(address: IpAddr) -> bool {
    match address.to_canonical() {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => is_public_v6(address),
    }
}

fn is_public_v4(address: Ipv4Addr) -> bool {
    let [a, b, c, _] = address.octets();
    let is_special = address.is_private()
        || address.is_loopback()
        || address.is_link_local()
        || address.is_documentation()
        || address.is_multicast()
        // This network, shared by carriers (RFC 6598), protocols, benchmarks (RFC 2544), reserved.
        || a == 0
        || (a == 100 && (64..128).contains(&b))
        || (a, b, c) == (192, 0, 0)
        || (a == 198 && (18..20).contains(&b))
        || a >= 240;
    !is_special
}

fn is_public_v6(address: Ipv6Addr) -> bool {
    let segments = address.segments();
    match segments {
        // An IPv4 address behind a translator (RFC 6052).
        [0x64, 0xff9b, 0, 0, 0, 0, high, low] => {
            is_public_v4(Ipv4Addr::from_bits(u32::from(high) << 16 | u32::from(low)))
        }
        // Protocols such as Teredo, documentation, and 6to4, which has an IPv4 address within.
        [0x2001, 0..=0x1ff | 0xdb8, ..] | [0x2002, ..] | [0x3fff, 0..=0xfff, ..] => false,
        [first, ..] => first >> 13 == 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hosts(names: &[&str]) -> Vec<HostName> {
        names.iter().map(|name| name.parse().unwrap()).collect()
    }

    #[test]
    fn only_https_addresses_of_allowed_hosts_are_fetched() {
        let allowed = hosts(&["pics.example.org", "*.example.com"]);
        let check = |url: &str| PictureUrl::new(url, &allowed).map_err(|error| error.message().to_owned());
        for good in ["https://pics.example.org/a.png?b=c", "https://PICS.example.org:443/a", "https://a.b.example.com/"]
        {
            assert!(check(good).is_ok(), "{good}");
        }
        for (wrong, why) in [
            ("https://example.com/a.png", "--allow-image-urls example.com"),
            ("https://evilexample.com/", "fetches no pictures from"),
            ("https://pics.example.org.evil.net/", "fetches no pictures from"),
            ("https://pics.example.org:8443/", "neither a user nor a port"),
            ("https://pics.example.org@evil.net/", "neither a user nor a port"),
            ("http://pics.example.org/a.png", "not fetched over http"),
            ("file:///etc/passwd", "no address"),
            ("ftp://pics.example.org/", "not fetched over ftp"),
            ("a.png", "has no scheme"),
            ("", "no address"),
        ] {
            let error = check(wrong).unwrap_err();
            assert!(error.contains(why), "{wrong}: {error}");
        }
        assert!(PictureUrl::new("https://anything.net/", &hosts(&["*"])).is_ok());
        assert!(PictureUrl::new("https://anything.net/", &[]).is_err());
        for wrong in ["", "https://a", "a/b", "a b", "*.", "a:1", "**"] {
            assert!(wrong.parse::<HostName>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn only_public_addresses_are_reached() {
        for private in [
            "127.0.0.1",
            "10.1.2.3",
            "172.16.0.1",
            "192.168.1.1",
            "169.254.169.254",
            "0.0.0.0",
            "100.64.0.1",
            "198.18.0.1",
            "192.0.0.8",
            "192.0.2.1",
            "224.0.0.1",
            "240.0.0.1",
            "255.255.255.255",
            "::1",
            "::",
            "fe80::1",
            "fd00::1",
            "ff02::1",
            "::ffff:127.0.0.1",
            "64:ff9b::10.0.0.1",
            "2002:7f00:1::",
            "2001:db8::1",
            "2001::1",
            "::127.0.0.1",
            "fec0::1",
            "3fff::1",
        ] {
            assert!(!is_public(private.parse().unwrap()), "{private}");
        }
        for public in
            ["1.1.1.1", "93.184.215.14", "172.32.0.1", "100.128.0.1", "2606:4700::1111", "64:ff9b::1.1.1.1", "2a00::1"]
        {
            assert!(is_public(public.parse().unwrap()), "{public}");
        }
        // Names of this machine are not reached either.
        let why = get(Uri::from_static("https://localhost/a.png"), &agent(OnlyPublic::default())).unwrap_err();
        assert!(why.contains("not a public one"), "{why}");
    }

    #[test]
    fn redirects_stay_on_their_host() {
        let from = Uri::from_static("https://a.org/x?y");
        let to = |to| redirected(&from, to).map(|uri| uri.to_string());
        assert_eq!(to("/z?w").as_deref(), Some("https://a.org/z?w"));
        assert_eq!(to("https://a.org/z").as_deref(), Some("https://a.org/z"));
        for elsewhere in ["//b.org/z", "https://b.org/z", "http://a.org/z", "https://a.org:444/", "z", "", "file:///z"]
        {
            assert_eq!(to(elsewhere), None, "{elsewhere}");
        }
    }
}
