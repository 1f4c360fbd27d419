//! Snapshots of sequences: copies blocks of the KV cache from the GPU to main memory and back.

use metal_attention_model::{Block, CacheLayout, Extent, ForwardError, PageTable, SequenceCache, SnapshotError};

use crate::CudaError;
use crate::device::{CudaBuffer, Readback};
use crate::forward_pass::CudaForwardPass;

impl CudaForwardPass {
    /// Where a block lies: buffers, bytes before it, and its bytes.
    fn parts_of(&self, block: Block) -> Vec<(&CudaBuffer, u64, u64)> {
        match block {
            Block::Page { group, page } => self.cache.of_page(group, page).collect(),
            Block::State { slot } => self.states.of_slot(slot).collect(),
        }
    }

    /// Bytes of a block.
    pub(crate) fn block_bytes(&self, block: Block) -> u64 {
        match block {
            Block::Page { group, page: _ } => self.cache.page_bytes(group),
            Block::State { slot: _ } => self.states.slot_bytes(),
        }
    }

    fn read_parts(&mut self, block: Block, bytes: &mut [u8]) -> Result<(), CudaError> {
        let gpu = self.gpu();
        gpu.bind()?;
        let n = bytes.len() as u64;
        let mut readback = match self.blocks.take().filter(|readback| readback.bytes() >= n) {
            Some(readback) => readback,
            None => Readback::new(self.gpu(), n)?,
        };
        let mut at = 0;
        for (buffer, start, n) in self.parts_of(block) {
            readback.copy_part(buffer, start, n, at)?;
            at += n;
        }
        bytes.copy_from_slice(readback.read(n)?);
        self.blocks = Some(readback);
        Ok(())
    }

    fn write_parts(&self, block: Block, mut bytes: &[u8]) -> Result<(), CudaError> {
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

    fn settle(&mut self) {
        self.clear_lookahead();
    }

    fn adopt(&mut self, seq: usize, extent: &Extent) -> Result<Vec<Option<Block>>, SnapshotError> {
        self.settle();
        self.cache.pages.adopt(seq, extent)
    }

    fn read_block(&mut self, block: Block, bytes: &mut [u8]) -> Result<(), ForwardError> {
        Ok(self.read_parts(block, bytes)?)
    }

    fn write_block(&mut self, block: Block, bytes: &[u8]) -> Result<(), ForwardError> {
        Ok(self.write_parts(block, bytes)?)
    }
}
