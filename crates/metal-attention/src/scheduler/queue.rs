//! The queue between the callers' threads and the engine's thread: waiting requests, the shutdown flag and the metrics.

use std::collections::{BTreeSet, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::SpanKey;
use crate::prompt::PrefixKey;
use crate::sampling::Sampler;
use tokio::sync::{mpsc, oneshot};

use super::client_queues::ClientQueues;
use super::slot_commands::SlotCommand;
use super::{Client, Event, Metrics, Request, RequestError, SubmitError};

/// Counts a request as unfinished from its submission until its last event: dropping the ticket ends that.
#[derive(Debug)]
pub(super) struct Ticket(Arc<AtomicUsize>);

impl Drop for Ticket {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A generation request that was checked and is to be queued, or is queued.
pub(super) struct Submission {
    /// The request; its sampling options have been moved to `sampler`.
    pub request: Request,
    /// The keys of the prompt's spans.
    pub span_keys: Vec<SpanKey>,
    /// The most tokens that the sequence can have, if its spans bound it.
    pub max_len: usize,
    /// Sampler of the request, with no token accepted yet.
    pub sampler: Sampler,
    /// Channel to the client.
    pub events: mpsc::UnboundedSender<Event>,
    /// Time of the submission.
    pub submitted: Instant,
    /// Set when it enters the queue.
    pub ticket: Option<Ticket>,
}

impl Submission {
    /// What the prompt is known by.
    pub fn key(&self) -> PrefixKey<'_> {
        PrefixKey { ids: &self.request.prompt, spans: &self.span_keys }
    }
}

/// A request for one vector of a whole sequence: its embedding, a reranker's scores, or logits.
pub(super) struct EmbeddingRequest {
    /// Owner of the request.
    pub client: Client,
    /// Token ids of the sequence; not empty.
    pub ids: Vec<u32>,
    /// The requested vector.
    pub output: RequestedOutput,
    /// Channel to the client: `[n_embd]` or the scores or `[n_rows, n_vocab]`, row-major.
    pub answer: oneshot::Sender<Result<Vec<f32>, RequestError>>,
    /// Set when it enters the queue.
    pub ticket: Option<Ticket>,
}

/// The vector that an [`EmbeddingRequest`] requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RequestedOutput {
    /// The embedding, or a reranker's scores.
    Embedding,
    /// The logits after each token from this position on.
    Logits(usize),
}

/// The waiting requests, by client.
#[derive(Default)]
pub(super) struct RequestQueue {
    /// Requests for generated tokens.
    pub generations: ClientQueues<Submission>,
    /// Requests for embeddings, scores or logits.
    pub embeddings: ClientQueues<EmbeddingRequest>,
    /// Commands for slots, in the order of arrival.
    pub slot_commands: VecDeque<SlotCommand>,
    /// If set, no requests are accepted any more, and unfinished ones are cancelled at this time.
    pub closing: Option<Instant>,
    /// A client may be about to send a request (see [`SharedQueue::announce`]).
    announced: bool,
    /// The engine's thread has panicked.
    failed: bool,
}

impl RequestQueue {
    /// Number of waiting requests; slot commands do not count.
    pub fn len(&self) -> usize {
        self.generations.len() + self.embeddings.len()
    }

    /// Whether the engine has nothing to take from the queue, and the queue is open.
    pub fn is_idle(&self) -> bool {
        self.len() == 0 && self.slot_commands.is_empty() && self.closing.is_none()
    }

    /// Whether one more request of `client` may wait when `n_queue` requests may. Beyond `n_queue` there is capacity
    /// for as many again, for clients that have less than an equal share of `n_queue` waiting: one client cannot keep
    /// the others out.
    fn has_capacity(&self, client: Client, n_queue: usize) -> bool {
        let n = self.len();
        if n < n_queue {
            return true;
        }
        let n_own = self.generations.n_waiting(client) + self.embeddings.n_waiting(client);
        let clients: BTreeSet<_> =
            self.generations.clients().chain(self.embeddings.clients()).chain([client]).collect();
        n < n_queue.saturating_mul(2) && n_own < n_queue / clients.len()
    }
}

/// The queue with its lock, the condition that wakes the engine, the metrics and the load.
#[derive(Default)]
pub(super) struct SharedQueue {
    /// The queue.
    queue: Mutex<RequestQueue>,
    /// Signalled when the queue has changed.
    changed: Condvar,
    /// The scheduler's metrics.
    metrics: Mutex<Metrics>,
    /// Number of live tickets.
    unfinished: Arc<AtomicUsize>,
}

impl SharedQueue {
    /// Locks the queue. A poisoned lock is used as it is: no code that runs under it can panic half-way through a
    /// change.
    pub fn queue(&self) -> MutexGuard<'_, RequestQueue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the metrics.
    pub fn metrics(&self) -> MutexGuard<'_, Metrics> {
        self.metrics.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A ticket for one more unfinished request.
    pub fn ticket(&self) -> Ticket {
        self.unfinished.fetch_add(1, Ordering::Relaxed);
        Ticket(Arc::clone(&self.unfinished))
    }

