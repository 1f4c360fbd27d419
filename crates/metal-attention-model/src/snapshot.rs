//! Snapshots: the KV pages and recurrent states of one sequence as bytes, for a cache of the same layout.
//!
//! A snapshot is a header (the cache's [layout](CacheLayout) and the sequence's [extent](SequenceExtent),
//! little-endian), followed by the sequence's blocks as they lie in the cache: the pages of each cache group in order,
//! and the recurrent states, shortest first. It is written and read block by block, so that no second copy of a cache
//! is in memory.

use std::io::{Read, Seek, Write};

use crate::{ForwardError, PAGE, PageTable, SequenceSpans, SpanPlace};

/// Maximum bytes of a layout's name.
const MAX_FORMAT: usize = 256;

/// Maximum cache groups: there is one for each length of window.
const MAX_GROUPS: usize = 256;

/// Why a snapshot could not be written or read. After an error in reading, the sequence is empty.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SnapshotError {
    /// The cache refused the sequence, or its device failed.
    #[error(transparent)]
    Forward(#[from] ForwardError),
    /// The model has no causal mask: the KV cache holds keys and values of a layer only while that layer is evaluated.
    #[error(
        "a sequence of this model cannot be saved or restored: it is evaluated whole, since every token sees the whole text, \
         and the KV cache keeps nothing of it afterwards; evaluate the text again"
    )]
    NotCausal,
    /// The bytes could not be written.
    #[error("a snapshot of a sequence could not be written: {0}")]
    Write(#[source] std::io::Error),
    /// The bytes could not be read.
    #[error("a snapshot of a sequence could not be read: {0}")]
    Read(#[source] std::io::Error),
    /// The snapshot is of a cache with another layout.
    #[error(
        "the snapshot is of another KV cache: it has {found}, and this one {expected}; the device, the cache type, the context \
         size and the micro-batch have to be those it was written with"
    )]
    OtherLayout {
        /// Layout of the snapshot.
        found: CacheLayout,
        /// Layout of the cache.
        expected: CacheLayout,
    },
    /// The header is inconsistent.
    #[error("the snapshot is damaged: {why}")]
    Damaged {
        /// The reason.
        why: &'static str,
    },
}

fn damaged<T>(why: &'static str) -> Result<T, SnapshotError> {
    Err(SnapshotError::Damaged { why })
}

/// The layout of a cache's bytes: caches of the same model with equal layouts can exchange blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheLayout {
    /// The backend and the element type, such as `cpu f16`.
    pub format: String,
    /// Bytes of a page of each cache group, over all its layers.
    pub page_bytes: Vec<u64>,
    /// Bytes of a recurrent state, over all layers; 0 if no layer keeps one.
    pub state_bytes: u64,
}

impl CacheLayout {
    /// Bytes of a block.
    pub fn bytes_of(&self, block: CacheBlock) -> u64 {
        match block {
            CacheBlock::Page { group, page: _ } => self.page_bytes[group],
            CacheBlock::State { slot: _ } => self.state_bytes,
        }
    }

    /// Resizes `bytes` to the length of a block; an error if there is not enough memory.
    pub(crate) fn make_room(&self, block: CacheBlock, bytes: &mut Vec<u8>) -> Result<(), SnapshotError> {
        let n = self.bytes_of(block) as usize;
        let more = n.saturating_sub(bytes.len());
        let no_memory = |_| ForwardError::OutOfMemory { what: "a page of the KV cache", bytes: n };
        bytes.try_reserve_exact(more).map_err(no_memory)?;
        bytes.resize(n, 0);
        Ok(())
    }
}

impl std::fmt::Display for CacheLayout {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { format, page_bytes, state_bytes } = self;
        let format = format.escape_debug();
        write!(f, "the layout {format} with pages of {page_bytes:?} bytes and states of {state_bytes}")
    }
}

/// The extent of a sequence in a cache: its length, and which pages and states of it are kept.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SequenceExtent {
    /// Tokens of the sequence.
    pub n_tokens: usize,
    /// Number of first pages that each cache group has dropped, as no later token attends to them.
    pub n_dropped: Vec<usize>,
    /// Lengths of the prefixes whose recurrent states are kept, ascending; the last one is the whole sequence. Empty if
    /// no layer keeps states.
    pub states: Vec<usize>,
    /// The spans of embedding rows in it.
    pub spans: SequenceSpans,
}

