//! The recurrence of RWKV-6 (Finch, arXiv 2404.05892) of one head.
//!
//! With receptance `r`, key `k`, value `v` and decay `w` in 0..=1, one of each channel, of each token, and the head's bonus `u`:
//!
//! `out = r (S + diag(u) k^T v); S = diag(w) S + k^T v`
//!
//! Without a bonus it is gated linear attention (arXiv 2312.06635): `S = diag(w) S + k^T v; out = r S`.

use super::{HeadRecurrence, StridedRows, StridedRowsMut};
use crate::kernels::vectors::{load, store};
use crate::simd::{LANES, Simd};

/// One head, or some columns of one.
pub(crate) struct Rwkv6<'a> {
    /// Of each token, `[n_tokens, key_dim]`
    pub(crate) r: StridedRows<'a>,
    /// `[n_tokens, key_dim]`
    pub(crate) k: StridedRows<'a>,
    /// `[n_tokens, value_dim]`
    pub(crate) v: StridedRows<'a>,
    /// `[n_tokens, key_dim]`, in 0..=1
    pub(crate) decay: StridedRows<'a>,
    /// `[key_dim]`; none in gated linear attention
    pub(crate) bonus: Option<&'a [f32]>,
    /// `[key_dim, value_dim]`, changed in place
    pub(crate) state: StridedRowsMut<'a>,
    /// `[n_tokens, value_dim]`
    pub(crate) out: StridedRowsMut<'a>,
}

impl Rwkv6<'_> {
    /// How much a token has of its own value, besides what the state after it has.
    #[inline(always)]
    fn own(&self, token: usize) -> f32 {
        let mut sum = 0.0;
        let Some(bonus) = self.bonus else { return sum };
        for ((r, k), u) in self.r.row(token).iter().zip(self.k.row(token)).zip(bonus) {
            sum += r * k * u;
        }
        sum
    }

    /// `V` columns of row `i`, one token.
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
        // SAFETY: passed on to the caller.
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
        // SAFETY: rows and columns that there are.
        unsafe {
            let state = self.state.ptr.add(column);
            let own = S::f_splat(self.own(token));
            let mut even = [S::f_splat(0.0); V];
            let mut odd = [S::f_splat(0.0); V];
            let mut value = [S::f_splat(0.0); V];
            for v in 0..V {
                value[v] = load::<S, PART>(self.v.at(token).add(column + v * LANES), n);
                even[v] = S::f_mul(own, value[v]);
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
