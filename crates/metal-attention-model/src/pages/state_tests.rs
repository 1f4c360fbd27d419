//! Tests of recurrent states against sequences that are computed from scratch.

use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;
use crate::Mask;

const N_SEQ: usize = 4;
const N_CTX: usize = 5 * PAGE;
const N_VOCAB: usize = 1000;
/// Bytes of a state.
const STATE: usize = 8;

/// A change of the cache.
#[derive(Debug, Clone)]
enum Action {
    /// Appends tokens to each sequence, in rounds of at most the second number.
    Append([usize; N_SEQ], usize),
    /// Like `Append`, but only this many micro-batches are computed before all is taken back.
    Fail([usize; N_SEQ], usize),
    Rewind(usize, usize),
    Share(usize, usize, usize),
    /// Takes back the last token and appends another one.
    Again(usize),
    /// Appends to each sequence a token and this many drafts, of which the second number holds at most.
    Verify([usize; N_SEQ], usize),
    /// Decode steps over a token of each marked sequence, each with some steps queued behind it; from one step on, the
    /// batch is not the one that was queued.
    Decode {
        seqs: [bool; N_SEQ],
        n: usize,
        depth: usize,
        turns: usize,
    },
}

fn action() -> impl Strategy<Value = Action> {
    let length = || prop_oneof![2 => 0..4usize, 2 => 0..N_CTX, 1 => Just(PAGE), 1 => Just(2 * PAGE)];
    let new = || prop::array::uniform4(prop_oneof![1 => Just(0), 2 => length()]);
    let seq = 0..N_SEQ;
    prop_oneof![
        4 => (new(), prop_oneof![Just(1), Just(3), Just(N_CTX)]).prop_map(|(new, turn)| Action::Append(new, turn)),
        1 => (new(), 0..5usize).prop_map(|(new, n)| Action::Fail(new, n)),
        1 => (seq.clone(), length()).prop_map(|(seq, n)| Action::Rewind(seq, n)),
        2 => (seq.clone(), seq.clone(), length()).prop_map(|(from, to, n)| Action::Share(from, to, n)),
        1 => seq.prop_map(Action::Again),
        2 => (prop::array::uniform4(0..12usize), 0..12usize).prop_map(|(new, n)| Action::Verify(new, n)),
        2 => (prop::array::uniform4(any::<bool>()), 0..90usize, 0..5usize, 0..100usize)
            .prop_map(|(seqs, n, depth, turns)| Action::Decode { seqs, n, depth, turns }),
    ]
}

/// The state after one more token: different for all sequences and all lengths.
fn step(state: u64, id: u32) -> u64 {
    (state ^ u64::from(id)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29) + 1
}

fn state_of(ids: &[u32]) -> u64 {
    ids.iter().fold(0, |state, &id| step(state, id))
}

struct Cache {
    table: PageTable,
    /// The state in each slot.
    memory: Vec<u64>,
    lists: Vec<Vec<u32>>,
    n_ubatch: usize,
    next_id: u32,
}

impl Cache {
    fn new(n_states: usize, n_windows: Option<usize>, n_ubatch: usize) -> Self {
        let capacity =
            Capacity { n_ctx: N_CTX, n_seq: N_SEQ, n_cache: None, n_windows, state_cache: n_states * STATE, n_ubatch };
        let groups = CacheGroups::of_masks(capacity, [Mask::Causal].into_iter()).with_states(STATE / 4);
        let n_states = groups.states().unwrap().n_states;
        assert_eq!(n_states, 3 * n_windows.unwrap_or(N_SEQ) + (capacity.state_cache / STATE).min(capacity.n_pages()));
        Self {
            table: PageTable::new(&groups),
            memory: vec![0; n_states + 1],
            lists: vec![Vec::new(); N_SEQ],
            n_ubatch,
            next_id: 0,
        }
    }

    fn states(&self) -> &StateTable {
        self.table.states.as_ref().unwrap()
    }

    fn batch(&mut self, new: [usize; N_SEQ], turn: usize) -> Vec<BatchToken> {
        let mut batch = Vec::new();
        let mut done = [0; N_SEQ];
        while (0..N_SEQ).any(|seq| done[seq] < new[seq]) {
            for seq in 0..N_SEQ {
                for _ in 0..turn.min(new[seq] - done[seq]) {
                    self.next_id += 1;
                    let pos = self.lists[seq].len() + done[seq];
                    batch.push(BatchToken { id: self.next_id % N_VOCAB as u32, seq, pos, output: false });
                    done[seq] += 1;
                }
            }
        }
        batch
    }

    /// Appends a micro-batch as a backend does.
    fn append(&mut self, micro_batch: &[BatchToken]) {
        self.table.append(micro_batch);
        let mut ids = self.lists.clone();
        for t in micro_batch {
            ids[t.seq].push(t.id);
        }
        let segments = self.table.segments(micro_batch).to_vec();
        self.compute(&segments, &ids);
        self.lists = ids;
    }

