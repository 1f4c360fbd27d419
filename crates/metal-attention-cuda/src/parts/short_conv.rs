//! The gated short convolution as a mixer (LFM2): input product, convolution between two gates, output product.

use metal_attention_model::{ShortConvSpec, ShortConvWeights};

use crate::CudaError;
use crate::activations::Widths;
use crate::args::{ConvolutionArgs, RowsArgs};
use crate::runner::layer::SublayerOutput;
use crate::runner::linear::LinearInput;
use crate::runner::recurrence::supports_taps;
use crate::runner::{MicroBatch, ModelRunner};
use crate::weights::{CudaLinear, CudaVector, Loader};

/// A gated short convolution.
#[derive(Debug)]
pub(crate) struct CudaShortConv {
    /// Its sizes.
    spec: ShortConvSpec,
    /// Two gates and the input, `[3 * width, n_embd]`.
    input: CudaLinear,
    /// Coefficients of the convolution, those of the oldest token first, `[n_tap, width]`.
    taps: CudaVector,
    /// Output, `[n_embd, width]`.
    out: CudaLinear,
}

impl CudaShortConv {
    /// Uploads the weights.
    pub(super) fn new(loader: &mut Loader<'_>, w: &ShortConvWeights) -> Result<Self, CudaError> {
        Ok(Self {
            spec: w.spec,
            input: loader.linear(&w.input)?,
            taps: loader.vector(&w.taps)?,
            out: loader.linear(&w.out)?,
        })
    }
}

/// Checks that there are kernels for a short convolution; the error is the part without one.
pub(crate) fn supports(spec: &ShortConvSpec) -> Result<(), &'static str> {
    supports_taps(spec.n_tap)
}

/// Widens the buffers of intermediate results.
pub(super) fn widen_for_short_conv(widths: &mut Widths, spec: &ShortConvSpec) {
    widths.widen_scratch_rows(scratch_widths(spec));
}

/// Scratch widths: the two gates and the input; the result.
fn scratch_widths(spec: &ShortConvSpec) -> [usize; 2] {
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
        let [inputs, out] = self.scratch_rows(batch, scratch_widths(spec));
        self.store_all(batch, "convolution inputs", [&w.input], input, inputs)?;
        let x = RowsArgs::new(inputs, 3 * spec.width, 0);
        let args = ConvolutionArgs {
            gated: 1,
            ..ConvolutionArgs::of_channels(x, w.taps.ptr(), out.ptr(), spec.width, spec.n_tap)
        };
        self.convolution(batch, i, args)?;
        let input = self.rows_input(batch, out, spec.width, None)?;
        Ok(SublayerOutput::Product { label: "convolution output", linear: &w.out, input })
    }
}
