//! Recurrences: mixers that keep a state of fixed size instead of keys and values.
//!
//! All but Mamba-1 keep a matrix for each head, `[key_dim, value_dim]`, a row for each element of the key (Mamba: of B and
//! C), whose columns do not touch each other. So the columns lie across the lanes of a vector, and no sum runs over lanes. A
//! head comes in two forms:
//!
//! - [`run_tokens`] goes token by token, as the papers write it. What it computes for a token does not depend, bit for bit,
//!   on how many tokens come with it.
//! - [`run`] takes up to [`Head::CHUNK`] tokens at once, where there are as many, as products of matrices ([`products`]): what
//!   the state before the chunk gives each token, what the tokens of the chunk give each other, and the state after. It rounds
//!   otherwise than the first form does; the tests hold both to float64.
//!
//! A task is a head, or some columns of one, or in [`mamba`] and [`convolution`] a range of channels: tasks share inputs and
//! write to what is theirs alone. States are F32 and are changed in place.

pub(crate) mod convolution;
pub(crate) mod delta_rule;
pub(crate) mod gated_norm;
pub(crate) mod gates;
pub(crate) mod mamba;
pub(crate) mod mamba2;
mod products;
pub(crate) mod rwkv6;
pub(crate) mod rwkv7;
pub(crate) mod short_conv;
pub(crate) mod time_mix;
mod vectors;

use std::marker::PhantomData;
use std::ops::Range;

use crate::shared::SharedMut;
use crate::simd::{Isa, Kernel, LANES, Simd};

/// Fewer tokens than this go one by one: what a chunk has to set up would take longer.
const SHORTEST_CHUNK: usize = 8;

/// What is left of a state after a chunk, at least, where a channel decays by itself and the chunk divides by that.
const SMALLEST_DECAY: f32 = 1e-15;

/// Rows that lie `stride` floats apart, such as those of one head among those of all: an input.
#[derive(Clone, Copy)]
pub(crate) struct Rows<'a> {
    ptr: *const f32,
    count: usize,
    width: usize,
    stride: usize,
    borrow: PhantomData<&'a [f32]>,
}

impl<'a> Rows<'a> {
    /// `rows` rows of `width` floats, the first one at the beginning of `data`.
    pub(crate) fn new(data: &'a [f32], rows: usize, width: usize, stride: usize) -> Self {
        assert!(data.len() >= extent(rows, width, stride), "rows inside the buffer");
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
        let end = first.checked_add(extent(rows, width, stride)).expect("rows inside the buffer");
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
pub(crate) struct RowsMut<'a> {
    ptr: *mut f32,
    count: usize,
    width: usize,
    stride: usize,
    borrow: PhantomData<&'a mut [f32]>,
}

impl<'a> RowsMut<'a> {
    /// `rows` rows of `width` floats, the first one at the beginning of `data`.
    pub(crate) fn new(data: &'a mut [f32], rows: usize, width: usize, stride: usize) -> Self {
        assert!(data.len() >= extent(rows, width, stride), "rows inside the buffer");
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
        let end = first.checked_add(extent(rows, width, stride)).expect("rows inside the buffer");
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
fn extent(rows: usize, width: usize, stride: usize) -> usize {
    assert!(rows <= 1 || width <= stride, "rows that do not overlap");
    match rows {
        0 => 0,
        _ => (rows - 1).checked_mul(stride).and_then(|n| n.checked_add(width)).expect("rows inside the buffer"),
    }
}

/// One head of one sequence over some tokens: its recurrence in both forms.
pub(crate) trait Head {
    /// Tokens of a chunk, at most.
    const CHUNK: usize;

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
    /// Floats that [`chunk`](Self::chunk) works in.
    fn scratch(&self) -> usize;
    /// As many of `tokens`, from the first on, as one chunk can take.
    #[inline(always)]
    fn chunk_end(&self, tokens: Range<usize>) -> usize {
        tokens.end
    }
    /// All columns, all `tokens` at once, no more than a [`CHUNK`](Self::CHUNK); `scratch` holds anything. Inlined, so that what
    /// stands between the products is compiled for the instruction set, too.
    ///
    /// # Safety
    ///
    /// The head is [checked](Self::check), and has the tokens; there is as much scratch as it asks for.
    unsafe fn chunk(&self, isa: Isa, tokens: Range<usize>, scratch: Scratch<'_>);
}

/// Runs a head token by token.
pub(crate) fn run_tokens<H: Head>(isa: Isa, head: &H) {
    head.check();
    isa.run(Tokens { head, tokens: 0..head.n_tokens() });
}

/// Runs a head chunk by chunk; the vector is for what lies between, and can be used again.
fn run_chunks<H: Head>(isa: Isa, head: &H, scratch: &mut Vec<f32>) {
    head.check();
    let n_scratch = head.scratch();
    if scratch.len() < n_scratch {
        scratch.resize(n_scratch, 0.0);
    }
    let (mut token, n_tokens) = (0, head.n_tokens());
    while token < n_tokens {
        let end = head.chunk_end(token..n_tokens.min(token + H::CHUNK)).max(token + 1);
        let tokens = token..end;
        if tokens.len() < SHORTEST_CHUNK {
            isa.run(Tokens { head, tokens });
        } else {
            isa.run(Chunk { head, isa, tokens, scratch: &mut scratch[..n_scratch] });
        }
        token = end;
    }
}

/// Runs a head chunk by chunk, or token by token where there are few.
pub(crate) fn run<H: Head>(isa: Isa, head: &H, scratch: &mut Vec<f32>) {
    if head.n_tokens() < SHORTEST_CHUNK { run_tokens(isa, head) } else { run_chunks(isa, head, scratch) }
}

/// Some tokens of a head that is checked, one by one.
struct Tokens<'a, H> {
    head: &'a H,
    tokens: Range<usize>,
}

impl<H: Head> Kernel for Tokens<'_, H> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: checked; the caller vouches for the instruction set.
        unsafe { token_by_token::<S, H>(self.head, &self.tokens) }
    }
}

/// Some tokens of a head that is checked, at once.
struct Chunk<'a, H> {
    head: &'a H,
    isa: Isa,
    tokens: Range<usize>,
    scratch: &'a mut [f32],
}

