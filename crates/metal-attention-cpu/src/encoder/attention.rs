//! Attention of encoders: all queries to all keys. The keys and the values of a head are repacked like the weights of a product,
//! and scores and results are computed by the kernel of products, a block of keys after the other (online softmax, arXiv 1805.02867).

use super::buffers::{Buffers, Rows};
use crate::kernels::matmul::{PanelSlice, run_panels};
use crate::packed::PANEL;
use crate::pool::ThreadPool;
use crate::shared::SharedMut;
use crate::simd::{Isa, Kernel, LANES, Simd, exp};

/// Queries of a task.
const QUERIES: usize = 96;
/// Keys of a block, whole panels. They, their values and the scores of a task stay in a core's L2 cache.
const KEYS: usize = 512;

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
    /// Writes the results, `[n_queries, width]`. `buffers` has memory for packed keys and values.
    pub(super) fn attend(&self, pool: &ThreadPool, isa: Isa, buffers: &Buffers, out: &mut [f32]) {
        let (n_queries, n_keys) = (self.q.len() / self.width, self.k.len() / self.kv_width);
        let (n_head, n_head_kv) = (self.width / self.head_dim, self.kv_width / self.head_dim);
        let n_key = n_keys.div_ceil(PANEL) * PANEL * self.head_dim;
        let n_value = self.head_dim.div_ceil(PANEL) * PANEL * n_keys;
        let mut packed = Rows::new(buffers, n_head_kv, n_key + n_value);
        let shared = SharedMut::new(&mut packed.values);
        pool.for_each(n_head_kv, &|head| {
            // SAFETY: each task has its own head.
            let (keys, values) = unsafe { shared.slice(head * (n_key + n_value), n_key + n_value) }.split_at_mut(n_key);
            self.pack(head, keys, values);
        });
        let n_blocks = n_queries.div_ceil(QUERIES);
        let out = SharedMut::new(out);
        let packed = &packed.values[..];
        pool.for_each(n_head * n_blocks, &|task| {
            let (head, block) = (task / n_blocks, task % n_blocks);
            let (keys, values) =
                packed[head * n_head_kv / n_head * (n_key + n_value)..][..n_key + n_value].split_at(n_key);
            let rows = block * QUERIES..n_queries.min((block + 1) * QUERIES);
            let (first, dim) = (head * self.head_dim, self.head_dim);
            let queries: Vec<f32> =
                rows.clone().flat_map(|row| &self.q[row * self.width + first..][..dim]).copied().collect();
            let results = self.attend_queries(isa, &queries, keys, values, n_keys);
            for (row, result) in rows.zip(results.chunks_exact(dim)) {
                // SAFETY: each task has its own rows of its head.
                unsafe { out.slice(row * self.width + first, dim) }.copy_from_slice(result);
            }
        });
    }

    /// The results of some queries of a head, `[n, head_dim]`, whose keys and values are packed.
    fn attend_queries(&self, isa: Isa, queries: &[f32], keys: &[f32], values: &[f32], n_keys: usize) -> Vec<f32> {
        let dim = self.head_dim;
        let n = queries.len() / dim;
        let mut scores = vec![0.0; n * n_keys.min(KEYS)];
        let mut results = vec![0.0; n * dim];
        let (mut largest, mut sums) = (vec![f32::NEG_INFINITY; n], vec![0.0; n]);
        for first in (0..n_keys).step_by(KEYS) {
            let n_block = KEYS.min(n_keys - first);
            let keys = &keys[first * dim..][..n_block.div_ceil(PANEL) * PANEL * dim];
            let scores = &mut scores[..n * n_block];
            product(isa, keys, dim, queries, scores, n_block, false);
            let rows = scores.chunks_exact_mut(n_block).zip(results.chunks_exact_mut(dim));
            for ((scores, result), (largest, sum)) in rows.zip(largest.iter_mut().zip(&mut sums)) {
                isa.run(Softmax { scores, scale: self.scale, result, largest, sum });
            }
            let panels = dim.div_ceil(PANEL) * PANEL;
            product(isa, &values[first * panels..][..n_block * panels], n_block, scores, &mut results, dim, true);
        }
        for (result, sum) in results.chunks_exact_mut(dim).zip(&sums) {
            let factor = 1.0 / sum;
            for v in result {
                *v *= factor;
            }
        }
        results
    }

    /// Writes the keys of a head as the matrix `[n_keys, head_dim]` in panels of rows, and the values of each [`KEYS`] keys as the matrix
    /// `[head_dim, n]`. Elements of panels beyond the matrices are zeros.
    fn pack(&self, head: usize, keys: &mut [f32], values: &mut [f32]) {
        let (dim, first) = (self.head_dim, head * self.head_dim);
        let n_keys = self.k.len() / self.kv_width;
        for (panel, rows) in keys.chunks_exact_mut(PANEL * dim).zip(self.k.chunks(PANEL * self.kv_width)) {
            if rows.len() < PANEL * self.kv_width {
                panel.fill(0.0);
            }
            for (lane, row) in rows.chunks_exact(self.kv_width).enumerate() {
                for (column, k) in panel.chunks_exact_mut(PANEL).zip(&row[first..][..dim]) {
                    column[lane] = *k;
                }
            }
        }
        let n_panels = dim.div_ceil(PANEL);
        for start in (0..n_keys).step_by(KEYS) {
            let n = KEYS.min(n_keys - start);
            let block = &mut values[start * n_panels * PANEL..][..n * n_panels * PANEL];
            for (i, row) in self.v[start * self.kv_width..][..n * self.kv_width].chunks_exact(self.kv_width).enumerate()
            {
                for (panel, v) in row[first..][..dim].chunks(PANEL).enumerate() {
                    let column = &mut block[(panel * n + i) * PANEL..][..PANEL];
                    column[..v.len()].copy_from_slice(v);
                    column[v.len()..].fill(0.0);
                }
            }
        }
    }
}

