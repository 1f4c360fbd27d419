//! The recurrence of RWKV-6 (Finch, arXiv 2404.05892) of one head.
//!
//! With receptance `r`, key `k`, value `v` and decay `w` in 0..=1, one of each channel, of each token, and the head's bonus `u`:
//!
//! `out = r (S + diag(u) k^T v); S = diag(w) S + k^T v`
//!
//! Without a bonus it is gated linear attention (arXiv 2312.06635): `S = diag(w) S + k^T v; out = r S`.
//!
//! A chunk divides by the decays: with `P_i` the product of those of tokens 1 to i, in each channel,
//! `out_i = (r_i P_(i-1)) S + sum over j < i of (r_i P_(i-1) . k_j / P_j) v_j + (r_i u . k_i) v_i` and
//! `S = diag(P_n) (S + sum of (k_j / P_j)^T v_j)`; without a bonus `out_i = (r_i P_i) S + sum over j <= i of
//! (r_i P_i . k_j / P_j) v_j`. So it ends before a channel has decayed too far
//! ([`end_of_slow_decay`]), after a single token if need be.

use std::ops::Range;

use super::products::{Keep, LowerProduct, Matrix, Product, scores};
use super::{Head, Rows, RowsMut, Scratch, end_of_slow_decay};
use crate::kernels::vectors::{load, store};
use crate::simd::{Isa, LANES, Simd};

/// One head, or some columns of one.
pub(crate) struct Rwkv6<'a> {
    /// Of each token, `[n_tokens, key_dim]`
    pub(crate) r: Rows<'a>,
    /// `[n_tokens, key_dim]`
    pub(crate) k: Rows<'a>,
    /// `[n_tokens, value_dim]`
    pub(crate) v: Rows<'a>,
    /// `[n_tokens, key_dim]`, in 0..=1
    pub(crate) decay: Rows<'a>,
    /// `[key_dim]`; none in gated linear attention
    pub(crate) bonus: Option<&'a [f32]>,
    /// `[key_dim, value_dim]`, changed in place
    pub(crate) state: RowsMut<'a>,
    /// `[n_tokens, value_dim]`
    pub(crate) out: RowsMut<'a>,
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

impl Head for Rwkv6<'_> {
    const CHUNK: usize = 32;

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

    #[inline(always)]
    fn scratch(&self) -> usize {
        Self::CHUNK * (2 * self.k.width + Self::CHUNK) + self.k.width
    }

    #[inline(always)]
    fn chunk_end(&self, tokens: Range<usize>) -> usize {
        end_of_slow_decay(&self.decay, tokens)
    }

    #[inline(always)]
    unsafe fn chunk(&self, isa: Isa, tokens: Range<usize>, mut scratch: Scratch<'_>) {
        const C: usize = <Rwkv6<'static> as Head>::CHUNK;
        let (first, n) = (tokens.start, tokens.len());
        let (key_dim, value_dim) = (self.k.width, self.v.width);
        let keys = scratch.take(key_dim * C);
        let left = scratch.take(C * key_dim);
        let rk = scratch.take(C * C);
        let total = scratch.take(key_dim);

        total.fill(1.0);
        for j in 0..n {
            let (r, k, decay) = (self.r.row(first + j), self.k.row(first + j), self.decay.row(first + j));
            for i in 0..key_dim {
                let before = total[i];
                total[i] *= decay[i];
                left[j * key_dim + i] = r[i] * if self.bonus.is_some() { before } else { total[i] };
                keys[i * C + j] = k[i] / total[i];
            }
        }
        // SAFETY: all of it lies in the inputs, the outputs, or in scratch, as large as `scratch` says.
        unsafe {
            let left = Matrix { ptr: left.as_ptr(), row: key_dim };
            scores(isa, left, keys.as_ptr(), rk.as_mut_ptr(), C, n, key_dim);
            if self.bonus.is_some() {
                for i in 0..n {
                    rk[i * C + i] = self.own(first + i);
                }
            }
            let (out, out_row) = (self.out.at(first), self.out.stride);
            let from_state = Product {
                a: left,
                b: Matrix { ptr: self.state.ptr, row: self.state.stride },
                out,
                out_row,
                rows: n,
                depth: key_dim,
                columns: value_dim,
                keep: Keep::Nothing,
            };
            from_state.run(isa);
            let b = Matrix { ptr: self.v.at(first), row: self.v.stride };
            let a = Matrix { ptr: rk.as_ptr(), row: C };
            LowerProduct { a, diagonal: true, b, out, out_row, n, columns: value_dim }.run(isa);

            for (keys, total) in keys.chunks_exact_mut(C).zip(&*total) {
                for k in &mut keys[..n] {
                    *k *= total;
                }
            }
            let update = Product {
                a: Matrix { ptr: keys.as_ptr(), row: C },
                b,
                out: self.state.ptr,
                out_row: self.state.stride,
                rows: key_dim,
                depth: n,
                columns: value_dim,
                keep: Keep::Rows(total.as_ptr()),
            };
            update.run(isa);
        }
    }
}
