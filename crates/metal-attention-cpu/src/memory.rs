//! Memory in large pages: of states, and of repacked matrices.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use memmap2::MmapMut;

/// Bytes of a large page, of which a core knows the addresses of far more memory by heart than of pages of 4 KiB.
const LARGE_PAGE: usize = 2 << 20;
/// Bytes that are taken from the system at once, where no matrix needs more.
const BLOCK: usize = 32 * LARGE_PAGE;
/// What a matrix begins at a multiple of: a cache line.
const ALIGNMENT: usize = 64;

/// Zeros, which the system makes as they are first touched, in large pages where it has them: else they are merely slower to reach.
/// `None` when there is no memory for them.
pub(crate) fn zeros(bytes: usize) -> Option<MmapMut> {
    let mapping = MmapMut::map_anon(bytes).ok()?;
    #[cfg(target_os = "linux")]
    let _ = mapping.advise(memmap2::Advice::HugePage);
    Some(mapping)
}

/// Gives the matrices of a model memory, each behind the one before: they fill large pages together, where each for itself
/// would leave the beginning and the end of its memory, and small ones all of it, in small pages.
#[derive(Debug, Default)]
pub(crate) struct PackedMemory {
    block: Option<Arc<MemoryBlock>>,
    /// Bytes of the block that matrices have.
    used: usize,
}

impl PackedMemory {
    /// [`zeros`] for a matrix. `None` when there is no memory for them.
    pub(crate) fn take(&mut self, bytes: usize) -> Option<PackedBytes> {
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

/// Memory of many matrices, the first of which begins with a large page.
struct MemoryBlock {
    /// Of all bytes from there on.
    start: *mut u8,
    len: usize,
    /// Whose memory it is. Nobody looks at it any more.
    _mapping: MmapMut,
}

// SAFETY: the memory is the block's, whichever thread has it, and is used through the parts of `PackedBytes` alone.
unsafe impl Send for MemoryBlock {}
// SAFETY: as above.
unsafe impl Sync for MemoryBlock {}

impl MemoryBlock {
    fn new(len: usize) -> Option<Self> {
        let mut mapping = zeros(len.checked_add(LARGE_PAGE)?)?;
        let before = mapping.as_ptr().align_offset(LARGE_PAGE).min(LARGE_PAGE);
        // SAFETY: so many bytes are mapped besides the `len` of the block.
        let start = unsafe { mapping.as_mut_ptr().add(before) };
        Some(Self { start, len, _mapping: mapping })
    }
}

impl fmt::Debug for MemoryBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MemoryBlock({} bytes)", self.len)
    }
}

/// The bytes of a matrix, which nobody else has.
#[derive(Debug)]
pub(crate) struct PackedBytes {
    block: Arc<MemoryBlock>,
    start: usize,
    len: usize,
}

impl Deref for PackedBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the bytes lie inside the block, which lives as long as this part of it, and are this part's alone.
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
    fn matrices_have_bytes_of_their_own_and_keep_them() {
        let mut memory = PackedMemory::default();
        // Of no, odd, exactly as many and more bytes than a block has.
        let sizes = [0, 1, 100, BLOCK - 256, 1, BLOCK, BLOCK + 1, 4096, 0];
        let mut all: Vec<_> = sizes.iter().map(|&n| memory.take(n).expect("memory")).collect();
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
        assert!(PackedMemory::default().take(usize::MAX).is_none(), "no memory");
    }
}
