//! Gated short convolutions (LFM2), with their recurrent states.

use metal_attention_model::ShortConvSpec;

use crate::arena::Bind;
use crate::device::WgpuDevice;
use crate::dispatch::{AccessRange, Dispatch, GridExtent};
use crate::error::WgpuError;
use crate::pipelines::PipelineKey;

/// Channels of a workgroup.
const CHANNELS: usize = 64;

/// Tokens of a thread.
const TILE: u32 = 16;

/// Most taps. With no more taps than tokens of a thread, only the first thread of a run reads the state.
pub const MAX_TAPS: usize = TILE as usize;

/// The buffers of [`short_conv`].
#[derive(Debug, Clone, Copy)]
pub struct ShortConvBuffers<'a> {
    /// `[n_tokens, 3 * width]`: `b`, `c` and `x` of each token.
    pub inputs: &'a wgpu::Buffer,
    /// `[n_tap, width]`, the oldest token's first.
    pub taps: &'a wgpu::Buffer,
    /// `[n_slots, n_tap - 1, width]`: the last inputs of the convolution, the oldest first.
    pub states: &'a dyn Bind,
    /// `[n_tokens, width]`: receives the results.
    pub out: &'a wgpu::Buffer,
    /// The words of [`segment_words`](super::segment_words). A sequence has one run.
    pub segments: &'a wgpu::Buffer,
}

/// `out_t = c_t * sum_j taps[j] * (b x)_(t - n_tap + 1 + j)`; also writes the state after each segment. `n_slots`:
/// slots of the states.
pub fn short_conv(
    gpu: &WgpuDevice,
    shape: ShortConvSpec,
    n_slots: usize,
    b: &ShortConvBuffers<'_>,
) -> Result<Dispatch, WgpuError> {
    let ShortConvSpec { width, n_tap } = shape;
    if !(2..=MAX_TAPS).contains(&n_tap) {
        let why = format!("{n_tap} taps, of 2 to {MAX_TAPS}");
        return Err(WgpuError::Mismatch { what: "a short convolution".into(), why });
    }
    let row = |n: usize| AccessRange::Tokens(4 * n as u64);
    let buffers: [(&dyn Bind, AccessRange); 5] = [
        (b.inputs, row(3 * width)),
        (b.taps, AccessRange::floats(n_tap * width)),
        (b.states, AccessRange::floats(n_slots * shape.state_elements())),
        (b.out, row(width)),
        (b.segments, AccessRange::Segments),
    ];
    let grid = [GridExtent::Fixed(width.div_ceil(CHANNELS) as u32), GridExtent::Runs, GridExtent::Tokens(TILE)];
    Dispatch::new(gpu, &key(shape), &buffers, grid)
}

fn key(ShortConvSpec { width, n_tap }: ShortConvSpec) -> PipelineKey {
    PipelineKey::new(
        "short_conv",
        [("width", width.into()), ("n_tap", n_tap.into()), ("tile", TILE.into()), ("threads", CHANNELS.into())],
    )
}

/// The scalar twin for the tokens of one run: `inputs` is `[n_tokens, 3 * width]`; `state`, `[n_tap - 1, width]`, is
/// replaced by that after them.
pub fn short_conv_twin(shape: ShortConvSpec, inputs: &[f32], taps: &[f32], state: &mut Vec<f32>) -> Vec<f32> {
    let ShortConvSpec { width, n_tap } = shape;
    let mut out = Vec::new();
    for row in inputs.chunks_exact(3 * width) {
        state.extend((0..width).map(|i| row[i] * row[2 * width + i]));
        let sum = |i: usize| -> f64 {
            (0..n_tap).map(|j| f64::from(taps[j * width + i]) * f64::from(state[j * width + i])).sum()
        };
        out.extend((0..width).map(|i| (f64::from(row[width + i]) * sum(i)) as f32));
        state.drain(..width);
    }
    out
}

pub(crate) fn catalogue() -> Vec<PipelineKey> {
    vec![key(ShortConvSpec { width: 2048, n_tap: 3 })]
}
