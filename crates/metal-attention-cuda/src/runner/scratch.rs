//! Scratch, that is, the rows that a mixer or a feed-forward computes between its products; and the products and functions of
//! such rows.
//!
//! One buffer (`Activations::rows`) serves all mixers and feed-forwards in turn: each lays out its rows anew, and reads nothing
//! that another left there.

use super::linear::{LinearInput, LinearOp, norm_args};
use super::{MicroBatch, ModelRunner};
use crate::CudaError;
use crate::args::{ElementwiseFunction, FunctionArgs, MAX_MATRICES, NormArgs};
use crate::kernels;
use crate::launch::LaunchGrid;
use crate::matrix::CudaMatrix;
use crate::slice::{DevicePtr, DeviceSlice};
use crate::weights::{CudaJoined, CudaLinear, CudaNorm, ptr_or_null};

/// Alignment of the rows in the scratch, in elements.
pub(crate) const SCRATCH_ALIGNMENT: usize = 64;

impl ModelRunner {
    /// Scratch rows of these widths for each token. They overwrite those of earlier calls.
    pub(crate) fn scratch_rows<const N: usize>(
        &self,
        batch: MicroBatch<'_>,
        widths: [usize; N],
    ) -> [DeviceSlice<f32>; N] {
        self.scratch(widths.map(|width| width * batch.size.n_tokens))
    }

    /// Scratch parts of that many elements. They overwrite those of earlier calls.
    ///
    /// # Panics
    /// If the scratch is smaller than their sum ([`Widths`](crate::activations::Widths)).
    pub(crate) fn scratch<const N: usize>(&self, elements: [usize; N]) -> [DeviceSlice<f32>; N] {
        let mut rest = self.buffers.rows.slice();
        let parts = elements.map(|n| {
            let part = rest.take(n);
            rest = rest.skip(n.next_multiple_of(SCRATCH_ALIGNMENT));
            part
        });
        self.buffers.rows.note_parts(&parts);
        parts
    }

    /// F32 rows of the scratch as input of products, perhaps through a norm. May overwrite `x` with the normalised rows, and
    /// overwrites `packed_rows`, so only one such input is valid at a time.
    pub(crate) fn rows_input(
        &mut self,
        batch: MicroBatch<'_>,
        x: DeviceSlice<f32>,
        width: usize,
        norm: Option<&CudaNorm>,
    ) -> Result<LinearInput, CudaError> {
        let n = batch.size.n_tokens;
        if !self.uses_f32_inputs(n) {
            let packed = self.buffers.packed_rows.slice();
            self.norm(NormArgs { packed: packed.ptr(), ..norm_args(norm, x, width) }, n)?;
            return Ok(LinearInput::Packed(packed));
        }
        match norm {
            Some(norm) if norm.fuses_with_product() => {
                return Ok(LinearInput::Rows { x, norm: norm.weight.ptr(), eps: norm.eps });
            }
            Some(norm) => self.norm_rows(batch, x, width, norm, x)?,
            None => {}
        }
        Ok(LinearInput::rows(x))
    }

    /// Launches `out = norm(x)` for all tokens' rows.
    pub(crate) fn norm_rows(
        &mut self,
        batch: MicroBatch<'_>,
        x: DeviceSlice<f32>,
        width: usize,
        norm: &CudaNorm,
        out: DeviceSlice<f32>,
    ) -> Result<(), CudaError> {
        self.norm(NormArgs { out: out.ptr(), ..norm_args(Some(norm), x, width) }, batch.size.n_tokens)
    }

    /// Launches `y = W x + b` for all tokens, with matrices one below the other. Only a single matrix may have a bias.
    pub(crate) fn store_all<const N: usize>(
        &mut self,
        batch: MicroBatch<'_>,
        label: &'static str,
        linears: [&CudaLinear; N],
        input: LinearInput,
        y: DeviceSlice<f32>,
    ) -> Result<(), CudaError> {
        let bias = if let [linear] = linears[..] { linear.bias() } else { DevicePtr::NULL };
        self.store_matrices(batch, label, linears.map(|linear| &linear.weight), bias, input, y)
    }

    /// Launches `y = W x + b` with matrices that were joined at load.
    pub(crate) fn store_joined(
        &mut self,
        batch: MicroBatch<'_>,
        label: &'static str,
        joined: &CudaJoined,
        input: LinearInput,
        y: DeviceSlice<f32>,
    ) -> Result<(), CudaError> {
        let mut n_rows = 0;
        let parts = joined.parts.iter().map(|part| {
            n_rows += part.n_rows;
            (part, n_rows - part.n_rows)
        });
        let bias = ptr_or_null(joined.bias.as_ref());
        for parts in parts.collect::<Vec<_>>().chunks(MAX_MATRICES) {
            let stored = LinearOp::stored(label, parts[0].0);
            let product = LinearOp { matrices: parts.to_vec(), n_out: joined.n_rows(), bias, y, ..stored };
            self.product(&product, input, parts[0].0.n_in, batch.size.n_tokens)?;
        }
        Ok(())
    }

    /// Launches `y = W x + b` with matrices one below the other and one bias for all rows, or null.
    pub(crate) fn store_matrices<const N: usize>(
        &mut self,
        batch: MicroBatch<'_>,
        label: &'static str,
        matrices: [&CudaMatrix; N],
        bias: DevicePtr<f32>,
        input: LinearInput,
        y: DeviceSlice<f32>,
    ) -> Result<(), CudaError> {
        let mut n_out = 0;
        let parts = matrices.map(|matrix| {
            let first = n_out;
            n_out += matrix.n_rows;
            (matrix, first)
        });
        let parts = parts.to_vec();
        let Some((first, _)) = parts.first() else { return Ok(()) };
        let (n_in, stored) = (first.n_in, LinearOp::stored(label, first));
        let product = LinearOp { matrices: parts, n_out, bias, y, ..stored };
        self.product(&product, input, n_in, batch.size.n_tokens)
    }

    /// Launches `y = W x + b` of the F32 rows `x` that no other product reads.
    pub(crate) fn store_rows(
        &mut self,
        batch: MicroBatch<'_>,
        label: &'static str,
        linear: &CudaLinear,
        x: DeviceSlice<f32>,
        y: DeviceSlice<f32>,
    ) -> Result<(), CudaError> {
        let input = self.rows_input(batch, x, linear.weight.n_in, None)?;
        self.store_all(batch, label, [linear], input, y)
    }

    /// Launches a function of each element of all tokens' rows `x`; `with` is its second operand, or [`DeviceSlice::NONE`].
    pub(crate) fn elementwise(
        &mut self,
        batch: MicroBatch<'_>,
        function: ElementwiseFunction,
        x: DeviceSlice<f32>,
        with: DeviceSlice<f32>,
        width: usize,
    ) -> Result<(), CudaError> {
        let n = width * batch.size.n_tokens;
        let args = FunctionArgs { x: x.ptr(), with: with.ptr(), n: n as u32, function: function as u32 };
        let grid = LaunchGrid { blocks: [n.div_ceil(256).clamp(1, 1024), 1, 1], threads: 256, shared: 0 };
        self.launch(kernels::OF_EACH, "", grid, &args)
    }
}
