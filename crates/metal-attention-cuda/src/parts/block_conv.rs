//! The convolutions around a mixer or a feed-forward within blocks (DFlash-2).

use metal_attention_model::{BlockConvSpec, BlockConvWeights, FeedForward, LayerSpec, Mixer};

use crate::CudaError;
use crate::activations::{Widths, widen};
use crate::args::BlockConvArgs;
use crate::kernels;
use crate::launch::LaunchGrid;
use crate::runner::{MicroBatch, ModelRunner};
use crate::slice::DeviceSlice;
use crate::weights::{CudaLinear, CudaVector, Loader};

/// The convolutions with their weights.
#[derive(Debug)]
pub(crate) struct CudaBlockConv {
    spec: BlockConvSpec,
    /// The part of the taps that all tokens share, `[2, n_tap, n_embd]`.
    base: CudaVector,
    /// From the normed input to the part of each token.
    pub(crate) proj: CudaLinear,
}

/// Checks that the convolutions of a layer are around parts whose input is that of products alone.
pub(crate) fn supports(layer: &LayerSpec) -> Result<(), &'static str> {
    let is_attention = matches!(layer.mixer, Mixer::Attention(_)) || layer.mixer_conv.is_none();
    let is_dense = matches!(layer.feed_forward, FeedForward::Dense(_)) || layer.feed_forward_conv.is_none();
    if is_attention && is_dense {
        Ok(())
    } else {
        Err("convolutions around other parts than attention and dense feed-forwards")
    }
}

/// Widens the buffers of intermediate results.
pub(super) fn widen_for_block_conv(widths: &mut Widths, spec: &BlockConvSpec, n_embd: usize) {
    widen(&mut widths.block_taps, 2 * spec.n_taps_of_side(n_embd));
    widen(&mut widths.convolved, n_embd);
}

impl CudaBlockConv {
    /// Uploads the weights.
    pub(super) fn new(loader: &mut Loader<'_>, w: &BlockConvWeights) -> Result<Self, CudaError> {
        Ok(Self { spec: w.spec, base: loader.vector(&w.base)?, proj: loader.linear(&w.proj)? })
    }
}

impl ModelRunner {
    /// Launches the convolution `side` (0: of a part's input, 1: of its result) of the rows `x`, with the taps in `block_taps`. Returns
    /// its rows.
    pub(crate) fn block_conv(
        &mut self,
        batch: MicroBatch<'_>,
        conv: &CudaBlockConv,
        side: u32,
        x: DeviceSlice<f32>,
    ) -> Result<DeviceSlice<f32>, CudaError> {
        let (n, y) = (batch.spec.n_embd, self.buffers.convolved.slice());
        let args = BlockConvArgs {
            x: x.ptr(),
            base: conv.base.ptr(),
            taps: self.buffers.block_taps.ptr(),
            y: y.ptr(),
            tokens: self.buffers.tokens.ptr(),
            n: n as u32,
            n_tap: conv.spec.n_tap as u32,
            group_size: conv.spec.group_size as u32,
            side,
        };
        let grid = LaunchGrid { blocks: [n.div_ceil(256), batch.size.n_tokens, 1], threads: 256, shared: 0 };
        self.launch(kernels::BLOCK_CONV, "", grid, &args)?;
        Ok(y)
    }
}
