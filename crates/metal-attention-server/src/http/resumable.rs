//! Streams that a client reads on after its connection has ended, as when a page is reloaded.
//!
//! A request to a streaming endpoint behind [`keep`] with the header `X-Resumable: 1` is answered with `X-Stream-Id`. Its body
//! is read by a task of its own ([`KeptStream::drive`]) into a buffer, from which [`read`] sends the bytes from any position on.
//! After the last reader has gone the answer goes on for [`KEPT_FOR`] and [`KEPT_BYTES`], then it is cancelled. A stream belongs to
//! the client that began it: the same API key, or without keys the same address.

use std::collections::{HashMap, VecDeque};
use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderName, HeaderValue, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use futures_util::stream::{self, StreamExt};
use hyper::body::Bytes;
use metal_attention::scheduler::Client;
use serde::Deserialize;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

use super::address::{Path, Query};
use super::streaming::{Framing, stream_headers};
use super::{ApiError, App, ids};

/// The request's header.
const RESUMABLE: HeaderName = HeaderName::from_static("x-resumable");

/// The response's header with the id of the stream.
pub const STREAM_ID: HeaderName = HeaderName::from_static("x-stream-id");

/// How long an answer without a reader goes on, and how long it is kept after its end.
const KEPT_FOR: Duration = Duration::from_secs(60);

/// How many bytes an answer without a reader goes on, and how many it is ahead of its reader.
const KEPT_BYTES: u64 = 1 << 20;

/// Streams of one client that are kept; those without a reader that began first make room.
const STREAMS_OF_ONE: usize = 8;

/// Streams of all clients that are kept. Others are streamed as if they were not resumable.
const STREAMS: usize = 64;

/// The streams that can be resumed, by their ids.
#[derive(Default)]
pub struct ResumableStreams(Mutex<HashMap<String, Arc<KeptStream>>>);

/// A stream whose bytes are kept.
struct KeptStream {
    /// Who began it.
    client: Client,
    state: Mutex<KeptState>,
    /// Notified of every change of `state`.
    changed: Notify,
}

/// The bytes of a stream, and who reads them.
struct KeptState {
    /// The chunks that are kept, in order, each with the position of its first byte in the body.
    chunks: VecDeque<(u64, Bytes)>,
    /// The position behind the last chunk.
    end: u64,
    /// The position up to which the last reader has read.
    read: u64,
    /// Whether no more bytes follow.
    has_ended: bool,
    /// Whether a client has ended it.
    is_cancelled: bool,
    /// The number of the latest reader; earlier ones end.
    reader: u64,
    /// Since when there is no reader; `None`: there is one.
    alone_since: Option<Instant>,
}

impl ResumableStreams {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Arc<KeptStream>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps a new stream of `client`; `None`: too many are kept.
    fn begin(&self, client: Client) -> Option<(String, Arc<KeptStream>)> {
        let mut streams = self.lock();
        let of_client = |kept: &KeptStream| kept.client == client;
        if streams.values().filter(|kept| of_client(kept)).count() >= STREAMS_OF_ONE {
            remove_oldest(&mut streams, |kept| of_client(kept) && kept.lock().alone_since.is_some())?;
        }
        if streams.len() >= STREAMS {
            remove_oldest(&mut streams, |kept| kept.lock().has_ended)?;
        }
        let id = ids::unguessable("stream-");
        let kept = Arc::new(KeptStream::new(client));
        streams.insert(id.clone(), Arc::clone(&kept));
        Some((id, kept))
    }

    /// The stream `id` of `client`. Another client's is as unknown to it as none.
    fn find(&self, id: &str, client: Client) -> Result<Arc<KeptStream>, ApiError> {
        let kept = self.lock().get(id).filter(|kept| kept.client == client).cloned();
        kept.ok_or_else(|| gone(id))
    }
}

/// Ends and removes the stream without a reader that lost it first, of those that `may_go`. `None`: there is none.
fn remove_oldest(streams: &mut HashMap<String, Arc<KeptStream>>, may_go: impl Fn(&KeptStream) -> bool) -> Option<()> {
    let alone = streams.iter().filter(|(_, kept)| may_go(kept));
    let alone = alone.filter_map(|(id, kept)| Some((kept.lock().alone_since?, id.clone())));
    let (_, oldest) = alone.min()?;
    streams.remove(&oldest)?.cancel();
    Some(())
}

