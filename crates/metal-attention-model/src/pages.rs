//! The KV cache as pages of positions that sequences share: which page holds what.

use std::collections::BTreeSet;

use crate::{BatchToken, ForwardError, check_batch};

/// Positions of a page.
pub const PAGE: usize = 64;

/// Most sequences of a KV cache: each takes some memory, however empty it is.
pub const MAX_SEQUENCES: usize = 1 << 20;

/// How full a KV cache is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PageUse {
    /// Positions of a page.
    pub page_len: usize,
    /// Pages there are.
    pub total: usize,
    /// Pages that hold nothing, those reserved among them.
    pub free: usize,
}

/// A page to be copied to another before a batch is evaluated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageCopy {
    /// The page that is shared.
    pub from: u32,
    /// Its copy.
    pub to: u32,
}

/// Which page of a pool holds which positions of which sequence. Backends keep the keys and values themselves.
///
/// Sequences that begin alike share the pages of what they have in common; each page is counted. A page is written to
/// by one sequence only: where the last, partly filled page of a sequence is shared, it is copied before the sequence
/// grows.
#[derive(Debug, Clone)]
pub struct PageTable {
    n_pages: usize,
    /// Positions each sequence has room for.
    n_ctx: usize,
    /// How many sequences hold each page that was handed out so far.
    counts: Vec<u32>,
    /// Pages that were given back. The lowest is the next to be handed out, so that the pages of a sequence that is alone
    /// in the cache lie one after the other, however often it was cut.
    free: BTreeSet<u32>,
    /// Pages of each sequence: position `p` is in page `p / PAGE` of the list. Those beyond its length are reserved.
    pages: Vec<Vec<u32>>,
    /// Length of each sequence.
    n_past: Vec<usize>,
}

impl PageTable {
    /// `n_pages` free pages and `n_seq` empty sequences of at most `n_ctx` tokens.
    pub fn new(n_pages: usize, n_ctx: usize, n_seq: usize) -> Self {
        Self {
            n_pages: n_pages.min(u32::MAX as usize),
            n_ctx,
            counts: Vec::new(),
            free: BTreeSet::new(),
            pages: vec![Vec::new(); n_seq],
            n_past: vec![0; n_seq],
        }
    }

    /// Pages for `n_seq` sequences of `n_ctx` positions, or for `positions` where that is given. `None` on overflow.
    pub fn n_pages(positions: Option<usize>, n_ctx: usize, n_seq: usize) -> Option<usize> {
        match positions {
            Some(positions) => Some(positions.div_ceil(PAGE)),
            None => n_ctx.div_ceil(PAGE).checked_mul(n_seq),
        }
    }

    /// Number of sequences.
    pub fn n_seq(&self) -> usize {
        self.n_past.len()
    }

    /// Tokens of sequence `seq`; 0 where there is no such sequence.
    pub fn n_past(&self, seq: usize) -> usize {
        self.n_past.get(seq).copied().unwrap_or(0)
    }

    /// Pages of sequence `seq`, in order, and then those reserved for it.
    pub fn pages(&self, seq: usize) -> &[u32] {
        &self.pages[seq]
    }

    /// Whether the [`pages`](Self::pages) of sequence `seq` lie one after the other. Always so where the others are empty
    /// and were when it began.
    pub fn in_order(&self, seq: usize) -> bool {
        self.pages[seq].windows(2).all(|pair| pair[1] == pair[0] + 1)
    }

    /// The page of position `pos` of sequence `seq`, which holds it.
    pub fn page(&self, seq: usize, pos: usize) -> u32 {
        self.pages[seq][pos / PAGE]
    }

    /// How many pages there are, and how many are free.
    pub fn usage(&self) -> PageUse {
        let reserved = |seq: usize| self.pages[seq].len() - self.n_past[seq].div_ceil(PAGE);
        let free = self.n_free() + (0..self.n_seq()).map(reserved).sum::<usize>();
        PageUse { page_len: PAGE, total: self.n_pages, free }
    }

    fn n_free(&self) -> usize {
        self.n_pages - self.counts.len() + self.free.len()
    }

    /// Checks `batch` as [`check_batch`] does, finds pages for it, those reserved for its sequences first, and counts its
    /// tokens as part of their sequences. Returns the copies that have to be made first, in order. On an error nothing has
    /// changed.
    pub fn append(&mut self, batch: &[BatchToken], n_vocab: usize) -> Result<Vec<PageCopy>, ForwardError> {
        check_batch(batch, n_vocab, self.n_ctx, &self.n_past)?;
        let mut new = vec![0; self.n_seq()];
        for token in batch {
            new[token.seq] += 1;
        }
        let needed = self.pages_needed(&new);
        if needed > self.n_free() {
            return Err(ForwardError::OutOfPages { needed, free: self.n_free(), total: self.n_pages, page_len: PAGE });
        }
        let mut copies = Vec::new();
        for (seq, &n) in new.iter().enumerate().filter(|(_, n)| **n > 0) {
            if let Some(from) = self.partly_filled(seq).filter(|&page| self.counts[page as usize] > 1) {
                let to = self.take();
                self.counts[from as usize] -= 1;
                self.pages[seq][self.n_past[seq] / PAGE] = to;
                copies.push(PageCopy { from, to });
            }
            self.n_past[seq] += n;
            self.grow(seq, self.n_past[seq]);
        }
        Ok(copies)
    }

