//! The recurrence of one head of RWKV-6 (Finch, arXiv 2404.05892).
//!
//! For each token with receptance `r`, key `k`, value `v` and decay `w` (in 0..=1, per channel of the key), with the head's
//! bonus `u`:
//!
//! `out = r (S + diag(u) k^T v); S = diag(w) S + k^T v`
//!
//! Without a bonus it is gated linear attention (arXiv 2312.06635): `S = diag(w) S + k^T v; out = r S`.

use super::{HeadRecurrence, StridedRows, StridedRowsMut};
use crate::kernels::vectors::{load, store};
use crate::simd::{LANES, Simd};

/// One head, or some of its columns.
pub(crate) struct Rwkv6<'a> {
    /// Receptances, `[n_tokens, key_dim]`.
    pub(crate) r: StridedRows<'a>,
    /// Keys, `[n_tokens, key_dim]`.
    pub(crate) k: StridedRows<'a>,
    /// Values, `[n_tokens, value_dim]`.
    pub(crate) v: StridedRows<'a>,
    /// Decays `w`, `[n_tokens, key_dim]`, in 0..=1.
    pub(crate) decay: StridedRows<'a>,
    /// The bonus `u`, `[key_dim]`; `None` in gated linear attention.
    pub(crate) bonus: Option<&'a [f32]>,
    /// The state, `[key_dim, value_dim]`; updated.
    pub(crate) state: StridedRowsMut<'a>,
    /// Results, `[n_tokens, value_dim]`.
    pub(crate) out: StridedRowsMut<'a>,
}

impl Rwkv6<'_> {
    /// The factor of the token's own value in its result, `sum(r k u)`; 0 without a bonus.
    #[inline(always)]
    fn own_value_factor(&self, token: usize) -> f32 {
        let mut sum = 0.0;
        let Some(bonus) = self.bonus else { return sum };
        for ((r, k), u) in self.r.row(token).iter().zip(self.k.row(token)).zip(bonus) {
            sum += r * k * u;
        }
        sum
    }

    /// Updates `V` vectors of row `i` of the state for one token, and adds the row's part of the result to `sum`.
    #[inline(always)]
    unsafe fn row<S: Simd, const V: usize, const PART: bool>(
        &self,
        token: usize,
        i: usize,
        state: *mut f32,
        value: &[S::F; V],
        sum: &mut [S::F; V],
        n: usize,
    ) {
        // SAFETY: as the caller vouches.
        unsafe {
            let row = state.add(i * self.state.stride);
            let (r, k) = (S::f_splat(self.r.row(token)[i]), S::f_splat(self.k.row(token)[i]));
            let w = S::f_splat(self.decay.row(token)[i]);
            for v in 0..V {
                let s = load::<S, PART>(row.add(v * LANES), n);
                let after = S::f_fma(k, value[v], S::f_mul(w, s));
                store::<S, PART>(row.add(v * LANES), after, n);
                sum[v] = S::f_fma(r, if self.bonus.is_some() { s } else { after }, sum[v]);
            }
        }
    }
}

impl HeadRecurrence for Rwkv6<'_> {
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
        assert_eq!((self.r.count, self.r.width), (n_tokens, key_dim), "the receptances");
        assert_eq!(self.k.count, n_tokens, "the keys");
        assert_eq!((self.decay.count, self.decay.width), (n_tokens, key_dim), "the decays");
        assert!(self.bonus.is_none_or(|bonus| bonus.len() == key_dim), "the bonus");
        assert_eq!((self.state.count, self.state.width), (key_dim, value_dim), "the state");
        assert_eq!((self.out.count, self.out.width), (n_tokens, value_dim), "the output");
    }

    #[inline(always)]
    unsafe fn step<S: Simd, const V: usize, const PART: bool>(&self, token: usize, column: usize) {
        let n = self.v.width - column;
        // SAFETY: rows and columns are in range.
        unsafe {
            let state = self.state.ptr.add(column);
            let own_value = S::f_splat(self.own_value_factor(token));
            let mut even = [S::f_splat(0.0); V];
            let mut odd = [S::f_splat(0.0); V];
            let mut value = [S::f_splat(0.0); V];
            for v in 0..V {
                value[v] = load::<S, PART>(self.v.at(token).add(column + v * LANES), n);
                even[v] = S::f_mul(own_value, value[v]);
            }
            let mut i = 0;
            while i + 2 <= self.k.width {
                self.row::<S, V, PART>(token, i, state, &value, &mut even, n);
                self.row::<S, V, PART>(token, i + 1, state, &value, &mut odd, n);
                i += 2;
            }
            if i < self.k.width {
                self.row::<S, V, PART>(token, i, state, &value, &mut even, n);
            }
            for v in 0..V {
                let out = self.out.at(token).add(column + v * LANES);
                store::<S, PART>(out, S::f_add(even[v], odd[v]), n);
            }
        }
    }
}
