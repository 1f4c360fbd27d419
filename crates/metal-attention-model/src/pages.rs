//! The page table: which KV page holds which positions of which sequence, and which slot which recurrent state.
//!
//! The keys, values and states themselves are the backend's; this is bookkeeping by numbers.

mod extent;
mod pool;
mod states;

use crate::{Batch, BatchToken, CacheGroups, Capacity, ForwardError, Position, SequenceSpans, SpanPlace, check_batch};
use pool::PagePool;
pub use states::Segment;
use states::StateTable;

/// Positions of a KV page.
pub const PAGE: usize = 64;

/// Maximum sequences of a KV cache: each takes some memory even if it is empty.
pub const MAX_SEQUENCES: usize = 1 << 20;

/// The use of a KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PageUse {
    /// Positions of a page.
    pub page_len: usize,
    /// Number of pages.
    pub total: usize,
    /// Free pages, those reserved for lookahead included.
    pub free: usize,
    /// Use of the recurrent states; zeros if no layer keeps one.
    pub states: StateUse,
}

impl PageUse {
    /// Number of positions of all pages.
    pub fn n_positions(&self) -> usize {
        self.total.saturating_mul(self.page_len)
    }
}

/// The use of the slots for recurrent states.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StateUse {
    /// Number of slots.
    pub total: usize,
    /// Free slots.
    pub free: usize,
    /// Checkpoints: states from which no sequence continues now. Sequences can be cut back to them; their slots are
    /// taken for others on demand.
    pub checkpoints: usize,
}

/// A copy of a page that the backend must make before it evaluates a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageCopy {
    /// Index of the cache group.
    pub group: usize,
    /// The shared page.
    pub from: u32,
    /// The new page.
    pub to: u32,
}

/// Which page holds which positions of which sequence, for each cache group of a model, and which slot which recurrent
/// state.
///
/// Sequences with a common prefix share its pages, which count their holders. Only one sequence may write to a page: if
/// the last, partly filled page of a sequence is shared, it is copied before the sequence grows.
///
/// A layer with a sliding window keeps the pages that the window needs: once a sequence has its maximum of pages, each
/// new one replaces the first. So a sequence can be cut back only as far as the window before the cut is still there.
/// The last [`n_ubatch`](Capacity::n_ubatch) tokens (at least a page) can always be taken back from the longest length
/// that a sequence had, reserved tokens included.
///
/// Layers with a recurrent state can continue only from positions whose states were kept: what the last batch added,
/// the token before the last, and ends of pages as far as there are slots (checkpoints).
#[derive(Debug, Clone)]
pub struct PageTable {
    /// Capacity of the cache.
    capacity: Capacity,
    /// The pages of each cache group; group 0 keeps all positions.
    pools: Vec<PagePool>,
    /// Slots of recurrent states; `None` if no layer keeps one.
    states: Option<StateTable>,
    /// Length of each sequence in tokens.
    n_past: Vec<usize>,
    /// The spans of each sequence.
    spans: Vec<SequenceSpans>,
    /// [`CacheGroups::outlive_steps`].
    outlive_steps: bool,
}

impl PageTable {
    /// A table for the pages of `groups`, all free, with empty sequences.
    pub fn new(groups: &CacheGroups) -> Self {
        let capacity = groups.capacity();
        Self {
            capacity,
            pools: groups.groups().iter().map(|&group| PagePool::new(group, capacity.n_seq)).collect(),
            states: groups.states().map(|states| StateTable::new(states, capacity.n_seq)),
            n_past: vec![0; capacity.n_seq],
            spans: vec![SequenceSpans::default(); capacity.n_seq],
            outlive_steps: groups.outlive_steps(),
        }
    }

    /// Number of sequences.
    pub fn n_seq(&self) -> usize {
        self.n_past.len()
    }

    /// Tokens of sequence `seq`; 0 if there is no such sequence.
    pub fn n_past(&self, seq: usize) -> usize {
        self.n_past.get(seq).copied().unwrap_or(0)
    }

    /// The spans of sequence `seq`.
    pub fn spans(&self, seq: usize) -> &SequenceSpans {
        &self.spans[seq]
    }

    /// The position of a token of text: its index in the sequence or, behind a span, the number that follows the span's
    /// positions.
    pub fn text_position(&self, token: &BatchToken) -> Position {
        Position::of_text(self.spans[token.seq].text_position(token.pos))
    }

