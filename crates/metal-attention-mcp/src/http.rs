//! The transport "streamable HTTP": each message is a POST request, whose response is a message or a stream of
//! messages. Streams that are no response (GET) are not used.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ureq::http::header::{ACCEPT, CONTENT_TYPE};
use ureq::http::{HeaderName, HeaderValue, Response, Uri};
use ureq::{Agent, Body};

use crate::McpError;
use crate::connection::{ServerEvent, spawn};
use crate::limits::{MAX_MESSAGE, MAX_QUOTED, MAX_REQUESTS};
use crate::message::{self, Incoming};
use crate::sse::{SseReader, StreamEnd};
use crate::text::excerpt;

const SESSION: HeaderName = HeaderName::from_static("mcp-session-id");
const VERSION: HeaderName = HeaderName::from_static("mcp-protocol-version");
/// Bytes of a session's id.
const MAX_SESSION: usize = 1 << 10;
/// Time by which a connection outlasts the timeout of its request. The client notices the timeout first, and reports it as
/// one, not as a broken stream.
const GRACE: Duration = Duration::from_secs(1);
/// The timeout of the DELETE request that ends a session.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// The HTTP transport of a session.
pub struct Http {
    /// The state that the threads of requests share.
    shared: Arc<HttpState>,
    /// The negotiated version of the protocol; `None` before `initialize` is complete.
    version: Option<&'static str>,
    /// The queue of events.
    events: SyncSender<ServerEvent>,
}

/// The state that the threads of concurrent requests share.
struct HttpState {
    /// Sends requests.
    agent: Agent,
    /// The server's URL.
    url: String,
    /// The URL without user, password and query, which may be secrets: for errors, which the model may read.
    shown_url: String,
    /// Headers of each request, such as a key.
    headers: Vec<(HeaderName, HeaderValue)>,
    /// The server's id of the session; `None` if it has sent none.
    session: Mutex<Option<HeaderValue>>,
    /// The number of running requests.
    running: AtomicUsize,
}

impl Http {
    /// A transport to the server at `url`. Its messages are sent to `events`.
    pub fn new(
        url: &str,
        headers: &BTreeMap<String, String>,
        events: SyncSender<ServerEvent>,
    ) -> Result<Self, McpError> {
        let invalid = || McpError::Url { url: url.to_owned() };
        let uri: Uri = url.parse().map_err(|_| invalid())?;
        let host = uri.host().ok_or_else(invalid)?;
        let scheme = uri.scheme_str().filter(|scheme| matches!(*scheme, "http" | "https")).ok_or_else(invalid)?;
        let port = uri.port().map(|port| format!(":{port}")).unwrap_or_default();
        let shown_url = format!("{scheme}://{host}{port}{}", uri.path());
        let header = |(name, value): (&String, &String)| {
            let invalid = || McpError::Header { name: name.clone() };
            let mut value = HeaderValue::from_str(value).map_err(|_| invalid())?;
            value.set_sensitive(true);
            Ok((HeaderName::from_bytes(name.as_bytes()).map_err(|_| invalid())?, value))
        };
        let headers = headers.iter().map(header).collect::<Result<_, McpError>>()?;
        let mut config = Agent::config_builder()
            .user_agent(concat!("metal-attention/", env!("CARGO_PKG_VERSION")))
            .accept_encoding("identity")
            .http_status_as_error(false)
            // A redirect would send the headers, which may be secrets, to another server.
            .max_redirects(0)
            .max_redirects_will_error(false);
        if is_this_machine(host) {
            config = config.proxy(None);
        }
        let shared = HttpState {
            agent: config.build().into(),
            url: url.to_owned(),
            shown_url,
            headers,
            session: Mutex::default(),
            running: AtomicUsize::new(0),
        };
        Ok(Self { shared: Arc::new(shared), version: None, events })
    }

    /// Sets the negotiated version of the protocol, a header of all later requests.
    pub fn set_version(&mut self, version: &'static str) {
        self.version = Some(version);
    }

    /// Sends a message on a new thread. The response is sent to the events.
    pub fn send(&self, message: String, id: Option<u64>, timeout: Duration) -> Result<(), McpError> {
        let running = RequestGuard::of(&self.shared)?;
        let (version, events) = (self.version, self.events.clone());
        spawn(move || {
            match (running.0.post(message, id, version, timeout + GRACE, &events), id) {
                (Ok(()), _) => {}
                // Without a receiver, the connection is closed.
                (Err(error), Some(_)) => drop(events.send(ServerEvent::Failed(id, error))),
                // A server may refuse notifications. A failure of the connection is detected by the next request.
                (Err(error), None) => tracing::debug!("MCP: a notification failed: {error}"),
            }
        })?;
        Ok(())
    }

    /// Sends a notification, and waits until the server has accepted it.
    pub fn send_in_order(&self, message: String, timeout: Duration) -> Result<(), McpError> {
        self.shared.post(message, None, self.version, timeout, &self.events)
    }

