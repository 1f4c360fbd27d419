//! Ids of requests and responses.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// Returns an id that no other request or response has: `prefix` and 24 hexadecimal digits.
pub fn unique(prefix: &str) -> String {
    static PROCESS: LazyLock<u64> = LazyLock::new(|| RandomState::new().hash_one(std::process::id()));
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let n = NEXT.fetch_add(1, Ordering::Relaxed);
    format!("{prefix}{:016x}{n:08x}", *PROCESS)
}

/// Returns an id that other clients cannot guess from those that they know: `prefix` and 32 hexadecimal digits.
pub fn unguessable(prefix: &str) -> String {
    // SipHash with a key from the system's random numbers.
    static KEYED: LazyLock<RandomState> = LazyLock::new(RandomState::new);
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let n = NEXT.fetch_add(1, Ordering::Relaxed);
    format!("{prefix}{:016x}{:016x}", KEYED.hash_one((n, 0)), KEYED.hash_one((n, 1)))
}

#[cfg(test)]
mod tests {
    #[test]
    fn ids_are_unique() {
        let (a, b) = (super::unique("x-"), super::unique("x-"));
        assert_ne!(a, b);
        assert_eq!(a.len(), 26);
        let (a, b) = (super::unguessable("x-"), super::unguessable("x-"));
        assert_eq!(a.len(), 34);
        assert!(a.bytes().zip(b.bytes()).filter(|(a, b)| a != b).count() > 10, "{a} {b}");
    }
}