impl SequenceExtent {
    /// The extent of an empty sequence in a cache with `n_groups` cache groups.
    fn empty(n_groups: usize) -> Self {
        Self { n_dropped: vec![0; n_groups], ..Self::default() }
    }

    /// The extent of the first `n` tokens.
    fn first(&self, n: usize) -> Self {
        let states = self.states.iter().copied().filter(|&pos| pos <= n).collect();
        let mut spans = self.spans.clone();
        spans.cut(n);
        Self { n_tokens: n.min(self.n_tokens), n_dropped: self.n_dropped.clone(), states, spans }
    }
}

/// A unit of a cache that is copied as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CacheBlock {
    /// A page of all layers of a cache group: layer by layer, keys first.
    Page {
        /// Index of the cache group.
        group: usize,
        /// Number of the page in the group's pool. [`Snapshot`]'s own list of blocks, which is of no cache, has 0.
        page: u32,
    },
    /// The recurrent state of all layers, one after the other.
    State {
        /// Its slot.
        slot: u32,
    },
}

/// The cache of a session, for snapshots. Its backend copies bytes; its [`PageTable`] decides about everything else.
pub trait SequenceCache {
    /// The layout of its bytes.
    fn layout(&self) -> CacheLayout;

    /// The page table.
    fn pages(&self) -> &PageTable;

    /// Discards the lookahead steps and releases their pages.
    fn discard_lookahead(&mut self);

    /// [`PageTable::allocate`], after discarding lookahead steps.
    fn allocate(&mut self, seq: usize, extent: &SequenceExtent) -> Result<Vec<Option<CacheBlock>>, SnapshotError>;

    /// Copies a block to `bytes`, which has the length of the layout.
    fn read_block(&mut self, block: CacheBlock, bytes: &mut [u8]) -> Result<(), ForwardError>;

    /// Writes blocks to `out`, one after the other.
    fn read_blocks(&mut self, blocks: &[CacheBlock], out: &mut dyn Write) -> Result<(), SnapshotError>;

    /// Copies `bytes` to a block.
    fn write_block(&mut self, block: CacheBlock, bytes: &[u8]) -> Result<(), ForwardError>;
}

/// The header of a snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// Layout of the cache.
    layout: CacheLayout,
    /// Length of the sequence, and what is kept of it.
    extent: SequenceExtent,
}

impl Snapshot {
    /// The header for sequence `seq` as it is now.
    pub fn of_sequence(cache: &mut dyn SequenceCache, seq: usize) -> Result<Self, SnapshotError> {
        Self::of_prefix(cache, seq, usize::MAX)
    }

    /// The header for the first `n` tokens of sequence `seq`, or for all if it has fewer. The sequence can be cut back
    /// to `n` tokens.
    pub fn of_prefix(cache: &mut dyn SequenceCache, seq: usize, n: usize) -> Result<Self, SnapshotError> {
        cache.discard_lookahead();
        let extent = cache.pages().extent(seq)?.first(n);
        Ok(Self { layout: cache.layout(), extent })
    }

    /// Tokens of the snapshot.
    pub fn n_tokens(&self) -> usize {
        self.extent.n_tokens
    }

    /// The spans of embedding rows in it.
    pub fn spans(&self) -> &SequenceSpans {
        &self.extent.spans
    }

    /// The longest prefix of at most `n` tokens from which the restored sequence could continue. `cache` has the layout
    /// of the snapshot.
    pub fn reachable(&self, cache: &dyn SequenceCache, n: usize) -> usize {
        cache.pages().reachable_in(&self.extent, n)
    }

    /// Bytes of its blocks; `u64::MAX` if that overflows.
    pub fn block_bytes(&self) -> u64 {
        let Self { layout, extent } = self;
        let pages = layout.page_bytes.iter().zip(&extent.n_dropped).map(|(&bytes, &n_dropped)| {
            let n = extent.n_tokens.div_ceil(PAGE).saturating_sub(n_dropped);
            bytes.saturating_mul(n as u64)
        });
        let states = layout.state_bytes.saturating_mul(extent.states.len() as u64);
        pages.fold(states, u64::saturating_add)
    }

