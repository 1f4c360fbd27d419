//! The short causal convolution of each channel, before a recurrence.

use super::bindings::{self, Bindings, ColumnRange, RecurrentBinding, StateRange};
use crate::arena::Bind;
use crate::device::WgpuDevice;
use crate::dispatch::{Dispatch, GridExtent};
use crate::error::WgpuError;
use crate::pipelines::PipelineKey;

/// Tokens of an invocation.
const TOKENS: u32 = 16;
const THREADS: usize = 64;

/// The sizes of [`convolution`], and where its rows and states are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConvolutionShape {
    /// Channels.
    pub channels: usize,
    /// Tokens that a result depends on, its own included.
    pub width: usize,
    /// Whether channels have a bias.
    pub bias: bool,
    /// Whether SiLU is applied to the result.
    pub silu: bool,
    /// The inputs, `[channels]`.
    pub x: ColumnRange,
    /// The results, `[channels]`.
    pub out: ColumnRange,
    /// The last `width - 1` inputs, the oldest first, `[width - 1, channels]`.
    pub states: StateRange,
}

/// The buffers of [`convolution`].
#[derive(Debug, Clone, Copy)]
pub struct ConvolutionBuffers<'a> {
    /// The inputs of each token.
    pub x: &'a dyn Bind,
    /// `[width, channels]`, the token's own last.
    pub taps: &'a dyn Bind,
    /// `[channels]`
    pub bias: Option<&'a dyn Bind>,
    /// The states.
    pub states: &'a dyn Bind,
    /// Receives the results of each token.
    pub out: &'a dyn Bind,
    /// The words of [`segment_words`](super::segment_words).
    pub segments: &'a dyn Bind,
}

impl ConvolutionShape {
    fn bindings(&self) -> Bindings {
        let kept = self.width.saturating_sub(1).saturating_mul(self.channels);
        let mut bindings = vec![
            ("segments", RecurrentBinding::Segments),
            ("x", RecurrentBinding::Rows(self.x, self.channels)),
            ("taps", RecurrentBinding::Floats(self.width.saturating_mul(self.channels))),
            ("out", RecurrentBinding::Results(self.out, self.channels)),
        ];
        if self.width > 1 {
            bindings.push(("state", RecurrentBinding::States(self.states, kept)));
        }
        if self.bias {
            bindings.push(("bias", RecurrentBinding::Floats(self.channels)));
        }
        bindings
    }

    fn key(&self) -> PipelineKey {
        let constants = vec![
            ("channels", self.channels.into()),
            ("width", self.width.into()),
            ("bias", self.bias.into()),
            ("silu", self.silu.into()),
            ("tokens", TOKENS.into()),
            ("threads", THREADS.into()),
        ];
        bindings::key("recurrent/convolution", &self.bindings(), constants)
    }
}

/// `out[t][c] = f(bias[c] + sum over j < width of taps[j][c] * x[t - (width - 1) + j][c])` for all tokens of the
/// batch's first `runs` runs, each starting from its state. Also writes the states after each segment. Widths are 1 to
/// [`MAX_WIDTH`](ConvolutionShape::MAX_WIDTH).
pub fn convolution(
    gpu: &WgpuDevice,
    shape: &ConvolutionShape,
    b: &ConvolutionBuffers<'_>,
    runs: GridExtent,
) -> Result<Dispatch, WgpuError> {
    if !(1..=ConvolutionShape::MAX_WIDTH).contains(&shape.width) || shape.bias != b.bias.is_some() {
        let why = format!("{shape:?} with{} a bias", if b.bias.is_some() { "" } else { "out" });
        return Err(WgpuError::Mismatch { what: "a convolution".into(), why });
    }
    let mut buffers = vec![b.segments, b.x, b.taps, b.out];
    buffers.extend((shape.width > 1).then_some(b.states));
    buffers.extend(b.bias);
    let columns = GridExtent::Fixed(shape.channels.div_ceil(THREADS) as u32);
    bindings::dispatch(gpu, &shape.key(), &shape.bindings(), &buffers, [columns, runs, GridExtent::Tokens(TOKENS)])
}

impl ConvolutionShape {
    /// The largest width: the tokens of an invocation, so that only the first one of a run reads the state.
    pub const MAX_WIDTH: usize = TOKENS as usize;
}

/// The scalar twin for consecutive tokens of one sequence: the results `[n_tokens, channels]` for `x`,
/// `[n_tokens, channels]`. `state`, `[width - 1, channels]`, is replaced by that after them.
pub fn convolution_twin(
    shape: &ConvolutionShape,
    x: &[f64],
    taps: &[f64],
    bias: Option<&[f64]>,
    state: &mut Vec<f64>,
) -> Vec<f64> {
    let channels = shape.channels;
    state.extend(x);
    let sum = |t: usize, c: usize| {
        let products = (0..shape.width).map(|j| taps[j * channels + c] * state[(t + j) * channels + c]);
        let sum = products.sum::<f64>() + bias.map_or(0.0, |bias| bias[c]);
        if shape.silu { sum / (1.0 + (-sum).exp()) } else { sum }
    };
    let out = (0..x.len()).map(|i| sum(i / channels, i % channels)).collect();
    state.drain(..x.len());
    out
}

pub(crate) fn catalogue() -> Vec<PipelineKey> {
    let states = StateRange { n_slots: 4, stride: 3 * 6144 + 16 * 128 * 128, at: 0 };
    let (x, out) = (ColumnRange::whole(6144), ColumnRange::whole(6144));
    vec![ConvolutionShape { channels: 6144, width: 4, bias: true, silu: true, x, out, states }.key()]
}
