//! Products of a matrix with one token's vector, or with the vectors of a few tokens.

mod product;

use crate::arena::Bind;
use crate::device::WgpuDevice;
use crate::dispatch::{AccessRange, Dispatch, GridExtent};
use crate::error::WgpuError;
use crate::matrix::WgpuMatrix;
use product::MatvecOp;
pub(crate) use product::catalogue;
pub(super) use product::{MatvecTile, float_tile};

/// Tokens that share a weight once it is read, in a batch of a few.
pub const TOKEN_TILE: usize = 4;

/// What the matrix is multiplied with.
#[derive(Debug, Clone, Copy)]
pub enum MatvecInput<'a> {
    /// `x`, `[n_rows, n_in]`.
    Plain,
    /// The root-mean-square norm of `x`, `[n_rows, n_in]`: `rmsnorm_matvec_*`.
    RmsNorm {
        /// Weight of the norm, `[n_in]`.
        weight: &'a wgpu::Buffer,
        /// Added to the mean of the squares.
        eps: f32,
    },
    /// `silu(x[2 i]) * x[2 i + 1]`, where `x` is `[n_rows, 2 n_in]`, gate and up in turn: `silu_matvec_*`.
    Silu,
}

/// What becomes of the product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MatvecOutput {
    /// `y = W x`, `[n_rows, n_out]`.
    Store,
    /// `y += W x`: `*_accumulate`.
    Accumulate,
    /// `y[i] = silu((W x)[2 i]) * (W x)[2 i + 1]`, `[n_rows, n_out / 2]`: `*_gated`. For matrices that
    /// [have pairs](WgpuMatrix::has_pairs).
    Gated,
}

/// Which rows of `x` there are products for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenRows {
    /// All: one a token.
    Tokens,
    /// Those of the tokens whose logits are wanted; the products lie next to one another.
    Wanted,
    /// All: one for each token whose logits are wanted.
    Gathered,
}

impl MatvecOutput {
    /// The name in the shader, and what it adds to a kernel's name.
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
            Self::Wanted => "wanted",
            Self::Gathered => "gathered",
        }
    }

    /// How much of a buffer is reached that has `bytes` for each result.
    pub(super) fn result_range(self, bytes: usize) -> AccessRange {
        match self {
            Self::Tokens => AccessRange::Tokens(bytes as u64),
            Self::Wanted | Self::Gathered => AccessRange::Wanted(bytes as u64),
        }
    }

    /// Workgroups for all of them, each of which takes so many.
    pub(super) fn extent(self, per_group: usize) -> GridExtent {
        match self {
            Self::Tokens => GridExtent::Tokens(per_group as u32),
            Self::Wanted | Self::Gathered => GridExtent::Wanted(per_group as u32),
        }
    }
}

/// A product with its surroundings.
#[derive(Debug, Clone, Copy)]
pub struct MatvecOptions<'a> {
    /// What the matrix is multiplied with.
    pub input: MatvecInput<'a>,
    /// What becomes of the product.
    pub output: MatvecOutput,
    /// Which rows of `x` there are products for.
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
    /// How much of `x` a product with `matrix` reaches.
    pub(super) fn input_range(&self, matrix: &WgpuMatrix) -> AccessRange {
        let width = if matches!(self.input, MatvecInput::Silu) { 2 * matrix.n_in() } else { matrix.n_in() };
        match self.rows {
            TokenRows::Tokens | TokenRows::Wanted => AccessRange::Tokens(4 * width as u64),
            TokenRows::Gathered => AccessRange::Wanted(4 * width as u64),
        }
    }

    /// How much of `y`.
    pub(super) fn output_range(&self, matrix: &WgpuMatrix) -> AccessRange {
        let n_out = matrix.n_out();
        self.rows.result_range(4 * if self.output == MatvecOutput::Gated { n_out / 2 } else { n_out })
    }

    /// The weights of the norm and the bias, where there are any.
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

/// `y = W x` with `options`, one dispatch a part of the matrix. Made for one token: more tokens are right, but each
/// reads the whole matrix.
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

/// As [`matvec`] for a few tokens: each weight is read and dequantised once for `token_tile` (1, 2, 4 or 8) of them.
pub fn multi_token_matvec(
    gpu: &WgpuDevice,
    matrix: &WgpuMatrix,
    options: MatvecOptions<'_>,
    token_tile: usize,
    x: &wgpu::Buffer,
    y: &wgpu::Buffer,
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

/// As [`multi_token_matvec`] for all tokens, where rows of the matrix have different inputs: the first rows the first of
/// `inputs`, as many as are said with it, and so on; each is `[n_tokens, n_in]`.
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
    let inputs: Vec<_> = inputs.iter().map(|(_, input)| *input).collect();
    products(gpu, matrix, MatvecOptions::default(), row_ends, token_tile, &inputs, y, batch)
}

/// The products with each part of a matrix. `row_ends`: where the rows of each of `inputs` end, where these are several.
#[allow(clippy::too_many_arguments)] // one after the other: what is multiplied, how, where it lies
fn products(
    gpu: &WgpuDevice,
    matrix: &WgpuMatrix,
    options: MatvecOptions<'_>,
    row_ends: [usize; MAX_INPUTS],
    token_tile: usize,
    inputs: &[&wgpu::Buffer],
    y: &wgpu::Buffer,
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
            let mut inputs = inputs.iter().map(|&x| (x as &dyn Bind, options.input_range(matrix)));
            let mut buffers = vec![weights];
            buffers.extend(inputs.next());
            buffers.push((y, options.output_range(matrix)));
            buffers.extend(options.norm_and_bias(matrix));
            if token_tile > 1 || options.rows == TokenRows::Wanted {
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

/// The scalar twin: `W x` for one token, `w` `[n_out, n_in]` dequantised.
pub fn matvec_twin(w: &[f32], x: &[f32]) -> Vec<f32> {
    let dot = |row: &[f32]| row.iter().zip(x).map(|(&w, &x)| f64::from(w) * f64::from(x)).sum::<f64>();
    w.chunks_exact(x.len()).map(|row| dot(row) as f32).collect()
}
