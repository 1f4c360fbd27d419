use super::*;
use crate::Mask;
use proptest::prelude::*;

const N_SEQ: usize = 4;
const N_PAGES: usize = 7;
const N_CTX: usize = 3 * PAGE;
const N_VOCAB: usize = 1000;
/// Maximum tokens appended at once.
const N_UBATCH: usize = PAGE;

/// A change of the cache.
#[derive(Debug, Clone)]
enum Action {
    /// Appends this many tokens to each sequence, interleaved.
    Append([usize; N_SEQ]),
    Rewind(usize, usize),
    Share(usize, usize, usize),
    /// Reserves this many tokens for the marked sequences, and writes them to the pages ahead of time.
    Reserve([bool; N_SEQ], usize),
    Release,
}

fn action(n_ctx: usize) -> impl Strategy<Value = Action> {
    let length = prop_oneof![0..4usize, 0..n_ctx, Just(PAGE), Just(2 * PAGE)];
    let seq = 0..N_SEQ;
    prop_oneof![
        3 => prop::array::uniform4(prop_oneof![2 => Just(0), 1 => length.clone()]).prop_map(Action::Append),
        1 => (seq.clone(), length.clone()).prop_map(|(seq, n)| Action::Rewind(seq, n)),
        2 => (seq.clone(), seq, length.clone()).prop_map(|(from, to, n)| Action::Share(from, to, n)),
        1 => (any::<[bool; N_SEQ]>(), length).prop_map(|(seqs, n)| Action::Reserve(seqs, n)),
        1 => Just(Action::Release),
    ]
}

/// A cache of token ids, page by page, as a backend would keep keys, beside the plain lists that it represents.
struct Cache {
    table: PageTable,
    /// The pages of each group.
    memory: Vec<Vec<[u32; PAGE]>>,
    lists: Vec<Vec<u32>>,
    /// The longest length that each sequence ever had, reserved tokens included, and that of those it was shared from.
    longest: Vec<usize>,
    next_id: u32,
}

impl Cache {
    /// A cache whose layers attend to everything.
    fn new() -> Self {
        Self::with(&[], N_CTX, N_PAGES, None)
    }

    fn with(masks: &[Mask], n_ctx: usize, n_pages: usize, n_windows: Option<usize>) -> Self {
        let capacity = Capacity {
            n_ctx,
            n_seq: N_SEQ,
            n_cache: Some(n_pages * PAGE),
            n_windows,
            state_cache: 0,
            n_ubatch: N_UBATCH,
        };
        let groups = CacheGroups::of_masks(capacity, masks.iter().copied());
        assert_eq!(groups.groups().len(), 1 + masks.len());
        Self {
            table: PageTable::new(&groups),
            memory: groups.groups().iter().map(|group| vec![[0; PAGE]; group.n_pages]).collect(),
            lists: vec![Vec::new(); N_SEQ],
            longest: vec![0; N_SEQ],
            next_id: 0,
        }
    }

    fn batch(&mut self, new: [usize; N_SEQ]) -> Vec<BatchToken> {
        let mut batch = Vec::new();
        for i in 0..=self.table.capacity.n_ctx {
            for seq in (0..N_SEQ).filter(|&seq| i < new[seq]) {
                self.next_id += 1;
                let pos = self.lists[seq].len() + i;
                batch.push(BatchToken { id: self.next_id % N_VOCAB as u32, seq, pos, output: false });
            }
        }
        batch
    }

    fn place(&mut self, group: usize, seq: usize, pos: usize) -> &mut u32 {
        &mut self.memory[group][self.table.page(group, seq, pos) as usize][pos % PAGE]
    }

    /// Appends a micro-batch of a checked batch, as backends do, and checks what its tokens attend to.
    fn append(&mut self, micro_batch: &[BatchToken]) -> Vec<PageCopy> {
        let copies = self.table.append(micro_batch);
        for &PageCopy { group, from, to } in &copies {
            self.memory[group][to as usize] = self.memory[group][from as usize];
        }
        for t in micro_batch {
            self.lists[t.seq].push(t.id);
            self.longest[t.seq] = self.longest[t.seq].max(t.pos + 1);
        }
        for group in 0..self.table.n_groups() {
            for t in micro_batch {
                *self.place(group, t.seq, t.pos) = t.id;
            }
            for t in micro_batch {
                self.see(group, t.seq, t.pos);
            }
        }
        copies
    }

