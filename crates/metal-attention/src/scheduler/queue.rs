//! What callers and the engine's thread share: requests that wait, and the wish to end.

use std::collections::{BTreeSet, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::sampling::Sampler;
use tokio::sync::{mpsc, oneshot};

use super::lines::Lines;
use super::slot_commands::SlotCommand;
use super::{Client, Event, Metrics, Request, RequestError, SubmitError};

/// Counts a request from the time it is queued until nothing is left to do for it.
#[derive(Debug)]
pub(super) struct Ticket(Arc<AtomicUsize>);

impl Drop for Ticket {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A request to continue a text, with what was checked when it came.
pub(super) struct Submission {
    pub request: Request,
    pub sampler: Sampler,
    pub events: mpsc::UnboundedSender<Event>,
    pub submitted: Instant,
    /// Once it is queued.
    pub ticket: Option<Ticket>,
}

/// A request for what a model makes of a text: an embedding, or logits.
pub(super) struct EmbeddingRequest {
    pub client: Client,
    pub ids: Vec<u32>,
    pub wanted: Wanted,
    pub answer: oneshot::Sender<Result<Vec<f32>, RequestError>>,
    /// Once it is queued.
    pub ticket: Option<Ticket>,
}

/// What is wanted of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wanted {
    /// Its embedding, or a reranker's scores.
    Embedding,
    /// The logits after each token from this position on.
    Logits(usize),
}

/// Requests that wait.
#[derive(Default)]
pub(super) struct Queue {
    pub texts: Lines<Submission>,
    pub embeddings: Lines<EmbeddingRequest>,
    /// What is to be done with slots, the first command first.
    pub slot_commands: VecDeque<SlotCommand>,
    /// No new requests are taken, and those that are not finished at this time are cancelled.
    pub closing: Option<Instant>,
    /// Somebody may be about to send a request.
    announced: bool,
    /// The engine's thread panicked.
    failed: bool,
}

impl Queue {
    /// Requests that wait.
    pub fn len(&self) -> usize {
        self.texts.len() + self.embeddings.len()
    }

    /// Whether there is nothing to do, and the queue is not closed.
    pub fn is_idle(&self) -> bool {
        self.len() == 0 && self.slot_commands.is_empty() && self.closing.is_none()
    }

    /// Whether one more request of `client` may wait where `n_queue` may. Who has less than an equal share finds room
    /// beyond that, up to as much again: no client alone keeps others out.
    fn has_room(&self, client: Client, n_queue: usize) -> bool {
        let n = self.len();
        if n < n_queue {
            return true;
        }
        let own = self.texts.of(client) + self.embeddings.of(client);
        let clients: BTreeSet<_> = self.texts.clients().chain(self.embeddings.clients()).chain([client]).collect();
        n < n_queue.saturating_mul(2) && own < n_queue / clients.len()
    }
}

/// The queue, and how its two sides meet.
#[derive(Default)]
pub(super) struct Shared {
    queue: Mutex<Queue>,
    /// Signalled when there is something new in the queue.
    changed: Condvar,
    metrics: Mutex<Metrics>,
    /// Tickets there are.
    unfinished: Arc<AtomicUsize>,
}

impl Shared {
    /// The queue. A panic elsewhere leaves it whole: nothing that runs under the lock can panic half-way.
    pub fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn metrics(&self) -> MutexGuard<'_, Metrics> {
        self.metrics.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One more request.
    pub fn ticket(&self) -> Ticket {
        self.unfinished.fetch_add(1, Ordering::Relaxed);
        Ticket(Arc::clone(&self.unfinished))
    }

    /// Requests that wait or run.
    pub fn n_unfinished(&self) -> usize {
        self.unfinished.load(Ordering::Relaxed)
    }

    /// Adds a request of `client` by `push`, where the queue takes requests and has room for one more: `n_queue` may wait,
    /// and as many more as the `n_parallel` places that are free will take.
    pub fn push(
        &self,
        (n_queue, n_parallel): (usize, usize),
        client: Client,
        push: impl FnOnce(&mut Queue),
    ) -> Result<(), SubmitError> {
        let mut queue = self.open_queue()?;
        let all = n_queue.saturating_add(n_parallel);
        if self.n_unfinished() >= all && !queue.has_room(client, n_queue) {
            return Err(SubmitError::QueueFull { n_queue });
        }
        push(&mut queue);
        drop(queue);
        self.changed.notify_one();
        Ok(())
    }

    /// Adds a command.
    pub fn push_slot_command(&self, command: SlotCommand) -> Result<(), SubmitError> {
        let mut queue = self.open_queue()?;
        queue.slot_commands.push_back(command);
        drop(queue);
        self.changed.notify_one();
        Ok(())
    }

    /// The queue, as long as it takes anything.
    fn open_queue(&self) -> Result<MutexGuard<'_, Queue>, SubmitError> {
        let queue = self.queue();
        if queue.failed {
            return Err(SubmitError::EngineFailed);
        }
        if queue.closing.is_some() {
            return Err(SubmitError::ShuttingDown);
        }
        Ok(queue)
    }

    /// Takes no more requests; cancels at `deadline` those that are not finished by then.
    pub fn close(&self, deadline: Instant) {
        let mut queue = self.queue();
        queue.closing = Some(queue.closing.map_or(deadline, |earlier| earlier.min(deadline)));
        drop(queue);
        self.changed.notify_one();
    }

    /// Says that somebody may be about to send a request.
    pub fn announce(&self) {
        self.queue().announced = true;
        self.changed.notify_one();
    }

    /// Sleeps until there is something in the queue or it closes: true; or until a request is announced: false.
    pub fn sleep(&self) -> bool {
        let idle = |queue: &mut Queue| queue.is_idle() && !queue.announced;
        let mut queue = self.changed.wait_while(self.queue(), idle).unwrap_or_else(PoisonError::into_inner);
        queue.announced = false;
        !queue.is_idle()
    }

    /// Takes nothing more, and tells all that wait: the engine is gone, because it `failed` or was told to go.
    pub fn end(&self, failed: bool) {
        let mut queue = self.queue();
        queue.closing = Some(Instant::now());
        queue.failed |= failed;
        let why = || if failed { RequestError::EngineFailed } else { RequestError::ShutDown };
        let mut n_failed = 0;
        for submission in queue.texts.drain() {
            n_failed += 1;
            let _ = submission.events.send(Event::Failed(why()));
        }
        for request in queue.embeddings.drain() {
            n_failed += 1;
            let _ = request.answer.send(Err(why()));
        }
        // Their callers get an error.
        queue.slot_commands.clear();
        drop(queue);
        self.metrics().requests.failed += n_failed;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue(waiting: &[(usize, usize)]) -> Queue {
        let mut queue = Queue::default();
        for &(key, n) in waiting {
            for _ in 0..n {
                let (answer, _) = oneshot::channel();
                let client = Client::Key(key);
                queue.embeddings.push(
                    client,
                    EmbeddingRequest { client, ids: vec![1], wanted: Wanted::Embedding, answer, ticket: None },
                );
            }
        }
        queue
    }

    #[test]
    fn one_client_alone_may_fill_the_queue_but_keeps_nobody_out() {
        let room = |waiting: &[(usize, usize)], key: usize| queue(waiting).has_room(Client::Key(key), 8);
        assert!(room(&[], 0) && room(&[(0, 7)], 0) && !room(&[(0, 8)], 0));
        assert!(room(&[(0, 8)], 1) && room(&[(0, 8), (1, 3)], 1) && !room(&[(0, 8), (1, 4)], 1));
        assert!(room(&[(0, 8), (1, 4)], 2) && !room(&[(0, 8), (1, 4)], 0));
        // However many clients there are, the queue has an end.
        let many: Vec<_> = (0..16).map(|key| (key, 1)).collect();
        assert!(!room(&many, 16));
    }
}
