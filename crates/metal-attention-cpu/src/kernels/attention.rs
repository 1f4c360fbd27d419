//! Split-KV attention over the KV cache with an online softmax (Milakov and Gimelshein 2018, arXiv 1805.02867): the scores of
//! one page at a time are in memory, never those of all positions.
//!
//! The positions are divided into *splits* of [`SPLIT`]. The kernel [`Attention`] computes the partial result of some queries
//! for one split: the sum of values weighted by `exp(score - max)`, the maximum, and the sum of the weights. [`merge`] combines
//! the splits of a query. Every split is a task, so decoding at a long context uses all threads. The arithmetic of a token does
//! not depend on which tokens are computed together: prefill and decode give the same bits.

use metal_attention_model::PAGE;

use crate::kv_cache::{CacheElement, SharedKvCache, padded};
use crate::simd::{Kernel, LANES, Simd, exp, prefetch};

/// Positions of a split.
pub(crate) const SPLIT: usize = 512;
/// Positions whose scores are computed at a time: a page, so that one lookup in the page table serves them all.
const CHUNK: usize = PAGE;
/// Query rows that share every load of keys and values.
const QUERY_ROWS: usize = 4;
/// The most query rows for which keys and values are prefetched: those of one token, whose heads share the keys. With more
/// rows the arithmetic takes longer than the loads.
const MAX_PREFETCH_QUERIES: usize = 8;
/// Elements from the keys that are read to those that are prefetched.
const PREFETCH: usize = 2048;

/// One query row: one head of one token.
#[derive(Clone, Copy)]
pub(crate) struct Query {
    /// The query, `[key_dim]`, rotated and scaled.
    pub(crate) q: *const f32,
    /// The first position that it attends to.
    pub(crate) first: usize,
    /// The position after the last one that it attends to.
    pub(crate) end: usize,
    /// The position of the query's token.
    pub(crate) pos: usize,
    /// ALiBi: what a score is reduced by for each position of distance; 0: nothing.
    pub(crate) slope: f32,
    /// The partial result, `[padded(value_dim)]`: the sum of values weighted by `exp(score - max)`.
    pub(crate) out: *mut f32,
    /// The maximum of the scores and the sum of the weights: `[max, sum]`; `[-inf, 0]` where the query attends to no position
    /// of the split.
    pub(crate) max_sum: *mut [f32; 2],
}

/// The kernel for some query rows and one split of one KV head.
pub(crate) struct Attention<'a, E> {
    /// The query rows, which all read this KV head.
    queries: &'a [Query],
    /// The KV head's keys in page 0, `[PAGE / 16, key_dim, 16]`.
    keys: *const E,
    /// The KV head's values in page 0, `[PAGE, padded(value_dim)]`.
    values: *const E,
    /// The sequence's page table. Entries of pages before the queries' first position are not valid.
    pages: &'a [u32],
    /// Elements from the keys of a page to those of the next.
    keys_per_page: usize,
    /// Elements from the values of a page to those of the next.
    values_per_page: usize,
    key_dim: usize,
    value_dim: usize,
    /// Scores become `cap * tanh(score / cap)`.
    soft_cap: Option<f32>,
    /// First position of the split.
    start: usize,
}

impl<'a, E: CacheElement> Attention<'a, E> {
    /// The kernel for `queries` and the split that begins at position `start` of a sequence with these `pages`, for KV head
    /// `head`.
    ///
    /// # Safety
    ///
    /// `pages` are pages of the cache and contain every position that the queries attend to; no thread writes to these
    /// positions at the same time. The queries' pointers are valid, and no other thread accesses their results.
    pub(crate) unsafe fn new(
        cache: &SharedKvCache<'a, E>,
        head: usize,
        pages: &'a [u32],
        queries: &'a [Query],
        soft_cap: Option<f32>,
        start: usize,
    ) -> Self {
        let layout = cache.layout;
        Self {
            queries,
            keys: cache.keys.at(layout.key_index(0, head, 0)),
            values: cache.values.at(layout.value_index(0, head, 0)),
            pages,
            keys_per_page: layout.keys_per_page(),
            values_per_page: layout.values_per_page(),
            key_dim: layout.key_dim(),
            value_dim: layout.value_dim(),
            soft_cap,
            start,
        }
    }
}

/// Pointers to a KV head's part of one page.
#[derive(Clone, Copy)]
struct PagePointers<E> {
    /// `[PAGE / 16, key_dim, 16]`
    keys: *const E,
    /// `[PAGE, padded(value_dim)]`
    values: *const E,
    /// The keys of the sequence's next page.
    next_keys: *const E,
}

impl<E: CacheElement> Kernel for Attention<'_, E> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let (rows, rest) = self.queries.as_chunks::<QUERY_ROWS>();
        // SAFETY: the cache and the queries are as `new` requires.
        unsafe {
            for rows in rows {
                self.rows::<S, QUERY_ROWS>(rows);
            }
            match *rest {
                [] => {}
                [a] => self.rows::<S, 1>(&[a]),
                [a, b] => self.rows::<S, 2>(&[a, b]),
                [a, b, c, ..] => self.rows::<S, 3>(&[a, b, c]),
            }
        }
    }
}