    /// Checks what a token at `pos` attends to in its sequence so far.
    fn see(&self, group: usize, seq: usize, pos: usize) {
        let seen = self.table.pools[group].group.mask.seen(pos, pos + 1);
        for pos in seen.start..seen.end.min(self.lists[seq].len()) {
            let page = self.table.page(group, seq, pos);
            assert_eq!(self.memory[group][page as usize][pos % PAGE], self.lists[seq][pos], "position {pos} of {seq}");
        }
    }

    /// Whether sequence `seq` could continue from its first `n` tokens, by the pages that it has.
    fn can_continue(&self, seq: usize, n: usize) -> bool {
        self.table.pools.iter().all(|pool| {
            let first = pool.group.mask.seen(n, n + 1).start;
            first >= pool.lists[seq].n_dropped * PAGE || first == n && n.is_multiple_of(PAGE)
        })
    }

    fn run(&mut self, action: &Action) {
        let n_ctx = self.table.capacity.n_ctx;
        match *action {
            Action::Append(new) => {
                let batch = self.batch(new);
                let needed = |pool: &PagePool| pool.pages_needed(&self.table.n_past, &new);
                let left: Vec<_> = self.table.pools.iter().map(|p| p.n_free().checked_sub(needed(p))).collect();
                match self.table.check(&batch, N_VOCAB, &[]) {
                    Ok(()) => {
                        batch.chunks(N_UBATCH).for_each(|micro_batch| drop(self.append(micro_batch)));
                        let found: Vec<_> = self.table.pools.iter().map(|pool| Some(pool.n_free())).collect();
                        assert_eq!(found, left);
                    }
                    Err(ForwardError::EmptyPrompt) => assert!(batch.is_empty()),
                    Err(ForwardError::ContextFull { seq, .. }) => assert!(self.lists[seq].len() + new[seq] > n_ctx),
                    Err(ForwardError::OutOfPages { needed, free, .. }) if left[0].is_some() => {
                        assert!(needed > free && self.table.capacity.n_windows.is_some());
                        let alone = new.iter().filter(|n| **n > 0).count() == 1;
                        let others = |seq: usize| new[seq] == 0 && !self.lists[seq].is_empty();
                        assert!(!alone || self.n_reserved() > 0 || (0..N_SEQ).any(others));
                    }
                    Err(ForwardError::OutOfPages { needed, free, total, .. }) => {
                        // With a whole window for each sequence, windows are never short.
                        let for_all = |pool: &PagePool| pool.group.n_pages >= N_SEQ * pool.group.max_pages_per_sequence;
                        let mut windows = self.table.pools.iter().zip(&left).skip(1);
                        assert!(windows.all(|(pool, left)| left.is_some() || !for_all(pool)));
                        assert!(needed > free && free + self.n_reserved() == self.table.usage().free);
                        // A copy takes at most one page for each sequence.
                        let grown = |seq: usize| (self.lists[seq].len() + new[seq]).div_ceil(PAGE) + 1;
                        assert!((0..N_SEQ).map(grown).sum::<usize>() + self.n_reserved() > total);
                    }
                    Err(error) => panic!("{error}"),
                }
            }
            Action::Reserve(seqs, n) => {
                let seqs: Vec<usize> = (0..N_SEQ).filter(|&seq| seqs[seq]).collect();
                let batch: Vec<_> = seqs
                    .iter()
                    .map(|&seq| BatchToken { id: 0, seq, pos: self.lists[seq].len(), output: true })
                    .collect();
                let before = format!("{:?}", self.table);
                if self.table.reserve(&batch, n) {
                    for &seq in &seqs {
                        let end = self.lists[seq].len() + n;
                        self.longest[seq] = self.longest[seq].max(end);
                        for group in 0..self.table.n_groups() {
                            (end - n..end).for_each(|pos| self.see(group, seq, pos));
                            (end - n..end).for_each(|pos| *self.place(group, seq, pos) = u32::MAX);
                        }
                    }
                } else {
                    assert_eq!(format!("{:?}", self.table), before);
                    let full = |&seq: &usize| self.lists[seq].len() + n > n_ctx;
                    let pages = |&seq: &usize| (self.lists[seq].len() + n).div_ceil(PAGE);
                    let shared = |&seq: &usize| {
                        let n_past = self.lists[seq].len();
                        is_partly_filled(n_past) && self.table.pools[0].holders(seq, n_past) > 1
                    };
                    let free = self.table.usage().free - self.n_reserved();
                    let has = |&seq: &usize| self.table.pages(0, seq).len();
                    let needed: usize = seqs.iter().map(|seq| pages(seq).saturating_sub(has(seq))).sum();
                    let too_far = self.table.n_groups() > 1 && n >= N_UBATCH;
                    let no_windows = self.table.capacity.n_windows.is_some();
                    assert!(too_far || no_windows || seqs.iter().any(full) || seqs.iter().any(shared) || needed > free);
                }
            }
            Action::Release => {
                self.table.release();
                assert_eq!(self.n_reserved(), 0);
            }
            Action::Rewind(seq, n) => {
                let known = self.lists[seq].len();
                let possible = (0..=n.min(known)).rev().find(|&n| n == known || self.can_continue(seq, n));
                let reached = self.table.rewind(seq, n);
                assert_eq!(Some(reached), possible);
                self.lists[seq].truncate(reached);
                if reached == 0 {
                    self.longest[seq] = 0;
                }
            }
            Action::Share(from, to, n) => {
                let known = self.lists[from].len();
                let possible = (0..=n.min(known)).rev().find(|&n| n == known || self.can_continue(from, n));
                match self.table.share(from, to, n) {
                    Ok(reached) => {
                        assert_eq!(Some(reached), possible);
                        self.lists[to] = self.lists[from][..reached].to_vec();
                        self.longest[to] = if reached == 0 { 0 } else { self.longest[from] };
                    }
                    Err(error) => {
                        assert_eq!(error, ForwardError::PrefixTooLong { seq: from, n, n_past: known });
                        assert!(n > known);
                    }
                }
            }
        }
    }

