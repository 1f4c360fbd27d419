//! The KV cache's whole pages as a tree of blocks, reported to an observer as they change.
//!
//! A router uses the reports to send a prompt to the worker that holds its prefix. Two sequences with the same first
//! tokens share blocks, even if each has its own copy of the pages.

use std::collections::HashMap;
use std::ops::Range;

use crate::prompt::PrefixKey;
use crate::{ContentHash, SpanKey};

/// Id of a block: the tokens and rows of one page after all those before it in the sequence. An id is never used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub u64);

/// The part of a span of embedding rows that is in a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlockSpan {
    /// The index of the part's first input in the block.
    pub start: usize,
    /// The index behind its last input.
    pub end: usize,
    /// Rows of the span in earlier blocks.
    pub offset: usize,
    /// The hash of the span's contents.
    pub hash: ContentHash,
}

impl BlockSpan {
    /// The parts of `spans`, with indices of the sequence, in the block of its inputs `start..end`.
    pub(super) fn of_block(spans: &[SpanKey], start: usize, end: usize) -> impl Iterator<Item = Self> {
        let spans = &spans[spans.partition_point(|span| span.end <= start)..];
        spans.iter().take_while(move |span| span.start < end).map(move |span| {
            let first = span.start.max(start);
            Self { start: first - start, end: span.end.min(end) - start, offset: first - span.start, hash: span.hash }
        })
    }
}

/// A change of the blocks in the KV cache.
///
/// A prompt that begins with the tokens and spans of stored blocks, from a sequence's start, finds their pages. It may
/// find fewer in models with sliding windows or recurrent states, and where a span goes on behind the last block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CacheEvent {
    /// Blocks that are now in the KV cache.
    Stored {
        /// The block before the first of them; `None` at the start of a sequence.
        parent: Option<BlockId>,
        /// The blocks, each following the one before.
        blocks: Vec<BlockId>,
        /// Their tokens, one page for each block; in the place of rows, the ids that stand there.
        tokens: Vec<u32>,
        /// The spans of embedding rows in them, by block; usually empty.
        spans: Vec<(BlockId, BlockSpan)>,
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
    /// The key of its evaluated tokens.
    pub key: PrefixKey<'a>,
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
    /// The spans of embedding rows in it.
    spans: Vec<BlockSpan>,
    /// Number of cache sequences that hold it.
    n_held: usize,
}

