//! Greedy decoding that does not wait for the caller: the token that a device chose feeds its next step, and is read while
//! that step already runs. What a step in flight is, and how it is submitted and read, is the backend's affair.

use std::collections::VecDeque;
use std::ops::Range;

use crate::{BatchToken, PageTable, Phase};

/// Steps in flight while tokens are read one by one.
const DEPTH: usize = 3;

/// Greedy steps that were submitted and not read yet, each on the tokens that the one before it chose. `S` is what the
/// choice of a step is read from.
#[derive(Debug)]
pub struct Lookahead<S> {
    /// The steps, oldest first.
    in_flight: VecDeque<S>,
    /// The batch that the oldest step in flight evaluates, or, when there is none, the batch that would continue what
    /// was read last.
    next: Vec<BatchToken>,
}

impl<S> Default for Lookahead<S> {
    fn default() -> Self {
        Self { in_flight: VecDeque::new(), next: Vec::new() }
    }
}

impl<S> Lookahead<S> {
    /// Whether `batch` is what greedy decoding would evaluate next. Where it is not, the steps in flight are to be
    /// [forgotten](Self::forget) before it gets its pages.
    pub fn continues(&self, batch: &[BatchToken]) -> bool {
        !batch.is_empty() && self.next == batch
    }

    /// How many tokens after `batch` the steps are that are to be [pushed](Self::push) next, with their pages reserved; `None`
    /// where there are enough in flight, or no pages for more. The first one is `batch` itself. Others follow where `batch`
    /// [continues](Self::continues) what was read: a caller that gives back what it was given will do so again. Up to
    /// `at_once` of them are submitted together, behind as many that run.
    pub fn steps_to_submit(&self, batch: &[BatchToken], pages: &mut PageTable, at_once: usize) -> Option<Range<usize>> {
        let ahead = self.in_flight.len();
        if ahead == 0 {
            return Some(0..1);
        }
        if !self.continues(batch) || ahead >= DEPTH.max(at_once + 1) {
            return None;
        }
        let n = (ahead..ahead + at_once).take_while(|&ahead| pages.reserve(batch, ahead)).count();
        (n > 0).then_some(ahead..ahead + n)
    }

    /// Notes a step that was submitted.
    pub fn push(&mut self, step: S) {
        self.in_flight.push_back(step);
    }

    /// The oldest step in flight, to be read.
    pub fn pop(&mut self) -> Option<S> {
        self.in_flight.pop_front()
    }

    /// Notes that `batch` gave `ids`.
    pub fn advance(&mut self, batch: &[BatchToken], ids: &[u32]) {
        self.next.clear();
        self.next.extend(batch.iter().zip(ids).map(|(t, &id)| BatchToken { id, pos: t.pos + 1, ..*t }));
    }

    /// Whether the steps in flight, or those to come, go on with sequence `seq`.
    pub fn continues_sequence(&self, seq: usize) -> bool {
        self.next.iter().any(|token| token.seq == seq)
    }

    /// Forgets every step in flight, because the text goes on otherwise, and gives the pages back that they reserved. What
    /// they would have been read from is returned.
    pub fn forget(&mut self, pages: &mut PageTable) -> impl Iterator<Item = S> {
        self.next.clear();
        pages.release();
        self.in_flight.drain(..)
    }
}

