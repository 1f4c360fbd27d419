//! Generated texts as Python classes: complete, and token by token.

use std::sync::{Arc, Mutex, PoisonError};

use metal_attention::scheduler::{self, Events, RequestError, TokenLogprobs};
use metal_attention_chat::AnswerEvent;
use pyo3::prelude::*;
use tokio::task::AbortHandle;

use crate::conversation::{AnswerReader, delta_json, message_json};
use crate::errors;
use crate::processor::RaisedException;
use crate::wait::Threads;

/// The log probability of a token, its rank, and the most probable tokens with their log probabilities.
type Logprobs = (f32, usize, Vec<(u32, f32)>);

/// Converts the scheduler's log probabilities.
fn logprobs(told: TokenLogprobs) -> Logprobs {
    (told.logprob, told.rank, told.top)
}

/// A complete generated text.
#[pyclass(frozen, get_all, module = "metal_attention._engine")]
pub struct Completion {
    /// The text.
    text: String,
    /// The ids of its tokens.
    token_ids: Vec<u32>,
    /// The log probabilities of its tokens; empty if not requested.
    logprobs: Vec<Logprobs>,
    /// The log probabilities of the prompt's tokens after the first.
    prompt_logprobs: Vec<Logprobs>,
    /// The answer to a conversation, as a message in JSON.
    message: Option<String>,
    /// The reason why it ended.
    reason: &'static str,
    /// The number of the prompt's tokens that were in the KV cache already.
    cached_tokens: usize,
    /// The number of drafts that were evaluated.
    drafted_tokens: usize,
    /// The number of drafts that were accepted.
    accepted_tokens: usize,
    /// The seconds of waiting in the queue, of prefill, and of decode.
    seconds: (f64, f64, f64),
}

impl Completion {
    /// Waits for the text. `answer` is the reader for an answer to a conversation.
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

    /// Converts the scheduler's completion; `message` is the answer in JSON.
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
            drafted_tokens: usage.drafted_tokens,
            accepted_tokens: usage.accepted_tokens,
            seconds: (timings.queued.as_secs_f64(), timings.prefill.as_secs_f64(), timings.decode.as_secs_f64()),
        }
    }
}

/// A part of a generated text. The last one has the reason why the text ended.
#[pyclass(frozen, get_all, module = "metal_attention._engine")]
#[derive(Default)]
pub struct Event {
    /// The text that became final.
    text: String,
    /// The id of the token; `None` in the last event.
    token_id: Option<u32>,
    /// The log probabilities of the token; `None`: not requested.
    logprobs: Option<Logprobs>,
    /// The log probabilities of the prompt's tokens after the first; this event has nothing else.
    prompt_logprobs: Option<Vec<Logprobs>>,
    /// The addition of this part to the answer to a conversation, in JSON.
    delta: Option<String>,
    /// The reason why the text ended; only in the last event.
    reason: Option<&'static str>,
}

impl Event {
    /// Converts the scheduler's event. An error if the request failed.
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

/// The error of a request. If its logits processor raised an exception, that is the error.
pub fn failure(why: &RequestError, raised: &RaisedException) -> PyErr {
    raised.take().unwrap_or_else(|| errors::of_request(why))
}

/// The parts of a text while it is generated. Dropping the stream cancels the request.
#[pyclass(frozen, module = "metal_attention._engine")]
pub struct EventStream {
    /// The thread that calls callbacks.
    threads: Arc<Threads>,
    /// The exception of the logits processor.
    raised: RaisedException,
    /// The reader of the events.
    state: Mutex<State>,
}

/// The events of a request, and the reader of the answer if it answers a conversation.
pub struct EventReader {
    /// The events.
    events: Events,
    /// The reader of the answer.
    answer: Option<AnswerReader>,
}

impl EventReader {
    /// The next part; `None` after the last one.
    async fn next(&mut self, raised: &RaisedException) -> Option<PyResult<Event>> {
        let event = self.events.recv().await?;
        Some(Event::new(event, self.answer.as_mut(), raised))
    }
}

/// The use of a stream's events.
enum State {
    /// The next caller may read them.
    Idle(Box<EventReader>),
    /// A call waits for the next one.
    Waiting,
    /// A task passes them to a callback.
    Listening(AbortHandle),
    /// The text is over or cancelled.
    Closed,
}

impl EventStream {
    /// A stream over the events of a request.
    pub fn new(threads: Arc<Threads>, events: Events, answer: Option<AnswerReader>, raised: RaisedException) -> Self {
        Self { threads, raised, state: Mutex::new(State::Idle(Box::new(EventReader { events, answer }))) }
    }

    /// Takes the reader and changes the state to `next`. `None`, without a change, if the stream is not idle.
    fn take(&self, next: State) -> Option<Box<EventReader>> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match std::mem::replace(&mut *state, next) {
            State::Idle(reader) => Some(reader),
            other => {
                *state = other;
                None
            }
        }
    }
}

#[pymethods]
impl EventStream {
    /// Waits for the next part; None after the last one.
    fn next(&self, py: Python<'_>) -> PyResult<Option<Event>> {
        let Some(mut reader) = self.take(State::Waiting) else { return Ok(None) };
        let outcome = self.threads.wait(py, reader.next(&self.raised));
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let event = match outcome {
            Ok(event) => event,
            Err(interrupted) => {
                *state = State::Closed;
                return Err(interrupted);
            }
        };
        if matches!(*state, State::Waiting) {
            *state = State::Idle(reader);
        }
        drop(state);
        event.transpose()
    }

    /// Passes all further parts to `callback`, from another thread; if the request fails, an exception instead of the last one. If
    /// the callback raises, the request is cancelled.
    fn listen(&self, callback: Py<PyAny>) {
        let Some(mut reader) = self.take(State::Closed) else { return };
        let raised = self.raised.clone();
        let task = self.threads.spawn(async move {
            while let Some(event) = reader.next(&raised).await {
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

    /// Cancels the request.
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
