//! The matrices of all experts of a layer as one.

use metal_attention_gguf::{Tensor, TensorType};

use super::{GpuMatrix, Upload, check_row_len, mismatch};
use crate::arena::Arena;
use crate::device::GpuDevice;
use crate::error::GpuError;

impl GpuMatrix {
    /// [`interleave`](Self::interleave) of several gates and as many ups, one pair below the other: rows `2 i` and `2 i + 1` of
    /// an expert are row `i` of its gate and of its up. All are of one type and shape.
    pub fn interleave_all(
        gpu: &GpuDevice,
        what: &str,
        gates: &[&Tensor],
        ups: &[&Tensor],
        arena: &mut Arena,
    ) -> Result<Self, GpuError> {
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
        let (n_in, rows) = (first.row_len(), 2 * first.n_rows());
        let n_out = rows * gates.len();
        let mut upload = Upload { gpu, what, n_in, arena, parts: Vec::new() };
        upload.rows(ty, 0, 1, n_out, &|row| {
            let (expert, row) = (row / rows, row % rows);
            if row.is_multiple_of(2) { gates[expert].row(row / 2) } else { ups[expert].row(row / 2) }
        })?;
        gates.iter().chain(ups).for_each(|tensor| tensor.release_pages());
        Ok(Self { n_in, n_out, parts: upload.parts })
    }
}