    /// Computes the states of sequences with these ids.
    fn compute(&mut self, segments: &[Segment], ids: &[Vec<u32>]) {
        for &Segment { seq, pos, n, from, to } in segments {
            let mut state = self.memory[from as usize];
            assert_eq!(state, state_of(&ids[seq][..pos]), "before {pos} of {seq}");
            state = ids[seq][pos..pos + n].iter().fold(state, |state, &id| step(state, id));
            assert!(to != 0, "the state of the empty text stays");
            self.memory[to as usize] = state;
        }
    }

    /// Greedy decoding with lookahead: a queued step is not computed again when its token arrives.
    fn decode(&mut self, seqs: [bool; N_SEQ], n: usize, depth: usize, turns: usize) {
        let mut queued: VecDeque<Vec<Segment>> = VecDeque::new();
        for i in 0..n {
            if i == turns {
                queued.clear();
                self.table.release();
            }
            let batch = self.batch(seqs.map(usize::from), 1);
            // The expected tokens: the next id depends on the position.
            let expect = |t: &BatchToken, pos: usize| BatchToken { id: (pos % 99) as u32, pos, ..*t };
            let batch: Vec<_> = batch.iter().map(|t| expect(t, t.pos)).collect();
            if self.table.check(&batch, N_VOCAB, &[]).is_err() {
                break;
            }
            self.table.begin_batch(&batch, &[]);
            match queued.pop_front() {
                Some(computed) => {
                    self.table.append(&batch);
                    assert_eq!(self.table.segments(&batch), computed, "what the step did that was queued");
                    for t in &batch {
                        self.lists[t.seq].push(t.id);
                    }
                }
                None => self.append(&batch),
            }
            let mut ids = self.lists.clone();
            for ahead in 1..=depth {
                for t in &batch {
                    ids[t.seq].push(expect(t, t.pos + ahead).id);
                }
                if ahead > queued.len() {
                    if !self.table.reserve(&batch, ahead) {
                        break;
                    }
                    let segments = self.table.segments_ahead(&batch, ahead);
                    self.compute(&segments, &ids);
                    queued.push_back(segments);
                }
            }
            for t in &batch {
                assert_eq!(self.table.reachable(t.seq, t.pos), t.pos, "without the last token");
            }
        }
        self.table.release();
    }

    fn run(&mut self, action: &Action) {
        match *action {
            Action::Append(new, turn) => {
                let batch = self.batch(new, turn);
                match self.table.check(&batch, N_VOCAB, &[]) {
                    Ok(()) => {
                        let before: Vec<_> = self.lists.iter().map(Vec::len).collect();
                        self.table.begin_batch(&batch, &[]);
                        for micro_batch in batch.chunks(self.n_ubatch) {
                            self.append(micro_batch);
                        }
                        for seq in (0..N_SEQ).filter(|&seq| new[seq] > 0) {
                            assert_eq!(self.table.reachable(seq, before[seq]), before[seq], "before the batch");
                            let last = self.lists[seq].len() - 1;
                            assert_eq!(self.table.reachable(seq, last), last, "without the last token");
                        }
                    }
                    Err(ForwardError::EmptyPrompt | ForwardError::ContextFull { .. }) => {}
                    Err(ForwardError::OutOfStates { needed, free, total }) => {
                        assert!(needed > free && self.table.capacity.n_windows.is_some());
                        let others = self.lists.iter().filter(|list| !list.is_empty()).count();
                        assert!(2 * new.iter().filter(|n| **n > 0).count() + others > total);
                    }
                    Err(error) => panic!("{error}"),
                }
            }
            Action::Fail(new, n_micro_batches) => {
                let batch = self.batch(new, N_CTX);
                if self.table.check(&batch, N_VOCAB, &[]).is_ok() {
                    let before = self.lists.clone();
                    self.table.begin_batch(&batch, &[]);
                    for micro_batch in batch.chunks(self.n_ubatch).take(n_micro_batches) {
                        self.append(micro_batch);
                    }
                    self.table.retract(&batch);
                    self.lists = before;
                }
            }
            Action::Rewind(seq, n) => {
                let reachable = self.table.reachable(seq, n);
                let reached = self.table.rewind(seq, n);
                assert!(reached == reachable && reached <= self.lists[seq].len());
                assert!(reached <= n || reached == self.lists[seq].len());
                self.lists[seq].truncate(reached);
            }
            Action::Share(from, to, n) => match self.table.share(from, to, n) {
                Ok(reached) => self.lists[to] = self.lists[from][..reached].to_vec(),
                Err(error) => assert!(matches!(error, ForwardError::PrefixTooLong { .. }), "{error}"),
            },
            Action::Verify(new, n_holds) => {
                let batch = self.batch(new, N_CTX);
                let drafted: Vec<usize> = (0..N_SEQ).filter(|&seq| new[seq] > 1).collect();
                if self.table.check(&batch, N_VOCAB, &drafted).is_err() {
                    return;
                }
                let before = self.lists.clone();
                self.table.begin_batch(&batch, &drafted);
                for micro_batch in batch.chunks(self.n_ubatch) {
                    self.append(micro_batch);
                }
                for seq in (0..N_SEQ).filter(|&seq| new[seq] > 0) {
                    // Drafts are cut back one after the other, as a generator reads their rows.
                    let n = before[seq].len() + 1 + n_holds.min(new[seq] - 1);
                    for n in [n, n - 1] {
                        assert_eq!(self.table.rewind(seq, n), n, "with {n} of {}", self.lists[seq].len());
                        self.lists[seq].truncate(n);
                    }
                    let saved = self.table.extent(seq).unwrap().states;
                    let is_checkpoint = |pos: &&usize| pos.is_multiple_of(PAGE);
                    assert!(saved.iter().filter(|pos| !is_checkpoint(pos)).count() <= 3, "{saved:?}");
                }
            }
            Action::Decode { seqs, n, depth, turns } => self.decode(seqs, n, depth, turns),
            Action::Again(seq) => {
                let mut new = [0; N_SEQ];
                new[seq] = 1;
                self.run(&Action::Append(new, 1));
                if let Some(last) = self.lists[seq].len().checked_sub(1) {
                    let reached = self.table.rewind(seq, last);
                    self.lists[seq].truncate(reached);
                    self.run(&Action::Append(new, 1));
                }
            }
        }
    }