    /// Writes the header.
    pub fn write_header(&self, out: &mut (impl Write + ?Sized)) -> Result<(), SnapshotError> {
        out.write_all(&self.header()).map_err(SnapshotError::Write)
    }

    /// Writes the blocks of sequence `seq`, which is unchanged since the header was made, or longer.
    pub fn write_blocks(
        &self,
        cache: &mut dyn SequenceCache,
        seq: usize,
        out: &mut dyn Write,
    ) -> Result<(), SnapshotError> {
        cache.discard_lookahead();
        let blocks = cache.pages().blocks(seq, &self.extent);
        cache.read_blocks(&blocks, out)
    }

    /// Reads a header. Its lengths are checked against a context of `n_ctx` tokens.
    pub fn read_header(input: &mut (impl Read + ?Sized), n_ctx: usize) -> Result<Self, SnapshotError> {
        let format = {
            let n = read_count(input, MAX_FORMAT, "the name of its layout is too long")?;
            let mut bytes = vec![0; n];
            input.read_exact(&mut bytes).map_err(SnapshotError::Read)?;
            String::from_utf8(bytes).or_else(|_| damaged("the name of its layout is no text"))?
        };
        let state_bytes = read_u64(input)?;
        let n_groups = read_count(input, MAX_GROUPS, "it has too many groups of layers")?;
        let page_bytes = (0..n_groups).map(|_| read_u64(input)).collect::<Result<_, _>>()?;
        let n_tokens = read_count(input, n_ctx, "it is longer than the context")?;
        let n_pages = n_tokens.div_ceil(PAGE);
        let n_dropped =
            (0..n_groups).map(|_| read_count(input, n_pages, "it lacks pages")).collect::<Result<_, _>>()?;
        // Ends of pages, and the states before the last batch, before the last token, and after it.
        let n_states = read_count(input, n_pages + 3, "it has too many recurrent states")?;
        let states = (0..n_states).map(|_| read_count(input, n_tokens, "a state is longer than the sequence"));
        let states = states.collect::<Result<_, _>>()?;
        let n_spans = read_count(input, n_tokens, "it has too many spans of embedding rows")?;
        let mut spans = SequenceSpans::default();
        for _ in 0..n_spans {
            let start = read_count(input, n_tokens, "a span is longer than the sequence")?;
            let end = read_count(input, n_tokens, "a span is longer than the sequence")?;
            let position = read_position(input)?;
            let next_position = read_position(input)?;
            let is_bidirectional = read_count(input, 1, "a flag of a span is neither 0 nor 1")? == 1;
            spans.push(SpanPlace { start, end, position, next_position, is_bidirectional });
        }
        let extent = SequenceExtent { n_tokens, n_dropped, states, spans };
        Ok(Self { layout: CacheLayout { format, page_bytes, state_bytes }, extent })
    }

    /// Restores a snapshot into sequence `seq`, from blocks as [`write_blocks`](Self::write_blocks) writes them.
    /// Recurrent states without a free slot are left out, except the last.
    pub fn restore(
        &self,
        cache: &mut dyn SequenceCache,
        seq: usize,
        input: &mut (impl Read + ?Sized),
    ) -> Result<(), SnapshotError> {
        let read_over = |input: &mut _, n| std::io::copy(&mut Read::take(input, n), &mut std::io::sink()).map(drop);
        self.restore_blocks(self.extent.n_tokens, cache, seq, input, read_over)
    }

    /// Restores the first `n` tokens of a snapshot, from which a sequence can [continue](Self::reachable). Blocks of
    /// later tokens are not read.
    pub fn restore_prefix(
        &self,
        n: usize,
        cache: &mut dyn SequenceCache,
        seq: usize,
        input: &mut (impl Read + Seek),
    ) -> Result<(), SnapshotError> {
        self.restore_blocks(n, cache, seq, input, |input, n| input.seek_relative(n.cast_signed()))
    }

