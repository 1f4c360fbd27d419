//! GEMM: products of a matrix with the vectors of many tokens, on matrix units (`matmul_cooperative.wgsl`) or in plain
//! loops (`matmul_tiled.wgsl`). Matrix units multiply small matrices of 16-bit or 32-bit floats; WebGPU calls them
//! cooperative matrices.

use metal_attention_gguf::TensorType;

use super::matvec::{MatvecInput, MatvecOptions, MatvecOutput, TokenRows};
use crate::arena::Bind;
use crate::device::WgpuDevice;
use crate::dispatch::{AccessRange, Dispatch, GridExtent};
use crate::error::WgpuError;
use crate::matrix::{MatrixPart, WgpuMatrix, type_info, type_name};
use crate::pipelines::PipelineKey;
use crate::shader::{Constant, ShaderFeatures};

/// The method of a GEMM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MatmulMethod {
    /// In 32-bit floats on any device, in tiles of 64 rows by 64 tokens.
    Tiled,
    /// On the device's matrix units.
    Cooperative(CooperativeTile),
}

/// The tile that a workgroup computes on matrix units.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CooperativeTile {
    /// Rows of the matrix.
    pub rows: usize,
    /// Tokens (or other columns).
    pub tokens: usize,
    /// Inner elements in workgroup memory at a time, a divisor of 64.
    pub depth: usize,
    /// Subgroups along the rows.
    pub subgroups_rows: usize,
    /// Subgroups along the tokens.
    pub subgroups_tokens: usize,
    /// Pipeline stages: steps of `depth` inner elements that are being read at the same time.
    pub stages: usize,
}

impl CooperativeTile {
    /// The template's constants for rows of `n_in` elements.
    pub(super) fn constants(self, n_in: usize) -> [(&'static str, Constant); 7] {
        [
            ("padded", n_in.next_multiple_of(MAX_DEPTH).into()),
            ("tile_rows", self.rows.into()),
            ("tile_tokens", self.tokens.into()),
            ("depth", self.depth.into()),
            ("subgroups_rows", self.subgroups_rows.into()),
            ("subgroups_tokens", self.subgroups_tokens.into()),
            ("stages", self.stages.into()),
        ]
    }
}

/// Rows, and tokens, of a tile of [`MatmulMethod::Tiled`].
pub(super) const TILE: usize = 64;

/// The inner dimension is padded to a multiple of this for matrix units.
pub(super) const MAX_DEPTH: usize = 64;

/// Bytes of a number in the device's matrix units: 2 or 4, or 0 without them.
pub(super) fn unit_bytes(features: ShaderFeatures) -> usize {
    match features {
        ShaderFeatures { subgroup_size: 0, .. } => 0,
        ShaderFeatures { cooperative_f16: true, .. } => 2,
        ShaderFeatures { cooperative_f32: true, .. } => 4,
        _ => 0,
    }
}

/// The method for rows of type `ty` of a matrix with `n_out` rows. `exact`: products keep 32-bit floats.
///
/// Tiles are chosen for batches of up to `n_tokens` tokens. Small matrices get small tiles, which spread over a large
/// GPU; large ones get large tiles, since each weight is dequantised once in every tile.
pub fn matmul_method(
    features: ShaderFeatures,
    ty: TensorType,
    n_out: usize,
    n_tokens: usize,
    exact: bool,
) -> MatmulMethod {
    let tile = |rows, tokens, depth, subgroups_rows, subgroups_tokens, stages| {
        MatmulMethod::Cooperative(CooperativeTile { rows, tokens, depth, subgroups_rows, subgroups_tokens, stages })
    };
    // Weights of these types can be beyond the range of 16-bit floats.
    let wide = type_info(ty).wide;
    match unit_bytes(features) {
        2 if !exact && !wide => match (n_tokens, n_out) {
            (0..=16, _) => tile(64, 16, 64, 4, 1, 2),
            (17..=128, _) | (_, 0..768) => tile(32, 64, 64, 2, 2, 2),
            (_, 768..8192) => tile(64, 64, 64, 2, 2, 2),
            _ => tile(128, 128, 32, 4, 2, 2),
        },
        4 => tile(64, 64, 32, 2, 2, 1),
        _ => MatmulMethod::Tiled,
    }
}

/// Whether [`matmul`] computes all parts of `matrix` on matrix units.
pub fn all_on_units(features: ShaderFeatures, matrix: &WgpuMatrix, exact: bool) -> bool {
    let method = |part: &MatrixPart| matmul_method(features, part.ty, matrix.n_out(), MAX_DEPTH, exact);
    matrix.parts().iter().all(|part| method(part) != MatmulMethod::Tiled)
}

/// Whether tiles for `n_tokens` tokens would be so few that most of a large GPU is idle, so that
/// [`multi_token_matvec`](super::multi_token_matvec) is faster. Only for types that need no dequantisation: `MoE`
/// routers in F32.
pub fn leaves_idle_in_tiles(matrix: &WgpuMatrix, n_tokens: usize) -> bool {
    const FEWEST_TILES: usize = 64;
    let wide = matrix.parts().iter().all(|part| type_info(part.ty).wide);
    wide && matrix.n_out().div_ceil(TILE) * n_tokens.div_ceil(TILE) < FEWEST_TILES
}

/// Buffers for the input of a GEMM in the format of matrix units. All products of a forward pass share them.
#[derive(Debug)]
pub struct MatmulScratch {
    /// The converted rows, each padded to a multiple of [`MAX_DEPTH`].
    pub(super) padded: wgpu::Buffer,
    /// A factor for each row, by which the products are multiplied again.
    pub(super) scales: wgpu::Buffer,
}

impl MatmulScratch {
    /// Buffers for `n_tokens` rows of at most `n_in` elements; minimal ones on a device without matrix units.
    pub fn new(gpu: &WgpuDevice, n_tokens: usize, n_in: usize) -> Result<Self, WgpuError> {
        Self::of(gpu, unit_bytes(gpu.features()), n_tokens, n_in)
    }

