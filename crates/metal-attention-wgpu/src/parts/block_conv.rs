//! The convolutions around a mixer or a feed-forward within blocks (DFlash-2).

use metal_attention_model::{BlockConvSpec, BlockConvWeights};
use wgpu::Buffer;

use crate::activations::{ActivationWidths, widen};
use crate::kernels::{self, BlockConvBuffers, BlockConvShape, MatvecOutput};
use crate::plan::{BranchInput, BranchOutput, LinearProduct, PlanBuilder};
use crate::weights::{Uploads, WgpuLinear, concat};
use crate::{Dispatch, WgpuDevice, WgpuError};

/// The convolutions with their weights.
#[derive(Debug)]
pub(crate) struct WgpuBlockConv {
    spec: BlockConvSpec,
    /// The part of the taps that all tokens share, F32 `[2, n_tap, n_embd]`.
    base: Buffer,
    /// From the normed input to the part of each token.
    proj: WgpuLinear,
}

/// Widens the scratch buffers.
pub(super) fn widen_for_block_conv(widths: &mut ActivationWidths, spec: &BlockConvSpec, n_embd: usize) {
    widen(&mut widths.block_taps, 2 * spec.n_taps_of_side(n_embd));
    widen(&mut widths.convolved, n_embd);
}

impl WgpuBlockConv {
    /// Uploads the weights.
    pub(super) fn new(gpu: &WgpuDevice, w: &BlockConvWeights, uploads: &mut Uploads) -> Result<Self, WgpuError> {
        Ok(Self {
            spec: w.spec,
            base: gpu.upload("the taps of a convolution", &w.base)?,
            proj: concat(gpu, "the projection to taps", &[&w.proj], uploads)?,
        })
    }
}

impl<'a> PlanBuilder<'a> {
    /// Appends the taps of a part's input, and the convolution of the input.
    pub(crate) fn convolve_input(
        &self,
        dispatches: &mut Vec<Dispatch>,
        conv: &'a WgpuBlockConv,
        input: BranchInput<'a>,
    ) -> Result<BranchInput<'a>, WgpuError> {
        let rows = self.rows_of(dispatches, input)?;
        let taps = LinearProduct::new(&conv.proj, MatvecOutput::Store, rows, &self.scratch.block_taps);
        self.multiply(dispatches, taps)?;
        dispatches.push(self.block_conv(conv, 0, rows)?);
        Ok(BranchInput::Rows(&self.scratch.convolved))
    }

    /// Appends the products of a part's result, and its convolution, with the taps that are there since the part's input.
    pub(crate) fn convolve_output(
        &self,
        dispatches: &mut Vec<Dispatch>,
        conv: &'a WgpuBlockConv,
        output: BranchOutput<'a>,
    ) -> Result<BranchOutput<'a>, WgpuError> {
        let result = &self.scratch.result;
        let rows = match output {
            BranchOutput::Products(products) => {
                self.multiply_to(dispatches, products, result, false)?;
                result
            }
            BranchOutput::Sum(rows) => rows,
            BranchOutput::Added => return Ok(BranchOutput::Added),
        };
        dispatches.push(self.block_conv(conv, 1, rows)?);
        Ok(BranchOutput::Sum(&self.scratch.convolved))
    }

    /// The convolution of `rows`, to `convolved`.
    fn block_conv(&self, conv: &WgpuBlockConv, side: usize, rows: &Buffer) -> Result<Dispatch, WgpuError> {
        let shape = BlockConvShape::new(conv.spec, self.spec.n_embd, side);
        let scratch = self.scratch;
        let buffers = BlockConvBuffers {
            x: rows,
            base: &conv.base,
            taps: &scratch.block_taps,
            y: &scratch.convolved,
            batch: self.batch,
        };
        kernels::block_conv(self.gpu, shape, &buffers)
    }
}