    fn n_reserved(&self) -> usize {
        (0..N_SEQ).map(|seq| self.table.pages(0, seq).len() - self.lists[seq].len().div_ceil(PAGE)).sum()
    }

    fn check(&self) {
        for (seq, list) in self.lists.iter().enumerate() {
            assert_eq!(self.table.n_past(seq), list.len());
            for n in self.longest[seq].saturating_sub(N_UBATCH)..=list.len() {
                assert_eq!(self.table.reachable(seq, n), n, "of {}, once {}", list.len(), self.longest[seq]);
            }
        }
        for (group, pool) in self.table.pools.iter().enumerate() {
            let mut counts = vec![0; pool.group.n_pages];
            for (seq, list) in self.lists.iter().enumerate() {
                self.see(group, seq, list.len());
                let n_dropped = pool.lists[seq].n_dropped;
                assert!(group > 0 || n_dropped == 0);
                let held = &pool.pages(seq)[n_dropped..];
                assert!(held.len() <= pool.group.max_pages_per_sequence, "{held:?}");
                assert!(pool.pages(seq).len() >= list.len().div_ceil(PAGE));
                let reserved = &pool.pages(seq)[list.len().div_ceil(PAGE)..];
                assert!(reserved.iter().all(|&page| pool.counts[page as usize] == 1));
                for &page in held {
                    counts[page as usize] += 1;
                }
            }
            let handed_out = pool.counts.len();
            assert_eq!(pool.counts, counts[..handed_out]);
            assert!(counts[handed_out..].iter().all(|&n| n == 0));
            let unused = counts.iter().filter(|&&n| n == 0).count();
            assert_eq!(pool.n_free(), unused);
            assert!(pool.free.iter().all(|&page| counts[page as usize] == 0));
        }
        let usage = self.table.usage();
        assert_eq!(usage.free, self.table.pools[0].n_free() + self.n_reserved());
        let all: Vec<usize> = (0..N_SEQ).collect();
        assert_eq!(self.table.pages_held(&all), usage.total - usage.free);
        for (seq, list) in self.lists.iter().enumerate() {
            assert_eq!(self.table.pages_held(&[seq]), list.len().div_ceil(PAGE));
        }
    }

    /// Runs all, checks everything after each, and empties the cache.
    fn run_all(&mut self, actions: &[Action]) {
        for action in actions {
            self.run(action);
            self.check();
        }
        self.run(&Action::Release);
        for seq in 0..N_SEQ {
            self.run(&Action::Rewind(seq, 0));
        }
        self.check();
        assert!(self.table.pools.iter().all(|pool| pool.n_free() == pool.group.n_pages));
    }
}

/// Windows and chunks of more and less than a page, aligned and not.
const MASKS: [Mask; 7] = [
    Mask::Window(1),
    Mask::Window(2),
    Mask::Window(100),
    Mask::Window(2 * PAGE),
    Mask::Chunk(96),
    Mask::Chunk(2 * PAGE),
    Mask::Chunk(150),
];