fn gone(id: &str) -> ApiError {
    let message = format!(
        "there is no stream {id:?} here: it ended, had no reader for {} seconds or {} MiB, or belongs to another client",
        KEPT_FOR.as_secs(),
        KEPT_BYTES >> 20
    );
    ApiError::not_found("stream_not_found", message)
}

impl KeptStream {
    fn new(client: Client) -> Self {
        let state = KeptState {
            chunks: VecDeque::new(),
            end: 0,
            read: 0,
            has_ended: false,
            is_cancelled: false,
            reader: 0,
            alone_since: Some(Instant::now()),
        };
        Self { client, state: Mutex::new(state), changed: Notify::new() }
    }

    fn lock(&self) -> MutexGuard<'_, KeptState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the stream: its sequences are cancelled, and a reader gets what is there.
    fn cancel(&self) {
        self.lock().is_cancelled = true;
        self.changed.notify_waiters();
    }

    /// Reads `body` to its end, or until it was cancelled or not read for too long; dropping it cancels its sequences.
    async fn drive(&self, body: Body) {
        let mut body = body.into_data_stream();
        loop {
            let changed = self.changed.notified();
            let (has_room, until) = {
                let state = self.lock();
                let until = state.alone_since.map(|since| since + KEPT_FOR);
                if state.is_cancelled || until.is_some_and(|until| until <= Instant::now()) {
                    break;
                }
                let has_room = state.end - state.read < KEPT_BYTES;
                if !has_room && until.is_some() {
                    break;
                }
                (has_room, until)
            };
            let next = async { if has_room { body.next().await } else { std::future::pending().await } };
            let step = async {
                tokio::select! {
                    chunk = next => Some(chunk),
                    () = changed => None,
                }
            };
            let far = || Instant::now() + KEPT_FOR;
            match timeout_at(until.unwrap_or_else(far), step).await {
                Ok(Some(Some(Ok(chunk)))) => self.push(chunk),
                // The bodies of streams have no errors but their end.
                Ok(Some(Some(Err(_)) | None)) => break,
                Ok(None) | Err(_) => {}
            }
        }
        self.lock().has_ended = true;
        self.changed.notify_waiters();
    }

    /// Adds a chunk, and drops those that were read and are more than [`KEPT_BYTES`] back.
    fn push(&self, chunk: Bytes) {
        let mut state = self.lock();
        let start = state.end;
        state.end += chunk.len() as u64;
        state.chunks.push_back((start, chunk));
        while let Some((start, chunk)) = state.chunks.front()
            && start + chunk.len() as u64 + KEPT_BYTES <= state.read
        {
            state.chunks.pop_front();
        }
        drop(state);
        self.changed.notify_waiters();
    }

    /// Waits until the stream, which has ended, need not be kept any more: a client that lost its end may fetch it.
    async fn linger(&self) {
        loop {
            let changed = self.changed.notified();
            let until = {
                let state = self.lock();
                if state.is_cancelled {
                    return;
                }
                state.alone_since.map_or_else(|| Instant::now() + KEPT_FOR, |since| since + KEPT_FOR)
            };
            if until <= Instant::now() {
                return;
            }
            let _ = timeout_at(until, changed).await;
        }
    }

    /// The bytes from `after` on; an error if they are not there.
    fn read_from(self: Arc<Self>, after: u64) -> Result<Body, u64> {
        let number = {
            let mut state = self.lock();
            let first = state.first();
            if after < first || after > state.end {
                return Err(first);
            }
            state.reader += 1;
            state.read = after;
            state.alone_since = None;
            state.reader
        };
        self.changed.notify_waiters();
        let reader = Reader { kept: self, number, position: after };
        let chunks =
            stream::unfold(
                reader,
                |mut reader| async move { Some((Ok::<_, Infallible>(reader.next().await?), reader)) },
            );
        Ok(Body::from_stream(chunks))
    }
}

/// One connection that reads a kept stream.
struct Reader {
    kept: Arc<KeptStream>,
    /// Its number; it ends where a later one has taken its place.
    number: u64,
    /// The position of the next byte.
    position: u64,
}

