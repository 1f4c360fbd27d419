//! One line in the log for each request, when its answer has ended.

use std::fmt::Write;
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use metal_attention::scheduler::Event;

tokio::task_local! {
    static CURRENT: Arc<RequestLine>;
}

/// The target of the lines, for log filters.
pub const LOG_TARGET: &str = "requests";

/// What the log says about a request. The line is written when the last handle is dropped: that of the response's head, or
/// that of a stream that goes on after it. Neither prompts nor keys nor queries are in it.
#[derive(Debug)]
pub struct RequestLine {
    id: String,
    method: String,
    route: String,
    /// Watchers come every few seconds: their lines have the level debug.
    is_monitoring: bool,
    started: Instant,
    state: Mutex<LineState>,
}

/// What is known of a request so far.
#[derive(Debug, Default)]
struct LineState {
    /// The status, once the head of the answer is there.
    status: Option<u16>,
    /// How long it waited for its model to be loaded.
    model_load: Option<Duration>,
    /// Tokens of the prompts, those of them that were in the KV cache, and tokens generated.
    tokens: Option<(usize, usize, usize)>,
    /// From a text's submission to its first token, and to its last one: of the texts the first, and the last.
    first_token: Option<Duration>,
    last_token: Option<Duration>,
    /// Texts that have begun and not ended, and their tokens so far.
    open: usize,
    sent: usize,
    failed: bool,
}

impl RequestLine {
    /// Of a request that begins now.
    pub fn new(id: String, method: &str, route: &str, is_monitoring: bool) -> Arc<Self> {
        let (method, route) = (method.to_owned(), route.to_owned());
        Arc::new(Self { id, method, route, is_monitoring, started: Instant::now(), state: Mutex::default() })
    }

    /// Runs `request`, within which [`current`](Self::current) is this line.
    pub fn scope<F: Future>(self: Arc<Self>, request: F) -> impl Future<Output = F::Output> {
        CURRENT.scope(self, request)
    }

    /// The line of the request that runs; none outside of one.
    pub fn current() -> Option<Arc<Self>> {
        CURRENT.try_with(Arc::clone).ok()
    }

    /// The head of the answer has this status.
    pub fn status(&self, status: u16) {
        self.state().status = Some(status);
    }

    /// The request waited this long for its model to be loaded.
    pub fn waited_for_model(&self, time: Duration) {
        self.state().model_load = Some(time);
    }

    /// How long the request waited for its model to be loaded; `None`: it was loaded.
    pub fn model_load(&self) -> Option<Duration> {
        self.state().model_load
    }

    /// The request had so many tokens in all its texts, and none are generated.
    pub fn prompt_tokens(&self, n: usize) {
        self.state().tokens = Some((n, 0, 0));
    }

    /// The request has so many texts.
    pub fn sequences(&self, n: usize) {
        self.state().open = n;
    }

    /// Something happened to one of its texts.
    pub fn event(&self, event: &Event) {
        let mut state = self.state();
        match event {
            Event::Prompt(_) => {}
            Event::Token { .. } => state.sent += 1,
            Event::Done { usage, timings, .. } => {
                let first = timings.queued + timings.prefill;
                let last = first + timings.decode;
                if usage.generated_tokens > 0 {
                    state.first_token = Some(state.first_token.map_or(first, |other| other.min(first)));
                    state.last_token = Some(state.last_token.map_or(last, |other| other.max(last)));
                }
                state.open = state.open.saturating_sub(1);
                let (prompt, cached, generated) = state.tokens.unwrap_or_default();
                state.tokens = Some((
                    prompt + usage.prompt_tokens,
                    cached + usage.cached_tokens,
                    generated + usage.generated_tokens,
                ));
            }
            Event::Failed(_) => state.failed = true,
        }
    }

    fn state(&self) -> MutexGuard<'_, LineState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The line, after `took`.
    fn text(&self, took: Duration) -> String {
        let state = self.state();
        let mut line = format!("{} {} ", self.method, self.route);
        let _ = match state.status {
            Some(status) => write!(line, "{status}"),
            None => write!(line, "client left"),
        };
        if state.failed {
            line += " failed";
        } else if state.status.is_some() && state.open > 0 {
            let _ = write!(line, " client left after {} tokens", state.sent);
        }
        let _ = write!(line, " in {:.2} s", took.as_secs_f64());
        if let Some((prompt, cached, generated)) = state.tokens {
            let _ = write!(line, ", tokens: {prompt} in, {cached} cached, {generated} out");
        }
        if let (Some(first), Some(last)) = (state.first_token, state.last_token) {
            let _ = write!(line, ", first after {:.2} s", first.as_secs_f64());
            let n = state.tokens.map_or(0, |(_, _, generated)| generated);
            let seconds = last.saturating_sub(first).as_secs_f64();
            if n > 1 && seconds > 0.0 {
                let _ = write!(line, ", {:.1} tokens/s", (n - 1) as f64 / seconds);
            }
        }
        let _ = write!(line, ", {}", self.id);
        line
    }
}

impl Drop for RequestLine {
    fn drop(&mut self) {
        let line = self.text(self.started.elapsed());
        if self.is_monitoring {
            tracing::debug!(target: LOG_TARGET, parent: None, "{line}");
        } else {
            tracing::info!(target: LOG_TARGET, parent: None, "{line}");
        }
    }
}

#[cfg(test)]
mod tests {
    use metal_attention::scheduler::{FinishReason, RequestError, RequestTimings, Usage};

    use super::*;

    fn token() -> Event {
        Event::Token { id: 1, text: "secret".into(), logprobs: None }
    }

    #[test]
    fn a_line_says_what_a_request_took() {
        let line = RequestLine::new("req-1".into(), "POST", "/v1/completions", false);
        assert_eq!(line.text(Duration::from_millis(10)), "POST /v1/completions client left in 0.01 s, req-1");
        line.status(200);
        line.sequences(1);
        line.event(&token());
        assert_eq!(
            line.text(Duration::from_millis(10)),
            "POST /v1/completions 200 client left after 1 tokens in 0.01 s, req-1"
        );
        line.event(&Event::Done {
            reason: FinishReason::Length,
            text: "secret".into(),
            stop_string: None,
            end_token: None,
            end_logprobs: None,
            usage: Usage { prompt_tokens: 12, cached_tokens: 8, generated_tokens: 1 },
            timings: RequestTimings {
                queued: Duration::from_millis(50),
                prefill: Duration::from_millis(200),
                decode: Duration::ZERO,
            },
        });
        assert_eq!(
            line.text(Duration::from_millis(1250)),
            "POST /v1/completions 200 in 1.25 s, tokens: 12 in, 8 cached, 1 out, first after 0.25 s, req-1"
        );
        let mut more = line.state();
        more.tokens = Some((12, 8, 41));
        more.last_token = Some(Duration::from_millis(1250));
        drop(more);
        line.event(&Event::Failed(RequestError::NoNumbers));
        assert_eq!(
            line.text(Duration::from_secs(2)),
            "POST /v1/completions 200 failed in 2.00 s, tokens: 12 in, 8 cached, 41 out, first after 0.25 s, 40.0 tokens/s, req-1"
        );
    }
}
