//! Products of the small matrices that a chunk consists of. All are F32 and lie in the L1 and L2 caches; columns lie across
//! the lanes, so that the left matrix is read element by element.
//!
//! Each product is a kernel of its own, so that it is compiled once and not for every place that has one.

use crate::kernels::vectors::{load, store};
use crate::simd::{Isa, Kernel, LANES, Simd};

/// Rows and columns of a block of a lower triangle.
const BLOCK: usize = 16;

/// A matrix that is read, its rows `row` apart.
#[derive(Clone, Copy)]
pub(super) struct Matrix {
    pub(super) ptr: *const f32,
    pub(super) row: usize,
}

impl Matrix {
    /// The matrix without its first `i` rows.
    #[inline(always)]
    fn below(self, i: usize) -> Self {
        Self { ptr: self.ptr.wrapping_add(i * self.row), ..self }
    }
}

/// `out[i][j] = keep(i) * out[i][j] + sum over k of a[i][k] * b[k][j]`
#[derive(Clone, Copy)]
pub(super) struct Product {
    /// `[rows, depth]`
    pub(super) a: Matrix,
    /// `[depth, columns]`
    pub(super) b: Matrix,
    /// `[rows, columns]`, its rows `out_row` apart.
    pub(super) out: *mut f32,
    pub(super) out_row: usize,
    pub(super) rows: usize,
    pub(super) depth: usize,
    pub(super) columns: usize,
    pub(super) keep: Keep,
}

/// What becomes of what `out` holds.
#[derive(Clone, Copy)]
pub(super) enum Keep {
    /// It is not read.
    Nothing,
    All,
    Times(f32),
    /// Row `i` is multiplied by element `i`.
    Rows(*const f32),
}

impl Product {
    /// # Safety
    ///
    /// The matrices are there, and `out` is nobody else's and lies in neither of the others.
    pub(super) unsafe fn run(self, isa: Isa) {
        isa.run(Whole(self));
    }

    /// # Safety
    ///
    /// As for [`run`](Self::run), and the CPU has the instruction set.
    #[inline(always)]
    unsafe fn all<S: Simd>(&self) {
        let mut column = 0;
        // SAFETY: tiles lie inside the matrices.
        unsafe {
            if S::TILE >= 8 {
                while self.columns - column >= 4 * LANES {
                    self.rows::<S, 4, 4, false>(column);
                    column += 4 * LANES;
                }
            }
            while self.columns - column >= 2 * LANES {
                self.rows::<S, 2, 2, false>(column);
                column += 2 * LANES;
            }
            while self.columns - column >= LANES {
                self.rows::<S, 4, 1, false>(column);
                column += LANES;
            }
            if column < self.columns {
                self.rows::<S, 4, 1, true>(column);
            }
        }
    }

    /// `V` vectors of all rows, `R` at a time.
    #[inline(always)]
    unsafe fn rows<S: Simd, const R: usize, const V: usize, const PART: bool>(&self, column: usize) {
        let mut row = 0;
        // SAFETY: passed on to the caller.
        unsafe {
            while self.rows - row >= R {
                self.tile::<S, R, V, PART>(row, column);
                row += R;
            }
            while row < self.rows {
                self.tile::<S, 1, V, PART>(row, column);
                row += 1;
            }
        }
    }

    #[inline(always)]
    unsafe fn tile<S: Simd, const R: usize, const V: usize, const PART: bool>(&self, row: usize, column: usize) {
        let n = self.columns - column;
        // SAFETY: passed on to the caller.
        unsafe {
            let mut sum = [[S::f_splat(0.0); V]; R];
            for k in 0..self.depth {
                let mut b = [S::f_splat(0.0); V];
                for v in 0..V {
                    b[v] = load::<S, PART>(self.b.ptr.add(k * self.b.row + column + v * LANES), n);
                }
                for r in 0..R {
                    let a = S::f_splat(*self.a.ptr.add((row + r) * self.a.row + k));
                    for v in 0..V {
                        sum[r][v] = S::f_fma(a, b[v], sum[r][v]);
                    }
                }
            }
            for r in 0..R {
                for v in 0..V {
                    let out = self.out.add((row + r) * self.out_row + column + v * LANES);
                    let sum = match self.keep {
                        Keep::Nothing => sum[r][v],
                        Keep::All => S::f_add(load::<S, PART>(out, n), sum[r][v]),
                        Keep::Times(factor) => S::f_fma(S::f_splat(factor), load::<S, PART>(out, n), sum[r][v]),
                        Keep::Rows(factors) => {
                            S::f_fma(S::f_splat(*factors.add(row + r)), load::<S, PART>(out, n), sum[r][v])
                        }
                    };
                    store::<S, PART>(out, sum, n);
                }
            }
        }
    }
}

