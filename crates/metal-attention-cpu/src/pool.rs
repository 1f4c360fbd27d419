//! A thread pool for parallel regions of a few microseconds.
//!
//! A *region* is one call of [`ThreadPool::for_each`]: all threads run the same body, which takes tasks until none are left.
//! A decode step runs more than a hundred regions, so entering one must cost well under a microsecond: workers spin for a short
//! while before they sleep. Between decode steps, and while the program waits for input, they sleep and use no CPU.
//!
//! Threads take tasks, they are not assigned any: a worker that comes late, because it slept or its core was busy, finds the
//! region closed, and the caller does not wait for it.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle, Thread};

use metal_attention_model::Watch;

use crate::turns::EncoderTurns;

/// Iterations of polling for a region before a worker sleeps: 20 to 100 microseconds.
const SPINS_BEFORE_SLEEP: u32 = 4_000;
/// Iterations before a worker sleeps again that was woken for a region and came too late.
const SPINS_AFTER_LATE_WAKE: u32 = 50;
/// Iterations before a thread that polls begins to yield its core to other threads.
const SPINS_BEFORE_YIELD: u32 = 1_000;
/// Iterations of a polling worker from one yield to the next.
const SPINS_PER_YIELD: u32 = 64;

/// A region's body, which is called once on every thread that enters the region.
type RegionBody<'a> = dyn Fn() + Sync + 'a;

/// Threads that run parallel regions; the caller's thread is one of them.
pub(crate) struct ThreadPool {
    shared: Arc<PoolState>,
    workers: Vec<JoinHandle<()>>,
    /// Locked during a region: there is one at a time.
    region: Mutex<()>,
    /// Cancels work from outside, and counts progress.
    watch: Watch,
    /// The turns of a picture encoder's pool, which pauses while steps run.
    turns: Option<EncoderTurns>,
    /// Set when tasks are skipped because of a cancellation; reset by [`begin`](Self::begin).
    cancelled: AtomicBool,
}

/// The state that workers and callers share.
struct PoolState {
    /// Bits 32..64: the number of the current or last region. Bit 31: [`OPEN`]. Bits 0..31: the number of workers inside.
    state: AtomicU64,
    /// The body of the current region. Workers inside may call it: the caller waits until they have left.
    body: Mutex<Option<&'static RegionBody<'static>>>,
    /// For each worker whether it sleeps or is about to.
    asleep: Vec<AtomicBool>,
    /// Set when the pool is dropped: workers end.
    stop: AtomicBool,
    /// The panic of a worker in the current region, which the caller resumes.
    panic: Mutex<Option<Box<dyn std::any::Any + Send>>>,
}

/// A counter on cache lines of its own, so that threads with different counters do not contend.
#[repr(align(128))]
struct PaddedCounter(AtomicUsize);

/// The bit of [`PoolState::state`] that lets workers enter the region.
const OPEN: u64 = 1 << 31;
/// The bits of [`PoolState::state`] that count the workers inside.
const INSIDE: u64 = OPEN - 1;

/// The number of the region in `state`.
fn region_of(state: u64) -> u32 {
    (state >> 32) as u32
}

impl ThreadPool {
    /// A pool of `n_threads` threads, the caller's included.
    ///
    /// # Errors
    ///
    /// When the system cannot start another thread.
    pub(crate) fn new(n_threads: usize) -> std::io::Result<Self> {
        let n_workers = n_threads.max(1) - 1;
        let shared = Arc::new(PoolState {
            state: AtomicU64::new(0),
            body: Mutex::new(None),
            asleep: (0..n_workers).map(|_| AtomicBool::new(false)).collect(),
            stop: AtomicBool::new(false),
            panic: Mutex::new(None),
        });
        let mut pool = Self {
            shared,
            workers: Vec::with_capacity(n_workers),
            region: Mutex::new(()),
            watch: Watch::default(),
            turns: None,
            cancelled: AtomicBool::new(false),
        };
        for i in 0..n_workers {
            let shared = Arc::clone(&pool.shared);
            let name = format!("metal-attention-{}", i + 1);
            pool.workers.push(thread::Builder::new().name(name).spawn(move || shared.work(i))?);
        }
        Ok(pool)
    }

    /// Returns the pool with `watch`, which cancels its work and counts it.
    pub(crate) fn watched(mut self, watch: Watch) -> Self {
        self.watch = watch;
        self
    }

