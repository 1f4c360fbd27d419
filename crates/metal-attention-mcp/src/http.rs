//! A server that answers HTTP requests (the transport "streamable HTTP"): a message is a request of its own, whose answer
//! is a message or a stream of them.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ureq::http::header::{ACCEPT, CONTENT_TYPE};
use ureq::http::{HeaderName, HeaderValue, Response, Uri};
use ureq::{Agent, Body};

use crate::McpError;
use crate::connection::{Event, spawn};
use crate::event_stream::{EventStream, StreamEnd};
use crate::limits::{MAX_MESSAGE, MAX_QUOTED, MAX_REQUESTS};
use crate::message::{self, Incoming};
use crate::text::excerpt;

const SESSION: HeaderName = HeaderName::from_static("mcp-session-id");
const VERSION: HeaderName = HeaderName::from_static("mcp-protocol-version");
/// Characters of a session's id.
const MAX_SESSION: usize = 1 << 10;
/// How long the end of a session may take.
const ENDING: Duration = Duration::from_secs(2);

/// A server's address, and the session with it.
pub struct Http {
    shared: Arc<Shared>,
    version: Option<&'static str>,
    events: SyncSender<Event>,
}

/// What the threads of requests share.
struct Shared {
    agent: Agent,
    url: String,
    headers: Vec<(HeaderName, HeaderValue)>,
    session: Mutex<Option<HeaderValue>>,
    /// Requests that are under way.
    running: AtomicUsize,
}

impl Http {
    /// A connection to the server at `url`; what it answers becomes `events`.
    pub fn new(url: &str, headers: &BTreeMap<String, String>, events: SyncSender<Event>) -> Result<Self, McpError> {
        let no_url = || McpError::Url { url: url.to_owned() };
        let uri: Uri = url.parse().map_err(|_| no_url())?;
        let host = uri.host().ok_or_else(no_url)?;
        if !matches!(uri.scheme_str(), Some("http" | "https")) {
            return Err(no_url());
        }
        let header = |(name, value): (&String, &String)| {
            let wrong = || McpError::Header { name: name.clone() };
            let mut value = HeaderValue::from_str(value).map_err(|_| wrong())?;
            value.set_sensitive(true);
            Ok((HeaderName::from_bytes(name.as_bytes()).map_err(|_| wrong())?, value))
        };
        let headers = headers.iter().map(header).collect::<Result<_, McpError>>()?;
        let mut config = Agent::config_builder()
            .user_agent(concat!("metal-attention/", env!("CARGO_PKG_VERSION")))
            .accept_encoding("identity")
            .http_status_as_error(false)
            // A redirect would take the headers, which may be secrets, elsewhere.
            .max_redirects(0)
            .max_redirects_will_error(false);
        if is_this_machine(host) {
            config = config.proxy(None);
        }
        let shared = Shared {
            agent: config.build().into(),
            url: url.to_owned(),
            headers,
            session: Mutex::default(),
            running: AtomicUsize::new(0),
        };
        Ok(Self { shared: Arc::new(shared), version: None, events })
    }

    /// The version of the protocol that was agreed on, which each further request tells.
    pub fn set_version(&mut self, version: &'static str) {
        self.version = Some(version);
    }

    /// Sends a message; the answer becomes events.
    pub fn send(&self, message: String, id: Option<u64>, timeout: Duration) -> Result<(), McpError> {
        let running = Running::of(&self.shared)?;
        let (version, events) = (self.version, self.events.clone());
        spawn(move || {
            if let Err(error) = running.0.post(message, id, version, timeout, &events) {
                // Where nobody listens any more the connection has ended.
                let _ = events.send(Event::Failed(id, error));
            }
        })?;
        Ok(())
    }

    /// Sends a message that has no answer, and waits until the server has it.
    pub fn send_first(&self, message: String, timeout: Duration) -> Result<(), McpError> {
        self.shared.post(message, None, self.version, timeout, &self.events)
    }

