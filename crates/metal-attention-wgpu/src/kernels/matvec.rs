//! GEMV: products of a matrix with the vector of one token, or of a few tokens that share each weight that is read. The
//! shaders are `matvec.wgsl` (weights become floats) and `matvec_integer.wgsl` (weights and inputs become bytes).

mod product;

use crate::arena::Bind;
use crate::device::WgpuDevice;
use crate::dispatch::{AccessRange, Dispatch, GridExtent};
use crate::error::WgpuError;
use crate::matrix::WgpuMatrix;
use product::MatvecOp;
pub(crate) use product::catalogue;
pub(super) use product::{MatvecTile, float_tile};

/// Tokens that share each weight that is read, in batches of a few tokens.
pub const TOKEN_TILE: usize = 4;

/// The input of a product: the prologue of the kernel.
#[derive(Debug, Clone, Copy)]
pub enum MatvecInput<'a> {
    /// `x`, `[n_rows, n_in]`.
    Plain,
    /// The RMSNorm of `x`, `[n_rows, n_in]`: `rmsnorm_matvec_*`.
    RmsNorm {
        /// Weight of the norm, `[n_in]`.
        weight: &'a wgpu::Buffer,
        /// Epsilon, added to the mean of the squares.
        eps: f32,
    },
    /// `silu(x[2 i]) * x[2 i + 1]`, where `x` is `[n_rows, 2 n_in]` with gate and up interleaved: `silu_matvec_*`.
    Silu,
}

/// The output of a product: the epilogue of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MatvecOutput {
    /// `y = W x`, `[n_rows, n_out]`.
    Store,
    /// `y += W x`: `*_accumulate`.
    Accumulate,
    /// `y[i] = silu((W x)[2 i]) * (W x)[2 i + 1]`, `[n_rows, n_out / 2]`: `*_gated`. For matrices whose gate and up
    /// rows [are neighbours](WgpuMatrix::has_pairs).
    Gated,
}

/// Which rows of `x` are multiplied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenRows {
    /// All rows: there is one for each token.
    Tokens,
    /// The rows of output tokens, of one for each token. The products are stored one after the other,
    /// `[n_outputs, n_out]`.
    Outputs,
    /// All rows: there is one for each output token.
    Gathered,
}

impl MatvecOutput {
    /// The name in the shader, and the suffix of the kernel's name.
    pub(super) fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::Store => ("store", ""),
            Self::Accumulate => ("accumulate", "_accumulate"),
            Self::Gated => ("gated", "_gated"),
        }
    }
}

impl TokenRows {
    /// The name in the shader.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Tokens => "tokens",
            Self::Outputs => "outputs",
            Self::Gathered => "gathered",
        }
    }

    /// The range of a buffer with `bytes` bytes for each result.
    pub(super) fn result_range(self, bytes: usize) -> AccessRange {
        match self {
            Self::Tokens => AccessRange::Tokens(bytes as u64),
            Self::Outputs | Self::Gathered => AccessRange::Outputs(bytes as u64),
        }
    }

    /// The workgroups for all results, where each handles `per_group` of them.
    pub(super) fn extent(self, per_group: usize) -> GridExtent {
        match self {
            Self::Tokens => GridExtent::Tokens(per_group as u32),
            Self::Outputs | Self::Gathered => GridExtent::Outputs(per_group as u32),
        }
    }
}

/// A product with its prologue and epilogue.
#[derive(Debug, Clone, Copy)]
pub struct MatvecOptions<'a> {
    /// The prologue: how the input is computed from `x`.
    pub input: MatvecInput<'a>,
    /// The epilogue: how `y` is computed from the product.
    pub output: MatvecOutput,
    /// Which rows of `x` are multiplied.
    pub rows: TokenRows,
    /// Added to the product (before a gate), `[n_out]`.
    pub bias: Option<&'a wgpu::Buffer>,
}

impl Default for MatvecOptions<'_> {
    /// `y = W x` for all tokens.
    fn default() -> Self {
        Self { input: MatvecInput::Plain, output: MatvecOutput::Store, rows: TokenRows::Tokens, bias: None }
    }
}

impl<'a> MatvecOptions<'a> {
    /// The range of `x` that a product with `matrix` accesses.
    pub(super) fn input_range(&self, matrix: &WgpuMatrix) -> AccessRange {
        let width = if matches!(self.input, MatvecInput::Silu) { 2 * matrix.n_in() } else { matrix.n_in() };
        match self.rows {
            TokenRows::Tokens | TokenRows::Outputs => AccessRange::Tokens(4 * width as u64),
            TokenRows::Gathered => AccessRange::Outputs(4 * width as u64),
        }
    }

    /// The range of `y` that a product with `matrix` accesses.
    pub(super) fn output_range(&self, matrix: &WgpuMatrix) -> AccessRange {
        let n_out = matrix.n_out();
        self.rows.result_range(4 * if self.output == MatvecOutput::Gated { n_out / 2 } else { n_out })
    }

