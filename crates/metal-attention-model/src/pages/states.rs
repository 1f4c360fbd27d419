//! Recurrent states: which slot holds the state of which sequence at which position.
//!
//! A slot holds the states of all recurrent layers after the first `pos` tokens of a sequence.

use std::collections::{BTreeSet, VecDeque};

use crate::{BatchToken, ForwardError, PAGE, StateCapacity, StateUse};

/// Slot of the empty sequence: zeros, never written to.
const EMPTY: u32 = 0;

/// Weight of a checkpoint at a turn of a conversation against one elsewhere that spares as many tokens: up to lengths
/// of about this number, all others are replaced first.
const TURN_WEIGHT: f64 = 1e6;

/// Consecutive tokens of one sequence in a batch, with the slots of the states before and after them.
///
/// All consecutive tokens of one sequence in a batch, a prefill chunk or a decode token, are a *run*. A run has several
/// segments where a state within it is kept, too.
///
/// A kernel computes the state in slot `to`. If that is not `from`, it first copies the state from there; slot `from`
/// is unchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Index of the sequence.
    pub seq: usize,
    /// Position of the first token.
    pub pos: usize,
    /// Number of tokens.
    pub n: usize,
    /// Slot of the state after `pos` tokens.
    pub from: u32,
    /// Slot of the state after `pos + n` tokens.
    pub to: u32,
}

/// A kept state of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct KeptState {
    /// Number of tokens that it is the state after; at least 1.
    pub(super) pos: usize,
    /// Its slot.
    pub(super) slot: u32,
    /// Whether a turn of a conversation begins soon after it: sequences are often cut back to there.
    pub(super) before_turn: bool,
}

/// The kept states of all sequences.
///
/// A sequence keeps the state that it continues from, the one before its last token, the one from before the last
/// batch, and checkpoints: states at ends of pages. Only one batch writes to a state; after that it is shared like a
/// page, with a count of holders.
///
/// If slots run short, checkpoints are replaced, first those whose loss costs the fewest tokens to be evaluated again,
/// in proportion to their distance from the sequence's end. Those where a turn of a conversation begins are replaced
/// last: an answer is regenerated from there, a question edited, reasoning dropped. A turn is assumed where a sequence
/// changes from growing by many tokens to growing token by token, or back.
#[derive(Debug, Clone)]
pub(super) struct StateTable {
    /// Number of slots, and elements of a state.
    pub(super) capacity: StateCapacity,
    /// Holders of each slot that was ever handed out.
    pub(super) counts: Vec<u32>,
    /// Slots that were released.
    pub(super) free: BTreeSet<u32>,
    /// Kept states of each sequence, by position; it continues from the last one, or from the empty sequence if
    /// there is none.
    pub(super) kept: Vec<Vec<KeptState>>,
    /// Length of each sequence of the last batch before that batch; `None` for the others.
    protected: Vec<Option<usize>>,
    /// Whether each sequence's tokens in the last batch end with drafts ([`Batch::drafted`](crate::Batch::drafted)): the
    /// state after each of them is kept until the next batch.
    drafted: Vec<bool>,
    /// Whether each sequence last grew by many tokens (true) or by one; `None` if it is new.
    grew_by_many: Vec<Option<bool>>,
    /// Slots reserved for the states after the next tokens of each sequence, one for each token.
    pub(super) reserved: Vec<VecDeque<u32>>,
    /// Segments of the tokens that were appended last.
    segments: Vec<Segment>,
}

impl StateTable {
    /// No states, for `n_seq` empty sequences.
    pub(super) fn new(capacity: StateCapacity, n_seq: usize) -> Self {
        Self {
            capacity,
            counts: vec![1],
            free: BTreeSet::new(),
            kept: vec![Vec::new(); n_seq],
            protected: vec![None; n_seq],
            drafted: vec![false; n_seq],
            grew_by_many: vec![None; n_seq],
            reserved: vec![VecDeque::new(); n_seq],
            segments: Vec::new(),
        }
    }

    /// The longest prefix of sequence `seq`, of at most `n` tokens, whose state is kept.
    pub(super) fn reachable(&self, seq: usize, n: usize) -> usize {
        self.kept[seq].iter().rev().find(|kept| kept.pos <= n).map_or(0, |kept| kept.pos)
    }

