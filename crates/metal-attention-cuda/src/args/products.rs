//! Arguments of products of weight matrices, and of the repacking of weights.

use super::kernel_args;
use crate::bounds::{Bounds, KernelArgs, Launch};
use crate::matrix::{PANEL, TILE, WeightLayout};
use crate::slice::{DevicePtr, F16};

/// What a product's kernel does with the finished sums: `Output` of `matvec.cu`, `matmul.cu` and `odd_rows.cu`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Epilogue {
    /// Stores them, with the bias.
    Store = 0,
    /// Adds them, times a factor, to the result's old values.
    Add = 1,
    /// Stores `activation(gate) * up`.
    Gated = 2,
}

/// What `matmul_wide` does with sums beside [`Epilogue`]: it stores `activation(sum + bias)` as packed input of the next product.
pub(crate) const ACTIVATED: u32 = 3;

/// Most matrices of one launch of a product.
pub(crate) const MAX_MATRICES: usize = 3;

kernel_args! {
    /// A weight matrix: `Matrix` of `formats.cuh`.
    pub(crate) struct MatrixArgs = "Matrix" in "formats.cuh" {
        pub(crate) records: DevicePtr<u8>,
        pub(crate) format: u32,
        pub(crate) n_rows: u32,
        pub(crate) n_panels: u32,
        pub(crate) first_row: u32,
    }

    /// Arguments of the `repack_*` kernels (`repack.cu`).
    pub(crate) struct RepackArgs = "RepackArgs" in "repack.cu" {
        pub(crate) raw: DevicePtr<u8>,
        pub(crate) records: DevicePtr<u8>,
        pub(crate) n_rows: u32,
        pub(crate) n_in: u32,
        pub(crate) n_panels: u32,
        pub(crate) row_bytes: u32,
    }

    /// Arguments of the GEMV kernels; `matvec.cu` has the contracts of the fields.
    pub(crate) struct MatvecArgs = "MatvecArgs" in "matvec.cu" {
        pub(crate) matrices: [MatrixArgs; MAX_MATRICES],
        pub(crate) n_matrices: u32,
        /// For each matrix, the block after its last one, in ascending order; the end of the last matrix is the size of the grid.
        pub(crate) block_ends: [u32; MAX_MATRICES],
        pub(crate) n_in: u32,
        pub(crate) n_out: u32,
        pub(crate) warps_per_tile: u32,
        pub(crate) output: u32,
        pub(crate) activation: u32,
        pub(crate) eps: f32,
        pub(crate) scale: f32,
        pub(crate) unused: u32,
        pub(crate) x: DevicePtr<f32>,
        pub(crate) norm: DevicePtr<f32>,
        pub(crate) bias: DevicePtr<f32>,
        pub(crate) y: DevicePtr<f32>,
        pub(crate) rows: DevicePtr<u32>,
    }

    /// Arguments of the GEMM without warpgroup instructions (`matmul.cu`).
    pub(crate) struct MatmulArgs = "MatmulArgs" in "matmul.cu" {
        pub(crate) a: MatrixArgs,
        pub(crate) b: MatrixArgs,
        pub(crate) x: DevicePtr<F16>,
        pub(crate) n_tokens: u32,
        pub(crate) n_token_tiles: u32,
        pub(crate) n_out: u32,
        pub(crate) output: u32,
        pub(crate) activation: u32,
        pub(crate) scale: f32,
        pub(crate) bias: DevicePtr<f32>,
        pub(crate) y: DevicePtr<f32>,
        pub(crate) packed: DevicePtr<F16>,
        pub(crate) y_token_tiles: u32,
        pub(crate) unused: u32,
    }

    /// Arguments of the GEMM for few tokens (`matmul_few.cu`).
    pub(crate) struct MatmulFewArgs = "MatmulFewArgs" in "matmul_few.cu" {
        pub(crate) matrices: [MatrixArgs; MAX_MATRICES],
        pub(crate) n_matrices: u32,
        pub(crate) blocks: [u32; MAX_MATRICES],
        pub(crate) x: DevicePtr<F16>,
        pub(crate) n_tokens: u32,
        pub(crate) n_token_tiles: u32,
        pub(crate) n_out: u32,
        pub(crate) output: u32,
        pub(crate) activation: u32,
        pub(crate) scale: f32,
        pub(crate) bias: DevicePtr<f32>,
        pub(crate) y: DevicePtr<f32>,
        pub(crate) packed: DevicePtr<F16>,
        pub(crate) y_token_tiles: u32,
        pub(crate) warps_per_tile: u32,
        pub(crate) n_splits: u32,
        pub(crate) unused: u32,
        pub(crate) sums: DevicePtr<[f32; 4]>,
        pub(crate) tickets: DevicePtr<u32>,
    }

    /// The rows that a matrix makes: `ResultRows` of `matmul_wide.cu`.
    pub(crate) struct ResultRowsArgs = "ResultRows" in "matmul_wide.cu" {
        pub(crate) y: DevicePtr<f32>,
        pub(crate) bias: DevicePtr<f32>,
        pub(crate) n_out: u32,
        pub(crate) unused: u32,
    }

    /// Arguments of the GEMM with warpgroup instructions (`matmul_wide.cu`).
    pub(crate) struct MatmulWideArgs = "MatmulWideArgs" in "matmul_wide.cu" {
        pub(crate) matrices: [MatrixArgs; MAX_MATRICES],
        pub(crate) results: [ResultRowsArgs; MAX_MATRICES],
        pub(crate) n_matrices: u32,
        pub(crate) blocks: [u32; MAX_MATRICES],
        pub(crate) x: DevicePtr<F16>,
        pub(crate) n_tokens: u32,
        pub(crate) n_token_tiles: u32,
        pub(crate) output: u32,
        pub(crate) activation: u32,
        pub(crate) scale: f32,
        pub(crate) n_splits: u32,
        pub(crate) packed: DevicePtr<F16>,
        pub(crate) sums: DevicePtr<[f32; 4]>,
        pub(crate) tickets: DevicePtr<u32>,
    }

    /// Arguments of the product for rows that are not a multiple of four elements (`odd_rows.cu`).
    pub(crate) struct OddRowsArgs = "OddRowsArgs" in "odd_rows.cu" {
        pub(crate) a: MatrixArgs,
        pub(crate) b: MatrixArgs,
        pub(crate) x: DevicePtr<f32>,
        pub(crate) bias: DevicePtr<f32>,
        pub(crate) y: DevicePtr<f32>,
        pub(crate) rows: DevicePtr<u32>,
        pub(crate) n_in: u32,
        pub(crate) n_out: u32,
        pub(crate) output: u32,
        pub(crate) activation: u32,
        pub(crate) scale: f32,
        pub(crate) unused: u32,
    }
}

