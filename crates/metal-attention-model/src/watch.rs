//! A handle to watch and cancel long work from another thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Shared between a thread that does long work and those that wait for it: reports progress, and cancels the work.
/// Clones share one state.
///
/// Setting up a model and evaluating a batch check it often, also within a layer. After a cancellation they end within
/// moments with an error, such as [`ForwardError::Cancelled`](crate::ForwardError::Cancelled), and everything is as
/// before.
#[derive(Debug, Clone, Default)]
pub struct Watch(Arc<WatchState>);

/// The shared state.
#[derive(Debug, Default)]
struct WatchState {
    /// Whether work is cancelled.
    cancelled: CacheLine<AtomicBool>,
    /// Work done so far.
    done: CacheLine<AtomicU64>,
}

/// A value on its own cache line: threads poll one part while another is written.
#[derive(Debug, Default)]
#[repr(align(64))]
struct CacheLine<T>(T);

impl Watch {
    /// Cancels the present work and all that starts before [`resume`](Self::resume).
    pub fn cancel(&self) {
        self.0.cancelled.0.store(true, Ordering::Relaxed);
    }

    /// Allows work again.
    pub fn resume(&self) {
        self.0.cancelled.0.store(false, Ordering::Relaxed);
    }

    /// Whether work is cancelled.
    pub fn is_cancelled(&self) -> bool {
        self.0.cancelled.0.load(Ordering::Relaxed)
    }

    /// Work done so far, never decreasing: bytes of weights during set-up, tokens times layers in a batch, operations of
    /// products in a picture encoder on the CPU. Cancelled work counts as far as it got.
    pub fn done(&self) -> u64 {
        self.0.done.0.load(Ordering::Relaxed)
    }

    /// Adds to the work done; for the code that does it.
    pub fn advance(&self, work: u64) {
        self.0.done.0.fetch_add(work, Ordering::Relaxed);
    }
}

/// Clones of one watch are equal.
impl PartialEq for Watch {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Watch {}
