//! [`LinearOp`], `y = W x` for the tokens of a micro-batch, and the norms that prepare its input.
//!
//! Weights are repacked at load (`matrix.rs`): a tile is 16 rows, a panel is 64 columns, and the codes and scales of one tile's
//! panel (or of four neighbouring ones) are one record. A product is launched in one of these ways
//! ([`product`](Launcher::product)):
//! - GEMV, with F32 inputs, for up to [`max_gemv_tokens`] tokens in one launch (`matvec.cu`); in `exact` mode for any number of
//!   tokens, a launch for every four of them.
//! - GEMM, with inputs rounded to F16 and packed in the order of the tensor cores: `matmul_few.rs`, `matmul_wide.rs`, or,
//!   without warpgroup instructions, `matmul.cu` (see [`gemm`](Launcher::gemm)).
//! - `odd_rows.cu`, a plain kernel, where the number of columns is not a multiple of four.

use metal_attention_model::{FeedForward, ModelSpec};

use super::ModelRunner;
use super::launcher::Launcher;
use super::matmul_wide::packed_layout;
use crate::CudaError;
use crate::args::{Epilogue, MAX_MATRICES, MatmulArgs, MatrixArgs, MatvecArgs, NormArgs, OddRowsArgs};
use crate::device::{CudaBuffer, CudaSummary};
use crate::kernels;
use crate::launch::LaunchGrid;
use crate::matrix::{CudaMatrix, PANEL, TILE, WeightLayout};
use crate::slice::{DevicePtr, DeviceSlice, F16};
use crate::weights::{CudaLinear, CudaNorm, norm_kind, ptr_or_null};

/// Most tokens of one GEMV launch.
pub(crate) const GEMV_TOKENS: usize = 4;
/// Elements of a row of the residual stream from which on [`max_gemv_tokens`] is less.
const GEMM_WIDTH: usize = 2048;
/// Warps of a block of the GEMV and GEMM kernels.
pub(crate) const WARPS: usize = 8;
/// Warps over the whole device that keep enough loads in flight to use the full memory bandwidth.
pub(crate) const WARPS_IN_FLIGHT: usize = 2112;
/// Rows for each multiprocessor from which on a warp takes a row in norms, and the most elements of such a row.
pub(crate) const MANY_ROWS: usize = 16;
const MANY_ROWS_MAX_WIDTH: usize = 2048;
/// Elements of a matrix from which on a GEMV launches two blocks for each multiprocessor even if only one fits at a time.
const LARGE_MATRIX: usize = 8 << 20;
/// Shared memory that the driver reserves in each block.
const RESERVED_SHARED: usize = 1 << 10;
/// Blocks of the GEMV and few-token GEMM kernels that a multiprocessor runs at the same time.
pub(crate) const BLOCKS_PER_SM: usize = 2;
/// Panels that a warp has in flight.
pub(crate) const PREFETCHED_PANELS: usize = 4;

/// The input rows of a product.
#[derive(Clone, Copy)]
pub(crate) enum LinearInput {
    /// F32 rows `x`, `[n_tokens, n_in]`. The kernel applies an RMSNorm with the weights `norm` and epsilon `eps`; null: no norm.
    Rows { x: DeviceSlice<f32>, norm: DevicePtr<f32>, eps: f32 },
    /// F16 rows, packed (`Activations::packed_..`).
    Packed(DeviceSlice<F16>),
}

impl LinearInput {
    /// F32 rows without a norm.
    pub(crate) fn rows(x: DeviceSlice<f32>) -> Self {
        Self::Rows { x, norm: DevicePtr::NULL, eps: 0.0 }
    }
}

/// A product of all tokens of a micro-batch with one or more matrices that have the same input.
pub(crate) struct LinearOp<'a> {
    /// A label for profiles.
    pub(crate) label: &'static str,
    /// The matrices, each with the row of `y` at which its rows begin. For [`Epilogue::Gated`] exactly two: gate and up, both
    /// from row 0.
    pub(crate) matrices: Vec<(&'a CudaMatrix, usize)>,
    /// Elements of a row of `y`.
    pub(crate) n_out: usize,
    /// What becomes of the sums: stored, added to `y`, or `activation(gate) * up`.
    pub(crate) epilogue: Epilogue,
    /// The activation of a gated product, by its number in the kernels.
    pub(crate) activation: u32,
    /// Factor on what is added, for [`Epilogue::Add`].
    pub(crate) scale: f32,
    /// The bias `[n_out]`, or null; gated products have none.
    pub(crate) bias: DevicePtr<f32>,
    /// The result, F32 `[n_tokens, n_out]`.
    pub(crate) y: DeviceSlice<f32>,
    /// The result as packed F16, where a gated product of the GEMM path stores it so instead of to `y`; else null.
    pub(crate) packed: DevicePtr<F16>,
}

