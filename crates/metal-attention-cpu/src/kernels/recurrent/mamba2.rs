//! The state space of Mamba-2 (arXiv 2405.21060) of one head.
//!
//! With `dt`, which is positive, `B`, `C` and the inputs `x` of each token, and `A`, which is negative, and `D` of the head:
//!
//! `S = exp(dt A) S + dt B^T x; out = C S + D x`
//!
//! A chunk is the paper's structured matrix, section 6: with `c_i` the product of the decays of tokens 1 to i and `d_ij` that
//! of tokens j + 1 to i, `out_i = c_i C_i S + sum over j <= i of d_ij (C_i . B_j) dt_j x_j + D x_i` and
//! `S = c_n S + sum of d_nj dt_j B_j^T x_j`.

use std::ops::Range;

use super::products::{Keep, LowerProduct, Matrix, Product, scores};
use super::vectors::StateRows;
use super::{Head, Rows, RowsMut, Scratch, copy_state};
use crate::kernels::vectors::{load, store};
use crate::simd::{Isa, LANES, Simd};

/// One head, or some columns of one. Heads of a group are given the same `b` and `c`.
pub(crate) struct Mamba2<'a> {
    /// Of each token, `[n_tokens, head_dim]`
    pub(crate) x: Rows<'a>,
    /// `[n_tokens, 1]`: after its bias and softplus
    pub(crate) dt: Rows<'a>,
    /// `[n_tokens, d_state]`
    pub(crate) b: Rows<'a>,
    /// `[n_tokens, d_state]`
    pub(crate) c: Rows<'a>,
    /// `A`, negative, as files hold it
    pub(crate) a: f32,
    pub(crate) d: f32,
    /// The state before the first token, `[d_state, head_dim]`, where it lies elsewhere
    pub(crate) before: Option<Rows<'a>>,
    /// `[d_state, head_dim]`: after the last token; changed in place, or written as a whole
    pub(crate) state: RowsMut<'a>,
    /// `[n_tokens, head_dim]`
    pub(crate) out: RowsMut<'a>,
}

impl Mamba2<'_> {
    /// What is left of the state after a token.
    #[inline(always)]
    fn decay(&self, token: usize) -> f32 {
        (self.dt.row(token)[0] * self.a).exp()
    }
}

impl Head for Mamba2<'_> {
    const CHUNK: usize = 32;

    #[inline(always)]
    fn n_tokens(&self) -> usize {
        self.x.count
    }

    #[inline(always)]
    fn n_columns(&self) -> usize {
        self.x.width
    }

    #[inline(always)]
    fn check(&self) {
        let (n_tokens, d_state, head_dim) = (self.x.count, self.b.width, self.x.width);
        assert_eq!((self.dt.count, self.dt.width), (n_tokens, 1), "dt");
        assert_eq!(self.b.count, n_tokens, "B");
        assert_eq!((self.c.count, self.c.width), (n_tokens, d_state), "C");
        assert_eq!((self.state.count, self.state.width), (d_state, head_dim), "the state");
        let before = self.before.is_none_or(|before| (before.count, before.width) == (d_state, head_dim));
        assert!(before, "the state before");
        assert_eq!((self.out.count, self.out.width), (n_tokens, head_dim), "the output");
    }

    #[inline(always)]
    unsafe fn step<S: Simd, const V: usize, const PART: bool>(&self, token: usize, column: usize) {
        let n = self.x.width - column;
        let (b, c) = (self.b.row(token), self.c.row(token));
        // SAFETY: rows and columns that there are.
        unsafe {
            let rows = StateRows::new(self.before.as_ref(), &self.state, token, column);
            let (decay, dt) = (S::f_splat(self.decay(token)), S::f_splat(self.dt.row(token)[0]));
            let mut even = [S::f_splat(0.0); V];
            let mut odd = [S::f_splat(0.0); V];
            let mut x = [S::f_splat(0.0); V];
            for v in 0..V {
                let value = load::<S, PART>(self.x.at(token).add(column + v * LANES), n);
                even[v] = S::f_mul(S::f_splat(self.d), value);
                x[v] = S::f_mul(dt, value);
            }
            if !PART && self.n_tokens() == 1 && rows.can_stream() {
                rows.step::<S, V, PART, true>(decay, b, c, &x, &mut even, &mut odd, n);
            } else {
                rows.step::<S, V, PART, false>(decay, b, c, &x, &mut even, &mut odd, n);
            }
            for v in 0..V {
                let out = self.out.at(token).add(column + v * LANES);
                store::<S, PART>(out, S::f_add(even[v], odd[v]), n);
            }
        }
    }

    #[inline(always)]
    fn scratch(&self) -> usize {
        Self::CHUNK * (2 * self.b.width + Self::CHUNK + 1)
    }

    #[inline(always)]
    unsafe fn chunk(&self, isa: Isa, tokens: Range<usize>, mut scratch: Scratch<'_>) {
        const C: usize = <Mamba2<'static> as Head>::CHUNK;
        let (first, n) = (tokens.start, tokens.len());
        let (d_state, head_dim) = (self.b.width, self.x.width);
        let bs = scratch.take(d_state * C);
        let left = scratch.take(C * d_state);
        let cb = scratch.take(C * C);
        let since = scratch.take(C);

        if let Some(before) = self.before.filter(|_| first == 0) {
            // SAFETY: the state is nobody else's.
            unsafe { copy_state(&before, &self.state) };
        }
        // B the other way round, `[d_state, C]`.
        for j in 0..n {
            for (i, b) in self.b.row(first + j).iter().enumerate() {
                bs[i * C + j] = *b;
            }
        }
        // SAFETY: all of it lies in the inputs, the outputs, or in scratch, as large as `scratch` says.
        unsafe {
            let cs = Matrix { ptr: self.c.at(first), row: self.c.stride };
            scores(isa, cs, bs.as_ptr(), cb.as_mut_ptr(), C, n, d_state);
            let mut total = 1.0;
            for i in 0..n {
                let decay = self.decay(first + i);
                total *= decay;
                for since in &mut since[..i] {
                    *since *= decay;
                }
                // The decays since a token, times what it brings.
                since[i] = self.dt.row(first + i)[0];
                for (cb, since) in cb[i * C..][..=i].iter_mut().zip(&*since) {
                    *cb *= since;
                }
                cb[i * C + i] += self.d;
                for (left, c) in left[i * d_state..].iter_mut().zip(self.c.row(first + i)) {
                    *left = total * c;
                }
            }
            let (out, out_row) = (self.out.at(first), self.out.stride);
            let from_state = Product {
                a: Matrix { ptr: left.as_ptr(), row: d_state },
                b: Matrix { ptr: self.state.ptr, row: self.state.stride },
                out,
                out_row,
                rows: n,
                depth: d_state,
                columns: head_dim,
                keep: Keep::Nothing,
            };
            from_state.run(isa);
            let x = Matrix { ptr: self.x.at(first), row: self.x.stride };
            let a = Matrix { ptr: cb.as_ptr(), row: C };
            LowerProduct { a, diagonal: true, b: x, out, out_row, n, columns: head_dim }.run(isa);

            for bs in bs.chunks_exact_mut(C) {
                for (b, since) in bs[..n].iter_mut().zip(&*since) {
                    *b *= since;
                }
            }
            let update = Product {
                a: Matrix { ptr: bs.as_ptr(), row: C },
                b: x,
                out: self.state.ptr,
                out_row: self.state.stride,
                rows: d_state,
                depth: n,
                columns: head_dim,
                keep: Keep::Times(total),
            };
            update.run(isa);
        }
    }
}
