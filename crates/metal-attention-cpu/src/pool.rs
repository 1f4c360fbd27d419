//! A thread pool for parallel regions of a few microseconds.
//!
//! A decode step runs more than a hundred regions, so entering one must cost
//! well under a microsecond: workers look for the next region for a short while
//! before they sleep. Between steps, and while the program waits for a person,
//! they are asleep and use no CPU.
//!
//! Work is taken, not given: a worker that is late, because it slept or the
//! system runs something else, finds the region closed and is not waited for.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle, Thread};

use metal_attention_model::Watch;

/// Looks at the state before a worker sleeps: 20 to 100 microseconds.
const SPINS_BEFORE_SLEEP: u32 = 4_000;
/// The same for a worker that was woken for a region and came too late.
const SPINS_AFTER_LATE_WAKE: u32 = 50;
/// Looks in vain before a thread lets others have its core in between.
const SPINS_BEFORE_YIELD: u32 = 1_000;
/// Looks at the state from one such offer to the next, where nothing but the next step is waited for.
const SPINS_PER_YIELD: u32 = 64;

/// A region's body: called once on every thread that comes in time.
type RegionBody<'a> = dyn Fn() + Sync + 'a;

/// Threads that run parallel regions; the caller's thread is one of them.
pub(crate) struct ThreadPool {
    shared: Arc<PoolState>,
    workers: Vec<JoinHandle<()>>,
    /// One region at a time.
    region: Mutex<()>,
    watch: Watch,
    /// Tasks were left out since [`begin`](Self::begin).
    cancelled: AtomicBool,
}

struct PoolState {
    /// Number of the region in the upper half, [`OPEN`], and below it the number
    /// of workers inside.
    state: AtomicU64,
    /// Body of the current region. Workers inside may use it: the caller waits for them.
    body: Mutex<Option<&'static RegionBody<'static>>>,
    /// Workers that sleep or are about to.
    asleep: Vec<AtomicBool>,
    stop: AtomicBool,
    panic: Mutex<Option<Box<dyn std::any::Any + Send>>>,
}

/// A counter on cache lines of its own.
#[repr(align(128))]
struct PaddedCounter(AtomicUsize);

/// The region takes workers in.
const OPEN: u64 = 1 << 31;
/// Workers inside.
const INSIDE: u64 = OPEN - 1;

/// Number of the region that `state` tells of.
fn region_of(state: u64) -> u32 {
    (state >> 32) as u32
}

impl ThreadPool {
    /// A pool of `n_threads` threads, the caller's included.
    ///
    /// # Errors
    ///
    /// When the system gives no more threads.
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
            cancelled: AtomicBool::new(false),
        };
        for i in 0..n_workers {
            let shared = Arc::clone(&pool.shared);
            let name = format!("metal-attention-{}", i + 1);
            pool.workers.push(thread::Builder::new().name(name).spawn(move || shared.work(i))?);
        }
        Ok(pool)
    }

    /// The same pool, whose work `watch` ends.
    pub(crate) fn watched(mut self, watch: Watch) -> Self {
        self.watch = watch;
        self
    }

    /// What ends the work, and counts it.
    pub(crate) fn watch(&self) -> &Watch {
        &self.watch
    }

    /// New work begins, which nobody has cancelled yet.
    pub(crate) fn begin(&self) {
        self.cancelled.store(false, Ordering::Relaxed);
    }

    /// Whether the work is to end. Stays so until [`begin`](Self::begin), also where the watch says otherwise by then: tasks
    /// may have been left out.
    pub(crate) fn is_cancelled(&self) -> bool {
        if self.watch.is_cancelled() {
            self.cancel();
        }
        self.cancelled.load(Ordering::Relaxed)
    }

    /// Ends the work.
    pub(crate) fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    /// Number of threads, the caller's included.
    pub(crate) fn n_threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Parallel regions that were entered so far; those of a single thread are none. Wraps around.
    pub(crate) fn regions(&self) -> u32 {
        region_of(self.shared.state.load(Ordering::Relaxed))
    }

    /// Calls `task(i)` for every `i` in `0..n`, spread over the threads; returns
    /// when all calls have. Those that were not begun when the work [is cancelled](Self::is_cancelled) are left out. A
    /// panic in a task is passed on.
    pub(crate) fn for_each(&self, n: usize, task: &(dyn Fn(usize) + Sync)) {
        let task = |i| {
            if !self.is_cancelled() {
                task(i);
            }
        };
        if self.workers.is_empty() || n <= 1 {
            (0..n).for_each(task);
            return;
        }
        // Each thread begins with a stretch of its own, so that it reads on where it has read: memory is slower at every new
        // place. Who is through goes on with what others have left. Tasks are handed out in runs: a counter's cache line
        // may travel between cores.
        let n_stretches = self.n_threads().min(n);
        let run = (n / (16 * n_stretches)).max(1);
        let start = |stretch: usize| stretch * n / n_stretches;
        let next: Vec<_> = (0..n_stretches).map(|stretch| PaddedCounter(AtomicUsize::new(start(stretch)))).collect();
        let n_come = AtomicUsize::new(0);
        self.run(&|| {
            let own = n_come.fetch_add(1, Ordering::Relaxed);
            for stretch in (own..own + n_stretches).map(|i| i % n_stretches) {
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

    /// [`for_each`](Self::for_each), on this thread alone where the tasks are not
    /// `worth` waking others for.
    pub(crate) fn for_each_if(&self, worth: bool, n: usize, task: &(dyn Fn(usize) + Sync)) {
        if worth { self.for_each(n, task) } else { (0..n).for_each(task) }
    }

    /// Runs `body` on this thread and on every worker that comes before this
    /// thread is through with it.
    fn run(&self, body: &RegionBody<'_>) {
        let one_at_a_time = lock(&self.region);
        let shared = &*self.shared;
        // SAFETY: only the lifetime changes. Workers use the reference while they are counted inside the region,
        // and this function does not return (or unwind) before the region is closed and empty.
        let body_static = unsafe { std::mem::transmute::<&RegionBody<'_>, &'static RegionBody<'static>>(body) };
        *lock(&shared.body) = Some(body_static);
        let region = region_of(shared.state.load(Ordering::Relaxed)).wrapping_add(1);
        // SeqCst pairs with the worker's store to `asleep` and second look at `state`: either it sees the new
        // region or this thread sees it asleep.
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
            // A worker catches its panics, so there is nothing to pass on.
            let _ = worker.join();
        }
    }
}

impl PoolState {
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

    /// Waits for an open region other than `seen` and enters it; `None` when
    /// the pool ends.
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
                // Once more around, so that a region opened before this store is not slept through.
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
    fn cancelled_work_ends_between_two_tasks_and_stays_cancelled() {
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
            // Each thread may be at a task of its own when the fifth cancels.
            assert!((5..5 + n_threads).contains(&begun.load(Ordering::Relaxed)), "{begun:?}");
            // Whoever lets work begin again does not make what was left out right.
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
