//! Work that takes a moment: on threads that may block, shared out so that nobody's large requests hold up others.
//!
//! Small work has threads of its own. Large work takes units of a few by its size, and of these one client has half at
//! most: what others ask for begins while its next piece waits.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::peer::Peer;
use super::{ApiError, task_outcome};

/// Pieces of small work that run at once.
const SMALL_AT_ONCE: usize = 4;
/// Units of large work that run at once.
const LARGE_UNITS: usize = 4;
/// Units of large work of one client that run at once.
const UNITS_OF_ONE: usize = 2;
/// Threads that this takes, if it is to have its way.
pub const THREADS: usize = SMALL_AT_ONCE + LARGE_UNITS;

/// How much work a request makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WorkSize {
    /// Done at once.
    Small,
    /// So many units.
    Large(u32),
}

impl WorkSize {
    /// Of a request with a body of `bytes`, whose schemas have `schema_values` values.
    pub fn new(bytes: usize, schema_values: usize) -> Self {
        match (bytes, schema_values) {
            // A format that is no schema has two values. A small schema can make much work.
            (0..=0x1_0000, 0..=2) => Self::Small,
            (0..=0x10_0000, 0..=2048) => Self::Large(1),
            _ => Self::Large(UNITS_OF_ONE as u32),
        }
    }
}

/// Shares the threads out.
pub struct WorkLimiter {
    small: Arc<Semaphore>,
    large: Arc<Semaphore>,
    /// The units of clients that have large work.
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
    /// Runs `work` for `peer` where it holds up nobody, once it is its turn.
    pub async fn run<T: Send + 'static>(
        &self,
        peer: Peer,
        work_size: WorkSize,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let permit = self.acquire(peer, work_size).await;
        // Where the client goes away the work goes on to its end, and keeps its turn as long.
        let work = move || {
            let _permit = permit;
            work()
        };
        task_outcome(tokio::task::spawn_blocking(work).await)
    }

    async fn acquire(&self, peer: Peer, work_size: WorkSize) -> WorkPermit {
        // The semaphores are never closed.
        match work_size {
            WorkSize::Small => WorkPermit { _shared: Arc::clone(&self.small).acquire_owned().await.ok(), _own: None },
            WorkSize::Large(units) => {
                let own = self.client(peer).acquire(units).await;
                let shared = Arc::clone(&self.large).acquire_many_owned(units).await.ok();
                WorkPermit { _shared: shared, _own: Some(own) }
            }
        }
    }

    fn client(&self, peer: Peer) -> ClientUnits {
        let mut clients = self.clients.lock().unwrap_or_else(PoisonError::into_inner);
        let units = clients.entry(peer).or_insert_with(|| Arc::new(Semaphore::new(UNITS_OF_ONE)));
        ClientUnits { peer, units: Arc::clone(units), permit: None, clients: Arc::clone(&self.clients) }
    }
}

/// The right to run a piece of work.
struct WorkPermit {
    _shared: Option<OwnedSemaphorePermit>,
    _own: Option<ClientUnits>,
}

/// A client's share of the large work, which is forgotten with the client's last piece.
struct ClientUnits {
    peer: Peer,
    units: Arc<Semaphore>,
    permit: Option<OwnedSemaphorePermit>,
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
        // A permit holds its semaphore, too.
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

    /// Large work of one client that goes on until it is told to end, and how to tell it.
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
    async fn one_client_does_not_hold_up_another() {
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
        // Answers come a moment before the threads that made them are through.
        let start = std::time::Instant::now();
        while !work.clients.lock().unwrap().is_empty() {
            assert!(start.elapsed().as_secs() < 10, "nothing is kept of clients that have no work");
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
    }

    #[test]
    fn more_weighs_more() {
        assert_eq!(WorkSize::new(1000, 0), WorkSize::Small);
        assert_eq!(WorkSize::new(100_000, 0), WorkSize::Large(1));
        assert_eq!(WorkSize::new(1000, 2), WorkSize::Small);
        assert_eq!(WorkSize::new(1000, 3), WorkSize::Large(1));
        assert_eq!(WorkSize::new(1000, 10_000), WorkSize::Large(2));
        assert_eq!(WorkSize::new(8 << 20, 0), WorkSize::Large(2));
    }
}
