//! Attention of encoders: all queries to all keys. The keys and the values of a head are repacked like the weights of a product,
//! and scores and results are computed by the kernel of products.

use crate::kernels::matmul::{PanelSlice, run_panels};
use crate::packed::PANEL;
use crate::pool::ThreadPool;
use crate::shared::SharedMut;
use crate::simd::{Isa, Kernel, LANES, Simd, exp};

/// Queries of a task, whose scores stay in a core's L2 cache.
const QUERIES: usize = 64;

/// The heads of rows that attend to each other.
pub(super) struct Heads<'a> {
    /// Queries, `[n_queries, width]`.
    pub(super) q: &'a [f32],
    /// Keys, `[n_keys, kv_width]`.
    pub(super) k: &'a [f32],
    /// Values, `[n_keys, kv_width]`.
    pub(super) v: &'a [f32],
    /// Elements of a row: those of all heads.
    pub(super) width: usize,
    /// Elements of a row of keys: those of as many heads, or of fewer.
    pub(super) kv_width: usize,
    /// Elements of a head.
    pub(super) head_dim: usize,
    /// Factor on the scores.
    pub(super) scale: f32,
}

impl Heads<'_> {
    /// Writes the results, `[n_queries, width]`.
    pub(super) fn attend(&self, pool: &ThreadPool, isa: Isa, out: &mut [f32]) {
        let (n_queries, n_keys) = (self.q.len() / self.width, self.k.len() / self.kv_width);
        let (n_head, n_head_kv) = (self.width / self.head_dim, self.kv_width / self.head_dim);
        let packed: Vec<_> = {
            let mut packed: Vec<(Vec<f32>, Vec<f32>)> = vec![Default::default(); n_head_kv];
            let shared = SharedMut::new(&mut packed);
            // SAFETY: each task has its own head.
            pool.for_each(n_head_kv, &|head| unsafe { shared.slice(head, 1) }[0] = self.pack(head, n_keys));
            packed
        };
        let n_blocks = n_queries.div_ceil(QUERIES);
        let out = SharedMut::new(out);
        pool.for_each(n_head * n_blocks, &|task| {
            let (head, block) = (task / n_blocks, task % n_blocks);
            let (keys, values) = &packed[head * n_head_kv / n_head];
            let rows = block * QUERIES..n_queries.min((block + 1) * QUERIES);
            let (n, first, dim) = (rows.len(), head * self.head_dim, self.head_dim);
            let queries: Vec<f32> =
                rows.clone().flat_map(|row| &self.q[row * self.width + first..][..dim]).copied().collect();
            let mut scores = vec![0.0; n * n_keys];
            product(isa, keys, dim, &queries, &mut scores, n_keys);
            for scores in scores.chunks_exact_mut(n_keys) {
                isa.run(Softmax { scores, scale: self.scale });
            }
            let mut results = vec![0.0; n * dim];
            product(isa, values, n_keys, &scores, &mut results, dim);
            for (row, result) in rows.zip(results.chunks_exact(dim)) {
                // SAFETY: each task has its own rows of its head.
                unsafe { out.slice(row * self.width + first, dim) }.copy_from_slice(result);
            }
        });
    }

    /// The keys of a head as the matrix `[n_keys, head_dim]`, and the values as `[head_dim, n_keys]`, in panels of rows.
    fn pack(&self, head: usize, n_keys: usize) -> (Vec<f32>, Vec<f32>) {
        let (dim, first) = (self.head_dim, head * self.head_dim);
        let mut keys = vec![0.0; n_keys.div_ceil(PANEL) * PANEL * dim];
        let mut values = vec![0.0; dim.div_ceil(PANEL) * PANEL * n_keys];
        for key in 0..n_keys {
            let row = |x: &'_ [f32]| x[key * self.kv_width + first..][..dim].to_vec();
            for (i, k) in row(self.k).into_iter().enumerate() {
                keys[(key / PANEL * dim + i) * PANEL + key % PANEL] = k;
            }
            for (i, v) in row(self.v).into_iter().enumerate() {
                values[(i / PANEL * n_keys + key) * PANEL + i % PANEL] = v;
            }
        }
        (keys, values)
    }
}

/// `y = W x` for rows `x`, `[n, n_in]`, of a matrix `[n_out, n_in]` in panels.
fn product(isa: Isa, panels: &[f32], n_in: usize, x: &[f32], y: &mut [f32], n_out: usize) {
    let y = SharedMut::new(y);
    // SAFETY: `y` is borrowed by this function alone.
    run_panels(isa, panels, n_in, x, &unsafe { PanelSlice::whole(&y, x.len() / n_in, n_out) });
}

/// `scores = softmax(scale * scores)`
struct Softmax<'a> {
    scores: &'a mut [f32],
    scale: f32,
}

impl Kernel for Softmax<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self { scores, scale } = self;
        let largest = scores.iter().fold(f32::NEG_INFINITY, |largest, v| largest.max(scale * v));
        let whole = scores.len() / LANES * LANES;
        let after = scores.len() - whole;
        // SAFETY: vectors lie inside the slice; the caller vouches for the instruction set.
        unsafe {
            let (scales, largest_of_all) = (S::f_splat(scale), S::f_splat(-largest));
            let mut sums = S::f_splat(0.0);
            for i in (0..whole).step_by(LANES) {
                let p = scores.as_mut_ptr().add(i);
                let v = exp::<S>(S::f_fma(S::f_load(p), scales, largest_of_all));
                sums = S::f_add(sums, v);
                S::f_store(p, v);
            }
            let mut rest = [0.0; LANES];
            rest[..after].copy_from_slice(&scores[whole..]);
            S::f_store(rest.as_mut_ptr(), exp::<S>(S::f_fma(S::f_load(rest.as_ptr()), scales, largest_of_all)));
            scores[whole..].copy_from_slice(&rest[..after]);
            let factor = 1.0 / (S::f_sum(sums) + scores[whole..].iter().sum::<f32>());
            for v in scores {
                *v *= factor;
            }
        }
    }
}
