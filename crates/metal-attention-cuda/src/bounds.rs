//! The memory that a launch touches in each buffer, as far as its arguments tell: [`KernelArgs::bounds`] states it for each address
//! among a kernel's arguments, and [`check`] compares it with the allocations. In debug builds `CudaDevice::launch` does so before each launch; a release build
//! keeps no list of allocations and checks nothing.
//!
//! What lies in device memory is not looked at: pages and positions of tokens, slots of states, the items of sorted groups.
//! Where the bounds depend on it, the smallest ones are stated, mostly that of one row, page or slot.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use bytemuck::Pod;

use crate::CudaError;
use crate::args::MatrixArgs;
use crate::launch::LaunchGrid;
use crate::matrix::{PANEL, TILE, WeightLayout};
use crate::slice::{DevicePtr, F16};

/// The arguments of a kernel: a structure that a kernel of `kernels.rs` takes by value.
pub(crate) trait KernelArgs: Pod {
    /// States the elements that `launch` may touch through each address.
    fn bounds(&self, launch: &Launch, bounds: &mut Bounds);
}

/// A launch, as far as the bounds of its arguments depend on it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Launch {
    /// The kernel's name.
    pub(crate) kernel: &'static str,
    /// The grid.
    pub(crate) grid: LaunchGrid,
}

impl Launch {
    /// The number at the end of the kernel's name, such as the tokens of `matvec_4`; `None`: it ends in a word.
    pub(crate) fn number(&self) -> Option<usize> {
        self.kernel.rsplit('_').next().and_then(|word| word.parse().ok())
    }

    /// Bytes of an element of the KV cache. Kernels with a variant for each cache type have it in their name (`of_cache` of
    /// `kernels.rs`), such as `append_f32`; the others have an F16 cache.
    pub(crate) fn cache_bytes(&self) -> usize {
        if self.kernel.split('_').any(|word| word == "f32") { 4 } else { 2 }
    }
}

/// Collects the bounds of one launch, and keeps the first error.
#[derive(Debug)]
pub(crate) struct Bounds {
    /// The kernel's name.
    kernel: &'static str,
    /// The first address that does not have what the kernel may touch.
    error: Option<CudaError>,
}

impl Bounds {
    /// The kernel may touch the first `n` elements at `ptr`, the argument `field`. Null addresses are not touched.
    pub(crate) fn array<T>(&mut self, field: &'static str, ptr: DevicePtr<T>, n: usize) {
        if self.error.is_some() || ptr.is_null() || n == 0 {
            return;
        }
        let (needed, available) = (n as u64 * size_of::<T>() as u64, available(ptr.address()));
        if needed > available {
            self.error = Some(CudaError::OutOfBounds { kernel: self.kernel, field, needed, available });
        }
    }

    /// The first `width` elements of each of `n_rows` rows that are `stride` elements apart.
    pub(crate) fn rows<T>(&mut self, field: &'static str, ptr: DevicePtr<T>, n_rows: usize, stride: u32, width: usize) {
        if n_rows > 0 {
            self.array(field, ptr, (n_rows - 1) * stride as usize + width);
        }
    }

    /// Packed F16 rows of `width` elements. `order`: tiles of 8 tokens, with the flag `WIDE` (`packed_input` of `common.cuh`).
    pub(crate) fn packed(&mut self, field: &'static str, ptr: DevicePtr<F16>, order: u32, width: usize) {
        /// `WIDE` of `common.cuh`.
        const WIDE: u32 = 1 << 31;
        self.array(field, ptr, width.next_multiple_of(PANEL) * 8 * (order & !WIDE) as usize);
    }

    /// All records of `n` matrices of the shape and layout of `matrix`.
    pub(crate) fn matrices(&mut self, field: &'static str, matrix: &MatrixArgs, n: usize) {
        if matrix.records.is_null() {
            return;
        }
        let Some(layout) = WeightLayout::from_code(matrix.format) else {
            let format = matrix.format;
            self.error.get_or_insert(CudaError::UnknownFormat { kernel: self.kernel, field, format });
            return;
        };
        let tiles = (matrix.n_rows as usize).div_ceil(TILE);
        self.array(field, matrix.records, n * tiles * layout.tile_bytes(matrix.n_panels as usize));
    }
}

/// Whether launches are checked: in debug builds. In others nothing is noted or compared.
const CHECKS: bool = cfg!(debug_assertions);

/// An error if what the host knows of `launch` reaches beyond a buffer.
pub(crate) fn check<A: KernelArgs>(launch: &Launch, args: &A) -> Result<(), CudaError> {
    let mut bounds = Bounds { kernel: launch.kernel, error: None };
    if CHECKS {
        args.bounds(launch, &mut bounds);
    }
    bounds.error.map_or(Ok(()), Err)
}

/// An allocation that kernels may touch.
struct Allocation {
    /// The address after its last byte.
    end: u64,
    /// The parts that it is divided into at present, as address and bytes; none: it is one.
    parts: Vec<(u64, u64)>,
}

/// All allocations of this process, by address. Addresses of all devices and of pinned memory are of one space.
static ALLOCATIONS: Mutex<BTreeMap<u64, Allocation>> = Mutex::new(BTreeMap::new());

fn allocations() -> MutexGuard<'static, BTreeMap<u64, Allocation>> {
    ALLOCATIONS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Bytes from `address` to the end of its allocation, or of the part of it; 0: no allocation has it.
fn available(address: u64) -> u64 {
    let allocations = allocations();
    let Some((_, allocation)) = allocations.range(..=address).next_back() else { return 0 };
    let part = allocation.parts.iter().find(|(at, bytes)| (*at..at + bytes).contains(&address));
    part.map_or(allocation.end, |(at, bytes)| at + bytes).saturating_sub(address)
}

/// Notes an allocation.
pub(crate) fn note_allocation(address: u64, bytes: u64) {
    if CHECKS {
        allocations().insert(address, Allocation { end: address + bytes, parts: Vec::new() });
    }
}

/// Notes that an allocation is freed.
pub(crate) fn note_free(address: u64) {
    if CHECKS {
        allocations().remove(&address);
    }
}

/// Notes that the allocation at `address` is divided into `parts`, as address and bytes: a kernel that is given one of them may not reach
/// into the next.
pub(crate) fn note_parts(address: u64, parts: impl Iterator<Item = (u64, u64)>) {
    if CHECKS && let Some(allocation) = allocations().get_mut(&address) {
        allocation.parts.clear();
        allocation.parts.extend(parts);
    }
}

#[cfg(all(test, debug_assertions))]
mod tests {
    use super::*;

    #[test]
    fn addresses_have_what_is_left_of_their_part() {
        // No device has such addresses.
        let base = 1 << 60;
        note_allocation(base, 1000);
        assert_eq!([0, 999, 1000].map(|at| available(base + at)), [1000, 1, 0]);
        note_parts(base, [(base + 100, 50), (base + 150, 50)].into_iter());
        assert_eq!([0, 100, 149, 150, 300].map(|at| available(base + at)), [1000, 50, 1, 50, 700]);
        note_free(base);
        assert_eq!(available(base), 0);
    }
}
