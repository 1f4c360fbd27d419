//! [`HeadSequence`]: what a [`HeadDrafter`](super::HeadDrafter) knows of one sequence of the target.

use std::ops::Range;

use metal_attention_model::HeadUse;

/// Rows that are kept although all heads have read them: sequences are mostly cut back by a few drafts.
const N_KEPT: usize = 64;

/// In the place of a token that was not observed.
const UNKNOWN: u32 = u32::MAX;

/// The tokens of a sequence that the target has evaluated, its states of the last of them, and what each head has read.
pub(super) struct HeadSequence {
    /// The tokens that the target has evaluated, by position; [`UNKNOWN`] where they were not observed.
    ids: Vec<u32>,
    /// The target's states of positions `first_state..ids.len()`, row-major `[n, n_embd]`.
    states: Vec<f32>,
    first_state: usize,
    n_embd: usize,
    /// The first position that heads read: 1 if they read no token without a state before it, else 0.
    first_read: usize,
    /// What each head has read with the target's states.
    read: Vec<Read>,
    /// The state in the place of one that does not exist, or is not known.
    zero: Vec<f32>,
}

/// What a head has read with the target's states: `ids[start..]`. The position `start` has index 0 in its cache.
#[derive(Clone, Default)]
struct Read {
    start: usize,
    ids: Vec<u32>,
}

impl HeadSequence {
    /// An empty sequence of a target for `n_head` heads, which propose drafts as `heads` says, with states of `n_embd` elements.
    pub(super) fn new(heads: HeadUse, n_head: usize, n_embd: usize) -> Self {
        let first_read = match heads {
            HeadUse::Repeated | HeadUse::Chained => 0,
            HeadUse::Eagle => 1,
        };
        let (read, zero) = (vec![Read::default(); n_head], vec![0.0; n_embd]);
        Self { ids: Vec::new(), states: Vec::new(), first_state: 0, n_embd, first_read, read, zero }
    }

    /// Bytes of the states and tokens.
    pub(super) fn bytes(&self) -> usize {
        let ids = self.ids.capacity() + self.read.iter().map(|read| read.ids.capacity()).sum::<usize>();
        size_of::<f32>() * self.states.capacity() + size_of::<u32>() * ids
    }

    /// The tokens that the target has evaluated.
    pub(super) fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// The target has evaluated `ids` from position `first` on, with `states`, `[ids.len(), n_embd]`.
    pub(super) fn observe(&mut self, first: usize, ids: &[u32], states: &[f32]) {
        if first > self.ids.len() {
            // What lies between was evaluated for another sequence, of which this one is a copy.
            self.states.clear();
            self.ids.resize(first, UNKNOWN);
            self.first_state = first;
        }
        self.cut(first);
        self.ids.extend_from_slice(ids);
        self.states.extend_from_slice(states);
    }

    /// Cuts the sequence back to what it has in common with `ids`, all tokens of which the target has evaluated but the last one.
    /// Returns whether the target's state of the last of these is known.
    pub(super) fn follow(&mut self, ids: &[u32]) -> bool {
        let evaluated = &ids[..ids.len() - 1];
        let n = n_common(&mut self.ids, evaluated);
        self.cut(n);
        n == evaluated.len() && self.knows_state_before(n)
    }

    /// Cuts the sequence back to its first `n` tokens.
    fn cut(&mut self, n: usize) {
        self.ids.truncate(n);
        self.first_state = self.first_state.min(n);
        self.states.truncate((n - self.first_state) * self.n_embd);
    }

    /// The positions of `ids` that head `head` has read with the target's states; `0..0` if there are none.
    pub(super) fn read(&mut self, head: usize, ids: &[u32]) -> Range<usize> {
        let read = &mut self.read[head];
        let n = n_common(&mut read.ids, ids);
        if n > read.start { read.start..n } else { 0..0 }
    }

    /// Head `head` reads all of `ids`, from position `start` on.
    pub(super) fn set_read(&mut self, head: usize, start: usize, ids: &[u32]) {
        let read = &mut self.read[head];
        let n = n_common(&mut read.ids, ids);
        read.ids.truncate(n);
        read.ids.extend_from_slice(&ids[n..]);
        read.start = start;
    }

    /// What head `head` has read is not known any more.
    pub(super) fn forget_read(&mut self, head: usize) {
        self.read[head].ids.clear();
    }

    /// Tokens that the target has evaluated and head `head` has not read.
    pub(super) fn n_unread(&self, head: usize) -> usize {
        self.ids.len().saturating_sub(self.read[head].ids.len())
    }

    /// Whether a head that begins at position `start` and has read as far as `next` can go on: at most one state is missing, that of
    /// the last position before a cut.
    pub(super) fn can_continue(&self, start: usize, next: usize) -> bool {
        next >= self.first_read && self.knows_state_before(next) && (next > 0 || self.first_state == 0)
            || (next > start && next == self.first_state)
    }

    /// The first position that heads read before which the state is known, or is zero.
    pub(super) fn first_known(&self) -> usize {
        if self.first_state == 0 { self.first_read } else { self.first_state + 1 }
    }

    /// The first position whose own state is known, if any is.
    pub(super) fn first_row(&self) -> usize {
        self.first_state
    }

    /// Whether the state before `position` is known; that before position 0 is zero, or there is none.
    fn knows_state_before(&self, position: usize) -> bool {
        position == 0 && self.first_read == 0 || (self.first_state < position && position <= self.ids.len())
    }

    /// The target's state of the position before `position`, `[n_embd]`; zeros at position 0, and where it is not known.
    pub(super) fn state_before(&self, position: usize) -> &[f32] {
        let row = position.checked_sub(1 + self.first_state);
        row.and_then(|row| self.states.chunks_exact(self.n_embd).nth(row)).unwrap_or(&self.zero)
    }

    /// Drops the states that all heads have read, but for the last ones.
    pub(super) fn drop_old_states(&mut self) {
        let n_read = self.read.iter().map(|read| read.ids.len()).min().unwrap_or(0);
        let first = n_read.min(self.ids.len()).saturating_sub(N_KEPT);
        // Moving the rest costs as much as it has rows.
        if first >= self.first_state + N_KEPT {
            self.states.drain(..(first - self.first_state) * self.n_embd);
            self.first_state = first;
        }
    }
}

/// The number of tokens that `known` and `ids` have in common at their beginnings; those of `known` that are not known equal all
/// others, and become known.
fn n_common(known: &mut [u32], ids: &[u32]) -> usize {
    let mut n = 0;
    for (known, &id) in known.iter_mut().zip(ids) {
        if *known == UNKNOWN {
            *known = id;
        }
        if *known != id {
            break;
        }
        n += 1;
    }
    n
}
