//! The state space of Mamba-2 (arXiv 2405.21060), with its gate.

use super::bindings::{self, Bindings, ColumnRange, RecurrentBinding, StateRange};
use super::heads::{HeadShape, HeadTile};
use crate::arena::Bind;
use crate::device::WgpuDevice;
use crate::dispatch::{Dispatch, GridExtent};
use crate::error::WgpuError;
use crate::pipelines::PipelineKey;

/// The sizes of [`mamba2`], and where its rows and states are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mamba2Shape {
    /// Heads.
    pub n_head: usize,
    /// Groups of heads that share B and C; divides `n_head`.
    pub n_group: usize,
    /// Elements of B and C.
    pub d_state: usize,
    /// Elements of a head's input.
    pub head_dim: usize,
    /// Inputs `[n_head, head_dim]`, then B `[n_group, d_state]` and C `[n_group, d_state]`.
    pub x: ColumnRange,
    /// B and C, if they are elsewhere and not convolved.
    pub bc: Option<ColumnRange>,
    /// Step sizes before bias and softplus, `[n_head]`.
    pub dt: ColumnRange,
    /// The gate, whose SiLU multiplies the results, `[n_head, head_dim]`; `None`: there is none.
    pub gate: Option<ColumnRange>,
    /// Results, `[n_head, head_dim]`.
    pub out: ColumnRange,
    /// States, `[n_head, d_state, head_dim]`.
    pub states: StateRange,
}

/// The convolution before the recurrence in [`mamba2_step`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mamba2Step {
    /// Tokens that a result of the convolution depends on.
    pub width: usize,
    /// Whether the convolution has a bias.
    pub bias: bool,
    /// The first element of the convolution's last inputs, `[width - 1, channels]`, in a slot of the states.
    pub convolution_at: usize,
}

/// The buffers of [`mamba2`].
#[derive(Debug, Clone, Copy)]
pub struct Mamba2Buffers<'a> {
    /// The results of the convolution, or for [`mamba2_step`] its inputs.
    pub x: &'a dyn Bind,
    /// B and C, if they are not in `x`.
    pub bc: Option<&'a dyn Bind>,
    /// Step sizes.
    pub dt: &'a dyn Bind,
    /// Biases of the step sizes, `[n_head]`.
    pub dt_bias: &'a dyn Bind,
    /// Decay rates A, `[n_head]`, negative, as in the file.
    pub a: &'a dyn Bind,
    /// Skip factors D, `[n_head]`.
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

/// The other buffers of [`mamba2_step`].
#[derive(Debug, Clone, Copy)]
pub struct Mamba2StepBuffers<'a> {
    /// Taps, `[width, channels]`, the token's own last.
    pub taps: &'a dyn Bind,
    /// Bias of the convolution, `[channels]`.
    pub bias: Option<&'a dyn Bind>,
    /// Counters, `[n_group]` for each run, zero before and after each dispatch.
    pub tickets: &'a dyn Bind,
}

impl Mamba2Shape {
    /// Channels of the convolution.
    pub fn channels(&self) -> usize {
        self.n_head * self.head_dim + 2 * self.n_group * self.d_state
    }

    /// Elements of a state's matrices.
    pub fn state_elements(&self) -> usize {
        self.n_head * self.d_state * self.head_dim
    }

    fn head(&self) -> HeadShape {
        HeadShape { key_dim: self.d_state, value_dim: self.head_dim, n_vectors: 2, n_values: 1, n_sums: 2 }
    }

    fn share(&self) -> usize {
        self.n_head / self.n_group.max(1)
    }

