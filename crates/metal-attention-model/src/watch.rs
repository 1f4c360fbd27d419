//! How far long work is, and how it is ended.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// What those who do long work share with those who wait for it: it tells how far the work is, and ends it from any
/// thread. Clones are one watch.
///
/// Setting a model up and evaluating a batch look at it all the time, also in the middle of a layer. Where it is
/// cancelled they end within moments with an error that says so, such as
/// [`ForwardError::Cancelled`](crate::ForwardError::Cancelled), and everything is as it was before.
#[derive(Debug, Clone, Default)]
pub struct Watch(Arc<WatchState>);

#[derive(Debug, Default)]
struct WatchState {
    cancelled: CacheLine<AtomicBool>,
    done: CacheLine<AtomicU64>,
}

/// On a cache line of its own: threads look at one part all the time while another is written to.
#[derive(Debug, Default)]
#[repr(align(64))]
struct CacheLine<T>(T);

impl Watch {
    /// Ends the work that is under way and all that begins before [`resume`](Self::resume).
    pub fn cancel(&self) {
        self.0.cancelled.0.store(true, Ordering::Relaxed);
    }

    /// Lets work begin again.
    pub fn resume(&self) {
        self.0.cancelled.0.store(false, Ordering::Relaxed);
    }

    /// Whether work is to end.
    pub fn is_cancelled(&self) -> bool {
        self.0.cancelled.0.load(Ordering::Relaxed)
    }

    /// Work that was done so far, ever growing: bytes of weights where a model is set up, tokens times layers where a
    /// batch is evaluated. Work that was cancelled counts as far as it came.
    pub fn done(&self) -> u64 {
        self.0.done.0.load(Ordering::Relaxed)
    }

    /// Counts work as done; for those who do it.
    pub fn advance(&self, work: u64) {
        self.0.done.0.fetch_add(work, Ordering::Relaxed);
    }
}

/// Equal are clones of each other.
impl PartialEq for Watch {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Watch {}