/// Whether steps after `batch` can be queued: one token of each sequence, each with its choice wanted.
pub fn is_decode(batch: &[BatchToken]) -> bool {
    batch.iter().all(|t| t.logits) && Phase::of(batch) == Phase::Decode
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CacheGroups, Capacity, PAGE};

    fn token(id: u32, pos: usize) -> BatchToken {
        BatchToken { id, seq: 0, pos, logits: true }
    }

    /// Two pages for `n_seq` sequences.
    fn two_pages(n_seq: usize) -> PageTable {
        let room = Capacity {
            n_ctx: 2 * PAGE,
            n_seq,
            n_cache: Some(2 * PAGE),
            n_windows: None,
            state_cache: 0,
            n_ubatch: PAGE,
        };
        PageTable::new(&CacheGroups::of_masks(room, std::iter::empty()))
    }

    fn append(pages: &mut PageTable, batch: &[BatchToken]) {
        pages.check(batch, 100).unwrap();
        assert_eq!(pages.append(batch), []);
    }

    /// Submits what is wanted for `batch`, which gets its pages first, and reads its step.
    fn step(ahead: &mut Lookahead<usize>, pages: &mut PageTable, batch: &[BatchToken], at_once: usize) -> Vec<usize> {
        append(pages, batch);
        let mut submitted = Vec::new();
        while let Some(steps) = ahead.steps_to_submit(batch, pages, at_once) {
            for n in steps {
                ahead.push(batch[0].pos + n);
                submitted.push(n);
            }
        }
        assert_eq!(ahead.pop(), Some(batch[0].pos), "the oldest is that of the batch");
        submitted
    }

    #[test]
    fn steps_are_queued_once_a_token_came_back() {
        let (mut ahead, mut pages) = (Lookahead::default(), two_pages(1));
        assert!(!ahead.continues(&[token(1, 0)]) && !ahead.continues(&[]));
        assert_eq!(step(&mut ahead, &mut pages, &[token(1, 0)], 1), [0]);
        ahead.advance(&[token(1, 0)], &[7]);
        assert!(ahead.continues(&[token(7, 1)]) && !ahead.continues(&[token(8, 1)]));
        assert_eq!(step(&mut ahead, &mut pages, &[token(7, 1)], 1), [0, 1, 2]);
        ahead.advance(&[token(7, 1)], &[9]);
        assert_eq!(step(&mut ahead, &mut pages, &[token(9, 2)], 1), [2], "two are in flight already");
        assert!(ahead.continues_sequence(0) && !ahead.continues_sequence(1));
        assert_eq!(ahead.forget(&mut pages).collect::<Vec<_>>(), [3, 4]);
        assert!(!ahead.continues_sequence(0));
    }

    #[test]
    fn steps_stop_where_there_are_no_pages_and_give_theirs_back() {
        let (mut ahead, mut pages) = (Lookahead::default(), two_pages(2));
        let text: Vec<_> = (0..PAGE - 2).map(|pos| token(1, pos)).collect();
        append(&mut pages, &text);
        ahead.advance(&text[PAGE - 3..], &[2]);
        // The third step needs another page.
        assert_eq!(step(&mut ahead, &mut pages, &[token(2, PAGE - 2)], 1), [0, 1, 2]);
        assert_eq!(pages.pages(0, 0).len(), 2);
        assert_eq!(ahead.forget(&mut pages).count(), 2);
        assert_eq!(pages.pages(0, 0).len(), 1);
        // Now somebody else has it.
        append(&mut pages, &[BatchToken { seq: 1, ..token(1, 0) }]);
        ahead.advance(&[token(2, PAGE - 2)], &[3]);
        assert_eq!(step(&mut ahead, &mut pages, &[token(3, PAGE - 1)], 1), [0]);
    }

    #[test]
    fn some_steps_are_submitted_together_as_far_as_there_are_pages() {
        let (mut ahead, mut pages) = (Lookahead::default(), two_pages(1));
        assert_eq!(step(&mut ahead, &mut pages, &[token(1, 0)], 4), [0]);
        ahead.advance(&[token(1, 0)], &[7]);
        assert_eq!(step(&mut ahead, &mut pages, &[token(7, 1)], 4), [0, 1, 2, 3, 4]);
        ahead.advance(&[token(7, 1)], &[7]);
        assert_eq!(step(&mut ahead, &mut pages, &[token(7, 2)], 4), [4, 5, 6, 7], "while as many run");
        ahead.advance(&[token(7, 2)], &[7]);
        assert_eq!(step(&mut ahead, &mut pages, &[token(7, 3)], 4), []);
        assert_eq!(ahead.forget(&mut pages).collect::<Vec<_>>(), [4, 5, 6, 7, 8, 9]);
        let text: Vec<_> = (4..2 * PAGE - 3).map(|pos| token(1, pos)).collect();
        append(&mut pages, &text);
        ahead.advance(&text[text.len() - 1..], &[2]);
        assert_eq!(step(&mut ahead, &mut pages, &[token(2, 2 * PAGE - 3)], 4), [0, 1, 2], "the pages end");
    }

    #[test]
    fn only_decoding_is_queued() {
        assert!(is_decode(&[token(1, 0), BatchToken { seq: 1, ..token(1, 5) }]));
        assert!(!is_decode(&[token(1, 0), token(1, 1)]), "a prompt");
        assert!(!is_decode(&[BatchToken { logits: false, ..token(1, 0) }]));
    }
}
