//! The use of each cache sequence: empty, busy, or idle with the tokens of an ended or preempted sequence.

use std::cmp::Reverse;

use super::Client;
use crate::SequenceKey;
use crate::prompt::PrefixKey;

/// A prefix of a prompt that a cache sequence holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct CachedPrefix {
    /// Index of the cache sequence.
    pub seq: usize,
    /// Tokens of the prefix.
    pub n_tokens: usize,
}

/// The use of one cache sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
enum SequenceUse {
    /// It holds no tokens.
    Empty,
    /// It keeps tokens for later prompts: the client they are of, their key, and the time of the last use (in counted
    /// uses).
    Idle(Client, SequenceKey, u64),
    /// A running sequence or an embedding uses it.
    Busy,
}

/// The uses of all cache sequences.
#[derive(Debug)]
pub(super) struct SequencePool {
    /// The use of each cache sequence, by index.
    uses: Vec<SequenceUse>,
    /// The value of `now` when the present use of each cache sequence began.
    use_began: Vec<u64>,
    /// Counts changes of use, in place of a clock.
    now: u64,
}

impl SequencePool {
    /// A pool of `n_seq` empty cache sequences.
    pub fn new(n_seq: usize) -> Self {
        Self { uses: vec![SequenceUse::Empty; n_seq], use_began: vec![0; n_seq], now: 0 }
    }

    /// The first empty cache sequence.
    pub fn empty(&self) -> Option<usize> {
        self.uses.iter().position(|slot| *slot == SequenceUse::Empty)
    }

    /// The idle cache sequence that was used least recently, except `except`.
    pub fn least_recently_used_idle(&self, except: Option<usize>) -> Option<usize> {
        let idle = self.uses.iter().enumerate().filter_map(|(seq, slot)| match slot {
            SequenceUse::Idle(_, _, last_used) if Some(seq) != except => Some((*last_used, seq)),
            _ => None,
        });
        idle.min().map(|(_, seq)| seq)
    }

    /// The idle cache sequences, the one that ended last first.
    pub fn idle_by_end(&self) -> Vec<usize> {
        let mut idle: Vec<_> = self.all_idle().map(|(seq, _)| seq).collect();
        idle.sort_unstable_by_key(|&seq| Reverse(self.use_began[seq]));
        idle
    }

    /// The key of a cache sequence's tokens; `None` if it is not idle.
    pub fn idle(&self, seq: usize) -> Option<PrefixKey<'_>> {
        match &self.uses[seq] {
            SequenceUse::Idle(_, key, _) => Some(key.as_prefix()),
            _ => None,
        }
    }

    /// The client whose tokens a cache sequence keeps; `None` if it is not idle.
    pub fn owner(&self, seq: usize) -> Option<Client> {
        match &self.uses[seq] {
            SequenceUse::Idle(client, ..) => Some(*client),
            SequenceUse::Empty | SequenceUse::Busy => None,
        }
    }

    /// The idle cache sequences with the keys of their tokens.
    pub fn all_idle(&self) -> impl Iterator<Item = (usize, PrefixKey<'_>)> {
        (0..self.uses.len()).filter_map(|seq| Some((seq, self.idle(seq)?)))
    }

    /// Marks a cache sequence as busy.
    pub fn occupy(&mut self, seq: usize) {
        self.set(seq, SequenceUse::Busy);
    }

    /// Marks an idle cache sequence as used just now.
    pub fn touch(&mut self, seq: usize) {
        self.now += 1;
        if let SequenceUse::Idle(_, _, last_used) = &mut self.uses[seq] {
            *last_used = self.now;
        }
    }

    /// Makes a cache sequence idle with tokens of `client`, known by `key`; empty if there are none.
    pub fn keep(&mut self, seq: usize, client: Client, key: SequenceKey) {
        let slot = if key.ids.is_empty() { SequenceUse::Empty } else { SequenceUse::Idle(client, key, self.now + 1) };
        self.set(seq, slot);
    }

    /// Marks a cache sequence as empty.
    pub fn clear(&mut self, seq: usize) {
        self.set(seq, SequenceUse::Empty);
    }

    /// Starts a new use of a cache sequence.
    fn set(&mut self, seq: usize, slot: SequenceUse) {
        self.now += 1;
        self.use_began[seq] = self.now;
        self.uses[seq] = slot;
    }

    /// A number that changes with each use. While it stays the same, the tokens can only grow or be cut back.
    pub fn use_number(&self, seq: usize) -> u64 {
        self.use_began[seq]
    }
}

/// The longest usable prefix of `key` among `known` cache sequences and their keys. `reachable(seq, n)` returns how
/// many of the first `n` tokens a cache sequence can be cut back to. `None` if nothing is usable; the last of equals.
pub(super) fn longest_prefix<'a>(
    key: PrefixKey<'_>,
    known: impl Iterator<Item = (usize, PrefixKey<'a>)>,
    reachable: impl Fn(usize, usize) -> usize,
) -> Option<CachedPrefix> {
    let prefixes = known.map(|(seq, of_seq)| {
        let n_tokens = key.reachable(key.n_common(of_seq), |n| reachable(seq, n));
        CachedPrefix { seq, n_tokens }
    });
    prefixes.filter(|prefix| prefix.n_tokens > 0).max_by_key(|prefix| prefix.n_tokens)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_sequences_are_found_by_prefix_and_evicted_by_age() {
        let mut slots = SequencePool::new(4);
        assert_eq!((slots.empty(), slots.least_recently_used_idle(None)), (Some(0), None));
        slots.occupy(0);
        slots.keep(1, Client::Unknown, vec![1, 2, 3].into());
        slots.keep(2, Client::Unknown, vec![1, 2, 4, 5].into());
        slots.keep(3, Client::Unknown, vec![].into());
        assert_eq!(slots.empty(), Some(3));
        let longest = |ids: &[u32]| longest_prefix(PrefixKey { ids, spans: &[] }, slots.all_idle(), |_, n| n);
        assert_eq!(longest(&[1, 2, 4, 6]), Some(CachedPrefix { seq: 2, n_tokens: 3 }));
        assert_eq!(longest(&[2]), None);
        let lost = |seq: usize, n: usize| if seq == 2 { 0 } else { n };
        let key = PrefixKey { ids: &[1, 2, 4, 6], spans: &[] };
        assert_eq!(longest_prefix(key, slots.all_idle(), lost), Some(CachedPrefix { seq: 1, n_tokens: 2 }));
        assert_eq!(slots.least_recently_used_idle(None), Some(1));
        slots.touch(1);
        assert_eq!((slots.least_recently_used_idle(None), slots.least_recently_used_idle(Some(2))), (Some(2), Some(1)));
        assert_eq!(slots.idle_by_end(), [2, 1]);
        slots.clear(2);
        assert_eq!((slots.idle(2), slots.idle(1).map(|key| key.ids)), (None, Some(&[1, 2, 3][..])));
    }
}
