//! [`CudaEncoder`]: an encoder of pictures on a GPU.
//!
//! Products and norms are those of the forward pass ([`Launcher`](crate::runner::launcher::Launcher)), with inputs of the tensor cores rounded to
//! F16; everything else is in `kernels/encoder.cu`. All launches are in the order of the device's stream, and the host waits for the
//! result alone.

mod attention;
mod ops;
mod products;
mod rows;
mod support;

use std::sync::Arc;
use std::time::Duration;

use metal_attention_gguf::Tensor;
use metal_attention_model::DeviceInfo;
use metal_attention_model::vision::{
    EncodedPicture, Encoder, EncoderTypes, EncoderWork, FileWeights, KeptRows, Pixels, PrepareEncoder,
};

#[cfg(test)]
pub(crate) use self::attention::{AttentionPlan, IN_F32, f32_grid};
use self::ops::CudaEncoderOps;
#[cfg(test)]
pub(crate) use self::ops::row_grid;
use self::rows::CudaRows;
use crate::device::CudaBuffer;
use crate::kernels::Kernels;
use crate::matrix::CudaMatrix;
use crate::{CudaDevice, CudaError};

/// An encoder of pictures on a GPU: its weights, and what its operations need.
pub struct CudaEncoder {
    encoder: Encoder<CudaEncoderTypes>,
    kept: KeptRows<CudaRows>,
    ops: CudaEncoderOps,
}

/// The GPU's forms of weights.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CudaEncoderTypes;

impl EncoderTypes for CudaEncoderTypes {
    type Matrix = CudaMatrix;
    type Vector = EncoderVector;
}

/// F32 numbers in device memory.
#[derive(Debug)]
pub(crate) struct EncoderVector {
    buffer: CudaBuffer,
    len: usize,
}

impl CudaEncoder {
    /// Uploads and repacks the weights. `exact`: products and attention read F32 inputs, as in
    /// [`CudaExecutor`](crate::CudaExecutor).
    ///
    /// # Errors
    ///
    /// Heads of attention have a size without kernels (an odd number of elements, or more than 256), the GPU has not enough memory, the
    /// driver fails, or the device's watch is cancelled.
    pub fn new(gpu: Arc<CudaDevice>, encoder: Encoder<FileWeights>, exact: bool) -> Result<Self, CudaError> {
        support::check(&encoder.stages)?;
        gpu.bind()?;
        let mut prepare = Prepare { gpu: &gpu, kernels: Kernels::default() };
        let encoder = encoder.prepare(&mut prepare)?;
        let kernels = prepare.kernels;
        Ok(Self { encoder, kept: KeptRows::default(), ops: CudaEncoderOps::new(gpu, kernels, exact)? })
    }

    /// Encodes pictures, all together. Returns the rows of each, `[n_rows, (1 + n_deepstack) * n_embd]`.
    ///
    /// # Errors
    ///
    /// The GPU has not enough memory for the rows, the driver fails, or the device's watch is cancelled.
    pub fn encode(&mut self, pictures: &[Pixels<'_>]) -> Result<Vec<EncodedPicture>, CudaError> {
        if pictures.is_empty() {
            return Ok(Vec::new());
        }
        let encoded = self.encoder.run(&mut self.ops, &mut self.kept, pictures);
        self.ops.end_call();
        encoded
    }

    /// The operations of [`encode`](Self::encode) for pictures of these sizes ([`Encoder::work`]).
    pub fn work(&self, pictures: &[[usize; 2]]) -> EncoderWork {
        self.encoder.work(pictures)
    }

    /// The time of the matrix products alone ([`Encoder::time_products`]).
    ///
    /// # Errors
    ///
    /// Those of [`encode`](Self::encode).
    pub fn time_products(&mut self, pictures: &[[usize; 2]]) -> Result<Duration, CudaError> {
        let time = self.encoder.time_products(&mut self.ops, pictures);
        self.ops.end_call();
        time
    }

    /// The GPU.
    pub fn device(&self) -> DeviceInfo {
        self.ops.device()
    }
}

/// Uploads and repacks weights.
struct Prepare<'a> {
    gpu: &'a Arc<CudaDevice>,
    kernels: Kernels,
}

impl PrepareEncoder for Prepare<'_> {
    type Types = CudaEncoderTypes;
    type Error = CudaError;

    fn matrix(&mut self, tensor: &Tensor) -> Result<CudaMatrix, CudaError> {
        CudaMatrix::new(self.gpu, &mut self.kernels, tensor)
    }

    fn vector(&mut self, values: Vec<f32>) -> Result<EncoderVector, CudaError> {
        let buffer = self.gpu.upload("the picture encoder", &values)?;
        Ok(EncoderVector { buffer, len: values.len() })
    }
}