    fn bindings(&self, step: Option<&Mamba2Step>) -> Bindings {
        let n = self.n_head * self.head_dim;
        let mut bindings = vec![
            ("segments", RecurrentBinding::Segments),
            ("x", RecurrentBinding::Rows(self.x, if self.bc.is_some() { n } else { self.channels() })),
            ("dt", RecurrentBinding::Rows(self.dt, self.n_head)),
            ("dt_bias", RecurrentBinding::Floats(self.n_head)),
            ("a", RecurrentBinding::Floats(self.n_head)),
            ("d", RecurrentBinding::Floats(self.n_head)),
            ("state", RecurrentBinding::States(self.states, self.state_elements())),
            ("out", RecurrentBinding::Results(self.out, n)),
        ];
        bindings.extend(self.gate.map(|gate| ("gate", RecurrentBinding::Rows(gate, n))));
        bindings.extend(self.bc.map(|bc| ("bc", RecurrentBinding::Rows(bc, 2 * self.n_group * self.d_state))));
        if let Some(step) = step {
            bindings.push(("taps", RecurrentBinding::Floats(step.width * self.channels())));
            if self.share() > 1 {
                bindings.push(("tickets", RecurrentBinding::Counters(self.n_group)));
            }
            if step.bias {
                bindings.push(("bias", RecurrentBinding::Floats(self.channels())));
            }
        }
        bindings
    }

    fn key(&self, step: Option<&Mamba2Step>, tile: HeadTile) -> PipelineKey {
        let mut constants = self.head().constants(tile);
        constants.extend([
            ("gates", true.into()),
            ("convolved", true.into()),
            ("fused", step.is_some().into()),
            ("n_head", self.n_head.into()),
            ("n_group", self.n_group.into()),
            ("gated", self.gate.is_some().into()),
            ("own_bc", self.bc.is_some().into()),
        ]);
        if let Some(step) = step {
            constants.extend([
                ("channels", self.channels().into()),
                ("width", step.width.into()),
                ("bias", step.bias.into()),
                ("state_stride", self.states.stride.into()),
                ("convolution_at", step.convolution_at.into()),
                ("share", self.share().into()),
                ("n_shared", self.n_group.into()),
            ]);
        }
        let key = bindings::key("recurrent/mamba2", &self.bindings(step), constants);
        if step.is_some() { key.named("mamba2_step") } else { key }
    }

    fn check(&self, b: &Mamba2Buffers<'_>) -> Result<(), WgpuError> {
        let sizes = [self.n_head, self.n_group, self.d_state, self.head_dim];
        let there = self.gate.is_some() == b.gate.is_some() && self.bc.is_some() == b.bc.is_some();
        if sizes.contains(&0) || !self.n_head.is_multiple_of(self.n_group) || !there {
            return Err(WgpuError::Mismatch { what: "a Mamba-2 layer".into(), why: format!("{self:?}") });
        }
        Ok(())
    }
}

impl<'a> Mamba2Buffers<'a> {
    fn all(&self) -> Vec<&'a dyn Bind> {
        let mut all = vec![self.segments, self.x, self.dt, self.dt_bias, self.a, self.d, self.states, self.out];
        all.extend(self.gate);
        all.extend(self.bc);
        all
    }
}

/// For each head and each token of the batch's first `runs` runs, with `dt` after bias and softplus:
/// `S = exp(dt A) S + dt B^T x; out = (C S + D x) SiLU(gate)`.
pub fn mamba2(
    gpu: &WgpuDevice,
    shape: &Mamba2Shape,
    b: &Mamba2Buffers<'_>,
    runs: GridExtent,
) -> Result<Dispatch, WgpuError> {
    shape.check(b)?;
    let tile = shape.head().scan();
    let columns = GridExtent::Fixed((shape.n_head * shape.head_dim.div_ceil(tile.columns)) as u32);
    bindings::dispatch(
        gpu,
        &shape.key(None, tile),
        &shape.bindings(None),
        &b.all(),
        [columns, runs, GridExtent::Fixed(1)],
    )
}

