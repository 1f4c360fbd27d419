//! Gated short convolutions (LFM2): `C * conv(B * x)`. The recurrent state is the convolution's last inputs.

use metal_attention_model::ShortConvSpec;
use wgpu::Buffer;

use super::{BranchInput, PlanBuilder};
use crate::kernels::{self, MatvecOutput, ShortConvBuffers};
use crate::weights::WgpuLinear;
use crate::{Dispatch, WgpuError};

impl PlanBuilder<'_> {
    /// Appends the gated convolution of layer `i`: `qkv = linear(input)` holds B, C and x of each token; the result is
    /// in `mixer_out`.
    pub(super) fn short_conv(
        &self,
        dispatches: &mut Vec<Dispatch>,
        i: usize,
        shape: ShortConvSpec,
        linear: &WgpuLinear,
        taps: &Buffer,
        input: BranchInput<'_>,
    ) -> Result<(), WgpuError> {
        let scratch = self.scratch;
        self.multiply_branch_input(dispatches, input, linear, MatvecOutput::Store, &scratch.projected)?;
        let buffers = ShortConvBuffers {
            inputs: &scratch.projected,
            taps,
            states: self.states.of_layer(i),
            out: &scratch.mixer_out,
            segments: self.states.segments(),
        };
        dispatches.push(kernels::short_conv(self.gpu, shape, self.states.n_slots(), &buffers)?);
        Ok(())
    }
}
