//! Work shared out among threads.

use std::panic::resume_unwind;
use std::thread::{Builder, ScopedJoinHandle, scope};

/// The result of one item.
enum Part<'s, R> {
    /// To come from a thread.
    Started(ScopedJoinHandle<'s, R>),
    /// Made on the calling thread.
    Done(R),
}

/// `work` applied to each of `items`, in order. Each item has a thread of its own; where the system gives no more threads,
/// the calling thread does the work. A panic of `work` is passed on.
pub fn map_on_threads<T: Copy + Send, R: Send>(
    items: impl IntoIterator<Item = T>,
    work: impl Fn(T) -> R + Sync,
) -> Vec<R> {
    scope(|scope| {
        let work = &work;
        let start = |item| match Builder::new().spawn_scoped(scope, move || work(item)) {
            Ok(thread) => Part::Started(thread),
            Err(_) => Part::Done(work(item)),
        };
        let parts: Vec<_> = items.into_iter().map(start).collect();
        let finish = |part| match part {
            Part::Started(thread) => thread.join().unwrap_or_else(|panic| resume_unwind(panic)),
            Part::Done(result) => result,
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