    /// Checks that there are slots for `new` new tokens of each sequence, which are `drafted` in some sequences.
    pub(super) fn check(&self, new: &[usize], drafted: &[usize]) -> Result<(), ForwardError> {
        // A single token uses a reserved slot; for several, the reserved ones are released first.
        let takes_reserved = |seq: usize| new[seq] == 1 && !self.reserved[seq].is_empty();
        let n_states = |seq: usize| if drafted.contains(&seq) { new[seq] } else { new[seq].min(2) };
        let of_seq = |seq: usize| if takes_reserved(seq) { 0 } else { n_states(seq) };
        let needed = (0..new.len()).map(of_seq).sum();
        let last = self.kept.iter().filter_map(|kept| Some(kept.last()?.slot));
        let reserved: usize =
            self.reserved.iter().zip(new).filter(|(_, n)| **n <= 1).map(|(slots, _)| slots.len()).sum();
        let total = self.capacity.n_states;
        let free = total - last.collect::<BTreeSet<_>>().len() - reserved;
        if needed > free { Err(ForwardError::OutOfStates { needed, free, total }) } else { Ok(()) }
    }

    /// The use of the slots, without that of the empty sequence.
    pub(super) fn usage(&self) -> StateUse {
        let held = self.counts.iter().skip(1).filter(|&&count| count > 0).count();
        let last = self.kept.iter().filter_map(|kept| Some(kept.last()?.slot)).collect::<BTreeSet<_>>().len();
        let total = self.capacity.n_states;
        StateUse { total, free: total - held, checkpoints: held - last }
    }

    /// Protects the present states of the sequences of `batch`, and all states of those with drafts, until the next call.
    pub(super) fn protect(&mut self, batch: &[BatchToken], drafted: &[usize]) {
        self.protected.fill(None);
        for token in batch {
            self.protected[token.seq] = Some(self.kept[token.seq].last().map_or(0, |kept| kept.pos));
        }
        self.drafted.fill(false);
        for &seq in drafted {
            self.drafted[seq] = true;
        }
    }

    /// Assigns slots to the states that a micro-batch computes: at each end of a page, before each sequence's last
    /// token, and after it; in sequences with drafts after each token.
    pub(super) fn append(&mut self, micro_batch: &[BatchToken]) {
        self.segments.clear();
        let (mut ends, mut n_new) = (vec![None; self.kept.len()], vec![0; self.kept.len()]);
        for token in micro_batch {
            ends[token.seq] = Some(token.pos);
            n_new[token.seq] += 1;
        }
        let mut ready = Vec::new();
        for (seq, last) in ends.iter().enumerate() {
            let Some(last) = last else { continue };
            self.drop_temporary(seq);
            let by_many = n_new[seq] > 1 && !self.drafted[seq];
            if self.grew_by_many[seq].replace(by_many).is_some_and(|before| before != by_many) {
                self.mark_turn(seq);
            }
            if n_new[seq] > 1 {
                self.release(seq);
            } else if !self.reserved[seq].is_empty() {
                continue;
            }
            let (start, copied) = match self.kept[seq].last() {
                Some(kept) => (kept.pos, self.must_stay(seq, *kept)),
                None => (0, true),
            };
            // With a single new token, the present state is the one before the last token: it stays, and one slot is
            // enough.
            let n_slots = match start == *last {
                _ if self.drafted[seq] => n_new[seq],
                true => 1,
                false => 1 + usize::from(copied),
            };
            for _ in 0..n_slots {
                ready.push(self.take_slot(&ends).expect("a slot for every state that was promised one"));
            }
        }
        for run in micro_batch.chunk_by(|t, u| t.seq == u.seq) {
            let (seq, mut pos, end) = (run[0].seq, run[0].pos, run[0].pos + run.len());
            let last = ends[seq].unwrap_or(pos);
            let drafted = self.drafted[seq];
            while pos < end {
                let page_end = (pos / PAGE + 1) * PAGE;
                let next = match pos < last {
                    _ if drafted => pos + 1,
                    true => page_end.min(end).min(last),
                    false => end,
                };
                let must_have_slot =
                    drafted || pos == last || self.kept[seq].last().is_none_or(|kept| self.must_stay(seq, *kept));
                let to = match must_have_slot {
                    true if !self.reserved[seq].is_empty() => self.reserved[seq].pop_front(),
                    true => Some(ready.pop().expect("a slot for every state that must stay")),
                    // A checkpoint, if there is a slot.
                    false if pos.is_multiple_of(PAGE) => self.take_slot(&ends),
                    false => None,
                };
                let (from, to) = self.advance(seq, next, to);
                self.segments.push(Segment { seq, pos, n: next - pos, from, to });
                pos = next;
            }
        }
        for slot in ready {
            self.release_slot(slot);
        }
    }

    /// The slots of the state that sequence `seq` continues from, and of the state after `next` tokens. Without a slot
    /// `to`, the new state replaces the old one.
    fn advance(&mut self, seq: usize, next: usize, to: Option<u32>) -> (u32, u32) {
        let kept = &mut self.kept[seq];
        match (kept.last_mut(), to) {
            (Some(last), None) => {
                *last = KeptState { pos: next, before_turn: false, ..*last };
                (last.slot, last.slot)
            }
            (last, to) => {
                let from = last.map_or(EMPTY, |last| last.slot);
                let slot = to.unwrap_or(EMPTY);
                kept.push(KeptState { pos: next, slot, before_turn: false });
                (from, slot)
            }
        }
    }

