//! Texts as Python sees them: whole, and piece by piece.

use std::sync::{Arc, Mutex, PoisonError};

use metal_attention::scheduler::{self, Events, RequestError, TokenLogprobs};
use pyo3::prelude::*;
use tokio::task::AbortHandle;

use crate::errors;
use crate::processor::Raised;
use crate::wait::Threads;

/// The log probability of a token, and the most probable ones with theirs.
type Logprobs = (f32, Vec<(u32, f32)>);

fn logprobs(told: TokenLogprobs) -> Logprobs {
    (told.logprob, told.top)
}

/// A text from its first token to its end.
#[pyclass(frozen, get_all, module = "metal_attention._engine")]
pub struct Completion {
    text: String,
    token_ids: Vec<u32>,
    logprobs: Vec<Logprobs>,
    reason: &'static str,
    cached_tokens: usize,
    /// Queued, prefill, decode.
    seconds: (f64, f64, f64),
}

impl From<scheduler::Completion> for Completion {
    fn from(completion: scheduler::Completion) -> Self {
        let scheduler::Completion { ids, text, logprobs: told, prompt_logprobs: _, reason, usage, timings } =
            completion;
        Self {
            text,
            token_ids: ids,
            logprobs: told.into_iter().map(logprobs).collect(),
            reason: reason.name(),
            cached_tokens: usage.cached_tokens,
            seconds: (timings.queued.as_secs_f64(), timings.prefill.as_secs_f64(), timings.decode.as_secs_f64()),
        }
    }
}

/// A piece of a text. The last one has the reason why it ended.
#[pyclass(frozen, get_all, module = "metal_attention._engine")]
pub struct Event {
    text: String,
    token_id: Option<u32>,
    logprobs: Option<Logprobs>,
    reason: Option<&'static str>,
}

impl Event {
    fn new(event: scheduler::Event, raised: &Raised) -> PyResult<Self> {
        match event {
            // No text asks for the prompt's log probabilities.
            scheduler::Event::Prompt(_) => {
                Ok(Self { text: String::new(), token_id: None, logprobs: None, reason: None })
            }
            scheduler::Event::Token { id, text, logprobs: told } => {
                Ok(Self { text, token_id: Some(id), logprobs: told.map(logprobs), reason: None })
            }
            scheduler::Event::Done { reason, text, .. } => {
                Ok(Self { text, token_id: None, logprobs: None, reason: Some(reason.name()) })
            }
            scheduler::Event::Failed(why) => Err(failure(&why, raised)),
        }
    }
}

/// Why a text could not be finished; where its logits processor raised an exception, that.
pub fn failure(why: &RequestError, raised: &Raised) -> PyErr {
    raised.take().unwrap_or_else(|| errors::of_request(why))
}

/// The pieces of a text as they come. Dropping it cancels the text.
#[pyclass(frozen, module = "metal_attention._engine")]
pub struct EventStream {
    threads: Arc<Threads>,
    raised: Raised,
    state: Mutex<State>,
}

/// Who gets the events.
enum State {
    /// Whoever asks next.
    Idle(Events),
    /// Somebody who waits for the next one.
    Waiting,
    /// A callback.
    Listening(AbortHandle),
    /// Nobody: the text is over.
    Closed,
}

impl EventStream {
    pub fn new(threads: Arc<Threads>, events: Events, raised: Raised) -> Self {
        Self { threads, raised, state: Mutex::new(State::Idle(events)) }
    }

    /// The events, to be given to somebody else; `None` where they are not to be had.
    fn take(&self, next: State) -> Option<Events> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match std::mem::replace(&mut *state, next) {
            State::Idle(events) => Some(events),
            other => {
                *state = other;
                None
            }
        }
    }
}

#[pymethods]
impl EventStream {
    /// Waits for the next piece; None after the last.
    fn next(&self, py: Python<'_>) -> PyResult<Option<Event>> {
        let Some(mut events) = self.take(State::Waiting) else { return Ok(None) };
        let outcome = self.threads.wait(py, events.recv());
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let event = match outcome {
            Ok(event) => event,
            Err(interrupted) => {
                *state = State::Closed;
                return Err(interrupted);
            }
        };
        if matches!(*state, State::Waiting) {
            *state = State::Idle(events);
        }
        drop(state);
        event.map(|event| Event::new(event, &self.raised)).transpose()
    }

    /// Gives all further pieces to `callback`, from another thread; an exception in the place of the last where the text
    /// failed. Where the callback raises the text is cancelled.
    fn listen(&self, callback: Py<PyAny>) {
        let Some(mut events) = self.take(State::Closed) else { return };
        let raised = self.raised.clone();
        let task = self.threads.spawn(async move {
            while let Some(event) = events.recv().await {
                let event = Event::new(event, &raised);
                let told = Python::try_attach(|py| match event {
                    Ok(event) => callback.call1(py, (event,)),
                    Err(error) => callback.call1(py, (error,)),
                });
                if !matches!(told, Some(Ok(_))) {
                    return;
                }
            }
        });
        *self.state.lock().unwrap_or_else(PoisonError::into_inner) = State::Listening(task);
    }

    /// Cancels the text.
    fn close(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match std::mem::replace(&mut *state, State::Closed) {
            State::Listening(task) => task.abort(),
            State::Idle(_) | State::Waiting | State::Closed => {}
        }
    }
}

impl Drop for EventStream {
    fn drop(&mut self) {
        self.close();
    }
}
