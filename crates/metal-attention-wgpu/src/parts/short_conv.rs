//! Gated short convolutions (LFM2): `C * conv(B * x)`. The recurrent state is the convolution's last inputs.

use metal_attention_model::{ShortConvSpec, ShortConvWeights};
use wgpu::Buffer;

use crate::activations::{ActivationWidths, widen};
use crate::kernels::{self, MAX_TAPS, MatvecOutput, ShortConvBuffers};
use crate::plan::{BranchInput, LastProduct, PlanBuilder};
use crate::weights::{Uploads, WgpuLinear, concat};
use crate::{Dispatch, WgpuDevice, WgpuError};

/// A gated short convolution with its weights.
#[derive(Debug)]
pub(crate) struct WgpuShortConv {
    /// Its sizes.
    spec: ShortConvSpec,
    /// The projection to both gates and the convolution's input.
    input: WgpuLinear,
    /// Taps, F32 `[n_tap, width]`, the oldest token's first.
    taps: Buffer,
    /// The output projection.
    out: WgpuLinear,
}

/// Checks that the kernel supports a convolution; the error is the part that it does not.
pub(super) fn supports(spec: &ShortConvSpec) -> Result<(), &'static str> {
    let ShortConvSpec { width: _, n_tap } = *spec;
    if n_tap > MAX_TAPS { Err("short convolutions with more taps than the kernels support") } else { Ok(()) }
}

/// Widens the scratch buffers.
pub(super) fn widen_for_short_conv(widths: &mut ActivationWidths, spec: &ShortConvSpec) {
    widen(&mut widths.projected, 3 * spec.width);
    widen(&mut widths.mixer_out, spec.width);
}

impl WgpuShortConv {
    /// Uploads the weights.
    pub(super) fn new(gpu: &WgpuDevice, w: &ShortConvWeights, uploads: &mut Uploads) -> Result<Self, WgpuError> {
        Ok(Self {
            spec: w.spec,
            input: concat(gpu, "the convolution's gates and input", &[&w.input], uploads)?,
            taps: gpu.upload("the taps of a convolution", &w.taps)?,
            out: concat(gpu, "the convolution's output matrix", &[&w.out], uploads)?,
        })
    }
}

impl<'a> PlanBuilder<'a> {
    /// Appends the gated convolution of layer `i`: rows of `projected` hold B, C and x of each token; the result is in
    /// `mixer_out`.
    pub(crate) fn short_conv(
        &self,
        dispatches: &mut Vec<Dispatch>,
        i: usize,
        w: &'a WgpuShortConv,
        input: BranchInput<'a>,
    ) -> Result<LastProduct<'a>, WgpuError> {
        let scratch = self.scratch;
        self.multiply_branch_input(dispatches, input, &w.input, MatvecOutput::Store, &scratch.projected)?;
        let buffers = ShortConvBuffers {
            inputs: &scratch.projected,
            taps: &w.taps,
            states: self.states.of_layer(i),
            out: &scratch.mixer_out,
            segments: self.states.segments(),
        };
        dispatches.push(kernels::short_conv(self.gpu, w.spec, self.states.n_slots(), &buffers)?);
        Ok(LastProduct::new(&w.out, &scratch.mixer_out))
    }
}
