//! The gated delta rule (Gated `DeltaNet`, arXiv 2412.06464) of one head.
//!
//! With key `k`, query `q`, value `v`, decay `g` in 0..=1 and writing strength `beta` of each token:
//!
//! `S = g S; u = beta (v - k S); S = S + k^T u; out = q S`
//!
//! A chunk solves for all `u` at once. With `c_i = g_1 .. g_i` and `d_ij = g_(j+1) .. g_i`, which both come of
//! multiplications alone and so neither overflow nor divide:
//!
//! `u_i = beta_i (v_i - c_i k_i S - sum over j < i of d_ij (k_i . k_j) u_j)`, a triangular system of equations,
//! `out_i = c_i q_i S + sum over j <= i of d_ij (q_i . k_j) u_j` and `S = c_n S + sum of d_nj k_j^T u_j`.

use std::ops::Range;

use super::products::{Keep, LowerProduct, Matrix, Product, scores};
use super::vectors::{dot, row_from};
use super::{Head, Rows, RowsMut, Scratch, padded};
use crate::kernels::vectors::{load, store};
use crate::simd::{Isa, LANES, Simd, prefetch, settle};

/// One head, or some columns of one.
pub(crate) struct DeltaRule<'a> {
    /// Of each token, `[n_tokens, key_dim]`: normalised and, as the model has it, scaled.
    pub(crate) q: Rows<'a>,
    /// `[n_tokens, key_dim]`, normalised
    pub(crate) k: Rows<'a>,
    /// `[n_tokens, value_dim]`
    pub(crate) v: Rows<'a>,
    /// `[n_tokens, 1]`, in 0..=1
    pub(crate) decay: Rows<'a>,
    /// `[n_tokens, 1]`, in 0..=1
    pub(crate) beta: Rows<'a>,
    /// The state before the first token, `[key_dim, value_dim]`, where it is not what `state` holds: then that is overwritten.
    pub(crate) before: Option<Rows<'a>>,
    /// How many elements after it the state lies that is read next, where there is one: a single token has that fetched.
    pub(crate) next: Option<usize>,
    /// `[key_dim, value_dim]`, changed in place
    pub(crate) state: RowsMut<'a>,
    /// `[n_tokens, value_dim]`
    pub(crate) out: RowsMut<'a>,
}

/// Bytes that vectors are streamed to multiples of.
const STREAMED: usize = 64;

/// What a token does to columns of the state.
struct Update<'a, S: Simd> {
    k: &'a [f32],
    q: &'a [f32],
    from: *const f32,
    from_stride: usize,
    next: Option<usize>,
    state: *mut f32,
    stride: usize,
    decays: S::F,
    n: usize,
}

impl<S: Simd> Update<'_, S> {
    /// `state = decay from + k^T u` and `q state`.
    ///
    /// # Safety
    ///
    /// As for [`row_from`], with as many rows as there are keys and queries.
    #[inline(always)]
    unsafe fn run<const V: usize, const PART: bool, const STREAM: bool>(self, u: &[S::F; V]) -> [S::F; V] {
        let Self { k, q, from, from_stride, next, state, stride, decays, n } = self;
        // SAFETY: as the caller vouches.
        unsafe {
            let mut even = [S::f_splat(0.0); V];
            let mut odd = [S::f_splat(0.0); V];
            let mut i = 0;
            while i + 2 <= k.len() {
                let (first, second) = (from.add(i * from_stride), from.add((i + 1) * from_stride));
                if let (true, Some(next)) = (STREAM, next) {
                    for v in 0..V {
                        prefetch(first.wrapping_add(next + v * LANES).cast());
                        prefetch(second.wrapping_add(next + v * LANES).cast());
                    }
                }
                row_from::<S, V, PART, STREAM>(first, state.add(i * stride), decays, k[i], q[i], u, &mut even, n);
                let next = state.add((i + 1) * stride);
                row_from::<S, V, PART, STREAM>(second, next, decays, k[i + 1], q[i + 1], u, &mut odd, n);
                i += 2;
            }
            if i < k.len() {
                let last = from.add(i * from_stride);
                row_from::<S, V, PART, STREAM>(last, state.add(i * stride), decays, k[i], q[i], u, &mut even, n);
            }
            for v in 0..V {
                even[v] = S::f_add(even[v], odd[v]);
            }
            even
        }
    }
}