impl<'a> LinearOp<'a> {
    /// The product with a whole matrix, stored. The caller sets `y`.
    pub(crate) fn stored(label: &'static str, matrix: &'a CudaMatrix) -> Self {
        Self {
            label,
            matrices: vec![(matrix, 0)],
            n_out: matrix.n_rows,
            epilogue: Epilogue::Store,
            activation: 0,
            scale: 1.0,
            bias: DevicePtr::NULL,
            y: DeviceSlice::NONE,
            packed: DevicePtr::NULL,
        }
    }

    /// Arguments of the GEMV kernels for some of the matrices. The caller sets the input, and how blocks and warps are divided.
    fn gemv_args(&self, matrices: &[(&CudaMatrix, usize)], n_in: usize) -> MatvecArgs {
        MatvecArgs {
            matrices: matrix_args(matrices),
            n_matrices: matrices.len() as u32,
            n_in: n_in as u32,
            n_out: self.n_out as u32,
            output: self.epilogue as u32,
            activation: self.activation,
            scale: self.scale,
            bias: self.bias,
            y: self.y.ptr(),
            ..bytemuck::Zeroable::zeroed()
        }
    }

    /// The matrices in groups that one GEMM launch multiplies.
    fn launch_groups(&self) -> std::slice::Chunks<'_, (&'a CudaMatrix, usize)> {
        self.matrices.chunks(MAX_MATRICES)
    }

    /// The matrices whose rows get blocks of their own: all of them; of a gated product the gate only.
    pub(crate) fn stacked_matrices<'b, 'm>(
        &self,
        matrices: &'b [(&'m CudaMatrix, usize)],
    ) -> &'b [(&'m CudaMatrix, usize)] {
        if self.epilogue == Epilogue::Gated { &matrices[..1] } else { matrices }
    }

    /// The launches of kernels that take two matrices: gate and up, or each matrix twice where there is no gate.
    fn gate_pairs(&self) -> Vec<[(&'a CudaMatrix, usize); 2]> {
        match (&self.matrices[..], self.epilogue) {
            ([gate, up], Epilogue::Gated) => vec![[*gate, *up]],
            (matrices, Epilogue::Store | Epilogue::Add | Epilogue::Gated) => {
                matrices.iter().map(|matrix| [*matrix, *matrix]).collect()
            }
        }
    }
}

/// The number of blocks for `n_tiles` tiles of rows each, and for each matrix the block after its last one.
pub(crate) fn count_blocks(matrices: &[(&CudaMatrix, usize)], n_tiles: usize) -> ([u32; MAX_MATRICES], usize) {
    let mut ends = [0; MAX_MATRICES];
    let mut n_blocks = 0;
    for (end, (matrix, _)) in ends.iter_mut().zip(matrices) {
        n_blocks += matrix.n_tiles().div_ceil(n_tiles);
        *end = n_blocks as u32;
    }
    (ends, n_blocks)
}

/// Arguments for up to [`MAX_MATRICES`] matrices.
pub(crate) fn matrix_args(matrices: &[(&CudaMatrix, usize)]) -> [MatrixArgs; MAX_MATRICES] {
    let mut args = [MatrixArgs { ..bytemuck::Zeroable::zeroed() }; MAX_MATRICES];
    for (to, (matrix, first)) in args.iter_mut().zip(matrices) {
        *to = matrix.args(*first);
    }
    args
}

