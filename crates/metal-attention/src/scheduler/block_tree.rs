//! The KV cache's whole pages as a tree of blocks, reported to an observer as they change.
//!
//! A router uses the reports to send a prompt to the worker that holds its prefix. Two sequences with the same first
//! tokens share blocks, even if each has its own copy of the pages.

use std::collections::HashMap;

/// Id of a block: the tokens of one page after all those before it in the sequence. An id is never used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub u64);

/// A change of the blocks in the KV cache.
///
/// A prompt that begins with the tokens of stored blocks, from a sequence's start, finds their pages. In models with
/// sliding windows or recurrent states it may find fewer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CacheEvent {
    /// Blocks that are now in the KV cache.
    Stored {
        /// The block before the first of them; `None` at the start of a sequence.
        parent: Option<BlockId>,
        /// The blocks, each following the one before.
        blocks: Vec<BlockId>,
        /// Their tokens, one page for each block.
        tokens: Vec<u32>,
    },
    /// Blocks that are no longer in the KV cache. A block comes after those that follow it in the tree.
    Removed {
        /// The blocks.
        blocks: Vec<BlockId>,
    },
}

/// Receives every change, on the engine's thread: it should return at once. A panic in it ends the thread.
pub type CacheObserver = Box<dyn FnMut(CacheEvent) + Send>;

/// A cache sequence whose tokens prompts can share.
pub(super) struct EvaluatedSequence<'a> {
    /// Index of the cache sequence.
    pub seq: usize,
    /// Changes when the cache sequence may hold other tokens than before, and not only more or fewer.
    pub use_number: u64,
    /// Its evaluated tokens.
    pub ids: &'a [u32],
}

/// The blocks of all cache sequences: a tree whose nodes count the sequences that hold them.
pub(super) struct BlockTree {
    /// Tokens of a block.
    page_len: usize,
    /// Receives the changes.
    observer: CacheObserver,
    /// All blocks.
    nodes: HashMap<BlockId, BlockNode>,
    /// Blocks at the start of a sequence.
    roots: Vec<BlockId>,
    /// The blocks of each cache sequence at the last update.
    held: Vec<SequenceBlocks>,
    /// Number of blocks made so far: the next id.
    n_made: u64,
}

/// One block of the tree.
struct BlockNode {
    /// The block before it; `None` at the start of a sequence.
    parent: Option<BlockId>,
    /// The blocks that follow it.
    children: Vec<BlockId>,
    /// Its tokens.
    tokens: Vec<u32>,
    /// Number of cache sequences that hold it.
    n_held: usize,
}

/// The blocks of one cache sequence.
#[derive(Clone, Default)]
struct SequenceBlocks {
    /// Use number of the cache sequence at the last update.
    use_number: u64,
    /// Its blocks, in order.
    blocks: Vec<BlockId>,
}

impl BlockTree {
    /// An empty tree of blocks of `page_len` tokens, for `n_seq` cache sequences.
    pub fn new(page_len: usize, n_seq: usize, observer: CacheObserver) -> Self {
        let held = vec![SequenceBlocks::default(); n_seq];
        Self { page_len, observer, nodes: HashMap::new(), roots: Vec::new(), held, n_made: 0 }
    }