    /// Whether the state that sequence `seq` continues from must not be overwritten: other sequences hold it, or the
    /// batch may be taken back.
    fn must_stay(&self, seq: usize, state: KeptState) -> bool {
        self.protected[seq] == Some(state.pos) || self.counts[state.slot as usize] > 1
    }

    /// The kept states of sequence `seq` that are worth saving: not those after drafts, which may be many, except the last two.
    pub(super) fn to_save(&self, seq: usize) -> impl Iterator<Item = &KeptState> {
        let end = self.kept[seq].last().map_or(0, |last| last.pos);
        self.kept[seq].iter().filter(move |state| {
            let is_draft = self.drafted[seq] && self.protected[seq].is_some_and(|held| state.pos > held);
            !is_draft || state.pos.is_multiple_of(PAGE) || state.pos + 1 >= end
        })
    }

    /// Whether the state of sequence `seq` after `pos` tokens is kept until the next batch.
    fn is_protected(&self, seq: usize, pos: usize) -> bool {
        self.protected[seq].is_some_and(|held| pos == held || pos > held && self.drafted[seq])
    }

    /// Marks the end of sequence `seq` as the beginning of a turn. Later prompts may lack what the template writes
    /// before an answer, so that they differ before the last end of a page: the page end before that is marked as well.
    fn mark_turn(&mut self, seq: usize) {
        let kept = &mut self.kept[seq];
        let end = kept.last().map_or(0, |state| state.pos);
        for state in kept.iter_mut().rev().take_while(|state| state.pos + 2 * PAGE > end) {
            state.before_turn |= state.pos.is_multiple_of(PAGE);
        }
    }

    /// Releases the states of sequence `seq` that were kept for the last batch only.
    fn drop_temporary(&mut self, seq: usize) {
        let mut kept = std::mem::take(&mut self.kept[seq]);
        let last = kept.last().copied();
        kept.retain(|state| {
            let stays = Some(*state) == last || self.is_protected(seq, state.pos) || state.pos.is_multiple_of(PAGE);
            if !stays {
                self.release_slot(state.slot);
            }
            stays
        });
        self.kept[seq] = kept;
    }

    /// Reserves slots for the states after each of the next `n` tokens of the sequences of `batch`. False, with nothing
    /// changed, if there are not enough.
    pub(super) fn reserve(&mut self, batch: &[BatchToken], n: usize) -> bool {
        let none = vec![None; self.kept.len()];
        let more = |seq: usize| n.saturating_sub(self.reserved[seq].len());
        let needed: usize = batch.iter().map(|token| more(token.seq)).sum();
        let never_used = self.capacity.n_states + 1 - self.counts.len();
        let unused = self.free.len() + never_used;
        if needed > unused && needed > unused + self.worth(&none).into_iter().flatten().count() {
            return false;
        }
        for &BatchToken { seq, .. } in batch {
            while self.reserved[seq].len() < n {
                let slot = self.take_slot(&none).expect("as many slots as were counted");
                self.reserved[seq].push_back(slot);
            }
        }
        true
    }

    /// Releases the reserved slots of sequence `seq`.
    pub(super) fn release(&mut self, seq: usize) {
        for slot in std::mem::take(&mut self.reserved[seq]) {
            self.release_slot(slot);
        }
    }

    /// The segments of a lookahead step, `ahead` tokens after `batch`, which was appended last with one token of each
    /// sequence.
    pub(super) fn segments_ahead(&self, batch: &[BatchToken], ahead: usize) -> Vec<Segment> {
        let Some(before) = ahead.checked_sub(1) else { return self.segments(batch).to_vec() };
        let segment = |&BatchToken { seq, pos, .. }: &BatchToken| {
            let slots = &self.reserved[seq];
            let last = || self.kept[seq].last().map_or(EMPTY, |kept| kept.slot);
            let from = before.checked_sub(1).map_or_else(last, |i| slots[i]);
            Segment { seq, pos: pos + ahead, n: 1, from, to: slots[before] }
        };
        batch.iter().map(segment).collect()
    }

    /// The segments of `tokens`: those appended last, or consecutive ones of these that include all of their sequences'
    /// tokens.
    pub(super) fn segments(&self, tokens: &[BatchToken]) -> &[Segment] {
        let Some(first) = tokens.first() else { return &[] };
        let begins = |segment: &Segment| (segment.seq, segment.pos) == (first.seq, first.pos);
        let start = self.segments.iter().position(begins).expect("tokens that were appended");
        let mut left = tokens.len();
        let n = self.segments[start..].iter().take_while(|segment| {
            let more = left > 0;
            left = left.saturating_sub(segment.n);
            more
        });
        &self.segments[start..start + n.count()]
    }

