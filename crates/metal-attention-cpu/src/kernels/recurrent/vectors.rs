//! Sums over the rows of a state, and the step that the delta rule and Mamba-2 apply to every row.
//!
//! A constant `V` is the number of vectors of 16 columns that are computed together. Sums have an even and an odd half, so
//! that consecutive additions do not wait for each other.

use super::{StridedRows, StridedRowsMut};
use crate::kernels::vectors::{load, store};
use crate::simd::{LANES, Simd, prefetch};

/// `sum over i of x[i] * decay[i] * rows[i]` for `V` vectors of each row; without `decay`, `sum over i of x[i] * rows[i]`. The
/// order of additions does not depend on `V`.
///
/// # Safety
///
/// `rows` points to `x.len()` rows, `stride` apart, of `V` vectors each, or of `n` floats where `PART` is set; the CPU has the
/// instruction set.
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

/// `sum over i of a[i] * b[i] * c[i]`; without `c`, `sum over i of a[i] * b[i]`.
///
/// # Safety
///
/// The rows have the same length; the CPU has the instruction set.
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

/// Adds the products from element `i` on to `sum`: 16, or those that are left where `PART` is set.
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

/// Pointers to one row of the state before and after a token; they may be the same.
#[derive(Clone, Copy)]
pub(super) struct StateRow {
    pub(super) before: *const f32,
    pub(super) after: *mut f32,
}

/// Applies a token to `V` vectors of a row of the state: `after = decay * before + key * u` and `sum += query * after`.
/// `STREAM`: `after` is written past the caches.
///
/// # Safety
///
/// Both rows have `V` vectors, or `n` floats where `PART` is set; where `STREAM` is set, `after` is aligned to 64 bytes. The
/// CPU has the instruction set.
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

/// The decay factors of the rows of a state.
#[derive(Clone, Copy)]
pub(super) struct RowDecay<'a, S: Simd> {
    /// The factor of all rows, unless `of_rows` is given.
    pub(super) all: S::F,
    /// The factor of each row.
    pub(super) of_rows: Option<&'a [f32]>,
}

impl<S: Simd> RowDecay<'_, S> {
    /// The factor of row `i`.
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

/// Pointers to some columns of a state before and after a token; they may be the same.
#[derive(Clone, Copy)]
pub(super) struct StateRows {
    /// The first row before the token.
    pub(super) before: *const f32,
    /// Floats from one row of `before` to the next.
    pub(super) before_stride: usize,
    /// The first row after the token.
    pub(super) after: *mut f32,
    /// Floats from one row of `after` to the next.
    pub(super) after_stride: usize,
    /// Floats from `before` to the state that is read next, for prefetching; `None` where that is unknown.
    pub(super) next: Option<usize>,
}

impl StateRows {
    /// The rows of `token` from column `column` on. The first token reads `before` where it is given; all others update `state`
    /// in place.
    ///
    /// # Safety
    ///
    /// The column is in range.
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

    /// Whether the rows after the token may be written past the caches: they are not those before it, and are aligned to 64
    /// bytes.
    #[inline(always)]
    pub(super) fn can_stream(&self) -> bool {
        let aligned = self.after.addr().is_multiple_of(4 * LANES) && self.after_stride.is_multiple_of(LANES);
        aligned && !std::ptr::eq(self.before, self.after)
    }

    /// Applies a token to `V` vectors of every row: [`row`] with element `i` of `keys` and `queries` for row `i`. The result is
    /// `even + odd`, the sums over even and odd rows.
    ///
    /// # Safety
    ///
    /// See [`row`], for `keys.len()` rows.
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