/// Arguments of the norm kernel for rows `x` of `n_in` elements; without `norm` it only copies. The caller sets the output.
pub(crate) fn norm_args(norm: Option<&CudaNorm>, x: DeviceSlice<f32>, n_in: usize) -> NormArgs {
    NormArgs {
        x: x.ptr(),
        weight: norm.map_or(DevicePtr::NULL, |norm| norm.weight.ptr()),
        bias: ptr_or_null(norm.and_then(|norm| norm.bias.as_ref())),
        packed: DevicePtr::NULL,
        out: DevicePtr::NULL,
        rows: DevicePtr::NULL,
        n_in: n_in as u32,
        n_token_tiles: 0,
        kind: norm.map_or(0, |norm| norm_kind(norm.kind)),
        eps: norm.map_or(0.0, |norm| norm.eps),
        scale: 1.0,
        accumulate: 0,
    }
}

/// Most tokens of a micro-batch whose products are GEMVs. For more the GEMM for few tokens is faster where matrices are large: measured on an
/// H200 at widths 2048, 2560 and 4096. Matrices of experts have few tokens each.
pub(crate) fn max_gemv_tokens(spec: &ModelSpec) -> usize {
    let has_experts = spec.layers.iter().any(|layer| match layer.feed_forward {
        FeedForward::Experts(_) => true,
        FeedForward::Dense(_) | FeedForward::ChannelMix(_) | FeedForward::None => false,
    });
    if spec.n_embd >= GEMM_WIDTH && !has_experts { 2 } else { GEMV_TOKENS }
}

/// The largest power of two that is not more than `n`.
pub(crate) fn previous_power_of_two(n: usize) -> usize {
    if n.is_power_of_two() { n } else { n.next_power_of_two() / 2 }
}

/// Bytes of shared memory of a GEMV block (`matvec_share`): the ring of records in flight of each warp, zeros, squares, sums
/// that warps exchange, and the inputs of `n_tokens` tokens.
pub(crate) fn gemv_shared_bytes(
    layouts: impl Iterator<Item = WeightLayout>,
    n_panels: usize,
    n_tokens: usize,
) -> usize {
    let (ring, of_panel) = layouts.fold((7168, 216), |(ring, of_panel), layout| {
        (if layout == WeightLayout::F32 { 8192 } else { ring }, if layout.has_codes() { of_panel } else { 264 })
    });
    let of_token = 4 * (WARPS + 4 * WARPS * TILE) + (n_panels * of_panel).next_multiple_of(16);
    WARPS * (ring + 16) + n_tokens * of_token
}

/// Tokens of a GEMV launch: [`GEMV_TOKENS`], or fewer if a block has not enough shared memory for their inputs.
pub(crate) fn gemv_tokens(
    gpu: &CudaSummary,
    layouts: &(impl Iterator<Item = WeightLayout> + Clone),
    n_in: usize,
) -> usize {
    let fits = |n: &usize| gemv_shared_bytes(layouts.clone(), n_in.div_ceil(PANEL), *n) <= gpu.max_shared;
    (2..=GEMV_TOKENS).rev().find(fits).unwrap_or(1)
}

impl ModelRunner {
    /// Whether products of `n_tokens` tokens read F32 inputs (GEMV), and not packed F16 inputs (GEMM).
    pub(crate) fn uses_f32_inputs(&self, n_tokens: usize) -> bool {
        self.exact || n_tokens <= self.max_gemv_tokens
    }

    /// Rows that exist both as F32 and packed, in the form that products of `n_tokens` tokens read.
    pub(crate) fn input(&self, rows: &CudaBuffer, packed: &CudaBuffer, n_tokens: usize) -> LinearInput {
        if self.uses_f32_inputs(n_tokens) {
            LinearInput::rows(rows.slice())
        } else {
            LinearInput::Packed(packed.slice())
        }
    }

    /// The normalised residual stream as input of products: packed; or F32, where the product applies the norm itself if it
    /// can, else a launch stores the normalised rows to `h`.
    pub(crate) fn normed(
        &mut self,
        norm: Option<&CudaNorm>,
        n_embd: usize,
        n_tokens: usize,
    ) -> Result<LinearInput, CudaError> {
        let (x, h, packed) = (self.buffers.x.slice(), self.buffers.h.slice(), self.buffers.packed_x.slice());
        if !self.uses_f32_inputs(n_tokens) {
            self.norm(NormArgs { packed: packed.ptr(), ..norm_args(norm, x, n_embd) }, n_tokens)?;
            return Ok(LinearInput::Packed(packed));
        }
        match norm {
            None => Ok(LinearInput::rows(x)),
            Some(norm) if norm.fuses_with_product() => {
                Ok(LinearInput::Rows { x, norm: norm.weight.ptr(), eps: norm.eps })
            }
            Some(_) => {
                self.norm(NormArgs { out: h.ptr(), ..norm_args(norm, x, n_embd) }, n_tokens)?;
                Ok(LinearInput::rows(h))
            }
        }
    }