    /// Cuts sequence `seq` back to its first `n` tokens, whose state is kept.
    pub(super) fn cut(&mut self, seq: usize, n: usize) {
        while let Some(state) = self.kept[seq].pop_if(|state| state.pos > n) {
            self.release_slot(state.slot);
        }
        self.protected[seq] = self.protected[seq].filter(|&pos| pos <= n);
        self.release(seq);
    }

    /// Makes sequence `to`, which is empty, share the states of the first `n` tokens of sequence `from`.
    pub(super) fn share(&mut self, from: usize, to: usize, n: usize) {
        let shared: Vec<_> = self.kept[from].iter().copied().filter(|state| state.pos <= n).collect();
        for state in &shared {
            self.counts[state.slot as usize] += 1;
        }
        self.kept[to] = shared;
        self.grew_by_many[to] = None;
    }

    /// Allocates slots for a restored sequence `seq`, which is empty, with states after the given numbers of tokens, in
    /// ascending order. If slots run short, the shortest are left out, never the last. False, with nothing changed, if
    /// there is none for the last.
    pub(super) fn allocate(&mut self, seq: usize, states: &[usize]) -> bool {
        let none = vec![None; self.kept.len()];
        for (i, &pos) in states.iter().rev().enumerate() {
            match self.take_slot(&none) {
                Some(slot) => self.kept[seq].insert(0, KeptState { pos, slot, before_turn: false }),
                None if i == 0 => return false,
                None => break,
            }
        }
        self.protected[seq] = None;
        self.grew_by_many[seq] = None;
        true
    }

    /// Takes a free slot, or that of the least useful checkpoint; `None` if there is neither. `ends`: position of the
    /// last new token of each sequence that grows.
    fn take_slot(&mut self, ends: &[Option<usize>]) -> Option<u32> {
        if self.free.is_empty() && self.counts.len() > self.capacity.n_states {
            let slot = self.least_useful(ends)?;
            for kept in &mut self.kept {
                kept.retain(|state| state.slot != slot);
            }
            self.counts[slot as usize] = 0;
            self.free.insert(slot);
        }
        if let Some(slot) = self.free.pop_first() {
            self.counts[slot as usize] = 1;
            return Some(slot);
        }
        self.counts.push(1);
        Some((self.counts.len() - 1) as u32)
    }

    /// The slot of the checkpoint with the least worth.
    fn least_useful(&self, ends: &[Option<usize>]) -> Option<u32> {
        let held = self.worth(ends).into_iter().enumerate().filter_map(|(slot, worth)| Some((slot, worth?)));
        held.min_by(|a, b| a.1.total_cmp(&b.1)).map(|(slot, _)| slot as u32)
    }

    /// The worth of each slot's state, if it may be replaced: the tokens that it saves a cut just before the next
    /// state, divided by its distance from the end. `None` for states that sequences continue from or may be taken back
    /// to, for those of the present batch, and for reserved slots.
    fn worth(&self, ends: &[Option<usize>]) -> Vec<Option<f64>> {
        let mut worth: Vec<Option<f64>> = vec![Some(-1.0); self.counts.len()];
        for segment in &self.segments {
            worth[segment.from as usize] = None;
            worth[segment.to as usize] = None;
        }
        for (seq, kept) in self.kept.iter().enumerate() {
            let end = kept.last().map_or(0, |state| state.pos);
            let before_last = |pos: usize| self.protected[seq].is_some() && ends[seq].is_none() && pos + 1 == end;
            let stays = |pos: usize| self.is_protected(seq, pos) || before_last(pos);
            for (i, state) in kept.iter().enumerate() {
                let before = i.checked_sub(1).map_or(0, |i| kept[i].pos);
                let place = &mut worth[state.slot as usize];
                *place = match (kept.get(i + 1), *place) {
                    (Some(next), Some(other)) if !stays(state.pos) => {
                        let weight = if state.before_turn { TURN_WEIGHT } else { 1.0 };
                        let spared = (next.pos - before) as f64 / (end - state.pos + PAGE) as f64;
                        Some((weight * spared).max(other))
                    }
                    (Some(_) | None, _) => None,
                };
            }
        }
        worth.into_iter().map(|worth| worth.filter(|w| *w >= 0.0)).collect()
    }

    /// Removes one holder of `slot`.
    fn release_slot(&mut self, slot: u32) {
        self.counts[slot as usize] -= 1;
        if self.counts[slot as usize] == 0 {
            self.free.insert(slot);
        }
    }
}