/// Columns of a result that products with `matrices` store: those up to the end of the last one. Gate and up have one row each of a
/// column.
pub(super) fn columns(matrices: &[MatrixArgs]) -> usize {
    matrices.iter().map(|matrix| (matrix.first_row + matrix.n_rows) as usize).max().unwrap_or(0)
}

impl KernelArgs for RepackArgs {
    fn bounds(&self, launch: &Launch, bounds: &mut Bounds) {
        bounds.array("raw", self.raw, self.n_rows as usize * self.row_bytes as usize);
        let name = launch.kernel.trim_start_matches("repack_");
        // BF16 is repacked to F32.
        let layout = if name == "bf16" { Some(WeightLayout::F32) } else { WeightLayout::from_name(name) };
        let tile_bytes = layout.map_or(0, |layout| layout.tile_bytes(self.n_panels as usize));
        bounds.array("records", self.records, (self.n_rows as usize).div_ceil(TILE) * tile_bytes);
    }
}

/// The addresses and sizes of a GEMM's operands, of all GEMMs alike.
struct Gemm<'a> {
    matrices: &'a [MatrixArgs],
    x: DevicePtr<F16>,
    n_tokens: u32,
    n_token_tiles: u32,
    n_out: u32,
    output: u32,
    bias: DevicePtr<f32>,
    y: DevicePtr<f32>,
    packed: DevicePtr<F16>,
    y_token_tiles: u32,
}

impl Gemm<'_> {
    fn bounds(&self, bounds: &mut Bounds) {
        for matrix in self.matrices {
            bounds.matrices("matrices", matrix, 1);
        }
        let (columns, gated) = (columns(self.matrices), self.output == Epilogue::Gated as u32);
        let is_packed = !self.packed.is_null() && (gated || self.output == ACTIVATED);
        let n_panels = self.matrices.iter().map(|matrix| matrix.n_panels).max().unwrap_or(0);
        bounds.packed("x", self.x, self.n_token_tiles, PANEL * n_panels as usize);
        if !gated {
            bounds.array("bias", self.bias, columns);
        }
        if is_packed {
            bounds.packed("packed", self.packed, self.y_token_tiles, columns);
        } else {
            bounds.rows("y", self.y, self.n_tokens as usize, self.n_out, columns);
        }
    }
}