    fn check(&self) {
        let states = self.states();
        let mut counts = vec![0; states.counts.len()];
        counts[0] = 1;
        for (seq, list) in self.lists.iter().enumerate() {
            assert_eq!(self.table.n_past(seq), list.len());
            let kept = &states.kept[seq];
            assert_eq!(kept.last().map_or(0, |state| state.pos), list.len());
            assert!(kept.windows(2).all(|pair| pair[0].pos < pair[1].pos), "{kept:?}");
            for state in kept {
                assert_eq!(self.memory[state.slot as usize], state_of(&list[..state.pos]), "{} of {seq}", state.pos);
                counts[state.slot as usize] += 1;
            }
        }
        assert_eq!(states.counts, counts);
        let unused = (0..counts.len() as u32).filter(|&slot| counts[slot as usize] == 0);
        assert!(unused.eq(states.free.iter().copied()));
        assert!(counts.len() <= states.capacity.n_states + 1);
        assert_eq!(self.memory[0], 0);
        let usage = self.table.usage().states;
        let held: Vec<u32> = (1..counts.len() as u32).filter(|&slot| counts[slot as usize] > 0).collect();
        let goes_on = |slot: &u32| states.kept.iter().any(|kept| kept.last().is_some_and(|state| state.slot == *slot));
        assert_eq!((usage.total, usage.total - usage.free), (states.capacity.n_states, held.len()));
        assert_eq!(usage.checkpoints, held.iter().filter(|slot| !goes_on(slot)).count());
    }
}

proptest! {
    #[test]
    fn states_are_those_of_sequences_computed_from_scratch(
        n_states in prop_oneof![Just(0), Just(3), Just(100)],
        n_windows in prop::option::of(2..N_SEQ),
        n_ubatch in prop_oneof![Just(5), Just(PAGE), Just(200), Just(4 * N_CTX)],
        actions in prop::collection::vec(action(), 1..50),
    ) {
        let mut cache = Cache::new(n_states, n_windows, n_ubatch);
        for action in &actions {
            cache.run(action);
            cache.check();
        }
        (0..N_SEQ).for_each(|seq| cache.run(&Action::Rewind(seq, 0)));
        cache.check();
        prop_assert_eq!(cache.states().free.len() + 1, cache.states().counts.len());
    }
}

#[test]
fn sequences_can_be_cut_back_to_ends_of_pages() {
    let mut cache = Cache::new(100, None, N_CTX);
    cache.run(&Action::Append([4 * PAGE + 10, 0, 0, 0], N_CTX));
    for (n, reached) in [
        (4 * PAGE + 10, 4 * PAGE + 10),
        (4 * PAGE + 9, 4 * PAGE + 9),
        (4 * PAGE + 8, 4 * PAGE),
        (3 * PAGE + 5, 3 * PAGE),
        (PAGE, PAGE),
        (PAGE - 1, 0),
    ] {
        assert_eq!(cache.table.reachable(0, n), reached, "{n}");
    }
    // Everything is shared: new states only for new tokens.
    let n_held = |cache: &Cache| cache.states().counts.iter().filter(|n| **n > 0).count();
    let before = n_held(&cache);
    for seq in 1..N_SEQ {
        cache.run(&Action::Share(0, seq, 2 * PAGE + 7));
        assert_eq!(cache.lists[seq].len(), 2 * PAGE);
    }
    assert_eq!(n_held(&cache), before);
    cache.run(&Action::Append([0, 1, 1, 1], 1));
    assert_eq!(n_held(&cache), before + 3);
    cache.check();
}

