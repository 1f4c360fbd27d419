//! Weights of dense feed-forwards.

use metal_attention_model::{Dense, DenseWeights, Linear};

use super::{CudaLinear, Loader};
use crate::CudaError;
use crate::matrix::CudaMatrix;
use crate::parts::activation_code;

/// A gated feed-forward.
#[derive(Debug)]
pub(crate) struct CudaDense {
    pub(crate) gate: CudaMatrix,
    pub(crate) up: CudaMatrix,
    pub(crate) down: CudaLinear,
    pub(crate) activation: u32,
}

impl Loader<'_> {
    pub(super) fn dense(&mut self, of: &Dense, w: &DenseWeights) -> Result<CudaDense, CudaError> {
        let unsupported = |part| CudaError::UnsupportedPart { part };
        let DenseWeights { gate: Some(gate), up, down } = w else {
            return Err(unsupported("feed-forwards without a gate"));
        };
        if gate.weight.ty() != up.weight.ty() {
            return Err(unsupported("gate and up of unlike types"));
        }
        Ok(CudaDense {
            gate: self.gate(gate)?,
            up: self.gate(up)?,
            down: self.linear(down)?,
            activation: activation_code(of.activation).map_err(unsupported)?,
        })
    }

    /// A matrix whose product goes through a gate, where nothing is added.
    fn gate(&mut self, linear: &Linear) -> Result<CudaMatrix, CudaError> {
        if linear.bias.is_some() {
            return Err(CudaError::UnsupportedPart { part: "biases of gates" });
        }
        self.matrix(linear)
    }
}
