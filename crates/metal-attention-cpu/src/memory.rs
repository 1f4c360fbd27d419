//! Memory in large pages, for recurrent states and repacked matrices.
//!
//! Decoding reads all weights once per token. With pages of 4 KiB the address translations (TLB) limit that; with pages of
//! 2 MiB they do not.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use memmap2::MmapMut;

/// Bytes of a large page.
const LARGE_PAGE: usize = 2 << 20;
/// Bytes of a memory block, unless a matrix needs more.
const BLOCK: usize = 32 * LARGE_PAGE;
/// The alignment of matrices: a cache line.
const ALIGNMENT: usize = 64;

/// Allocates zeroed anonymous memory, in large pages where the system has them; the system zeroes each page on first use.
/// `None` when there is not enough memory.
pub(crate) fn zeros(bytes: usize) -> Option<MmapMut> {
    let mapping = MmapMut::map_anon(bytes).ok()?;
    #[cfg(target_os = "linux")]
    let _ = mapping.advise(memmap2::Advice::HugePage);
    Some(mapping)
}

/// Allocates the memory of a model's matrices one behind the other, in blocks that begin with a large page. Allocated one by
/// one, the beginning and the end of each matrix, and all of a small one, would lie in small pages.
#[derive(Debug, Default)]
pub(crate) struct PackedMemory {
    /// The block that is being filled; earlier ones are kept alive by their matrices.
    block: Option<Arc<MemoryBlock>>,
    /// Bytes of the block that are allocated.
    used: usize,
}

impl PackedMemory {
    /// Allocates zeros for a matrix. `None` when there is not enough memory.
    pub(crate) fn allocate(&mut self, bytes: usize) -> Option<PackedBytes> {
        if self.block.as_ref().is_none_or(|block| bytes > block.len - self.used) {
            self.block = Some(Arc::new(MemoryBlock::new(bytes.max(BLOCK))?));
            self.used = 0;
        }
        let block = Arc::clone(self.block.as_ref()?);
        let start = self.used;
        self.used = (start + bytes).next_multiple_of(ALIGNMENT).min(block.len);
        Some(PackedBytes { block, start, len: bytes })
    }
}

/// Memory of several matrices.
struct MemoryBlock {
    /// The first byte, at a large-page boundary; it has the provenance of the whole mapping.
    start: *mut u8,
    /// Bytes from `start` on.
    len: usize,
    /// Owns the memory; accessed through `start` only.
    _mapping: MmapMut,
}

// SAFETY: the block owns its memory, which is accessed through the disjoint ranges of `PackedBytes` alone.
unsafe impl Send for MemoryBlock {}
// SAFETY: as above.
unsafe impl Sync for MemoryBlock {}

impl MemoryBlock {
    fn new(len: usize) -> Option<Self> {
        let mut mapping = zeros(len.checked_add(LARGE_PAGE)?)?;
        let before = mapping.as_ptr().align_offset(LARGE_PAGE).min(LARGE_PAGE);
        // SAFETY: the mapping is a large page longer than the block.
        let start = unsafe { mapping.as_mut_ptr().add(before) };
        Some(Self { start, len, _mapping: mapping })
    }
}

impl fmt::Debug for MemoryBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MemoryBlock({} bytes)", self.len)
    }
}

/// The memory of one matrix: a range of a block that no other matrix has.
#[derive(Debug)]
pub(crate) struct PackedBytes {
    block: Arc<MemoryBlock>,
    start: usize,
    len: usize,
}

impl Deref for PackedBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the range lies inside the block, which `self` keeps alive, and belongs to `self` alone.
        unsafe { std::slice::from_raw_parts(self.block.start.add(self.start), self.len) }
    }
}

impl DerefMut for PackedBytes {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.block.start.add(self.start), self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matrices_get_disjoint_bytes_and_keep_them() {
        let mut memory = PackedMemory::default();
        // Sizes of 0, odd sizes, exactly a block, and more than a block.
        let sizes = [0, 1, 100, BLOCK - 256, 1, BLOCK, BLOCK + 1, 4096, 0];
        let mut all: Vec<_> = sizes.iter().map(|&n| memory.allocate(n).expect("memory")).collect();
        drop(memory);
        for (i, bytes) in all.iter_mut().enumerate() {
            assert!(bytes.iter().all(|&b| b == 0), "zeros");
            assert!(bytes.as_ptr().addr().is_multiple_of(ALIGNMENT));
            bytes.fill(i as u8 + 1);
        }
        for (i, (bytes, n)) in all.iter().zip(sizes).enumerate() {
            assert!(bytes.len() == n && bytes.iter().all(|&b| b == i as u8 + 1), "matrix {i}");
        }
        assert!(all[0].block.start.addr().is_multiple_of(LARGE_PAGE));
        assert!(Arc::ptr_eq(&all[0].block, &all[3].block), "side by side");
        assert!(PackedMemory::default().allocate(usize::MAX).is_none(), "no memory");
    }
}
