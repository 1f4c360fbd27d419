//! Buffers that several threads write to at the same time, each to other elements.

use std::marker::PhantomData;

/// A mutable slice that is shared by the tasks of a parallel region. Each task borrows ranges that no other task borrows.
pub(crate) struct SharedMut<'a, T> {
    ptr: *mut T,
    len: usize,
    borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: the ranges that different threads borrow do not overlap (see `slice`), so sharing is like splitting the `&mut [T]`,
// which may be sent when T may.
unsafe impl<T: Send> Sync for SharedMut<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for SharedMut<'_, T> {}

impl<'a, T> SharedMut<'a, T> {
    /// Shares `slice` for as long as it is borrowed.
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Self { ptr: slice.as_mut_ptr(), len: slice.len(), borrow: PhantomData }
    }

    /// Borrows the elements `start..start + len`; panics where they are out of range.
    ///
    /// # Safety
    ///
    /// No other borrowed range that overlaps is in use at the same time.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn slice(&self, start: usize, len: usize) -> &'a mut [T] {
        assert!(start <= self.len && len <= self.len - start, "a part of the buffer");
        // SAFETY: in bounds as just checked; exclusive as the caller vouches.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(start), len) }
    }

    /// A pointer to element `i`, or to the end, for kernels that write scattered elements.
    pub(crate) fn at(&self, i: usize) -> *mut T {
        assert!(i <= self.len, "inside the buffer");
        // SAFETY: in bounds or one past the end.
        unsafe { self.ptr.add(i) }
    }
}