proptest! {
    #[test]
    fn pages_hold_what_lists_would(
        n_pages in prop_oneof![Just(2), Just(N_PAGES)],
        actions in prop::collection::vec(action(N_CTX), 1..60),
    ) {
        let mut cache = Cache::with(&[], N_CTX, n_pages, None);
        cache.run_all(&actions);
        prop_assert_eq!(cache.table.usage(), PageUse { page_len: PAGE, total: n_pages, free: n_pages, ..Default::default() });
    }

    #[test]
    fn windows_and_chunks_hold_what_is_attended_to(
        masks in prop::sample::subsequence(MASKS.to_vec(), 1..4),
        n_pages in prop_oneof![Just(7), Just(9), Just(20), Just(4 * 9)],
        n_windows in prop::option::of(1..N_SEQ),
        actions in prop::collection::vec(action(9 * PAGE), 1..60),
    ) {
        Cache::with(&masks, 9 * PAGE, n_pages, n_windows).run_all(&actions);
    }
}

#[test]
fn a_shared_page_is_copied_by_all_but_the_last_to_grow() {
    let mut cache = Cache::new();
    cache.run(&Action::Append([PAGE + 10, 0, 0, 0]));
    cache.run(&Action::Share(0, 1, PAGE + 5));
    cache.run(&Action::Share(0, 2, PAGE));
    cache.run(&Action::Share(0, 3, PAGE + 10));
    assert_eq!(cache.table.usage().free, N_PAGES - 2);
    assert_eq!((cache.table.pages_held(&[0, 1, 2, 3]), cache.table.pages_held(&[2])), (2, 1));
    let batch = cache.batch([1, 1, 1, 1]);
    let copies = cache.append(&batch);
    // Sequences 0 and 1 copy the second page, 3 keeps it, 2 starts a new page.
    assert_eq!(copies, [PageCopy { group: 0, from: 1, to: 2 }, PageCopy { group: 0, from: 1, to: 3 }]);
    assert_eq!(cache.table.pages(0, 2), [0, 4]);
    assert_eq!(cache.table.pages(0, 3), [0, 1]);
    assert_eq!(cache.table.usage().free, N_PAGES - 5);
    assert_eq!(
        (cache.table.pages_held(&[0, 1]), cache.table.pages_held(&[1, 3]), cache.table.pages_held(&[])),
        (3, 3, 0)
    );
}

#[test]
fn a_sequence_restarts_where_nothing_lost_is_attended_to() {
    for (mask, n, reached) in [
        (Mask::Window(1), 65, PAGE),
        (Mask::Window(1), 63, 0),
        (Mask::Window(2), 65, 0),
        (Mask::Chunk(96), 200, 3 * PAGE),
        (Mask::Chunk(96), 110, 0),
        (Mask::Chunk(2 * PAGE), 3 * PAGE, 2 * PAGE),
    ] {
        let mut cache = Cache::with(&[mask], 9 * PAGE, 9, None);
        cache.run(&Action::Append([9 * PAGE, 0, 0, 0]));
        assert_eq!(cache.table.reachable(0, n), reached, "{mask:?}");
        cache.run_all(&[Action::Share(0, 1, n), Action::Rewind(0, n), Action::Append([PAGE, PAGE, 0, 0])]);
    }
}

#[test]
fn a_sequence_alone_has_contiguous_pages() {
    let mut cache = Cache::new();
    cache.run(&Action::Append([3 * PAGE, 0, 0, 0]));
    assert_eq!(cache.table.pages(0, 0), [0, 1, 2]);
    cache.run(&Action::Rewind(0, 0));
    cache.run(&Action::Append([2 * PAGE + 1, 0, 0, 0]));
    assert_eq!(cache.table.pages(0, 0), [0, 1, 2]);
    assert!(cache.table.pages_are_contiguous(0));
    // Its own prefix, and tokens that are reserved and released, more than before.
    cache.run(&Action::Share(0, 0, PAGE - 3));
    cache.run(&Action::Reserve([true, false, false, false], PAGE));
    assert_eq!(cache.table.pages(0, 0), [0, 1]);
    cache.run(&Action::Release);
    cache.run(&Action::Append([2 * PAGE, 0, 0, 0]));
    assert_eq!(cache.table.pages(0, 0), [0, 1, 2]);
    // Two that grow alternately do not, but one that is alone afterwards does.
    cache.run(&Action::Rewind(0, PAGE));
    cache.run(&Action::Append([0, PAGE, 0, 0]));
    cache.run(&Action::Append([PAGE, PAGE, 0, 0]));
    assert_eq!((cache.table.pages(0, 0), cache.table.pages(0, 1)), (&[0, 2][..], &[1, 3][..]));
    assert!(!cache.table.pages_are_contiguous(0) && !cache.table.pages_are_contiguous(1));
    cache.run(&Action::Rewind(0, 0));
    cache.run(&Action::Rewind(1, 0));
    cache.run(&Action::Append([0, 0, 3 * PAGE, 0]));
    assert_eq!(cache.table.pages(0, 2), [0, 1, 2]);
}