    /// Like [`new`](Self::new) on a device without matrix units, for the plain loops that stand in for them in tests.
    pub fn for_loops(gpu: &WgpuDevice, n_tokens: usize, n_in: usize) -> Result<Self, WgpuError> {
        Self::of(gpu, size_of::<f32>(), n_tokens, n_in)
    }

    /// Elements of a row of `n_in` elements in the format of matrix units.
    pub(crate) fn padded_len(n_in: usize) -> usize {
        n_in.next_multiple_of(MAX_DEPTH)
    }

    /// Buffers for numbers of `bytes` bytes.
    pub(super) fn of(gpu: &WgpuDevice, bytes: usize, n_tokens: usize, n_in: usize) -> Result<Self, WgpuError> {
        let [padded, scales] = Self::bytes_of(bytes, n_tokens, n_in);
        Ok(Self {
            padded: gpu.buffer("the inputs of matrix units", padded)?,
            scales: gpu.buffer("the scales of the inputs of matrix units", scales)?,
        })
    }

    /// Bytes of the two buffers.
    pub(super) fn bytes_of(bytes: usize, n_tokens: usize, n_in: usize) -> [u64; 2] {
        let row = bytes * Self::padded_len(n_in);
        [(n_tokens * row) as u64, (n_tokens * bytes.min(1) * 4) as u64]
    }
}

/// `y = W x` with `options`, for batches of up to `n_tokens` tokens. The input is [plain](MatvecInput::Plain) or, if
/// [all parts](all_on_units) are computed on matrix units, a [norm](MatvecInput::RmsNorm). One dispatch for each part
/// of the matrix, and for matrix units one before them that converts `x`. Unless `exact`, matrix units may round
/// weights and inputs to 16-bit floats, the inputs relative to the largest of their row.
pub fn matmul(
    gpu: &WgpuDevice,
    matrix: &WgpuMatrix,
    options: MatvecOptions<'_>,
    n_tokens: usize,
    exact: bool,
    x: &dyn Bind,
    y: &dyn Bind,
    scratch: &MatmulScratch,
    batch: &wgpu::Buffer,
) -> Result<Vec<Dispatch>, WgpuError> {
    let method = |part: &MatrixPart| matmul_method(gpu.features(), part.ty, matrix.n_out(), n_tokens, exact);
    matmul_by(gpu, matrix, options, method, x, y, scratch, batch)
}

/// [`matmul`] with a given method for each part, to compare methods. On a device without matrix units plain loops stand
/// in for them; `scratch` is then [for loops](MatmulScratch::for_loops).
pub fn matmul_by(
    gpu: &WgpuDevice,
    matrix: &WgpuMatrix,
    options: MatvecOptions<'_>,
    method: impl Fn(&MatrixPart) -> MatmulMethod,
    x: &dyn Bind,
    y: &dyn Bind,
    scratch: &MatmulScratch,
    batch: &wgpu::Buffer,
) -> Result<Vec<Dispatch>, WgpuError> {
    let mismatch = |why: &str| WgpuError::Mismatch { what: "a matrix product".to_owned(), why: why.to_owned() };
    let norm = match options.input {
        MatvecInput::Plain => None,
        MatvecInput::RmsNorm { weight, eps } => Some((weight, eps)),
        MatvecInput::Silu => return Err(mismatch("its input is not plain")),
    };
    if options.output == MatvecOutput::Gated && !matrix.has_pairs() {
        return Err(mismatch("its gate and up rows lie in different parts"));
    }
    let (from, to) = (options.input_range(matrix), options.output_range(matrix));
    // The format that `shaders/matmul_input.wgsl` writes.
    let bytes = if gpu.features().cooperative_f16 { 2 } else { 4 };
    let padded =
        (&scratch.padded as &dyn Bind, options.rows.result_range(bytes * matrix.n_in().next_multiple_of(MAX_DEPTH)));
    let scales = (&scratch.scales as &dyn Bind, options.rows.result_range(4));
    let mut dispatches = Vec::new();
    for part in matrix.parts() {
        let method = method(part);
        let product = GemmOp::new(matrix, part, &options);
        let weights = (&part.buffer as &dyn Bind, AccessRange::Fixed(part.bytes(matrix.n_in())));
        let (tile_rows, tile_tokens, mut buffers): (_, _, Vec<(&dyn Bind, AccessRange)>) = match method {
            MatmulMethod::Tiled if norm.is_some() => return Err(mismatch("only matrix units take a norm")),
            MatmulMethod::Tiled => (TILE, TILE, vec![weights, (x, from), (y, to), (batch, AccessRange::Batch)]),
            MatmulMethod::Cooperative(tile) => {
                if !dispatches.iter().any(|dispatch: &Dispatch| dispatch.kernel().ends_with(INPUT)) {
                    let mut buffers: Vec<(&dyn Bind, AccessRange)> =
                        vec![(x, from), padded, scales, (batch, AccessRange::Batch)];
                    let weight = norm.map(|(weight, _)| (weight as &dyn Bind, AccessRange::floats(matrix.n_in())));
                    buffers.extend(weight);
                    let grid = [options.rows.extent(1), GridExtent::Fixed(1), GridExtent::Fixed(1)];
                    let key = input_key(matrix.n_in(), options.rows, norm.map(|(_, eps)| eps));
                    dispatches.push(Dispatch::new(gpu, &key, &buffers, grid)?);
                }
                (tile.rows, tile.tokens, vec![weights, padded, scales, (y, to), (batch, AccessRange::Batch)])
            }
        };
        buffers.extend(options.bias.map(|bias| (bias as &dyn Bind, AccessRange::floats(matrix.n_out()))));
        let grid = [
            GridExtent::Fixed(part.n_rows.div_ceil(tile_rows) as u32),
            options.rows.extent(tile_tokens),
            GridExtent::Fixed(1),
        ];
        dispatches.push(Dispatch::new(gpu, &product.key(method), &buffers, grid)?);
    }
    Ok(dispatches)
}

/// The kernel that converts inputs for matrix units.
pub(super) const INPUT: &str = "matmul_input";

/// The key of the kernel that converts inputs. `eps`: of the norm that it applies first, if any.
pub(super) fn input_key(n_in: usize, rows: TokenRows, eps: Option<f32>) -> PipelineKey {
    let constants = [
        ("n_in", n_in.into()),
        ("padded", n_in.next_multiple_of(MAX_DEPTH).into()),
        ("rows", rows.name().into()),
        ("norm", eps.is_some().into()),
        ("eps", eps.unwrap_or(0.0).into()),
    ];
    let key = PipelineKey::new(INPUT, constants);
    if eps.is_some() { key.named("rmsnorm_matmul_input") } else { key }
}

/// The product with one part of a matrix, without its buffers.
#[derive(Debug, Clone, Copy)]
pub(super) struct GemmOp {
    /// Tensor type of the part.
    pub(super) ty: TensorType,
    /// Elements of a row.
    pub(super) n_in: usize,
    /// Rows of the matrix.
    pub(super) n_out: usize,
    /// The matrix row that is the part's row 0.
    pub(super) first_row: usize,
    /// Matrix rows from one row of the part to the next.
    pub(super) row_step: usize,
    /// Rows of the part.
    pub(super) n_rows: usize,
    /// The epilogue.
    pub(super) output: MatvecOutput,
    /// Which rows of the input are multiplied.
    pub(super) rows: TokenRows,
    /// Whether a bias is added.
    pub(super) bias: bool,
}

impl GemmOp {
    pub(super) fn new(matrix: &WgpuMatrix, part: &MatrixPart, options: &MatvecOptions<'_>) -> Self {
        Self {
            ty: part.ty,
            n_in: matrix.n_in(),
            n_out: matrix.n_out(),
            first_row: part.first_row,
            row_step: part.row_step,
            n_rows: part.n_rows,
            output: options.output,
            rows: options.rows,
            bias: options.bias.is_some(),
        }
    }