impl KernelArgs for MatvecArgs {
    fn bounds(&self, launch: &Launch, bounds: &mut Bounds) {
        // `matvec_rows` has four tokens for each row of the grid, `matvec_N` has N.
        let n_tokens = launch.number().unwrap_or(4 * launch.grid.blocks[1]);
        let matrices = &self.matrices[..(self.n_matrices as usize).min(MAX_MATRICES)];
        for matrix in matrices {
            bounds.matrices("matrices", matrix, 1);
        }
        let n_rows = if self.rows.is_null() { n_tokens } else { 1 };
        bounds.array("x", self.x, n_rows * self.n_in as usize);
        bounds.array("rows", self.rows, n_tokens);
        bounds.array("norm", self.norm, self.n_in as usize);
        if self.output != Epilogue::Gated as u32 {
            bounds.array("bias", self.bias, columns(matrices));
        }
        bounds.rows("y", self.y, n_tokens, self.n_out, columns(matrices));
    }
}

impl KernelArgs for MatmulArgs {
    fn bounds(&self, _: &Launch, bounds: &mut Bounds) {
        let Self { x, n_tokens, n_token_tiles, n_out, output, bias, y, packed, y_token_tiles, .. } = *self;
        let matrices = &[self.a, self.b];
        Gemm { matrices, x, n_tokens, n_token_tiles, n_out, output, bias, y, packed, y_token_tiles }.bounds(bounds);
    }
}

impl KernelArgs for MatmulFewArgs {
    fn bounds(&self, launch: &Launch, bounds: &mut Bounds) {
        let Self { x, n_tokens, n_token_tiles, n_out, output, bias, y, packed, y_token_tiles, .. } = *self;
        let matrices = &self.matrices[..(self.n_matrices as usize).min(MAX_MATRICES)];
        Gemm { matrices, x, n_tokens, n_token_tiles, n_out, output, bias, y, packed, y_token_tiles }.bounds(bounds);
        let [rows, groups, n_splits] = launch.grid.blocks;
        if n_splits > 1 {
            // [block of the result][split][fragment][32], with two fragments for each tile of tokens of each of the warps that do not
            // share a tile.
            let fragments = launch.grid.threads / 32 / self.warps_per_tile as usize * 2 * launch.number().unwrap_or(1);
            bounds.array("sums", self.sums, rows * groups * n_splits * fragments * 32);
            bounds.array("tickets", self.tickets, rows * groups);
        }
    }
}

impl KernelArgs for MatmulWideArgs {
    fn bounds(&self, launch: &Launch, bounds: &mut Bounds) {
        let Self { x, n_tokens, n_token_tiles, output, packed, .. } = *self;
        let n_matrices = (self.n_matrices as usize).min(MAX_MATRICES);
        let (matrices, results) = (&self.matrices[..n_matrices], &self.results[..n_matrices]);
        let y_token_tiles = n_token_tiles;
        // Gate and up, or each matrix with its own result.
        let together = if output == Epilogue::Gated as u32 { n_matrices.max(1) } else { 1 };
        for (matrices, result) in matrices.chunks(together).zip(results) {
            let ResultRowsArgs { y, bias, n_out, .. } = *result;
            Gemm { matrices, x, n_tokens, n_token_tiles, n_out, output, bias, y, packed, y_token_tiles }.bounds(bounds);
        }
        let [tokens, rows, n_splits] = launch.grid.blocks;
        if n_splits > 1 {
            // [tile of the result][split][N / 8][256]
            bounds.array("sums", self.sums, tokens * rows * n_splits * launch.number().unwrap_or(8) / 8 * 256);
            bounds.array("tickets", self.tickets, tokens * rows);
        }
    }
}

impl KernelArgs for OddRowsArgs {
    fn bounds(&self, launch: &Launch, bounds: &mut Bounds) {
        let n_tokens = launch.grid.blocks[1];
        bounds.matrices("a", &self.a, 1);
        let n_rows = if self.rows.is_null() { n_tokens } else { 1 };
        bounds.array("x", self.x, n_rows * self.n_in as usize);
        bounds.array("rows", self.rows, n_tokens);
        if self.output == Epilogue::Gated as u32 {
            bounds.matrices("b", &self.b, 1);
        } else {
            bounds.array("bias", self.bias, columns(&[self.a]));
        }
        bounds.rows("y", self.y, n_tokens, self.n_out, columns(&[self.a]));
    }
}
