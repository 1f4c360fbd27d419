//! The gated short convolution as a mixer (LFM2): input product, convolution between two gates, output product.

use bytemuck::Zeroable;
use metal_attention_model::ShortConvSpec;

use crate::CudaError;
use crate::args::{ConvolutionArgs, RowsArgs};
use crate::runner::layer::SublayerOutput;
use crate::runner::linear::LinearInput;
use crate::runner::{MicroBatch, ModelRunner};
use crate::weights::CudaShortConv;

/// Scratch widths: the two gates and the input; the result.
pub(crate) fn widths(spec: &ShortConvSpec) -> [usize; 2] {
    [3 * spec.width, spec.width]
}

impl ModelRunner {
    /// Launches the short convolution of layer `i`, except its output product. The layer's state is the last inputs of the
    /// convolution.
    pub(crate) fn short_conv<'w>(
        &mut self,
        batch: MicroBatch<'_>,
        i: usize,
        w: &'w CudaShortConv,
        input: LinearInput,
    ) -> Result<SublayerOutput<'w>, CudaError> {
        let spec = &w.spec;
        let [inputs, out] = self.scratch_rows(batch, widths(spec));
        self.store_all(batch, "convolution inputs", [&w.input], input, inputs)?;
        let args = ConvolutionArgs {
            x: RowsArgs::new(inputs, 3 * spec.width, 0),
            taps: w.taps.ptr(),
            out: out.ptr(),
            channels: spec.width as u32,
            n_tap: spec.n_tap as u32,
            block: spec.width as u32,
            step: spec.width as u32,
            gated: 1,
            ..ConvolutionArgs::zeroed()
        };
        self.convolution(batch, i, args)?;
        let input = self.rows_input(batch, out, spec.width, None)?;
        Ok(SublayerOutput::Product { label: "convolution output", linear: &w.out, input })
    }
}