    /// Updates the tree to the given cache sequences, and reports the changes; sequences that are left out hold
    /// nothing.
    pub fn update<'a>(&mut self, sequences: impl Iterator<Item = EvaluatedSequence<'a>>) {
        let mut is_held = vec![false; self.held.len()];
        // Last block of each sequence first, as `Removed` requires.
        let mut given_up = Vec::new();
        for EvaluatedSequence { seq, use_number, ids } in sequences {
            is_held[seq] = true;
            let n = ids.len() / self.page_len;
            let same_text = self.held[seq].use_number == use_number;
            let n_kept = if same_text { self.held[seq].blocks.len().min(n) } else { self.n_common(seq, ids) };
            given_up.extend(self.held[seq].blocks.drain(n_kept..).rev());
            self.held[seq].use_number = use_number;
            self.extend(seq, &ids[n_kept * self.page_len..n * self.page_len]);
        }
        for (held, _) in self.held.iter_mut().zip(is_held).filter(|(_, is_held)| !is_held) {
            given_up.extend(held.blocks.drain(..).rev());
        }
        let removed: Vec<_> = given_up.into_iter().filter(|&block| self.release(block)).collect();
        if !removed.is_empty() {
            (self.observer)(CacheEvent::Removed { blocks: removed });
        }
    }

    /// Number of the blocks recorded for sequence `seq` that `ids` begins with.
    fn n_common(&self, seq: usize, ids: &[u32]) -> usize {
        let pairs = self.held[seq].blocks.iter().zip(ids.chunks_exact(self.page_len));
        pairs.take_while(|(block, tokens)| self.nodes[block].tokens == *tokens).count()
    }

    /// Adds whole blocks of tokens to sequence `seq`, and reports those that are new.
    fn extend(&mut self, seq: usize, ids: &[u32]) {
        let (mut first_parent, mut new, mut new_tokens) = (None, Vec::new(), Vec::new());
        for tokens in ids.chunks_exact(self.page_len) {
            let parent = self.held[seq].blocks.last().copied();
            let siblings = parent.map_or(&self.roots, |parent| &self.nodes[&parent].children);
            let known = siblings.iter().copied().find(|block| self.nodes[block].tokens == tokens);
            // A new block has no children, so the rest is new as well.
            let block = known.unwrap_or_else(|| {
                let block = self.add(parent, tokens);
                if new.is_empty() {
                    first_parent = parent;
                }
                new.push(block);
                new_tokens.extend_from_slice(tokens);
                block
            });
            self.node(block).n_held += 1;
            self.held[seq].blocks.push(block);
        }
        if !new.is_empty() {
            (self.observer)(CacheEvent::Stored { parent: first_parent, blocks: new, tokens: new_tokens });
        }
    }

    /// Adds a block after `parent`.
    fn add(&mut self, parent: Option<BlockId>, tokens: &[u32]) -> BlockId {
        let block = BlockId(self.n_made);
        self.n_made += 1;
        self.siblings(parent).push(block);
        self.nodes.insert(block, BlockNode { parent, children: Vec::new(), tokens: tokens.to_vec(), n_held: 0 });
        block
    }

    /// Removes one holder of `block`. True if it was the last one, and the block is removed.
    fn release(&mut self, block: BlockId) -> bool {
        let node = self.node(block);
        node.n_held -= 1;
        if node.n_held > 0 {
            return false;
        }
        let parent = node.parent;
        self.nodes.remove(&block);
        self.siblings(parent).retain(|&other| other != block);
        true
    }

    /// The node of a block, which exists.
    fn node(&mut self, block: BlockId) -> &mut BlockNode {
        self.nodes.get_mut(&block).expect("sequences hold blocks that there are")
    }

    /// The children of `parent`, or the roots.
    fn siblings(&mut self, parent: Option<BlockId>) -> &mut Vec<BlockId> {
        match parent {
            None => &mut self.roots,
            Some(parent) => &mut self.node(parent).children,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};
    use std::sync::mpsc;

    use proptest::prelude::*;

    use super::*;

    const PAGE: usize = 2;

    /// The blocks that events report as stored: the tokens up to the end of each.
    #[derive(Default)]
    struct Replay(BTreeMap<BlockId, Vec<u32>>);

    impl Replay {
        fn add(&mut self, event: CacheEvent) {
            match event {
                CacheEvent::Stored { parent, blocks, tokens } => {
                    assert_eq!(tokens.len(), blocks.len() * PAGE);
                    let mut sequence = parent.map_or_else(Vec::new, |parent| self.0[&parent].clone());
                    for (block, tokens) in blocks.into_iter().zip(tokens.chunks(PAGE)) {
                        sequence.extend_from_slice(tokens);
                        assert!(!self.0.values().any(|known| *known == sequence), "{sequence:?} is stored twice");
                        assert_eq!(self.0.insert(block, sequence.clone()), None);
                    }
                }
                CacheEvent::Removed { blocks } => {
                    for block in blocks {
                        let sequence = self.0.remove(&block).expect("what is removed was stored");
                        let follows = |other: &Vec<u32>| other.starts_with(&sequence);
                        assert!(!self.0.values().any(follows), "{sequence:?} goes before what follows it");
                    }
                }
            }
        }
    }

    /// All prefixes of `sequences` that are whole blocks.
    fn prefixes<'a>(sequences: impl Iterator<Item = &'a Vec<u32>>) -> BTreeSet<Vec<u32>> {
        let prefixes_of = |sequence: &'a Vec<u32>| (1..=sequence.len() / PAGE).map(|n| sequence[..n * PAGE].to_vec());
        sequences.flat_map(prefixes_of).collect()
    }

    fn observed(n_seq: usize) -> (BlockTree, mpsc::Receiver<CacheEvent>) {
        let (sender, receiver) = mpsc::channel();
        (BlockTree::new(PAGE, n_seq, Box::new(move |event| drop(sender.send(event)))), receiver)
    }

    #[test]
    fn shared_blocks_are_stored_once_and_removed_with_their_last_holder() {
        let (mut blocks, events) = observed(2);
        let mut update = |sequences: &[&[u32]]| {
            let sequences = sequences.iter().enumerate();
            blocks.update(sequences.map(|(seq, ids)| EvaluatedSequence { seq, use_number: ids.len() as u64, ids }));
            events.try_iter().collect::<Vec<_>>()
        };
        let ids = |ids: &[u64]| ids.iter().map(|&id| BlockId(id)).collect::<Vec<_>>();
        let stored = |parent: Option<u64>, blocks: &[u64], tokens: &[u32]| CacheEvent::Stored {
            parent: parent.map(BlockId),
            blocks: ids(blocks),
            tokens: tokens.to_vec(),
        };
        assert_eq!(update(&[&[1, 2, 3, 4, 5]]), [stored(None, &[0, 1], &[1, 2, 3, 4])]);
        assert_eq!(update(&[&[1, 2, 3, 4, 5], &[1, 2, 9, 9]]), [stored(Some(0), &[2], &[9, 9])]);
        assert_eq!(update(&[&[], &[1, 2, 9, 9]]), [CacheEvent::Removed { blocks: ids(&[1]) }]);
        assert_eq!(update(&[&[1, 2, 9, 9], &[]]), []);
        assert_eq!(update(&[]), [CacheEvent::Removed { blocks: ids(&[2, 0]) }]);
    }

    proptest! {
        #[test]
        fn replaying_the_events_gives_what_the_sequences_hold(
            changes in prop::collection::vec((0..4usize, prop::collection::vec(0..2u32, 0..9), 0..9usize), 1..60),
        ) {
            let (mut blocks, events) = observed(4);
            let mut replay = Replay::default();
            // Token ids, how many are evaluated, and the use number.
            let mut sequences: Vec<Option<(Vec<u32>, usize, u64)>> = vec![None; 4];
            for (number, (seq, ids, n)) in (1..).zip(changes) {
                match &mut sequences[seq] {
                    // The sequence grows, or is cut back.
                    Some((known, evaluated, _)) if n < 5 && known.len() >= n => *evaluated = n,
                    sequence => *sequence = (n != 8).then(|| (ids.clone(), n.min(ids.len()), number)),
                }
                let held = sequences.iter().enumerate().filter_map(|(seq, sequence)| {
                    let (ids, n, use_number) = sequence.as_ref()?;
                    Some(EvaluatedSequence { seq, use_number: *use_number, ids: &ids[..*n] })
                });
                blocks.update(held);
                for event in events.try_iter() {
                    replay.add(event);
                }
                let evaluated: Vec<_> = sequences.iter().flatten().map(|(ids, n, _)| ids[..*n].to_vec()).collect();
                prop_assert_eq!(replay.0.values().cloned().collect::<BTreeSet<_>>(), prefixes(evaluated.iter()));
            }
        }
    }
}
