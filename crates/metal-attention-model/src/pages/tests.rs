use super::*;
use proptest::prelude::*;

const N_SEQ: usize = 4;
const N_PAGES: usize = 7;
const N_CTX: usize = 3 * PAGE;
const N_VOCAB: usize = 1000;

/// What is done to a cache.
#[derive(Debug, Clone)]
enum Action {
    /// So many tokens to each sequence, interleaved.
    Append([usize; N_SEQ]),
    Truncate(usize, usize),
    Share(usize, usize, usize),
    /// So many tokens of each of the sequences, which are written to the pages ahead of the time.
    Reserve([bool; N_SEQ], usize),
    Release,
}

fn action() -> impl Strategy<Value = Action> {
    let length = prop_oneof![0..4usize, 0..N_CTX, Just(PAGE), Just(2 * PAGE)];
    let seq = 0..N_SEQ;
    prop_oneof![
        3 => prop::array::uniform4(prop_oneof![2 => Just(0), 1 => length.clone()]).prop_map(Action::Append),
        1 => (seq.clone(), length.clone()).prop_map(|(seq, n)| Action::Truncate(seq, n)),
        2 => (seq.clone(), seq, length.clone()).prop_map(|(from, to, n)| Action::Share(from, to, n)),
        1 => (any::<[bool; N_SEQ]>(), length).prop_map(|(seqs, n)| Action::Reserve(seqs, n)),
        1 => Just(Action::Release),
    ]
}

/// A cache of token ids, page by page, as a backend would hold keys, beside the plain lists it stands for.
struct Cache {
    table: PageTable,
    memory: Vec<[u32; PAGE]>,
    lists: Vec<Vec<u32>>,
    next_id: u32,
}

impl Cache {
    fn new() -> Self {
        Self {
            table: PageTable::new(N_PAGES, N_CTX, N_SEQ),
            memory: vec![[0; PAGE]; N_PAGES],
            lists: vec![Vec::new(); N_SEQ],
            next_id: 0,
        }
    }

    fn batch(&mut self, new: [usize; N_SEQ]) -> Vec<BatchToken> {
        let mut batch = Vec::new();
        for i in 0..N_CTX {
            for seq in (0..N_SEQ).filter(|&seq| i < new[seq]) {
                self.next_id += 1;
                let pos = self.lists[seq].len() + i;
                batch.push(BatchToken { id: self.next_id % N_VOCAB as u32, seq, pos, logits: false });
            }
        }
        batch
    }