    /// Returns the pool as that of a picture encoder: its threads pause between two tasks while a step of another pool runs.
    pub(crate) fn of_encoder(mut self) -> Self {
        self.turns = Some(EncoderTurns::new());
        self
    }

    /// The watch that cancels the work and counts it.
    pub(crate) fn watch(&self) -> &Watch {
        &self.watch
    }

    /// Resets the cancellation at the beginning of new work, such as a batch.
    pub(crate) fn begin(&self) {
        self.cancelled.store(false, Ordering::Relaxed);
    }

    /// Whether the work is cancelled, by the watch or by [`cancel`](Self::cancel). Once true it stays true until
    /// [`begin`](Self::begin), even if the watch is resumed: tasks may have been skipped.
    pub(crate) fn is_cancelled(&self) -> bool {
        if self.watch.is_cancelled() {
            self.cancel();
        }
        self.cancelled.load(Ordering::Relaxed)
    }

    /// Cancels the work: tasks that have not begun are skipped.
    pub(crate) fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    /// The number of threads, the caller's included.
    pub(crate) fn n_threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// The number of regions so far, except those that ran on the caller's thread alone. Wraps around.
    pub(crate) fn regions(&self) -> u32 {
        region_of(self.shared.state.load(Ordering::Relaxed))
    }

    /// Calls `task(i)` for every `i` in `0..n`, spread over the threads, and returns when all calls have returned. Tasks that
    /// have not begun when the work [is cancelled](Self::is_cancelled) are skipped. A panic in a task is resumed in the caller.
    pub(crate) fn for_each(&self, n: usize, task: &(dyn Fn(usize) + Sync)) {
        let task = |i| {
            if let Some(turns) = &self.turns {
                turns.pause(|| self.is_cancelled());
            }
            if !self.is_cancelled() {
                task(i);
            }
        };
        if self.workers.is_empty() || n <= 1 {
            (0..n).for_each(task);
            return;
        }
        // The tasks are divided into stretches, one for each thread, so that a thread reads memory sequentially. A thread that
        // has finished its stretch steals from the others. A thread takes several tasks at a time, a run, because the cache
        // line of a counter may have to travel between cores.
        let n_stretches = self.n_threads().min(n);
        let run = (n / (16 * n_stretches)).max(1);
        let start = |stretch: usize| stretch * n / n_stretches;
        let next: Vec<_> = (0..n_stretches).map(|stretch| PaddedCounter(AtomicUsize::new(start(stretch)))).collect();
        let n_entered = AtomicUsize::new(0);
        self.run(&|| {
            let first_stretch = n_entered.fetch_add(1, Ordering::Relaxed);
            for stretch in (first_stretch..first_stretch + n_stretches).map(|i| i % n_stretches) {
                let end = start(stretch + 1);
                loop {
                    let first = next[stretch].0.fetch_add(run, Ordering::Relaxed);
                    if first >= end {
                        break;
                    }
                    (first..end.min(first + run)).for_each(&task);
                }
            }
        });
    }

    /// [`for_each`](Self::for_each) where the tasks are `worth` waking other threads; otherwise calls them on this thread, even
    /// if the work is cancelled.
    pub(crate) fn for_each_if(&self, worth: bool, n: usize, task: &(dyn Fn(usize) + Sync)) {
        if worth { self.for_each(n, task) } else { (0..n).for_each(task) }
    }

