//! Matrices that have their places in the GPU's memory, and whose rows are still to come.

use metal_attention_gguf::Tensor;

use crate::matrix::{PartRows, upload};
use crate::{Arena, GpuDevice, GpuError, GpuMatrix};

/// The rows to upload, and where the next matrices go.
#[derive(Debug, Default)]
pub(crate) struct Uploads {
    /// What matrices are given a place in.
    pub(crate) arena: Arena,
    rows: Vec<PartRows>,
}

impl Uploads {
    /// A place for `tensors`, one below the other: see [`GpuMatrix::concat`].
    pub(crate) fn concat(&mut self, gpu: &GpuDevice, what: &str, tensors: &[&Tensor]) -> Result<GpuMatrix, GpuError> {
        GpuMatrix::place_concat(gpu, what, tensors, &mut self.arena, &mut self.rows)
    }

    /// A place for the rows of two tensors by turns: see [`GpuMatrix::interleave`].
    pub(crate) fn interleave(
        &mut self,
        gpu: &GpuDevice,
        what: &str,
        gate: &Tensor,
        up: &Tensor,
    ) -> Result<GpuMatrix, GpuError> {
        GpuMatrix::place_interleave(gpu, what, gate, up, &mut self.arena, &mut self.rows)
    }

    /// A place for several such pairs: see [`GpuMatrix::interleave_all`].
    pub(crate) fn interleave_all(
        &mut self,
        gpu: &GpuDevice,
        what: &str,
        gates: &[&Tensor],
        ups: &[&Tensor],
    ) -> Result<GpuMatrix, GpuError> {
        GpuMatrix::place_interleave_all(gpu, what, gates, ups, &mut self.arena, &mut self.rows)
    }

    /// Uploads all rows; `meanwhile` is called while the GPU has nothing to do, with the part of them that is there.
    pub(crate) fn run(&self, gpu: &GpuDevice, meanwhile: &dyn Fn(f64)) -> Result<(), GpuError> {
        upload(gpu, &self.rows, meanwhile)
    }
}
