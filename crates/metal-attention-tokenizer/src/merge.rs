//! Merging of adjacent symbols in order of rank: the inner loop of byte-pair encoding (`bpe.rs`) and of SentencePiece
//! (`spm.rs`).

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// The number of a symbol that is not in the vocabulary.
pub(crate) const NO_SYMBOL: u32 = u32::MAX;
/// The index of a missing neighbour.
const NONE: u32 = u32::MAX;

/// A part of a word. At first a symbol is a byte or a character; merges make it longer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Symbol {
    /// The number of the symbol: a token id, a number above those, or [`NO_SYMBOL`].
    pub id: u32,
    /// The byte offset in the word.
    pub start: u32,
    /// The length in bytes; 0 after it was merged into the symbol to its left.
    pub len: u32,
    prev: u32,
    next: u32,
}

/// The merge of two adjacent symbols.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Merge {
    /// The rank. The lowest rank is merged first; among equal ranks the leftmost pair.
    pub rank: u32,
    /// The number of the merged symbol.
    pub id: u32,
}

/// A merge that can be made in the word, ordered by rank, then by position.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct MergeCandidate {
    rank: u32,
    left: u32,
    right: u32,
    id: u32,
    len: u32,
}

/// The symbols of one word and the queue of possible merges. Reused from word to word.
#[derive(Default)]
pub(crate) struct Merger {
    symbols: Vec<Symbol>,
    queue: BinaryHeap<Reverse<MergeCandidate>>,
}

impl Merger {
    /// Removes the symbols of the last word.
    pub(crate) fn clear(&mut self) {
        self.symbols.clear();
        self.queue.clear();
    }

    /// Appends a symbol of `len` bytes to the word.
    pub(crate) fn push(&mut self, id: u32, len: usize) {
        let index = self.symbols.len() as u32;
        let start = self.symbols.last().map_or(0, |s| s.start + s.len);
        if let Some(last) = self.symbols.last_mut() {
            last.next = index;
        }
        let prev = if index == 0 { NONE } else { index - 1 };
        self.symbols.push(Symbol { id, start, len: len as u32, prev, next: NONE });
    }

    /// Merges pairs until `find` returns no merge for any two neighbours. Takes O(n log n) steps for n symbols.
    pub(crate) fn merge(&mut self, find: impl Fn(&Symbol, &Symbol) -> Option<Merge>) {
        let pairs = 1..self.symbols.len() as u32;
        let seeds = pairs.filter_map(|right| self.candidate(right - 1, right, &find)).map(Reverse);
        let seeds: Vec<_> = seeds.collect();
        self.queue.extend(seeds);
        while let Some(Reverse(best)) = self.queue.pop() {
            let (left, right) = (self.symbols[best.left as usize], self.symbols[best.right as usize]);
            let outdated = left.len == 0 || right.len == 0 || left.len + right.len != best.len;
            if outdated {
                continue;
            }
            let merged = &mut self.symbols[best.left as usize];
            merged.id = best.id;
            merged.len = best.len;
            merged.next = right.next;
            self.symbols[best.right as usize].len = 0;
            if right.next != NONE {
                self.symbols[right.next as usize].prev = best.left;
                self.queue.extend(self.candidate(best.left, right.next, &find).map(Reverse));
            }
            if left.prev != NONE {
                self.queue.extend(self.candidate(left.prev, best.left, &find).map(Reverse));
            }
        }
    }

    fn candidate(
        &self,
        left: u32,
        right: u32,
        find: &impl Fn(&Symbol, &Symbol) -> Option<Merge>,
    ) -> Option<MergeCandidate> {
        #[cfg(test)]
        crate::steps::count();
        let (l, r) = (&self.symbols[left as usize], &self.symbols[right as usize]);
        let Merge { rank, id } = find(l, r)?;
        Some(MergeCandidate { rank, left, right, id, len: l.len + r.len })
    }

    /// The symbols that remain, in order.
    pub(crate) fn symbols(&self) -> impl Iterator<Item = &Symbol> {
        self.symbols.iter().filter(|s| s.len > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Merges a word of symbols in which two equal symbols n merge into n + 1, smaller n first. Returns number and
    /// length of each symbol.
    fn merged(word: &[u32]) -> Vec<(u32, u32)> {
        let mut merger = Merger::default();
        for &id in word {
            merger.push(id, 1);
        }
        merger.merge(|l, r| (l.id == r.id).then_some(Merge { rank: l.id, id: l.id + 1 }));
        merger.symbols().map(|s| (s.id, s.len)).collect()
    }

    #[test]
    fn the_lowest_rank_and_then_the_leftmost_pair_is_merged_first() {
        assert_eq!(merged(&[0, 0, 0]), [(1, 2), (0, 1)]);
        assert_eq!(merged(&[1, 0, 0, 1]), [(2, 3), (1, 1)]);
        assert_eq!(merged(&[0; 8]), [(3, 8)]);
        assert_eq!(merged(&[]), []);
        assert_eq!(merged(&[5]), [(5, 1)]);
    }

    #[test]
    fn a_long_run_takes_no_quadratic_time() {
        assert_eq!(merged(&vec![0; 1 << 18]), [(18, 1 << 18)]);
    }
}
