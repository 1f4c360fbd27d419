//! One log line for each request, written when its response has ended.

use std::fmt::Write;
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use metal_attention::scheduler::Event;

tokio::task_local! {
    static CURRENT: Arc<RequestLine>;
}

/// The target of these lines, for log filters.
pub const LOG_TARGET: &str = "requests";

/// The log line of one request. It is written when the last reference is dropped: by the response's head, or by a
/// stream that continues after it. It contains no prompts, keys or queries.
#[derive(Debug)]
pub struct RequestLine {
    /// The request's id.
    id: String,
    /// The HTTP method.
    method: String,
    /// The router's pattern, not the path.
    route: String,
    /// Whether a monitoring path is requested: such lines have the level debug.
    is_monitoring: bool,
    /// The start of the request.
    started: Instant,
    /// The contents that are known so far.
    state: Mutex<LineState>,
}

/// The contents of the line that are known so far.
#[derive(Debug, Default)]
struct LineState {
    /// The status; `None` until the head of the response is ready.
    status: Option<u16>,
    /// The time that the request waited for its model to load; `None`: it was loaded.
    model_load: Option<Duration>,
    /// Tokens of the prompts, tokens of them found in the prefix cache, and generated tokens.
    tokens: Option<(usize, usize, usize)>,
    /// Drafts that were evaluated, and those that held.
    drafts: (usize, usize),
    /// The time from the submission to the first token of any sequence.
    first_token: Option<Duration>,
    /// The time from the submission to the last token of any sequence.
    last_token: Option<Duration>,
    /// Sequences that have not ended.
    open: usize,
    /// Tokens that were generated so far.
    sent: usize,
    /// Whether a sequence has failed.
    failed: bool,
}

impl RequestLine {
    /// The line of a request that begins now. `route`: the router's pattern, not the path.
    pub fn new(id: String, method: &str, route: &str, is_monitoring: bool) -> Arc<Self> {
        let (method, route) = (method.to_owned(), route.to_owned());
        Arc::new(Self { id, method, route, is_monitoring, started: Instant::now(), state: Mutex::default() })
    }

    /// Runs `request`, inside which [`current`](Self::current) returns this line.
    pub fn scope<F: Future>(self: Arc<Self>, request: F) -> impl Future<Output = F::Output> {
        CURRENT.scope(self, request)
    }

    /// The line of the running request; `None` outside of one.
    pub fn current() -> Option<Arc<Self>> {
        CURRENT.try_with(Arc::clone).ok()
    }

    /// Sets the status of the response.
    pub fn status(&self, status: u16) {
        self.state().status = Some(status);
    }

    /// Sets the time that the request waited for its model to load.
    pub fn waited_for_model(&self, time: Duration) {
        self.state().model_load = Some(time);
    }

    /// The time that the request waited for its model to load; `None`: it was loaded.
    pub fn model_load(&self) -> Option<Duration> {
        self.state().model_load
    }

    /// Sets the number of prompt tokens of a request that generates none (embeddings, ranking).
    pub fn prompt_tokens(&self, n: usize) {
        self.state().tokens = Some((n, 0, 0));
    }

    /// Sets the number of the request's sequences.
    pub fn sequences(&self, n: usize) {
        self.state().open = n;
    }

    /// Counts an event of one of its sequences.
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
                state.drafts.0 += usage.drafted_tokens;
                state.drafts.1 += usage.accepted_tokens;
            }
            Event::Failed(_) => state.failed = true,
        }
    }

    fn state(&self) -> MutexGuard<'_, LineState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The line of a request that took `took`.
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
        if let (drafted @ 1.., held) = state.drafts {
            let _ = write!(line, ", {held} of {drafted} drafts held");
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
    fn a_line_has_the_tokens_and_times_of_a_request() {
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
            usage: Usage { prompt_tokens: 12, cached_tokens: 8, generated_tokens: 1, ..Default::default() },
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
        more.drafts = (30, 20);
        drop(more);
        line.event(&Event::Failed(RequestError::NoNumbers));
        assert_eq!(
            line.text(Duration::from_secs(2)),
            "POST /v1/completions 200 failed in 2.00 s, tokens: 12 in, 8 cached, 41 out, 20 of 30 drafts held, first after 0.25 s, 40.0 tokens/s, req-1"
        );
    }
}
