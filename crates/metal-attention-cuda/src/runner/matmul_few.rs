//! The GEMM for few tokens (`matmul_few.cu`): for more than [`max_gemv_tokens`](super::max_gemv_tokens), up to [`max_few_tokens`], where memory
//! bandwidth limits a product, as in decode steps of many sequences, and where drafts are verified. Weights go from memory to registers without a stop in shared memory.
//!
//! `y = W x` with packed F16 inputs; a block takes some tiles of 16 rows and up to 32 tokens. If there are too few blocks to
//! occupy the device, several warps of a block share the columns (panels) of a tile, and then several blocks do (split-K),
//! whose partial sums the last of them adds up.

use super::launcher::Launcher;
use super::linear::{BLOCKS_PER_SM, LinearOp, WARPS, count_blocks, matrix_args, previous_power_of_two};
use crate::CudaError;
use crate::args::{Epilogue, MatmulFewArgs};
use crate::device::CudaSummary;
use crate::kernels;
use crate::launch::LaunchGrid;
use crate::matrix::CudaMatrix;
use crate::slice::{DeviceSlice, F16};

/// Most tiles of 8 tokens of a block.
const MAX_TOKEN_TILES: usize = 4;
/// Panels of a warp from which on split-K is worth it.
const SPLIT_K_PANELS: usize = 16;
/// Bytes of a warp's sums of 16 rows and 8 tokens, F32.
const FRAGMENT_BYTES: usize = 512;

/// Bytes of the partial sums of split-K products, and of their counters. A split product has no more blocks than run at the
/// same time.
pub(super) fn split_bytes(gpu: &CudaSummary) -> [usize; 2] {
    let blocks = BLOCKS_PER_SM * gpu.n_sm;
    [blocks * 2 * MAX_TOKEN_TILES * FRAGMENT_BYTES, blocks * size_of::<u32>()]
}

/// Most tokens of a micro-batch that use this path, for a model with rows of `n_embd` elements. The wider the rows, the sooner
/// warpgroup instructions are faster: measured on an H200 at widths 576, 2048, 3072 and 4096.
pub(crate) fn max_few_tokens(gpu: &CudaSummary, n_embd: usize) -> usize {
    if gpu.has_wgmma() { previous_power_of_two((128 << 10) / n_embd).clamp(32, 128) } else { 64 }
}

/// The division of a product among warps and blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct FewTokensPlan {
    /// Warps of a block that share the panels of the same row tiles; the other warps have other tiles.
    warps_per_tile: usize,
    /// Blocks that share the panels of the same row tiles (split-K).
    n_splits: usize,
}

impl FewTokensPlan {
    /// The plan for matrices of `tiles` row tiles each (of a gated product, those of the gate), `n_panels` panels and
    /// `n_groups` groups of tokens: as many warps on the same rows as leave all blocks running at the same time. Measured on an
    /// H200.
    fn new(
        tiles: &(impl Iterator<Item = usize> + Clone),
        gated: bool,
        n_panels: usize,
        n_groups: usize,
        n_sm: usize,
    ) -> Self {
        let resident_blocks = BLOCKS_PER_SM * n_sm;
        let blocks =
            |warps: usize| n_groups * tiles.clone().map(|n| n.div_ceil(tiles_per_block(warps, gated))).sum::<usize>();
        let warps_per_tile =
            [WARPS, WARPS / 2, WARPS / 4].into_iter().find(|warps| blocks(*warps) <= resident_blocks).unwrap_or(1);
        let panels_per_warp = n_panels / warps_per_tile;
        let max_splits = if panels_per_warp < SPLIT_K_PANELS {
            1
        } else {
            (resident_blocks / blocks(warps_per_tile)).clamp(1, panels_per_warp / 2)
        };
        // Rounded so that each split has panels.
        Self { warps_per_tile, n_splits: n_panels.div_ceil(n_panels.div_ceil(max_splits)) }
    }
}

