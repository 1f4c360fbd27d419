//! Loads and stores of whole vectors, and of partial ones at the end of a row. Where a constant `PART` is set, only the first
//! `n` lanes are read or written; kernels use it for the last columns or channels.

use crate::simd::{LANES, Simd};

/// Loads 16 floats or, where `PART` is set, `n` floats followed by zeros.
///
/// # Safety
///
/// `p` points to 16 floats, or to `n` where `PART` is set; the CPU has the instruction set.
#[inline(always)]
pub(crate) unsafe fn load<S: Simd, const PART: bool>(p: *const f32, n: usize) -> S::F {
    // SAFETY: as the caller vouches.
    unsafe {
        if PART {
            let mut lanes = [0.0; LANES];
            std::ptr::copy_nonoverlapping(p, lanes.as_mut_ptr(), n.min(LANES));
            S::f_load(lanes.as_ptr())
        } else {
            S::f_load(p)
        }
    }
}

/// Stores 16 floats or, where `PART` is set, the first `n` of them.
///
/// # Safety
///
/// `p` points to 16 floats, or to `n` where `PART` is set; the CPU has the instruction set.
#[inline(always)]
pub(crate) unsafe fn store<S: Simd, const PART: bool>(p: *mut f32, x: S::F, n: usize) {
    // SAFETY: as the caller vouches.
    unsafe {
        if PART {
            let mut lanes = [0.0; LANES];
            S::f_store(lanes.as_mut_ptr(), x);
            std::ptr::copy_nonoverlapping(lanes.as_ptr(), p, n.min(LANES));
        } else {
            S::f_store(p, x);
        }
    }
}