/// `y = W x`, or with `accumulate` `y += W x`, for rows `x`, `[n, n_in]`, of a matrix `[n_out, n_in]` in panels.
fn product(isa: Isa, panels: &[f32], n_in: usize, x: &[f32], y: &mut [f32], n_out: usize, accumulate: bool) {
    let y = SharedMut::new(y);
    // SAFETY: `y` is borrowed by this function alone.
    run_panels(isa, panels, n_in, x, &unsafe { PanelSlice::whole(&y, x.len() / n_in, n_out, accumulate) });
}

/// A block of the scores of a query: `scores = exp(scale * scores - largest)`, with the largest scaled score so far. `sum` becomes the
/// sum of all these so far, and the result of the earlier blocks is brought to the same `largest`.
struct Softmax<'a> {
    scores: &'a mut [f32],
    scale: f32,
    /// `[head_dim]`
    result: &'a mut [f32],
    /// Negative infinity before the first block.
    largest: &'a mut f32,
    sum: &'a mut f32,
}

impl Kernel for Softmax<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self { scores, scale, result, largest, sum } = self;
        let whole = scores.len() / LANES * LANES;
        let after = scores.len() - whole;
        // SAFETY: vectors lie inside the slices; the caller vouches for the instruction set.
        unsafe {
            let scales = S::f_splat(scale);
            let mut most = S::f_splat(*largest);
            for i in (0..whole).step_by(LANES) {
                most = S::f_max(most, S::f_mul(S::f_load(scores.as_ptr().add(i)), scales));
            }
            let now = scores[whole..].iter().fold(S::f_largest(most), |most, v| most.max(scale * v));
            if *largest > f32::NEG_INFINITY && now > *largest {
                let mut factor = [0.0; LANES];
                S::f_store(factor.as_mut_ptr(), exp::<S>(S::f_splat(*largest - now)));
                *sum *= factor[0];
                for v in result {
                    *v *= factor[0];
                }
            }
            *largest = now;
            let negative = S::f_splat(-now);
            let mut sums = S::f_splat(0.0);
            for i in (0..whole).step_by(LANES) {
                let p = scores.as_mut_ptr().add(i);
                let v = exp::<S>(S::f_fma(S::f_load(p), scales, negative));
                sums = S::f_add(sums, v);
                S::f_store(p, v);
            }
            let mut rest = [0.0; LANES];
            rest[..after].copy_from_slice(&scores[whole..]);
            S::f_store(rest.as_mut_ptr(), exp::<S>(S::f_fma(S::f_load(rest.as_ptr()), scales, negative)));
            scores[whole..].copy_from_slice(&rest[..after]);
            *sum += S::f_sum(sums) + scores[whole..].iter().sum::<f32>();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_support::{TestRandom, pool};

    /// `softmax(scale q k^T) v` in F64.
    fn plain(heads: &Heads<'_>) -> Vec<f64> {
        let n_head = heads.width / heads.head_dim;
        let n_head_kv = heads.kv_width / heads.head_dim;
        let mut out = Vec::new();
        for q in heads.q.chunks_exact(heads.width) {
            for head in 0..n_head {
                let kv = head * n_head_kv / n_head * heads.head_dim;
                let q = &q[head * heads.head_dim..][..heads.head_dim];
                let score = |k: &[f32]| -> f64 { q.iter().zip(k).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum() };
                let keys = heads.k.chunks_exact(heads.kv_width);
                let scores: Vec<f64> =
                    keys.map(|k| f64::from(heads.scale) * score(&k[kv..][..heads.head_dim])).collect();
                let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = scores.iter().map(|s| (s - largest).exp()).sum();
                out.extend((0..heads.head_dim).map(|i| {
                    let values = heads.v.chunks_exact(heads.kv_width).map(|v| f64::from(v[kv + i]));
                    values.zip(&scores).map(|(v, s)| v * (s - largest).exp() / sum).sum::<f64>()
                }));
            }
        }
        out
    }

    #[test]
    fn blocks_of_keys_and_queries_give_attention_to_all() {
        let mut random = TestRandom(4);
        for (n_queries, n_keys, n_head, n_head_kv, head_dim) in
            [(1, 1, 1, 1, 8), (100, 600, 2, 1, 24), (97, 512, 2, 2, 16), (3, 1030, 4, 2, 20)]
        {
            let (width, kv_width) = (n_head * head_dim, n_head_kv * head_dim);
            let q = random.floats(n_queries * width, 2.0);
            let (mut k, v) = (random.floats(n_keys * kv_width, 2.0), random.floats(n_keys * kv_width, 1.0));
            // Later blocks have the larger scores, which bring down what is summed so far.
            for (i, k) in k.iter_mut().enumerate() {
                *k *= 1.0 + (i / kv_width / KEYS) as f32;
            }
            let heads = Heads { q: &q, k: &k, v: &v, width, kv_width, head_dim, scale: 0.3 };
            let expected = plain(&heads);
            for isa in Isa::available() {
                let [one, two] = [1, 2].map(|n_threads| {
                    let mut out = vec![f32::NAN; q.len()];
                    heads.attend(&pool(n_threads), isa, &Buffers::default(), &mut out);
                    out
                });
                assert_eq!(one, two, "{isa:?}: one thread and two");
                for (got, want) in one.iter().zip(&expected) {
                    assert!((f64::from(*got) - want).abs() < 2e-6, "{isa:?} {n_keys} keys: {got} {want}");
                }
            }
        }
    }
}
