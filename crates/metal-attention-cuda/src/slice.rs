//! [`DeviceSlice`] and [`DevicePtr`]: parts of device buffers, as the host handles them and as kernels take them.
//!
//! Both are `Copy` and without a lifetime. Launches run after the call that submits them, and a CUDA graph keeps addresses beyond any
//! borrow; what keeps the memory alive is the order of the stream, for which `CudaBuffer::drop` waits. So a lifetime would say
//! something else than the rule that holds.

use std::fmt;
use std::marker::PhantomData;

use bytemuck::{Pod, Zeroable};

/// An F16 number in device memory, as its bits.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct F16(u16);

/// A device address of elements `T`, as a field of kernel arguments; null for none. It has no length: `KernelArgs::bounds` states how
/// many elements a kernel touches.
#[repr(transparent)]
pub(crate) struct DevicePtr<T> {
    /// The address; 0: null.
    address: u64,
    /// The type of the elements.
    element: PhantomData<T>,
}

impl<T> Clone for DevicePtr<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for DevicePtr<T> {}

// SAFETY: a `u64` and nothing else; 0 is the null pointer.
unsafe impl<T> Zeroable for DevicePtr<T> {}
// SAFETY: a transparent `u64`, of which every value is valid: only kernels follow it.
unsafe impl<T: 'static> Pod for DevicePtr<T> {}

impl<T> fmt::Debug for DevicePtr<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.address)
    }
}

impl<T> DevicePtr<T> {
    /// No address.
    pub(crate) const NULL: Self = Self::from_address(0);

    /// The address as a pointer. For memory that is no [`CudaBuffer`](crate::device::CudaBuffer): pinned memory, mailboxes of other
    /// ranks.
    pub(crate) const fn from_address(address: u64) -> Self {
        Self { address, element: PhantomData }
    }

    /// The same address, of elements of another type. Precondition: it is a multiple of their alignment in the kernel, up to 16 bytes for
    /// vectors; buffers begin at multiples of 256 bytes.
    pub(crate) const fn cast<U>(self) -> DevicePtr<U> {
        DevicePtr::from_address(self.address)
    }

    /// The address; 0: null.
    pub(crate) const fn address(self) -> u64 {
        self.address
    }

    /// Whether there is no address.
    pub(crate) const fn is_null(self) -> bool {
        self.address == 0
    }
}

/// Consecutive elements `T` in device memory: an address and a length.
pub(crate) struct DeviceSlice<T> {
    /// The first element.
    ptr: DevicePtr<T>,
    /// The number of elements.
    len: usize,
}

impl<T> Clone for DeviceSlice<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for DeviceSlice<T> {}

impl<T> fmt::Debug for DeviceSlice<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} + {}", self.ptr, self.len)
    }
}

impl<T> DeviceSlice<T> {
    /// No elements at the null pointer.
    pub(crate) const NONE: Self = Self { ptr: DevicePtr::NULL, len: 0 };

    /// `len` elements at `ptr`. Precondition: they are in one allocation.
    pub(crate) const fn new(ptr: DevicePtr<T>, len: usize) -> Self {
        Self { ptr, len }
    }

    /// The address of the first element, as kernels take it.
    pub(crate) const fn ptr(self) -> DevicePtr<T> {
        self.ptr
    }

    /// The number of elements.
    pub(crate) const fn len(self) -> usize {
        self.len
    }

    /// The elements from number `first` on.
    ///
    /// # Panics
    /// If there are fewer than `first`.
    pub(crate) fn skip(self, first: usize) -> Self {
        assert!(first <= self.len, "elements from {first} on of {}", self.len);
        Self::new(DevicePtr::from_address(self.ptr.address + (first * size_of::<T>()) as u64), self.len - first)
    }

    /// The first `n` elements.
    ///
    /// # Panics
    /// If there are fewer than `n`.
    pub(crate) fn take(self, n: usize) -> Self {
        assert!(n <= self.len, "{n} elements of {}", self.len);
        Self::new(self.ptr, n)
    }

    /// The same memory as elements of another type: the whole ones that fit. Precondition as of [`DevicePtr::cast`].
    pub(crate) fn cast<U>(self) -> DeviceSlice<U> {
        DeviceSlice::new(DevicePtr::from_address(self.ptr.address), self.len * size_of::<T>() / size_of::<U>())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_slices_have_their_addresses_and_lengths() {
        let all = DeviceSlice::<f32>::new(DevicePtr::from_address(4096), 100);
        let part = all.skip(10).take(5);
        assert_eq!((part.ptr().address(), part.len()), (4136, 5));
        let vectors = all.skip(90).cast::<[u32; 4]>();
        assert_eq!((vectors.ptr().address(), vectors.len()), (4456, 2));
        assert!(DeviceSlice::<F16>::NONE.ptr().is_null());
        assert!(std::panic::catch_unwind(|| all.skip(101)).is_err());
        assert!(std::panic::catch_unwind(|| all.take(101)).is_err());
    }
}