    fn run(&mut self, action: &Action) {
        match *action {
            Action::Append(new) => {
                let batch = self.batch(new);
                let before = format!("{:?}", self.table);
                match self.table.append(&batch, N_VOCAB) {
                    Ok(copies) => {
                        for PageCopy { from, to } in copies {
                            self.memory[to as usize] = self.memory[from as usize];
                        }
                        for t in batch {
                            self.memory[self.table.page(t.seq, t.pos) as usize][t.pos % PAGE] = t.id;
                            self.lists[t.seq].push(t.id);
                        }
                    }
                    Err(error) => {
                        assert_eq!(format!("{:?}", self.table), before, "{error}");
                        match error {
                            ForwardError::EmptyPrompt => assert!(batch.is_empty()),
                            ForwardError::ContextFull { seq, .. } => {
                                assert!(self.lists[seq].len() + new[seq] > N_CTX);
                            }
                            ForwardError::OutOfPages { needed, free, .. } => {
                                assert!(needed > free && free + self.n_reserved() == self.table.usage().free);
                                // A copy takes a page at most for each sequence.
                                let grown = |seq: usize| (self.lists[seq].len() + new[seq]).div_ceil(PAGE) + 1;
                                assert!((0..N_SEQ).map(grown).sum::<usize>() + self.n_reserved() > N_PAGES);
                            }
                            error => panic!("{error}"),
                        }
                    }
                }
            }
            Action::Reserve(seqs, n) => {
                let seqs: Vec<usize> = (0..N_SEQ).filter(|&seq| seqs[seq]).collect();
                let batch: Vec<_> = seqs
                    .iter()
                    .map(|&seq| BatchToken { id: 0, seq, pos: self.lists[seq].len(), logits: true })
                    .collect();
                let before = format!("{:?}", self.table);
                if self.table.reserve(&batch, n) {
                    for (seq, pos) in seqs.iter().flat_map(|&seq| (0..n).map(move |i| (seq, i))) {
                        let pos = self.lists[seq].len() + pos;
                        self.memory[self.table.page(seq, pos) as usize][pos % PAGE] = u32::MAX;
                    }
                } else {
                    assert_eq!(format!("{:?}", self.table), before);
                    let full = |&seq: &usize| self.lists[seq].len() + n > N_CTX;
                    let pages = |&seq: &usize| (self.lists[seq].len() + n).div_ceil(PAGE);
                    let shared = |&seq: &usize| {
                        let page = self.table.partly_filled(seq);
                        page.is_some_and(|page| self.table.counts[page as usize] > 1)
                    };
                    let free = self.table.usage().free - self.n_reserved();
                    let has = |&seq: &usize| self.table.pages(seq).len();
                    let needed: usize = seqs.iter().map(|seq| pages(seq).saturating_sub(has(seq))).sum();
                    assert!(seqs.iter().any(full) || seqs.iter().any(shared) || needed > free);
                }
            }
            Action::Release => {
                self.table.release();
                assert_eq!(self.n_reserved(), 0);
            }
            Action::Truncate(seq, n) => {
                self.table.truncate(seq, n);
                self.lists[seq].truncate(n);
            }
            Action::Share(from, to, n) => {
                let known = self.lists[from].len();
                match self.table.share(from, to, n) {
                    Ok(()) => self.lists[to] = self.lists[from][..n].to_vec(),
                    Err(error) => {
                        assert_eq!(error, ForwardError::PrefixTooLong { seq: from, n, n_past: known });
                        assert!(n > known);
                    }
                }
            }
        }
    }

    fn n_reserved(&self) -> usize {
        (0..N_SEQ).map(|seq| self.table.pages(seq).len() - self.lists[seq].len().div_ceil(PAGE)).sum()
    }

    fn check(&self) {
        let mut counts = [0; N_PAGES];
        for (seq, list) in self.lists.iter().enumerate() {
            assert_eq!(self.table.n_past(seq), list.len());
            assert!(self.table.pages(seq).len() >= list.len().div_ceil(PAGE));
            let reserved = &self.table.pages(seq)[list.len().div_ceil(PAGE)..];
            assert!(reserved.iter().all(|&page| self.table.counts[page as usize] == 1));
            let read: Vec<u32> =
                (0..list.len()).map(|pos| self.memory[self.table.page(seq, pos) as usize][pos % PAGE]).collect();
            assert_eq!(&read, list, "sequence {seq}");
            for &page in self.table.pages(seq) {
                counts[page as usize] += 1;
            }
        }
        let handed_out = self.table.counts.len();
        assert_eq!(self.table.counts, counts[..handed_out]);
        assert!(counts[handed_out..].iter().all(|&n| n == 0));
        let unused = counts.iter().filter(|&&n| n == 0).count();
        assert_eq!(self.table.usage().free, unused + self.n_reserved());
        assert!(self.table.free.iter().all(|&page| counts[page as usize] == 0));
    }
}

