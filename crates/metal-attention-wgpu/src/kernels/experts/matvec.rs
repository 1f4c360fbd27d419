//! Grouped GEMV over experts, for a few tokens: each token reads the weights of its own experts.

use metal_attention_gguf::TensorType;

use super::{ExpertsMatrices, ExpertsScratch, ExpertsShape};
use crate::arena::Bind;
use crate::device::WgpuDevice;
use crate::dispatch::{AccessRange, Dispatch, GridExtent};
use crate::error::WgpuError;
use crate::kernels::matvec::{self, MatvecInput};
use crate::matrix::{MatrixPart, WgpuMatrix, type_name};
use crate::pipelines::PipelineKey;
use crate::shader::ShaderFeatures;

/// For every token the weighted sum of the experts that [`route`](super::route) chose: `y = sum`, or `y += sum` with
/// `accumulate`, over `i < n_used` of `weights[i] * expert(chosen[i], input)`. `x` and `y` are `[n_tokens, n_embd]`;
/// `input` states how the input is computed from `x`. Two dispatches, and one more for each further part of a matrix.
pub fn experts_matvec(
    gpu: &WgpuDevice,
    shape: &ExpertsShape,
    matrices: &ExpertsMatrices<'_>,
    input: MatvecInput<'_>,
    x: &wgpu::Buffer,
    y: &wgpu::Buffer,
    accumulate: bool,
    scratch: &ExpertsScratch,
) -> Result<Vec<Dispatch>, WgpuError> {
    shape.check(matrices)?;
    let norm = match input {
        MatvecInput::Plain => None,
        MatvecInput::RmsNorm { weight, eps } => Some((weight, eps)),
        MatvecInput::Silu => {
            let why = "the input is not plain".to_owned();
            return Err(WgpuError::Mismatch { what: "a product with experts".to_owned(), why });
        }
    };
    let visits = |row: usize| AccessRange::Tokens(4 * (shape.n_used * row) as u64);
    let floats = |matrix: &WgpuMatrix| AccessRange::floats(matrix.n_out());
    let mut dispatches = Vec::new();
    for part in matrices.up.parts() {
        let bias = matrices.up_bias.map(|bias| (bias as &dyn Bind, floats(matrices.up)));
        let product = ExpertsMatvecOp::up(shape, part, norm.map(|(_, eps)| eps), bias.is_some());
        let mut buffers: Vec<(&dyn Bind, AccessRange)> = vec![
            (&part.buffer, AccessRange::Fixed(part.bytes(shape.n_embd))),
            (x, AccessRange::Tokens(4 * shape.n_embd as u64)),
            (&scratch.hidden, visits(shape.n_ff)),
            (&scratch.chosen, visits(1)),
        ];
        buffers.extend(product.weighted().then_some((&scratch.weights as &dyn Bind, visits(1))));
        buffers.extend(norm.map(|(weight, _)| (weight as &dyn Bind, AccessRange::floats(shape.n_embd))));
        buffers.extend(bias);
        dispatches.push(product.dispatch(gpu, &buffers)?);
    }
    for (i, part) in matrices.down.parts().iter().enumerate() {
        let bias = matrices.down_bias.map(|bias| (bias as &dyn Bind, floats(matrices.down)));
        // The first part writes `y`, the others add to it.
        let product = ExpertsMatvecOp::down(shape, part, accumulate || i > 0, bias.is_some());
        let mut buffers: Vec<(&dyn Bind, AccessRange)> = vec![
            (&part.buffer, AccessRange::Fixed(part.bytes(shape.n_ff))),
            (&scratch.hidden, visits(shape.n_ff)),
            (y, AccessRange::Tokens(4 * shape.n_embd as u64)),
            (&scratch.chosen, visits(1)),
        ];
        buffers.extend(product.weighted().then_some((&scratch.weights as &dyn Bind, visits(1))));
        buffers.extend(bias);
        dispatches.push(product.dispatch(gpu, &buffers)?);
    }
    Ok(dispatches)
}

/// The product with one part of a matrix, without its buffers.
#[derive(Debug, Clone, Copy)]
struct ExpertsMatvecOp<'a> {
    /// Sizes of the experts.
    shape: &'a ExpertsShape,
    /// Tensor type of the part.
    ty: TensorType,
    /// Elements of a row.
    n_in: usize,
    /// Rows of the matrix of one expert.
    rows: usize,
    /// The matrix row that is the part's row 0.
    first_row: usize,
    /// Rows of the part.
    n_rows: usize,
    /// The epilogue.
    output: ExpertsMatvecOutput,
    /// Epsilon of the norm in the prologue, if there is one.
    eps: Option<f32>,
    /// Whether a bias is added.
    bias: bool,
}

/// The epilogue of a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ExpertsMatvecOutput {
    /// Stores the activation of gate and up of each visit.
    Activated,
    /// Adds up the weighted results of each token's visits.
    Sum {
        /// Whether the sum is added to `y` instead of replacing it.
        accumulate: bool,
    },
}

