//! What the KV cache holds for prompts to come, told as it changes: whole pages of tokens, so that others can send prompts
//! where their beginnings lie.

use std::collections::HashMap;

/// A block: one page of tokens after all those before it in the text. Its number never stands for other tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub u64);

/// A change of what the KV cache holds. A prompt that begins with the tokens of some blocks, from the beginning of a text
/// on, finds them there as long as they are stored; in models whose layers look back only so far, or keep a state, it may
/// find fewer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CacheEvent {
    /// The KV cache holds these blocks now.
    Stored {
        /// The block before the first of them; `None` at the beginning of a text.
        parent: Option<BlockId>,
        /// The blocks, each after the one before.
        blocks: Vec<BlockId>,
        /// Their tokens, a page for each block.
        tokens: Vec<u32>,
    },
    /// The KV cache holds these blocks no more, nor any that came after them. A block comes after those that followed it.
    Removed {
        /// The blocks.
        blocks: Vec<BlockId>,
    },
}

/// Hears of every change, on the thread that computes: it should return at once, and a panic in it ends that thread.
pub type CacheObserver = Box<dyn FnMut(CacheEvent) + Send>;

/// A sequence that prompts can begin like.
pub(super) struct EvaluatedSequence<'a> {
    pub seq: usize,
    /// Another number where the sequence may hold another text than before, and not only more of it.
    pub use_number: u64,
    /// Its tokens that were evaluated.
    pub ids: &'a [u32],
}

/// The blocks that sequences hold: a tree, each counted by the sequences that hold it.
pub(super) struct BlockTree {
    /// Tokens of a block.
    page_len: usize,
    observer: CacheObserver,
    nodes: HashMap<BlockId, BlockNode>,
    /// Blocks at the beginning of a text.
    roots: Vec<BlockId>,
    /// Of each sequence: what it held when it was looked at last.
    held: Vec<SequenceBlocks>,
    /// Blocks that there ever were.
    n_made: u64,
}

struct BlockNode {
    parent: Option<BlockId>,
    children: Vec<BlockId>,
    tokens: Vec<u32>,
    /// Sequences that hold it.
    n_held: usize,
}

#[derive(Clone, Default)]
struct SequenceBlocks {
    use_number: u64,
    blocks: Vec<BlockId>,
}

impl BlockTree {
    /// No blocks of `page_len` tokens, in `n_seq` sequences.
    pub fn new(page_len: usize, n_seq: usize, observer: CacheObserver) -> Self {
        let held = vec![SequenceBlocks::default(); n_seq];
        Self { page_len, observer, nodes: HashMap::new(), roots: Vec::new(), held, n_made: 0 }
    }

