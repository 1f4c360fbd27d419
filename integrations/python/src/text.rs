//! Texts as Python sees them: whole, and piece by piece.

use std::sync::{Arc, Mutex, PoisonError};

use metal_attention::scheduler::{self, Events, RequestError, TokenLogprobs};
use metal_attention_chat::AnswerEvent;
use pyo3::prelude::*;
use tokio::task::AbortHandle;

use crate::conversation::{AnswerReader, delta_json, message_json};
use crate::errors;
use crate::processor::RaisedException;
use crate::wait::Threads;

/// The log probability of a token, its place among all, and the most probable ones with theirs.
type Logprobs = (f32, usize, Vec<(u32, f32)>);

fn logprobs(told: TokenLogprobs) -> Logprobs {
    (told.logprob, told.rank, told.top)
}

/// A text from its first token to its end.
#[pyclass(frozen, get_all, module = "metal_attention._engine")]
pub struct Completion {
    text: String,
    token_ids: Vec<u32>,
    logprobs: Vec<Logprobs>,
    /// Of the prompt's tokens after the first.
    prompt_logprobs: Vec<Logprobs>,
    /// The answer to a conversation as a message, in JSON.
    message: Option<String>,
    reason: &'static str,
    cached_tokens: usize,
    /// Queued, prefill, decode.
    seconds: (f64, f64, f64),
}

impl Completion {
    /// Waits for a text; `answer` reads it where it answers a conversation.
    pub async fn of_events(events: Events, answer: Option<AnswerReader>, raised: &RaisedException) -> PyResult<Self> {
        match answer {
            None => events.completion().await.map(|completion| Self::new(completion, None)),
            Some(mut answer) => {
                let mut parts: Vec<AnswerEvent> = Vec::new();
                let completion = events.completion_with(|event| parts.extend(answer.take(event))).await;
                completion.map(|completion| Self::new(completion, Some(message_json(parts))))
            }
        }
        .map_err(|why| failure(&why, raised))
    }

    fn new(completion: scheduler::Completion, message: Option<String>) -> Self {
        let scheduler::Completion { ids, text, logprobs: told, prompt_logprobs, reason, usage, timings } = completion;
        Self {
            text,
            token_ids: ids,
            logprobs: told.into_iter().map(logprobs).collect(),
            prompt_logprobs: prompt_logprobs.into_iter().map(logprobs).collect(),
            message,
            reason: reason.name(),
            cached_tokens: usage.cached_tokens,
            seconds: (timings.queued.as_secs_f64(), timings.prefill.as_secs_f64(), timings.decode.as_secs_f64()),
        }
    }
}

/// A piece of a text. The last one has the reason why it ended.
#[pyclass(frozen, get_all, module = "metal_attention._engine")]
#[derive(Default)]
pub struct Event {
    text: String,
    token_id: Option<u32>,
    logprobs: Option<Logprobs>,
    /// Of the prompt's tokens after the first, in a piece of their own.
    prompt_logprobs: Option<Vec<Logprobs>>,
    /// What the piece adds to the answer to a conversation, in JSON.
    delta: Option<String>,
    reason: Option<&'static str>,
}

impl Event {
    fn new(event: scheduler::Event, answer: Option<&mut AnswerReader>, raised: &RaisedException) -> PyResult<Self> {
        let delta = answer.map(|answer| delta_json(answer.take(&event)));
        match event {
            scheduler::Event::Prompt(told) => {
                let told = told.into_iter().map(logprobs).collect();
                Ok(Self { prompt_logprobs: Some(told), delta, ..Self::default() })
            }
            scheduler::Event::Token { id, text, logprobs: told } => {
                Ok(Self { text, token_id: Some(id), logprobs: told.map(logprobs), delta, ..Self::default() })
            }
            scheduler::Event::Done { reason, text, .. } => {
                Ok(Self { text, delta, reason: Some(reason.name()), ..Self::default() })
            }
            scheduler::Event::Failed(why) => Err(failure(&why, raised)),
        }
    }
}

/// Why a text could not be finished; where its logits processor raised an exception, that.
pub fn failure(why: &RequestError, raised: &RaisedException) -> PyErr {
    raised.take().unwrap_or_else(|| errors::of_request(why))
}

/// The pieces of a text as they come. Dropping it cancels the text.
#[pyclass(frozen, module = "metal_attention._engine")]
pub struct EventStream {
    threads: Arc<Threads>,
    raised: RaisedException,
    state: Mutex<State>,
}

/// The events of a text, and what reads them where it answers a conversation.
pub struct EventReader {
    events: Events,
    answer: Option<AnswerReader>,
}

impl EventReader {
    /// The next piece; `None` after the last.
    async fn next(&mut self, raised: &RaisedException) -> Option<PyResult<Event>> {
        let event = self.events.recv().await?;
        Some(Event::new(event, self.answer.as_mut(), raised))
    }
}

/// Who gets the events.
enum State {
    /// Whoever asks next.
    Idle(Box<EventReader>),
    /// Somebody who waits for the next one.
    Waiting,
    /// A callback.
    Listening(AbortHandle),
    /// Nobody: the text is over.
    Closed,
}

impl EventStream {
    pub fn new(threads: Arc<Threads>, events: Events, answer: Option<AnswerReader>, raised: RaisedException) -> Self {
        Self { threads, raised, state: Mutex::new(State::Idle(Box::new(EventReader { events, answer }))) }
    }

    /// The events, to be given to somebody else; `None` where they are not to be had.
    fn take(&self, next: State) -> Option<Box<EventReader>> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match std::mem::replace(&mut *state, next) {
            State::Idle(reading) => Some(reading),
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
        let Some(mut reading) = self.take(State::Waiting) else { return Ok(None) };
        let outcome = self.threads.wait(py, reading.next(&self.raised));
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let event = match outcome {
            Ok(event) => event,
            Err(interrupted) => {
                *state = State::Closed;
                return Err(interrupted);
            }
        };
        if matches!(*state, State::Waiting) {
            *state = State::Idle(reading);
        }
        drop(state);
        event.transpose()
    }

    /// Gives all further pieces to `callback`, from another thread; an exception in the place of the last where the text
    /// failed. Where the callback raises the text is cancelled.
    fn listen(&self, callback: Py<PyAny>) {
        let Some(mut reading) = self.take(State::Closed) else { return };
        let raised = self.raised.clone();
        let task = self.threads.spawn(async move {
            while let Some(event) = reading.next(&raised).await {
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
