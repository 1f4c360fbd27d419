//! [`WgpuEncoder`]: an encoder of pictures on the GPU. Its operations record dispatches ([`ops`]), which are submitted in
//! portions ([`recorder`]).

mod ops;
mod products;
mod recorder;
mod rows;

use std::sync::Arc;
use std::time::Duration;

use half::f16;
use metal_attention_gguf::{Tensor, TensorType};
use metal_attention_model::DeviceInfo;
use metal_attention_model::vision::{
    EncodedPicture, Encoder, EncoderTypes, EncoderWork, FileWeights, KeptRows, Pixels, PrepareEncoder,
};
use wgpu::Buffer;

use crate::device::WgpuDevice;
use crate::error::WgpuError;
use crate::matrix::WgpuMatrix;
use crate::weights::Uploads;
use ops::WgpuEncoderOps;
use rows::WgpuRows;

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
    kept: KeptRows<WgpuRows>,
    ops: WgpuEncoderOps,
}

impl WgpuEncoder {
    /// Uploads the weights. `exact`: products and attention keep 32-bit floats, as in [`WgpuExecutor`](crate::WgpuExecutor).
    /// Otherwise matrix units may round them to 16-bit floats.
    ///
    /// # Errors
    ///
    /// Memory that the device does not have, matrices that it cannot bind, a lost device, or a cancelled watch.
    pub fn new(gpu: Arc<WgpuDevice>, encoder: Encoder<FileWeights>, exact: bool) -> Result<Self, WgpuError> {
        let mut prepare = Prepare { gpu: &gpu, exact, uploads: Uploads::default() };
        let encoder = encoder.prepare(&mut prepare)?;
        prepare.uploads.run(&gpu, &|_| ())?;
        Ok(Self { encoder, kept: KeptRows::default(), ops: WgpuEncoderOps::new(gpu, exact) })
    }

    /// Encodes pictures, all together. The memory for their rows is given back at the end.
    ///
    /// # Errors
    ///
    /// Rows that the device has no memory for ([`WgpuError::OutOfMemory`]) or that are more than one binding reaches
    /// ([`WgpuError::TooLarge`]), weights of other sizes than the rows ([`WgpuError::Mismatch`]), a lost device, or a cancelled
    /// watch.
    pub fn encode(&mut self, pictures: &[Pixels<'_>]) -> Result<Vec<EncodedPicture>, WgpuError> {
        let encoded = self.encoder.run(&mut self.ops, &mut self.kept, pictures);
        self.ops.clear();
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
    pub fn time_products(&mut self, pictures: &[[usize; 2]]) -> Result<Duration, WgpuError> {
        let time = self.encoder.time_products(&mut self.ops, pictures);
        self.ops.clear();
        time
    }

    /// The GPU.
    pub fn device(&self) -> DeviceInfo {
        self.ops.device()
    }
}

/// Uploads weights.
struct Prepare<'a> {
    gpu: &'a WgpuDevice,
    /// Whether products keep 32-bit floats.
    exact: bool,
    /// The matrices' rows, which are uploaded together.
    uploads: Uploads,
}

impl PrepareEncoder for Prepare<'_> {
    type Types = WgpuEncoderTypes;
    type Error = WgpuError;

    fn matrix(&mut self, tensor: &Tensor) -> Result<WgpuMatrix, WgpuError> {
        let narrow = if self.exact { None } else { as_f16(tensor) };
        self.uploads.concat(self.gpu, tensor.name(), &[narrow.as_ref().unwrap_or(tensor)])
    }

    fn vector(&mut self, values: Vec<f32>) -> Result<WgpuVector, WgpuError> {
        Ok(WgpuVector { buffer: self.gpu.upload("a vector of the picture encoder", &values)?, len: values.len() })
    }
}

/// A `BF16` matrix as `F16`, which matrix units multiply; `None` for other types, and for numbers beyond the range of 16-bit floats.
/// Numbers of at least 2^-14 stay the same, and smaller ones change by at most 2^-25.
fn as_f16(tensor: &Tensor) -> Option<Tensor> {
    if tensor.ty() != TensorType::BF16 {
        return None;
    }
    let values = tensor.to_f32();
    if values.iter().any(|v| v.abs() > f16::MAX.to_f32()) {
        return None;
    }
    let bytes: Vec<u8> = values.iter().flat_map(|&v| f16::from_f32(v).to_le_bytes()).collect();
    Some(Tensor::in_memory(tensor.name(), [tensor.row_len(), tensor.n_rows()], TensorType::F16, &bytes))
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    fn narrowed(values: [f32; 4]) -> Option<Vec<f32>> {
        let bytes: Vec<u8> = values.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()).collect();
        as_f16(&Tensor::in_memory("w", [2, 2], TensorType::BF16, &bytes)).map(|tensor| tensor.to_f32())
    }

    #[test]
    fn bf16_matrices_within_the_range_of_f16_keep_their_numbers() {
        let kept = [0.0, -1.9921875, 2.0_f32.powi(-14), 65280.0];
        assert_eq!(narrowed(kept), Some(kept.to_vec()));
        let changed = narrowed([1e-6, -1e-9, 1.0, -3.0]).unwrap();
        assert!((changed[0] - 1e-6).abs() < 2.0_f32.powi(-25) && changed[1] == 0.0, "{changed:?}");
        assert_eq!(narrowed([1.0, 65536.0, 0.0, 0.0]), None);
        assert!(as_f16(&Tensor::in_memory("w", [1, 1], TensorType::F32, &[0; 4])).is_none());
    }
}
