//! The convolutions around a mixer or a feed-forward within blocks (DFlash-2).

use metal_attention_model::BlockConvSpec;

use crate::device::WgpuDevice;
use crate::dispatch::{AccessRange, Dispatch, GridExtent};
use crate::error::WgpuError;
use crate::pipelines::PipelineKey;

/// Channels of a workgroup.
const THREADS: usize = 64;

/// The sizes of [`block_conv`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockConvShape {
    /// Channels.
    pub n: usize,
    /// Taps.
    pub n_tap: usize,
    /// Channels that share the taps of a token; divides `n`.
    pub group_size: usize,
    /// Which of a part's convolutions: 0 that of its input, 1 that of its result.
    pub side: usize,
}

impl BlockConvShape {
    /// The convolution `side` of `spec` over rows of `n` channels.
    pub fn new(spec: BlockConvSpec, n: usize, side: usize) -> Self {
        Self { n, n_tap: spec.n_tap, group_size: spec.group_size, side }
    }

    /// Elements of a token's taps, of both sides.
    pub fn n_taps(&self) -> usize {
        2 * self.n_tap * (self.n / self.group_size)
    }

    fn key(&self) -> PipelineKey {
        PipelineKey::new(
            "block_conv",
            [
                ("n", self.n.into()),
                ("n_tap", self.n_tap.into()),
                ("group_size", self.group_size.into()),
                ("side", self.side.into()),
                ("threads", THREADS.into()),
            ],
        )
    }
}

/// The buffers of [`block_conv`].
#[derive(Debug, Clone, Copy)]
pub struct BlockConvBuffers<'a> {
    /// F32 `[n_tokens, n]`: what is convolved.
    pub x: &'a wgpu::Buffer,
    /// F32 `[2, n_tap, n]`: the part of the taps that all tokens share.
    pub base: &'a wgpu::Buffer,
    /// F32 `[n_tokens, 2, n_tap, n / group_size]`: the part of each token.
    pub taps: &'a wgpu::Buffer,
    /// F32 `[n_tokens, n]`: receives the result.
    pub y: &'a wgpu::Buffer,
    /// The batch, in which the tokens of each sequence are a block.
    pub batch: &'a wgpu::Buffer,
}

/// `y[t][c] = sum over k of (base[side][k][c] + taps[t][side][k][c / group_size]) * x[t - k][c]` within blocks.
pub fn block_conv(gpu: &WgpuDevice, shape: BlockConvShape, b: &BlockConvBuffers<'_>) -> Result<Dispatch, WgpuError> {
    let row = |n: usize| AccessRange::Tokens(4 * n as u64);
    let buffers: [(&dyn crate::Bind, AccessRange); 5] = [
        (b.x, row(shape.n)),
        (b.base, AccessRange::floats(2 * shape.n_tap * shape.n)),
        (b.taps, row(shape.n_taps())),
        (b.y, row(shape.n)),
        (b.batch, AccessRange::Batch),
    ];
    let grid = [GridExtent::Fixed(shape.n.div_ceil(THREADS) as u32), GridExtent::Tokens(1), GridExtent::Fixed(1)];
    Dispatch::new(gpu, &shape.key(), &buffers, grid)
}

/// The scalar twin for one block: `x` is `[n_tokens, n]`, `taps` `[n_tokens, 2, n_tap, n / group_size]`.
pub fn block_conv_twin(shape: BlockConvShape, x: &[f32], base: &[f32], taps: &[f32]) -> Vec<f32> {
    let BlockConvShape { n, n_tap, group_size, side } = shape;
    let tap = |t: usize, k: usize, c: usize| {
        let of_token = taps[t * shape.n_taps() + (side * n_tap + k) * (n / group_size) + c / group_size];
        f64::from(base[(side * n_tap + k) * n + c]) + f64::from(of_token)
    };
    let sum = |t: usize, c: usize| -> f64 {
        (0..n_tap.min(t + 1)).map(|k| tap(t, k, c) * f64::from(x[(t - k) * n + c])).sum()
    };
    (0..x.len()).map(|i| sum(i / n, i % n) as f32).collect()
}

pub(crate) fn catalogue() -> Vec<PipelineKey> {
    vec![BlockConvShape { n: 576, n_tap: 3, group_size: 64, side: 1 }.key()]
}