#[test]
fn reserved_pages_are_used_first_and_released() {
    let mut cache = Cache::new();
    cache.run(&Action::Append([PAGE - 1, PAGE - 1, 0, 0]));
    cache.run(&Action::Reserve([true, true, false, false], 2));
    assert_eq!((cache.table.pages(0, 0), cache.table.pages(0, 1)), (&[0, 2][..], &[1, 3][..]));
    assert_eq!(cache.table.usage().free, N_PAGES - 2);
    cache.run(&Action::Append([2, 1, 0, 0]));
    assert_eq!((cache.table.pages(0, 0), cache.table.pages(0, 1)), (&[0, 2][..], &[1, 3][..]));
    assert_eq!(cache.table.usage().free, N_PAGES - 3);
    // All or nothing.
    let token = |seq| BatchToken { id: 0, seq, pos: 0, output: true };
    assert!(!cache.table.reserve(&[token(2), token(3)], 2 * PAGE));
    assert!(cache.table.reserve(&[token(2)], 2 * PAGE));
    let batch = cache.batch([0, 0, 0, 3 * PAGE]);
    let error = cache.table.check(&batch, N_VOCAB, &[]).unwrap_err();
    assert_eq!(error, ForwardError::OutOfPages { needed: 3, free: 1, total: 7, page_len: PAGE });
    cache.table.release();
    assert_eq!(cache.table.check(&batch, N_VOCAB, &[]), Ok(()));
    cache.append(&batch);
    // A shared page is not written to.
    cache.table.share(0, 2, PAGE - 1).unwrap();
    assert!(!cache.table.reserve(&[token(2)], 1));
}

#[test]
fn a_batch_that_does_not_fit_is_refused() {
    let mut cache = Cache::new();
    cache.run(&Action::Append([3 * PAGE, 3 * PAGE, 0, 0]));
    let batch = cache.batch([0, 0, PAGE + 1, 0]);
    let error = cache.table.check(&batch, N_VOCAB, &[]).unwrap_err();
    assert_eq!(error, ForwardError::OutOfPages { needed: 2, free: 1, total: 7, page_len: PAGE });
    assert_eq!(
        cache.table.share(0, N_SEQ, 1).unwrap_err(),
        ForwardError::SequenceOutOfRange { seq: N_SEQ, n_seq: N_SEQ }
    );
}

#[test]
fn copies_that_were_not_made_leave_the_shared_page() {
    let mut cache = Cache::with(&[Mask::Window(10)], 9 * PAGE, 4 * 9, None);
    let first = cache.batch([30, 0, 0, 0]);
    assert!(cache.table.append(&first).is_empty());
    assert_eq!(cache.table.share(0, 1, 30), Ok(30));
    let pages = |cache: &Cache| [0, 1].map(|group| [0, 1].map(|seq| cache.table.pages(group, seq).to_vec()));
    let before = pages(&cache);
    let more: Vec<_> = (30..70).map(|pos| BatchToken { id: 1, seq: 1, pos, output: false }).collect();
    for n_made in 0..=2 {
        let copies = cache.table.append(&more);
        assert_eq!(copies.len(), 2, "one for each group");
        cache.table.cancel_copies(&copies[n_made..]);
        cache.table.retract(&more);
        let after = pages(&cache);
        let same: Vec<_> = [0, 1].iter().map(|&group| after[group][1] == before[group][1]).collect();
        assert_eq!(same, [n_made == 0, n_made < 2], "{n_made} copies were made");
        assert_eq!(after.map(|group| group[0].clone()), before.clone().map(|group| group[0].clone()));
        // The pages of both sequences are shared again.
        cache.table.rewind(1, 0);
        assert_eq!(cache.table.pages_held(&[0, 1]), 1);
        assert_eq!(cache.table.share(0, 1, 30), Ok(30));
    }
}
