//! Middleware that every request passes before its handler: request id, log line and metrics ([`observe`]), the
//! connection limit, the Host header, and the API key.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use axum::extract::{MatchedPath, Request, State};
use axum::http::header::{AUTHORIZATION, CONNECTION, HOST};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use metal_attention::scheduler::Client;
use tracing::Instrument;

use super::connections::ClientConnection;
use super::dialect::Dialect;
use super::options::ApiKeys;
use super::request_line::RequestLine;
use super::{ApiError, App, ids};

/// The header in which clients of Anthropic's interface send the key.
const API_KEY: HeaderName = HeaderName::from_static("x-api-key");

const WRONG_KEY: &str = "the API key is wrong";
const NO_KEY: &str = "this server wants an API key: send the header Authorization: Bearer KEY, or x-api-key: KEY";

/// The response header with the request's id.
pub const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// The header with the request's id in Anthropic's interface.
pub const ANTHROPIC_REQUEST_ID: HeaderName = HeaderName::from_static("request-id");

/// The response header with the seconds that the request waited for its model to load.
pub const MODEL_LOAD_SECONDS: HeaderName = HeaderName::from_static("x-model-load-seconds");

/// Gives the request an id, counts it, and logs one line when its response has ended ([`RequestLine`]).
pub async fn observe(State(app): State<App>, request: Request, next: Next) -> Response {
    let start = Instant::now();
    let id = ids::unique("req-");
    // A path without a route may be anything: it is neither logged nor counted by its name.
    let route = request.extensions().get::<MatchedPath>().map_or("other", MatchedPath::as_str).to_owned();
    let span = tracing::info_span!("request", id, method = %method_name(request.method()), route);
    let is_monitoring = MONITORING_PATHS.contains(&route.as_str());
    let dialect = Dialect::of_path(request.uri().path());
    let line = RequestLine::new(id.clone(), method_name(request.method()), &route, is_monitoring);
    let mut response = Arc::clone(&line).scope(next.run(request).instrument(span)).await;
    let status = response.status();
    line.status(status.as_u16());
    app.metrics.answered(&route, status.as_u16(), start.elapsed());
    if let Ok(id) = HeaderValue::from_str(&id) {
        if dialect == Dialect::Anthropic {
            response.headers_mut().insert(ANTHROPIC_REQUEST_ID, id.clone());
        }
        response.headers_mut().insert(REQUEST_ID, id);
    }
    if let Some(waited) = line.model_load()
        && let Ok(seconds) = HeaderValue::from_str(&format!("{:.2}", waited.as_secs_f64()))
    {
        response.headers_mut().insert(MODEL_LOAD_SECONDS, seconds);
    }
    response.headers_mut().insert("x-content-type-options", HeaderValue::from_static("nosniff"));
    response
}

/// Refuses a request on an extra connection, unless it is for a monitoring path, and closes the connection after the
/// response: the next new connection may need it.
pub async fn check_connection_limit(request: Request, next: Next) -> Response {
    let exceeded_limit =
        request.extensions().get::<Arc<ClientConnection>>().and_then(|connection| connection.exceeded_limit);
    let Some(exceeded_limit) = exceeded_limit else { return next.run(request).await };
    let mut response = if MONITORING_PATHS.contains(&request.uri().path()) {
        next.run(request).await
    } else {
        ApiError::too_many_connections(exceeded_limit).into_response()
    };
    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    response
}

/// Paths that are served also on extra connections.
const MONITORING_PATHS: [&str; 4] = ["/health", "/v1/health", "/ready", "/metrics"];

/// The name of a standard method; others may be anything and are "other".
fn method_name(method: &Method) -> &str {
    let known = [Method::GET, Method::POST, Method::HEAD, Method::OPTIONS, Method::PUT, Method::DELETE, Method::PATCH];
    if known.contains(method) { method.as_str() } else { "other" }
}

/// Maximum characters of a wrong Host header that its error quotes.
const MAX_SHOWN_HOST: usize = 100;

