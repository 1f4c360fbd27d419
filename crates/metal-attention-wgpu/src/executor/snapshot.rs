//! Snapshots of sequences: copies blocks (KV pages, recurrent states) between GPU and host memory. The bytes of a block
//! are those of all layers one after the other.

use metal_attention_model::CacheBlock;

use super::WgpuExecutor;
use crate::arena::runs;
use crate::{Readback, Slice, WgpuError};

/// Most bytes that one submission copies to the host, unless a single layer's part of a block has more.
const AT_ONCE: u64 = 64 << 20;

impl WgpuExecutor {
    /// The slices of GPU memory that make up a block, in the order of its bytes.
    pub(super) fn parts_of(&self, block: CacheBlock) -> Vec<Slice> {
        match block {
            CacheBlock::Page { group, page } => self.cache.of_page(group, page).collect(),
            CacheBlock::State { slot } => self.states.of_slot(slot).collect(),
        }
    }

    pub(super) fn read_parts(&mut self, mut parts: &[Slice], mut bytes: &mut [u8]) -> Result<(), WgpuError> {
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

    pub(super) fn write_parts(&mut self, parts: &[Slice], mut bytes: &[u8]) -> Result<(), WgpuError> {
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
