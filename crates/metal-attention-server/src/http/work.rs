//! Limits the CPU work of requests (parsing, templates, tokenisation, grammars) on blocking threads, so that large
//! requests of one client do not delay other clients.
//!
//! Small work and large work have separate limits. Large work occupies units by its size; one client may occupy half of
//! them, so other clients' work starts while its own is queued.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::peer::Peer;
use super::pictures;
use super::{ApiError, task_outcome};

/// Maximum concurrent pieces of small work.
const SMALL_AT_ONCE: usize = 4;
/// Total units of large work.
const LARGE_UNITS: usize = 4;
/// Units of large work that one client may occupy.
const UNITS_OF_ONE: usize = 2;
/// Blocking threads that the limits can occupy: the runtime's pool should have at least as many.
pub const THREADS: usize = SMALL_AT_ONCE + LARGE_UNITS + pictures::ALL_AT_ONCE;

/// The size of a piece of work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WorkSize {
    /// A body of at most 64 KiB without schemas.
    Small,
    /// A larger body, or schemas: occupies this many units.
    Large(u32),
}

impl WorkSize {
    /// The size of decoding and dividing a picture, which may have millions of pixels.
    pub fn of_picture() -> Self {
        Self::Large(1)
    }

    /// The size for a body of `bytes` bytes whose schemas have `schema_values` values (see `limits::check`).
    pub fn new(bytes: usize, schema_values: usize) -> Self {
        match (bytes, schema_values) {
            // A format that is no schema has two values. Even a small schema can cause much work.
            (0..=0x1_0000, 0..=2) => Self::Small,
            (0..=0x10_0000, 0..=2048) => Self::Large(1),
            _ => Self::Large(UNITS_OF_ONE as u32),
        }
    }
}

/// The limits on concurrent work.
pub struct WorkLimiter {
    /// Permits of small work.
    small: Arc<Semaphore>,
    /// Units of large work.
    large: Arc<Semaphore>,
    /// Units of large work by client, of clients that have some.
    clients: Arc<Mutex<HashMap<Peer, Arc<Semaphore>>>>,
}

impl Default for WorkLimiter {
    fn default() -> Self {
        Self {
            small: Arc::new(Semaphore::new(SMALL_AT_ONCE)),
            large: Arc::new(Semaphore::new(LARGE_UNITS)),
            clients: Arc::default(),
        }
    }
}

impl WorkLimiter {
    /// Runs `work` for `peer` on a blocking thread, once a permit of its size is free.
    pub async fn run<T: Send + 'static>(
        &self,
        peer: Peer,
        work_size: WorkSize,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let permit = self.acquire(peer, work_size).await;
        // The work runs to its end even if the client disconnects, and keeps its permit until then.
        let work = move || {
            let _permit = permit;
            work()
        };
        task_outcome(tokio::task::spawn_blocking(work).await)
    }

    /// Waits for a permit: for large work first for the client's units, so that a waiting client occupies none of the
    /// server's.
    async fn acquire(&self, peer: Peer, work_size: WorkSize) -> WorkPermit {
        // The semaphores are never closed, so `ok` loses no error.
        match work_size {
            WorkSize::Small => {
                WorkPermit { _total_units: Arc::clone(&self.small).acquire_owned().await.ok(), _client_units: None }
            }
            WorkSize::Large(units) => {
                let client_units = self.client(peer).acquire(units).await;
                let total_units = Arc::clone(&self.large).acquire_many_owned(units).await.ok();
                WorkPermit { _total_units: total_units, _client_units: Some(client_units) }
            }
        }
    }

    fn client(&self, peer: Peer) -> ClientUnits {
        let mut clients = self.clients.lock().unwrap_or_else(PoisonError::into_inner);
        let units = clients.entry(peer).or_insert_with(|| Arc::new(Semaphore::new(UNITS_OF_ONE)));
        ClientUnits { peer, units: Arc::clone(units), permit: None, clients: Arc::clone(&self.clients) }
    }
}

/// The permit to run a piece of work.
struct WorkPermit {
    /// Units of the server: a permit of small work, or units of large work.
    _total_units: Option<OwnedSemaphorePermit>,
    /// Units of the client's share; `None` for small work.
    _client_units: Option<ClientUnits>,
}

/// A client's units of large work. The client's entry in `clients` is removed with its last piece of work.
struct ClientUnits {
    /// The client.
    peer: Peer,
    /// The client's share.
    units: Arc<Semaphore>,
    /// The acquired units; `None` before.
    permit: Option<OwnedSemaphorePermit>,
    /// The shares of all clients.
    clients: Arc<Mutex<HashMap<Peer, Arc<Semaphore>>>>,
}

impl ClientUnits {
    async fn acquire(mut self, units: u32) -> Self {
        self.permit = Arc::clone(&self.units).acquire_many_owned(units).await.ok();
        self
    }
}

impl Drop for ClientUnits {
    fn drop(&mut self) {
        let mut clients = self.clients.lock().unwrap_or_else(PoisonError::into_inner);
        // The permit holds a reference to the semaphore, too.
        self.permit = None;
        if Arc::strong_count(&self.units) == 2 {
            clients.remove(&self.peer);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    fn peer(n: u8) -> Peer {
        Peer::at([10, 0, 0, n].into())
    }

    /// Starts large work of one client that runs until a message is sent; returns the sender and what signals its
    /// start.
    fn block(
        work: &Arc<WorkLimiter>,
        peer: Peer,
        work_size: WorkSize,
    ) -> (tokio::task::JoinHandle<()>, Sender<()>, Receiver<()>) {
        let (end, ended) = channel::<()>();
        let (begin, begun) = channel();
        let work = Arc::clone(work);
        let blocked = move || {
            let _ = begin.send(());
            let _ = ended.recv();
            Ok(())
        };
        (tokio::spawn(async move { work.run(peer, work_size, blocked).await.unwrap() }), end, begun)
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn large_work_of_one_client_does_not_delay_another() {
        let work = Arc::new(WorkLimiter::default());
        let many: Vec<_> = (0..40).map(|i| block(&work, peer(1), WorkSize::Large(1 + i % 2))).collect();
        let run = async |peer, work_size| work.run(peer, work_size, || Ok(7)).await.unwrap();
        assert_eq!(run(peer(2), WorkSize::Large(2)).await, 7);
        assert_eq!(run(peer(1), WorkSize::Small).await, 7);
        let begun = || many.iter().filter(|(.., begun)| begun.try_recv().is_ok()).count();
        assert!(begun() <= UNITS_OF_ONE, "of what one client wants little runs at once");
        for (_, end, _) in &many {
            let _ = end.send(());
        }
        for (task, ..) in many {
            task.await.unwrap();
        }
        // A response arrives shortly before the thread has released its permit.
        let start = std::time::Instant::now();
        while !work.clients.lock().unwrap().is_empty() {
            assert!(start.elapsed().as_secs() < 10, "nothing is kept of clients that have no work");
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
    }

    #[test]
    fn larger_bodies_are_larger_work() {
        assert_eq!(WorkSize::new(1000, 0), WorkSize::Small);
        assert_eq!(WorkSize::new(100_000, 0), WorkSize::Large(1));
        assert_eq!(WorkSize::new(1000, 2), WorkSize::Small);
        assert_eq!(WorkSize::new(1000, 3), WorkSize::Large(1));
        assert_eq!(WorkSize::new(1000, 10_000), WorkSize::Large(2));
        assert_eq!(WorkSize::new(8 << 20, 0), WorkSize::Large(2));
    }
}
