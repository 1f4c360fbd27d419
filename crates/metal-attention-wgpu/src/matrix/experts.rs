//! The gates and ups of all experts of a layer as one matrix.

use metal_attention_gguf::{Tensor, TensorType};

use super::upload::RowSource;
use super::{MatrixPlacer, PartUpload, WgpuMatrix, check_row_len, mismatch, upload};
use crate::arena::Arena;
use crate::device::WgpuDevice;
use crate::error::WgpuError;

impl WgpuMatrix {
    /// [`interleave`](Self::interleave) of the gate and up of several experts, one expert below the other: rows `2 i`
    /// and `2 i + 1` of an expert are row `i` of its gate and of its up. All tensors have one type and shape.
    pub fn interleave_all(
        gpu: &WgpuDevice,
        what: &str,
        gates: &[&Tensor],
        ups: &[&Tensor],
        arena: &mut Arena,
    ) -> Result<Self, WgpuError> {
        let mut rows = Vec::new();
        let matrix = Self::place_interleave_all(gpu, what, gates, ups, arena, &mut rows)?;
        upload(gpu, &rows, &|_| ())?;
        Ok(matrix)
    }

    /// [`interleave_all`](Self::interleave_all) without the upload, like [`place_concat`](Self::place_concat).
    pub(crate) fn place_interleave_all(
        gpu: &WgpuDevice,
        what: &str,
        gates: &[&Tensor],
        ups: &[&Tensor],
        arena: &mut Arena,
        rows: &mut Vec<PartUpload>,
    ) -> Result<Self, WgpuError> {
        let Some(first) = gates.first().filter(|_| gates.len() == ups.len()) else {
            return Err(mismatch(what, format!("there are {} gates and {} ups", gates.len(), ups.len())));
        };
        let ty: TensorType = first.ty();
        for tensor in gates.iter().chain(ups) {
            check_row_len(what, first, tensor)?;
            if (tensor.n_rows(), tensor.ty()) != (first.n_rows(), ty) {
                let size = |t: &Tensor| format!("{} has {} rows of {}", t.name(), t.n_rows(), t.ty());
                return Err(mismatch(what, format!("{} and {}", size(first), size(tensor))));
            }
        }
        let source = RowSource::new(gates.iter().zip(ups).map(|(&gate, &up)| vec![gate.clone(), up.clone()]));
        let n_out = source.n_rows();
        let mut place = MatrixPlacer { gpu, what, n_in: first.row_len(), arena, parts: Vec::new(), rows };
        place.rows(ty, 0, 1, source)?;
        Ok(Self { n_in: place.n_in, n_out, parts: place.parts })
    }
}