impl Head for DeltaRule<'_> {
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
        assert_eq!((self.q.count, self.q.width), (n_tokens, key_dim), "the queries");
        assert_eq!(self.k.count, n_tokens, "the keys");
        assert_eq!((self.decay.count, self.decay.width), (n_tokens, 1), "the decays");
        assert_eq!((self.beta.count, self.beta.width), (n_tokens, 1), "the writing strengths");
        assert_eq!((self.state.count, self.state.width), (key_dim, value_dim), "the state");
        let before = self.before.is_none_or(|before| (before.count, before.width) == (key_dim, value_dim));
        assert!(before, "the state before");
        assert_eq!((self.out.count, self.out.width), (n_tokens, value_dim), "the output");
    }

    #[inline(always)]
    unsafe fn step<S: Simd, const V: usize, const PART: bool>(&self, token: usize, column: usize) {
        let n = self.v.width - column;
        let (q, k) = (self.q.row(token), self.k.row(token));
        let (decay, beta) = (self.decay.row(token)[0], self.beta.row(token)[0]);
        let stride = self.state.stride;
        // SAFETY: rows and columns that there are.
        unsafe {
            let state = self.state.ptr.add(column);
            let (from, from_stride) = match &self.before {
                Some(before) if token == 0 => (before.ptr.add(column), before.stride),
                _ => (state.cast_const(), stride),
            };
            let mut u = dot::<S, V, PART>(k, from, from_stride, n);
            let (decays, beta) = (S::f_splat(decay), S::f_splat(beta));
            for v in 0..V {
                let value = load::<S, PART>(self.v.at(token).add(column + v * LANES), n);
                u[v] = S::f_mul(beta, S::f_sub(value, S::f_mul(decays, u[v])));
            }
            let aligned = state as usize % STREAMED == 0 && stride % (STREAMED / size_of::<f32>()) == 0;
            let rows = Update::<S> { k, q, from, from_stride, next: self.next, state, stride, decays, n };
            // A state that goes on in another place after one token is not read again before the next step.
            let sums = if token == 0 && self.before.is_some() && self.v.count == 1 && aligned && !PART {
                let sums = rows.run::<V, PART, true>(&u);
                settle();
                sums
            } else {
                rows.run::<V, PART, false>(&u)
            };
            for v in 0..V {
                let out = self.out.at(token).add(column + v * LANES);
                store::<S, PART>(out, sums[v], n);
            }
        }
    }

    #[inline(always)]
    fn scratch(&self) -> usize {
        Self::CHUNK * (2 * self.k.width + padded(self.v.width) + 2 * Self::CHUNK + 2)
    }

    #[inline(always)]
    unsafe fn chunk(&self, isa: Isa, tokens: Range<usize>, mut scratch: Scratch<'_>) {
        const C: usize = <DeltaRule<'static> as Head>::CHUNK;
        let (first, n) = (tokens.start, tokens.len());
        let (key_dim, value_dim) = (self.k.width, self.v.width);
        let u_row = padded(value_dim);
        let keys = scratch.take(key_dim * C);
        let left = scratch.take(C * key_dim);
        let u = scratch.take(C * u_row);
        let qk = scratch.take(C * C);
        let kk = scratch.take(C * C);
        let betas = scratch.take(C);
        let since = scratch.take(C);

        if let Some(before) = self.before.filter(|_| first == 0) {
            for i in 0..key_dim {
                // SAFETY: rows that there are, of the same length; the state is nobody else's.
                unsafe { std::ptr::copy_nonoverlapping(before.at(i), self.state.at(i), value_dim) };
            }
        }
        // Keys the other way round, `[key_dim, C]`.
        for j in 0..n {
            for (i, k) in self.k.row(first + j).iter().enumerate() {
                keys[i * C + j] = *k;
            }
        }
        let (out, out_row) = (self.out.at(first), self.out.stride);
        // SAFETY: all of it lies in the inputs, the outputs, or in scratch, as large as `scratch` says.
        unsafe {
            let (q, k) = (
                Matrix { ptr: self.q.at(first), row: self.q.stride },
                Matrix { ptr: self.k.at(first), row: self.k.stride },
            );
            scores(isa, q, keys.as_ptr(), qk.as_mut_ptr(), C, n, key_dim);
            scores(isa, k, keys.as_ptr(), kk.as_mut_ptr(), C, n, key_dim);

            let mut total = 1.0;
            for i in 0..n {
                let (decay, beta) = (self.decay.row(first + i)[0], self.beta.row(first + i)[0]);
                total *= decay;
                betas[i] = beta;
                for since in &mut since[..i] {
                    *since *= decay;
                }
                since[i] = 1.0;
                for j in 0..=i {
                    qk[i * C + j] *= since[j];
                    kk[i * C + j] *= -beta * since[j];
                }
                for (left, q) in left[i * key_dim..].iter_mut().zip(self.q.row(first + i)) {
                    *left = total * q;
                }
            }
            let from_state = Product {
                a: Matrix { ptr: left.as_ptr(), row: key_dim },
                b: Matrix { ptr: self.state.ptr, row: self.state.stride },
                out,
                out_row,
                rows: n,
                depth: key_dim,
                columns: value_dim,
                keep: Keep::Nothing,
            };
            from_state.run(isa);

            let mut total_i = 1.0;
            for i in 0..n {
                total_i *= self.decay.row(first + i)[0];
                let factor = -betas[i] * total_i;
                for (left, k) in left[i * key_dim..].iter_mut().zip(self.k.row(first + i)) {
                    *left = factor * k;
                }
                u[i * u_row..][..value_dim].copy_from_slice(self.v.row(first + i));
            }
            let left = Matrix { ptr: left.as_ptr(), row: key_dim };
            let (u_out, keep) = (u.as_mut_ptr(), Keep::Rows(betas.as_ptr()));
            let u = Matrix { ptr: u_out, row: u_row };
            Product { a: left, out: u_out, out_row: u_row, keep, ..from_state }.run(isa);
            let solve = LowerProduct {
                a: Matrix { ptr: kk.as_ptr(), row: C },
                diagonal: false,
                b: u,
                out: u_out,
                out_row: u_row,
                n,
                columns: value_dim,
            };
            solve.run(isa);
            let qk = Matrix { ptr: qk.as_ptr(), row: C };
            LowerProduct { a: qk, diagonal: true, out, out_row, ..solve }.run(isa);

            for keys in keys.chunks_exact_mut(C) {
                for (k, since) in keys[..n].iter_mut().zip(&*since) {
                    *k *= since;
                }
            }
            let update = Product {
                a: Matrix { ptr: keys.as_ptr(), row: C },
                b: u,
                out: self.state.ptr,
                out_row: self.state.stride,
                rows: key_dim,
                depth: n,
                columns: value_dim,
                keep: Keep::Times(total),
            };
            update.run(isa);
        }
    }
}