impl<E: CacheElement> Attention<'_, E> {
    /// Computes the partial results of `R` query rows, page by page.
    #[inline(always)]
    unsafe fn rows<S: Simd, const R: usize>(&self, queries: &[Query; R]) {
        let dim = padded(self.value_dim);
        let mut scores = [[0f32; CHUNK]; R];
        let mut max = [f32::NEG_INFINITY; R];
        let mut sum = [0f32; R];
        // SAFETY: pointers and positions are those of the cache and of the queries' buffers.
        unsafe {
            for q in queries {
                std::slice::from_raw_parts_mut(q.out, dim).fill(0.0);
            }
            let first = queries.iter().map(|q| q.first).min().unwrap_or(0).max(self.start) / CHUNK * CHUNK;
            let end = queries.iter().map(|q| q.end).max().unwrap_or(0).min(self.start + SPLIT);
            for chunk in (first..end).step_by(CHUNK) {
                let page = self.page(chunk / PAGE);
                let n = CHUNK.min(end - chunk).next_multiple_of(LANES);
                let mut i = 0;
                while const { S::TILE >= 8 } && n - i >= 2 * LANES {
                    self.score::<S, R, 2>(queries, &mut scores, page, i);
                    i += 2 * LANES;
                }
                while i < n {
                    self.score::<S, R, 1>(queries, &mut scores, page, i);
                    i += LANES;
                }
                for r in 0..R {
                    let q = &queries[r];
                    let scores = &mut scores[r][..n];
                    if self.soft_cap.is_some() || q.slope != 0.0 {
                        self.cap_and_bias::<S>(q, scores, chunk);
                    }
                    // Positions that this row does not attend to get the weight 0.
                    let low = q.first.saturating_sub(chunk).min(n);
                    let high = q.end.saturating_sub(chunk).min(n).max(low);
                    scores[..low].fill(f32::NEG_INFINITY);
                    scores[high..].fill(f32::NEG_INFINITY);
                    let mut m = S::f_splat(f32::NEG_INFINITY);
                    for i in (0..n).step_by(LANES) {
                        m = S::f_max(m, S::f_load(scores.as_ptr().add(i)));
                    }
                    let larger = S::f_largest(m).max(max[r]);
                    if larger == f32::NEG_INFINITY {
                        scores.fill(0.0);
                        continue;
                    }
                    let m = S::f_splat(larger);
                    let mut total = S::f_splat(0.0);
                    for i in (0..n).step_by(LANES) {
                        let s = scores.as_mut_ptr().add(i);
                        let p = exp::<S>(S::f_sub(S::f_load(s), m));
                        S::f_store(s, p);
                        total = S::f_add(total, p);
                    }
                    if max[r] == f32::NEG_INFINITY {
                        max[r] = larger;
                    } else if larger > max[r] {
                        let mut shrink = [0f32; LANES];
                        S::f_store(shrink.as_mut_ptr(), exp::<S>(S::f_splat(max[r] - larger)));
                        sum[r] *= shrink[0];
                        let shrink = S::f_splat(shrink[0]);
                        for i in (0..dim).step_by(LANES) {
                            S::f_store(q.out.add(i), S::f_mul(S::f_load(q.out.add(i)), shrink));
                        }
                        max[r] = larger;
                    }
                    sum[r] += S::f_sum(total);
                }
                let n = CHUNK.min(end - chunk);
                let mut i = 0;
                while const { S::TILE >= 8 } && dim - i >= 4 * LANES {
                    self.weigh::<S, R, 4>(queries, &scores, page.values, n, i);
                    i += 4 * LANES;
                }
                while i < dim {
                    self.weigh::<S, R, 1>(queries, &scores, page.values, n, i);
                    i += LANES;
                }
            }
            for r in 0..R {
                *queries[r].max_sum = [max[r], sum[r]];
            }
        }
    }

    /// Applies the soft cap and the ALiBi slope to the scores of the positions from `start` on.
    #[inline(always)]
    unsafe fn cap_and_bias<S: Simd>(&self, q: &Query, scores: &mut [f32], start: usize) {
        // SAFETY: scores are whole vectors.
        unsafe {
            if let Some(cap) = self.soft_cap {
                let (one, cap, twice) = (S::f_splat(1.0), S::f_splat(cap), S::f_splat(2.0 / cap));
                for scores in scores.chunks_exact_mut(LANES) {
                    // cap tanh(x / cap), tanh(z) = (e^2z - 1) / (e^2z + 1)
                    let e = exp::<S>(S::f_mul(S::f_load(scores.as_ptr()), twice));
                    let tanh = S::f_div(S::f_sub(e, one), S::f_add(e, one));
                    S::f_store(scores.as_mut_ptr(), S::f_mul(tanh, cap));
                }
            }
            if q.slope != 0.0 {
                for (i, score) in scores.iter_mut().enumerate() {
                    *score -= q.slope * (start + i).abs_diff(q.pos) as f32;
                }
            }
        }
    }

    /// Pointers to the `i`-th page of the sequence.
    #[inline(always)]
    unsafe fn page(&self, i: usize) -> PagePointers<E> {
        let page = self.pages[i] as usize;
        // There is no page after the last one; prefetching its own keys again costs nothing.
        let next = self.pages.get(i + 1).map_or(page, |&next| next as usize);
        // SAFETY: the table contains pages of the cache.
        unsafe {
            PagePointers {
                keys: self.keys.add(page * self.keys_per_page),
                values: self.values.add(page * self.values_per_page),
                next_keys: self.keys.add(next * self.keys_per_page),
            }
        }
    }

    /// The scores of positions `at..at + 16 G` of a page, where `at` is a multiple of 16.
    #[inline(always)]
    unsafe fn score<S: Simd, const R: usize, const G: usize>(
        &self,
        queries: &[Query; R],
        scores: &mut [[f32; CHUNK]; R],
        page: PagePointers<E>,
        at: usize,
    ) {
        // SAFETY: the groups of 16 lie in the page, which is whole groups.
        unsafe {
            let keys = page.keys.add(at * self.key_dim);
            let values = page.values.add(at * padded(self.value_dim));
            let ahead = at * self.key_dim + PREFETCH;
            let ahead = match ahead.checked_sub(PAGE * self.key_dim) {
                Some(ahead) => page.next_keys.wrapping_add(ahead),
                None => page.keys.wrapping_add(ahead),
            };
            // With few queries the loads limit the speed: prefetch the next keys, and the values that these scores weigh.
            let fetch = self.queries.len() <= MAX_PREFETCH_QUERIES;
            let mut acc = [[S::f_splat(0.0); G]; R];
            for d in 0..self.key_dim {
                if fetch {
                    for g in 0..G {
                        let at = (g * self.key_dim + d) * LANES;
                        prefetch(ahead.wrapping_add(at).cast());
                        prefetch(values.wrapping_add(at).cast());
                    }
                }
                for g in 0..G {
                    let k = E::load::<S>(keys.add((g * self.key_dim + d) * LANES));
                    for r in 0..R {
                        acc[r][g] = S::f_fma(k, S::f_splat(*queries[r].q.add(d)), acc[r][g]);
                    }
                }
            }
            for r in 0..R {
                for g in 0..G {
                    S::f_store(scores[r].as_mut_ptr().add(at + g * LANES), acc[r][g]);
                }
            }
        }
    }

    /// Adds the first `n` rows of `values`, weighted, to elements `at..at + 16 V` of the partial results.
    #[inline(always)]
    unsafe fn weigh<S: Simd, const R: usize, const V: usize>(
        &self,
        queries: &[Query; R],
        weights: &[[f32; CHUNK]; R],
        values: *const E,
        n: usize,
        at: usize,
    ) {
        let dim = padded(self.value_dim);
        // SAFETY: positions lie in the cache, elements in a padded row.
        unsafe {
            let mut acc = [[S::f_splat(0.0); V]; R];
            for r in 0..R {
                for v in 0..V {
                    acc[r][v] = S::f_load(queries[r].out.add(at + v * LANES));
                }
            }
            for i in 0..n {
                let row = values.add(i * dim + at);
                let mut elements = [S::f_splat(0.0); V];
                for v in 0..V {
                    elements[v] = E::load::<S>(row.add(v * LANES));
                }
                for r in 0..R {
                    let weight = S::f_splat(weights[r][i]);
                    for v in 0..V {
                        acc[r][v] = S::f_fma(weight, elements[v], acc[r][v]);
                    }
                }
            }
            for r in 0..R {
                for v in 0..V {
                    S::f_store(queries[r].out.add(at + v * LANES), acc[r][v]);
                }
            }
        }
    }
}