    /// Takes the tokens of a batch back that was appended last.
    pub fn retract(&mut self, batch: &[BatchToken]) {
        for token in batch {
            self.truncate(token.seq, token.pos);
        }
    }

    /// Finds pages for `n` more tokens of each sequence of `batch`, which are not counted yet; nobody else gets these pages
    /// until they are given back by [`release`](Self::release) or a cut. False, and nothing has changed, where there are not
    /// so many pages or positions, or the page to be written to first is shared.
    pub fn reserve(&mut self, batch: &[BatchToken], n: usize) -> bool {
        let mut needed = 0;
        for &BatchToken { seq, .. } in batch {
            let end = self.n_past[seq] + n;
            if end > self.n_ctx || self.partly_filled(seq).is_some_and(|page| self.counts[page as usize] > 1) {
                return false;
            }
            needed += end.div_ceil(PAGE).saturating_sub(self.pages[seq].len());
        }
        if needed > self.n_free() {
            return false;
        }
        for &BatchToken { seq, .. } in batch {
            self.grow(seq, self.n_past[seq] + n);
        }
        true
    }

    /// Gives back all pages that are reserved.
    pub fn release(&mut self) {
        for seq in 0..self.n_seq() {
            self.cut(seq, self.n_past[seq].div_ceil(PAGE));
        }
    }

    /// Pages that sequences need to grow by `new` tokens each, copies included.
    fn pages_needed(&self, new: &[usize]) -> usize {
        let mut needed = 0;
        // Of those who share a page, the last one to grow may keep it.
        let mut left: Vec<u32> = Vec::new();
        for (seq, &n) in new.iter().enumerate().filter(|(_, n)| **n > 0) {
            needed += (self.n_past[seq] + n).div_ceil(PAGE).saturating_sub(self.pages[seq].len());
            if let Some(page) = self.partly_filled(seq) {
                let before = left.iter().filter(|&&p| p == page).count();
                if self.counts[page as usize] as usize - before > 1 {
                    needed += 1;
                    left.push(page);
                }
            }
        }
        needed
    }

    /// The page that holds the end of sequence `seq`, where it has room for more.
    fn partly_filled(&self, seq: usize) -> Option<u32> {
        let n_past = self.n_past[seq];
        (!n_past.is_multiple_of(PAGE)).then(|| self.pages[seq][n_past / PAGE])
    }

    /// Gives sequence `seq` pages for `n` positions; there are enough.
    fn grow(&mut self, seq: usize, n: usize) {
        while self.pages[seq].len() * PAGE < n {
            let page = self.take();
            self.pages[seq].push(page);
        }
    }

    /// Takes all but the first `n` pages away from sequence `seq`.
    fn cut(&mut self, seq: usize, n: usize) {
        for page in self.pages[seq].drain(n..) {
            self.counts[page as usize] -= 1;
            if self.counts[page as usize] == 0 {
                self.free.insert(page);
            }
        }
    }

    /// Cuts sequence `seq` back to its first `n` tokens; no effect when it is already that short or does not exist.
    pub fn truncate(&mut self, seq: usize, n: usize) {
        if n >= self.n_past(seq) {
            return;
        }
        self.n_past[seq] = n;
        self.cut(seq, n.div_ceil(PAGE));
    }

    /// Makes sequence `to` the first `n` tokens of sequence `from`, on the same pages; what it held is forgotten.
    pub fn share(&mut self, from: usize, to: usize, n: usize) -> Result<(), ForwardError> {
        check_share(from, to, n, &self.n_past)?;
        if from == to {
            self.truncate(to, n);
            return Ok(());
        }
        self.cut(to, 0);
        let shared = self.pages[from][..n.div_ceil(PAGE)].to_vec();
        for &page in &shared {
            self.counts[page as usize] += 1;
        }
        self.pages[to] = shared;
        self.n_past[to] = n;
        Ok(())
    }

    /// A page that nobody holds.
    fn take(&mut self) -> u32 {
        if let Some(page) = self.free.pop_first() {
            self.counts[page as usize] = 1;
            return page;
        }
        self.counts.push(1);
        (self.counts.len() - 1) as u32
    }
}

/// Checks that sequence `from` has `n` tokens for sequence `to` to share; `n_past[seq]` is the length of each sequence.
pub fn check_share(from: usize, to: usize, n: usize, n_past: &[usize]) -> Result<(), ForwardError> {
    let n_seq = n_past.len();
    if let Some(&seq) = [from, to].iter().find(|&&seq| seq >= n_seq) {
        return Err(ForwardError::SequenceOutOfRange { seq, n_seq });
    }
    if n > n_past[from] {
        return Err(ForwardError::PrefixTooLong { seq: from, n, n_past: n_past[from] });
    }
    Ok(())
}

#[cfg(test)]
mod tests;