    /// The places that the spans of `batch`, which passes all checks, will have. An error if a position, of a row or of the
    /// text behind it, is beyond those that a sequence can reach ([`Capacity::n_positions`]).
    pub(crate) fn span_places(&self, batch: Batch<'_>, n_embd: usize) -> Result<Vec<SpanPlace>, ForwardError> {
        let mut of_sequences: Vec<(usize, SequenceSpans)> = Vec::new();
        let mut places = Vec::with_capacity(batch.spans.len());
        for span in batch.spans {
            let inputs = span.inputs(n_embd);
            let BatchToken { seq, pos: start, .. } = batch.tokens[inputs.start];
            let i = of_sequences.iter().position(|(of, _)| *of == seq).unwrap_or_else(|| {
                of_sequences.push((seq, self.spans[seq].clone()));
                of_sequences.len() - 1
            });
            let spans = &mut of_sequences[i].1;
            let position = spans.text_position(start);
            let next_position = position.saturating_add(span.advance(inputs.len()));
            let place = SpanPlace {
                start,
                end: start + inputs.len(),
                position,
                next_position,
                is_bidirectional: span.is_bidirectional(),
            };
            spans.push(place);
            places.push(place);
        }
        let n_ctx = self.capacity.n_positions();
        for token in batch.tokens {
            let spans: &SequenceSpans =
                of_sequences.iter().find(|(of, _)| *of == token.seq).map_or(&self.spans[token.seq], |(_, spans)| spans);
            // Rows have positions of their own.
            if spans.contain(token.pos) {
                continue;
            }
            let position = spans.text_position(token.pos);
            if position as usize >= n_ctx && !spans.as_slice().is_empty() {
                return Err(ForwardError::PositionOutOfRange { position, n_ctx });
            }
        }
        match places.iter().map(|place| place.next_position).max() {
            Some(end) if end as usize > n_ctx => Err(ForwardError::PositionOutOfRange { position: end - 1, n_ctx }),
            Some(_) | None => Ok(places),
        }
    }

    /// Adds the spans of `batch`, with these places, to their sequences, before the batch is appended.
    pub(crate) fn add_spans(&mut self, batch: Batch<'_>, places: &[SpanPlace]) {
        for (span, &place) in batch.spans.iter().zip(places) {
            self.spans[batch.tokens[span.first].seq].push(place);
        }
    }

    /// Number of cache groups.
    pub fn n_groups(&self) -> usize {
        self.pools.len()
    }

    /// The pages of sequence `seq` in a cache group, by position, followed by reserved ones. Entries of dropped pages,
    /// to which no later token attends, are meaningless.
    pub fn pages(&self, group: usize, seq: usize) -> &[u32] {
        self.pools[group].pages(seq)
    }

    /// Whether the [`pages`](Self::pages) of sequence `seq` are complete and numbered consecutively, in every group.
    /// This is so if the cache was otherwise empty while the sequence grew, until a window moves on.
    pub fn pages_are_contiguous(&self, seq: usize) -> bool {
        self.pools
            .iter()
            .all(|pool| pool.lists[seq].n_dropped == 0 && pool.pages(seq).windows(2).all(|pair| pair[1] == pair[0] + 1))
    }

    /// The page with position `pos` of sequence `seq` in a cache group that keeps it.
    pub fn page(&self, group: usize, seq: usize, pos: usize) -> u32 {
        self.pools[group].pages(seq)[pos / PAGE]
    }

    /// The use of the pages of group 0, and of the recurrent states.
    pub fn usage(&self) -> PageUse {
        let all = &self.pools[0];
        let reserved = |seq: usize| all.pages(seq).len() - self.n_past[seq].div_ceil(PAGE);
        let free = all.n_free() + (0..self.n_seq()).map(reserved).sum::<usize>();
        let states = self.states.as_ref().map(StateTable::usage).unwrap_or_default();
        PageUse { page_len: PAGE, total: all.group.n_pages, free, states }
    }

    /// Number of pages of group 0 that `sequences`, all different, hold together. Shared pages count once, reserved
    /// ones not at all.
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

    /// Checks a batch as [`check_batch`] does, and that there are pages and slots for it. Pages of a window can be
    /// short only if [`n_windows`](Capacity::n_windows) is less than the number of sequences. A batch that passes can
    /// be [appended](Self::append), whole or in micro-batches. `drafted`: [`Batch::drafted`].
    pub fn check(&self, batch: &[BatchToken], n_vocab: usize, drafted: &[usize]) -> Result<(), ForwardError> {
        check_batch(batch, n_vocab, self.capacity.n_ctx, &self.n_past)?;
        if let Some(&seq) = drafted.iter().find(|&&seq| seq >= self.n_seq()) {
            return Err(ForwardError::SequenceOutOfRange { seq, n_seq: self.n_seq() });
        }
        let new = self.new_tokens(batch);
        for pool in &self.pools {
            let (needed, free) = (pool.pages_needed(&self.n_past, &new), pool.n_free());
            if needed > free {
                return Err(ForwardError::OutOfPages { needed, free, total: pool.group.n_pages, page_len: PAGE });
            }
        }
        self.states.as_ref().map_or(Ok(()), |states| states.check(&new, drafted))
    }

    /// Protects the recurrent states of the sequences of `batch` as they are now, until the next call: after the batch
    /// was appended in several micro-batches, [`retract`](Self::retract) can take all of it back. The states after each
    /// token of the sequences `drafted` ([`Batch::drafted`]) are kept as long.
    pub fn begin_batch(&mut self, batch: &[BatchToken], drafted: &[usize]) {
        if let Some(states) = &mut self.states {
            states.protect(batch, drafted);
        }
    }

