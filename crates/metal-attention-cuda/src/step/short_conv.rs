//! Gated short convolutions.

use bytemuck::Zeroable;
use metal_attention_model::ShortConvSpec;

use super::layer::Given;
use super::product::Input;
use super::{Step, Steps};
use crate::CudaError;
use crate::args::{ConvolutionArgs, RowsArgs};
use crate::weights::CudaShortConv;

/// Gates and input, result.
pub(super) fn widths(of: &ShortConvSpec) -> [usize; 2] {
    [3 * of.width, of.width]
}

impl Steps {
    /// The convolution of layer `i`.
    pub(super) fn short_conv<'w>(
        &mut self,
        step: Step<'_>,
        i: usize,
        w: &'w CudaShortConv,
        input: Input,
    ) -> Result<Given<'w>, CudaError> {
        let of = &w.spec;
        let [inputs, out] = self.areas(step, widths(of));
        self.store_all(step, "convolution inputs", [&w.input], input, inputs)?;
        let args = ConvolutionArgs {
            x: RowsArgs::new(inputs, 3 * of.width, 0),
            taps: w.taps.ptr(),
            out,
            channels: of.width as u32,
            n_tap: of.n_tap as u32,
            block: of.width as u32,
            step: of.width as u32,
            gated: 1,
            ..ConvolutionArgs::zeroed()
        };
        self.convolution(step, i, args)?;
        let input = self.rows_input(step, out, of.width, None)?;
        Ok(Given::Product { what: "convolution output", linear: &w.out, input })
    }
}
