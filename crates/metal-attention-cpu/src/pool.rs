//! A thread pool for parallel regions of a few microseconds.
//!
//! A decode step runs more than a hundred regions, so entering one must cost
//! well under a microsecond: workers look for the next region for a short while
//! before they sleep. Between steps, and while the program waits for a person,
//! they are asleep and use no CPU.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle, Thread};

/// Looks at the region counter before a worker sleeps: 20 to 100 microseconds.
const SPINS_BEFORE_SLEEP: u32 = 4_000;
/// Looks at a region's end before the caller starts to yield its time slice.
const SPINS_BEFORE_YIELD: u32 = 20_000;

/// A region's body: called once per thread.
type Body<'a> = dyn Fn() + Sync + 'a;

/// Threads that run parallel regions; the caller's thread is one of them.
pub(crate) struct ThreadPool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// One region at a time.
    region: Mutex<()>,
}

struct Shared {
    /// Number of regions so far; a change tells the workers that `body` is new.
    epoch: AtomicUsize,
    /// Body of the current region, valid until `running` is back at 0.
    body: Mutex<Option<&'static Body<'static>>>,
    /// Workers that have not finished the current region.
    running: AtomicUsize,
    /// Workers that sleep or are about to.
    asleep: Vec<AtomicBool>,
    stop: AtomicBool,
    panic: Mutex<Option<Box<dyn std::any::Any + Send>>>,
}

impl ThreadPool {
    /// A pool of `n_threads` threads, the caller's included.
    ///
    /// # Errors
    ///
    /// When the system gives no more threads.
    pub(crate) fn new(n_threads: usize) -> std::io::Result<Self> {
        let n_workers = n_threads.max(1) - 1;
        let shared = Arc::new(Shared {
            epoch: AtomicUsize::new(0),
            body: Mutex::new(None),
            running: AtomicUsize::new(0),
            asleep: (0..n_workers).map(|_| AtomicBool::new(false)).collect(),
            stop: AtomicBool::new(false),
            panic: Mutex::new(None),
        });
        let mut pool = Self { shared, workers: Vec::with_capacity(n_workers), region: Mutex::new(()) };
        for i in 0..n_workers {
            let shared = Arc::clone(&pool.shared);
            pool.workers
                .push(thread::Builder::new().name(format!("metal-attention-{}", i + 1)).spawn(move || shared.work(i))?);
        }
        Ok(pool)
    }

    /// Number of threads, the caller's included.
    pub(crate) fn n_threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `task(i)` for every `i` in `0..n`, spread over the threads; returns
    /// when all calls have. A panic in a task is passed on.
    pub(crate) fn for_each(&self, n: usize, task: &(dyn Fn(usize) + Sync)) {
        if self.workers.is_empty() || n <= 1 {
            (0..n).for_each(task);
            return;
        }
        // Tasks are handed out in runs: the counter's cache line travels between cores at every turn.
        let run = (n / (16 * self.n_threads())).max(1);
        let next = AtomicUsize::new(0);
        self.run(&|| {
            loop {
                let first = next.fetch_add(run, Ordering::Relaxed);
                if first >= n {
                    break;
                }
                (first..n.min(first + run)).for_each(task);
            }
        });
    }

    /// Runs `body` once on every thread.
    fn run(&self, body: &Body<'_>) {
        let one_at_a_time = self.region.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let shared = &*self.shared;
        // SAFETY: only the lifetime changes. The workers use the reference until they have counted `running`
        // down, and this function does not return (or unwind) before `running` is 0.
        let body_static = unsafe { std::mem::transmute::<&Body<'_>, &'static Body<'static>>(body) };
        *lock(&shared.body) = Some(body_static);
        shared.running.store(self.workers.len(), Ordering::Relaxed);
        // SeqCst pairs with the worker's store to `asleep` and second look at `epoch`: either it sees the new
        // epoch or this thread sees it asleep.
        shared.epoch.fetch_add(1, Ordering::SeqCst);
        for (asleep, worker) in shared.asleep.iter().zip(&self.workers) {
            if asleep.load(Ordering::SeqCst) {
                worker.thread().unpark();
            }
        }
        let mine = catch_unwind(AssertUnwindSafe(body));
        let mut spins = 0;
        while shared.running.load(Ordering::Acquire) > 0 {
            spins += 1;
            if spins < SPINS_BEFORE_YIELD { std::hint::spin_loop() } else { thread::yield_now() }
        }
        let theirs = lock(&shared.panic).take();
        drop(one_at_a_time);
        if let Err(panic) = mine {
            resume_unwind(panic);
        }
        if let Some(panic) = theirs {
            resume_unwind(panic);
        }
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.epoch.fetch_add(1, Ordering::SeqCst);
        let threads: Vec<Thread> = self.workers.iter().map(|w| w.thread().clone()).collect();
        threads.iter().for_each(Thread::unpark);
        for worker in self.workers.drain(..) {
            // A worker catches its panics, so there is nothing to pass on.
            let _ = worker.join();
        }
    }
}

impl Shared {
    fn work(&self, index: usize) {
        let mut seen = 0;
        loop {
            seen = self.wait_for_region(index, seen);
            if self.stop.load(Ordering::SeqCst) {
                return;
            }
            let body = *lock(&self.body);
            if let Some(body) = body
                && let Err(panic) = catch_unwind(AssertUnwindSafe(body))
            {
                *lock(&self.panic) = Some(panic);
            }
            self.running.fetch_sub(1, Ordering::Release);
        }
    }

    /// Waits until the epoch is no longer `seen`; returns it.
    fn wait_for_region(&self, index: usize, seen: usize) -> usize {
        for _ in 0..SPINS_BEFORE_SLEEP {
            let epoch = self.epoch.load(Ordering::Acquire);
            if epoch != seen {
                return epoch;
            }
            std::hint::spin_loop();
        }
        self.asleep[index].store(true, Ordering::SeqCst);
        loop {
            let epoch = self.epoch.load(Ordering::SeqCst);
            if epoch != seen {
                self.asleep[index].store(false, Ordering::SeqCst);
                return epoch;
            }
            thread::park();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once_whatever_the_counts() {
        for n_threads in [1, 2, 3, 5] {
            let pool = ThreadPool::new(n_threads).expect("threads");
            assert_eq!(pool.n_threads(), n_threads);
            for n in [0, 1, 2, 7, 1000] {
                let counts: Vec<_> = (0..n).map(|_| AtomicUsize::new(0)).collect();
                pool.for_each(n, &|i| {
                    counts[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn sleeping_workers_wake_up() {
        let pool = ThreadPool::new(3).expect("threads");
        for _ in 0..5 {
            let sum = AtomicUsize::new(0);
            pool.for_each(100, &|i| {
                sum.fetch_add(i, Ordering::Relaxed);
            });
            assert_eq!(sum.into_inner(), 4950);
            thread::sleep(std::time::Duration::from_millis(5));
        }
    }

    #[test]
    fn a_panic_in_a_task_reaches_the_caller_and_the_pool_lives_on() {
        let pool = ThreadPool::new(2).expect("threads");
        let result = catch_unwind(AssertUnwindSafe(|| {
            pool.for_each(8, &|i| assert_ne!(i, 5, "task five fails"));
        }));
        assert!(result.is_err());
        let sum = AtomicUsize::new(0);
        pool.for_each(4, &|i| {
            sum.fetch_add(i, Ordering::Relaxed);
        });
        assert_eq!(sum.into_inner(), 6);
    }
}