    /// The segments of `tokens` for recurrent layers, in order. `tokens` are those [appended](Self::append) last, or
    /// consecutive ones of these that include all of their sequences' tokens.
    pub fn segments(&self, tokens: &[BatchToken]) -> &[Segment] {
        self.states.as_ref().map_or(&[], |states| states.segments(tokens))
    }

    /// The segments of a lookahead step, `ahead` tokens after `batch`, which was appended last with one token of each
    /// sequence. The step's tokens are [reserved](Self::reserve). `ahead` 0: those of `batch` itself.
    pub fn segments_ahead(&self, batch: &[BatchToken], ahead: usize) -> Vec<Segment> {
        self.states.as_ref().map_or(Vec::new(), |states| states.segments_ahead(batch, ahead))
    }

    /// Appends the tokens of `batch` to their sequences, on reserved pages first. Returns the copies that the backend
    /// must make before it evaluates the batch, in order. The batch is, or is the beginning of, one that has passed
    /// [`check`](Self::check). With windows it has no more than `n_ubatch` tokens of a sequence.
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

    /// Gives sequences the pages back for which `copies`, the last ones of the batch that was appended last, were not made. The
    /// batch is taken back afterwards ([`retract`](Self::retract)).
    pub(crate) fn cancel_copies(&mut self, copies: &[PageCopy]) {
        for &PageCopy { group, from, to } in copies {
            self.pools[group].undo_replace(from, to);
        }
    }

    /// Takes back the tokens of the batch that was appended last, wholly or in part. A sequence with more of them than
    /// can be taken back becomes shorter than it was before.
    pub fn retract(&mut self, batch: &[BatchToken]) {
        for token in batch {
            self.rewind(token.seq, token.pos);
        }
    }

    /// Reserves pages for `n` more tokens of each sequence of `batch`, and a slot for the state after each, without
    /// appending tokens. They stay reserved until [`release`](Self::release) or a cut.
    ///
    /// False, with nothing changed, if there are not enough pages, positions or slots, if the first page to be written
    /// is shared, or if windows would move on so far that the last token could not be taken back.
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
            if n > 0 && self.spans[seq].text_position(n_past + n - 1) as usize >= self.capacity.n_positions() {
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

    /// Releases all reserved pages and slots.
    pub fn release(&mut self) {
        for seq in 0..self.n_seq() {
            self.cut(seq, self.n_past[seq]);
            self.states.iter_mut().for_each(|states| states.release(seq));
        }
    }

    /// Number of new tokens of each sequence.
    fn new_tokens(&self, batch: &[BatchToken]) -> Vec<usize> {
        let mut new = vec![0; self.n_seq()];
        for token in batch {
            new[token.seq] += 1;
        }
        new
    }

    /// Releases the pages of sequence `seq` after its first `n` positions.
    fn cut(&mut self, seq: usize, n: usize) {
        self.pools.iter_mut().for_each(|pool| pool.cut(seq, n.div_ceil(PAGE)));
    }

    /// Releases the states of sequence `seq` after more than `n` tokens.
    fn cut_states(&mut self, seq: usize, n: usize) {
        if let Some(states) = &mut self.states {
            states.cut(seq, n);
        }
    }

    /// The length that [`rewind`](Self::rewind) to `n` would reach.
    pub fn reachable(&self, seq: usize, n: usize) -> usize {
        let n_past = self.n_past(seq);
        if n >= n_past {
            return n_past;
        }
        let of_pages = |n: usize| self.pools.iter().fold(n, |n, pool| pool.reachable(pool.lists[seq].n_dropped, n));
        let of_states = |n: usize| self.states.as_ref().map_or(n, |states| states.reachable(seq, n));
        fixed_point(n, |n| of_states(of_pages(self.spans[seq].reachable(n))))
    }

    /// Cuts sequence `seq` back to its first `n` tokens, or to the longest shorter prefix from which it can continue,
    /// which may be empty. Returns the length. No effect if it has no more than `n` tokens.
    pub fn rewind(&mut self, seq: usize, n: usize) -> usize {
        let reached = self.reachable(seq, n);
        if reached < self.n_past(seq) {
            self.n_past[seq] = reached;
            self.cut(seq, reached);
            self.cut_states(seq, reached);
        }
        if let Some(spans) = self.spans.get_mut(seq) {
            spans.cut(reached);
        }
        reached
    }

    /// Replaces sequence `to` by the first `n` tokens of sequence `from` on the same pages, or as many as are
    /// [`reachable`](Self::reachable). Returns the length.
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
        self.spans[to] = self.spans[from].clone();
        self.spans[to].cut(n);
        Ok(n)
    }
}

/// The fixed point of `shrink`, which never returns a larger number, from `n` on.
fn fixed_point(n: usize, shrink: impl Fn(usize) -> usize) -> usize {
    let mut reached = n;
    loop {
        match shrink(reached) {
            next if next == reached => return reached,
            next => reached = next,
        }
    }
}

/// Whether the last page of a sequence of `n` tokens is partly filled.
fn is_partly_filled(n: usize) -> bool {
    !n.is_multiple_of(PAGE)
}

/// Checks that sequence `from` has `n` tokens to share with sequence `to`. `n_past[seq]` is the length of each
/// sequence.
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
