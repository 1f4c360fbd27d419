//! Dense feed-forwards, with or without a gate.

use metal_attention_model::{Activation, Dense, DenseWeights};

use crate::activations::{ActivationWidths, widen};
use crate::kernels::{self, Gating, MatvecOutput};
use crate::plan::{BranchInput, LastProduct, PlanBuilder};
use crate::weights::{Uploads, WgpuLinear, concat, interleave};
use crate::{Dispatch, WgpuDevice, WgpuError};

/// A dense feed-forward with its weights.
#[derive(Debug)]
pub(crate) struct WgpuDense {
    /// Its sizes and activation.
    pub(crate) spec: Dense,
    /// Gate and up with interleaved rows; up alone if there is no gate.
    pub(crate) gate_up: WgpuLinear,
    /// The down projection.
    pub(crate) down: WgpuLinear,
}

/// Widens the scratch buffers.
pub(super) fn widen_for_dense(widths: &mut ActivationWidths, spec: &Dense) {
    widen(&mut widths.gate_up, spec.n_ff * if spec.gated { 2 } else { 1 });
    widen(&mut widths.gated, spec.n_ff);
}

impl WgpuDense {
    /// Uploads the weights.
    pub(super) fn new(gpu: &WgpuDevice, w: &DenseWeights, uploads: &mut Uploads) -> Result<Self, WgpuError> {
        Ok(Self {
            spec: w.spec,
            gate_up: match &w.gate {
                Some(gate) => interleave(gpu, "gate and up", gate, &w.up, uploads)?,
                None => concat(gpu, "the up projection", &[&w.up], uploads)?,
            },
            down: concat(gpu, "the down projection", &[&w.down], uploads)?,
        })
    }
}

impl<'a> PlanBuilder<'a> {
    /// Appends a dense feed-forward up to the input of its down projection, `gated = activation(gate(input)) *
    /// up(input)`, through `gate_up` unless one product does it all.
    pub(crate) fn dense(
        &self,
        dispatches: &mut Vec<Dispatch>,
        w: &'a WgpuDense,
        input: BranchInput<'a>,
    ) -> Result<LastProduct<'a>, WgpuError> {
        let (scratch, gate_up) = (self.scratch, &w.gate_up);
        let Dense { n_ff, gated, activation, fused: _ } = w.spec;
        let last = LastProduct::new(&w.down, &scratch.gated);
        let silu = gated && activation == Activation::Silu;
        if silu && gate_up.weight.has_pairs() {
            self.multiply_branch_input(dispatches, input, gate_up, MatvecOutput::Gated, &scratch.gated)?;
            return Ok(last);
        }
        // The gated product needs gate and up rows as neighbours, of one type, and SiLU. All others store the product
        // first.
        self.multiply_branch_input(dispatches, input, gate_up, MatvecOutput::Store, &scratch.gate_up)?;
        dispatches.push(if silu {
            kernels::ffn_silu(self.gpu, n_ff, &scratch.gate_up, &scratch.gated)?
        } else {
            let gating = if gated { Gating::Pairs } else { Gating::None };
            kernels::activation(self.gpu, activation, n_ff, gating, &scratch.gate_up, &scratch.gated)?
        });
        Ok(last)
    }
}