    /// Tells the server that the session is over.
    pub fn close(&self) {
        let Some(session) = self.shared.session().take() else { return };
        let mut request = self.shared.agent.delete(&self.shared.url).header(SESSION, session);
        for (name, value) in &self.shared.headers {
            request = request.header(name, value);
        }
        if let Some(version) = self.version {
            request = request.header(VERSION, version);
        }
        // A server that does not know how to end sessions says so, and one that is gone has none.
        let _ = request.config().timeout_global(Some(ENDING)).build().call();
    }
}

impl Shared {
    fn session(&self) -> MutexGuard<'_, Option<HeaderValue>> {
        self.session.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Posts a message, and hands out those of the answer, up to the response to the request `id`.
    fn post(
        &self,
        message: String,
        id: Option<u64>,
        version: Option<&'static str>,
        timeout: Duration,
        events: &SyncSender<Event>,
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
        let mut response =
            response.map_err(|source| McpError::Connection { url: self.url.clone(), source: Box::new(source) })?;
        let status = response.status().as_u16();
        if status == 404 && session.is_some() {
            *self.session() = None;
            return Err(McpError::SessionEnded);
        }
        if !(200..300).contains(&status) {
            let text = response.body_mut().with_config().limit(1 << 16).read_to_vec().unwrap_or_default();
            return Err(McpError::Status { url: self.url.clone(), status, text: excerpt(&text, MAX_QUOTED) });
        }
        if let Some(session) = response.headers().get(SESSION).filter(|id| id.len() <= MAX_SESSION) {
            *self.session() = Some(session.clone());
        }
        // What follows a notification says nothing.
        let Some(id) = id else { return Ok(()) };
        read_answer(response, id, events)
    }
}

/// Hands out the messages of an answer, up to the response to the request `id`.
fn read_answer(mut response: Response<Body>, id: u64, events: &SyncSender<Event>) -> Result<(), McpError> {
    let kind = response.headers().get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    let ended = || McpError::Ended { status: None, last_words: String::new() };
    if kind.split(';').next().unwrap_or_default().trim().eq_ignore_ascii_case("text/event-stream") {
        let body = response.into_body().into_with_config().limit(u64::MAX).reader();
        let mut stream = EventStream::new(body);
        loop {
            let data = stream.next().map_err(|end| match end {
                StreamEnd::Ended => ended(),
                StreamEnd::TooLong => McpError::MessageTooLong,
            })?;
            // An event without data keeps the connection open.
            if data.is_empty() {
                continue;
            }
            if hand_out(&data, id, events) {
                return Ok(());
            }
        }
    }
    let body = response.body_mut().with_config().limit(MAX_MESSAGE as u64).read_to_vec();
    let body = body.map_err(|error| match error {
        ureq::Error::BodyExceedsLimit(_) => McpError::MessageTooLong,
        _ => ended(),
    })?;
    if hand_out(&body, id, events) { Ok(()) } else { Err(ended()) }
}

/// Hands out messages. True: the response to the request `id` is among them, or nobody listens any more.
fn hand_out(data: &[u8], id: u64, events: &SyncSender<Event>) -> bool {
    let Some(messages) = message::parse(data) else {
        return events.send(Event::Junk(excerpt(data, MAX_QUOTED))).is_err();
    };
    let is_response = |message: &Incoming| match message {
        Incoming::Response { id: own, .. } => *own == id,
        Incoming::Request { .. } | Incoming::Notification { .. } => false,
    };
    let answered = messages.iter().any(is_response);
    let sent = messages.into_iter().try_for_each(|message| events.send(Event::Message(message)));
    answered || sent.is_err()
}

/// A request under way: at most [`MAX_REQUESTS`] are.
struct Running(Arc<Shared>);

impl Running {
    fn of(shared: &Arc<Shared>) -> Result<Self, McpError> {
        if shared.running.fetch_add(1, Ordering::Relaxed) >= MAX_REQUESTS {
            shared.running.fetch_sub(1, Ordering::Relaxed);
            return Err(McpError::Deaf);
        }
        Ok(Self(Arc::clone(shared)))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Whether a host of a URL is this machine, which no proxy leads to.
fn is_this_machine(host: &str) -> bool {
    let ip = host.trim_start_matches('[').trim_end_matches(']').parse::<std::net::IpAddr>();
    ip.is_ok_and(|ip| ip.is_loopback()) || host.eq_ignore_ascii_case("localhost")
}
