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
}

fn action() -> impl Strategy<Value = Action> {
    let length = prop_oneof![0..4usize, 0..N_CTX, Just(PAGE), Just(2 * PAGE)];
    let seq = 0..N_SEQ;
    prop_oneof![
        3 => prop::array::uniform4(prop_oneof![2 => Just(0), 1 => length.clone()]).prop_map(Action::Append),
        1 => (seq.clone(), length.clone()).prop_map(|(seq, n)| Action::Truncate(seq, n)),
        2 => (seq.clone(), seq, length).prop_map(|(from, to, n)| Action::Share(from, to, n)),
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
                                assert!(needed > free && free == self.table.usage().free);
                                // A copy takes a page at most for each sequence.
                                let grown = |seq: usize| (self.lists[seq].len() + new[seq]).div_ceil(PAGE) + 1;
                                assert!((0..N_SEQ).map(grown).sum::<usize>() > N_PAGES);
                            }
                            error => panic!("{error}"),
                        }
                    }
                }
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

    fn check(&self) {
        let mut counts = [0; N_PAGES];
        for (seq, list) in self.lists.iter().enumerate() {
            assert_eq!(self.table.n_past(seq), list.len());
            assert_eq!(self.table.pages(seq).len(), list.len().div_ceil(PAGE));
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
        assert_eq!(self.table.usage().free, counts.iter().filter(|&&n| n == 0).count());
        let mut free = self.table.free.clone();
        free.sort_unstable();
        free.dedup();
        assert_eq!(free.len(), self.table.free.len());
        assert!(free.iter().all(|&page| counts[page as usize] == 0));
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
fn a_single_sequence_lies_in_order() {
    let mut cache = Cache::new();
    cache.run(&Action::Append([3 * PAGE, 0, 0, 0]));
    assert_eq!(cache.table.pages(0), [0, 1, 2]);
    cache.run(&Action::Truncate(0, 0));
    cache.run(&Action::Append([2 * PAGE + 1, 0, 0, 0]));
    assert_eq!(cache.table.pages(0), [0, 1, 2]);
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