impl<H: Head> Kernel for Chunk<'_, H> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: checked, and there is scratch.
        unsafe { self.head.chunk(self.isa, self.tokens, Scratch(self.scratch)) }
    }
}

/// All columns of some tokens.
#[inline(always)]
unsafe fn token_by_token<S: Simd, H: Head>(head: &H, tokens: &Range<usize>) {
    let n = head.n_columns();
    let mut column = 0;
    // SAFETY: passed on to the caller.
    unsafe {
        // As wide as there are registers for: whole rows are read in order, and need not share a few places of the L1 cache.
        if S::TILE >= 8 {
            while n - column >= 8 * LANES {
                columns::<S, H, 8, false>(head, tokens, column);
                column += 8 * LANES;
            }
            while n - column >= 4 * LANES {
                columns::<S, H, 4, false>(head, tokens, column);
                column += 4 * LANES;
            }
        } else {
            while n - column >= 2 * LANES {
                columns::<S, H, 2, false>(head, tokens, column);
                column += 2 * LANES;
            }
        }
        while n - column >= LANES {
            columns::<S, H, 1, false>(head, tokens, column);
            column += LANES;
        }
        if column < n {
            columns::<S, H, 1, true>(head, tokens, column);
        }
    }
}

/// The columns of [`Head::step`], token by token.
#[inline(always)]
unsafe fn columns<S: Simd, H: Head, const V: usize, const PART: bool>(head: &H, tokens: &Range<usize>, column: usize) {
    for token in tokens.clone() {
        // SAFETY: passed on to the caller.
        unsafe { head.step::<S, V, PART>(token, column) };
    }
}

/// What is left of the floats that a chunk works in.
pub(crate) struct Scratch<'a>(&'a mut [f32]);

impl<'a> Scratch<'a> {
    /// The next `n`, which hold anything.
    #[inline(always)]
    fn take(&mut self, n: usize) -> &'a mut [f32] {
        self.0.split_off_mut(..n).expect("scratch for a chunk")
    }
}

/// The end of the longest run of `tokens` whose decays, multiplied, stay so large in every channel that what they divide
/// does not overflow, and what they multiply keeps its precision.
#[inline(always)]
fn end_of_slow_decay(decay: &Rows<'_>, tokens: Range<usize>) -> usize {
    let mut end = tokens.end;
    for first in (0..decay.width).step_by(LANES) {
        let n = LANES.min(decay.width - first);
        let mut left = [1.0_f32; LANES];
        for token in tokens.start..end {
            let mut least = 1.0_f32;
            for (left, decay) in left.iter_mut().zip(&decay.row(token)[first..first + n]) {
                *left *= decay;
                least = least.min(*left);
            }
            if least < SMALLEST_DECAY {
                end = token;
                break;
            }
        }
    }
    end
}

/// A state where a chunk changes it.
///
/// # Safety
///
/// Nobody else touches `to`, which has the rows of `from` and is another place.
unsafe fn copy_state(from: &Rows<'_>, to: &RowsMut<'_>) {
    for i in 0..from.count {
        // SAFETY: as the caller vouches.
        unsafe { std::ptr::copy_nonoverlapping(from.at(i), to.at(i), from.width) };
    }
}

/// `n`, rounded up to whole vectors.
const fn padded(n: usize) -> usize {
    n.next_multiple_of(LANES)
}
