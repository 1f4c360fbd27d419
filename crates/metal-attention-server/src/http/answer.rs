//! From the scheduler's events to an answer: whole, or as a stream of server-sent events.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::http::header::{CACHE_CONTROL, HeaderName};
use axum::response::sse::{Event as SseEvent, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream::{self, Stream, StreamExt};
use metal_attention::scheduler::{Event, Events, FinishReason};
use serde::Serialize;

use super::request_line::RequestLine;
use super::{ApiError, App};

/// How often a stream says that it is alive where there is nothing else to say.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// The events of several texts as they come, each with the text's number.
type Merged = Pin<Box<dyn Stream<Item = (usize, Event)> + Send>>;

/// The texts of one request, as they are generated. Dropping it cancels them.
pub struct Texts {
    app: App,
    submitted: Instant,
    begun: Vec<bool>,
    merged: Merged,
    /// The request's line in the log.
    line: Option<Arc<RequestLine>>,
}

impl Texts {
    /// The texts that `events` tell of.
    pub fn new(app: App, events: Vec<Events>) -> Self {
        let begun = vec![false; events.len()];
        let one = |(i, events): (usize, Events)| {
            stream::unfold(events, move |mut events| async move { Some(((i, events.recv().await?), events)) }).boxed()
        };
        let merged = stream::select_all(events.into_iter().enumerate().map(one)).boxed();
        let line = RequestLine::current();
        if let Some(line) = &line {
            line.texts(begun.len());
        }
        Self { app, submitted: Instant::now(), begun, merged, line }
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
}

/// Makes the JSON objects of a stream.
pub trait Chunks: Send + 'static {
    /// Whether `[DONE]` follows the last object, as OpenAI has it.
    const SAYS_DONE: bool = true;

    /// Those that an event of text `i` adds. An error ends the stream.
    fn event(&mut self, i: usize, event: Event, out: &mut Out) -> Result<(), ApiError>;

    /// Those at the end, after all texts.
    fn end(&mut self, out: &mut Out);
}

/// JSON objects that wait to be sent.
#[derive(Default)]
pub struct Out(VecDeque<String>);

impl Out {
    /// Adds an object.
    pub fn push(&mut self, chunk: &impl Serialize) {
        // Types of this crate always serialise.
        self.0.extend(serde_json::to_string(chunk));
    }
}

/// Where a stream is.
struct Progress<C> {
    texts: Option<Texts>,
    chunks: C,
    out: Out,
}

impl<C: Chunks> Progress<C> {
    async fn next(&mut self) -> Option<String> {
        loop {
            if let Some(chunk) = self.out.0.pop_front() {
                return Some(chunk);
            }
            let texts = self.texts.as_mut()?;
            let ended = match texts.next().await {
                Some((i, event)) => self.chunks.event(i, event, &mut self.out).map(|()| false),
                None => Ok(true),
            };
            match ended {
                Ok(false) => {}
                Ok(true) => {
                    self.texts = None;
                    self.chunks.end(&mut self.out);
                    self.say_done();
                }
                Err(error) => {
                    self.texts = None;
                    self.out.push(&error.body());
                    self.say_done();
                }
            }
        }
    }

    fn say_done(&mut self) {
        if C::SAYS_DONE {
            self.out.0.push_back("[DONE]".into());
        }
    }
}

/// A stream of server-sent events: `before`, what `chunks` makes of `texts`, and `[DONE]` where it says so.
pub fn stream(texts: Texts, before: Out, chunks: impl Chunks) -> Response {
    let progress = Progress { texts: Some(texts), chunks, out: before };
    let events = stream::unfold(progress, |mut progress| async move {
        let chunk = progress.next().await?;
        Some((Ok::<_, Infallible>(SseEvent::default().data(chunk)), progress))
    });
    let sse = Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE));
    // Proxies that gather an answer before they pass it on would stop the stream.
    let headers = [(CACHE_CONTROL, "no-cache"), (HeaderName::from_static("x-accel-buffering"), "no")];
    (headers, sse).into_response()
}

/// OpenAI's name for why a text ended. An error where it did not end by itself.
pub fn finish_reason(reason: FinishReason) -> Result<&'static str, ApiError> {
    match reason {
        FinishReason::EndOfText | FinishReason::StopString => Ok("stop"),
        FinishReason::Length | FinishReason::ContextFull => Ok("length"),
        FinishReason::Deadline => Err(ApiError::deadline()),
        FinishReason::Cancelled => Err(ApiError::unavailable("shutting_down", "the server is shutting down")),
    }
}
