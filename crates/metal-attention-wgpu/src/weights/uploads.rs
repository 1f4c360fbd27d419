//! Matrices that have their places in GPU memory, and whose rows are still to be uploaded. All are uploaded together,
//! so that pipelines can be compiled meanwhile.

use metal_attention_gguf::Tensor;

use crate::matrix::{PartUpload, upload};
use crate::{Arena, WgpuDevice, WgpuError, WgpuMatrix};

/// The rows still to be uploaded, and the arena for the next matrices.
#[derive(Debug, Default)]
pub(crate) struct Uploads {
    /// Where the next matrices are placed.
    pub(crate) arena: Arena,
    /// The rows of the matrices placed so far.
    rows: Vec<PartUpload>,
}

impl Uploads {
    /// Places `tensors`, stacked: see [`WgpuMatrix::concat`].
    pub(crate) fn concat(
        &mut self,
        gpu: &WgpuDevice,
        what: &str,
        tensors: &[&Tensor],
    ) -> Result<WgpuMatrix, WgpuError> {
        WgpuMatrix::place_concat(gpu, what, tensors, &mut self.arena, &mut self.rows)
    }

    /// Places two tensors with their rows interleaved: see [`WgpuMatrix::interleave`].
    pub(crate) fn interleave(
        &mut self,
        gpu: &WgpuDevice,
        what: &str,
        gate: &Tensor,
        up: &Tensor,
    ) -> Result<WgpuMatrix, WgpuError> {
        WgpuMatrix::place_interleave(gpu, what, gate, up, &mut self.arena, &mut self.rows)
    }

    /// Places several pairs of tensors, interleaved: see [`WgpuMatrix::interleave_all`].
    pub(crate) fn interleave_all(
        &mut self,
        gpu: &WgpuDevice,
        what: &str,
        gates: &[&Tensor],
        ups: &[&Tensor],
    ) -> Result<WgpuMatrix, WgpuError> {
        WgpuMatrix::place_interleave_all(gpu, what, gates, ups, &mut self.arena, &mut self.rows)
    }

    /// Uploads all rows. `meanwhile` is called after each round with the fraction that is uploaded.
    pub(crate) fn run(&self, gpu: &WgpuDevice, meanwhile: &dyn Fn(f64)) -> Result<(), WgpuError> {
        upload(gpu, &self.rows, meanwhile)
    }
}
