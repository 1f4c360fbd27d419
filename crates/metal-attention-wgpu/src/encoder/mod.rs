//! [`WgpuEncoder`]: an encoder of pictures on the GPU. Its operations record dispatches ([`ops`]), which are submitted in
//! portions ([`recorder`]).

mod ops;
mod products;
mod recorder;
mod rows;

use std::sync::Arc;

use metal_attention_gguf::Tensor;
use metal_attention_model::vision::{EncodedPicture, Encoder, EncoderTypes, FileWeights, Pixels, PrepareEncoder};
use wgpu::Buffer;

use crate::device::WgpuDevice;
use crate::error::WgpuError;
use crate::matrix::WgpuMatrix;
use crate::weights::Uploads;
use ops::WgpuEncoderOps;

/// The GPU's forms of weights.
#[derive(Debug, Clone, Copy)]
struct WgpuEncoderTypes;

impl EncoderTypes for WgpuEncoderTypes {
    type Matrix = WgpuMatrix;
    type Vector = WgpuVector;
}

/// A vector in GPU memory.
#[derive(Debug)]
struct WgpuVector {
    buffer: Buffer,
    /// Elements.
    len: usize,
}

impl WgpuVector {
    /// The buffer; an error unless the vector has `n` elements.
    fn of(&self, n: usize) -> Result<&Buffer, WgpuError> {
        if self.len == n {
            return Ok(&self.buffer);
        }
        let why = format!("it has {} elements for rows of {n}", self.len);
        Err(WgpuError::Mismatch { what: "a vector of the picture encoder".into(), why })
    }
}

/// An encoder of pictures on the GPU.
pub struct WgpuEncoder {
    encoder: Encoder<WgpuEncoderTypes>,
    ops: WgpuEncoderOps,
}

impl WgpuEncoder {
    /// Uploads the weights. `exact`: products keep 32-bit floats, as in [`WgpuExecutor`](crate::WgpuExecutor).
    ///
    /// # Errors
    ///
    /// Memory that the device does not have, matrices that it cannot bind, a lost device, or a cancelled watch.
    pub fn new(gpu: Arc<WgpuDevice>, encoder: Encoder<FileWeights>, exact: bool) -> Result<Self, WgpuError> {
        let mut prepare = Prepare { gpu: &gpu, uploads: Uploads::default() };
        let encoder = encoder.prepare(&mut prepare)?;
        prepare.uploads.run(&gpu, &|_| ())?;
        Ok(Self { encoder, ops: WgpuEncoderOps::new(gpu, exact) })
    }

    /// Encodes pictures, all together. The memory for their rows is given back at the end.
    ///
    /// # Errors
    ///
    /// Rows that the device has no memory for ([`WgpuError::OutOfMemory`]) or that are more than one binding reaches
    /// ([`WgpuError::TooLarge`]), weights of other sizes than the rows ([`WgpuError::Mismatch`]), a lost device, or a cancelled
    /// watch.
    pub fn encode(&mut self, pictures: &[Pixels<'_>]) -> Result<Vec<EncodedPicture>, WgpuError> {
        let encoded = self.encoder.run(&mut self.ops, pictures);
        self.ops.clear();
        encoded
    }
}

/// Uploads weights.
struct Prepare<'a> {
    gpu: &'a WgpuDevice,
    /// The matrices' rows, which are uploaded together.
    uploads: Uploads,
}

impl PrepareEncoder for Prepare<'_> {
    type Types = WgpuEncoderTypes;
    type Error = WgpuError;

    fn matrix(&mut self, tensor: &Tensor) -> Result<WgpuMatrix, WgpuError> {
        self.uploads.concat(self.gpu, tensor.name(), &[tensor])
    }

    fn vector(&mut self, values: Vec<f32>) -> Result<WgpuVector, WgpuError> {
        Ok(WgpuVector { buffer: self.gpu.upload("a vector of the picture encoder", &values)?, len: values.len() })
    }
}
