//! The recurrence of one head of RWKV-7 (Goose, arXiv 2503.14456).
//!
//! For each token with receptance `r`, key `k`, value `v`, decay `w` (in 0..=1, per channel of the key), removal key `a` and
//! replacement key `b`:
//!
//! `S = diag(w) S + b^T (a S) + k^T v; out = r S`

use super::vectors::dot;
use super::{HeadRecurrence, StridedRows, StridedRowsMut};
use crate::kernels::vectors::{load, store};
use crate::simd::{LANES, Simd};

/// One head, or some of its columns.
pub(crate) struct Rwkv7<'a> {
    /// Receptances, `[n_tokens, key_dim]`.
    pub(crate) r: StridedRows<'a>,
    /// Decays `w`, `[n_tokens, key_dim]`, in 0..=1.
    pub(crate) decay: StridedRows<'a>,
    /// Keys, `[n_tokens, key_dim]`.
    pub(crate) k: StridedRows<'a>,
    /// Values, `[n_tokens, value_dim]`.
    pub(crate) v: StridedRows<'a>,
    /// Removal keys, `[n_tokens, key_dim]`: minus the normalised key.
    pub(crate) a: StridedRows<'a>,
    /// Replacement keys, `[n_tokens, key_dim]`: the normalised key times the learning rates.
    pub(crate) b: StridedRows<'a>,
    /// The state, `[key_dim, value_dim]`; updated.
    pub(crate) state: StridedRowsMut<'a>,
    /// Results, `[n_tokens, value_dim]`.
    pub(crate) out: StridedRowsMut<'a>,
}

impl Rwkv7<'_> {
    /// Updates `V` vectors of row `i` of the state for one token, and adds the row's part of the result to `sum`. `u`: `a S`.
    #[inline(always)]
    unsafe fn row<S: Simd, const V: usize, const PART: bool>(
        &self,
        token: usize,
        i: usize,
        state: *mut f32,
        u: &[S::F; V],
        value: &[S::F; V],
        sum: &mut [S::F; V],
        n: usize,
    ) {
        // SAFETY: as the caller vouches.
        unsafe {
            let row = state.add(i * self.state.stride);
            let (r, w) = (S::f_splat(self.r.row(token)[i]), S::f_splat(self.decay.row(token)[i]));
            let (k, b) = (S::f_splat(self.k.row(token)[i]), S::f_splat(self.b.row(token)[i]));
            for v in 0..V {
                let s = S::f_fma(k, value[v], S::f_mul(w, load::<S, PART>(row.add(v * LANES), n)));
                let s = S::f_fma(b, u[v], s);
                store::<S, PART>(row.add(v * LANES), s, n);
                sum[v] = S::f_fma(r, s, sum[v]);
            }
        }
    }
}

impl HeadRecurrence for Rwkv7<'_> {
    #[inline(always)]
    fn n_tokens(&self) -> usize {
        self.v.count
    }

    #[inline(always)]
    fn n_columns(&self) -> usize {
        self.v.width
    }

    #[inline(always)]
    fn check(&self) {
        let (n_tokens, key_dim, value_dim) = (self.v.count, self.k.width, self.v.width);
        let of_keys =
            [(&self.r, "the receptances"), (&self.decay, "the decays"), (&self.k, "the keys"), (&self.a, "a")];
        for (rows, what) in of_keys.into_iter().chain([(&self.b, "b")]) {
            assert_eq!((rows.count, rows.width), (n_tokens, key_dim), "{what}");
        }
        assert_eq!((self.state.count, self.state.width), (key_dim, value_dim), "the state");
        assert_eq!((self.out.count, self.out.width), (n_tokens, value_dim), "the output");
    }

    #[inline(always)]
    unsafe fn step<S: Simd, const V: usize, const PART: bool>(&self, token: usize, column: usize) {
        let n = self.v.width - column;
        let (a, stride) = (self.a.row(token), self.state.stride);
        // SAFETY: rows and columns are in range.
        unsafe {
            let state = self.state.ptr.add(column);
            let u = dot::<S, V, PART>(a, None, state, stride, n);
            let mut even = [S::f_splat(0.0); V];
            let mut odd = [S::f_splat(0.0); V];
            let mut value = [S::f_splat(0.0); V];
            for v in 0..V {
                value[v] = load::<S, PART>(self.v.at(token).add(column + v * LANES), n);
            }
            let mut i = 0;
            while i + 2 <= self.k.width {
                self.row::<S, V, PART>(token, i, state, &u, &value, &mut even, n);
                self.row::<S, V, PART>(token, i + 1, state, &u, &value, &mut odd, n);
                i += 2;
            }
            if i < self.k.width {
                self.row::<S, V, PART>(token, i, state, &u, &value, &mut even, n);
            }
            for v in 0..V {
                let out = self.out.at(token).add(column + v * LANES);
                store::<S, PART>(out, S::f_add(even[v], odd[v]), n);
            }
        }
    }
}
