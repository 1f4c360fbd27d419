//! Products of some tokens, for which weights come as fast as the memory gives them.

use super::ModelRunner;
use super::linear::{BLOCKS_PER_SM, LinearOp, WARPS, matrix_args, previous_power_of_two};
use crate::CudaError;
use crate::args::{Epilogue, MatmulFewArgs};
use crate::device::CudaSummary;
use crate::launch::LaunchGrid;
use crate::matrix::CudaMatrix;

/// Tiles of 8 tokens that a block takes at most.
const MOST_TILES: usize = 4;
/// Panels of a warp from which on several blocks share them out.
const MANY_PANELS: usize = 16;
/// Bytes of what a warp has summed up of 16 rows and 8 tokens.
const FRAGMENT: usize = 512;

/// Bytes of the sums of splits, and of their tickets: there are no more blocks than run at once.
pub(super) fn split_bytes(gpu: &CudaSummary) -> [usize; 2] {
    let blocks = BLOCKS_PER_SM * gpu.n_sm;
    [blocks * 2 * MOST_TILES * FRAGMENT, blocks * size_of::<u32>()]
}

/// Tokens up to which products of a model with rows of `n_embd` elements are of this kind. Where four warps can multiply together
/// they take over the sooner the wider rows are: as measured on an H200 at 576, 2048, 3072 and 4096.
pub(crate) fn few_tokens(gpu: &CudaSummary, n_embd: usize) -> usize {
    if gpu.has_wgmma() { previous_power_of_two((128 << 10) / n_embd).clamp(32, 128) } else { 64 }
}

/// How a product is shared out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct SplitPlan {
    /// Warps of a block that share its panels out; the others have other rows.
    warps_a_tile: usize,
    /// Blocks that share the panels out.
    n_splits: usize,
}

impl SplitPlan {
    /// That of matrices of so many tiles of rows, GATED those of the gate, and `n_panels` panels, for each of `n_groups` groups of
    /// tokens: as many warps on the same rows as there are blocks for at once, as measured on an H200.
    fn new(
        tiles: &(impl Iterator<Item = usize> + Clone),
        gated: bool,
        n_panels: usize,
        n_groups: usize,
        n_sm: usize,
    ) -> Self {
        let at_once = BLOCKS_PER_SM * n_sm;
        let blocks =
            |warps: usize| n_groups * tiles.clone().map(|n| n.div_ceil(tiles_of_block(warps, gated))).sum::<usize>();
        let warps_a_tile =
            [WARPS, WARPS / 2, WARPS / 4].into_iter().find(|warps| blocks(*warps) <= at_once).unwrap_or(1);
        let of_warp = n_panels / warps_a_tile;
        let wanted = if of_warp < MANY_PANELS { 1 } else { (at_once / blocks(warps_a_tile)).clamp(1, of_warp / 2) };
        // As many as have panels.
        Self { warps_a_tile, n_splits: n_panels.div_ceil(n_panels.div_ceil(wanted)) }
    }
}

/// Tiles of rows, GATED of the gate, that a block has.
fn tiles_of_block(warps_a_tile: usize, gated: bool) -> usize {
    WARPS / warps_a_tile * if gated { 1 } else { 2 }
}

impl ModelRunner {
    /// `y = W x` of packed rows, with some of the product's matrices.
    pub(super) fn matmul_few(
        &mut self,
        p: &LinearOp<'_>,
        matrices: &[(&CudaMatrix, usize)],
        x: u64,
        n_tokens: usize,
    ) -> Result<(), CudaError> {
        let gated = p.epilogue == Epilogue::Gated;
        let parts = matrix_args(matrices);
        let n_token_tiles = n_tokens.div_ceil(8);
        let tiles = n_token_tiles.next_power_of_two().min(MOST_TILES);
        let n_groups = n_token_tiles.div_ceil(tiles);
        let rows = p.stacked_matrices(matrices).iter().map(|(matrix, _)| matrix.n_tiles());
        let n_sm = self.gpu.summary().n_sm;
        let SplitPlan { warps_a_tile, n_splits } =
            SplitPlan::new(&rows, gated, parts[0].n_panels as usize, n_groups, n_sm);
        let (blocks, n_blocks) = p.count_blocks(matrices, tiles_of_block(warps_a_tile, gated));
        let args = MatmulFewArgs {
            parts,
            n_parts: matrices.len() as u32,
            blocks,
            x,
            n_tokens: n_tokens as u32,
            n_token_tiles: n_token_tiles as u32,
            n_out: p.n_out as u32,
            output: p.epilogue as u32,
            activation: p.activation,
            scale: p.scale,
            bias: p.bias,
            y: p.y,
            packed: p.packed,
            y_token_tiles: n_token_tiles as u32,
            warps_a_tile: warps_a_tile as u32,
            n_splits: n_splits as u32,
            unused: 0,
            sums: self.buffers.split_sums.ptr(),
            tickets: self.buffers.split_tickets.ptr(),
        };
        let grid = LaunchGrid {
            blocks: [n_blocks, n_groups, n_splits],
            threads: 32 * WARPS,
            shared: WARPS * 2 * tiles * FRAGMENT,
        };
        self.launch(&format!("matmul_few_{tiles}"), p.label, grid, &args)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_run_at_once_where_they_can() {
        let plan = |tiles: &[usize], gated, n_panels| SplitPlan::new(&tiles.iter().copied(), gated, n_panels, 1, 132);
        // llama-3.2-1b: queries, keys and values, then gate and up, then down, whose panels are many, then the head.
        assert_eq!(plan(&[128, 32, 32], false, 32), SplitPlan { warps_a_tile: 8, n_splits: 1 });
        assert_eq!(plan(&[512], true, 32), SplitPlan { warps_a_tile: 4, n_splits: 1 });
        assert_eq!(plan(&[128], false, 128), SplitPlan { warps_a_tile: 8, n_splits: 4 });
        assert_eq!(plan(&[8016], false, 32), SplitPlan { warps_a_tile: 1, n_splits: 1 });
        for (tiles, n_panels) in [(1, 1), (1, 1000), (7, 129), (64, 131), (132, 300), (4000, 64)] {
            for n_groups in [1, 2] {
                let SplitPlan { warps_a_tile, n_splits } =
                    SplitPlan::new(&[tiles].into_iter(), false, n_panels, n_groups, 132);
                let each = n_panels.div_ceil(n_splits);
                assert!((n_splits - 1) * each < n_panels, "{tiles} {n_panels}: a split without panels");
                let blocks = n_groups * tiles.div_ceil(tiles_of_block(warps_a_tile, false));
                assert!(n_splits == 1 || blocks * n_splits <= 264, "{tiles} {n_panels}: no room for sums");
            }
        }
    }
}
