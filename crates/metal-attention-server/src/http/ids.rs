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

#[cfg(test)]
mod tests {
    #[test]
    fn ids_are_unique() {
        let (a, b) = (super::unique("x-"), super::unique("x-"));
        assert_ne!(a, b);
        assert_eq!(a.len(), 26);
    }
}
