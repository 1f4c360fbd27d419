//! Sums over rows.

use super::{StridedRows, StridedRowsMut};
use crate::kernels::vectors::{load, store};
use crate::simd::{LANES, Simd, prefetch};

/// `sum over i of x[i] * decay[i] * rows[i]` for `V` vectors of each row, or without `decay` where there is none. The order of
/// additions does not depend on `V`.
///
/// # Safety
///
/// Each of the `x.len()` rows, `stride` apart, holds the vectors, or `n` floats where `PART`.
#[inline(always)]
pub(super) unsafe fn dot<S: Simd, const V: usize, const PART: bool>(
    x: &[f32],
    decay: Option<&[f32]>,
    rows: *const f32,
    stride: usize,
    n: usize,
) -> [S::F; V] {
    // SAFETY: as the caller vouches.
    unsafe {
        let at = |i: usize| decay.map_or(x[i], |decay| x[i] * decay[i]);
        // Two sums, so that additions need not wait for each other.
        let mut even = [S::f_splat(0.0); V];
        let mut odd = [S::f_splat(0.0); V];
        let mut i = 0;
        while i + 2 <= x.len() {
            let (a, b) = (S::f_splat(at(i)), S::f_splat(at(i + 1)));
            for v in 0..V {
                let row = rows.add(i * stride + v * LANES);
                even[v] = S::f_fma(a, load::<S, PART>(row, n), even[v]);
                odd[v] = S::f_fma(b, load::<S, PART>(row.add(stride), n), odd[v]);
            }
            i += 2;
        }
        if i < x.len() {
            let a = S::f_splat(at(i));
            for v in 0..V {
                even[v] = S::f_fma(a, load::<S, PART>(rows.add(i * stride + v * LANES), n), even[v]);
            }
        }
        for v in 0..V {
            even[v] = S::f_add(even[v], odd[v]);
        }
        even
    }
}

/// The sum of `a[i] b[i] c[i]`, rows of one length; without `c` where there is none.
///
/// # Safety
///
/// Rows are of one length; the CPU has the instruction set.
#[inline(always)]
pub(super) unsafe fn sum_of_products<S: Simd>(a: &[f32], b: &[f32], c: Option<&[f32]>) -> f32 {
    let whole = a.len() / LANES * LANES;
    // SAFETY: vectors and parts of them inside the slices.
    unsafe {
        let mut sum = S::f_splat(0.0);
        for i in (0..whole).step_by(LANES) {
            sum = add_products::<S, false>(a, b, c, i, sum);
        }
        if whole < a.len() {
            sum = add_products::<S, true>(a, b, c, whole, sum);
        }
        S::f_sum(sum)
    }
}

#[inline(always)]
unsafe fn add_products<S: Simd, const PART: bool>(
    a: &[f32],
    b: &[f32],
    c: Option<&[f32]>,
    i: usize,
    sum: S::F,
) -> S::F {
    let n = a.len() - i;
    // SAFETY: as the caller vouches.
    unsafe {
        let mut a = load::<S, PART>(a.as_ptr().add(i), n);
        if let Some(c) = c {
            a = S::f_mul(a, load::<S, PART>(c.as_ptr().add(i), n));
        }
        S::f_fma(a, load::<S, PART>(b.as_ptr().add(i), n), sum)
    }
}

/// A row of the state before a token, and where it goes after it: the same place, or another.
#[derive(Clone, Copy)]
pub(super) struct StateRow {
    pub(super) before: *const f32,
    pub(super) after: *mut f32,
}

/// What a token does to `V` vectors of a row of the state: `after = decay * before + key * u`, of which the token reads
/// `query * after`, added to `sum`. `STREAM`: the row after the token is not read soon, and lies at multiples of 64 bytes.
///
/// # Safety
///
/// Both rows hold the vectors, or `n` floats where `PART`; the CPU has the instruction set.
#[inline(always)]
pub(super) unsafe fn row<S: Simd, const V: usize, const PART: bool, const STREAM: bool>(
    StateRow { before, after }: StateRow,
    decay: S::F,
    key: f32,
    query: f32,
    u: &[S::F; V],
    sum: &mut [S::F; V],
    n: usize,
) {
    // SAFETY: as the caller vouches.
    unsafe {
        let (key, query) = (S::f_splat(key), S::f_splat(query));
        for v in 0..V {
            let before = load::<S, PART>(before.add(v * LANES), n);
            let s = S::f_fma(key, u[v], S::f_mul(decay, before));
            if STREAM {
                S::f_stream(after.add(v * LANES), s);
            } else {
                store::<S, PART>(after.add(v * LANES), s, n);
            }
            sum[v] = S::f_fma(query, s, sum[v]);
        }
    }
}