    /// Tells what has changed, given what sequences hold now; those that are left out hold nothing.
    pub fn update<'a>(&mut self, texts: impl Iterator<Item = EvaluatedSequence<'a>>) {
        let mut is_held = vec![false; self.held.len()];
        // From the end of each sequence on, so that a block comes after those that follow it.
        let mut given_up = Vec::new();
        for EvaluatedSequence { seq, use_number, ids } in texts {
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

    /// Blocks that sequence `seq` was said to hold and that `ids` begins with.
    fn n_common(&self, seq: usize, ids: &[u32]) -> usize {
        let pairs = self.held[seq].blocks.iter().zip(ids.chunks_exact(self.page_len));
        pairs.take_while(|(block, tokens)| self.nodes[block].tokens == *tokens).count()
    }

    /// Sequence `seq` holds these tokens, too: whole blocks.
    fn extend(&mut self, seq: usize, ids: &[u32]) {
        let (mut first_parent, mut new, mut new_tokens) = (None, Vec::new(), Vec::new());
        for tokens in ids.chunks_exact(self.page_len) {
            let parent = self.held[seq].blocks.last().copied();
            let siblings = parent.map_or(&self.roots, |parent| &self.nodes[&parent].children);
            let known = siblings.iter().copied().find(|block| self.nodes[block].tokens == tokens);
            // Nothing follows a new block: the rest is new, too.
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

    /// A new block after `parent`.
    fn add(&mut self, parent: Option<BlockId>, tokens: &[u32]) -> BlockId {
        let block = BlockId(self.n_made);
        self.n_made += 1;
        self.siblings(parent).push(block);
        self.nodes.insert(block, BlockNode { parent, children: Vec::new(), tokens: tokens.to_vec(), n_held: 0 });
        block
    }

    /// A sequence holds `block` no more. True where it was the last one, and the block is gone.
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

    fn node(&mut self, block: BlockId) -> &mut BlockNode {
        self.nodes.get_mut(&block).expect("sequences hold blocks that there are")
    }

    /// The blocks that follow `parent`.
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

    /// What events say is stored: the text up to the end of each block.
    #[derive(Default)]
    struct Replay(BTreeMap<BlockId, Vec<u32>>);

    impl Replay {
        fn add(&mut self, event: CacheEvent) {
            match event {
                CacheEvent::Stored { parent, blocks, tokens } => {
                    assert_eq!(tokens.len(), blocks.len() * PAGE);
                    let mut text = parent.map_or_else(Vec::new, |parent| self.0[&parent].clone());
                    for (block, tokens) in blocks.into_iter().zip(tokens.chunks(PAGE)) {
                        text.extend_from_slice(tokens);
                        assert!(!self.0.values().any(|known| *known == text), "{text:?} is stored twice");
                        assert_eq!(self.0.insert(block, text.clone()), None);
                    }
                }
                CacheEvent::Removed { blocks } => {
                    for block in blocks {
                        let text = self.0.remove(&block).expect("what is removed was stored");
                        let follows = |other: &Vec<u32>| other.starts_with(&text);
                        assert!(!self.0.values().any(follows), "{text:?} goes before what follows it");
                    }
                }
            }
        }
    }

    /// All beginnings of texts that end with a block.
    fn beginnings<'a>(texts: impl Iterator<Item = &'a Vec<u32>>) -> BTreeSet<Vec<u32>> {
        let of = |text: &'a Vec<u32>| (1..=text.len() / PAGE).map(|n| text[..n * PAGE].to_vec());
        texts.flat_map(of).collect()
    }

    fn observed(n_seq: usize) -> (BlockTree, mpsc::Receiver<CacheEvent>) {
        let (sender, receiver) = mpsc::channel();
        (BlockTree::new(PAGE, n_seq, Box::new(move |event| drop(sender.send(event)))), receiver)
    }

    #[test]
    fn blocks_that_texts_share_are_stored_once_and_go_with_the_last() {
        let (mut blocks, events) = observed(2);
        let mut update = |texts: &[&[u32]]| {
            let texts = texts.iter().enumerate();
            blocks.update(texts.map(|(seq, ids)| EvaluatedSequence { seq, use_number: ids.len() as u64, ids }));
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
            // Text, tokens of it that were evaluated, and its number.
            let mut texts: Vec<Option<(Vec<u32>, usize, u64)>> = vec![None; 4];
            for (number, (seq, ids, n)) in (1..).zip(changes) {
                match &mut texts[seq] {
                    // The text goes on, or is cut back.
                    Some((known, evaluated, _)) if n < 5 && known.len() >= n => *evaluated = n,
                    text => *text = (n != 8).then(|| (ids.clone(), n.min(ids.len()), number)),
                }
                let held = texts.iter().enumerate().filter_map(|(seq, text)| {
                    let (ids, n, use_number) = text.as_ref()?;
                    Some(EvaluatedSequence { seq, use_number: *use_number, ids: &ids[..*n] })
                });
                blocks.update(held);
                for event in events.try_iter() {
                    replay.add(event);
                }
                let evaluated: Vec<_> = texts.iter().flatten().map(|(ids, n, _)| ids[..*n].to_vec()).collect();
                prop_assert_eq!(replay.0.values().cloned().collect::<BTreeSet<_>>(), beginnings(evaluated.iter()));
            }
        }
    }
}