    /// Number of requests that wait or run.
    pub fn n_unfinished(&self) -> usize {
        self.unfinished.load(Ordering::Relaxed)
    }

    /// Adds a request of `client` by calling `push`, if the queue is open and has capacity: `n_queue` requests may
    /// wait, plus as many as the `n_parallel` slots that are free will take at once. `push` is not called on an error.
    pub fn push(
        &self,
        (n_queue, n_parallel): (usize, usize),
        client: Client,
        push: impl FnOnce(&mut RequestQueue),
    ) -> Result<(), SubmitError> {
        let mut queue = self.queue_with_capacity((n_queue, n_parallel), client)?;
        push(&mut queue);
        drop(queue);
        self.changed.notify_one();
        Ok(())
    }

    /// Fails where [`push`](Self::push) would now.
    pub fn check_capacity(&self, limits: (usize, usize), client: Client) -> Result<(), SubmitError> {
        self.queue_with_capacity(limits, client).map(drop)
    }

    /// Locks the queue if it accepts a request of `client`.
    fn queue_with_capacity(
        &self,
        (n_queue, n_parallel): (usize, usize),
        client: Client,
    ) -> Result<MutexGuard<'_, RequestQueue>, SubmitError> {
        let queue = self.open_queue()?;
        let all = n_queue.saturating_add(n_parallel);
        if self.n_unfinished() >= all && !queue.has_capacity(client, n_queue) {
            return Err(SubmitError::QueueFull { n_queue });
        }
        Ok(queue)
    }

    /// Adds a slot command. Commands do not count against the capacity.
    pub fn push_slot_command(&self, command: SlotCommand) -> Result<(), SubmitError> {
        let mut queue = self.open_queue()?;
        queue.slot_commands.push_back(command);
        drop(queue);
        self.changed.notify_one();
        Ok(())
    }

    /// Locks the queue if it accepts requests.
    fn open_queue(&self) -> Result<MutexGuard<'_, RequestQueue>, SubmitError> {
        let queue = self.queue();
        if queue.failed {
            return Err(SubmitError::EngineFailed);
        }
        if queue.closing.is_some() {
            return Err(SubmitError::ShuttingDown);
        }
        Ok(queue)
    }

    /// Closes the queue: unfinished requests are cancelled at `deadline`. A second call can only make the deadline
    /// earlier.
    pub fn close(&self, deadline: Instant) {
        let mut queue = self.queue();
        queue.closing = Some(queue.closing.map_or(deadline, |earlier| earlier.min(deadline)));
        drop(queue);
        self.changed.notify_one();
    }

    /// Wakes the engine because a client may be about to send a request.
    pub fn announce(&self) {
        self.queue().announced = true;
        self.changed.notify_one();
    }

    /// Blocks until there is work or the queue closes (true), or until a request is announced (false).
    pub fn sleep(&self) -> bool {
        let idle = |queue: &mut RequestQueue| queue.is_idle() && !queue.announced;
        let mut queue = self.changed.wait_while(self.queue(), idle).unwrap_or_else(PoisonError::into_inner);
        queue.announced = false;
        !queue.is_idle()
    }

    /// Closes the queue for good and fails all waiting requests: the engine panicked (`failed`) or was shut down.
    pub fn end(&self, failed: bool) {
        let mut queue = self.queue();
        queue.closing = Some(Instant::now());
        queue.failed |= failed;
        let why = || if failed { RequestError::EngineFailed } else { RequestError::ShutDown };
        let mut n_failed = 0;
        for submission in queue.generations.drain() {
            n_failed += 1;
            let _ = submission.events.send(Event::Failed(why()));
        }
        for request in queue.embeddings.drain() {
            n_failed += 1;
            let _ = request.answer.send(Err(why()));
        }
        // Dropping a command closes its channel, which its caller sees as an error.
        queue.slot_commands.clear();
        drop(queue);
        self.metrics().requests.failed += n_failed;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue(waiting: &[(usize, usize)]) -> RequestQueue {
        let mut queue = RequestQueue::default();
        for &(key, n) in waiting {
            for _ in 0..n {
                let (answer, _) = oneshot::channel();
                let client = Client::Key(key);
                queue.embeddings.push(
                    client,
                    EmbeddingRequest { client, ids: vec![1], output: RequestedOutput::Embedding, answer, ticket: None },
                );
            }
        }
        queue
    }

    #[test]
    fn one_client_may_fill_the_queue_but_does_not_keep_others_out() {
        let accepts = |waiting: &[(usize, usize)], key: usize| queue(waiting).has_capacity(Client::Key(key), 8);
        assert!(accepts(&[], 0) && accepts(&[(0, 7)], 0) && !accepts(&[(0, 8)], 0));
        assert!(accepts(&[(0, 8)], 1) && accepts(&[(0, 8), (1, 3)], 1) && !accepts(&[(0, 8), (1, 4)], 1));
        assert!(accepts(&[(0, 8), (1, 4)], 2) && !accepts(&[(0, 8), (1, 4)], 0));
        // The capacity is bounded for any number of clients.
        let many: Vec<_> = (0..16).map(|key| (key, 1)).collect();
        assert!(!accepts(&many, 16));
    }
}
