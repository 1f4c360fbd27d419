//! The selective scan of Mamba (arXiv 2312.00752), with its gate.

use super::bindings::{self, Bindings, ColumnRange, RecurrentBinding, StateRange};
use super::heads::HeadShape;
use crate::arena::Bind;
use crate::device::WgpuDevice;
use crate::dispatch::{Dispatch, GridExtent};
use crate::error::WgpuError;
use crate::pipelines::PipelineKey;

/// The sizes of [`mamba`], and where its rows and states are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MambaShape {
    /// Channels.
    pub channels: usize,
    /// Elements of each channel's state.
    pub d_state: usize,
    /// Results of the convolution, `[channels]`.
    pub x: ColumnRange,
    /// Step sizes before bias and softplus, `[channels]`.
    pub dt: ColumnRange,
    /// B, `[d_state]`.
    pub b: ColumnRange,
    /// C, `[d_state]`.
    pub c: ColumnRange,
    /// The gate, whose SiLU multiplies the results, `[channels]`; `None`: there is none.
    pub gate: Option<ColumnRange>,
    /// Results, `[channels]`.
    pub out: ColumnRange,
    /// States, `[d_state, channels]`.
    pub states: StateRange,
}

/// The buffers of [`mamba`].
#[derive(Debug, Clone, Copy)]
pub struct MambaBuffers<'a> {
    /// Results of the convolution.
    pub x: &'a dyn Bind,
    /// Step sizes.
    pub dt: &'a dyn Bind,
    /// B of each token.
    pub b: &'a dyn Bind,
    /// C of each token.
    pub c: &'a dyn Bind,
    /// Biases of the step sizes, `[channels]`.
    pub dt_bias: &'a dyn Bind,
    /// Decay rates A, `[d_state, channels]`, negative: the transpose of the file's tensor.
    pub a: &'a dyn Bind,
    /// Skip factors D, `[channels]`.
    pub d: &'a dyn Bind,
    /// Gates, if there are some.
    pub gate: Option<&'a dyn Bind>,
    /// The states.
    pub states: &'a dyn Bind,
    /// Receives the results.
    pub out: &'a dyn Bind,
    /// The words of [`segment_words`](super::segment_words).
    pub segments: &'a dyn Bind,
}

impl MambaShape {
    /// The channels as the columns of one head.
    fn head(&self) -> HeadShape {
        HeadShape { key_dim: self.d_state, value_dim: self.channels, n_vectors: 2, n_values: 2, n_sums: 1 }
    }

    fn bindings(&self) -> Bindings {
        let mut bindings = vec![
            ("segments", RecurrentBinding::Segments),
            ("x", RecurrentBinding::Rows(self.x, self.channels)),
            ("dt", RecurrentBinding::Rows(self.dt, self.channels)),
            ("b", RecurrentBinding::Rows(self.b, self.d_state)),
            ("c", RecurrentBinding::Rows(self.c, self.d_state)),
            ("dt_bias", RecurrentBinding::Floats(self.channels)),
            ("a", RecurrentBinding::Floats(self.d_state * self.channels)),
            ("d", RecurrentBinding::Floats(self.channels)),
            ("state", RecurrentBinding::States(self.states, self.d_state * self.channels)),
            ("out", RecurrentBinding::Results(self.out, self.channels)),
        ];
        bindings.extend(self.gate.map(|gate| ("gate", RecurrentBinding::Rows(gate, self.channels))));
        bindings
    }

    fn key(&self) -> PipelineKey {
        let mut constants = self.head().constants(self.head().scan());
        constants.extend([
            ("gates", false.into()),
            ("convolved", false.into()),
            ("fused", false.into()),
            ("gated", self.gate.is_some().into()),
        ]);
        bindings::key("recurrent/mamba", &self.bindings(), constants)
    }
}

/// For each channel and each token of the batch's first `runs` runs, with `dt` after bias and softplus:
/// `h[s] = exp(dt A[s]) h[s] + dt B[s] x; out = (sum over s of C[s] h[s] + D x) SiLU(gate)`.
pub fn mamba(
    gpu: &WgpuDevice,
    shape: &MambaShape,
    b: &MambaBuffers<'_>,
    runs: GridExtent,
) -> Result<Dispatch, WgpuError> {
    if shape.channels == 0 || shape.d_state == 0 || shape.gate.is_some() != b.gate.is_some() {
        return Err(WgpuError::Mismatch { what: "a Mamba layer".into(), why: format!("{shape:?}") });
    }
    let mut buffers = vec![b.segments, b.x, b.dt, b.b, b.c, b.dt_bias, b.a, b.d, b.states, b.out];
    buffers.extend(b.gate);
    let columns = GridExtent::Fixed(shape.channels.div_ceil(shape.head().scan().columns) as u32);
    bindings::dispatch(gpu, &shape.key(), &shape.bindings(), &buffers, [columns, runs, GridExtent::Fixed(1)])
}

/// The inputs of the twin for one token.
#[derive(Debug, Clone, Copy)]
pub struct MambaToken<'a> {
    /// Results of the convolution, `[channels]`.
    pub x: &'a [f64],
    /// Step sizes before bias and softplus, `[channels]`.
    pub dt: &'a [f64],
    /// B, `[d_state]`.
    pub b: &'a [f64],
    /// C, `[d_state]`.
    pub c: &'a [f64],
}

/// The scalar twin for one token, with `dt_bias`, `a` and `d` as in [`MambaBuffers`]: the results without a gate,
/// `[channels]`. `state` is replaced by that after it.
pub fn mamba_twin(token: &MambaToken<'_>, dt_bias: &[f64], a: &[f64], d: &[f64], state: &mut [f64]) -> Vec<f64> {
    let channels = token.x.len();
    let of_channel = |c: usize| {
        let dt = token.dt[c] + dt_bias[c];
        let dt = dt.max(0.0) + (-dt.abs()).exp().ln_1p();
        let mut sum = d[c] * token.x[c];
        for (s, (b, of_c)) in token.b.iter().zip(token.c).enumerate() {
            let h = &mut state[s * channels + c];
            *h = (dt * a[s * channels + c]).exp() * *h + dt * b * token.x[c];
            sum += of_c * *h;
        }
        sum
    };
    (0..channels).map(of_channel).collect()
}

pub(crate) fn catalogue() -> Vec<PipelineKey> {
    let (channels, d_state) = (1536, 16);
    let row = ColumnRange::whole(channels);
    let shape = MambaShape {
        channels,
        d_state,
        x: row,
        dt: row,
        b: ColumnRange { stride: 80, first: 48 },
        c: ColumnRange { stride: 80, first: 64 },
        gate: Some(ColumnRange { stride: 2 * channels, first: channels }),
        out: row,
        states: StateRange { n_slots: 4, stride: (d_state + 3) * channels, at: 3 * channels },
    };
    vec![shape.key()]
}
