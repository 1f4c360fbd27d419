//! Recurrences: mixers that keep a state of fixed size instead of keys and values.
//!
//! All but Mamba-1 keep a matrix for each head, `[key_dim, value_dim]`, a row for each element of the key (Mamba: of B and
//! C), whose columns do not touch each other. So the columns lie across the lanes of a vector, and no sum runs over lanes.
//! [`run_tokens`] goes token by token, as the papers write it. What it computes for a token does not depend, bit for bit, on how
//! many tokens come with it.
//!
//! A task is a head, or some columns of one, or in [`mamba`] and [`convolution`] a range of channels: tasks share inputs and
//! write to what is theirs alone. States are F32 and are changed in place.

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

/// Rows that lie `stride` floats apart, such as those of one head among those of all: an input.
#[derive(Clone, Copy)]
pub(crate) struct StridedRows<'a> {
    ptr: *const f32,
    count: usize,
    width: usize,
    stride: usize,
    borrow: PhantomData<&'a [f32]>,
}

impl<'a> StridedRows<'a> {
    /// `rows` rows of `width` floats, the first one at the beginning of `data`.
    pub(crate) fn new(data: &'a [f32], rows: usize, width: usize, stride: usize) -> Self {
        assert!(data.len() >= span_len(rows, width, stride), "rows inside the buffer");
        Self { ptr: data.as_ptr(), count: rows, width, stride, borrow: PhantomData }
    }

    /// The same from element `first` of a buffer to which other tasks write elsewhere.
    ///
    /// # Safety
    ///
    /// Nobody writes to these rows as long as this is alive. What lies between them may be anybody's.
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
        // SAFETY: inside the buffer, as checked when this was made, which nobody changes meanwhile.
        unsafe { std::slice::from_raw_parts(self.ptr.add(i * self.stride), self.width) }
    }

    #[inline(always)]
    fn at(&self, i: usize) -> *const f32 {
        self.row(i).as_ptr()
    }
}

/// Rows that lie `stride` floats apart and that nobody else reads or writes: an output, or a state.
pub(crate) struct StridedRowsMut<'a> {
    ptr: *mut f32,
    count: usize,
    width: usize,
    stride: usize,
    borrow: PhantomData<&'a mut [f32]>,
}

impl<'a> StridedRowsMut<'a> {
    /// `rows` rows of `width` floats, the first one at the beginning of `data`.
    pub(crate) fn new(data: &'a mut [f32], rows: usize, width: usize, stride: usize) -> Self {
        assert!(data.len() >= span_len(rows, width, stride), "rows inside the buffer");
        Self { ptr: data.as_mut_ptr(), count: rows, width, stride, borrow: PhantomData }
    }

    /// The same from element `first` of a buffer on that other tasks write to, too.
    ///
    /// # Safety
    ///
    /// Nobody else touches these rows as long as this is alive. What lies between them may be anybody's.
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

    #[inline(always)]
    fn at(&self, i: usize) -> *mut f32 {
        assert!(i < self.count, "one of the rows");
        // SAFETY: inside the buffer, as checked when this was made.
        unsafe { self.ptr.add(i * self.stride) }
    }
}

/// Floats from the first one of the first row to the last one of the last.
fn span_len(rows: usize, width: usize, stride: usize) -> usize {
    assert!(rows <= 1 || width <= stride, "rows that do not overlap");
    match rows {
        0 => 0,
        _ => (rows - 1).checked_mul(stride).and_then(|n| n.checked_add(width)).expect("rows inside the buffer"),
    }
}

/// One head of one sequence over some tokens.
pub(crate) trait HeadRecurrence {
    fn n_tokens(&self) -> usize;
    /// Columns of the state, elements of a value.
    fn n_columns(&self) -> usize;
    /// Panics where the inputs do not fit each other.
    fn check(&self);
    /// One token of the columns `column..column + 16 V`, or, where `PART`, of those from `column` on that are left.
    ///
    /// # Safety
    ///
    /// The head is [checked](Self::check), and has the token and columns; the CPU has the instruction set.
    unsafe fn step<S: Simd, const V: usize, const PART: bool>(&self, token: usize, column: usize);
}

/// Runs a head token by token.
pub(crate) fn run_tokens<H: HeadRecurrence>(isa: Isa, head: &H) {
    head.check();
    isa.run(TokenLoop(head));
}

/// All tokens of a head that is checked, one by one.
struct TokenLoop<'a, H>(&'a H);

impl<H: HeadRecurrence> Kernel for TokenLoop<'_, H> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: checked; the caller vouches for the instruction set.
        unsafe { token_by_token::<S, H>(self.0) }
    }
}

/// All columns of all tokens.
#[inline(always)]
unsafe fn token_by_token<S: Simd, H: HeadRecurrence>(head: &H) {
    let n = head.n_columns();
    let mut column = 0;
    // SAFETY: passed on to the caller.
    unsafe {
        // As wide as there are registers for: whole rows are read in order, and need not share a few places of the L1 cache.
        if S::TILE >= 8 {
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

/// The columns of [`HeadRecurrence::step`], token by token.
#[inline(always)]
unsafe fn columns<S: Simd, H: HeadRecurrence, const V: usize, const PART: bool>(head: &H, column: usize) {
    for token in 0..head.n_tokens() {
        // SAFETY: passed on to the caller.
        unsafe { head.step::<S, V, PART>(token, column) };
    }
}
