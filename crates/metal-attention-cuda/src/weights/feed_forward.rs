//! Weights of dense feed-forwards.

use metal_attention_model::{Dense, DenseWeights};

use super::{CudaLinear, CudaVector, Loader};
use crate::CudaError;
use crate::matrix::CudaMatrix;
use crate::support::{activation_code, fuses_activation};

/// A dense feed-forward.
#[derive(Debug)]
pub(crate) struct CudaDense {
    /// The gate, where there is one, and up.
    pub(crate) gate: Option<CudaMatrix>,
    pub(crate) up: CudaMatrix,
    /// Of both one after the other.
    pub(crate) bias: Option<CudaVector>,
    pub(crate) down: CudaLinear,
    /// Its number and its parameter.
    pub(crate) activation: (u32, f32),
    /// Whether the product of gate and up goes through the activation by itself.
    pub(crate) fuses_activation: bool,
}

impl Loader<'_> {
    pub(super) fn dense(&mut self, of: &Dense, w: &DenseWeights) -> Result<CudaDense, CudaError> {
        let DenseWeights { gate, up, down } = w;
        let linears: Vec<_> = gate.iter().chain([up]).collect();
        let bias = self.biases(&linears)?;
        Ok(CudaDense {
            fuses_activation: fuses_activation(of, w),
            gate: gate.as_ref().map(|gate| self.matrix(gate)).transpose()?,
            up: self.matrix(up)?,
            bias,
            down: self.linear(down)?,
            activation: activation_code(of.activation),
        })
    }
}
