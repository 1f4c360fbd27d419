//! Split-K GEMM for a few tokens on matrix units: the subgroups of a workgroup divide the inner dimension of the same
//! tile and add up their partial sums.

use metal_attention_gguf::TensorType;

use super::matmul::GemmOp;
use super::matvec::{MatvecInput, MatvecOptions, MatvecOutput, TokenRows};
use crate::arena::Bind;
use crate::device::WgpuDevice;
use crate::dispatch::{AccessRange, Dispatch, GridExtent};
use crate::error::WgpuError;
use crate::matrix::{MatrixPart, WgpuMatrix, type_info, type_name};
use crate::pipelines::PipelineKey;
use crate::shader::ShaderFeatures;

/// The tile that a workgroup of [`split_matmul`] computes: `rows` rows for 16 tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SplitTile {
    /// Rows of the matrix: 16, 32 or 64.
    pub rows: usize,
    /// Inner elements that a subgroup multiplies at a time: 32 or 64.
    pub depth: usize,
    /// Most subgroups that divide the inner dimension.
    pub subgroups: usize,
}

/// Tokens of a tile, and the side of the matrices that matrix units multiply.
const SIDE: usize = 16;

/// Vectors of four inputs that a lane holds in registers.
const HELD: usize = 24;

/// Steps of each subgroup, at least: more subgroups with fewer steps are slower.
const TURNS: usize = 3;

impl SplitTile {
    /// The subgroups that divide the inner dimension: no more than shorten the longest one's work, and no more than a
    /// workgroup can have.
    fn shares(self, n_in: usize, gpu: &WgpuDevice) -> usize {
        let (limits, features) = (gpu.wgpu().limits(), gpu.features());
        let scalar = if features.cooperative_f16 { 2 } else { 4 };
        let each = scalar * (self.rows + SIDE) * (self.depth + 8) + 4 * SIDE * (SIDE + 4) + 8 * SIDE;
        let memory = limits.max_compute_workgroup_storage_size as usize / each;
        let threads = limits.max_compute_invocations_per_workgroup / features.subgroup_size.max(8);
        let steps = n_in.div_ceil(self.depth);
        let most = self.subgroups.min(memory).min(threads as usize).clamp(1, steps.div_ceil(TURNS));
        steps.div_ceil(steps.div_ceil(most))
    }
}

/// The tile for a product of `matrix` with up to `n_tokens` tokens. `None` where [`split_matmul`] does not apply or is
/// not the fastest: without 16-bit matrix units, for weights beyond the range of 16-bit floats, for rows of partial
/// units (of eight elements), if `exact`, and for large matrices, which fill a GPU with ordinary tiles.
pub fn split_tile(features: ShaderFeatures, matrix: &WgpuMatrix, n_tokens: usize, exact: bool) -> Option<SplitTile> {
    let suits = features.cooperative_f16 && (8..=128).contains(&features.subgroup_size);
    if exact || !suits || !matrix.n_in().is_multiple_of(8) || matrix.parts().iter().any(|part| type_info(part.ty).wide)
    {
        return None;
    }
    let few = n_tokens <= SIDE;
    let large = if few { matrix.n_out() >= 1 << 15 } else { matrix.n_out() * matrix.n_in() >= 1 << 22 };
    if large {
        return None;
    }
    // A matrix with many rows fills a large GPU with larger tiles too, which use each input for more rows.
    let rows = if matrix.n_out() * n_tokens.div_ceil(SIDE) >= 8192 { 32 } else { 16 };
    let subgroups = if few && rows == 16 { 12 } else { 8 };
    Some(SplitTile { rows, depth: 32, subgroups })
}

/// `y = W x` with `options` for 2 to some hundred tokens, on matrix units. The input is [plain](MatvecInput::Plain) or
/// a [norm](MatvecInput::RmsNorm). Weights and inputs are rounded to 16-bit floats, the inputs relative to the largest
/// of their row. One dispatch for each part of the matrix.
///
/// Runs on any device with subgroups of 8 to 128 lanes, but is worthwhile only where [`split_tile`] returns a tile.
pub fn split_matmul(
    gpu: &WgpuDevice,
    matrix: &WgpuMatrix,
    options: MatvecOptions<'_>,
    tile: SplitTile,
    x: &wgpu::Buffer,
    y: &wgpu::Buffer,
    batch: &wgpu::Buffer,
) -> Result<Vec<Dispatch>, WgpuError> {
    let mismatch = |why: &str| WgpuError::Mismatch { what: "a matrix product".to_owned(), why: why.to_owned() };
    if options.output == MatvecOutput::Gated && !matrix.has_pairs() {
        return Err(mismatch("its gate and up rows lie in different parts"));
    }
    if !matrix.n_in().is_multiple_of(8) {
        return Err(mismatch("its rows are no whole units of eight"));
    }
    let norm = match options.input {
        MatvecInput::Plain => None,
        MatvecInput::RmsNorm { eps, .. } => Some(eps),
        MatvecInput::Silu => return Err(mismatch("its input is not plain")),
    };
    let product = |part: &MatrixPart| {
        let product = GemmOp::new(matrix, part, &options);
        let mut buffers: Vec<(&dyn Bind, AccessRange)> = vec![
            (&part.buffer, AccessRange::Fixed(part.bytes(matrix.n_in()))),
            (x, options.input_range(matrix)),
            (y, options.output_range(matrix)),
            (batch, AccessRange::Batch),
        ];
        buffers.extend(options.norm_and_bias(matrix));
        let rows = GridExtent::Fixed(part.n_rows.div_ceil(tile.rows) as u32);
        let grid = [rows, options.rows.extent(SIDE), GridExtent::Fixed(1)];
        let key = key(&product, norm, tile, tile.shares(matrix.n_in(), gpu));
        Dispatch::new(gpu, &key, &buffers, grid)
    };
    matrix.parts().iter().map(product).collect()
}

fn key(product: &GemmOp, eps: Option<f32>, tile: SplitTile, shares: usize) -> PipelineKey {
    let mut constants = product.constants();
    constants.extend([
        ("norm", eps.is_some().into()),
        ("eps", eps.unwrap_or(0.0).into()),
        ("tile_rows", tile.rows.into()),
        ("depth", tile.depth.into()),
        ("shares", shares.into()),
        ("held_vectors", HELD.into()),
    ]);
    let norm = if eps.is_some() { "rmsnorm_" } else { "" };
    let (ty, suffix) = (type_name(product.ty), product.output.names().1);
    PipelineKey { name: format!("{norm}multi_token_matvec_{ty}{suffix}_split"), file: "matmul_split", constants }
}

/// The keys of all kernels, with the sizes of SmolLM-135M's feed-forward.
pub(crate) fn catalogue() -> Vec<PipelineKey> {
    let tile = SplitTile { rows: 32, depth: 32, subgroups: 6 };
    let mut keys = Vec::new();
    for &ty in TensorType::ALL.iter().filter(|&&ty| !type_info(ty).wide) {
        let n_in = 576_usize.next_multiple_of(ty.block_len());
        for (n_out, output) in
            [(576, MatvecOutput::Store), (576, MatvecOutput::Accumulate), (3072, MatvecOutput::Gated)]
        {
            let rows = TokenRows::Tokens;
            let product =
                GemmOp { ty, n_in, n_out, first_row: 0, row_step: 1, n_rows: n_out, output, rows, bias: false };
            keys.extend([None, Some(1e-5)].map(|eps| key(&product, eps, tile, tile.subgroups)));
        }
    }
    keys
}