impl BlockNode {
    /// Whether it has these tokens, and the parts of `spans` in the sequence's block from `start` on.
    fn has(&self, tokens: &[u32], spans: &[SpanKey], start: usize) -> bool {
        self.tokens == tokens && self.spans.iter().copied().eq(BlockSpan::of_block(spans, start, start + tokens.len()))
    }
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
        for EvaluatedSequence { seq, use_number, key } in sequences {
            is_held[seq] = true;
            let n = key.len() / self.page_len;
            let same_text = self.held[seq].use_number == use_number;
            let n_kept = if same_text { self.held[seq].blocks.len().min(n) } else { self.n_common(seq, key) };
            given_up.extend(self.held[seq].blocks.drain(n_kept..).rev());
            self.held[seq].use_number = use_number;
            self.extend(seq, key, n_kept..n);
        }
        for (held, _) in self.held.iter_mut().zip(is_held).filter(|(_, is_held)| !is_held) {
            given_up.extend(held.blocks.drain(..).rev());
        }
        let removed: Vec<_> = given_up.into_iter().filter(|&block| self.release(block)).collect();
        if !removed.is_empty() {
            (self.observer)(CacheEvent::Removed { blocks: removed });
        }
    }

    /// The tokens of block `i` of a sequence.
    fn tokens_of<'a>(&self, key: PrefixKey<'a>, i: usize) -> &'a [u32] {
        &key.ids[i * self.page_len..(i + 1) * self.page_len]
    }

    /// Number of the blocks recorded for sequence `seq` that a sequence with the key `key` begins with.
    fn n_common(&self, seq: usize, key: PrefixKey<'_>) -> usize {
        let pairs = self.held[seq].blocks.iter().zip(0..key.len() / self.page_len);
        let is_common = |&(block, i): &(&BlockId, usize)| {
            self.nodes[block].has(self.tokens_of(key, i), key.spans, i * self.page_len)
        };
        pairs.take_while(is_common).count()
    }

    /// Adds whole blocks of the sequence `seq`, which has this key, and reports those that are new.
    fn extend(&mut self, seq: usize, key: PrefixKey<'_>, blocks: Range<usize>) {
        let (mut first_parent, mut new, mut new_tokens, mut new_spans) = (None, Vec::new(), Vec::new(), Vec::new());
        for i in blocks {
            let (tokens, start) = (self.tokens_of(key, i), i * self.page_len);
            let parent = self.held[seq].blocks.last().copied();
            let siblings = parent.map_or(&self.roots, |parent| &self.nodes[&parent].children);
            let known = siblings.iter().copied().find(|block| self.nodes[block].has(tokens, key.spans, start));
            // A new block has no children, so the rest is new as well.
            let block = known.unwrap_or_else(|| {
                let spans: Vec<_> = BlockSpan::of_block(key.spans, start, start + self.page_len).collect();
                let block = self.add(parent, tokens, &spans);
                if new.is_empty() {
                    first_parent = parent;
                }
                new.push(block);
                new_tokens.extend_from_slice(tokens);
                new_spans.extend(spans.into_iter().map(|span| (block, span)));
                block
            });
            self.node(block).n_held += 1;
            self.held[seq].blocks.push(block);
        }
        if !new.is_empty() {
            let (parent, blocks, tokens, spans) = (first_parent, new, new_tokens, new_spans);
            (self.observer)(CacheEvent::Stored { parent, blocks, tokens, spans });
        }
    }

    /// Adds a block after `parent`.
    fn add(&mut self, parent: Option<BlockId>, tokens: &[u32], spans: &[BlockSpan]) -> BlockId {
        let block = BlockId(self.n_made);
        self.n_made += 1;
        self.siblings(parent).push(block);
        let (tokens, spans) = (tokens.to_vec(), spans.to_vec());
        self.nodes.insert(block, BlockNode { parent, children: Vec::new(), tokens, spans, n_held: 0 });
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
                CacheEvent::Stored { parent, blocks, tokens, spans } => {
                    assert_eq!((tokens.len(), spans.len()), (blocks.len() * PAGE, 0));
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
            let key = |ids| PrefixKey { ids, spans: &[] };
            blocks.update(sequences.map(|(seq, ids)| EvaluatedSequence {
                seq,
                use_number: ids.len() as u64,
                key: key(ids),
            }));
            events.try_iter().collect::<Vec<_>>()
        };
        let ids = |ids: &[u64]| ids.iter().map(|&id| BlockId(id)).collect::<Vec<_>>();
        let stored = |parent: Option<u64>, blocks: &[u64], tokens: &[u32]| CacheEvent::Stored {
            parent: parent.map(BlockId),
            blocks: ids(blocks),
            tokens: tokens.to_vec(),
            spans: Vec::new(),
        };
        assert_eq!(update(&[&[1, 2, 3, 4, 5]]), [stored(None, &[0, 1], &[1, 2, 3, 4])]);
        assert_eq!(update(&[&[1, 2, 3, 4, 5], &[1, 2, 9, 9]]), [stored(Some(0), &[2], &[9, 9])]);
        assert_eq!(update(&[&[], &[1, 2, 9, 9]]), [CacheEvent::Removed { blocks: ids(&[1]) }]);
        assert_eq!(update(&[&[1, 2, 9, 9], &[]]), []);
        assert_eq!(update(&[]), [CacheEvent::Removed { blocks: ids(&[2, 0]) }]);
    }

    #[test]
    fn blocks_with_equal_ids_differ_by_the_spans_in_them() {
        let (mut blocks, events) = observed(2);
        let mut update = |spans: [&[SpanKey]; 2]| {
            let sequence = |(seq, spans)| EvaluatedSequence {
                seq,
                use_number: 1,
                key: PrefixKey { ids: &[1, 7, 7, 7, 2, 2], spans },
            };
            blocks.update(spans.into_iter().enumerate().map(sequence));
            events.try_iter().collect::<Vec<_>>()
        };
        let span = |hash| SpanKey { start: 1, end: 4, hash: ContentHash([hash; 32]) };
        let part = |block: u64, start, end, offset, hash| {
            (BlockId(block), BlockSpan { start, end, offset, hash: ContentHash([hash; 32]) })
        };
        let stored = |blocks: [u64; 3], spans| CacheEvent::Stored {
            parent: None,
            blocks: blocks.map(BlockId).to_vec(),
            tokens: vec![1, 7, 7, 7, 2, 2],
            spans,
        };
        // Another hash, and no span.
        let other = [part(3, 1, 2, 0, 9), part(4, 0, 2, 1, 9)];
        let both = [stored([0, 1, 2], vec![part(0, 1, 2, 0, 8), part(1, 0, 2, 1, 8)]), stored([3, 4, 5], other.into())];
        assert_eq!(update([&[span(8)], &[span(9)]]), both);
        let (mut same, events) = observed(2);
        let key = PrefixKey { ids: &[1, 7, 7, 7, 2, 2], spans: &[span(8)] };
        same.update([0, 1].map(|seq| EvaluatedSequence { seq, use_number: 1, key }).into_iter());
        assert_eq!(events.try_iter().count(), 1);
        let text = PrefixKey { spans: &[], ..key };
        same.update([(0, key), (1, text)].map(|(seq, key)| EvaluatedSequence { seq, use_number: 2, key }).into_iter());
        assert_eq!(events.try_iter().collect::<Vec<_>>(), [stored([3, 4, 5], vec![])]);
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
                    let key = PrefixKey { ids: &ids[..*n], spans: &[] };
                    Some(EvaluatedSequence { seq, use_number: *use_number, key })
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
