//! Lookahead: greedy decode steps that are submitted before the caller has the token of the step before.
//!
//! The device feeds the token that it chose into its next step, and the host reads the token while that step runs. This
//! file decides which steps to submit; how a step is submitted and read is the backend's.

use std::collections::VecDeque;
use std::ops::Range;

use crate::{BatchToken, PageTable, Phase};

/// Steps in flight while tokens are read one by one.
const DEPTH: usize = 3;

/// The greedy steps that were submitted and not read yet. Each evaluates the tokens that the one before it chose. `S`
/// is what a backend reads a step's tokens from.
#[derive(Debug)]
pub struct Lookahead<S> {
    /// The steps, oldest first.
    in_flight: VecDeque<S>,
    /// The batch of the oldest step in flight; if there is none, the batch that would continue what was read last.
    next: Vec<BatchToken>,
}

impl<S> Default for Lookahead<S> {
    fn default() -> Self {
        Self { in_flight: VecDeque::new(), next: Vec::new() }
    }
}

impl<S> Lookahead<S> {
    /// Whether `batch` is the one that greedy decoding evaluates next. If not, [`forget`](Self::forget) the steps in
    /// flight before the batch gets its pages.
    pub fn continues(&self, batch: &[BatchToken]) -> bool {
        !batch.is_empty() && self.next == batch
    }

    /// The numbers of the steps to submit and [`push`](Self::push) now, counted from `batch` as in
    /// [`Executor::submit`](crate::Executor::submit); their pages are reserved. `None` if enough are in flight, or there are no
    /// pages for more.
    ///
    /// Step 0 is `batch` itself. Others follow only if `batch` [continues](Self::continues) what was read: a caller
    /// that returned the chosen tokens once will do so again. Up to `at_once` steps are submitted together, behind as
    /// many that run.
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

    /// Adds a step that was submitted.
    pub fn push(&mut self, step: S) {
        self.in_flight.push_back(step);
    }

    /// Removes the oldest step in flight, to be read.
    pub fn pop(&mut self) -> Option<S> {
        self.in_flight.pop_front()
    }

    /// Records that `batch` gave the tokens `ids`.
    pub fn advance(&mut self, batch: &[BatchToken], ids: &[u32]) {
        self.next.clear();
        self.next.extend(batch.iter().zip(ids).map(|(t, &id)| BatchToken { id, pos: t.pos + 1, ..*t }));
    }

    /// Whether the steps in flight, or the expected next batch, contain sequence `seq`.
    pub fn continues_sequence(&self, seq: usize) -> bool {
        self.next.iter().any(|token| token.seq == seq)
    }

    /// Discards all steps in flight, because another batch follows, and releases their pages. Returns what they would
    /// have been read from.
    pub fn forget(&mut self, pages: &mut PageTable) -> impl Iterator<Item = S> {
        // Pages are reserved only for steps that continue `next`. Without lookahead there is nothing to release.
        if !self.next.is_empty() || !self.in_flight.is_empty() {
            self.next.clear();
            pages.release();
        }
        self.in_flight.drain(..)
    }
}

/// Whether `batch` is a decode step: one token of each sequence, all of them output tokens. Only then further steps can
/// follow it greedily.
pub fn is_decode_step(batch: &[BatchToken]) -> bool {
    batch.iter().all(|t| t.output) && Phase::of(batch) == Phase::Decode
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CacheGroups, Capacity, PAGE};

    fn token(id: u32, pos: usize) -> BatchToken {
        BatchToken { id, seq: 0, pos, output: true }
    }

    /// A page table of two pages for `n_seq` sequences.
    fn two_pages(n_seq: usize) -> PageTable {
        let capacity = Capacity {
            n_ctx: 2 * PAGE,
            n_seq,
            n_cache: Some(2 * PAGE),
            n_windows: None,
            state_cache: 0,
            n_ubatch: PAGE,
        };
        PageTable::new(&CacheGroups::of_masks(capacity, std::iter::empty()))
    }

    fn append(pages: &mut PageTable, batch: &[BatchToken]) {
        pages.check(batch, 100, &[]).unwrap();
        assert_eq!(pages.append(batch), []);
    }

    /// Appends `batch`, submits the steps for it, and reads its own. Returns the submitted steps.
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
        let tokens: Vec<_> = (0..PAGE - 2).map(|pos| token(1, pos)).collect();
        append(&mut pages, &tokens);
        ahead.advance(&tokens[PAGE - 3..], &[2]);
        // The third step needs another page.
        assert_eq!(step(&mut ahead, &mut pages, &[token(2, PAGE - 2)], 1), [0, 1, 2]);
        assert_eq!(pages.pages(0, 0).len(), 2);
        assert_eq!(ahead.forget(&mut pages).count(), 2);
        assert_eq!(pages.pages(0, 0).len(), 1);
        // Now another sequence has it.
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
        let tokens: Vec<_> = (4..2 * PAGE - 3).map(|pos| token(1, pos)).collect();
        append(&mut pages, &tokens);
        ahead.advance(&tokens[tokens.len() - 1..], &[2]);
        assert_eq!(step(&mut ahead, &mut pages, &[token(2, 2 * PAGE - 3)], 4), [0, 1, 2], "the pages end");
    }

    #[test]
    fn only_decoding_is_queued() {
        assert!(is_decode_step(&[token(1, 0), BatchToken { seq: 1, ..token(1, 5) }]));
        assert!(!is_decode_step(&[token(1, 0), token(1, 1)]), "a prompt");
        assert!(!is_decode_step(&[BatchToken { output: false, ..token(1, 0) }]));
    }
}
