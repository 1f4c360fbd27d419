//! The state-space recurrence of one head of Mamba-2 (arXiv 2405.21060).
//!
//! `S = exp(dt A) S + dt B^T x; out = C S + D x`
//!
//! The input `x`, `dt` (positive), `B` and `C` are per token, `A` (negative) and `D` are numbers of the head.

use super::vectors::{RowDecay, StateRows};
use super::{HeadRecurrence, StridedRows, StridedRowsMut};
use crate::kernels::vectors::{load, store};
use crate::simd::{LANES, Simd};

/// One head, or some of its columns. The heads of a group have the same `b` and `c`.
pub(crate) struct Mamba2<'a> {
    /// Inputs, `[n_tokens, head_dim]`.
    pub(crate) x: StridedRows<'a>,
    /// `dt` after bias and softplus, `[n_tokens, 1]`.
    pub(crate) dt: StridedRows<'a>,
    /// `B`, `[n_tokens, d_state]`.
    pub(crate) b: StridedRows<'a>,
    /// `C`, `[n_tokens, d_state]`.
    pub(crate) c: StridedRows<'a>,
    /// `A`, negative.
    pub(crate) a: f32,
    /// `D`.
    pub(crate) d: f32,
    /// The state before the first token, `[d_state, head_dim]`; `None` where `state` contains it.
    pub(crate) before: Option<StridedRows<'a>>,
    /// The state, `[d_state, head_dim]`; afterwards that after the last token.
    pub(crate) state: StridedRowsMut<'a>,
    /// Results, `[n_tokens, head_dim]`.
    pub(crate) out: StridedRowsMut<'a>,
}

impl Mamba2<'_> {
    /// The decay factor of a token, `exp(dt A)`.
    #[inline(always)]
    fn decay(&self, token: usize) -> f32 {
        (self.dt.row(token)[0] * self.a).exp()
    }
}

impl HeadRecurrence for Mamba2<'_> {
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
        // SAFETY: rows and columns are in range.
        unsafe {
            let rows = StateRows::new(self.before.as_ref(), &self.state, token, column);
            let decay = RowDecay::<S> { all: S::f_splat(self.decay(token)), of_rows: None };
            let dt = S::f_splat(self.dt.row(token)[0]);
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
}