/// What is left of the rows of a state.
#[derive(Clone, Copy)]
pub(super) struct RowDecay<'a, S: Simd> {
    /// Of all alike.
    pub(super) all: S::F,
    /// Of each, in the place of that.
    pub(super) of_rows: Option<&'a [f32]>,
}

impl<S: Simd> RowDecay<'_, S> {
    /// Of row `i`.
    ///
    /// # Safety
    ///
    /// The CPU has the instruction set.
    #[inline(always)]
    unsafe fn of(&self, i: usize) -> S::F {
        match self.of_rows {
            // SAFETY: as the caller vouches.
            Some(of_rows) => unsafe { S::f_splat(of_rows[i]) },
            None => self.all,
        }
    }
}

/// The rows of a state before a token and after it, for some of its columns.
#[derive(Clone, Copy)]
pub(super) struct StateRows {
    pub(super) before: *const f32,
    pub(super) before_stride: usize,
    pub(super) after: *mut f32,
    pub(super) after_stride: usize,
    /// How far behind the rows before lie those that are read next, where somebody knows.
    pub(super) next: Option<usize>,
}

impl StateRows {
    /// Those of `token` from column `column` on: the first one goes on from `before`, where that is another place.
    ///
    /// # Safety
    ///
    /// The states have the column.
    #[inline(always)]
    pub(super) unsafe fn new(
        before: Option<&StridedRows<'_>>,
        state: &StridedRowsMut<'_>,
        token: usize,
        column: usize,
    ) -> Self {
        // SAFETY: as the caller vouches.
        unsafe {
            let after = state.ptr.add(column);
            let (before, before_stride) = match before {
                Some(before) if token == 0 => (before.ptr.add(column), before.stride),
                Some(_) | None => (after.cast_const(), state.stride),
            };
            Self { before, before_stride, after, after_stride: state.stride, next: None }
        }
    }

    /// Whether the rows after the token may go past the caches: they lie elsewhere than those before it, and at multiples of
    /// 64 bytes.
    #[inline(always)]
    pub(super) fn can_stream(&self) -> bool {
        let aligned = self.after.addr().is_multiple_of(4 * LANES) && self.after_stride.is_multiple_of(LANES);
        aligned && !std::ptr::eq(self.before, self.after)
    }

    /// What a token does to `V` vectors of every row, one for each of its keys: [`row`]. Even rows add up in `even`, odd ones
    /// in `odd`.
    ///
    /// # Safety
    ///
    /// As for [`row`], of as many rows as there are keys.
    #[expect(clippy::too_many_arguments, reason = "a struct of references costs a kernel its registers")]
    #[inline(always)]
    pub(super) unsafe fn step<S: Simd, const V: usize, const PART: bool, const STREAM: bool>(
        &self,
        decay: RowDecay<'_, S>,
        keys: &[f32],
        queries: &[f32],
        u: &[S::F; V],
        even: &mut [S::F; V],
        odd: &mut [S::F; V],
        n: usize,
    ) {
        // SAFETY: as the caller vouches.
        unsafe {
            let at = |i: usize| StateRow {
                before: self.before.add(i * self.before_stride),
                after: self.after.add(i * self.after_stride),
            };
            let mut i = 0;
            while i + 2 <= keys.len() {
                if let (true, Some(next)) = (STREAM, self.next) {
                    for v in 0..V {
                        prefetch(at(i).before.wrapping_add(next + v * LANES).cast());
                        prefetch(at(i + 1).before.wrapping_add(next + v * LANES).cast());
                    }
                }
                row::<S, V, PART, STREAM>(at(i), decay.of(i), keys[i], queries[i], u, even, n);
                row::<S, V, PART, STREAM>(at(i + 1), decay.of(i + 1), keys[i + 1], queries[i + 1], u, odd, n);
                i += 2;
            }
            if i < keys.len() {
                row::<S, V, PART, STREAM>(at(i), decay.of(i), keys[i], queries[i], u, even, n);
            }
            if STREAM {
                S::fence();
            }
        }
    }
}