    /// As [`normed`](Self::normed), but the normalised rows are always in `h` as F32, too, for other readers than products.
    pub(crate) fn normed_with_f32(
        &mut self,
        norm: Option<&CudaNorm>,
        n_embd: usize,
        n_tokens: usize,
    ) -> Result<LinearInput, CudaError> {
        let (x, h, packed) = (self.buffers.x.slice(), self.buffers.h.slice(), self.buffers.packed_x.slice());
        let args = NormArgs { out: h.ptr(), ..norm_args(norm, x, n_embd) };
        if self.uses_f32_inputs(n_tokens) {
            self.norm(args, n_tokens)?;
            return Ok(LinearInput::rows(h));
        }
        self.norm(NormArgs { packed: packed.ptr(), ..args }, n_tokens)?;
        Ok(LinearInput::Packed(packed))
    }

    /// The F32 rows `x` of `n_in` elements, at most as wide as `packed_rows` allows, as input of products.
    pub(crate) fn rows(&mut self, x: DeviceSlice<f32>, n_in: usize, n_tokens: usize) -> Result<LinearInput, CudaError> {
        if self.uses_f32_inputs(n_tokens) {
            return Ok(LinearInput::rows(x));
        }
        let packed = self.buffers.packed_rows.slice();
        self.norm(NormArgs { packed: packed.ptr(), ..norm_args(None, x, n_in) }, n_tokens)?;
        Ok(LinearInput::Packed(packed))
    }

    /// Launches the product with one matrix, stored to `y`.
    pub(crate) fn store(
        &mut self,
        label: &'static str,
        linear: &CudaLinear,
        input: LinearInput,
        y: DeviceSlice<f32>,
        n_tokens: usize,
    ) -> Result<(), CudaError> {
        let product = LinearOp { y, bias: linear.bias(), ..LinearOp::stored(label, &linear.weight) };
        self.product(&product, input, linear.weight.n_in, n_tokens)
    }
}

