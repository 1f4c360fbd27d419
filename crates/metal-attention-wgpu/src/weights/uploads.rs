//! Matrices that have their places in the GPU's memory, and whose rows are still to come.

use metal_attention_gguf::Tensor;

use crate::matrix::{PartUpload, upload};
use crate::{Arena, WgpuDevice, WgpuError, WgpuMatrix};

/// The rows to upload, and where the next matrices go.
#[derive(Debug, Default)]
pub(crate) struct Uploads {
    /// What matrices are given a place in.
    pub(crate) arena: Arena,
    rows: Vec<PartUpload>,
}

impl Uploads {
    /// A place for `tensors`, one below the other: see [`WgpuMatrix::concat`].
    pub(crate) fn concat(
        &mut self,
        gpu: &WgpuDevice,
        what: &str,
        tensors: &[&Tensor],
    ) -> Result<WgpuMatrix, WgpuError> {
        WgpuMatrix::place_concat(gpu, what, tensors, &mut self.arena, &mut self.rows)
    }

    /// A place for the rows of two tensors by turns: see [`WgpuMatrix::interleave`].
    pub(crate) fn interleave(
        &mut self,
        gpu: &WgpuDevice,
        what: &str,
        gate: &Tensor,
        up: &Tensor,
    ) -> Result<WgpuMatrix, WgpuError> {
        WgpuMatrix::place_interleave(gpu, what, gate, up, &mut self.arena, &mut self.rows)
    }

    /// A place for several such pairs: see [`WgpuMatrix::interleave_all`].
    pub(crate) fn interleave_all(
        &mut self,
        gpu: &WgpuDevice,
        what: &str,
        gates: &[&Tensor],
        ups: &[&Tensor],
    ) -> Result<WgpuMatrix, WgpuError> {
        WgpuMatrix::place_interleave_all(gpu, what, gates, ups, &mut self.arena, &mut self.rows)
    }

    /// Uploads all rows; `meanwhile` is called while the GPU has nothing to do, with the part of them that is there.
    pub(crate) fn run(&self, gpu: &WgpuDevice, meanwhile: &dyn Fn(f64)) -> Result<(), WgpuError> {
        upload(gpu, &self.rows, meanwhile)
    }
}