impl Reader {
    /// The next bytes; `None` at the end.
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            let changed = self.kept.changed.notified();
            {
                let mut state = self.kept.lock();
                if state.reader != self.number {
                    return None;
                }
                if let Some(bytes) = state.at(self.position) {
                    self.position += bytes.len() as u64;
                    state.read = self.position;
                    drop(state);
                    self.kept.changed.notify_waiters();
                    return Some(bytes);
                }
                if state.has_ended {
                    return None;
                }
            }
            changed.await;
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        let mut state = self.kept.lock();
        if state.reader == self.number {
            state.alone_since = Some(Instant::now());
            drop(state);
            self.kept.changed.notify_waiters();
        }
    }
}

impl KeptState {
    /// The position of the first byte that is kept.
    fn first(&self) -> u64 {
        self.chunks.front().map_or(self.end, |(start, _)| *start)
    }

    /// The rest of the chunk at `position`, which is kept; `None` behind the last one.
    fn at(&self, position: u64) -> Option<Bytes> {
        let behind = self.chunks.partition_point(|(start, _)| *start <= position);
        let (start, chunk) = self.chunks.get(behind.checked_sub(1)?)?;
        let rest = chunk.slice(chunk.len().min((position - start) as usize)..);
        (!rest.is_empty()).then_some(rest)
    }
}

/// Middleware: keeps the stream of a request that wants it.
pub async fn keep(State(app): State<App>, client: Client, request: Request, next: Next) -> Response {
    let is_wanted = request.headers().get(RESUMABLE).is_some_and(|value| value == "1");
    let response = next.run(request).await;
    let is_stream = |response: &Response| {
        let kind = response.headers().get(CONTENT_TYPE).map(HeaderValue::as_bytes);
        kind == Some(Framing::ServerSentEvents.content_type().as_bytes())
    };
    if !is_wanted || response.status() != StatusCode::OK || !is_stream(&response) {
        return response;
    }
    let Some((id, kept)) = app.streams.begin(client) else { return response };
    let (mut parts, body) = response.into_parts();
    let driven = Arc::clone(&kept);
    let name = id.clone();
    tokio::spawn(async move {
        driven.drive(body).await;
        driven.linger().await;
        app.streams.lock().remove(&name);
    });
    if let Ok(id) = HeaderValue::from_str(&id) {
        parts.headers.insert(STREAM_ID, id);
    }
    match kept.read_from(0) {
        Ok(body) => Response::from_parts(parts, body),
        Err(_) => gone(&id).into_response(),
    }
}

/// The query of [`read`].
#[derive(Debug, Deserialize)]
pub struct From {
    /// The number of bytes of the body that the client has.
    #[serde(default)]
    after: u64,
}

/// Goes on with a stream that was begun with `X-Resumable: 1`. A connection that still reads it ends.
#[utoipa::path(get, path = "/v1/streams/{id}", tag = "openai",
    params(("id" = String, Path, description = "The value of X-Stream-Id"),
        ("after" = Option<u64>, Query, description = "The number of bytes of the body that the client has")),
    responses((status = 200, description = "The bytes after these", content((String = "text/event-stream"))),
        (status = 400, description = "The number is none", body = super::error::ErrorBody),
        (status = 404, description = "The stream is gone", body = super::error::ErrorBody)))]
pub async fn read(
    State(app): State<App>,
    client: Client,
    Path(id): Path<String>,
    Query(From { after }): Query<From>,
) -> Result<Response, ApiError> {
    let kept = app.streams.find(&id, client)?;
    let body = kept.read_from(after).map_err(|first| {
        let message = format!("the stream {id:?} has no byte {after} here: those from {first} on are kept");
        ApiError::not_found("stream_not_found", message).with_param("after")
    })?;
    let mut response = (stream_headers(Framing::ServerSentEvents), body).into_response();
    if let Ok(id) = HeaderValue::from_str(&id) {
        response.headers_mut().insert(STREAM_ID, id);
    }
    Ok(response)
}

/// Ends a stream: what generates it stops.
#[utoipa::path(delete, path = "/v1/streams/{id}", tag = "openai",
    params(("id" = String, Path, description = "The value of X-Stream-Id")),
    responses((status = 204, description = "It has ended"),
        (status = 404, description = "The stream is gone", body = super::error::ErrorBody)))]
pub async fn end(State(app): State<App>, client: Client, Path(id): Path<String>) -> Result<StatusCode, ApiError> {
    app.streams.find(&id, client)?.cancel();
    app.streams.lock().remove(&id);
    Ok(StatusCode::NO_CONTENT)
}
