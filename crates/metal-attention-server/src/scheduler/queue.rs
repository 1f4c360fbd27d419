//! What callers and the engine's thread share: requests that wait, and the wish to end.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use metal_attention::sampling::Sampler;
use tokio::sync::{mpsc, oneshot};

use super::{Event, Metrics, Request, RequestError, SubmitError};

/// A request to continue a text, with what was checked when it came.
pub(super) struct Submission {
    pub request: Request,
    pub sampler: Sampler,
    pub events: mpsc::UnboundedSender<Event>,
    pub submitted: Instant,
}

/// A request for the embedding of a text.
pub(super) struct EmbeddingRequest {
    pub ids: Vec<u32>,
    pub answer: oneshot::Sender<Result<Vec<f32>, RequestError>>,
}

/// Requests that wait, in the order they came.
#[derive(Default)]
pub(super) struct Queue {
    pub texts: VecDeque<Submission>,
    pub embeddings: VecDeque<EmbeddingRequest>,
    /// No new requests are taken, and those that are not finished at this time are cancelled.
    pub closing: Option<Instant>,
}

impl Queue {
    /// Requests that wait.
    pub fn len(&self) -> usize {
        self.texts.len() + self.embeddings.len()
    }
}

/// The queue, and how its two sides meet.
#[derive(Default)]
pub(super) struct Shared {
    queue: Mutex<Queue>,
    /// Signalled when there is something new in the queue.
    changed: Condvar,
    metrics: Mutex<Metrics>,
}

impl Shared {
    /// The queue. A panic elsewhere leaves it whole: nothing that runs under the lock can panic half-way.
    pub fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn metrics(&self) -> MutexGuard<'_, Metrics> {
        self.metrics.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds to the queue by `push`, where it takes requests and has room for one more than `n_queue` allows.
    pub fn push(&self, n_queue: usize, push: impl FnOnce(&mut Queue)) -> Result<(), SubmitError> {
        let mut queue = self.queue();
        if queue.closing.is_some() {
            return Err(SubmitError::ShuttingDown);
        }
        if queue.len() >= n_queue {
            return Err(SubmitError::QueueFull { n_queue });
        }
        push(&mut queue);
        drop(queue);
        self.changed.notify_one();
        Ok(())
    }

    /// Takes no more requests; cancels at `deadline` those that are not finished by then.
    pub fn close(&self, deadline: Instant) {
        let mut queue = self.queue();
        queue.closing = Some(queue.closing.map_or(deadline, |earlier| earlier.min(deadline)));
        drop(queue);
        self.changed.notify_one();
    }

    /// Sleeps until there is something in the queue or it closes.
    pub fn sleep(&self) {
        let idle = |queue: &mut Queue| queue.len() == 0 && queue.closing.is_none();
        drop(self.changed.wait_while(self.queue(), idle).unwrap_or_else(PoisonError::into_inner));
    }

    /// Drops all that waits and takes nothing more: the engine is gone.
    pub fn end(&self) {
        let mut queue = self.queue();
        queue.closing = Some(Instant::now());
        for submission in queue.texts.drain(..) {
            let _ = submission.events.send(Event::Failed(RequestError::ShutDown));
        }
        queue.embeddings.clear();
    }
}
