//! Activations quantised to 8 bits: the input of products with quantised weights. A row is quantised once and read by all the
//! matrices that it is multiplied by.

use crate::pool::ThreadPool;
use crate::shared::SharedMut;
use crate::simd::{Isa, Kernel, LANES, Simd};

/// Elements of an activation block, which share a scale.
pub(crate) const BLOCK: usize = 32;

/// Rows of activations as 8-bit codes: `x = scale * code`, one scale per
/// [`BLOCK`] elements, `scale = max|x| / 127`.
#[derive(Debug, Default)]
pub(crate) struct Q8Activations {
    /// Row length; a multiple of [`BLOCK`].
    n_in: usize,
    /// `[n_tokens, n_in]`
    codes: Vec<i8>,
    /// `[n_tokens, n_in / BLOCK]`
    blocks: Vec<Q8Block>,
}

/// The scale of a block of activations, and sums that the kernels use for the offset and the minimum of weights:
/// `sum((code - offset) * a) = sum(code * a) - offset * sum(a)`. The sums of each half are for weight formats with a scale per
/// 16 columns.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct Q8Block {
    /// An element is `scale * code`.
    pub(crate) scale: f32,
    /// Minus the sum of the codes.
    pub(crate) neg_sum: i32,
    /// Minus the sum of the codes of each half.
    pub(crate) neg_half_sums: [i32; 2],
    /// The sum of the elements: `scale` times the sum of the codes.
    pub(crate) scaled_sum: f32,
    /// The sum of the elements of each half.
    pub(crate) scaled_half_sums: [f32; 2],
}

/// Pointers to one token's row of [`Q8Activations`]: `n_in` codes and `n_in / BLOCK` blocks.
#[derive(Clone, Copy)]
pub(crate) struct Q8Row {
    pub(crate) codes: *const i8,
    pub(crate) blocks: *const Q8Block,
}

impl Q8Activations {
    /// Replaces the contents by the quantised rows of `x`, `[n_tokens, n_in]`.
    ///
    /// # Panics
    ///
    /// When `n_in` is not a multiple of [`BLOCK`], or `x` is not whole rows.
    pub(crate) fn quantize(&mut self, pool: &ThreadPool, isa: Isa, x: &[f32], n_in: usize) {
        assert!(n_in.is_multiple_of(BLOCK) && x.len().is_multiple_of(n_in), "rows are whole blocks");
        self.n_in = n_in;
        // Grows only; every element in use is written below.
        self.codes.resize(self.codes.len().max(x.len()), 0);
        self.blocks.resize(self.blocks.len().max(x.len() / BLOCK), Q8Block::default());
        let codes = SharedMut::new(&mut self.codes);
        let blocks = SharedMut::new(&mut self.blocks);
        pool.for_each(x.len() / n_in, &|token| {
            // SAFETY: each token owns its row of each array.
            let (codes, blocks) =
                unsafe { (codes.slice(token * n_in, n_in), blocks.slice(token * n_in / BLOCK, n_in / BLOCK)) };
            isa.run(Quantize { x: &x[token * n_in..][..n_in], codes, blocks });
        });
    }

    /// The row of `token`.
    pub(crate) fn row(&self, token: usize) -> Q8Row {
        let at = token * self.n_in;
        Q8Row { codes: self.codes[at..at + self.n_in].as_ptr(), blocks: self.blocks[at / BLOCK..].as_ptr() }
    }

    /// The length of a row.
    pub(crate) fn n_in(&self) -> usize {
        self.n_in
    }

    /// Bytes of the buffers.
    pub(crate) fn bytes(&self) -> usize {
        self.codes.capacity() + size_of::<Q8Block>() * self.blocks.capacity()
    }
}

/// The kernel that quantises one row: `codes[n]` and `blocks[n / BLOCK]` from `x[n]`.
struct Quantize<'a> {
    x: &'a [f32],
    codes: &'a mut [i8],
    blocks: &'a mut [Q8Block],
}

impl Kernel for Quantize<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let n = BLOCK * self.blocks.len();
        assert!(self.x.len() == n && self.codes.len() == n, "a row of whole blocks");
        // SAFETY: blocks lie inside the slices.
        unsafe {
            for (b, block) in self.blocks.iter_mut().enumerate() {
                let x = self.x.as_ptr().add(b * BLOCK);
                let codes = self.codes.as_mut_ptr().add(b * BLOCK);
                let (lo, hi) = (S::f_load(x), S::f_load(x.add(LANES)));
                let amax = S::f_largest(S::f_max(S::f_abs(lo), S::f_abs(hi)));
                let inverse = S::f_splat(if amax > 1e-36 { 127.0 / amax } else { 0.0 });
                let scale = amax / 127.0;
                let (lo, hi) = (S::f_round(S::f_mul(lo, inverse)), S::f_round(S::f_mul(hi, inverse)));
                S::f_store_i8(codes, lo);
                S::f_store_i8(codes.add(LANES), hi);
                let neg_half_sums = [-(S::f_sum(lo) as i32), -(S::f_sum(hi) as i32)];
                let neg_sum = neg_half_sums[0] + neg_half_sums[1];
                *block = Q8Block {
                    scale,
                    neg_sum,
                    neg_half_sums,
                    scaled_sum: -scale * neg_sum as f32,
                    scaled_half_sums: [-scale * neg_half_sums[0] as f32, -scale * neg_half_sums[1] as f32],
                };
            }
        }
    }
}
