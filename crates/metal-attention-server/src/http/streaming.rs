//! Turns the scheduler's events into an HTTP response: whole, or as a stream.
//!
//! Data flow: the handler of an endpoint submits `n` sequences to the scheduler, which returns one event receiver
//! ([`Events`]) for each. [`RunningSequences`] merges these receivers. For a whole response, the handler collects the
//! events (chats through [`collect`](RunningSequences::collect)); for a stream, [`stream()`] passes each event to the
//! endpoint's [`ChunkWriter`], which turns it into frames: server-sent events or lines of JSON.
//!
//! Cancellation: an [`Events`] that is dropped cancels its sequence. [`RunningSequences`] owns them, and the response
//! body owns [`RunningSequences`], so a client that disconnects ends all sequences of its request.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderName};
use axum::response::{IntoResponse, Response};
use futures_util::stream::{self, Stream, StreamExt};
use metal_attention::scheduler::{Event, Events};
use serde::Serialize;

use super::job::answer::AssembledAnswer;
use super::job::choice_parser::ChoiceParsers;
use super::models::ModelLease;
use super::request_line::RequestLine;
use super::{ApiError, App};

/// The interval of keep-alive frames in a stream without other frames.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// The events of several sequences in the order of their arrival, each with the index of its sequence.
type SequenceEvents = Pin<Box<dyn Stream<Item = (usize, Event)> + Send>>;

/// The running sequences of one request. Dropping it cancels those that have not ended.
pub struct RunningSequences {
    /// The shared state, for metrics.
    app: App,
    /// Keeps the model loaded while its sequences run.
    _model: ModelLease,
    /// When the sequences were submitted.
    submitted: Instant,
    /// By sequence: whether its first event has arrived, for the time-to-first-token metric.
    begun: Vec<bool>,
    /// The events of all sequences.
    merged: SequenceEvents,
    /// The request's log line; `None` outside of a request.
    line: Option<Arc<RequestLine>>,
}

impl RunningSequences {
    /// Takes over the sequences that `model` runs; `events` has one receiver for each.
    pub fn new(app: App, model: ModelLease, events: Vec<Events>) -> Self {
        let begun = vec![false; events.len()];
        let one = |(i, events): (usize, Events)| {
            stream::unfold(events, move |mut events| async move { Some(((i, events.recv().await?), events)) }).boxed()
        };
        let merged = stream::select_all(events.into_iter().enumerate().map(one)).boxed();
        let line = RequestLine::current();
        if let Some(line) = &line {
            line.sequences(begun.len());
        }
        Self { app, _model: model, submitted: Instant::now(), begun, merged, line }
    }

    /// Returns the next event with the index of its sequence; `None` after all sequences have ended.
    pub async fn next(&mut self) -> Option<(usize, Event)> {
        let (i, event) = self.merged.next().await?;
        if let Some(line) = &self.line {
            line.event(&event);
        }
        if !std::mem::replace(&mut self.begun[i], true) {
            self.app.metrics.first_token(self.submitted.elapsed());
        }
        Some((i, event))
    }

    /// Waits for all sequences and returns one assembled answer each; `parsers` has one parser for each sequence.
    ///
    /// The first failed sequence is the error of the whole request. The others are cancelled when `self` is dropped.
    pub async fn collect(&mut self, parsers: &mut ChoiceParsers) -> Result<Vec<AssembledAnswer>, ApiError> {
        let mut answers: Vec<AssembledAnswer> = (0..parsers.len()).map(|_| AssembledAnswer::default()).collect();
        while let Some((i, event)) = self.next().await {
            parsers.parse(i, event)?.into_iter().for_each(|part| answers[i].add(part));
        }
        Ok(answers)
    }
}

/// Turns the events of a request's sequences into the frames of one stream. Each interface has its own.
pub trait ChunkWriter: Send + 'static {
    /// The framing of this stream.
    const FRAMING: Framing = Framing::ServerSentEvents;

    /// Appends the frames of an event of sequence `i` to `out`. An error ends the stream: the other sequences are
    /// cancelled.
    fn event(&mut self, i: usize, event: Event, out: &mut Frames) -> Result<(), ApiError>;

    /// Appends the last frames, after all sequences have ended.
    fn end(&mut self, out: &mut Frames);

    /// Appends the frames of an error, which are the last ones: the HTTP status was sent before.
    fn error(&mut self, error: &ApiError, out: &mut Frames);

    /// Appends a frame that keeps the connection open after [`KEEP_ALIVE`] without one. JSON lines have no such frame.
    fn keep_alive(&mut self, out: &mut Frames) {
        match Self::FRAMING {
            Framing::ServerSentEvents => out.comment(),
            Framing::JsonLines => {}
        }
    }
}

