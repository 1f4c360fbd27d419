//! The pages of one cache group: which are free, how many sequences hold each, and the list of each sequence.

use std::collections::BTreeSet;

use crate::{CacheGroup, PAGE};

/// The pages of one cache group.
#[derive(Debug, Clone)]
pub(super) struct PagePool {
    /// The group.
    pub(super) group: CacheGroup,
    /// Holders of each page that was ever handed out.
    pub(super) counts: Vec<u32>,
    /// Pages that were released. The lowest is handed out next, so that the pages of a sequence that is alone in the
    /// cache are consecutive, however often it was cut.
    pub(super) free: BTreeSet<u32>,
    /// The pages of each sequence.
    pub(super) lists: Vec<PageList>,
}

/// The pages of one sequence.
#[derive(Debug, Clone, Default)]
pub(super) struct PageList {
    /// Position `p` is in `pages[p / PAGE]`. Pages after the sequence's length are reserved.
    pub(super) pages: Vec<u32>,
    /// Number of first pages that were dropped because no later token attends to them. Their entries are meaningless.
    pub(super) n_dropped: usize,
}

impl PagePool {
    /// A pool of free pages for `n_seq` sequences.
    pub(super) fn new(group: CacheGroup, n_seq: usize) -> Self {
        let group = CacheGroup { n_pages: group.n_pages.min(u32::MAX as usize), ..group };
        Self { group, counts: Vec::new(), free: BTreeSet::new(), lists: vec![PageList::default(); n_seq] }
    }

    /// The pages of sequence `seq`.
    pub(super) fn pages(&self, seq: usize) -> &[u32] {
        &self.lists[seq].pages
    }

    /// Number of free pages.
    pub(super) fn n_free(&self) -> usize {
        self.group.n_pages - self.counts.len() + self.free.len()
    }

    /// Number of sequences that hold the page with position `pos` of sequence `seq`.
    pub(super) fn holders(&self, seq: usize, pos: usize) -> u32 {
        self.counts[self.lists[seq].pages[pos / PAGE] as usize]
    }

    /// The longest prefix of at most `n` tokens from which a sequence without its first `n_dropped` pages can continue:
    /// everything that the next token attends to is there.
    pub(super) fn reachable(&self, n_dropped: usize, n: usize) -> usize {
        let first_seen = |pos: usize| self.group.mask.seen(pos, pos + 1).start;
        if first_seen(n) >= n_dropped * PAGE {
            return n;
        }
        // At a page where a chunk begins, the next token attends to nothing before.
        (0..=n / PAGE).map(|page| page * PAGE).rfind(|&start| first_seen(start) == start).unwrap_or(0)
    }

    /// Number of free pages needed for sequences of `n_past` tokens to grow by `new` tokens each.
    pub(super) fn pages_needed(&self, n_past: &[usize], new: &[usize]) -> usize {
        let (mut taken, mut freed) = (0, 0);
        // Shared pages that a sequence drops, for a copy or because its window moves on. The last holder to drop one
        // frees it.
        let mut given_up: Vec<u32> = Vec::new();
        for (seq, (&n_past, &n)) in n_past.iter().zip(new).enumerate().filter(|(_, (_, n))| **n > 0) {
            let PageList { pages, n_dropped } = &self.lists[seq];
            let more = (n_past + n).div_ceil(PAGE).saturating_sub(pages.len());
            taken += more;
            let mut others = &pages[*n_dropped..];
            let n_moved = (others.len() + more).saturating_sub(self.group.max_pages_per_sequence);
            if !n_past.is_multiple_of(PAGE) {
                // A copy, or the page itself if no other sequence holds it.
                taken += 1;
                freed += self.give_up(pages[n_past / PAGE], &mut given_up);
                others = &others[..n_past / PAGE - n_dropped];
            }
            for &page in &others[..n_moved.min(others.len())] {
                freed += self.give_up(page, &mut given_up);
            }
            // Pages that it took and dropped within this growth.
            freed += n_moved.saturating_sub(others.len());
        }
        taken - freed
    }

