//! The GEMM with warpgroup instructions (`matmul_wide.cu`, `wgmma`), on devices of compute capability 9.0, for more than
//! [`max_few_tokens`](super::max_few_tokens) tokens, that is, for prefill.
//!
//! `y = W x` with packed F16 inputs; a block takes 128 rows and 16 to 256 tokens. Producer warps copy records and inputs to
//! shared memory; two warpgroups of consumers multiply. If there are fewer blocks than multiprocessors, several blocks share
//! the panels of the same rows (split-K), and the last of them adds up their partial sums.

use super::launcher::Launcher;
use super::linear::{LinearOp, count_blocks, matrix_args};
use crate::CudaError;
use crate::args::{ACTIVATED, ElementsFunction, Epilogue, MAX_MATRICES, MatmulWideArgs, ResultRowsArgs};
use crate::device::CudaSummary;
use crate::kernels;
use crate::launch::LaunchGrid;
use crate::matrix::CudaMatrix;
use crate::slice::{DevicePtr, DeviceSlice, F16};

/// Row tiles of a block; of a gated product half as many of the gate and of up.
const TILES: usize = 8;
/// The fewest and the most tokens of a block.
const TOKENS: [usize; 2] = [16, 256];
/// Panels of a record in some weight layouts; splits begin at multiples of it.
const PANELS_PER_RECORD: usize = 4;
/// Threads of a block: a warpgroup of producers and two of consumers.
const THREADS: usize = 384;
/// Threads of the consumers, each of which has sums of its own.
const CONSUMER_THREADS: usize = 256;
/// Shared memory of a block: barriers, and the rings of pipeline stages.
const SHARED: usize = (1 + 224) << 10;
/// Flag in `n_token_tiles` for the packed layout that this path reads; `WIDE` of `kernels/common.cuh`.
const WIDE: u32 = 1 << 31;

/// Bytes of the partial sums of split-K products of up to `n_tokens` tokens, and of their counters, for this path and
/// `matmul_few`.
pub(crate) fn split_bytes(gpu: &CudaSummary, n_tokens: usize) -> [usize; 2] {
    let few = super::matmul_few::split_bytes(gpu);
    if !gpu.has_wgmma() {
        return few;
    }
    let tokens = n_tokens.next_power_of_two().clamp(TOKENS[0], TOKENS[1]);
    [few[0].max(gpu.n_sm * CONSUMER_THREADS * tokens / 2 * size_of::<f32>()), few[1].max(gpu.n_sm * size_of::<u32>())]
}

/// The division of a product among blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct WidePlan {
    /// Tokens of a block.
    tokens: usize,
    /// Blocks that share the panels of the same rows (split-K).
    n_splits: usize,
}

/// Approximate cycles of a panel in a block of 16, 32, 64, 128 and 256 tokens.
const PANEL_CYCLES: [usize; 5] = [720, 750, 810, 930, 1230];

/// The plan with the fewest estimated cycles for `row_blocks` times 128 rows, `n_panels` panels and `n_tokens` tokens on `n_sm`
/// multiprocessors. Measured on an H200: a block takes about 6000 cycles to start and 47 for each token to store its results,
/// and the last block of a split also reads the others' sums.
fn wide_plan(row_blocks: usize, n_panels: usize, n_tokens: usize, n_sm: usize) -> WidePlan {
    let max_tokens = n_tokens.next_power_of_two().clamp(TOKENS[0], TOKENS[1]);
    let groups = n_panels.div_ceil(PANELS_PER_RECORD);
    let plans = (TOKENS[0].ilog2()..=max_tokens.ilog2()).flat_map(|log| {
        let tokens = 1 << log;
        let blocks = row_blocks * n_tokens.div_ceil(tokens);
        (1..=(n_sm / blocks).clamp(1, groups)).map(move |max_splits| {
            let panels = groups.div_ceil(max_splits) * PANELS_PER_RECORD;
            let n_splits = n_panels.div_ceil(panels);
            let panel_cycles = PANEL_CYCLES[(log - TOKENS[0].ilog2()) as usize];
            let join = if n_splits > 1 { 3000 + tokens * (25 + 9 * n_splits) } else { 0 };
            let cycles = (blocks * n_splits).div_ceil(n_sm) * (panels * panel_cycles + 6000 + 47 * tokens) + join;
            (cycles, WidePlan { tokens, n_splits })
        })
    });
    plans.min_by_key(|(cycles, _)| *cycles).map_or(WidePlan { tokens: max_tokens, n_splits: 1 }, |(_, plan)| plan)
}

/// `n_token_tiles` for kernels that pack `n_tokens` rows: their number of tiles, and the flag of the layout that products of that many tokens
/// read.
pub(crate) fn packed_layout(gpu: &CudaSummary, max_few_tokens: usize, n_tokens: usize) -> u32 {
    let wide = gpu.has_wgmma() && n_tokens > max_few_tokens;
    n_tokens.div_ceil(8) as u32 | if wide { WIDE } else { 0 }
}

