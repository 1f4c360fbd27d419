//! Weights of dense feed-forwards on the device.

use metal_attention_model::DenseWeights;

use super::{CudaLinear, CudaVector, Loader};
use crate::CudaError;
use crate::matrix::CudaMatrix;
use crate::support::{activation_code, fuses_activation};

/// A dense feed-forward, of a layer or of shared experts.
#[derive(Debug)]
pub(crate) struct CudaDense {
    /// The gate, `[n_ff, n_in]`, where there is one.
    pub(crate) gate: Option<CudaMatrix>,
    /// Up, `[n_ff, n_in]`.
    pub(crate) up: CudaMatrix,
    /// The biases of gate and up, one after the other.
    pub(crate) bias: Option<CudaVector>,
    /// Down, `[n_in, n_ff]`.
    pub(crate) down: CudaLinear,
    /// The activation, by its number in the kernels, and its parameter.
    pub(crate) activation: (u32, f32),
    /// Whether the epilogue of the product of gate and up applies the activation.
    pub(crate) fuses_activation: bool,
}

impl Loader<'_> {
    /// Uploads the weights of a dense feed-forward.
    pub(super) fn dense_of(&mut self, w: &DenseWeights) -> Result<CudaDense, CudaError> {
        let DenseWeights { spec, gate, up, down } = w;
        let linears: Vec<_> = gate.iter().chain([up]).collect();
        let bias = self.biases(&linears)?;
        Ok(CudaDense {
            fuses_activation: fuses_activation(w),
            gate: gate.as_ref().map(|gate| self.matrix(gate)).transpose()?,
            up: self.matrix(up)?,
            bias,
            down: self.linear(down)?,
            activation: activation_code(spec.activation),
        })
    }
}
