//! The sequences of the forward pass: which of them run, and which keep a finished text for a prompt that begins like it.

use std::cmp::Reverse;

use super::Client;
use crate::prefix_store::n_common;

/// A prompt's beginning, found in the KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct CachedPrefix {
    /// The sequence that holds it.
    pub seq: usize,
    /// Its tokens.
    pub n_tokens: usize,
}

/// What a sequence is in use for.
#[derive(Debug, Clone, PartialEq, Eq)]
enum SequenceUse {
    Empty,
    /// Keeps the tokens of a finished text of this client, last used at this time.
    Idle(Client, Vec<u32>, u64),
    Busy,
}

/// All sequences.
#[derive(Debug)]
pub(super) struct SequencePool {
    /// That of each sequence.
    of_seq: Vec<SequenceUse>,
    /// Of each sequence: when its use began.
    since: Vec<u64>,
    /// Counts uses.
    now: u64,
}

impl SequencePool {
    pub fn new(n_seq: usize) -> Self {
        Self { of_seq: vec![SequenceUse::Empty; n_seq], since: vec![0; n_seq], now: 0 }
    }

    /// A sequence that holds nothing.
    pub fn empty(&self) -> Option<usize> {
        self.of_seq.iter().position(|slot| *slot == SequenceUse::Empty)
    }

    /// The idle sequence that was used least recently, `except` left out.
    pub fn oldest_idle(&self, except: Option<usize>) -> Option<usize> {
        let idle = self.of_seq.iter().enumerate().filter_map(|(seq, slot)| match slot {
            SequenceUse::Idle(_, _, last_used) if Some(seq) != except => Some((*last_used, seq)),
            _ => None,
        });
        idle.min().map(|(_, seq)| seq)
    }

    /// The idle sequences, that of the text that ended last first.
    pub fn idle_by_end(&self) -> Vec<usize> {
        let mut idle: Vec<_> = self.all_idle().map(|(seq, _)| seq).collect();
        idle.sort_unstable_by_key(|&seq| Reverse(self.since[seq]));
        idle
    }

    /// The tokens of an idle sequence; `None` where it is none.
    pub fn idle(&self, seq: usize) -> Option<&[u32]> {
        match &self.of_seq[seq] {
            SequenceUse::Idle(_, ids, _) => Some(ids),
            _ => None,
        }
    }

    /// Whose text an idle sequence keeps; `None` where it is none.
    pub fn owner(&self, seq: usize) -> Option<Client> {
        match &self.of_seq[seq] {
            SequenceUse::Idle(client, ..) => Some(*client),
            SequenceUse::Empty | SequenceUse::Busy => None,
        }
    }

    /// The idle sequences and their tokens.
    pub fn all_idle(&self) -> impl Iterator<Item = (usize, &[u32])> {
        (0..self.of_seq.len()).filter_map(|seq| Some((seq, self.idle(seq)?)))
    }

    /// Notes that a sequence runs.
    pub fn occupy(&mut self, seq: usize) {
        self.set(seq, SequenceUse::Busy);
    }

    /// Notes that a sequence was of use.
    pub fn touch(&mut self, seq: usize) {
        self.now += 1;
        if let SequenceUse::Idle(_, _, last_used) = &mut self.of_seq[seq] {
            *last_used = self.now;
        }
    }

    /// Notes that a sequence keeps `ids`, a text of `client`, and nobody uses it.
    pub fn keep(&mut self, seq: usize, client: Client, ids: Vec<u32>) {
        let slot = if ids.is_empty() { SequenceUse::Empty } else { SequenceUse::Idle(client, ids, self.now + 1) };
        self.set(seq, slot);
    }

    /// Notes that a sequence was emptied.
    pub fn clear(&mut self, seq: usize) {
        self.set(seq, SequenceUse::Empty);
    }

    fn set(&mut self, seq: usize, slot: SequenceUse) {
        self.now += 1;
        self.since[seq] = self.now;
        self.of_seq[seq] = slot;
    }

    /// A number for what a sequence is in use for: while it stays the same, so does the text, however it grows.
    pub fn use_number(&self, seq: usize) -> u64 {
        self.since[seq]
    }
}

/// The sequence of which most can be used for `ids`, given sequences and their tokens, and how much of a beginning of each
/// is `reachable`; `None` where nothing can. Of equals it is the last.
pub(super) fn longest_prefix<'a>(
    ids: &[u32],
    known: impl Iterator<Item = (usize, &'a [u32])>,
    reachable: impl Fn(usize, usize) -> usize,
) -> Option<CachedPrefix> {
    let prefixes = known.map(|(seq, tokens)| CachedPrefix { seq, n_tokens: reachable(seq, n_common(ids, tokens)) });
    prefixes.filter(|prefix| prefix.n_tokens > 0).max_by_key(|prefix| prefix.n_tokens)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finished_texts_are_found_by_their_beginning_and_forgotten_by_age() {
        let mut slots = SequencePool::new(4);
        assert_eq!((slots.empty(), slots.oldest_idle(None)), (Some(0), None));
        slots.occupy(0);
        slots.keep(1, Client::Unknown, vec![1, 2, 3]);
        slots.keep(2, Client::Unknown, vec![1, 2, 4, 5]);
        slots.keep(3, Client::Unknown, vec![]);
        assert_eq!(slots.empty(), Some(3));
        let longest = |ids: &[u32]| longest_prefix(ids, slots.all_idle(), |_, n| n);
        assert_eq!(longest(&[1, 2, 4, 6]), Some(CachedPrefix { seq: 2, n_tokens: 3 }));
        assert_eq!(longest(&[2]), None);
        let lost = |seq: usize, n: usize| if seq == 2 { 0 } else { n };
        assert_eq!(longest_prefix(&[1, 2, 4, 6], slots.all_idle(), lost), Some(CachedPrefix { seq: 1, n_tokens: 2 }));
        assert_eq!(slots.oldest_idle(None), Some(1));
        slots.touch(1);
        assert_eq!((slots.oldest_idle(None), slots.oldest_idle(Some(2))), (Some(2), Some(1)));
        assert_eq!(slots.idle_by_end(), [2, 1]);
        slots.clear(2);
        assert_eq!((slots.idle(2), slots.idle(1)), (None, Some(&[1, 2, 3][..])));
    }
}
