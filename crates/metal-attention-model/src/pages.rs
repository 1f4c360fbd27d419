//! The KV cache as pages of positions that sequences share: which page holds what; and beside it the recurrent states.

mod extent;
mod pool;
mod states;

use crate::{BatchToken, CacheGroups, Capacity, ForwardError, check_batch};
use pool::PagePool;
pub use states::Segment;
use states::StateTable;

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
    /// Recurrent states, which lie beside the pages; none where no layer keeps one.
    pub states: StateUse,
}

/// How full the room for recurrent states is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StateUse {
    /// States there is room for.
    pub total: usize,
    /// States that are not there.
    pub free: usize,
    /// States that no sequence goes on from: sequences can be cut back to them, and they give way where others need room.
    pub checkpoints: usize,
}

/// A page to be copied to another before a batch is evaluated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageCopy {
    /// The group of layers whose page it is.
    pub group: usize,
    /// The page that is shared.
    pub from: u32,
    /// Its copy.
    pub to: u32,
}

/// Which page holds which positions of which sequence, for each of a model's groups of layers. Backends keep the keys and
/// values themselves.
///
/// Sequences that begin alike share the pages of what they have in common; each page is counted. A page is written to
/// by one sequence only: where the last, partly filled page of a sequence is shared, it is copied before the sequence
/// grows.
///
/// Layers that see a window keep the pages that it needs: where a sequence has as many as it may have, the first give way
/// to new ones. So a sequence can be cut back only as far as the window before the cut is still there. The last
/// [`n_ubatch`](Capacity::n_ubatch) tokens, a page full at least, can always be taken back from the longest that a
/// sequence was, those reserved included.
///
/// Layers with a recurrent state can go on from the positions alone whose states were kept: what the last batch added, its
/// last token, and the ends of pages as far as there is room for them.
#[derive(Debug, Clone)]
pub struct PageTable {
    capacity: Capacity,
    /// Of each group of layers; the first holds all positions.
    pools: Vec<PagePool>,
    /// Recurrent states, where layers keep some.
    states: Option<StateTable>,
    /// Length of each sequence.
    n_past: Vec<usize>,
}

