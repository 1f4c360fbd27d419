//! The bytes of a file: mapped, or in memory at an aligned address.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use memmap2::Mmap;

#[cfg(unix)]
use crate::lost_pages::MappedFileGuard;

/// The alignment of a file in memory: a cache line.
const ALIGNMENT: usize = 64;

/// The bytes of a file.
#[derive(Debug)]
pub(crate) enum Storage {
    /// A read-only mapping, aligned to pages.
    Mapped {
        /// The registration of the mapping for the handler of `SIGBUS`. It is declared first, so that it is dropped before
        /// `map`.
        #[cfg(unix)]
        _guard: MappedFileGuard,
        map: Mmap,
    },
    /// A buffer in which the file begins at `start`, so that it is aligned to [`ALIGNMENT`].
    Memory { buffer: Vec<u8>, start: usize },
}

impl Storage {
    /// Maps the whole `file`, which must not be empty. `path` is its name for messages.
    ///
    /// # Safety
    /// No process truncates or changes the file as long as the value exists.
    #[cfg_attr(not(unix), allow(unused_variables))]
    pub(crate) unsafe fn map(file: &File, path: &Path) -> io::Result<Self> {
        // SAFETY: the mapping is private and read-only, and the caller promises that the file does not change.
        let map = unsafe { Mmap::map(file) }?;
        Ok(Self::Mapped {
            #[cfg(unix)]
            _guard: MappedFileGuard::new(path, &map),
            map,
        })
    }

    /// Reads `len` bytes of a file to memory, or fewer where it has become shorter. An error of the kind `OutOfMemory` where
    /// there is not enough memory.
    pub(crate) fn read(file: &File, len: u64) -> io::Result<Self> {
        let capacity = usize::try_from(len).ok().and_then(|len| len.checked_add(ALIGNMENT));
        let mut buffer: Vec<u8> = Vec::new();
        let reserved = capacity.is_some_and(|capacity| buffer.try_reserve_exact(capacity).is_ok());
        if !reserved {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        let start = buffer.as_ptr().align_offset(ALIGNMENT);
        buffer.resize(start, 0);
        file.take(len).read_to_end(&mut buffer)?;
        Ok(Self::Memory { buffer, start })
    }

    /// Copies a file in memory to an aligned buffer.
    pub(crate) fn copy(bytes: &[u8]) -> Self {
        let mut buffer: Vec<u8> = Vec::with_capacity(bytes.len() + ALIGNMENT);
        let start = buffer.as_ptr().align_offset(ALIGNMENT);
        buffer.resize(start, 0);
        buffer.extend_from_slice(bytes);
        Self::Memory { buffer, start }
    }

    /// The bytes of the file.
    pub(crate) fn bytes(&self) -> &[u8] {
        match self {
            Self::Mapped { map, .. } => map,
            Self::Memory { buffer, start } => &buffer[*start..],
        }
    }

    /// Releases the resident pages of a range of a mapped file. An error of the system is ignored: pages that stay resident are
    /// harmless.
    #[cfg_attr(not(unix), allow(unused_variables))]
    pub(crate) fn release(&self, start: usize, len: usize) {
        #[cfg(unix)]
        if let Self::Mapped { map, .. } = self {
            // SAFETY: DONTNEED on a read-only mapping of a file drops clean pages only; the next
            // access reads the same bytes from the file again.
            let _ = unsafe { map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, start, len) };
        }
    }
}