impl Launcher<'_> {
    /// Launches the norm kernel for `n_rows` rows.
    pub(crate) fn norm(&mut self, args: NormArgs, n_rows: usize) -> Result<(), CudaError> {
        let n_token_tiles = packed_layout(self.gpu.summary(), self.max_few_tokens, n_rows);
        let addresses = args.x.address() | args.out.address();
        let is_aligned = args.n_in.is_multiple_of(4) && addresses.is_multiple_of(16);
        let is_many = n_rows >= MANY_ROWS * self.gpu.summary().n_sm && args.n_in as usize <= MANY_ROWS_MAX_WIDTH;
        let (kernel, threads) =
            if is_aligned && is_many { (kernels::NORM_MANY_ROWS, 32) } else { (kernels::NORM_ROWS, 256) };
        let grid = LaunchGrid { blocks: [n_rows, 1, 1], threads, shared: 0 };
        self.launch(kernel, "", grid, &NormArgs { n_token_tiles, ..args })
    }

    /// Launches `p` for all tokens. `n_in`: elements of an input row.
    pub(crate) fn product(
        &mut self,
        p: &LinearOp<'_>,
        input: LinearInput,
        n_in: usize,
        n_tokens: usize,
    ) -> Result<(), CudaError> {
        match input {
            LinearInput::Rows { x, norm, eps } => {
                let tokens = gemv_tokens(self.gpu.summary(), &p.matrices.iter().map(|(matrix, _)| matrix.layout), n_in);
                let groups = if n_in.is_multiple_of(4) && tokens == GEMV_TOKENS { n_tokens / tokens } else { 0 };
                let first = if groups > 1 { groups * GEMV_TOKENS } else { 0 };
                if groups > 1 {
                    self.gemv_token_groups(p, (x, norm, eps), n_in, groups)?;
                }
                for token in (first..n_tokens).step_by(tokens) {
                    let n = (n_tokens - token).min(tokens);
                    let rows = x.skip(token * n_in);
                    self.gemv(p, rows, norm, eps, DevicePtr::NULL, p.y.skip(token * p.n_out), n_in, n)?;
                }
                Ok(())
            }
            LinearInput::Packed(x) => self.gemm(p, x, n_tokens),
        }
    }

    /// Launches one GEMV for `n_tokens` tokens, at most [`GEMV_TOKENS`]. `x`, `norm` and `eps` are those of [`LinearInput::Rows`]. `rows`
    /// are the indices of the tokens' rows in `x`, `[n_tokens]`; null: rows 0, 1, ... The result goes to `y`.
    #[expect(clippy::too_many_arguments, reason = "the operands of a product")]
    pub(crate) fn gemv(
        &mut self,
        p: &LinearOp<'_>,
        x: DeviceSlice<f32>,
        norm: DevicePtr<f32>,
        eps: f32,
        rows: DevicePtr<u32>,
        y: DeviceSlice<f32>,
        n_in: usize,
        n_tokens: usize,
    ) -> Result<(), CudaError> {
        if !n_in.is_multiple_of(4) {
            return self.odd_rows(p, x, rows, y, n_in, n_tokens);
        }
        let gated = p.epilogue == Epilogue::Gated;
        let n_stacked = if gated { 1 } else { p.matrices.len() };
        let tiles: Vec<usize> = p.matrices[..n_stacked].iter().map(|(matrix, _)| matrix.n_tiles()).collect();
        let n_tiles: usize = tiles.iter().sum();
        let n_panels = n_in.div_ceil(PANEL);
        // As few warps for each tile as keep the memory busy, and no more than have a full prefetch of panels each.
        let max_warps = (n_panels / PREFETCHED_PANELS).clamp(1, WARPS);
        let warps_per_tile = WARPS_IN_FLIGHT.div_ceil(n_tiles).clamp(1, max_warps).next_power_of_two();
        let warps_per_tile = if warps_per_tile > max_warps { warps_per_tile / 2 } else { warps_per_tile };
        let shared = gemv_shared_bytes(p.matrices.iter().map(|(matrix, _)| matrix.layout), n_panels, n_tokens);
        let summary = self.gpu.summary();
        let fit = BLOCKS_PER_SM * (shared + RESERVED_SHARED) <= summary.max_shared;
        let most_blocks = summary.n_sm * if fit || n_tiles * TILE * n_in > LARGE_MATRIX { BLOCKS_PER_SM } else { 1 };
        let groups = tiles.iter().map(|tiles| tiles.div_ceil(WARPS / warps_per_tile));
        let n_groups: usize = groups.clone().sum();
        let blocks_for = |groups: usize| {
            if n_groups <= most_blocks { groups } else { (most_blocks * groups / n_groups).max(1) }
        };
        let mut block_ends = [0; MAX_MATRICES];
        let mut n_blocks = 0;
        for (end, groups) in block_ends.iter_mut().zip(groups) {
            n_blocks += blocks_for(groups);
            *end = n_blocks as u32;
        }
        let warps_per_tile = warps_per_tile as u32;
        let (x, y) = (x.ptr(), y.ptr());
        let args = MatvecArgs { block_ends, warps_per_tile, eps, x, norm, y, rows, ..p.gemv_args(&p.matrices, n_in) };
        let grid = LaunchGrid { blocks: [n_blocks, 1, 1], threads: 32 * WARPS, shared };
        self.launch(kernels::MATVEC[n_tokens - 1], p.label, grid, &args)
    }

    /// Launches the product of `groups` times [`GEMV_TOKENS`] tokens.
    fn gemv_token_groups(
        &mut self,
        p: &LinearOp<'_>,
        (x, norm, eps): (DeviceSlice<f32>, DevicePtr<f32>, f32),
        n_in: usize,
        groups: usize,
    ) -> Result<(), CudaError> {
        let all = [p.matrices.as_slice()];
        let products: Vec<_> = match p.epilogue {
            Epilogue::Gated => all.to_vec(),
            Epilogue::Store | Epilogue::Add => p.matrices.chunks(1).collect(),
        };
        for matrices in products {
            let (n_tiles, n_panels) = (matrices[0].0.n_tiles(), n_in.div_ceil(PANEL));
            let max_warps = (n_panels / PREFETCHED_PANELS).clamp(1, WARPS);
            let warps_per_tile = previous_power_of_two(WARPS_IN_FLIGHT.div_ceil(n_tiles * groups).clamp(1, max_warps));
            let tile_groups = n_tiles.div_ceil(WARPS / warps_per_tile);
            // A block prepares its input once and then takes several tiles.
            let blocks = (BLOCKS_PER_SM * self.gpu.summary().n_sm).div_ceil(groups).clamp(1, tile_groups);
            let (block_ends, warps_per_tile) = ([blocks as u32; MAX_MATRICES], warps_per_tile as u32);
            let args = MatvecArgs { block_ends, warps_per_tile, eps, x: x.ptr(), norm, ..p.gemv_args(matrices, n_in) };
            let shared = gemv_shared_bytes(matrices.iter().map(|(matrix, _)| matrix.layout), n_panels, GEMV_TOKENS);
            let grid = LaunchGrid { blocks: [blocks, groups, 1], threads: 32 * WARPS, shared };
            self.launch(kernels::MATVEC_ROWS, p.label, grid, &args)?;
        }
        Ok(())
    }

    /// Launches a product whose rows are not a multiple of four elements, so that they cannot be read as vectors.
    fn odd_rows(
        &mut self,
        p: &LinearOp<'_>,
        x: DeviceSlice<f32>,
        rows: DevicePtr<u32>,
        y: DeviceSlice<f32>,
        n_in: usize,
        n_tokens: usize,
    ) -> Result<(), CudaError> {
        for [(a, first), (b, _)] in p.gate_pairs() {
            let args = OddRowsArgs {
                a: a.args(first),
                b: b.args(first),
                x: x.ptr(),
                bias: p.bias,
                y: y.ptr(),
                rows,
                n_in: n_in as u32,
                n_out: p.n_out as u32,
                output: p.epilogue as u32,
                activation: p.activation,
                scale: p.scale,
                unused: 0,
            };
            let grid = LaunchGrid { blocks: [a.n_rows.div_ceil(128), n_tokens, 1], threads: 128, shared: 0 };
            self.launch(kernels::ODD_ROWS, p.label, grid, &args)?;
        }
        Ok(())
    }

    /// Launches the GEMM of the packed rows `x`: `matmul_few` up to [`Launcher::max_few_tokens`] tokens, above that `matmul_wide` where
    /// the device has warpgroup instructions, else `matmul`.
    pub(crate) fn gemm(&mut self, p: &LinearOp<'_>, x: DeviceSlice<F16>, n_tokens: usize) -> Result<(), CudaError> {
        // The GEMM without warpgroup instructions supports one layout for gate and up.
        let layouts_differ =
            p.epilogue == Epilogue::Gated && p.matrices.iter().any(|(part, _)| part.layout != p.matrices[0].0.layout);
        let has_wgmma = self.gpu.summary().has_wgmma();
        if n_tokens <= self.max_few_tokens || layouts_differ && !has_wgmma {
            return p.launch_groups().try_for_each(|matrices| self.matmul_few(p, matrices, x, n_tokens));
        }
        if has_wgmma {
            return p.launch_groups().try_for_each(|matrices| self.matmul_wide(p, matrices, x, n_tokens));
        }
        let token_tiles = n_tokens.div_ceil(8);
        let gated = p.epilogue == Epilogue::Gated;
        for [(a, first), (b, _)] in p.gate_pairs() {
            let args = MatmulArgs {
                a: a.args(first),
                b: b.args(first),
                x: x.ptr(),
                n_tokens: n_tokens as u32,
                n_token_tiles: token_tiles as u32,
                n_out: p.n_out as u32,
                output: p.epilogue as u32,
                activation: p.activation,
                scale: p.scale,
                bias: p.bias,
                y: p.y.ptr(),
                packed: p.packed,
                y_token_tiles: token_tiles as u32,
                unused: 0,
            };
            let rows = a.n_tiles().div_ceil(if gated { 4 } else { 8 });
            let grid =
                LaunchGrid { blocks: [token_tiles.div_ceil(16), rows, 1], threads: 32 * WARPS, shared: 4 * 16 * 1024 };
            self.launch(kernels::MATMUL[a.layout as usize], p.label, grid, &args)?;
        }
        Ok(())
    }
}
