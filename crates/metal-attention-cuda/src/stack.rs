//! Matrices of one type and shape one below the other, of which kernels choose: those of all experts of a layer, or of all heads.

use std::sync::Arc;

use metal_attention_gguf::Tensor;

use crate::CudaError;
use crate::args::MatrixArgs;
use crate::device::{CudaBuffer, CudaDevice, Kernels};
use crate::matrix::CudaMatrix;

/// `[n, n_rows, n_in]`; the rows of each are padded to whole tiles.
#[derive(Debug)]
pub(crate) struct CudaStack {
    all: CudaMatrix,
    pub(crate) n: usize,
    pub(crate) n_rows: usize,
    /// `[n, n_rows]`.
    pub(crate) bias: Option<CudaBuffer>,
}

impl CudaStack {
    /// Uploads `tensors`; `bias`: what is added to all rows of all of them.
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

    /// Elements of a row.
    pub(crate) fn n_in(&self) -> usize {
        self.all.n_in
    }

    /// Whether products can take a row of each at once.
    pub(crate) fn pairs_with(&self, other: &Self) -> bool {
        self.all.format == other.all.format
    }

    /// The first of them as kernels take it, and the bytes of a tile of its rows.
    pub(crate) fn args(&self) -> (MatrixArgs, u32) {
        (MatrixArgs { n_rows: self.n_rows as u32, ..self.all.args(0) }, self.all.tile_bytes() as u32)
    }

    /// Where the biases lie; 0: nowhere.
    pub(crate) fn bias(&self) -> u64 {
        self.bias.as_ref().map_or(0, CudaBuffer::ptr)
    }

    pub(crate) fn format(&self) -> crate::matrix::WeightLayout {
        self.all.format
    }
}
