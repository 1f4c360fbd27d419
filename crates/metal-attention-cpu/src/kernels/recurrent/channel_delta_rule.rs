//! Kimi Delta Attention (arXiv 2510.26692, equation 1) of one head: the gated delta rule whose channels decay each by itself.
//!
//! With key `k`, query `q`, value `v`, decay `g` in 0..=1 of each element of the key and writing strength `beta` of each
//! token: `S = Diag(g) S; u = beta (v - k S); S = S + k^T u; out = q S`

use std::ops::Range;

use super::vectors::row_from;
use super::{Head, Rows, RowsMut, Scratch, Tokens};
use crate::kernels::vectors::{load, store};
use crate::simd::{Isa, LANES, Simd};

/// Rows that are summed up by themselves, in two sums, so that additions need not wait for each other: a sum over all rows
/// would round more.
const ROWS: usize = 64;

/// `total += a + b`
#[inline(always)]
unsafe fn add<S: Simd, const V: usize>(total: &mut [S::F; V], [a, b]: &[[S::F; V]; 2]) {
    for v in 0..V {
        // SAFETY: the caller vouches for the instruction set.
        total[v] = unsafe { S::f_add(total[v], S::f_add(a[v], b[v])) };
    }
}

/// One head, or some columns of one.
pub(crate) struct ChannelDeltaRule<'a> {
    /// Of each token, `[n_tokens, key_dim]`: normalised and, as the model has it, scaled.
    pub(crate) q: Rows<'a>,
    /// `[n_tokens, key_dim]`, normalised
    pub(crate) k: Rows<'a>,
    /// `[n_tokens, value_dim]`
    pub(crate) v: Rows<'a>,
    /// `[n_tokens, key_dim]`, in 0..=1
    pub(crate) decay: Rows<'a>,
    /// `[n_tokens, 1]`, in 0..=1
    pub(crate) beta: Rows<'a>,
    /// The state before the first token, `[key_dim, value_dim]`, where it is not what `state` holds: then that is overwritten.
    pub(crate) before: Option<Rows<'a>>,
    /// `[key_dim, value_dim]`, changed in place
    pub(crate) state: RowsMut<'a>,
    /// `[n_tokens, value_dim]`
    pub(crate) out: RowsMut<'a>,
}

impl Head for ChannelDeltaRule<'_> {
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
        assert_eq!((self.decay.count, self.decay.width), (n_tokens, key_dim), "the decays");
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
        let (decay, beta) = (self.decay.row(token), self.beta.row(token)[0]);
        let stride = self.state.stride;
        // SAFETY: rows and columns that there are.
        unsafe {
            let state = self.state.ptr.add(column);
            let (from, from_stride) = match &self.before {
                Some(before) if token == 0 => (before.ptr.add(column), before.stride),
                _ => (state.cast_const(), stride),
            };
            let mut known = [S::f_splat(0.0); V];
            for start in (0..k.len()).step_by(ROWS) {
                let mut sums = [[S::f_splat(0.0); V]; 2];
                for i in start..k.len().min(start + ROWS) {
                    let key = S::f_splat(k[i] * decay[i]);
                    for v in 0..V {
                        let row = load::<S, PART>(from.add(i * from_stride + v * LANES), n);
                        sums[i % 2][v] = S::f_fma(key, row, sums[i % 2][v]);
                    }
                }
                add::<S, V>(&mut known, &sums);
            }
            let mut u = [S::f_splat(0.0); V];
            for v in 0..V {
                let value = load::<S, PART>(self.v.at(token).add(column + v * LANES), n);
                u[v] = S::f_mul(S::f_splat(beta), S::f_sub(value, known[v]));
            }
            let mut result = [S::f_splat(0.0); V];
            for start in (0..k.len()).step_by(ROWS) {
                let mut sums = [[S::f_splat(0.0); V]; 2];
                for i in start..k.len().min(start + ROWS) {
                    let (before, after) = (from.add(i * from_stride), state.add(i * stride));
                    let decay = S::f_splat(decay[i]);
                    row_from::<S, V, PART, false>(before, after, decay, k[i], q[i], &u, &mut sums[i % 2], n);
                }
                add::<S, V>(&mut result, &sums);
            }
            for v in 0..V {
                let out = self.out.at(token).add(column + v * LANES);
                store::<S, PART>(out, result[v], n);
            }
        }
    }

    #[inline(always)]
    fn scratch(&self) -> usize {
        0
    }

    /// Token by token: the paper's chunks divide by decays, which may be next to nothing.
    #[inline(always)]
    unsafe fn chunk(&self, isa: Isa, tokens: Range<usize>, _scratch: Scratch<'_>) {
        isa.run(Tokens { head: self, tokens });
    }
}