    /// The constants that all templates of a product use.
    pub(super) fn constants(&self) -> Vec<(&'static str, Constant)> {
        vec![
            ("type", type_name(self.ty).into()),
            ("n_in", self.n_in.into()),
            ("n_out", self.n_out.into()),
            ("first_row", self.first_row.into()),
            ("row_step", self.row_step.into()),
            ("n_rows", self.n_rows.into()),
            ("output", self.output.names().0.into()),
            ("rows", self.rows.name().into()),
            ("bias", self.bias.into()),
        ]
    }

    fn key(&self, method: MatmulMethod) -> PipelineKey {
        let (ty, suffix) = (type_name(self.ty), self.output.names().1);
        let mut constants = self.constants();
        constants.push(("cooperative", (method != MatmulMethod::Tiled).into()));
        let form = match method {
            MatmulMethod::Tiled => "tiled",
            MatmulMethod::Cooperative(tile) => {
                constants.extend(tile.constants(self.n_in));
                "cooperative"
            }
        };
        PipelineKey { name: format!("multi_token_matvec_{ty}{suffix}_{form}"), file: "matmul", constants }
    }
}

/// The keys of all kernels, with the sizes of SmolLM-135M's feed-forward.
pub(crate) fn catalogue() -> Vec<PipelineKey> {
    let features = ShaderFeatures { subgroup_size: 32, neighbours: 32, cooperative_f16: true, ..Default::default() };
    let mut keys = vec![input_key(576, TokenRows::Tokens, None), input_key(576, TokenRows::Tokens, Some(1e-5))];
    for &ty in TensorType::ALL {
        let n_in = 576_usize.next_multiple_of(ty.block_len());
        for output in [MatvecOutput::Store, MatvecOutput::Accumulate, MatvecOutput::Gated] {
            let n_out = if output == MatvecOutput::Gated { 3072 } else { 576 };
            let product = GemmOp {
                ty,
                n_in,
                n_out,
                first_row: 0,
                row_step: 1,
                n_rows: n_out,
                output,
                rows: TokenRows::Tokens,
                bias: false,
            };
            keys.push(product.key(MatmulMethod::Tiled));
            let method = matmul_method(features, ty, n_out, 512, false);
            if method != MatmulMethod::Tiled {
                keys.push(product.key(method));
            }
        }
    }
    keys
}