/// Refuses requests whose Host header is not a name of this machine. Used where the server listens on the loopback
/// without a key: a page of another site can make its own name resolve to this machine (DNS rebinding).
pub async fn check_host(State(app): State<App>, request: Request, next: Next) -> Response {
    let host = request.headers().get(HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
    if is_local(host, &app.options.hosts) {
        return next.run(request).await;
    }
    let shown: String = host.chars().take(MAX_SHOWN_HOST).collect();
    let message = format!(
        "the Host header {shown:?} does not name this machine: use localhost or 127.0.0.1, or start the server with \
         --allowed-host NAME, as behind a proxy, or with a key (--api-key)"
    );
    ApiError::forbidden(message).into_response()
}

/// Whether a Host header is a name of this machine, or one of `also`.
pub fn is_local(host: &str, also: &[String]) -> bool {
    let Ok(authority) = host.parse::<Authority>() else { return false };
    let name = authority.host();
    let ip = name.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    ip.is_ok_and(|ip| ip.is_loopback())
        || name.eq_ignore_ascii_case("localhost")
        || also.iter().any(|known| known.eq_ignore_ascii_case(name))
}

/// Refuses requests without a valid API key, where keys are configured. Sets the scheduler's client to the key's
/// number.
pub async fn check_key(State(app): State<App>, mut request: Request, next: Next) -> Response {
    if app.options.keys.is_empty() {
        return next.run(request).await;
    }
    match key_number(request.headers(), &app.options.keys) {
        Ok(number) => {
            request.extensions_mut().insert(Client::Key(number));
            next.run(request).await
        }
        Err(why) => ApiError::unauthorized(why).into_response(),
    }
}

/// Returns the number of the key that a request sends, or the reason why it is refused. Clients of Anthropic's
/// interface may send two headers, one of which is a placeholder: one valid key suffices.
fn key_number(headers: &HeaderMap, keys: &ApiKeys) -> Result<usize, &'static str> {
    let header = |name: HeaderName| headers.get(name).map(HeaderValue::as_bytes);
    let given = [header(AUTHORIZATION).and_then(bearer), header(API_KEY).map(<[u8]>::trim_ascii)];
    match given.into_iter().flatten().map(|key| keys.number(key)).reduce(Option::or) {
        Some(Some(number)) => Ok(number),
        Some(None) => Err(WRONG_KEY),
        None => Err(NO_KEY),
    }
}

/// The key in `Bearer KEY`.
fn bearer(value: &[u8]) -> Option<&[u8]> {
    let (scheme, key) = value.split_at_checked("Bearer ".len())?;
    scheme.eq_ignore_ascii_case(b"Bearer ").then(|| key.trim_ascii())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_this_machine() {
        let also = ["box.local".to_owned()];
        for host in ["localhost", "LocalHost:8080", "127.0.0.1:1", "127.1.2.3", "[::1]:8080", "box.local:80"] {
            assert!(is_local(host, &also), "{host}");
        }
        for host in ["", "evil.example", "localhost.evil.example", "127.0.0.1.evil.example:80", "10.0.0.1", "a b"] {
            assert!(!is_local(host, &also), "{host}");
        }
    }

    #[test]
    fn keys_come_as_bearer_tokens() {
        assert_eq!(bearer(b"Bearer abc"), Some(&b"abc"[..]));
        assert_eq!(bearer(b"bearer  abc "), Some(&b"abc"[..]));
        assert_eq!(bearer(b"Basic abc"), None);
        assert_eq!(bearer(b"Bearer"), None);
    }

    #[test]
    fn keys_come_in_two_headers() {
        let keys = ApiKeys::new(["one".to_owned(), "two".to_owned()]).unwrap();
        let number = |headers: &[(HeaderName, &'static str)]| {
            let headers = headers.iter().map(|(name, value)| (name.clone(), HeaderValue::from_static(value)));
            key_number(&headers.collect(), &keys)
        };
        assert_eq!(number(&[]), Err(NO_KEY));
        assert_eq!(number(&[(AUTHORIZATION, "Basic two")]), Err(NO_KEY));
        assert_eq!(number(&[(AUTHORIZATION, "Bearer two")]), Ok(1));
        assert_eq!(number(&[(API_KEY, "one")]), Ok(0));
        assert_eq!(number(&[(API_KEY, "three")]), Err(WRONG_KEY));
        assert_eq!(number(&[(AUTHORIZATION, "Bearer none"), (API_KEY, "two")]), Ok(1));
        assert_eq!(number(&[(AUTHORIZATION, "Bearer two"), (API_KEY, "none")]), Ok(1));
    }
}
