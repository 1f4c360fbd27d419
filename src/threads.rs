//! Distributes work over threads.

use std::panic::resume_unwind;
use std::thread::{Builder, ScopedJoinHandle, scope};

/// The result of one item, or the thread that computes it.
enum ItemResult<'s, R> {
    /// A thread computes it.
    Started(ScopedJoinHandle<'s, R>),
    /// The calling thread has computed it.
    Done(R),
}

/// `work` applied to each of `items`; the results are in the order of the items. Each item has its own thread; if the system
/// refuses one, the calling thread does the work. A panic of `work` is passed on.
pub fn map_on_threads<T: Copy + Send, R: Send>(
    items: impl IntoIterator<Item = T>,
    work: impl Fn(T) -> R + Sync,
) -> Vec<R> {
    scope(|scope| {
        let work = &work;
        let start = |item| match Builder::new().spawn_scoped(scope, move || work(item)) {
            Ok(thread) => ItemResult::Started(thread),
            Err(_) => ItemResult::Done(work(item)),
        };
        let parts: Vec<_> = items.into_iter().map(start).collect();
        let finish = |part| match part {
            ItemResult::Started(thread) => thread.join().unwrap_or_else(|panic| resume_unwind(panic)),
            ItemResult::Done(result) => result,
        };
        parts.into_iter().map(finish).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_in_order() {
        assert_eq!(map_on_threads(0..100, |n| n * n), (0..100).map(|n| n * n).collect::<Vec<_>>());
    }
}