    /// The weights of the norm and the bias, as far as there are any, with their ranges.
    pub(super) fn norm_and_bias(
        &self,
        matrix: &WgpuMatrix,
    ) -> impl Iterator<Item = (&'a dyn Bind, AccessRange)> + use<'a> {
        let norm = match self.input {
            MatvecInput::RmsNorm { weight, .. } => Some((weight as &dyn Bind, AccessRange::floats(matrix.n_in()))),
            MatvecInput::Plain | MatvecInput::Silu => None,
        };
        let n_out = matrix.n_out();
        norm.into_iter().chain(self.bias.map(|bias| (bias as &dyn Bind, AccessRange::floats(n_out))))
    }
}

/// `y = W x` with `options`, one dispatch for each part of the matrix. Made for one token: with more the results are
/// right, but each token reads the whole matrix. `batch`: the batch buffer.
pub fn matvec(
    gpu: &WgpuDevice,
    matrix: &WgpuMatrix,
    options: MatvecOptions<'_>,
    x: &wgpu::Buffer,
    y: &wgpu::Buffer,
    batch: &wgpu::Buffer,
) -> Result<Vec<Dispatch>, WgpuError> {
    multi_token_matvec(gpu, matrix, options, 1, x, y, batch)
}

/// [`matvec`] for a few tokens: each weight is read and dequantised once for `token_tile` (1, 2, 4 or 8) tokens.
pub fn multi_token_matvec(
    gpu: &WgpuDevice,
    matrix: &WgpuMatrix,
    options: MatvecOptions<'_>,
    token_tile: usize,
    x: &dyn Bind,
    y: &dyn Bind,
    batch: &wgpu::Buffer,
) -> Result<Vec<Dispatch>, WgpuError> {
    if options.output == MatvecOutput::Gated && !matrix.has_pairs() {
        let why = "its gate and up rows lie in different parts".to_owned();
        return Err(WgpuError::Mismatch { what: "the gated product of a matrix".to_owned(), why });
    }
    products(gpu, matrix, options, [0; MAX_INPUTS], token_tile, &[x], y, batch)
}

/// Most inputs of [`matvec_of_inputs`].
pub const MAX_INPUTS: usize = 6;

/// [`multi_token_matvec`] of all tokens for a matrix whose rows have different inputs. `inputs` are pairs of a number
/// of rows and the input of that many rows, `[n_tokens, n_in]`, in the order of the rows.
pub fn matvec_of_inputs(
    gpu: &WgpuDevice,
    matrix: &WgpuMatrix,
    inputs: &[(usize, &wgpu::Buffer)],
    token_tile: usize,
    y: &wgpu::Buffer,
    batch: &wgpu::Buffer,
) -> Result<Vec<Dispatch>, WgpuError> {
    let n_rows: usize = inputs.iter().map(|(rows, _)| rows).sum();
    if n_rows != matrix.n_out() || !(1..=MAX_INPUTS).contains(&inputs.len()) {
        let why = format!("{} inputs of {n_rows} rows, of {}", inputs.len(), matrix.n_out());
        return Err(WgpuError::Mismatch { what: "the inputs of a matrix".to_owned(), why });
    }
    let mut row_ends = [0; MAX_INPUTS];
    let mut end = 0;
    for (row_end, (rows, _)) in row_ends.iter_mut().zip(inputs) {
        end += rows;
        *row_end = end;
    }
    let inputs: Vec<_> = inputs.iter().map(|(_, input)| *input as &dyn Bind).collect();
    products(gpu, matrix, MatvecOptions::default(), row_ends, token_tile, &inputs, y, batch)
}

/// The dispatches for all parts of a matrix. `row_ends`: the row at which each of several `inputs` ends; zeros for one
/// input.
#[allow(clippy::too_many_arguments)] // what is multiplied, how, and where it is
fn products(
    gpu: &WgpuDevice,
    matrix: &WgpuMatrix,
    options: MatvecOptions<'_>,
    row_ends: [usize; MAX_INPUTS],
    token_tile: usize,
    inputs: &[&dyn Bind],
    y: &dyn Bind,
    batch: &wgpu::Buffer,
) -> Result<Vec<Dispatch>, WgpuError> {
    let token_tile = token_tile.clamp(1, 8);
    let parts = matrix.parts().iter();
    parts
        .map(|part| {
            let product = MatvecOp::new(matrix, part, &options, token_tile, row_ends);
            let tile = product.tile(gpu.features());
            let groups = product.groups(tile);
            let weights: (&dyn Bind, AccessRange) = (&part.buffer, AccessRange::Fixed(part.bytes(matrix.n_in())));
            let mut inputs = inputs.iter().map(|&x| (x, options.input_range(matrix)));
            let mut buffers = vec![weights];
            buffers.extend(inputs.next());
            buffers.push((y, options.output_range(matrix)));
            buffers.extend(options.norm_and_bias(matrix));
            if token_tile > 1 || options.rows == TokenRows::Outputs {
                buffers.push((batch, AccessRange::Batch));
            }
            if tile.is_integer() && product.has_vectors() {
                buffers.push(weights);
            }
            buffers.extend(inputs);
            let grid = [GridExtent::Fixed(groups[0]), options.rows.extent(token_tile), GridExtent::Fixed(groups[1])];
            Dispatch::new(gpu, &product.key(tile), &buffers, grid)
        })
        .collect()
}

/// The scalar twin: `W x` for one token, with `w` dequantised, `[n_out, n_in]`.
pub fn matvec_twin(w: &[f32], x: &[f32]) -> Vec<f32> {
    let dot = |row: &[f32]| row.iter().zip(x).map(|(&w, &x)| f64::from(w) * f64::from(x)).sum::<f64>();
    w.chunks_exact(x.len()).map(|row| dot(row) as f32).collect()
}
