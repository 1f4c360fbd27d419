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
    watches: bool,
    started: Instant,
    so_far: Mutex<SoFar>,
}

/// What is known of a request so far.
#[derive(Debug, Default)]
struct SoFar {
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
    pub fn new(id: String, method: &str, route: &str, watches: bool) -> Arc<Self> {
        let (method, route) = (method.to_owned(), route.to_owned());
        Arc::new(Self { id, method, route, watches, started: Instant::now(), so_far: Mutex::default() })
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
        self.so_far().status = Some(status);
    }

    /// The request waited this long for its model to be loaded.
    pub fn waited_for_model(&self, time: Duration) {
        self.so_far().model_load = Some(time);
    }

    /// How long the request waited for its model to be loaded; `None`: it was loaded.
    pub fn model_load(&self) -> Option<Duration> {
        self.so_far().model_load
    }

    /// The request had so many tokens in all its texts, and none are generated.
    pub fn prompt_tokens(&self, n: usize) {
        self.so_far().tokens = Some((n, 0, 0));
    }

    /// The request has so many texts.
    pub fn sequences(&self, n: usize) {
        self.so_far().open = n;
    }

    /// Something happened to one of its texts.
    pub fn event(&self, event: &Event) {
        let mut so_far = self.so_far();
        match event {
            Event::Prompt(_) => {}
            Event::Token { .. } => so_far.sent += 1,
            Event::Done { usage, timings, .. } => {
                let first = timings.queued + timings.prefill;
                let last = first + timings.decode;
                if usage.generated_tokens > 0 {
                    so_far.first_token = Some(so_far.first_token.map_or(first, |other| other.min(first)));
                    so_far.last_token = Some(so_far.last_token.map_or(last, |other| other.max(last)));
                }
                so_far.open = so_far.open.saturating_sub(1);
                let (prompt, cached, generated) = so_far.tokens.unwrap_or_default();
                so_far.tokens = Some((
                    prompt + usage.prompt_tokens,
                    cached + usage.cached_tokens,
                    generated + usage.generated_tokens,
                ));
            }
            Event::Failed(_) => so_far.failed = true,
        }
    }

    fn so_far(&self) -> MutexGuard<'_, SoFar> {
        self.so_far.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The line, after `took`.
    fn text(&self, took: Duration) -> String {
        let so_far = self.so_far();
        let mut line = format!("{} {} ", self.method, self.route);
        let _ = match so_far.status {
            Some(status) => write!(line, "{status}"),
            None => write!(line, "client left"),
        };
        if so_far.failed {
            line += " failed";
        } else if so_far.status.is_some() && so_far.open > 0 {
            let _ = write!(line, " client left after {} tokens", so_far.sent);
        }
        let _ = write!(line, " in {:.2} s", took.as_secs_f64());
        if let Some((prompt, cached, generated)) = so_far.tokens {
            let _ = write!(line, ", tokens: {prompt} in, {cached} cached, {generated} out");
        }
        if let (Some(first), Some(last)) = (so_far.first_token, so_far.last_token) {
            let _ = write!(line, ", first after {:.2} s", first.as_secs_f64());
            let n = so_far.tokens.map_or(0, |(_, _, generated)| generated);
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
        if self.watches {
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
        let mut more = line.so_far();
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
