//! [`CudaStack`]: matrices of one type and shape in one buffer, for grouped products, whose kernels select a matrix by index:
//! the experts of a layer, or the heads of latent attention.

use std::sync::Arc;

use metal_attention_gguf::Tensor;

use crate::CudaError;
use crate::args::MatrixArgs;
use crate::device::{CudaBuffer, CudaDevice};
use crate::kernels::Kernels;
use crate::matrix::{CudaMatrix, WeightLayout};
use crate::slice::DevicePtr;
use crate::weights::ptr_or_null;

/// Matrices `[n, n_rows, n_in]`. The rows of each are padded to whole tiles.
#[derive(Debug)]
pub(crate) struct CudaStack {
    /// All matrices, one below the other.
    all: CudaMatrix,
    /// The number of matrices.
    pub(crate) n: usize,
    /// Rows of each, without padding.
    pub(crate) n_rows: usize,
    /// Bias of all rows, `[n, n_rows]`.
    pub(crate) bias: Option<CudaBuffer>,
}

impl CudaStack {
    /// Uploads `tensors`, which have to be of one type and shape, and their biases `[n, n_rows]`.
    pub(crate) fn new(
        gpu: &Arc<CudaDevice>,
        kernels: &mut Kernels,
        tensors: &[&Tensor],
        bias: Option<&[f32]>,
    ) -> Result<Self, CudaError> {
        let all = CudaMatrix::stacked(gpu, kernels, tensors)?;
        let bias = bias.map(|bias| gpu.upload("biases", bias)).transpose()?;
        Ok(Self { all, n: tensors.len(), n_rows: tensors.first().map_or(0, |tensor| tensor.n_rows()), bias })
    }

    /// Columns of each matrix.
    pub(crate) fn n_in(&self) -> usize {
        self.all.n_in
    }

    /// Whether a kernel can multiply by a matrix of `self` and one of `other` together (gate and up), that is, whether their
    /// layouts are the same.
    pub(crate) fn pairs_with(&self, other: &Self) -> bool {
        self.all.layout == other.all.layout
    }

    /// The first matrix as kernels take it, and the bytes of a tile. The next matrix is `n_rows` rounded up to tiles further
    /// on.
    pub(crate) fn args(&self) -> (MatrixArgs, u32) {
        (MatrixArgs { n_rows: self.n_rows as u32, ..self.all.args(0) }, self.all.tile_bytes() as u32)
    }

    /// The biases, or null.
    pub(crate) fn bias(&self) -> DevicePtr<f32> {
        ptr_or_null(self.bias.as_ref())
    }

    /// The layout of all matrices.
    pub(crate) fn layout(&self) -> WeightLayout {
        self.all.layout
    }
}