impl PageTable {
    /// The pages of `groups`, all free, and empty sequences.
    pub fn new(groups: &CacheGroups) -> Self {
        let capacity = groups.capacity();
        Self {
            capacity,
            pools: groups.groups().iter().map(|&group| PagePool::new(group, capacity.n_seq)).collect(),
            states: groups.states().map(|states| StateTable::new(states, capacity.n_seq)),
            n_past: vec![0; capacity.n_seq],
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

    /// Groups of layers.
    pub fn n_groups(&self) -> usize {
        self.pools.len()
    }

    /// Pages of sequence `seq` for a group of layers, in order, and then those reserved for it. In the place of pages that
    /// no token to come sees there may be numbers that stand for nothing.
    pub fn pages(&self, group: usize, seq: usize) -> &[u32] {
        self.pools[group].pages(seq)
    }

    /// Whether the [`pages`](Self::pages) of sequence `seq` are all there and lie one after the other, in every group. Always
    /// so where the others are empty and were when it began, until a window has moved on.
    pub fn pages_are_contiguous(&self, seq: usize) -> bool {
        self.pools
            .iter()
            .all(|pool| pool.lists[seq].n_dropped == 0 && pool.pages(seq).windows(2).all(|pair| pair[1] == pair[0] + 1))
    }

    /// The page of position `pos` of sequence `seq`, which a group of layers holds.
    pub fn page(&self, group: usize, seq: usize, pos: usize) -> u32 {
        self.pools[group].pages(seq)[pos / PAGE]
    }

    /// How many pages there are that hold all positions, and how many are free; and the same of recurrent states.
    pub fn usage(&self) -> PageUse {
        let all = &self.pools[0];
        let reserved = |seq: usize| all.pages(seq).len() - self.n_past[seq].div_ceil(PAGE);
        let free = all.n_free() + (0..self.n_seq()).map(reserved).sum::<usize>();
        let states = self.states.as_ref().map(StateTable::usage).unwrap_or_default();
        PageUse { page_len: PAGE, total: all.group.n_pages, free, states }
    }

    /// How many of the pages that hold all positions different `sequences` hold together: those that several share count once, and
    /// reserved ones not at all.
    pub fn pages_held(&self, sequences: &[usize]) -> usize {
        let all = &self.pools[0];
        let mut shared = Vec::new();
        let mut n_own = 0;
        for &seq in sequences {
            for &page in &all.pages(seq)[..self.n_past[seq].div_ceil(PAGE)] {
                if all.counts[page as usize] == 1 {
                    n_own += 1;
                } else {
                    shared.push(page);
                }
            }
        }
        shared.sort_unstable();
        shared.dedup();
        n_own + shared.len()
    }

    /// Checks `batch` as [`check_batch`] does, and that there are pages for it. Those of a window are missing only where
    /// [`n_windows`](Capacity::n_windows) is less than there are sequences. What it lets through [`append`](Self::append)
    /// takes, whole or piece by piece.
    pub fn check(&self, batch: &[BatchToken], n_vocab: usize) -> Result<(), ForwardError> {
        check_batch(batch, n_vocab, self.capacity.n_ctx, &self.n_past)?;
        let new = self.new_tokens(batch);
        for pool in &self.pools {
            let (needed, free) = (pool.pages_needed(&self.n_past, &new), pool.n_free());
            if needed > free {
                return Err(ForwardError::OutOfPages { needed, free, total: pool.group.n_pages, page_len: PAGE });
            }
        }
        self.states.as_ref().map_or(Ok(()), |states| states.check(&new))
    }

    /// Where layers keep recurrent states: until another batch is begun, [`retract`](Self::retract) takes the sequences of
    /// `batch`, which is to be appended in pieces, back to what they are now.
    pub fn begin_batch(&mut self, batch: &[BatchToken]) {
        if let Some(states) = &mut self.states {
            states.protect(batch);
        }
    }

    /// What recurrent layers do with `tokens`, which are those [appended](Self::append) last, or some that follow each other
    /// there and are all of their sequences': in order, segment by segment.
    pub fn segments(&self, tokens: &[BatchToken]) -> &[Segment] {
        self.states.as_ref().map_or(&[], |states| states.segments(tokens))
    }

    /// The [`segments`](Self::segments) of a step that is queued `ahead` tokens after `batch`, one token of each sequence, which
    /// were appended last; its tokens are [reserved](Self::reserve). Those of `batch` itself where `ahead` is 0.
    pub fn segments_ahead(&self, batch: &[BatchToken], ahead: usize) -> Vec<Segment> {
        self.states.as_ref().map_or(Vec::new(), |states| states.segments_ahead(batch, ahead))
    }

    /// Finds pages for the tokens of `batch`, those reserved for its sequences first, and counts them as part of their
    /// sequences. Returns the copies that have to be made first, in order. [`check`](Self::check) has let a batch through
    /// that begins with these; where there are windows they are no more than `n_ubatch`.
    pub fn append(&mut self, batch: &[BatchToken]) -> Vec<PageCopy> {
        let new = self.new_tokens(batch);
        let mut copies = Vec::new();
        for (seq, &n) in new.iter().enumerate().filter(|(_, n)| **n > 0) {
            let n_past = self.n_past[seq];
            self.n_past[seq] += n;
            for (group, pool) in self.pools.iter_mut().enumerate() {
                assert!(
                    group == 0 || n <= self.capacity.step(),
                    "{n} tokens of a sequence move its windows on at once"
                );
                if is_partly_filled(n_past) && pool.holders(seq, n_past) > 1 {
                    let (from, to) = pool.replace(seq, n_past);
                    copies.push(PageCopy { group, from, to });
                }
                pool.grow(seq, n_past + n);
            }
        }
        if let Some(states) = &mut self.states {
            states.append(batch);
        }
        copies
    }

    /// Takes the tokens of a batch back that was appended last, whole or in part. A sequence with more of them than can be
    /// taken back becomes shorter than it was.
    pub fn retract(&mut self, batch: &[BatchToken]) {
        for token in batch {
            self.rewind(token.seq, token.pos);
        }
    }

    /// Finds pages for `n` more tokens of each sequence of `batch`, which are not counted yet; nobody else gets these pages
    /// until they are given back by [`release`](Self::release) or a cut. The same goes for slots of recurrent states, one for each
    /// token. False, and nothing has changed, where there are not so many pages, positions or slots, the page to be written to
    /// first is shared, or windows would move on so far that the last token could not be taken back.
    pub fn reserve(&mut self, batch: &[BatchToken], n: usize) -> bool {
        if self.n_groups() > 1 && n >= self.capacity.step() {
            return false;
        }
        let mut new = vec![0; self.n_seq()];
        for &BatchToken { seq, .. } in batch {
            let n_past = self.n_past[seq];
            if n_past + n > self.capacity.n_ctx || is_partly_filled(n_past) && self.pools[0].holders(seq, n_past) > 1 {
                return false;
            }
            new[seq] = n;
        }
        if self.pools.iter().any(|pool| pool.pages_needed(&self.n_past, &new) > pool.n_free()) {
            return false;
        }
        if self.states.as_mut().is_some_and(|states| !states.reserve(batch, n)) {
            return false;
        }
        for &BatchToken { seq, .. } in batch {
            let end = self.n_past[seq] + n;
            self.pools.iter_mut().for_each(|pool| pool.grow(seq, end));
        }
        true
    }

    /// Gives back all pages and slots that are reserved.
    pub fn release(&mut self) {
        for seq in 0..self.n_seq() {
            self.cut(seq, self.n_past[seq]);
            self.states.iter_mut().for_each(|states| states.release(seq));
        }
    }

    /// New tokens of each sequence.
    fn new_tokens(&self, batch: &[BatchToken]) -> Vec<usize> {
        let mut new = vec![0; self.n_seq()];
        for token in batch {
            new[token.seq] += 1;
        }
        new
    }

    /// Takes the pages beyond the first `n` positions away from sequence `seq`.
    fn cut(&mut self, seq: usize, n: usize) {
        self.pools.iter_mut().for_each(|pool| pool.cut(seq, n.div_ceil(PAGE)));
    }

    fn cut_states(&mut self, seq: usize, n: usize) {
        if let Some(states) = &mut self.states {
            states.cut(seq, n);
        }
    }

    /// The length that [`rewind`](Self::rewind) would reach.
    pub fn reachable(&self, seq: usize, n: usize) -> usize {
        let n_past = self.n_past(seq);
        if n >= n_past {
            return n_past;
        }
        let of_pages = |n: usize| self.pools.iter().fold(n, |n, pool| pool.reachable(pool.lists[seq].n_dropped, n));
        let of_states = |n: usize| self.states.as_ref().map_or(n, |states| states.reachable(seq, n));
        settle_at(n, |n| of_states(of_pages(n)))
    }

    /// Cuts sequence `seq` back to its first `n` tokens, or to the longest shorter beginning that can go on, if need be to
    /// nothing. Returns the length reached; a sequence that is already that short stays as it is.
    pub fn rewind(&mut self, seq: usize, n: usize) -> usize {
        let reached = self.reachable(seq, n);
        if reached < self.n_past(seq) {
            self.n_past[seq] = reached;
            self.cut(seq, reached);
            self.cut_states(seq, reached);
        }
        reached
    }

    /// Makes sequence `to` the first `n` tokens of sequence `from`, on the same pages, or as many as [`reachable`
    /// ](Self::reachable) says; what it held is forgotten. Returns its length.
    pub fn share(&mut self, from: usize, to: usize, n: usize) -> Result<usize, ForwardError> {
        check_share(from, to, n, &self.n_past)?;
        if from == to {
            return Ok(self.rewind(to, n));
        }
        let n = self.reachable(from, n);
        self.cut(to, 0);
        self.cut_states(to, 0);
        self.pools.iter_mut().for_each(|pool| pool.share(from, to, n.div_ceil(PAGE)));
        if let Some(states) = &mut self.states {
            states.share(from, to, n);
        }
        self.n_past[to] = n;
        Ok(n)
    }
}

/// Where `less` leaves it, which gives a number that is no larger, from `n` on.
fn settle_at(n: usize, less: impl Fn(usize) -> usize) -> usize {
    let mut reached = n;
    loop {
        match less(reached) {
            next if next == reached => return reached,
            next => reached = next,
        }
    }
}

/// Whether a page holds the end of a sequence of `n` tokens and has room for more.
fn is_partly_filled(n: usize) -> bool {
    !n.is_multiple_of(PAGE)
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
mod state_tests;
#[cfg(test)]
mod tests;
