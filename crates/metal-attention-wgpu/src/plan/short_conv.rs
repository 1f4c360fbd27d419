//! Gated short convolutions (LFM2), whose last inputs are a recurrent state.

use metal_attention_model::ShortConvSpec;
use wgpu::Buffer;

use super::{Input, PlanBuilder, Product};
use crate::kernels::{self, MatvecOutput, ShortConvBuffers};
use crate::weights::WgpuLinear;
use crate::{Dispatch, WgpuError};

impl PlanBuilder<'_> {
    /// Both gates and the convolution of layer `i`, up to the row that the output matrix multiplies.
    pub(super) fn short_conv(
        &self,
        d: &mut Vec<Dispatch>,
        i: usize,
        of: ShortConvSpec,
        linear: &WgpuLinear,
        taps: &Buffer,
        input: Input<'_>,
    ) -> Result<(), WgpuError> {
        let s = self.s;
        self.product_of(d, input, Product::new(linear, MatvecOutput::Store, &s.x, &s.qkv))?;
        let buffers = ShortConvBuffers {
            inputs: &s.qkv,
            taps,
            states: self.states.of_layer(i),
            out: &s.att,
            segments: self.states.segments(),
        };
        d.push(kernels::short_conv(self.gpu, of, self.states.n_slots(), &buffers)?);
        Ok(())
    }
}
