//! Reports the contents of the KV cache to Dynamo's router: each block by the hash of its tokens and by the hash of the sequence up to
//! its end. In the place of embedding rows, such as those of pictures, the router has numbers that stand for the contents, and so have
//! the tokens that are hashed here.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use dynamo_backend_common::KvEventPublisher;
use dynamo_kv_router::protocols::{
    BlockHashOptions, ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheRemoveData, KvCacheStoreData,
    KvCacheStoredBlockData, LocalBlockHash, compute_block_hash_for_seq, compute_next_seq_hash, pad_value_for_mm_hash,
};
use metal_attention::ContentHash;
use metal_attention::scheduler::{BlockId, CacheEvent};

/// Dynamo's publisher of cache events. It is set during the setup of the worker, before any request.
pub type Publisher = Arc<OnceLock<Arc<KvEventPublisher>>>;

/// The data-parallel rank of a worker, which is always the only one.
pub const RANK: u32 = 0;

/// The sequence hashes of the stored blocks.
pub struct BlockHashes {
    /// The number of tokens of a block.
    page_len: u32,
    /// The hashes, by the scheduler's ids.
    hashes: HashMap<BlockId, u64>,
}

impl BlockHashes {
    /// The hashes of an empty cache.
    pub fn new(page_len: u32) -> Self {
        Self { page_len, hashes: HashMap::new() }
    }

    /// Converts an event to Dynamo's, and records its hashes.
    pub fn translate(&mut self, event: CacheEvent) -> KvCacheEventData {
        match event {
            CacheEvent::Stored { parent, blocks, mut tokens, spans } => {
                let parent = parent.map(|parent| self.hashes[&parent]);
                for (block, span) in spans {
                    let Some(i) = blocks.iter().position(|of| *of == block) else { continue };
                    let first = i * self.page_len as usize;
                    tokens[first + span.start..first + span.end].fill(stand_in(span.hash));
                }
                let tokens = compute_block_hash_for_seq(&tokens, self.page_len, BlockHashOptions::default());
                let mut last = parent;
                let mut stored = |(block, tokens_hash): (BlockId, LocalBlockHash)| {
                    let hash = last.map_or(tokens_hash.0, |last| compute_next_seq_hash(last, tokens_hash));
                    last = Some(hash);
                    self.hashes.insert(block, hash);
                    let block_hash = ExternalSequenceBlockHash(hash);
                    KvCacheStoredBlockData { block_hash, tokens_hash, mm_extra_info: None }
                };
                KvCacheEventData::Stored(KvCacheStoreData {
                    parent_hash: parent.map(ExternalSequenceBlockHash),
                    start_position: None,
                    blocks: blocks.into_iter().zip(tokens).map(&mut stored).collect(),
                })
            }
            CacheEvent::Removed { blocks } => {
                let hashes = blocks.iter().filter_map(|block| self.hashes.remove(block));
                KvCacheEventData::Removed(KvCacheRemoveData {
                    block_hashes: hashes.map(ExternalSequenceBlockHash).collect(),
                })
            }
        }
    }
}

/// The number in the place of rows with these contents: Dynamo's for a picture whose identifier is the hash as 64 hexadecimal digits, of
/// which it keeps the first 16.
fn stand_in(ContentHash(hash): ContentHash) -> u32 {
    let [a, b, c, d, e, f, g, h, ..] = hash;
    pad_value_for_mm_hash(u64::from_be_bytes([a, b, c, d, e, f, g, h]))
}

/// An observer of the scheduler's cache events that publishes them.
pub fn observer(publisher: Publisher, page_len: usize) -> metal_attention::scheduler::CacheObserver {
    let mut hashes = BlockHashes::new(u32::try_from(page_len).unwrap_or(u32::MAX));
    Box::new(move |event| {
        let data = hashes.translate(event);
        let Some(publisher) = publisher.get() else { return };
        let event = KvCacheEvent { event_id: publisher.next_event_id(), data, dp_rank: RANK };
        if publisher.publish(event).is_err() {
            tracing::debug!("the publisher of cache events is closed");
        }
    })
}

#[cfg(test)]
mod tests {
    use dynamo_kv_router::protocols::{compute_seq_hash_for_block, hash_mm_identifier};
    use metal_attention::scheduler::BlockSpan;

    use super::*;

    #[test]
    fn hashes_match_those_of_the_router() {
        let text: Vec<u32> = (0..4 * 64).collect();
        let local = compute_block_hash_for_seq(&text, 64, BlockHashOptions::default());
        let sequence = compute_seq_hash_for_block(&local);
        let mut hashes = BlockHashes::new(64);
        let mut seen = Vec::new();
        for (parent, blocks) in [(None, 0..2), (Some(BlockId(1)), 2..4)] {
            let tokens = text[blocks.start * 64..blocks.end * 64].to_vec();
            let first = parent.map(|_| ExternalSequenceBlockHash(sequence[1]));
            let blocks = (blocks.start as u64..blocks.end as u64).map(BlockId).collect();
            let KvCacheEventData::Stored(data) =
                hashes.translate(CacheEvent::Stored { parent, blocks, tokens, spans: Vec::new() })
            else {
                panic!("blocks were stored")
            };
            assert_eq!((data.parent_hash, data.start_position), (first, None));
            seen.extend(data.blocks.into_iter().map(|block| (block.block_hash.0, block.tokens_hash)));
        }
        assert_eq!(seen, sequence.iter().copied().zip(local).collect::<Vec<_>>());
        let removed = hashes.translate(CacheEvent::Removed { blocks: vec![BlockId(3), BlockId(2)] });
        let block_hashes = vec![ExternalSequenceBlockHash(sequence[3]), ExternalSequenceBlockHash(sequence[2])];
        assert_eq!(removed, KvCacheEventData::Removed(KvCacheRemoveData { block_hashes }));
        assert_eq!(hashes.hashes.len(), 2);
    }

    #[test]
    fn rows_are_hashed_as_the_numbers_that_the_router_has_for_them() {
        let hash: [u8; 32] = std::array::from_fn(|i| i as u8);
        let digits: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
        let number = pad_value_for_mm_hash(hash_mm_identifier(&digits).unwrap());
        let span = |start, end, offset| BlockSpan { start, end, offset, hash: ContentHash(hash) };
        let mut hashes = BlockHashes::new(64);
        let blocks = vec![BlockId(0), BlockId(1)];
        let spans = vec![(BlockId(0), span(60, 64, 0)), (BlockId(1), span(0, 10, 4))];
        let stored = CacheEvent::Stored { parent: None, blocks, tokens: vec![7; 2 * 64], spans };
        let KvCacheEventData::Stored(data) = hashes.translate(stored) else { panic!("blocks were stored") };
        let of_router = [vec![7; 60], vec![number; 14], vec![7; 54]].concat();
        let local = compute_block_hash_for_seq(&of_router, 64, BlockHashOptions::default());
        assert_eq!(data.blocks.iter().map(|block| block.tokens_hash).collect::<Vec<_>>(), local);
    }
}
