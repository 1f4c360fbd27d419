//! Products outside of a step, for what measures them.

use super::ModelRunner;
use super::linear::{LinearInput, LinearOp, norm_args};
use crate::CudaError;
use crate::args::NormArgs;
use crate::device::CudaBuffer;
use crate::matrix::CudaMatrix;

impl ModelRunner {
    /// `y = W x` of `n_tokens` rows, by the kernels that steps take for so many; `packed` has room for packed rows.
    pub(crate) fn benchmark_product(
        &mut self,
        matrix: &CudaMatrix,
        x: &CudaBuffer,
        packed: &CudaBuffer,
        y: &CudaBuffer,
        n_tokens: usize,
    ) -> Result<(), CudaError> {
        let input = if self.uses_f32_inputs(n_tokens) {
            LinearInput::Rows { x: x.ptr(), norm: 0, eps: 0.0 }
        } else {
            self.norm(NormArgs { packed: packed.ptr(), ..norm_args(None, x.ptr(), matrix.n_in) }, n_tokens)?;
            LinearInput::Packed(packed.ptr())
        };
        let product = LinearOp { y: y.ptr(), ..LinearOp::stored("alone", matrix) };
        self.product(&product, input, matrix.n_in, n_tokens)
    }
}