    /// [`read_blocks`](Self::read_blocks) into a cache of the same layout; empties the sequence on an error.
    fn restore_blocks<R: Read + ?Sized>(
        &self,
        n: usize,
        cache: &mut dyn SequenceCache,
        seq: usize,
        input: &mut R,
        skip: impl Fn(&mut R, u64) -> std::io::Result<()>,
    ) -> Result<(), SnapshotError> {
        let expected = cache.layout();
        if self.layout != expected {
            return Err(SnapshotError::OtherLayout { found: self.layout.clone(), expected });
        }
        let outcome = self.read_blocks(n, cache, seq, input, skip);
        if outcome.is_err() {
            cache.allocate(seq, &SequenceExtent::empty(self.layout.page_bytes.len()))?;
        }
        outcome
    }

    /// Reads the blocks of the first `n` tokens into the cache; `skip` passes over the other bytes.
    fn read_blocks<R: Read + ?Sized>(
        &self,
        n: usize,
        cache: &mut dyn SequenceCache,
        seq: usize,
        input: &mut R,
        skip: impl Fn(&mut R, u64) -> std::io::Result<()>,
    ) -> Result<(), SnapshotError> {
        let mut targets = cache.allocate(seq, &self.extent.first(n))?.into_iter();
        let mut bytes = Vec::new();
        for (kind, pos) in self.kinds() {
            // A page counts by its first position, a state by the number of tokens before it.
            let is_wanted = match kind {
                CacheBlock::Page { .. } => pos < n,
                CacheBlock::State { .. } => pos <= n,
            };
            let target = if is_wanted { targets.next().flatten() } else { None };
            if let Some(block) = target {
                self.layout.make_room(kind, &mut bytes)?;
                input.read_exact(&mut bytes).map_err(SnapshotError::Read)?;
                cache.write_block(block, &bytes)?;
            } else {
                skip(input, self.layout.bytes_of(kind)).map_err(SnapshotError::Read)?;
            }
        }
        Ok(())
    }

    /// The kinds of the blocks in the order of the snapshot, with the position of a page's first token, or the number
    /// of tokens before a state.
    fn kinds(&self) -> impl Iterator<Item = (CacheBlock, usize)> {
        let n_pages = self.extent.n_tokens.div_ceil(PAGE);
        let pages = self.extent.n_dropped.iter().enumerate().flat_map(move |(group, &n_dropped)| {
            (n_dropped..n_pages).map(move |i| (CacheBlock::Page { group, page: 0 }, i * PAGE))
        });
        pages.chain(self.extent.states.iter().map(|&pos| (CacheBlock::State { slot: 0 }, pos)))
    }

    /// The bytes of the header.
    fn header(&self) -> Vec<u8> {
        let Self { layout, extent } = self;
        let mut bytes = (layout.format.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(layout.format.as_bytes());
        let mut put = |n: u64| bytes.extend_from_slice(&n.to_le_bytes());
        put(layout.state_bytes);
        put(layout.page_bytes.len() as u64);
        layout.page_bytes.iter().for_each(|&n| put(n));
        put(extent.n_tokens as u64);
        extent.n_dropped.iter().for_each(|&n| put(n as u64));
        put(extent.states.len() as u64);
        extent.states.iter().for_each(|&n| put(n as u64));
        put(extent.spans.as_slice().len() as u64);
        for &SpanPlace { start, end, position, next_position, is_bidirectional } in extent.spans.as_slice() {
            [start as u64, end as u64, position.into(), next_position.into(), is_bidirectional.into()]
                .into_iter()
                .for_each(&mut put);
        }
        bytes
    }
}

/// Reads a position.
fn read_position(input: &mut (impl Read + ?Sized)) -> Result<u32, SnapshotError> {
    u32::try_from(read_u64(input)?).or_else(|_| damaged("a position is beyond any context"))
}

/// Reads a little-endian number.
fn read_u64(input: &mut (impl Read + ?Sized)) -> Result<u64, SnapshotError> {
    let mut bytes = [0; 8];
    input.read_exact(&mut bytes).map_err(SnapshotError::Read)?;
    Ok(u64::from_le_bytes(bytes))
}

/// Reads a number; `Damaged { why }` if it exceeds `max`.
fn read_count(input: &mut (impl Read + ?Sized), max: usize, why: &'static str) -> Result<usize, SnapshotError> {
    match usize::try_from(read_u64(input)?) {
        Ok(n) if n <= max => Ok(n),
        Ok(_) | Err(_) => damaged(why),
    }
}