proptest! {
    #[test]
    fn pages_hold_what_lists_would(actions in prop::collection::vec(action(), 1..60)) {
        let mut cache = Cache::new();
        for action in &actions {
            cache.run(action);
            cache.check();
        }
        cache.run(&Action::Release);
        for seq in 0..N_SEQ {
            cache.run(&Action::Truncate(seq, 0));
        }
        cache.check();
        prop_assert_eq!(cache.table.usage(), PageUse { page_len: PAGE, total: N_PAGES, free: N_PAGES });
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
    let batch = cache.batch([1, 1, 1, 1]);
    let copies = cache.table.append(&batch, N_VOCAB).unwrap();
    // Sequences 0 and 1 copy the second page, 3 keeps it, 2 begins a page of its own.
    assert_eq!(copies, [PageCopy { from: 1, to: 2 }, PageCopy { from: 1, to: 3 }]);
    assert_eq!(cache.table.pages(2), [0, 4]);
    assert_eq!(cache.table.pages(3), [0, 1]);
    assert_eq!(cache.table.usage().free, N_PAGES - 5);
}

#[test]
fn a_sequence_alone_lies_in_order() {
    let mut cache = Cache::new();
    cache.run(&Action::Append([3 * PAGE, 0, 0, 0]));
    assert_eq!(cache.table.pages(0), [0, 1, 2]);
    cache.run(&Action::Truncate(0, 0));
    cache.run(&Action::Append([2 * PAGE + 1, 0, 0, 0]));
    assert_eq!(cache.table.pages(0), [0, 1, 2]);
    assert!(cache.table.in_order(0));
    // A prefix of its own, tokens reserved and given back, more than before.
    cache.run(&Action::Share(0, 0, PAGE - 3));
    cache.run(&Action::Reserve([true, false, false, false], PAGE));
    assert_eq!(cache.table.pages(0), [0, 1]);
    cache.run(&Action::Release);
    cache.run(&Action::Append([2 * PAGE, 0, 0, 0]));
    assert_eq!(cache.table.pages(0), [0, 1, 2]);
    // Two that grow by turns do not, but whoever is alone after them does.
    cache.run(&Action::Truncate(0, PAGE));
    cache.run(&Action::Append([0, PAGE, 0, 0]));
    cache.run(&Action::Append([PAGE, PAGE, 0, 0]));
    assert_eq!((cache.table.pages(0), cache.table.pages(1)), (&[0, 2][..], &[1, 3][..]));
    assert!(!cache.table.in_order(0) && !cache.table.in_order(1));
    cache.run(&Action::Truncate(0, 0));
    cache.run(&Action::Truncate(1, 0));
    cache.run(&Action::Append([0, 0, 3 * PAGE, 0]));
    assert_eq!(cache.table.pages(2), [0, 1, 2]);
}

#[test]
fn reserved_pages_are_taken_first_and_given_back() {
    let mut cache = Cache::new();
    cache.run(&Action::Append([PAGE - 1, PAGE - 1, 0, 0]));
    cache.run(&Action::Reserve([true, true, false, false], 2));
    assert_eq!((cache.table.pages(0), cache.table.pages(1)), (&[0, 2][..], &[1, 3][..]));
    assert_eq!(cache.table.usage().free, N_PAGES - 2);
    cache.run(&Action::Append([2, 1, 0, 0]));
    assert_eq!((cache.table.pages(0), cache.table.pages(1)), (&[0, 2][..], &[1, 3][..]));
    assert_eq!(cache.table.usage().free, N_PAGES - 3);
    // All or nothing.
    let token = |seq| BatchToken { id: 0, seq, pos: 0, logits: true };
    assert!(!cache.table.reserve(&[token(2), token(3)], 2 * PAGE));
    assert!(cache.table.reserve(&[token(2)], 2 * PAGE));
    let batch = cache.batch([0, 0, 0, 3 * PAGE]);
    let error = cache.table.append(&batch, N_VOCAB).unwrap_err();
    assert_eq!(error, ForwardError::OutOfPages { needed: 3, free: 1, total: 7, page_len: PAGE });
    cache.table.release();
    assert!(cache.table.append(&batch, N_VOCAB).is_ok());
    // What is shared is not written to.
    cache.table.share(0, 2, PAGE - 1).unwrap();
    assert!(!cache.table.reserve(&[token(2)], 1));
}

#[test]
fn what_does_not_fit_is_refused() {
    let mut cache = Cache::new();
    cache.run(&Action::Append([3 * PAGE, 3 * PAGE, 0, 0]));
    let batch = cache.batch([0, 0, PAGE + 1, 0]);
    let error = cache.table.append(&batch, N_VOCAB).unwrap_err();
    assert_eq!(error, ForwardError::OutOfPages { needed: 2, free: 1, total: 7, page_len: PAGE });
    assert_eq!(
        cache.table.share(0, N_SEQ, 1).unwrap_err(),
        ForwardError::SequenceOutOfRange { seq: N_SEQ, n_seq: N_SEQ }
    );
}
