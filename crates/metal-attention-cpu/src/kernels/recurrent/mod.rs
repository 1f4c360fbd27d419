//! Recurrences: mixers that keep a state of fixed size instead of keys and values.
//!
//! All but Mamba keep a matrix for each head, `[key_dim, value_dim]`, a row for each element of the key (in Mamba-2: of `B`
//! and `C`). Its columns are independent of each other, so they lie across the lanes of a vector, and no sums across lanes
//! are needed. [`run_tokens`] processes the tokens one by one, as the papers write the recurrences; the result of a token is
//! bit for bit the same however many tokens are in the call.
//!
//! A task of the callers is a head or, in [`mamba`] and [`convolution`], a range of channels. Tasks read common inputs and
//! write disjoint outputs and states. States are F32 and are updated in place, or read from one slot and written to another.

pub(crate) mod convolution;
pub(crate) mod delta_rule;
pub(crate) mod gates;
pub(crate) mod head_output;
pub(crate) mod mamba;
pub(crate) mod mamba2;
pub(crate) mod rwkv6;
pub(crate) mod rwkv7;
pub(crate) mod short_conv;
pub(crate) mod time_mix;
mod vectors;

use std::marker::PhantomData;

use crate::shared::SharedMut;
use crate::simd::{Isa, Kernel, LANES, Simd};

/// Input rows that begin `stride` floats apart, such as one head's columns of a `[n_tokens, n_head * head_dim]` buffer.
#[derive(Clone, Copy)]
pub(crate) struct StridedRows<'a> {
    ptr: *const f32,
    count: usize,
    width: usize,
    stride: usize,
    borrow: PhantomData<&'a [f32]>,
}

impl<'a> StridedRows<'a> {
    /// `rows` rows of `width` floats, the first one at the beginning of `data`. Panics where `data` is too short.
    pub(crate) fn new(data: &'a [f32], rows: usize, width: usize, stride: usize) -> Self {
        assert!(data.len() >= span_len(rows, width, stride), "rows inside the buffer");
        Self { ptr: data.as_ptr(), count: rows, width, stride, borrow: PhantomData }
    }

    /// Rows of a shared buffer, the first one at element `first`. Panics where the buffer is too short.
    ///
    /// # Safety
    ///
    /// No thread writes to these rows while the result is in use. Other threads may write to the elements between them.
    pub(crate) unsafe fn shared(
        data: &SharedMut<'a, f32>,
        first: usize,
        rows: usize,
        width: usize,
        stride: usize,
    ) -> Self {
        let end = first.checked_add(span_len(rows, width, stride)).expect("rows inside the buffer");
        let _ = data.at(end);
        Self { ptr: data.at(first), count: rows, width, stride, borrow: PhantomData }
    }

    /// Row `i`.
    #[inline(always)]
    fn row(&self, i: usize) -> &'a [f32] {
        assert!(i < self.count, "one of the rows");
        // SAFETY: inside the buffer, as checked by the constructors; no thread writes to it.
        unsafe { std::slice::from_raw_parts(self.ptr.add(i * self.stride), self.width) }
    }

    /// A pointer to row `i`.
    #[inline(always)]
    fn at(&self, i: usize) -> *const f32 {
        self.row(i).as_ptr()
    }
}

/// Output or state rows that begin `stride` floats apart and are accessed by one task alone.
pub(crate) struct StridedRowsMut<'a> {
    ptr: *mut f32,
    count: usize,
    width: usize,
    stride: usize,
    borrow: PhantomData<&'a mut [f32]>,
}

impl<'a> StridedRowsMut<'a> {
    /// `rows` rows of `width` floats, the first one at the beginning of `data`. Panics where `data` is too short.
    pub(crate) fn new(data: &'a mut [f32], rows: usize, width: usize, stride: usize) -> Self {
        assert!(data.len() >= span_len(rows, width, stride), "rows inside the buffer");
        Self { ptr: data.as_mut_ptr(), count: rows, width, stride, borrow: PhantomData }
    }

