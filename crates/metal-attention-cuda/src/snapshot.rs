//! Snapshots of sequences: copies blocks of the KV cache from the GPU to main memory and back.

use std::io::Write;

use metal_attention_model::{
    CacheBlock, CacheLayout, ForwardError, PageTable, SequenceCache, SequenceExtent, SnapshotError,
};

use crate::CudaError;
use crate::device::{CudaBuffer, Readback};
use crate::forward_pass::CudaForwardPass;

/// Most bytes of blocks that are copied from the device before they are waited for, unless one alone has more.
const AT_ONCE: u64 = 16 << 20;

impl CudaForwardPass {
    /// Where a block lies: buffers, bytes before it, and its bytes.
    fn parts_of(&self, block: CacheBlock) -> Vec<(&CudaBuffer, u64, u64)> {
        match block {
            CacheBlock::Page { group, page } => self.cache.of_page(group, page).collect(),
            CacheBlock::State { slot } => self.states.of_slot(slot).collect(),
        }
    }

    /// Bytes of a block.
    pub(crate) fn block_bytes(&self, block: CacheBlock) -> u64 {
        match block {
            CacheBlock::Page { group, page: _ } => self.cache.page_bytes(group),
            CacheBlock::State { slot: _ } => self.states.slot_bytes(),
        }
    }

    /// Copies as many of `blocks` to pinned memory as it holds, at least one: their number and bytes.
    fn read_some(&mut self, blocks: &[CacheBlock]) -> Result<(usize, &[u8]), CudaError> {
        self.gpu().bind()?;
        let mut n = 0;
        let mut bytes = 0;
        for &block in blocks {
            let more = self.block_bytes(block);
            if n > 0 && bytes + more > AT_ONCE {
                break;
            }
            (n, bytes) = (n + 1, bytes + more);
        }
        let mut readback = match self.blocks.take().filter(|readback| readback.bytes() >= bytes) {
            Some(readback) => readback,
            None => Readback::new(self.gpu(), bytes.max(AT_ONCE))?,
        };
        let mut at = 0;
        for (buffer, start, n) in blocks[..n].iter().flat_map(|&block| self.parts_of(block)) {
            readback.copy_part(buffer, start, n, at)?;
            at += n;
        }
        readback.end_copies()?;
        Ok((n, self.blocks.insert(readback).read(bytes)?))
    }

    fn write_parts(&self, block: CacheBlock, mut bytes: &[u8]) -> Result<(), CudaError> {
        self.gpu().bind()?;
        for (buffer, start, n) in self.parts_of(block) {
            let (own, rest) = bytes.split_at(n as usize);
            buffer.write(start, own)?;
            bytes = rest;
        }
        Ok(())
    }
}

impl SequenceCache for CudaForwardPass {
    fn layout(&self) -> CacheLayout {
        CacheLayout {
            format: format!("cuda {}", self.cache.cache_type),
            page_bytes: (0..self.cache.pages.n_groups()).map(|group| self.cache.page_bytes(group)).collect(),
            state_bytes: self.states.slot_bytes(),
        }
    }

    fn pages(&self) -> &PageTable {
        &self.cache.pages
    }

    fn discard_lookahead(&mut self) {
        self.clear_lookahead();
    }

    fn allocate(&mut self, seq: usize, extent: &SequenceExtent) -> Result<Vec<Option<CacheBlock>>, SnapshotError> {
        self.discard_lookahead();
        self.cache.pages.allocate(seq, extent)
    }

    fn read_block(&mut self, block: CacheBlock, bytes: &mut [u8]) -> Result<(), ForwardError> {
        bytes.copy_from_slice(self.read_some(&[block])?.1);
        Ok(())
    }

    fn read_blocks(&mut self, mut blocks: &[CacheBlock], out: &mut dyn Write) -> Result<(), SnapshotError> {
        while !blocks.is_empty() {
            let (n, bytes) = self.read_some(blocks).map_err(ForwardError::from)?;
            out.write_all(bytes).map_err(SnapshotError::Write)?;
            blocks = &blocks[n..];
        }
        Ok(())
    }

    fn write_block(&mut self, block: CacheBlock, bytes: &[u8]) -> Result<(), ForwardError> {
        Ok(self.write_parts(block, bytes)?)
    }
}