/// The framing of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Framing {
    /// `text/event-stream`.
    ServerSentEvents,
    /// `application/x-ndjson`: a JSON object on each line.
    JsonLines,
}

impl Framing {
    /// The value of `Content-Type`.
    pub fn content_type(self) -> &'static str {
        match self {
            Self::ServerSentEvents => "text/event-stream",
            Self::JsonLines => "application/x-ndjson",
        }
    }
}

/// Frames that are queued for the client.
#[derive(Default)]
pub struct Frames {
    /// The frames in order.
    waiting: VecDeque<String>,
    /// Whether frames are dropped instead of queued.
    discards: bool,
}

impl Frames {
    /// A queue that drops all frames, for whole responses that a stream's writer builds.
    pub fn discarding() -> Self {
        Self { waiting: VecDeque::new(), discards: true }
    }

    fn push(&mut self, frame: impl FnOnce() -> String) {
        if !self.discards {
            self.waiting.push_back(frame());
        }
    }

    /// Adds a server-sent event without a name.
    pub fn data(&mut self, object: &impl Serialize) {
        self.push(|| format!("data: {}\n\n", json(object)));
    }

    /// Adds a server-sent event.
    pub fn event(&mut self, name: &str, object: &impl Serialize) {
        self.push(|| format!("event: {name}\ndata: {}\n\n", json(object)));
    }

    /// Adds `[DONE]`, the end of OpenAI's streams.
    pub fn done(&mut self) {
        self.push(|| "data: [DONE]\n\n".into());
    }

    /// Adds an object as one line of JSON.
    pub fn line(&mut self, object: &impl Serialize) {
        self.push(|| line(object));
    }

    /// Adds a comment, which clients of server-sent events ignore.
    fn comment(&mut self) {
        self.push(|| ":\n\n".into());
    }
}

/// Returns `object` as a line of JSON, with its line break.
pub fn line(object: &impl Serialize) -> String {
    json(object) + "\n"
}

/// Returns `object` as JSON without line breaks. Types of this crate always serialise.
fn json(object: &impl Serialize) -> String {
    serde_json::to_string(object).unwrap_or_default()
}

/// The state of one stream.
struct StreamState<C> {
    /// The sequences; `None` after the last event or an error, so that only queued frames follow.
    sequences: Option<RunningSequences>,
    /// The interface's writer.
    chunks: C,
    /// Frames that are not sent yet.
    out: Frames,
}

impl<C: ChunkWriter> StreamState<C> {
    /// Returns the next frame; `None` at the end of the stream.
    async fn next(&mut self) -> Option<String> {
        loop {
            if let Some(frame) = self.out.waiting.pop_front() {
                return Some(frame);
            }
            let sequences = self.sequences.as_mut()?;
            let Ok(next) = tokio::time::timeout(KEEP_ALIVE, sequences.next()).await else {
                self.chunks.keep_alive(&mut self.out);
                continue;
            };
            let Some((i, event)) = next else {
                self.sequences = None;
                self.chunks.end(&mut self.out);
                continue;
            };
            if let Err(error) = self.chunks.event(i, event, &mut self.out) {
                self.sequences = None;
                self.chunks.error(&error, &mut self.out);
            }
        }
    }
}

/// Returns a streamed response: the frames in `first_frames`, then those that `chunks` makes of the events of `sequences`.
pub fn stream<C: ChunkWriter>(sequences: RunningSequences, first_frames: Frames, chunks: C) -> Response {
    let state = StreamState { sequences: Some(sequences), chunks, out: first_frames };
    let frames = stream::unfold(state, |mut state| async move {
        let frame = state.next().await?;
        Some((frame, state))
    });
    streamed(C::FRAMING, frames)
}

/// Returns a response whose body is `frames`, with the headers of `framing`.
pub fn streamed(framing: Framing, frames: impl Stream<Item = String> + Send + 'static) -> Response {
    (stream_headers(framing), Body::from_stream(frames.map(Ok::<_, Infallible>))).into_response()
}

/// The headers of a stream.
pub fn stream_headers(framing: Framing) -> [(HeaderName, &'static str); 3] {
    [
        (CONTENT_TYPE, framing.content_type()),
        (CACHE_CONTROL, "no-cache"),
        // Proxies that buffer a response would stop the stream.
        (HeaderName::from_static("x-accel-buffering"), "no"),
    ]
}