    /// Rows of a shared buffer, the first one at element `first`. Panics where the buffer is too short.
    ///
    /// # Safety
    ///
    /// No other thread accesses these rows while the result is in use. Other threads may access the elements between them.
    pub(crate) unsafe fn shared(
        data: &SharedMut<'a, f32>,
        first: usize,
        rows: usize,
        width: usize,
        stride: usize,
    ) -> Self {
        // The end is one past the last element, which `at` checks; the addition may not wrap.
        let end = first.checked_add(span_len(rows, width, stride)).expect("rows inside the buffer");
        let _ = data.at(end);
        Self { ptr: data.at(first), count: rows, width, stride, borrow: PhantomData }
    }

    /// A pointer to row `i`.
    #[inline(always)]
    fn at(&self, i: usize) -> *mut f32 {
        assert!(i < self.count, "one of the rows");
        // SAFETY: inside the buffer, as checked by the constructors.
        unsafe { self.ptr.add(i * self.stride) }
    }
}

/// The number of floats from the beginning of the first row to the end of the last one.
fn span_len(rows: usize, width: usize, stride: usize) -> usize {
    assert!(rows <= 1 || width <= stride, "rows that do not overlap");
    match rows {
        0 => 0,
        1.. => (rows - 1).checked_mul(stride).and_then(|n| n.checked_add(width)).expect("rows inside the buffer"),
    }
}

/// The recurrence of one head over consecutive tokens of one sequence.
pub(crate) trait HeadRecurrence {
    /// The number of tokens.
    fn n_tokens(&self) -> usize;
    /// Columns of the state: elements of a value.
    fn n_columns(&self) -> usize;
    /// Panics where the shapes of the inputs do not match.
    fn check(&self);
    /// Computes one token for the columns `column..column + 16 V` or, where `PART` is set, for the columns from `column` on,
    /// which are fewer than 16.
    ///
    /// # Safety
    ///
    /// [`check`](Self::check) has returned; token and columns are in range; the CPU has the instruction set.
    unsafe fn step<S: Simd, const V: usize, const PART: bool>(&self, token: usize, column: usize);
}

/// Computes all tokens of a head, one after the other. Panics where the shapes of its inputs do not match.
pub(crate) fn run_tokens<H: HeadRecurrence>(isa: Isa, head: &H) {
    head.check();
    isa.run(TokenLoop(head));
}

/// The kernel of [`run_tokens`], for a head whose inputs are checked.
struct TokenLoop<'a, H>(&'a H);

impl<H: HeadRecurrence> Kernel for TokenLoop<'_, H> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: checked; the caller vouches for the instruction set.
        unsafe { token_by_token::<S, H>(self.0) }
    }
}

/// Computes all tokens for as many columns at a time as fit the registers.
#[inline(always)]
unsafe fn token_by_token<S: Simd, H: HeadRecurrence>(head: &H) {
    let n = head.n_columns();
    let mut column = 0;
    // SAFETY: as the caller vouches.
    unsafe {
        // Wide groups of columns read the rows of the state sequentially; narrow ones would touch each row again and again,
        // with rows that compete for the same sets of the L1 cache.
        if const { S::TILE >= 8 } {
            while n - column >= 8 * LANES {
                columns::<S, H, 8, false>(head, column);
                column += 8 * LANES;
            }
            while n - column >= 4 * LANES {
                columns::<S, H, 4, false>(head, column);
                column += 4 * LANES;
            }
        } else {
            while n - column >= 2 * LANES {
                columns::<S, H, 2, false>(head, column);
                column += 2 * LANES;
            }
        }
        while n - column >= LANES {
            columns::<S, H, 1, false>(head, column);
            column += LANES;
        }
        if column < n {
            columns::<S, H, 1, true>(head, column);
        }
    }
}

/// Computes all tokens for the columns of one [`HeadRecurrence::step`].
#[inline(always)]
unsafe fn columns<S: Simd, H: HeadRecurrence, const V: usize, const PART: bool>(head: &H, column: usize) {
    for token in 0..head.n_tokens() {
        // SAFETY: as the caller vouches.
        unsafe { head.step::<S, V, PART>(token, column) };
    }
}
