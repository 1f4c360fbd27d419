//! Saving and restoring sequences: what is kept of one, and the pages and slots for one that is restored.

use super::{PAGE, PageTable, fixed_point};
use crate::{CacheBlock, ForwardError, SequenceExtent, SnapshotError};

impl PageTable {
    /// The extent of sequence `seq`: its length and what is kept of it. [`SnapshotError::NotCausal`] if it has tokens whose
    /// pages no later step reads.
    pub fn extent(&self, seq: usize) -> Result<SequenceExtent, SnapshotError> {
        self.check_exists(seq)?;
        self.check_kept(self.n_past[seq])?;
        let n_dropped = self.pools.iter().map(|pool| pool.lists[seq].n_dropped).collect();
        let states = self.states.iter().flat_map(|states| states.to_save(seq)).map(|kept| kept.pos).collect();
        Ok(SequenceExtent { n_tokens: self.n_past[seq], n_dropped, states, spans: self.spans[seq].clone() })
    }

    /// The blocks of sequence `seq`, or of its prefix `extent`: pages group by group, then states.
    pub fn blocks(&self, seq: usize, extent: &SequenceExtent) -> Vec<CacheBlock> {
        let n_pages = extent.n_tokens.div_ceil(PAGE);
        let pages = self.pools.iter().zip(&extent.n_dropped).enumerate().flat_map(|(group, (pool, &n_dropped))| {
            pool.lists[seq].pages[n_dropped..n_pages].iter().map(move |&page| CacheBlock::Page { group, page })
        });
        let states = self.states.iter().flat_map(|states| states.to_save(seq));
        let states = states.filter(|kept| kept.pos <= extent.n_tokens);
        pages.chain(states.map(|kept| CacheBlock::State { slot: kept.slot })).collect()
    }

    /// Empties sequence `seq` and allocates pages and slots for `extent`. Returns the block for each saved one, in the
    /// order of [`blocks`](Self::blocks); `None` for those that have no place in this cache, and are left out. After an
    /// error the sequence is empty.
    pub fn allocate(&mut self, seq: usize, extent: &SequenceExtent) -> Result<Vec<Option<CacheBlock>>, SnapshotError> {
        self.check_exists(seq)?;
        self.rewind(seq, 0);
        let &SequenceExtent { n_tokens: n, ref n_dropped, ref states, ref spans } = extent;
        self.check_kept(n)?;
        let n_ctx = self.capacity.n_ctx;
        if n > n_ctx {
            return Err(ForwardError::ContextFull { seq, n_past: 0, n_new: n, n_ctx }.into());
        }
        let n_kept = self.pages_kept(extent)?;
        if !spans.are_within(n, self.capacity.n_positions()) {
            return Err(SnapshotError::Damaged { why: "its spans of embedding rows are not within it" });
        }
        let is_whole = match (&self.states, states.last()) {
            (Some(_), Some(&last)) => last == n,
            (Some(_), None) => n == 0,
            (None, last) => last.is_none(),
        };
        let ascend = states.first() != Some(&0) && states.windows(2).all(|pair| pair[0] < pair[1]);
        if !is_whole || !ascend {
            return Err(SnapshotError::Damaged { why: "its recurrent states are not those of its tokens" });
        }
        for (pool, &needed) in self.pools.iter().zip(&n_kept) {
            let free = pool.n_free();
            if needed > free {
                let total = pool.group.n_pages;
                return Err(ForwardError::OutOfPages { needed, free, total, page_len: PAGE }.into());
            }
        }
        if let Some(of_all) = &mut self.states
            && !of_all.allocate(seq, states)
        {
            return Err(ForwardError::OutOfStates { needed: 1, free: 0, total: of_all.capacity.n_states }.into());
        }
        for (pool, &n_kept) in self.pools.iter_mut().zip(&n_kept) {
            pool.allocate(seq, n, n_kept);
        }
        self.n_past[seq] = n;
        self.spans[seq].clone_from(spans);
        Ok(self.places(seq, n_dropped, states))
    }

    /// The longest prefix of at most `n` tokens from which a saved sequence of this extent can continue.
    pub fn reachable_in(&self, extent: &SequenceExtent, n: usize) -> usize {
        if n >= extent.n_tokens {
            return extent.n_tokens;
        }
        let pools = || self.pools.iter().zip(&extent.n_dropped);
        let of_pages = |n: usize| pools().fold(n, |n, (pool, &n_dropped)| pool.reachable(n_dropped, n));
        let kept = |n: usize| extent.states.iter().rev().find(|&&pos| pos <= n).copied().unwrap_or(0);
        let of_states = |n: usize| if self.states.is_some() { kept(n) } else { n };
        fixed_point(n, |n| of_states(of_pages(extent.spans.reachable(n))))
    }

    /// Number of pages of `extent` that each group keeps.
    fn pages_kept(&self, extent: &SequenceExtent) -> Result<Vec<usize>, SnapshotError> {
        if extent.n_dropped.len() != self.pools.len() {
            return Err(SnapshotError::Damaged { why: "it has other groups of layers" });
        }
        let kept =
            self.pools.iter().zip(&extent.n_dropped).map(|(pool, &dropped)| pool.n_kept(extent.n_tokens, dropped));
        kept.collect::<Option<_>>().ok_or(SnapshotError::Damaged { why: "it lacks pages that tokens to come see" })
    }

    /// The blocks allocated for an extent, in its order.
    fn places(&self, seq: usize, n_dropped: &[usize], states: &[usize]) -> Vec<Option<CacheBlock>> {
        let pages = self.pools.iter().zip(n_dropped).enumerate().flat_map(|(group, (pool, &n_dropped))| {
            let list = &pool.lists[seq];
            let place = move |i: usize| (i >= list.n_dropped).then(|| CacheBlock::Page { group, page: list.pages[i] });
            (n_dropped..list.pages.len()).map(place)
        });
        let kept = |pos: usize| self.states.iter().flat_map(|s| &s.kept[seq]).find(move |kept| kept.pos == pos);
        let states = states.iter().map(|&pos| kept(pos).map(|kept| CacheBlock::State { slot: kept.slot }));
        pages.chain(states).collect()
    }

    /// An error if `n` tokens of a sequence cannot be saved or restored, since its pages mean nothing after a step.
    fn check_kept(&self, n: usize) -> Result<(), SnapshotError> {
        if n == 0 || self.outlive_steps { Ok(()) } else { Err(SnapshotError::NotCausal) }
    }

    /// An error unless sequence `seq` exists.
    fn check_exists(&self, seq: usize) -> Result<(), ForwardError> {
        let n_seq = self.n_seq();
        if seq < n_seq { Ok(()) } else { Err(ForwardError::SequenceOutOfRange { seq, n_seq }) }
    }
}
