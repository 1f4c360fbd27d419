//! The state space of Mamba-2 (arXiv 2405.21060) of one head.
//!
//! With `dt`, which is positive, `B`, `C` and the inputs `x` of each token, and `A`, which is negative, and `D` of the head:
//!
//! `S = exp(dt A) S + dt B^T x; out = C S + D x`

use super::vectors::{RowDecay, StateRows};
use super::{HeadRecurrence, StridedRows, StridedRowsMut};
use crate::kernels::vectors::{load, store};
use crate::simd::{LANES, Simd};

/// One head, or some columns of one. Heads of a group are given the same `b` and `c`.
pub(crate) struct Mamba2<'a> {
    /// Of each token, `[n_tokens, head_dim]`
    pub(crate) x: StridedRows<'a>,
    /// `[n_tokens, 1]`: after its bias and softplus
    pub(crate) dt: StridedRows<'a>,
    /// `[n_tokens, d_state]`
    pub(crate) b: StridedRows<'a>,
    /// `[n_tokens, d_state]`
    pub(crate) c: StridedRows<'a>,
    /// `A`, negative, as files hold it
    pub(crate) a: f32,
    pub(crate) d: f32,
    /// The state before the first token, `[d_state, head_dim]`, where it lies elsewhere
    pub(crate) before: Option<StridedRows<'a>>,
    /// `[d_state, head_dim]`: after the last token; changed in place, or written as a whole
    pub(crate) state: StridedRowsMut<'a>,
    /// `[n_tokens, head_dim]`
    pub(crate) out: StridedRowsMut<'a>,
}

impl Mamba2<'_> {
    /// What is left of the state after a token.
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
        // SAFETY: rows and columns that there are.
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
