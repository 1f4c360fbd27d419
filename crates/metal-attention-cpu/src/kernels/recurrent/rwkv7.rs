//! The recurrence of RWKV-7 (Goose, arXiv 2503.14456) of one head.
//!
//! With receptance `r`, key `k`, value `v`, decay `w` in 0..=1, one of each channel, and `a` and `b`, which take away and put
//! back, of each token:
//!
//! `S = diag(w) S + b^T (a S) + k^T v; out = r S`
//!
//! A delta rule whose channels decay by themselves (Kimi Linear, arXiv 2510.26692) is the same with `a = w k`, `b = -beta k` and
//! `beta k` for `k`.
//!
//! A chunk divides by the decays, as that of [`rwkv6`](super::rwkv6) does, and solves for all `u_i = a_i S`: with `P_i` the
//! product of the decays of tokens 1 to i, `A_i = a_i P_(i-1)`, `R_i = r_i P_i`, `K_i = k_i / P_i` and `B_i = b_i / P_i`,
//! `u_i = A_i S + sum over j < i of (A_i . K_j) v_j + (A_i . B_j) u_j`,
//! `out_i = R_i S + sum over j <= i of (R_i . K_j) v_j + (R_i . B_j) u_j` and
//! `S = diag(P_n) (S + sum of K_j^T v_j + B_j^T u_j)`.

use std::ops::Range;

use super::products::{Keep, LowerProduct, Matrix, Product, scores};
use super::vectors::dot;
use super::{Head, Rows, RowsMut, Scratch, end_of_slow_decay, padded};
use crate::kernels::vectors::{load, store};
use crate::simd::{Isa, LANES, Simd};

/// One head, or some columns of one.
pub(crate) struct Rwkv7<'a> {
    /// Of each token, `[n_tokens, key_dim]`
    pub(crate) r: Rows<'a>,
    /// `[n_tokens, key_dim]`, in 0..=1
    pub(crate) decay: Rows<'a>,
    /// `[n_tokens, key_dim]`
    pub(crate) k: Rows<'a>,
    /// `[n_tokens, value_dim]`
    pub(crate) v: Rows<'a>,
    /// `[n_tokens, key_dim]`: less the normalised key that is taken away
    pub(crate) a: Rows<'a>,
    /// `[n_tokens, key_dim]`: the normalised key times the learning rates
    pub(crate) b: Rows<'a>,
    /// `[key_dim, value_dim]`, changed in place
    pub(crate) state: RowsMut<'a>,
    /// `[n_tokens, value_dim]`
    pub(crate) out: RowsMut<'a>,
}

impl Rwkv7<'_> {
    /// `V` columns of row `i`, one token.
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
        // SAFETY: passed on to the caller.
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

impl Head for Rwkv7<'_> {
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
        // SAFETY: rows and columns that there are.
        unsafe {
            let state = self.state.ptr.add(column);
            let u = dot::<S, V, PART>(a, state, stride, n);
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

    #[inline(always)]
    fn scratch(&self) -> usize {
        Self::CHUNK * (4 * self.k.width + padded(self.v.width) + Self::CHUNK) + self.k.width
    }

    #[inline(always)]
    fn chunk_end(&self, tokens: Range<usize>) -> usize {
        end_of_slow_decay(&self.decay, tokens)
    }

    #[inline(always)]
    unsafe fn chunk(&self, isa: Isa, tokens: Range<usize>, mut scratch: Scratch<'_>) {
        const C: usize = <Rwkv7<'static> as Head>::CHUNK;
        let (first, n) = (tokens.start, tokens.len());
        let (key_dim, value_dim) = (self.k.width, self.v.width);
        let u_row = padded(value_dim);
        let ks = scratch.take(key_dim * C);
        let bs = scratch.take(key_dim * C);
        let removed = scratch.take(C * key_dim);
        let read = scratch.take(C * key_dim);
        let u = scratch.take(C * u_row);
        let weights = scratch.take(C * C);
        let total = scratch.take(key_dim);

        total.fill(1.0);
        for j in 0..n {
            let (r, k, decay) = (self.r.row(first + j), self.k.row(first + j), self.decay.row(first + j));
            let (a, b) = (self.a.row(first + j), self.b.row(first + j));
            for i in 0..key_dim {
                removed[j * key_dim + i] = a[i] * total[i];
                total[i] *= decay[i];
                read[j * key_dim + i] = r[i] * total[i];
                ks[i * C + j] = k[i] / total[i];
                bs[i * C + j] = b[i] / total[i];
            }
        }
        let values = Matrix { ptr: self.v.at(first), row: self.v.stride };
        let removed = Matrix { ptr: removed.as_ptr(), row: key_dim };
        let read = Matrix { ptr: read.as_ptr(), row: key_dim };
        let u_out = u.as_mut_ptr();
        let u = Matrix { ptr: u_out, row: u_row };
        let weights = weights.as_mut_ptr();
        let (out, out_row) = (self.out.at(first), self.out.stride);
        let from_state = Product {
            a: removed,
            b: Matrix { ptr: self.state.ptr, row: self.state.stride },
            out: u_out,
            out_row: u_row,
            rows: n,
            depth: key_dim,
            columns: value_dim,
            keep: Keep::Nothing,
        };
        let among = LowerProduct {
            a: Matrix { ptr: weights, row: C },
            diagonal: false,
            b: values,
            out: u_out,
            out_row: u_row,
            n,
            columns: value_dim,
        };
        // SAFETY: all of it lies in the inputs, the outputs, or in scratch, as large as `scratch` says.
        unsafe {
            from_state.run(isa);
            scores(isa, removed, ks.as_ptr(), weights, C, n, key_dim);
            among.run(isa);
            scores(isa, removed, bs.as_ptr(), weights, C, n, key_dim);
            LowerProduct { b: u, ..among }.run(isa);

            Product { a: read, out, out_row, ..from_state }.run(isa);
            let among = LowerProduct { diagonal: true, out, out_row, ..among };
            scores(isa, read, ks.as_ptr(), weights, C, n, key_dim);
            among.run(isa);
            scores(isa, read, bs.as_ptr(), weights, C, n, key_dim);
            LowerProduct { b: u, ..among }.run(isa);

            for (row, keep, b) in [(ks, Keep::Rows(total.as_ptr()), values), (bs, Keep::All, u)] {
                for (row, total) in row.chunks_exact_mut(C).zip(&*total) {
                    for x in &mut row[..n] {
                        *x *= total;
                    }
                }
                let update = Product {
                    a: Matrix { ptr: row.as_ptr(), row: C },
                    b,
                    out: self.state.ptr,
                    out_row: self.state.stride,
                    rows: key_dim,
                    depth: n,
                    columns: value_dim,
                    keep,
                };
                update.run(isa);
            }
        }
    }
}
