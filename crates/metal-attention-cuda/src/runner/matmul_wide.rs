//! Products of several tokens where four warps multiply together, on devices of compute capability 9.0.

use super::ModelRunner;
use super::linear::{LinearOp, matrix_args};
use crate::CudaError;
use crate::args::{Epilogue, MatmulWideArgs};
use crate::device::CudaSummary;
use crate::launch::LaunchGrid;
use crate::matrix::CudaMatrix;

/// Tiles of rows that a block takes; half as many, where the gate's meet those of up.
const TILES: usize = 8;
/// Tokens that a block takes at least and at most.
const TOKENS: [usize; 2] = [16, 256];
/// Panels that lie side by side in the records of some formats.
const PANELS: usize = 4;
/// Threads of a block, of which [`MULTIPLIERS`] multiply.
const THREADS: usize = 384;
const MULTIPLIERS: usize = 256;
/// Workgroup memory of a block: barriers and rings.
const SHARED: usize = (1 + 224) << 10;
/// Of `n_token_tiles` where packed rows lie as these products take them; `WIDE` of `kernels/common.cuh`.
const WIDE: u32 = 1 << 31;

/// Bytes of the sums of splits of products of `n_tokens` tokens at most, and of their tickets.
pub(crate) fn split_bytes(gpu: &CudaSummary, n_tokens: usize) -> [usize; 2] {
    let few = super::matmul_few::split_bytes(gpu);
    if !gpu.has_wgmma() {
        return few;
    }
    let tokens = n_tokens.next_power_of_two().clamp(TOKENS[0], TOKENS[1]);
    [few[0].max(gpu.n_sm * MULTIPLIERS * tokens / 2 * size_of::<f32>()), few[1].max(gpu.n_sm * size_of::<u32>())]
}

/// How a product is shared out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct SplitPlan {
    /// Tokens of a block.
    tokens: usize,
    /// Parts of the panels.
    n_splits: usize,
}

/// Cycles that a panel takes a block of 16, 32.. tokens, about.
const PANEL_CYCLES: [usize; 5] = [720, 750, 810, 930, 1230];

/// What takes the fewest cycles of `row_blocks` times 128 rows of `n_panels` panels with `n_tokens` tokens on `n_sm`
/// multiprocessors, as measured on an H200: a block takes some 6000 to begin and 47 a token to write, and the last block of some
/// splits reads their sums.
fn plan(row_blocks: usize, n_panels: usize, n_tokens: usize, n_sm: usize) -> SplitPlan {
    let most = n_tokens.next_power_of_two().clamp(TOKENS[0], TOKENS[1]);
    let groups = n_panels.div_ceil(PANELS);
    let plans = (TOKENS[0].ilog2()..=most.ilog2()).flat_map(|log| {
        let tokens = 1 << log;
        let blocks = row_blocks * n_tokens.div_ceil(tokens);
        (1..=(n_sm / blocks).clamp(1, groups)).map(move |wanted| {
            let panels = groups.div_ceil(wanted) * PANELS;
            let n_splits = n_panels.div_ceil(panels);
            let of_panel = PANEL_CYCLES[(log - TOKENS[0].ilog2()) as usize];
            let join = if n_splits > 1 { 3000 + tokens * (25 + 9 * n_splits) } else { 0 };
            let cycles = (blocks * n_splits).div_ceil(n_sm) * (panels * of_panel + 6000 + 47 * tokens) + join;
            (cycles, SplitPlan { tokens, n_splits })
        })
    });
    plans.min_by_key(|(cycles, _)| *cycles).map_or(SplitPlan { tokens: most, n_splits: 1 }, |(_, plan)| plan)
}

impl ModelRunner {
    /// How packed rows of so many tokens lie.
    pub(super) fn packed_layout(&self, n_tokens: usize) -> u32 {
        let wide = self.gpu.summary().has_wgmma() && n_tokens > self.few_tokens;
        n_tokens.div_ceil(8) as u32 | if wide { WIDE } else { 0 }
    }

    /// `y = W x` of packed rows, with some of the product's matrices.
    pub(super) fn matmul_wide(
        &mut self,
        p: &LinearOp<'_>,
        matrices: &[(&CudaMatrix, usize)],
        x: u64,
        n_tokens: usize,
    ) -> Result<(), CudaError> {
        let parts = matrix_args(matrices);
        let (blocks, row_blocks) =
            p.count_blocks(matrices, if p.epilogue == Epilogue::Gated { TILES / 2 } else { TILES });
        let SplitPlan { tokens, n_splits } =
            plan(row_blocks, parts[0].n_panels as usize, n_tokens, self.gpu.summary().n_sm);
        let n_token_tiles = n_tokens.div_ceil(8) as u32;
        let args = MatmulWideArgs {
            parts,
            n_parts: matrices.len() as u32,
            blocks,
            x,
            n_tokens: n_tokens as u32,
            n_token_tiles,
            n_out: p.n_out as u32,
            output: p.epilogue as u32,
            activation: p.activation,
            scale: p.scale,
            bias: p.bias,
            y: p.y,
            packed: p.packed,
            n_splits: n_splits as u32,
            unused: 0,
            sums: self.buffers.split_sums.ptr(),
            tickets: self.buffers.split_tickets.ptr(),
        };
        let grid =
            LaunchGrid { blocks: [n_tokens.div_ceil(tokens), row_blocks, n_splits], threads: THREADS, shared: SHARED };
        self.launch(&format!("matmul_wide_{tokens}"), p.label, grid, &args)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_fill_the_multiprocessors() {
        // Many rows: as many tokens a block as there are.
        assert_eq!(plan(224, 64, 512, 132), SplitPlan { tokens: 256, n_splits: 1 });
        // Few rows of many panels are split, and no more blocks are at work than there is room for sums of.
        for (row_blocks, n_panels, n_tokens) in [(32, 224, 512), (16, 32, 64), (4, 9, 33), (1, 1, 5), (1002, 32, 16)] {
            let SplitPlan { tokens, n_splits } = plan(row_blocks, n_panels, n_tokens, 132);
            let blocks = row_blocks * n_tokens.div_ceil(tokens) * n_splits;
            assert!(n_splits == 1 || blocks <= 132, "{row_blocks} {n_panels} {n_tokens}: {blocks}");
            let panels = n_panels.div_ceil(PANELS).div_ceil(n_splits) * PANELS;
            assert!((n_splits - 1) * panels < n_panels, "{row_blocks} {n_panels} {n_tokens}: a split without panels");
        }
        assert!(plan(16, 128, 64, 132).n_splits > 4);
    }
}