impl<'a> ExpertsMatvecOp<'a> {
    fn up(shape: &'a ExpertsShape, part: &MatrixPart, eps: Option<f32>, bias: bool) -> Self {
        let MatrixPart { ty, first_row, n_rows, .. } = *part;
        let (n_in, rows) = (shape.n_embd, shape.up_rows());
        Self { shape, ty, n_in, rows, first_row, n_rows, output: ExpertsMatvecOutput::Activated, eps, bias }
    }

    fn down(shape: &'a ExpertsShape, part: &MatrixPart, accumulate: bool, bias: bool) -> Self {
        let MatrixPart { ty, first_row, n_rows, .. } = *part;
        let (n_in, rows) = (shape.n_ff, shape.n_embd);
        Self {
            shape,
            ty,
            n_in,
            rows,
            first_row,
            n_rows,
            output: ExpertsMatvecOutput::Sum { accumulate },
            eps: None,
            bias,
        }
    }

    /// Whether this product applies the router's weights.
    fn weighted(&self) -> bool {
        self.shape.weights_inputs == (self.output == ExpertsMatvecOutput::Activated)
    }

    /// The float GEMV's tile for the matrix that the experts of one token form together.
    fn tile(&self, features: ShaderFeatures) -> matvec::MatvecTile {
        let units = 8 * self.n_in.div_ceil(8);
        match self.output {
            ExpertsMatvecOutput::Activated => {
                let n_rows = self.shape.n_used * self.rows;
                matvec::float_tile(self.ty, units, n_rows, self.shape.gated, features)
            }
            ExpertsMatvecOutput::Sum { .. } => {
                matvec::float_tile(self.ty, self.shape.n_used * units, self.rows, false, features)
            }
        }
    }

    fn dispatch(&self, gpu: &WgpuDevice, buffers: &[(&dyn Bind, AccessRange)]) -> Result<Dispatch, WgpuError> {
        let tile = self.tile(gpu.features());
        let rows = GridExtent::Fixed(self.rows.div_ceil(tile.rows_of_a_group()) as u32);
        let visits = match self.output {
            ExpertsMatvecOutput::Activated => self.shape.n_used as u32,
            ExpertsMatvecOutput::Sum { .. } => 1,
        };
        Dispatch::new(gpu, &self.key(tile), buffers, [rows, GridExtent::Tokens(1), GridExtent::Fixed(visits)])
    }

    fn key(&self, tile: matvec::MatvecTile) -> PipelineKey {
        let (output, accumulate, suffix) = match self.output {
            ExpertsMatvecOutput::Activated => ("activated", false, "_activated"),
            ExpertsMatvecOutput::Sum { accumulate: false } => ("sum", false, "_sum"),
            ExpertsMatvecOutput::Sum { accumulate: true } => ("sum", true, "_sum_accumulate"),
        };
        let shape = self.shape;
        let ty = type_name(self.ty);
        let mut constants = vec![
            ("type", ty.into()),
            ("n_in", self.n_in.into()),
            ("expert_rows", self.rows.into()),
            ("first_row", self.first_row.into()),
            ("n_rows", self.n_rows.into()),
            ("whole", (self.n_rows == shape.n_expert * self.rows).into()),
            ("n_expert", shape.n_expert.into()),
            ("n_used", shape.n_used.into()),
            ("output", output.into()),
            ("accumulate", accumulate.into()),
            ("weighted", self.weighted().into()),
            ("norm", self.eps.is_some().into()),
            ("eps", self.eps.unwrap_or(0.0).into()),
            ("bias", self.bias.into()),
            ("lanes", tile.lanes.into()),
            ("row_tile", tile.rows.into()),
            ("unroll", tile.unroll.into()),
            ("threads", tile.threads.into()),
        ];
        constants.extend(shape.activation_constants());
        let norm = if self.eps.is_some() { "rmsnorm_" } else { "" };
        PipelineKey { name: format!("{norm}experts_matvec_{ty}{suffix}"), file: "experts_matvec", constants }
    }
}

/// The keys of all kernels, with the sizes of Qwen3-30B-A3B.
pub(super) fn catalogue() -> Vec<PipelineKey> {
    let features = ShaderFeatures { subgroups: true, neighbours: 32, ..Default::default() };
    let shape = super::catalogue_shape();
    let mut keys = Vec::new();
    for &ty in TensorType::ALL {
        let key = |output, n_in, rows, eps| {
            let n_rows = shape.n_expert * rows;
            let product =
                ExpertsMatvecOp { shape: &shape, ty, n_in, rows, first_row: 0, n_rows, output, eps, bias: false };
            product.key(product.tile(features))
        };
        keys.extend(
            [None, Some(1e-6)].map(|eps| key(ExpertsMatvecOutput::Activated, shape.n_embd, shape.up_rows(), eps)),
        );
        keys.extend(
            [false, true]
                .map(|accumulate| key(ExpertsMatvecOutput::Sum { accumulate }, shape.n_ff, shape.n_embd, None)),
        );
    }
    keys
}
