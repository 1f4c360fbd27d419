//! Snapshots of sequences: copies blocks of the KV cache and of recurrent states from device memory to host memory and back.
//!
//! A block is one KV page of a cache group, over all its layers, or one state slot, over all layers. In host memory its parts
//! lie one after the other, layer by layer (`page_parts`, `slot_parts`).

use metal_attention_model::CacheBlock;

use crate::CudaError;
use crate::device::{CudaBuffer, Readback};
use crate::executor::CudaExecutor;

/// Bytes of blocks that are copied before the host waits for them; a larger block is copied alone.
const AT_ONCE: u64 = 16 << 20;

impl CudaExecutor {
    /// The parts of a block: buffer, offset in bytes, and length in bytes.
    fn block_parts(&self, block: CacheBlock) -> Vec<(&CudaBuffer, u64, u64)> {
        match block {
            CacheBlock::Page { group, page } => self.cache.page_parts(group, page).collect(),
            CacheBlock::State { slot } => self.recurrent_states.slot_parts(slot).collect(),
        }
    }

    /// Bytes of a block in a snapshot.
    pub(crate) fn block_bytes(&self, block: CacheBlock) -> u64 {
        match block {
            CacheBlock::Page { group, page: _ } => self.cache.page_bytes(group),
            CacheBlock::State { slot: _ } => self.recurrent_states.slot_bytes(),
        }
    }

    /// Copies the first blocks of `blocks` to pinned memory, at least one and as many as [`AT_ONCE`] allows, and waits. Returns
    /// the number of blocks and their bytes.
    pub(crate) fn read_some(&mut self, blocks: &[CacheBlock]) -> Result<(usize, &[u8]), CudaError> {
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
        let mut readback = match self.snapshot_readback.take().filter(|readback| readback.bytes() >= bytes) {
            Some(readback) => readback,
            None => Readback::new(self.gpu(), bytes.max(AT_ONCE))?,
        };
        let mut at = 0;
        for (buffer, start, n) in blocks[..n].iter().flat_map(|&block| self.block_parts(block)) {
            readback.copy_part(buffer, start, n, at)?;
            at += n;
        }
        readback.end_copies()?;
        Ok((n, self.snapshot_readback.insert(readback).read(bytes)?))
    }

    /// Writes a block that a snapshot has read, in the order of the stream.
    pub(crate) fn write_block_parts(&self, block: CacheBlock, mut bytes: &[u8]) -> Result<(), CudaError> {
        self.gpu().bind()?;
        for (buffer, start, n) in self.block_parts(block) {
            let (part, rest) = bytes.split_at(n as usize);
            buffer.write(start, part)?;
            bytes = rest;
        }
        Ok(())
    }
}