#[test]
fn checkpoints_grow_thin_with_age() {
    let mut cache = Cache::new(0, Some(2), N_CTX);
    let kept = |cache: &Cache| -> Vec<usize> { cache.states().kept[0].iter().map(|state| state.pos).collect() };
    // Six slots for one sequence: the ends of all pages are there.
    cache.run(&Action::Append([5 * PAGE - 1, 0, 0, 0], N_CTX));
    assert_eq!(kept(&cache), [PAGE, 2 * PAGE, 3 * PAGE, 4 * PAGE, 5 * PAGE - 2, 5 * PAGE - 1]);
    assert_eq!(cache.table.usage().states, StateUse { total: 6, free: 0, checkpoints: 5 });
    // Another sequence takes two.
    cache.run(&Action::Append([0, 20, 0, 0], N_CTX));
    assert_eq!(kept(&cache), [2 * PAGE, 4 * PAGE, 5 * PAGE - 2, 5 * PAGE - 1]);
    cache.check();
    assert_eq!(cache.table.usage().states, StateUse { total: 6, free: 0, checkpoints: 4 });
    cache.run(&Action::Rewind(0, 0));
    assert_eq!(cache.table.usage().states, StateUse { total: 6, free: 4, checkpoints: 1 });
}

#[test]
fn steps_run_ahead_as_far_as_there_are_slots() {
    let token = |pos| [BatchToken { id: 0, seq: 0, pos, output: true }];
    for (n_states, expected) in [(0, 1), (1, 2), (100, 3)] {
        // Three for the running sequence, of which two are needed.
        let mut cache = Cache::new(n_states, Some(1), N_CTX);
        cache.run(&Action::Append([10, 0, 0, 0], 1));
        cache.table.begin_batch(&token(10), &[]);
        cache.append(&token(10));
        assert_eq!((1..=3).take_while(|&n| cache.table.reserve(&token(10), n)).count(), expected, "{n_states} more");
        let states = cache.states();
        assert_eq!(states.counts.iter().filter(|n| **n > 0).count(), 1 + 2 + expected);
        cache.table.release();
        cache.check();
        // A checkpoint is replaced by a lookahead step, and another one is made.
        cache.run(&Action::Decode { seqs: [true, false, false, false], n: 2 * PAGE, depth: 2, turns: 2 * PAGE });
        cache.check();
        let checkpoint = if n_states == 100 { PAGE } else { 0 };
        assert_eq!(cache.table.reachable(0, PAGE + 1), checkpoint, "{n_states} more");
    }
}

#[test]
fn lookahead_of_a_sequence_that_is_cut_is_discarded() {
    let mut cache = Cache::new(0, None, N_CTX);
    cache.run(&Action::Append([20, 0, 0, 0], 1));
    let last = [BatchToken { id: 0, seq: 0, pos: 19, output: true }];
    assert!(cache.table.reserve(&last, 2));
    assert_eq!(cache.states().reserved[0].len(), 2);
    cache.run(&Action::Rewind(0, 19));
    assert_eq!(cache.states().reserved[0].len(), 0);
    cache.check();
    assert_eq!(cache.table.segments(&[]), []);
}

#[test]
fn checkpoints_at_turns_stay_longest() {
    let mut cache = Cache::new(1, Some(1), N_CTX);
    let kept = |cache: &Cache| -> Vec<usize> { cache.states().kept[0].iter().map(|state| state.pos).collect() };
    // Four slots. A turn begins in the second page: its ends stay while later tokens are added one by one.
    cache.run(&Action::Append([PAGE + 5, 0, 0, 0], N_CTX));
    cache.run(&Action::Decode { seqs: [true, false, false, false], n: 3 * PAGE, depth: 0, turns: N_CTX });
    assert_eq!(cache.lists[0].len(), 4 * PAGE + 5);
    assert!(kept(&cache).contains(&PAGE), "{:?}", kept(&cache));
    assert_eq!(cache.table.reachable(0, PAGE + 3), PAGE);
    cache.check();
    // Tokens added many at a time make no turn.
    cache.run(&Action::Rewind(0, 0));
    cache.run(&Action::Append([4 * PAGE + 5, 0, 0, 0], N_CTX));
    cache.run(&Action::Append([50, 0, 0, 0], 1));
    assert!(!kept(&cache).contains(&PAGE), "{:?}", kept(&cache));
}