/// A product that may be computed.
struct Whole(Product);

impl Kernel for Whole {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: whoever made it vouches for the matrices, the caller for the instruction set.
        unsafe { self.0.all::<S>() }
    }
}

/// `out[i] += sum over j < i, or j <= i, of a[i][j] * b[j]`, rows from the first to the last. Where `b` is `out` this solves
/// `out = before + a out`.
#[derive(Clone, Copy)]
pub(super) struct LowerProduct {
    /// `[n, n]`; what lies above the diagonal, or on it where that does not count, is not read.
    pub(super) a: Matrix,
    pub(super) diagonal: bool,
    /// `[n, columns]`
    pub(super) b: Matrix,
    /// `[n, columns]`
    pub(super) out: *mut f32,
    pub(super) out_row: usize,
    pub(super) n: usize,
    pub(super) columns: usize,
}

impl LowerProduct {
    /// # Safety
    ///
    /// As for [`Product::run`], but `b` may be `out`.
    pub(super) unsafe fn run(self, isa: Isa) {
        isa.run(Triangle(self));
    }
}

/// One that may be computed.
struct Triangle(LowerProduct);

impl Kernel for Triangle {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: whoever made it vouches for the matrices, the caller for the instruction set.
        unsafe { self.0.all::<S>() }
    }
}

impl LowerProduct {
    #[inline(always)]
    unsafe fn all<S: Simd>(&self) {
        // SAFETY: passed on to the caller; blocks left of the diagonal read rows that are finished.
        unsafe {
            for first in (0..self.n).step_by(BLOCK) {
                let rows = BLOCK.min(self.n - first);
                if first > 0 {
                    let left = Product {
                        a: self.a.below(first),
                        b: self.b,
                        out: self.out.add(first * self.out_row),
                        out_row: self.out_row,
                        rows,
                        depth: first,
                        columns: self.columns,
                        keep: Keep::All,
                    };
                    left.all::<S>();
                }
                let mut column = 0;
                while self.columns - column >= 4 * LANES && S::TILE >= 8 {
                    self.block::<S, 4, false>(first, rows, column);
                    column += 4 * LANES;
                }
                while self.columns - column >= LANES {
                    self.block::<S, 1, false>(first, rows, column);
                    column += LANES;
                }
                if column < self.columns {
                    self.block::<S, 1, true>(first, rows, column);
                }
            }
        }
    }

    /// `V` vectors of a block on the diagonal.
    #[inline(always)]
    unsafe fn block<S: Simd, const V: usize, const PART: bool>(&self, first: usize, rows: usize, column: usize) {
        let n = self.columns - column;
        // SAFETY: passed on to the caller.
        unsafe {
            for i in first..first + rows {
                let out = self.out.add(i * self.out_row + column);
                let mut sum = [S::f_splat(0.0); V];
                for v in 0..V {
                    sum[v] = load::<S, PART>(out.add(v * LANES), n);
                }
                for j in first..i + usize::from(self.diagonal) {
                    let a = S::f_splat(*self.a.ptr.add(i * self.a.row + j));
                    let b = self.b.ptr.add(j * self.b.row + column);
                    for v in 0..V {
                        sum[v] = S::f_fma(a, load::<S, PART>(b.add(v * LANES), n), sum[v]);
                    }
                }
                for v in 0..V {
                    store::<S, PART>(out.add(v * LANES), sum[v], n);
                }
            }
        }
    }
}

/// `out[i][j] = x[i] . y[j]` for `j <= i` and some beyond: how much each token of a chunk has of those before it.
///
/// # Safety
///
/// `x` is `[n, depth]`; `y` is `[depth, n]`, the other way round, and `out` is `[n, n]`, nobody else's, both with rows that lie
/// `row` apart and go on to whole vectors.
pub(super) unsafe fn scores(isa: Isa, x: Matrix, y: *const f32, out: *mut f32, row: usize, n: usize, depth: usize) {
    for first in (0..n).step_by(BLOCK) {
        let product = Product {
            a: x.below(first),
            b: Matrix { ptr: y, row },
            out: out.wrapping_add(first * row),
            out_row: row,
            rows: BLOCK.min(n - first),
            depth,
            columns: first + BLOCK,
            keep: Keep::Nothing,
        };
        // SAFETY: as the caller vouches; blocks are as wide as a vector.
        unsafe { product.run(isa) };
    }
}