    /// Ends the session.
    pub fn close(&self) {
        let Some(session) = self.shared.session().take() else { return };
        let mut request = self.shared.agent.delete(&self.shared.url).header(SESSION, session);
        for (name, value) in &self.shared.headers {
            request = request.header(name, value);
        }
        if let Some(version) = self.version {
            request = request.header(VERSION, version);
        }
        // A server may not support this (405), or may have lost the session (404).
        let _ = request.config().timeout_global(Some(CLOSE_TIMEOUT)).build().call();
    }
}

impl HttpState {
    fn session(&self) -> MutexGuard<'_, Option<HeaderValue>> {
        self.session.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a message, and passes on the messages of the response, up to the response to the request `id`.
    fn post(
        &self,
        message: String,
        id: Option<u64>,
        version: Option<&'static str>,
        timeout: Duration,
        events: &SyncSender<ServerEvent>,
    ) -> Result<(), McpError> {
        let mut request = self.agent.post(&self.url);
        request =
            request.header(CONTENT_TYPE, "application/json").header(ACCEPT, "application/json, text/event-stream");
        for (name, value) in &self.headers {
            request = request.header(name, value);
        }
        let session = self.session().clone();
        if let Some(session) = &session {
            request = request.header(SESSION, session);
        }
        if let Some(version) = version {
            request = request.header(VERSION, version);
        }
        let response = request.config().timeout_global(Some(timeout)).build().send(message);
        let mut response = response
            .map_err(|source| McpError::Connection { url: self.shown_url.clone(), source: Box::new(source) })?;
        let status = response.status().as_u16();
        if status == 404 && session.is_some() {
            return Err(McpError::SessionEnded);
        }
        if !(200..300).contains(&status) {
            let text = response.body_mut().with_config().limit(1 << 16).read_to_vec().unwrap_or_default();
            return Err(McpError::Status { url: self.shown_url.clone(), status, text: excerpt(&text, MAX_QUOTED) });
        }
        if let Some(session) = response.headers().get(SESSION).filter(|id| id.len() <= MAX_SESSION) {
            *self.session() = Some(session.clone());
        }
        let Some(id) = id else { return Ok(()) };
        read_messages(response, id, events)
    }
}

/// Passes on the messages of an HTTP response, up to the response to the request `id`.
fn read_messages(mut response: Response<Body>, id: u64, events: &SyncSender<ServerEvent>) -> Result<(), McpError> {
    let kind = response.headers().get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    let ended = || McpError::Ended { status: None, last_line: String::new() };
    if kind.split(';').next().unwrap_or_default().trim().eq_ignore_ascii_case("text/event-stream") {
        let body = response.into_body().into_with_config().limit(u64::MAX).reader();
        let mut stream = SseReader::new(body);
        loop {
            let data = stream.next().map_err(|end| match end {
                StreamEnd::Ended => ended(),
                StreamEnd::TooLong => McpError::MessageTooLong,
            })?;
            // An event without data only keeps the connection open.
            if data.is_empty() {
                continue;
            }
            if deliver(&data, id, events) {
                return Ok(());
            }
        }
    }
    let body = response.body_mut().with_config().limit(MAX_MESSAGE as u64).read_to_vec();
    let body = body.map_err(|error| match error {
        ureq::Error::BodyExceedsLimit(_) => McpError::MessageTooLong,
        _ => ended(),
    })?;
    if deliver(&body, id, events) { Ok(()) } else { Err(ended()) }
}

/// Passes on the messages of a body or event. Returns true if the response to the request `id` is among them, or the
/// connection is closed.
fn deliver(data: &[u8], id: u64, events: &SyncSender<ServerEvent>) -> bool {
    let Some(messages) = message::parse(data) else {
        return events.send(ServerEvent::Invalid(excerpt(data, MAX_QUOTED))).is_err();
    };
    let is_response = |message: &Incoming| match message {
        Incoming::Response { id: own, .. } => *own == id,
        Incoming::Request { .. } | Incoming::Notification { .. } => false,
    };
    let answered = messages.iter().any(is_response);
    let sent = messages.into_iter().try_for_each(|message| events.send(ServerEvent::Message(message)));
    answered || sent.is_err()
}

/// A running request. At most [`MAX_REQUESTS`] exist at a time.
struct RequestGuard(Arc<HttpState>);

impl RequestGuard {
    fn of(shared: &Arc<HttpState>) -> Result<Self, McpError> {
        if shared.running.fetch_add(1, Ordering::Relaxed) >= MAX_REQUESTS {
            shared.running.fetch_sub(1, Ordering::Relaxed);
            return Err(McpError::NotReading);
        }
        Ok(Self(Arc::clone(shared)))
    }
}

impl Drop for RequestGuard {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Whether the host of a URL is this machine: then no proxy is used.
fn is_this_machine(host: &str) -> bool {
    let ip = host.trim_start_matches('[').trim_end_matches(']').parse::<std::net::IpAddr>();
    ip.is_ok_and(|ip| ip.is_loopback()) || host.eq_ignore_ascii_case("localhost")
}
