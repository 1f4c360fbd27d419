//! The selective scan of Mamba (arXiv 2312.00752), with the gates around it.

use super::bindings::{self, Access, Bindings, RowsAt, StatesAt};
use super::heads::Head;
use crate::arena::Bind;
use crate::device::WgpuDevice;
use crate::dispatch::{Dispatch, Extent};
use crate::error::WgpuError;
use crate::pso::PsoKey;

/// What [`mamba`] computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MambaShape {
    /// Channels.
    pub channels: usize,
    /// Elements of a channel's state.
    pub d_state: usize,
    /// `[channels]`: the results of the convolution.
    pub x: RowsAt,
    /// `[channels]`: before its bias and softplus.
    pub dt: RowsAt,
    /// `[d_state]`
    pub b: RowsAt,
    /// `[d_state]`
    pub c: RowsAt,
    /// What goes through SiLU and multiplies the results, `[channels]`.
    pub gate: Option<RowsAt>,
    /// `[channels]`
    pub out: RowsAt,
    /// `[d_state, channels]`
    pub states: StatesAt,
}

/// The buffers of [`mamba`].
#[derive(Debug, Clone, Copy)]
pub struct MambaBuffers<'a> {
    /// Rows with the inputs.
    pub x: &'a dyn Bind,
    /// Rows with dt.
    pub dt: &'a dyn Bind,
    /// Rows with B.
    pub b: &'a dyn Bind,
    /// Rows with C.
    pub c: &'a dyn Bind,
    /// `[channels]`
    pub dt_bias: &'a dyn Bind,
    /// `[d_state, channels]`, negative: the tensor of a file, which is `[channels, d_state]`, the other way round
    pub a: &'a dyn Bind,
    /// `[channels]`
    pub d: &'a dyn Bind,
    /// Rows with the gates, where there are any.
    pub gate: Option<&'a dyn Bind>,
    /// The states.
    pub states: &'a dyn Bind,
    /// Rows with the results.
    pub out: &'a dyn Bind,
    /// The words of [`segment_words`](super::segment_words).
    pub segments: &'a dyn Bind,
}

impl MambaShape {
    /// Channels are columns of one head.
    fn head(&self) -> Head {
        Head { key_dim: self.d_state, value_dim: self.channels, n_vectors: 2, n_values: 2, n_sums: 1 }
    }

    fn bindings(&self) -> Bindings {
        let mut bindings = vec![
            ("segments", Access::Segments),
            ("x", Access::Rows(self.x, self.channels)),
            ("dt", Access::Rows(self.dt, self.channels)),
            ("b", Access::Rows(self.b, self.d_state)),
            ("c", Access::Rows(self.c, self.d_state)),
            ("dt_bias", Access::Floats(self.channels)),
            ("a", Access::Floats(self.d_state * self.channels)),
            ("d", Access::Floats(self.channels)),
            ("state", Access::States(self.states, self.d_state * self.channels)),
            ("out", Access::Results(self.out, self.channels)),
        ];
        bindings.extend(self.gate.map(|gate| ("gate", Access::Rows(gate, self.channels))));
        bindings
    }

    fn key(&self) -> PsoKey {
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

/// For each channel of all tokens of the batch's first `runs` runs, with `dt` after its bias and softplus:
/// `h[s] = exp(dt A[s]) h[s] + dt B[s] x; out = (sum over s of C[s] h[s] + D x) SiLU(gate)`.
pub fn mamba(gpu: &WgpuDevice, of: &MambaShape, b: &MambaBuffers<'_>, runs: Extent) -> Result<Dispatch, WgpuError> {
    if of.channels == 0 || of.d_state == 0 || of.gate.is_some() != b.gate.is_some() {
        return Err(WgpuError::Mismatch { what: "a Mamba layer".into(), why: format!("{of:?}") });
    }
    let mut buffers = vec![b.segments, b.x, b.dt, b.b, b.c, b.dt_bias, b.a, b.d, b.states, b.out];
    buffers.extend(b.gate);
    let columns = Extent::Fixed(of.channels.div_ceil(of.head().scan().columns) as u32);
    bindings::dispatch(gpu, &of.key(), &of.bindings(), &buffers, [columns, runs, Extent::Fixed(1)])
}

/// What the twin takes of one token.
#[derive(Debug, Clone, Copy)]
pub struct MambaToken<'a> {
    /// `[channels]`
    pub x: &'a [f64],
    /// `[channels]`, before its bias and softplus
    pub dt: &'a [f64],
    /// `[d_state]`
    pub b: &'a [f64],
    /// `[d_state]`
    pub c: &'a [f64],
}

/// The scalar twin of one token, with `dt_bias`, `a` and `d` as [`MambaBuffers`] has them: the results without a gate; `state`
/// becomes that after it.
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

pub(crate) fn catalogue() -> Vec<PsoKey> {
    let (channels, d_state) = (1536, 16);
    let row = RowsAt::whole(channels);
    let of = MambaShape {
        channels,
        d_state,
        x: row,
        dt: row,
        b: RowsAt { stride: 80, at: 48 },
        c: RowsAt { stride: 80, at: 64 },
        gate: Some(RowsAt { stride: 2 * channels, at: channels }),
        out: row,
        states: StatesAt { n_slots: 4, stride: (d_state + 3) * channels, at: 3 * channels },
    };
    vec![of.key()]
}
