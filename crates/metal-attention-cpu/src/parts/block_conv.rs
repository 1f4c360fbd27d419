//! The convolutions around a mixer or a feed-forward within blocks (DFlash-2).

use metal_attention_model::{BatchToken, BlockConvWeights};

use crate::forward::{MIN_PARALLEL_ELEMENTS, MicroBatchRun, ProductInput, add_bias, resize};
use crate::kernels::matmul::{MatmulOp, matmul};
use crate::layers::PreparedLinear;
use crate::shared::SharedMut;
use crate::simd::{Kernel, Simd};

/// Buffers of the convolutions.
#[derive(Default)]
pub(crate) struct BlockConvScratch {
    /// The taps of each input for both sides, `[n_tokens, 2, n_tap, n_groups]`: written with the input of a part, and read again with
    /// its result.
    taps: Vec<f32>,
    /// The result of a convolution, `[n_tokens, n_embd]`.
    out: Vec<f32>,
}

impl BlockConvScratch {
    /// Bytes of all buffers.
    pub(crate) fn bytes(&self) -> usize {
        4 * (self.taps.capacity() + self.out.capacity())
    }
}

/// Which of the two convolutions of a part.
#[derive(Clone, Copy)]
pub(crate) enum ConvSide {
    /// That of its input.
    Input = 0,
    /// That of its result.
    Output = 1,
}

/// One row of a convolution: `out[c] = sum over k of (base[k][c] + taps[k][c / group_size]) * rows[k][c]`.
struct BlockConv<'a> {
    /// The rows of the input and of those before it in the block, the input's own first; at most `n_tap`, each `[n_embd]`.
    rows: &'a [&'a [f32]],
    /// `[n_tap, n_embd]`.
    base: &'a [f32],
    /// `[n_tap, n_groups]`.
    taps: &'a [f32],
    group_size: usize,
    out: &'a mut [f32],
}

impl Kernel for BlockConv<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self { rows, base, taps, group_size, out } = self;
        let n_embd = out.len();
        let bases = base.chunks_exact(n_embd).zip(taps.chunks_exact(n_embd / group_size));
        out.fill(0.0);
        for (row, (base, taps)) in rows.iter().zip(bases) {
            let groups = out.chunks_exact_mut(group_size).zip(row.chunks_exact(group_size));
            for ((out, row), (base, tap)) in groups.zip(base.chunks_exact(group_size).zip(taps)) {
                for ((y, x), base) in out.iter_mut().zip(row).zip(base) {
                    *y += (base + tap) * x;
                }
            }
        }
    }
}

impl MicroBatchRun<'_> {
    /// Computes the taps of all tokens from `normed`, the normed input of a part, and replaces it by its convolution.
    pub(crate) fn convolve_normed(&mut self, conv: &BlockConvWeights<PreparedLinear>, tokens: &[BatchToken]) {
        self.observe(&[&conv.proj], ProductInput::Normed);
        let n_embd = self.spec.n_embd;
        let s = &mut *self.scratch;
        let n_taps = 2 * conv.spec.n_taps_of_side(n_embd);
        resize(&mut s.block_conv.taps, tokens.len() * n_taps);
        let y = &mut s.block_conv.taps;
        let mut products = [MatmulOp { matrix: &conv.proj.weight, rows: 0..tokens.len(), y, accumulate: false }];
        matmul(self.pool, self.isa, &s.normed, &mut s.q8, &mut products);
        for row in s.block_conv.taps.chunks_exact_mut(n_taps) {
            add_bias(row, &conv.proj);
        }
        let mut rows = std::mem::take(&mut s.normed);
        self.convolve(conv, ConvSide::Input, tokens, &mut rows);
        self.scratch.normed = rows;
        self.record_time("block_conv");
    }

    /// Replaces `rows`, `[n_tokens, n_embd]`, by their convolution, with the taps that [`convolve_normed`](Self::convolve_normed) has
    /// computed last.
    pub(crate) fn convolve(
        &mut self,
        conv: &BlockConvWeights<PreparedLinear>,
        side: ConvSide,
        tokens: &[BatchToken],
        rows: &mut Vec<f32>,
    ) {
        let (n_embd, isa) = (self.spec.n_embd, self.isa);
        let n_taps = conv.spec.n_taps_of_side(n_embd);
        let base = &conv.base[side as usize * conv.spec.n_tap * n_embd..][..conv.spec.n_tap * n_embd];
        let BlockConvScratch { taps, out } = &mut self.scratch.block_conv;
        resize(out, rows.len());
        let (all, out_rows) = (&rows[..], SharedMut::new(out));
        self.pool.for_each_if(rows.len() >= MIN_PARALLEL_ELEMENTS, tokens.len(), &|t| {
            // Tokens of one sequence in a step are consecutive inputs of one block.
            let in_block = (0..=t).rev().take(conv.spec.n_tap).take_while(|&i| tokens[i].seq == tokens[t].seq);
            let rows: Vec<&[f32]> = in_block.map(|i| &all[i * n_embd..][..n_embd]).collect();
            let taps = &taps[(2 * t + side as usize) * n_taps..][..n_taps];
            // SAFETY: each token owns its row.
            let out = unsafe { out_rows.slice(t * n_embd, n_embd) };
            isa.run(BlockConv { rows: &rows, base, taps, group_size: conv.spec.group_size, out });
        });
        std::mem::swap(rows, out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::Isa;
    use crate::test_support::TestRandom;

    #[test]
    fn rows_are_weighted_sums_of_those_before() {
        let mut random = TestRandom(5);
        for (n_embd, group_size, n_tap) in [(8, 8, 2), (33, 11, 3), (48, 1, 4), (128, 16, 3)] {
            let n_groups = n_embd / group_size;
            let (base, taps) = (random.floats(n_tap * n_embd, 1.0), random.floats(n_tap * n_groups, 1.0));
            let rows: Vec<_> = (0..n_tap).map(|_| random.floats(n_embd, 1.0)).collect();
            // At the beginning of a block there are fewer rows than taps.
            for n_rows in 1..=n_tap {
                let rows: Vec<&[f32]> = rows[..n_rows].iter().map(Vec::as_slice).collect();
                let term = |k: usize, c: usize| {
                    let tap = f64::from(base[k * n_embd + c]) + f64::from(taps[k * n_groups + c / group_size]);
                    tap * f64::from(rows[k][c])
                };
                let want = |c: usize| (0..n_rows).map(|k| term(k, c)).sum::<f64>();
                for isa in Isa::available() {
                    let mut out = vec![f32::NAN; n_embd];
                    isa.run(BlockConv { rows: &rows, base: &base, taps: &taps, group_size, out: &mut out });
                    for (c, &got) in out.iter().enumerate() {
                        assert!((f64::from(got) - want(c)).abs() < 1e-6, "{} {c} of {n_embd}: {got}", isa.name());
                    }
                }
            }
        }
    }
}
