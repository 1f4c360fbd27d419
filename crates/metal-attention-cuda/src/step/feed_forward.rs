//! Dense feed-forwards.

use super::layer::Given;
use super::product::{Input, Product};
use super::{Step, Steps};
use crate::CudaError;
use crate::args::Output;
use crate::weights::CudaDense;

impl Steps {
    /// `down` and what it multiplies, `activation(gate(input)) * up(input)`.
    pub(super) fn dense<'w>(&mut self, step: Step<'_>, w: &'w CudaDense, input: Input) -> Result<Given<'w>, CudaError> {
        let n = step.size.n_tokens;
        let gated = Product {
            what: "gate and up",
            parts: vec![(&w.gate, 0), (&w.up, 0)],
            n_out: w.up.n_rows,
            output: Output::Gated,
            activation: w.activation,
            scale: 1.0,
            bias: 0,
            y: self.s.gated.ptr(),
            packed: self.s.packed_gated.ptr(),
        };
        self.product(&gated, input, step.spec.n_embd, n)?;
        let input = self.input(&self.s.gated, &self.s.packed_gated, n);
        Ok(Given::Product { what: "down", linear: &w.down, input })
    }
}
