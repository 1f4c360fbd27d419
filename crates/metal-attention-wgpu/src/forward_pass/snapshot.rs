//! Snapshots of sequences: copies blocks (KV pages, recurrent states) between GPU and host memory. The bytes of a block
//! are those of all layers one after the other.

use metal_attention_model::{
    CacheBlock, CacheLayout, ForwardError, PageTable, SequenceCache, SequenceExtent, SnapshotError,
};

use super::WgpuForwardPass;
use crate::arena::runs;
use crate::{Readback, Slice, WgpuError};

/// Most bytes that one submission copies to the host, unless a single layer's part of a block has more.
const AT_ONCE: u64 = 64 << 20;

impl WgpuForwardPass {
    /// The slices of GPU memory that make up a block, in the order of its bytes.
    fn parts_of(&self, block: CacheBlock) -> Vec<Slice> {
        match block {
            CacheBlock::Page { group, page } => self.cache.of_page(group, page).collect(),
            CacheBlock::State { slot } => self.states.of_slot(slot).collect(),
        }
    }

    fn read_parts(&mut self, mut parts: &[Slice], mut bytes: &mut [u8]) -> Result<(), WgpuError> {
        self.gpu.check()?;
        let sizes: Vec<u64> = parts.iter().map(Slice::size).collect();
        for run in runs(&sizes, AT_ONCE, usize::MAX) {
            let n = run.iter().sum::<u64>();
            let mut readback = match self.blocks.take().filter(|readback| readback.bytes() >= n) {
                Some(readback) => readback,
                None => Readback::new(&self.gpu, n)?,
            };
            let mut encoder = self.gpu.encoder();
            let mut at = 0;
            for part in &parts[..run.len()] {
                let range = part.offset()..part.offset() + part.size();
                readback.copy_after(&mut encoder, part.buffer(), range, at);
                at += part.size();
            }
            readback.map(self.gpu.submit(encoder));
            let (own, rest) = bytes.split_at_mut(n as usize);
            readback.read(&self.gpu, n, |view| own.copy_from_slice(view))?;
            self.blocks = Some(readback);
            (parts, bytes) = (&parts[run.len()..], rest);
        }
        Ok(())
    }

    fn write_parts(&mut self, parts: &[Slice], mut bytes: &[u8]) -> Result<(), WgpuError> {
        self.gpu.check()?;
        for part in parts {
            let (own, rest) = bytes.split_at(part.size() as usize);
            self.gpu.write_with(part, part.size(), |view| view.copy_from_slice(own));
            bytes = rest;
        }
        // wgpu keeps written data in staging buffers until a submission is done: submit now, so that they are freed.
        let submission = self.gpu.submit(self.gpu.encoder());
        self.gpu.wait(Some(submission))
    }
}

impl SequenceCache for WgpuForwardPass {
    fn layout(&self) -> CacheLayout {
        CacheLayout {
            format: format!("wgpu {}", self.cache.cache_type),
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
        let parts = self.parts_of(block);
        Ok(self.read_parts(&parts, bytes)?)
    }

    fn write_block(&mut self, block: CacheBlock, bytes: &[u8]) -> Result<(), ForwardError> {
        let parts = self.parts_of(block);
        Ok(self.write_parts(&parts, bytes)?)
    }
}
