//! The gated delta rule of one head (Gated `DeltaNet`, arXiv 2412.06464), and its variant with a decay for each channel of the
//! key (Kimi Delta Attention, arXiv 2510.26692, equation 1).
//!
//! For each token with key `k`, query `q`, value `v`, decay `g` in 0..=1 and writing strength `beta`:
//!
//! `S = g S; u = beta (v - k S); S = S + k^T u; out = q S`
//!
//! where `g` is one number, or a diagonal matrix.

use super::vectors::{RowDecay, StateRows, dot};
use super::{HeadRecurrence, StridedRows, StridedRowsMut};
use crate::kernels::vectors::{load, store};
use crate::simd::{LANES, Simd};

/// One head, or some of its columns.
pub(crate) struct DeltaRule<'a> {
    /// Queries, `[n_tokens, key_dim]`, normalised and scaled.
    pub(crate) q: StridedRows<'a>,
    /// Keys, `[n_tokens, key_dim]`, normalised.
    pub(crate) k: StridedRows<'a>,
    /// Values, `[n_tokens, value_dim]`.
    pub(crate) v: StridedRows<'a>,
    /// Decays `g`, `[n_tokens, 1]` or `[n_tokens, key_dim]`, in 0..=1.
    pub(crate) decay: StridedRows<'a>,
    /// Writing strengths, `[n_tokens, 1]`, in 0..=1.
    pub(crate) beta: StridedRows<'a>,
    /// The state before the first token, `[key_dim, value_dim]`; `None` where `state` contains it.
    pub(crate) before: Option<StridedRows<'a>>,
    /// Elements from the state before the first token to the state that the next call reads, which a single token prefetches.
    pub(crate) next: Option<usize>,
    /// The state, `[key_dim, value_dim]`; afterwards that after the last token.
    pub(crate) state: StridedRowsMut<'a>,
    /// Results, `[n_tokens, value_dim]`.
    pub(crate) out: StridedRowsMut<'a>,
}

impl HeadRecurrence for DeltaRule<'_> {
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
        let of_channels = self.decay.width == key_dim;
        assert!(self.decay.count == n_tokens && (of_channels || self.decay.width == 1), "the decays");
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
        let of_rows = (decay.len() > 1).then_some(decay);
        // SAFETY: rows and columns are in range.
        unsafe {
            let rows = StateRows::new(self.before.as_ref(), &self.state, token, column);
            let rows = StateRows { next: self.next, ..rows };
            let mut u = dot::<S, V, PART>(k, of_rows, rows.before, rows.before_stride, n);
            let decay = RowDecay::<S> { all: S::f_splat(decay[0]), of_rows };
            for v in 0..V {
                let known = if of_rows.is_some() { u[v] } else { S::f_mul(decay.all, u[v]) };
                let value = load::<S, PART>(self.v.at(token).add(column + v * LANES), n);
                u[v] = S::f_mul(S::f_splat(beta), S::f_sub(value, known));
            }
            let mut even = [S::f_splat(0.0); V];
            let mut odd = [S::f_splat(0.0); V];
            if !PART && self.n_tokens() == 1 && rows.can_stream() {
                rows.step::<S, V, PART, true>(decay, k, q, &u, &mut even, &mut odd, n);
            } else {
                rows.step::<S, V, PART, false>(decay, k, q, &u, &mut even, &mut odd, n);
            }
            for v in 0..V {
                let out = self.out.at(token).add(column + v * LANES);
                store::<S, PART>(out, S::f_add(even[v], odd[v]), n);
            }
        }
    }
}