    /// Runs `body` on this thread and on every worker that enters the region before this thread has finished its call; waits
    /// for these workers.
    fn run(&self, body: &RegionBody<'_>) {
        let one_at_a_time = lock(&self.region);
        let shared = &*self.shared;
        // SAFETY: only the lifetime changes. Workers use the reference while they are counted inside the region,
        // and this function does not return (or unwind) before the region is closed and empty.
        let body_static = unsafe { std::mem::transmute::<&RegionBody<'_>, &'static RegionBody<'static>>(body) };
        *lock(&shared.body) = Some(body_static);
        let region = region_of(shared.state.load(Ordering::Relaxed)).wrapping_add(1);
        // SeqCst pairs with the worker's store to `asleep` and its second load of `state`: either the worker sees the new
        // region, or this thread sees that it sleeps.
        shared.state.store(u64::from(region) << 32 | OPEN, Ordering::SeqCst);
        for (asleep, worker) in shared.asleep.iter().zip(&self.workers) {
            if asleep.load(Ordering::SeqCst) {
                worker.thread().unpark();
            }
        }
        let mine = catch_unwind(AssertUnwindSafe(body));
        let mut inside = shared.state.fetch_and(!OPEN, Ordering::AcqRel) & INSIDE;
        let mut spins = 0;
        while inside > 0 {
            spins += 1;
            if spins < SPINS_BEFORE_YIELD {
                std::hint::spin_loop();
            } else {
                thread::yield_now();
            }
            inside = shared.state.load(Ordering::Acquire) & INSIDE;
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
        let threads: Vec<Thread> = self.workers.iter().map(|w| w.thread().clone()).collect();
        threads.iter().for_each(Thread::unpark);
        for worker in self.workers.drain(..) {
            // A worker catches the panics of tasks, so joining returns no panic to resume.
            let _ = worker.join();
        }
    }
}

impl PoolState {
    /// The loop of worker `index`: runs the body of every region that it enters, until the pool stops.
    fn work(&self, index: usize) {
        let mut seen = 0;
        while let Some(region) = self.enter_next_region(index, seen) {
            seen = region;
            let body = *lock(&self.body);
            if let Some(body) = body
                && let Err(panic) = catch_unwind(AssertUnwindSafe(body))
            {
                *lock(&self.panic) = Some(panic);
            }
            self.state.fetch_sub(1, Ordering::Release);
        }
    }

    /// Waits for an open region other than `seen` and enters it; returns its number, or `None` when the pool stops.
    fn enter_next_region(&self, index: usize, seen: u32) -> Option<u32> {
        let mut spins = 0;
        loop {
            let state = self.state.load(Ordering::SeqCst);
            if state & OPEN != 0 && region_of(state) != seen {
                let entered = self.state.compare_exchange(state, state + 1, Ordering::AcqRel, Ordering::Relaxed);
                if entered.is_ok() {
                    self.asleep[index].store(false, Ordering::Relaxed);
                    return Some(region_of(state));
                }
                continue;
            }
            if self.stop.load(Ordering::SeqCst) {
                return None;
            }
            spins += 1;
            match spins {
                ..SPINS_BEFORE_SLEEP if spins > SPINS_BEFORE_YIELD && spins.is_multiple_of(SPINS_PER_YIELD) => {
                    thread::yield_now();
                }
                ..SPINS_BEFORE_SLEEP => std::hint::spin_loop(),
                // Loads the state once more before parking, so that no region opened before this store is missed.
                SPINS_BEFORE_SLEEP => self.asleep[index].store(true, Ordering::SeqCst),
                _ => {
                    thread::park();
                    self.asleep[index].store(false, Ordering::SeqCst);
                    spins = SPINS_BEFORE_SLEEP - SPINS_AFTER_LATE_WAKE;
                }
            }
        }
    }
}

/// Locks a mutex whose data is valid even if a thread panicked while it was locked.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
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
    fn cancelled_work_stops_between_two_tasks_and_stays_cancelled() {
        for n_threads in [1, 3] {
            let watch = Watch::default();
            let pool = ThreadPool::new(n_threads).expect("threads").watched(watch.clone());
            let begun = AtomicUsize::new(0);
            let task = |_| {
                if begun.fetch_add(1, Ordering::Relaxed) == 4 {
                    watch.cancel();
                }
            };
            pool.for_each(10_000, &task);
            // Every thread may be running a task when the fifth one cancels.
            assert!((5..5 + n_threads).contains(&begun.load(Ordering::Relaxed)), "{begun:?}");
            // Resuming the watch does not make up for the skipped tasks.
            watch.resume();
            assert!(pool.is_cancelled());
            pool.begin();
            assert!(!pool.is_cancelled());
            pool.for_each(10, &task);
            assert!(begun.into_inner() >= 15);
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
    fn many_short_regions() {
        let pool = ThreadPool::new(4).expect("threads");
        for round in 0..if cfg!(miri) { 50 } else { 20_000 } {
            let n = round % 9;
            let sum = AtomicUsize::new(0);
            pool.for_each(n, &|i| {
                sum.fetch_add(i + 1, Ordering::Relaxed);
            });
            assert_eq!(sum.into_inner(), n * (n + 1) / 2);
        }
    }

    #[test]
    fn a_panic_in_a_task_reaches_the_caller_and_the_pool_stays_usable() {
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
