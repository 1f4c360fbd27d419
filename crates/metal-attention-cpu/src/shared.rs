//! Output buffers that several threads write at once, each its own part.

use std::marker::PhantomData;

/// A mutable slice handed to many tasks, each of which takes parts that no
/// other task takes.
pub(crate) struct SharedMut<'a, T> {
    ptr: *mut T,
    len: usize,
    borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: the parts taken by different threads do not overlap (see `slice`), so
// sharing is like splitting the `&mut [T]`, which may be sent when T may.
unsafe impl<T: Send> Sync for SharedMut<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for SharedMut<'_, T> {}

impl<'a, T> SharedMut<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Self { ptr: slice.as_mut_ptr(), len: slice.len(), borrow: PhantomData }
    }

    /// The elements `start..start + len`.
    ///
    /// # Safety
    ///
    /// No other part that overlaps may be alive.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn slice(&self, start: usize, len: usize) -> &'a mut [T] {
        assert!(start <= self.len && len <= self.len - start, "a part of the buffer");
        // SAFETY: in bounds as just checked; exclusive as the caller vouches.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(start), len) }
    }

    /// Pointer to element `i`, for kernels that write scattered elements.
    pub(crate) fn at(&self, i: usize) -> *mut T {
        assert!(i <= self.len, "inside the buffer");
        // SAFETY: in bounds or one past the end.
        unsafe { self.ptr.add(i) }
    }
}
