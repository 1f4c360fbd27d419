//! Dense feed-forwards.

use super::layer::Given;
use super::product::{Input, Product};
use super::{Step, Steps};
use crate::CudaError;
use crate::args::{ActivationArgs, Output};
use crate::device::CudaBuffer;
use crate::launch::Grid;
use crate::weights::CudaDense;

/// Elements of a row that a block takes, where several share it.
const ELEMENTS_OF_A_BLOCK: usize = 2048;

impl Steps {
    /// `down` and what it multiplies, `activation(gate(input)) * up(input)`, or `activation(up(input))` without a gate.
    pub(super) fn dense<'w>(&mut self, step: Step<'_>, w: &'w CudaDense, input: Input) -> Result<Given<'w>, CudaError> {
        let (n, n_ff, n_in) = (step.size.n_tokens, w.up.n_rows, w.up.n_in);
        let (activation, parameter) = w.activation;
        let (gated, packed) = (self.s.gated.ptr(), self.s.packed_gated.ptr());
        match &w.gate {
            Some(gate) if w.on_the_way => {
                let product = Product {
                    parts: vec![(gate, 0), (&w.up, 0)],
                    output: Output::Gated,
                    activation,
                    y: gated,
                    packed,
                    ..Product::stored("gate and up", gate)
                };
                self.product(&product, input, n_in, n)?;
            }
            Some(_) | None => {
                let gate_up = self.s.gate_up.ptr();
                let parts: Vec<_> = w.gate.iter().chain([&w.up]).zip([0, n_ff]).collect();
                let stride = parts.len() * n_ff;
                let up = if w.gate.is_some() { gate_up + 4 * n_ff as u64 } else { 0 };
                let product = Product {
                    what: "gate and up",
                    n_out: stride,
                    parts,
                    bias: w.bias.as_ref().map_or(0, CudaBuffer::ptr),
                    y: gate_up,
                    ..Product::stored("", &w.up)
                };
                self.product(&product, input, n_in, n)?;
                let args = ActivationArgs {
                    gate: gate_up,
                    up,
                    out: gated,
                    packed,
                    gate_stride: stride as u32,
                    up_stride: stride as u32,
                    n_ff: n_ff as u32,
                    n_token_tiles: 0,
                    activation,
                    parameter,
                };
                self.activate(args, n)?;
            }
        }
        let input = self.input(&self.s.gated, &self.s.packed_gated, n);
        Ok(Given::Product { what: "down", linear: &w.down, input })
    }

    /// Activations of `n_tokens` rows, packed as well where products of so many tokens take them so.
    pub(super) fn activate(&mut self, args: ActivationArgs, n_tokens: usize) -> Result<(), CudaError> {
        let packed = if self.is_exact(n_tokens) { 0 } else { args.packed };
        let args = ActivationArgs { packed, n_token_tiles: self.packed_order(n_tokens), ..args };
        let blocks = (args.n_ff as usize).div_ceil(ELEMENTS_OF_A_BLOCK);
        self.launch("activation", "", Grid { blocks: [blocks, n_tokens, 1], threads: 256, shared: 0 }, &args)
    }
}
