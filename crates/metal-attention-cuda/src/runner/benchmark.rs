//! Products outside of a forward pass, for [`CudaCeilings`](crate::CudaCeilings), which measures them.

use super::ModelRunner;
use super::linear::{LinearInput, LinearOp, norm_args};
use crate::CudaError;
use crate::args::NormArgs;
use crate::device::CudaBuffer;
use crate::matrix::CudaMatrix;

impl ModelRunner {
    /// Launches `y = W x` for `n_tokens` F32 rows `x`, with the kernels that a micro-batch of that many tokens uses.
    /// `packed` is a buffer for the rows as packed F16, and may be unused.
    pub(crate) fn benchmark_product(
        &mut self,
        matrix: &CudaMatrix,
        x: &CudaBuffer,
        packed: &CudaBuffer,
        y: &CudaBuffer,
        n_tokens: usize,
    ) -> Result<(), CudaError> {
        let input = if self.uses_f32_inputs(n_tokens) {
            LinearInput::rows(x.slice())
        } else {
            self.norm(NormArgs { packed: packed.ptr(), ..norm_args(None, x.slice(), matrix.n_in) }, n_tokens)?;
            LinearInput::Packed(packed.slice())
        };
        let product = LinearOp { y: y.slice(), ..LinearOp::stored("benchmark", matrix) };
        self.product(&product, input, matrix.n_in, n_tokens)
    }
}