/// The convolution of `x` with SiLU and [`mamba2`] of its results in one dispatch, for runs of few tokens. `None` if a
/// head does not fit a workgroup.
pub fn mamba2_step(
    gpu: &WgpuDevice,
    shape: &Mamba2Shape,
    step: &Mamba2Step,
    b: &Mamba2Buffers<'_>,
    with: &Mamba2StepBuffers<'_>,
    runs: GridExtent,
) -> Result<Option<Dispatch>, WgpuError> {
    shape.check(b)?;
    let kept = step.width.saturating_sub(1).saturating_mul(shape.channels());
    let beyond = step.convolution_at.checked_add(kept).is_none_or(|end| end > shape.states.stride);
    if step.width == 0 || beyond || step.bias != with.bias.is_some() || shape.bc.is_some() {
        let why = format!("{step:?} for slots of {} elements", shape.states.stride);
        return Err(WgpuError::Mismatch { what: "a step of a Mamba-2 layer".into(), why });
    }
    let own = (step.width - 1) * (2 * shape.d_state + shape.head_dim);
    let Some(tile) = shape.head().whole_on(gpu, own, 1) else { return Ok(None) };
    let mut buffers = b.all();
    buffers.push(with.taps);
    buffers.extend((shape.share() > 1).then_some(with.tickets));
    buffers.extend(with.bias);
    let grid = [GridExtent::Fixed(shape.n_head as u32), runs, GridExtent::Fixed(1)];
    bindings::dispatch(gpu, &shape.key(Some(step), tile), &shape.bindings(Some(step)), &buffers, grid).map(Some)
}

/// The weights of all heads for the twin, `[n_head]` each.
#[derive(Debug, Clone, Copy)]
pub struct Mamba2HeadWeights<'a> {
    /// Biases, as [`Mamba2Buffers::dt_bias`].
    pub dt_bias: &'a [f64],
    /// Decay rates, as [`Mamba2Buffers::a`].
    pub a: &'a [f64],
    /// Skip factors, as [`Mamba2Buffers::d`].
    pub d: &'a [f64],
}

/// The scalar twin for one token: from the convolution's results `x` those of all heads, `[n_head, head_dim]`, without
/// a gate. `state` is replaced by that after it.
pub fn mamba2_twin(
    shape: &Mamba2Shape,
    w: &Mamba2HeadWeights<'_>,
    x: &[f64],
    dt: &[f64],
    state: &mut [f64],
) -> Vec<f64> {
    let (x, bc) = x.split_at(shape.n_head * shape.head_dim);
    let (b, c) = bc.split_at(shape.n_group * shape.d_state);
    let mut out = Vec::new();
    for h in 0..shape.n_head {
        let dt = dt[h] + w.dt_bias[h];
        let dt = dt.max(0.0) + (-dt.abs()).exp().ln_1p();
        let group = h / shape.share() * shape.d_state;
        for i in 0..shape.head_dim {
            let x = x[h * shape.head_dim + i];
            let mut sum = w.d[h] * x;
            for s in 0..shape.d_state {
                let at = &mut state[(h * shape.d_state + s) * shape.head_dim + i];
                *at = (dt * w.a[h]).exp() * *at + dt * b[group + s] * x;
                sum += c[group + s] * *at;
            }
            out.push(sum);
        }
    }
    out
}

pub(crate) fn catalogue() -> Vec<PipelineKey> {
    let (n_head, n_group, d_state, head_dim) = (24, 1, 128, 64);
    let inner = n_head * head_dim;
    let channels = inner + 2 * n_group * d_state;
    let shape = Mamba2Shape {
        n_head,
        n_group,
        d_state,
        head_dim,
        x: ColumnRange { stride: inner + channels + n_head, first: inner },
        bc: None,
        dt: ColumnRange { stride: inner + channels + n_head, first: inner + channels },
        gate: Some(ColumnRange { stride: inner + channels + n_head, first: 0 }),
        out: ColumnRange::whole(inner),
        states: StateRange { n_slots: 4, stride: n_head * d_state * head_dim + 3 * channels, at: 0 },
    };
    let step = Mamba2Step { width: 4, bias: true, convolution_at: shape.state_elements() };
    let whole = shape.head().whole_anywhere((step.width - 1) * (2 * d_state + head_dim), 1);
    let mut keys = vec![shape.key(None, shape.head().scan())];
    keys.extend(whole.map(|tile| shape.key(Some(&step), tile)));
    keys
}