/// Merges the partial results of one query row. `partial`, `[n_splits, padded value_dim]`, contains the weighted sums,
/// `max_sum`, `[n_splits]`, maximum and sum of each; `sink` is an additional score without a value. Writes the result of
/// attention to `out`, `[value_dim]`.
pub(crate) fn merge(partial: &[f32], max_sum: &[[f32; 2]], sink: Option<f32>, out: &mut [f32]) {
    if let ([[_, sum]], None) = (max_sum, sink) {
        let factor = 1.0 / sum;
        for (o, p) in out.iter_mut().zip(partial) {
            *o = factor * p;
        }
        return;
    }
    let dim = padded(out.len());
    let max = max_sum.iter().fold(sink.unwrap_or(f32::NEG_INFINITY), |a, m| a.max(m[0]));
    let factors = max_sum.iter().map(|m| (m[0] - max).exp());
    let sum: f32 = factors.clone().zip(max_sum).map(|(f, m)| f * m[1]).sum();
    let sum = sum + sink.map_or(0.0, |sink| (sink - max).exp());
    out.fill(0.0);
    for (factor, partial) in factors.zip(partial.chunks_exact(dim)) {
        let factor = factor / sum;
        for (o, p) in out.iter_mut().zip(partial) {
            *o += factor * p;
        }
    }
}