/// Row tiles of a block; of a gated product, those of the gate.
fn tiles_per_block(warps_per_tile: usize, gated: bool) -> usize {
    WARPS / warps_per_tile * if gated { 1 } else { 2 }
}

impl Launcher<'_> {
    /// Launches the product of the packed rows `x` with some of the matrices of `p`.
    pub(super) fn matmul_few(
        &mut self,
        p: &LinearOp<'_>,
        matrices: &[(&CudaMatrix, usize)],
        x: DeviceSlice<F16>,
        n_tokens: usize,
    ) -> Result<(), CudaError> {
        let gated = p.epilogue == Epilogue::Gated;
        let matrices_args = matrix_args(matrices);
        let n_token_tiles = n_tokens.div_ceil(8);
        let tiles = n_token_tiles.next_power_of_two().min(MAX_TOKEN_TILES);
        let n_groups = n_token_tiles.div_ceil(tiles);
        let rows = p.stacked_matrices(matrices).iter().map(|(matrix, _)| matrix.n_tiles());
        let n_sm = self.gpu.summary().n_sm;
        let FewTokensPlan { warps_per_tile, n_splits } =
            FewTokensPlan::new(&rows, gated, matrices_args[0].n_panels as usize, n_groups, n_sm);
        let (blocks, n_blocks) = count_blocks(p.stacked_matrices(matrices), tiles_per_block(warps_per_tile, gated));
        let args = MatmulFewArgs {
            matrices: matrices_args,
            n_matrices: matrices.len() as u32,
            blocks,
            x: x.ptr(),
            n_tokens: n_tokens as u32,
            n_token_tiles: n_token_tiles as u32,
            n_out: p.n_out as u32,
            output: p.epilogue as u32,
            activation: p.activation,
            scale: p.scale,
            bias: p.bias,
            y: p.y.ptr(),
            packed: p.packed,
            y_token_tiles: n_token_tiles as u32,
            warps_per_tile: warps_per_tile as u32,
            n_splits: n_splits as u32,
            unused: 0,
            sums: self.split_sums,
            tickets: self.split_tickets,
        };
        let grid = LaunchGrid {
            blocks: [n_blocks, n_groups, n_splits],
            threads: 32 * WARPS,
            shared: WARPS * 2 * tiles * FRAGMENT_BYTES,
        };
        self.launch(kernels::MATMUL_FEW[tiles.ilog2() as usize], p.label, grid, &args)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plans_keep_all_blocks_resident() {
        let plan =
            |tiles: &[usize], gated, n_panels| FewTokensPlan::new(&tiles.iter().copied(), gated, n_panels, 1, 132);
        // llama-3.2-1b: queries, keys and values; gate and up; down, which has many panels; the output head.
        assert_eq!(plan(&[128, 32, 32], false, 32), FewTokensPlan { warps_per_tile: 8, n_splits: 1 });
        assert_eq!(plan(&[512], true, 32), FewTokensPlan { warps_per_tile: 4, n_splits: 1 });
        assert_eq!(plan(&[128], false, 128), FewTokensPlan { warps_per_tile: 8, n_splits: 4 });
        assert_eq!(plan(&[8016], false, 32), FewTokensPlan { warps_per_tile: 1, n_splits: 1 });
        for (tiles, n_panels) in [(1, 1), (1, 1000), (7, 129), (64, 131), (132, 300), (4000, 64)] {
            for n_groups in [1, 2] {
                let FewTokensPlan { warps_per_tile, n_splits } =
                    FewTokensPlan::new(&[tiles].into_iter(), false, n_panels, n_groups, 132);
                let each = n_panels.div_ceil(n_splits);
                assert!((n_splits - 1) * each < n_panels, "{tiles} {n_panels}: a split without panels");
                let blocks = n_groups * tiles.div_ceil(tiles_per_block(warps_per_tile, false));
                assert!(n_splits == 1 || blocks * n_splits <= 264, "{tiles} {n_panels}: no room for sums");
            }
        }
    }
}
