//! Sums over rows.

use crate::kernels::vectors::{load, store};
use crate::simd::{LANES, Simd};

/// `sum over i of x[i] * rows[i]` for `V` vectors of each row. The order of additions does not depend on `V`.
///
/// # Safety
///
/// Each of the `x.len()` rows, `stride` apart, holds the vectors, or `n` floats where `PART`.
#[inline(always)]
pub(super) unsafe fn dot<S: Simd, const V: usize, const PART: bool>(
    x: &[f32],
    rows: *const f32,
    stride: usize,
    n: usize,
) -> [S::F; V] {
    // SAFETY: as the caller vouches.
    unsafe {
        // Two sums, so that additions need not wait for each other.
        let mut even = [S::f_splat(0.0); V];
        let mut odd = [S::f_splat(0.0); V];
        let mut i = 0;
        while i + 2 <= x.len() {
            let (a, b) = (S::f_splat(x[i]), S::f_splat(x[i + 1]));
            for v in 0..V {
                let row = rows.add(i * stride + v * LANES);
                even[v] = S::f_fma(a, load::<S, PART>(row, n), even[v]);
                odd[v] = S::f_fma(b, load::<S, PART>(row.add(stride), n), odd[v]);
            }
            i += 2;
        }
        if i < x.len() {
            let a = S::f_splat(x[i]);
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

/// What a token does to `V` vectors of a row of the state: `row = decay * row + key * u`, of which the token reads
/// `query * row`, added to `sum`.
///
/// # Safety
///
/// The row holds the vectors, or `n` floats where `PART`; the CPU has the instruction set.
#[inline(always)]
pub(super) unsafe fn row<S: Simd, const V: usize, const PART: bool>(
    row: *mut f32,
    decay: S::F,
    key: f32,
    query: f32,
    u: &[S::F; V],
    sum: &mut [S::F; V],
    n: usize,
) {
    // SAFETY: as the caller vouches.
    unsafe { row_from::<S, V, PART, false>(row, row, decay, key, query, u, sum, n) }
}

/// [`row`] where the row before the token lies elsewhere. `STREAM`: the new one is not read again soon.
///
/// # Safety
///
/// As for [`row`], and of both; where it is to `STREAM` these are whole vectors, each at a multiple of 64 bytes.
#[expect(clippy::too_many_arguments, reason = "a struct of references costs a kernel its registers")]
#[inline(always)]
pub(super) unsafe fn row_from<S: Simd, const V: usize, const PART: bool, const STREAM: bool>(
    from: *const f32,
    row: *mut f32,
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
            let before = load::<S, PART>(from.add(v * LANES), n);
            let s = S::f_fma(key, u[v], S::f_mul(decay, before));
            if STREAM {
                S::f_stream(row.add(v * LANES), s);
            } else {
                store::<S, PART>(row.add(v * LANES), s, n);
            }
            sum[v] = S::f_fma(query, s, sum[v]);
        }
    }
}
