//! From the scheduler's events to an answer: whole, or as a stream.

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

/// How often a stream says that it is alive where there is nothing else to say.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// The events of several texts as they come, each with the text's number.
type SequenceEvents = Pin<Box<dyn Stream<Item = (usize, Event)> + Send>>;

/// The texts of one request, as they are generated. Dropping it cancels them.
pub struct RunningSequences {
    app: App,
    /// Keeps the model loaded.
    _model: ModelLease,
    submitted: Instant,
    begun: Vec<bool>,
    merged: SequenceEvents,
    /// The request's line in the log.
    line: Option<Arc<RequestLine>>,
}

impl RunningSequences {
    /// The texts of `model` that `events` belong to.
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

    /// The next event and the number of its text; `None` once all have ended.
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

    /// The whole answers, as `parsers` read the texts.
    pub async fn answers(&mut self, parsers: &mut ChoiceParsers) -> Result<Vec<AssembledAnswer>, ApiError> {
        let mut answers: Vec<AssembledAnswer> = (0..parsers.len()).map(|_| AssembledAnswer::default()).collect();
        while let Some((i, event)) = self.next().await {
            parsers.parse(i, event)?.into_iter().for_each(|part| answers[i].add(part));
        }
        Ok(answers)
    }
}

/// Makes the frames of a stream.
pub trait ChunkWriter: Send + 'static {
    /// How the frames are written.
    const FRAMING: Framing = Framing::ServerSentEvents;

    /// Those that an event of text `i` adds. An error ends the stream.
    fn event(&mut self, i: usize, event: Event, out: &mut Frames) -> Result<(), ApiError>;

    /// Those at the end, after all texts.
    fn end(&mut self, out: &mut Frames);

    /// Those of an error, which is the end.
    fn error(&mut self, error: &ApiError, out: &mut Frames);

    /// Those that say that the stream is alive, where nothing has come for a while.
    fn keep_alive(&mut self, out: &mut Frames) {
        match Self::FRAMING {
            Framing::ServerSentEvents => out.comment(),
            Framing::JsonLines => {}
        }
    }
}

/// How the frames of a stream are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Framing {
    /// `text/event-stream`.
    ServerSentEvents,
    /// `application/x-ndjson`: a JSON object on each line.
    JsonLines,
}

impl Framing {
    fn content_type(self) -> &'static str {
        match self {
            Self::ServerSentEvents => "text/event-stream",
            Self::JsonLines => "application/x-ndjson",
        }
    }
}

/// Frames that wait to be sent.
#[derive(Default)]
pub struct Frames {
    waiting: VecDeque<String>,
    /// Nothing is written, and nothing waits.
    discards: bool,
}

impl Frames {
    /// Frames that are never sent.
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

    /// Adds `[DONE]`, as OpenAI ends a stream.
    pub fn done(&mut self) {
        self.push(|| "data: [DONE]\n\n".into());
    }

    /// Adds an object on a line of its own.
    pub fn line(&mut self, object: &impl Serialize) {
        self.push(|| line(object));
    }

    /// Adds a server-sent event that clients pass over.
    fn comment(&mut self) {
        self.push(|| ":\n\n".into());
    }
}

/// `object` on a line of its own.
pub fn line(object: &impl Serialize) -> String {
    json(object) + "\n"
}

/// `object` on one line. Types of this crate always serialise.
fn json(object: &impl Serialize) -> String {
    serde_json::to_string(object).unwrap_or_default()
}

/// Where a stream is.
struct StreamState<C> {
    sequences: Option<RunningSequences>,
    chunks: C,
    out: Frames,
}

impl<C: ChunkWriter> StreamState<C> {
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

/// A stream: `before`, and what `chunks` makes of `sequences`.
pub fn stream<C: ChunkWriter>(sequences: RunningSequences, before: Frames, chunks: C) -> Response {
    let state = StreamState { sequences: Some(sequences), chunks, out: before };
    let frames = stream::unfold(state, |mut state| async move {
        let frame = state.next().await?;
        Some((frame, state))
    });
    streamed(C::FRAMING, frames)
}

/// A stream of frames that are written as `framing` says.
pub fn streamed(framing: Framing, frames: impl Stream<Item = String> + Send + 'static) -> Response {
    let headers = [
        (CONTENT_TYPE, framing.content_type()),
        (CACHE_CONTROL, "no-cache"),
        // Proxies that gather an answer before they pass it on would stop the stream.
        (HeaderName::from_static("x-accel-buffering"), "no"),
    ];
    (headers, Body::from_stream(frames.map(Ok::<_, Infallible>))).into_response()
}
