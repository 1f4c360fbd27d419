//! The pages of one group of layers.

use std::collections::BTreeSet;

use crate::{CacheGroup, PAGE};

/// Which page of a group's layers holds which positions of which sequence.
#[derive(Debug, Clone)]
pub(super) struct PagePool {
    pub(super) group: CacheGroup,
    /// How many sequences hold each page that was handed out so far.
    pub(super) counts: Vec<u32>,
    /// Pages that were given back. The lowest is the next to be handed out, so that the pages of a sequence that is alone
    /// in the cache lie one after the other, however often it was cut.
    pub(super) free: BTreeSet<u32>,
    pub(super) lists: Vec<PageList>,
}

/// The pages of a sequence.
#[derive(Debug, Clone, Default)]
pub(super) struct PageList {
    /// Position `p` is in page `p / PAGE`. Those beyond the sequence's length are reserved.
    pub(super) pages: Vec<u32>,
    /// How many of the first were given back: no token to come sees them. Their numbers stand for nothing.
    pub(super) n_dropped: usize,
}

impl PagePool {
    pub(super) fn new(group: CacheGroup, n_seq: usize) -> Self {
        let group = CacheGroup { n_pages: group.n_pages.min(u32::MAX as usize), ..group };
        Self { group, counts: Vec::new(), free: BTreeSet::new(), lists: vec![PageList::default(); n_seq] }
    }

    pub(super) fn pages(&self, seq: usize) -> &[u32] {
        &self.lists[seq].pages
    }

    pub(super) fn n_free(&self) -> usize {
        self.group.n_pages - self.counts.len() + self.free.len()
    }

    /// How many sequences hold the page in which position `pos` of sequence `seq` lies.
    pub(super) fn holders(&self, seq: usize, pos: usize) -> u32 {
        self.counts[self.lists[seq].pages[pos / PAGE] as usize]
    }

    /// The longest beginning of a sequence that has given up its first `n_dropped` pages, `n` tokens at most, that could go on:
    /// what tokens after it see is there.
    pub(super) fn reachable(&self, n_dropped: usize, n: usize) -> usize {
        let first_seen = |pos: usize| self.group.mask.seen(pos, pos + 1).start;
        if first_seen(n) >= n_dropped * PAGE {
            return n;
        }
        // Where a chunk begins, and a page, what was before is seen no more.
        (0..=n / PAGE).map(|page| page * PAGE).rfind(|&start| first_seen(start) == start).unwrap_or(0)
    }

    /// Pages that have to be free for sequences of `n_past` tokens to grow by `new` each.
    pub(super) fn pages_needed(&self, n_past: &[usize], new: &[usize]) -> usize {
        let (mut taken, mut freed) = (0, 0);
        // Shared pages that a sequence gives up, for a copy or because its window moves on: the last to do so frees them.
        let mut given_up: Vec<u32> = Vec::new();
        for (seq, (&n_past, &n)) in n_past.iter().zip(new).enumerate().filter(|(_, (_, n))| **n > 0) {
            let PageList { pages, n_dropped } = &self.lists[seq];
            let more = (n_past + n).div_ceil(PAGE).saturating_sub(pages.len());
            taken += more;
            let mut others = &pages[*n_dropped..];
            let n_moved = (others.len() + more).saturating_sub(self.group.max_pages_per_sequence);
            if !n_past.is_multiple_of(PAGE) {
                // A copy, or itself where no one else holds it.
                taken += 1;
                freed += self.give_up(pages[n_past / PAGE], &mut given_up);
                others = &others[..n_past / PAGE - n_dropped];
            }
            for &page in &others[..n_moved.min(others.len())] {
                freed += self.give_up(page, &mut given_up);
            }
            // Those that were its own by then.
            freed += n_moved.saturating_sub(others.len());
        }
        taken - freed
    }

    /// Pages that come free when another sequence gives `page` up; `given_up`: the shared ones that were given up so far.
    fn give_up(&self, page: u32, given_up: &mut Vec<u32>) -> usize {
        let holders = self.counts[page as usize] as usize;
        if holders == 1 {
            return 1;
        }
        given_up.push(page);
        usize::from(given_up.iter().filter(|&&other| other == page).count() == holders)
    }

    /// Gives sequence `seq` pages for `n` positions; there are enough. Where it has as many as a sequence may have, the
    /// first ones go.
    pub(super) fn grow(&mut self, seq: usize, n: usize) {
        while self.lists[seq].pages.len() * PAGE < n {
            let list = &mut self.lists[seq];
            if list.pages.len() - list.n_dropped == self.group.max_pages_per_sequence {
                list.n_dropped += 1;
                let dropped = list.pages[list.n_dropped - 1];
                self.put_back(dropped);
            }
            let page = self.take();
            self.lists[seq].pages.push(page);
        }
    }

    /// Puts a page of its own in the place of the shared one that holds position `pos` of sequence `seq`. Returns both.
    pub(super) fn replace(&mut self, seq: usize, pos: usize) -> (u32, u32) {
        let to = self.take();
        let from = std::mem::replace(&mut self.lists[seq].pages[pos / PAGE], to);
        self.put_back(from);
        (from, to)
    }

    /// Takes all but the first `n` pages away from sequence `seq`.
    pub(super) fn cut(&mut self, seq: usize, n: usize) {
        let list = &mut self.lists[seq];
        let cut = list.pages.split_off(n.max(list.n_dropped).min(list.pages.len()));
        list.pages.truncate(n);
        list.n_dropped = list.n_dropped.min(n);
        for page in cut {
            self.put_back(page);
        }
    }

    /// Gives sequence `to`, which holds nothing, the first `n` pages of sequence `from`.
    pub(super) fn share(&mut self, from: usize, to: usize, n: usize) {
        let PageList { pages, n_dropped } = &self.lists[from];
        let shared = PageList { pages: pages[..n].to_vec(), n_dropped: (*n_dropped).min(n) };
        for &page in &shared.pages[shared.n_dropped..] {
            self.counts[page as usize] += 1;
        }
        self.lists[to] = shared;
    }

    /// How many pages of a sequence of `n` tokens that gave up its first `n_dropped` there is to keep: no more than a sequence may
    /// have. `None` where a token to come sees what was given up.
    pub(super) fn n_kept(&self, n: usize, n_dropped: usize) -> Option<usize> {
        let kept = n.div_ceil(PAGE).checked_sub(n_dropped)?;
        let is_seen = self.group.mask.seen(n, n + 1).start < n_dropped * PAGE;
        (!is_seen).then(|| kept.min(self.group.max_pages_per_sequence))
    }

    /// Gives sequence `seq`, which holds nothing, the last `n_kept` of the pages of `n` tokens; there are enough.
    pub(super) fn allocate(&mut self, seq: usize, n: usize, n_kept: usize) {
        let n_dropped = n.div_ceil(PAGE) - n_kept;
        let mut pages = vec![0; n_dropped];
        pages.extend((0..n_kept).map(|_| self.take()));
        self.lists[seq] = PageList { pages, n_dropped };
    }

    /// A page that nobody holds.
    fn take(&mut self) -> u32 {
        if let Some(page) = self.free.pop_first() {
            self.counts[page as usize] = 1;
            return page;
        }
        assert!(self.counts.len() < self.group.n_pages, "a page for every sequence that was promised one");
        self.counts.push(1);
        (self.counts.len() - 1) as u32
    }

    /// A sequence holds `page` no more.
    fn put_back(&mut self, page: u32) {
        self.counts[page as usize] -= 1;
        if self.counts[page as usize] == 0 {
            self.free.insert(page);
        }
    }
}