    /// Number of pages (0 or 1) that become free when another sequence drops `page`. `given_up`: the shared pages
    /// dropped so far.
    fn give_up(&self, page: u32, given_up: &mut Vec<u32>) -> usize {
        let holders = self.counts[page as usize] as usize;
        if holders == 1 {
            return 1;
        }
        given_up.push(page);
        usize::from(given_up.iter().filter(|&&other| other == page).count() == holders)
    }

    /// Gives sequence `seq` pages for `n` positions; there are enough. If it has its maximum of pages, it drops its
    /// first ones.
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

    /// Replaces the shared page with position `pos` of sequence `seq` by a new one. Returns the old and the new page.
    pub(super) fn replace(&mut self, seq: usize, pos: usize) -> (u32, u32) {
        let to = self.take();
        let from = std::mem::replace(&mut self.lists[seq].pages[pos / PAGE], to);
        self.put_back(from);
        (from, to)
    }

    /// Undoes [`replace`](Self::replace), which has returned `from` and `to`. Others hold `from` as before.
    pub(super) fn undo_replace(&mut self, from: u32, to: u32) {
        let pages = self.lists.iter_mut().flat_map(|list| &mut list.pages[list.n_dropped..]);
        for page in pages.filter(|page| **page == to) {
            *page = from;
            self.counts[from as usize] += 1;
        }
        self.put_back(to);
    }

    /// Releases all but the first `n` pages of sequence `seq`.
    pub(super) fn cut(&mut self, seq: usize, n: usize) {
        let list = &mut self.lists[seq];
        let cut = list.pages.split_off(n.max(list.n_dropped).min(list.pages.len()));
        list.pages.truncate(n);
        list.n_dropped = list.n_dropped.min(n);
        for page in cut {
            self.put_back(page);
        }
    }

    /// Shares the first `n` pages of sequence `from` with sequence `to`, which is empty.
    pub(super) fn share(&mut self, from: usize, to: usize, n: usize) {
        let PageList { pages, n_dropped } = &self.lists[from];
        let shared = PageList { pages: pages[..n].to_vec(), n_dropped: (*n_dropped).min(n) };
        for &page in &shared.pages[shared.n_dropped..] {
            self.counts[page as usize] += 1;
        }
        self.lists[to] = shared;
    }

    /// Number of pages to keep of a saved sequence of `n` tokens without its first `n_dropped` pages: at most a
    /// sequence's maximum. `None` if the next token would attend to a dropped page.
    pub(super) fn n_kept(&self, n: usize, n_dropped: usize) -> Option<usize> {
        let kept = n.div_ceil(PAGE).checked_sub(n_dropped)?;
        let is_seen = self.group.mask.seen(n, n + 1).start < n_dropped * PAGE;
        (!is_seen).then(|| kept.min(self.group.max_pages_per_sequence))
    }

    /// Gives sequence `seq`, which is empty, `n_kept` pages for the last of `n` tokens; there are enough.
    pub(super) fn allocate(&mut self, seq: usize, n: usize, n_kept: usize) {
        let n_dropped = n.div_ceil(PAGE) - n_kept;
        let mut pages = vec![0; n_dropped];
        pages.extend((0..n_kept).map(|_| self.take()));
        self.lists[seq] = PageList { pages, n_dropped };
    }

    /// Takes a free page.
    fn take(&mut self) -> u32 {
        if let Some(page) = self.free.pop_first() {
            self.counts[page as usize] = 1;
            return page;
        }
        assert!(self.counts.len() < self.group.n_pages, "a page for every sequence that was promised one");
        self.counts.push(1);
        (self.counts.len() - 1) as u32
    }

    /// Removes one holder of `page`.
    fn put_back(&mut self, page: u32) {
        self.counts[page as usize] -= 1;
        if self.counts[page as usize] == 0 {
            self.free.insert(page);
        }
    }
}