/// What becomes of the sums of a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WideOutput {
    /// Rows of each matrix, or one result of all.
    Epilogue {
        epilogue: Epilogue,
        /// The activation of a gated product, by its number in the kernels.
        activation: u32,
    },
    /// `function(sum + bias)` as packed input of the next product; of one matrix.
    Activated(ElementsFunction),
}

/// A product of packed rows with up to [`MAX_MATRICES`] matrices.
pub(crate) struct WideProduct<'a> {
    /// A label for profiles.
    pub(crate) label: &'static str,
    /// The matrices, each with the row of its result at which its rows begin.
    pub(crate) matrices: &'a [(&'a CudaMatrix, usize)],
    /// The result of each matrix.
    pub(crate) results: &'a [ResultRowsArgs],
    /// What becomes of the sums.
    pub(crate) output: WideOutput,
    /// Factor on what is added, for [`Epilogue::Add`].
    pub(crate) scale: f32,
    /// Packed F16 results; null: none.
    pub(crate) packed: DevicePtr<F16>,
}

impl Launcher<'_> {
    /// Launches the product of the packed rows `x` with some of the matrices of `p`.
    pub(super) fn matmul_wide(
        &mut self,
        p: &LinearOp<'_>,
        matrices: &[(&CudaMatrix, usize)],
        x: DeviceSlice<F16>,
        n_tokens: usize,
    ) -> Result<(), CudaError> {
        let result = ResultRowsArgs { y: p.y.ptr(), bias: p.bias, n_out: p.n_out as u32, unused: 0 };
        let product = WideProduct {
            label: p.label,
            matrices,
            results: &[result; MAX_MATRICES][..matrices.len()],
            output: WideOutput::Epilogue { epilogue: p.epilogue, activation: p.activation },
            scale: p.scale,
            packed: p.packed,
        };
        self.wide_product(&product, x, n_tokens)
    }

    /// Whether products of `n_tokens` packed rows are those of this file.
    pub(crate) fn is_wide(&self, n_tokens: usize) -> bool {
        self.gpu.summary().has_wgmma() && n_tokens > self.max_few_tokens
    }

    /// Launches a product of the packed rows `x`; [`is_wide`](Self::is_wide) holds for them.
    pub(crate) fn wide_product(
        &mut self,
        p: &WideProduct<'_>,
        x: DeviceSlice<F16>,
        n_tokens: usize,
    ) -> Result<(), CudaError> {
        let (output, activation) = match p.output {
            WideOutput::Epilogue { epilogue, activation } => (epilogue as u32, activation),
            WideOutput::Activated(function) => (ACTIVATED, function as u32),
        };
        let is_gated = output == Epilogue::Gated as u32;
        let matrices = matrix_args(p.matrices);
        let stacked = if is_gated { &p.matrices[..1] } else { p.matrices };
        let (blocks, row_blocks) = count_blocks(stacked, if is_gated { TILES / 2 } else { TILES });
        let WidePlan { tokens, n_splits } =
            wide_plan(row_blocks, matrices[0].n_panels as usize, n_tokens, self.gpu.summary().n_sm);
        let mut results = [ResultRowsArgs { ..bytemuck::Zeroable::zeroed() }; MAX_MATRICES];
        results[..p.results.len()].copy_from_slice(p.results);
        let args = MatmulWideArgs {
            matrices,
            results,
            n_matrices: p.matrices.len() as u32,
            blocks,
            x: x.ptr(),
            n_tokens: n_tokens as u32,
            n_token_tiles: n_tokens.div_ceil(8) as u32,
            output,
            activation,
            scale: p.scale,
            n_splits: n_splits as u32,
            packed: p.packed,
            sums: self.split_sums,
            tickets: self.split_tickets,
        };
        let grid =
            LaunchGrid { blocks: [n_tokens.div_ceil(tokens), row_blocks, n_splits], threads: THREADS, shared: SHARED };
        self.launch(kernels::MATMUL_WIDE[(tokens / TOKENS[0]).ilog2() as usize], p.label, grid, &args)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plans_occupy_all_multiprocessors() {
        // Many rows: the largest block of tokens.
        assert_eq!(wide_plan(224, 64, 512, 132), WidePlan { tokens: 256, n_splits: 1 });
        // Few rows and many panels: split-K, with no more blocks than there is space for sums.
        for (row_blocks, n_panels, n_tokens) in [(32, 224, 512), (16, 32, 64), (4, 9, 33), (1, 1, 5), (1002, 32, 16)] {
            let WidePlan { tokens, n_splits } = wide_plan(row_blocks, n_panels, n_tokens, 132);
            let blocks = row_blocks * n_tokens.div_ceil(tokens) * n_splits;
            assert!(n_splits == 1 || blocks <= 132, "{row_blocks} {n_panels} {n_tokens}: {blocks}");
            let panels = n_panels.div_ceil(PANELS_PER_RECORD).div_ceil(n_splits) * PANELS_PER_RECORD;
            assert!((n_splits - 1) * panels < n_panels, "{row_blocks} {n_panels} {n_tokens}: a split without panels");
        }
        assert!(wide_plan(16, 128, 64, 132).n_splits > 4);
    }
}
