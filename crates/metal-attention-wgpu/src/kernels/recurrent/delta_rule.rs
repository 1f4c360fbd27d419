//! The gated delta rule (Gated `DeltaNet`, arXiv 2412.06464), and its variant with a decay for each channel (Kimi
//! Linear, arXiv 2510.26692), with the gates around it.

use super::bindings::{self, Bindings, ColumnRange, RecurrentBinding, StateRange};
use super::heads::{HeadShape, HeadTile};
use crate::arena::Bind;
use crate::device::WgpuDevice;
use crate::dispatch::{Dispatch, GridExtent};
use crate::error::WgpuError;
use crate::pipelines::PipelineKey;

/// Which key head each value head uses, if there are fewer key heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyHeads {
    /// Consecutive value heads share one: `h / (n_head / n_key_head)`.
    Grouped,
    /// Key heads repeat: `h % n_key_head`.
    InTurn,
}

/// The number of decays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DecayGranularity {
    /// One for each head.
    OfHeads,
    /// One for each channel of a head's key.
    OfChannels,
}

/// The activation of a gate that multiplies results.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GateActivation {
    /// SiLU.
    Silu,
    /// A sigmoid.
    Sigmoid,
}

/// The sizes of [`delta_rule`], and where its rows and states are.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DeltaRuleShape {
    /// Heads of values, states and gates.
    pub n_head: usize,
    /// Heads of queries and keys; divides `n_head`.
    pub n_key_head: usize,
    /// Which of them each head uses.
    pub key_heads: KeyHeads,
    /// Elements of a query and a key.
    pub key_dim: usize,
    /// Elements of a value.
    pub value_dim: usize,
    /// The number of decays.
    pub decay_of: DecayGranularity,
    /// If `Some`, queries and keys are first divided by their length, with this added to the sum of squares.
    pub l2_eps: Option<f32>,
    /// The factor on queries.
    pub scale: f32,
    /// Queries `[n_key_head, key_dim]`, keys `[n_key_head, key_dim]`, values `[n_head, value_dim]`.
    pub x: ColumnRange,
    /// Decays before bias and softplus, `[n_head]` or `[n_head, key_dim]`.
    pub decay: ColumnRange,
    /// The writing strength before its sigmoid, `[n_head]`.
    pub beta: ColumnRange,
    /// Results, `[n_head, value_dim]`.
    pub out: ColumnRange,
    /// States, `[n_head, key_dim, value_dim]`.
    pub states: StateRange,
}

/// The convolution before and the norm after the recurrence in [`delta_rule_step`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DeltaRuleStep {
    /// Tokens that a result of the convolution depends on.
    pub width: usize,
    /// Whether the convolution has a bias.
    pub bias: bool,
    /// The first element of the convolution's last inputs, `[width - 1, channels]`, in a slot of the states.
    pub convolution_at: usize,
    /// Epsilon of the norm of each head's result.
    pub norm_eps: f32,
    /// The activation of the results' gate.
    pub gate_kind: GateActivation,
    /// The gate, `[n_head, value_dim]`.
    pub gate: ColumnRange,
}

/// The buffers of [`delta_rule`].
#[derive(Debug, Clone, Copy)]
pub struct DeltaRuleBuffers<'a> {
    /// The results of the convolution, or for [`delta_rule_step`] its inputs.
    pub x: &'a dyn Bind,
    /// Decays.
    pub decay: &'a dyn Bind,
    /// Writing strengths.
    pub beta: &'a dyn Bind,
    /// Decay rates, `[n_head]`, negative, as in the file.
    pub a: &'a dyn Bind,
    /// Biases of the decays, as many as the decays of a token.
    pub decay_bias: &'a dyn Bind,
    /// The states.
    pub states: &'a dyn Bind,
    /// Receives the results.
    pub out: &'a dyn Bind,
    /// The words of [`segment_words`](super::segment_words).
    pub segments: &'a dyn Bind,
}

/// The other buffers of [`delta_rule_step`].
#[derive(Debug, Clone, Copy)]
pub struct DeltaRuleStepBuffers<'a> {
    /// Taps, `[width, channels]`, the token's own last.
    pub taps: &'a dyn Bind,
    /// Bias of the convolution, `[channels]`.
    pub bias: Option<&'a dyn Bind>,
    /// Gates of the results.
    pub gate: &'a dyn Bind,
    /// Weight of the norm, `[value_dim]`.
    pub norm_weight: &'a dyn Bind,
    /// Counters, `[n_key_head]` for each run, zero before and after each dispatch.
    pub tickets: &'a dyn Bind,
}

impl DeltaRuleShape {
    /// Channels of the convolution.
    pub fn channels(&self) -> usize {
        2 * self.n_key_head * self.key_dim + self.n_head * self.value_dim
    }

    /// Elements of a state's matrices.
    pub fn state_elements(&self) -> usize {
        self.n_head * self.key_dim * self.value_dim
    }

    fn head(&self) -> HeadShape {
        let n_vectors = match self.decay_of {
            DecayGranularity::OfHeads => 2,
            DecayGranularity::OfChannels => 3,
        };
        HeadShape { key_dim: self.key_dim, value_dim: self.value_dim, n_vectors, n_values: 1, n_sums: 5 }
    }

    fn n_decay(&self) -> usize {
        match self.decay_of {
            DecayGranularity::OfHeads => self.n_head,
            DecayGranularity::OfChannels => self.n_head * self.key_dim,
        }
    }

    fn share(&self) -> usize {
        self.n_head / self.n_key_head.max(1)
    }

    fn bindings(&self, step: Option<&DeltaRuleStep>) -> Bindings {
        let mut bindings = vec![
            ("segments", RecurrentBinding::Segments),
            ("x", RecurrentBinding::Rows(self.x, self.channels())),
            ("decay", RecurrentBinding::Rows(self.decay, self.n_decay())),
            ("beta", RecurrentBinding::Rows(self.beta, self.n_head)),
            ("a", RecurrentBinding::Floats(self.n_head)),
            ("decay_bias", RecurrentBinding::Floats(self.n_decay())),
            ("state", RecurrentBinding::States(self.states, self.state_elements())),
            ("out", RecurrentBinding::Results(self.out, self.n_head * self.value_dim)),
        ];
        if let Some(step) = step {
            bindings.push(("taps", RecurrentBinding::Floats(step.width * self.channels())));
            bindings.push(("gate", RecurrentBinding::Rows(step.gate, self.n_head * self.value_dim)));
            bindings.push(("norm_weight", RecurrentBinding::Floats(self.value_dim)));
            if self.share() > 1 {
                bindings.push(("tickets", RecurrentBinding::Counters(self.n_key_head)));
            }
            if step.bias {
                bindings.push(("bias", RecurrentBinding::Floats(self.channels())));
            }
        }
        bindings
    }

    fn key(&self, step: Option<&DeltaRuleStep>, tile: HeadTile) -> PipelineKey {
        let mut constants = self.head().constants(tile);
        constants.extend([
            ("gates", true.into()),
            ("convolved", true.into()),
            ("fused", step.is_some().into()),
            ("n_head", self.n_head.into()),
            ("n_key_head", self.n_key_head.into()),
            ("grouped", (self.key_heads == KeyHeads::Grouped).into()),
            ("by_channel", (self.decay_of == DecayGranularity::OfChannels).into()),
            ("normed", self.l2_eps.is_some().into()),
            ("eps", self.l2_eps.unwrap_or_default().into()),
            ("scale", self.scale.into()),
        ]);
        if let Some(step) = step {
            constants.extend([
                ("channels", self.channels().into()),
                ("width", step.width.into()),
                ("bias", step.bias.into()),
                ("state_stride", self.states.stride.into()),
                ("convolution_at", step.convolution_at.into()),
                ("share", self.share().into()),
                ("n_shared", self.n_key_head.into()),
                ("norm_eps", step.norm_eps.into()),
                ("silu_gate", (step.gate_kind == GateActivation::Silu).into()),
            ]);
        }
        let key = bindings::key("recurrent/delta_rule", &self.bindings(step), constants);
        if step.is_some() { key.named("delta_rule_step") } else { key }
    }

    fn check(&self) -> Result<(), WgpuError> {
        let sizes = [self.n_head, self.n_key_head, self.key_dim, self.value_dim];
        if sizes.contains(&0) || !self.n_head.is_multiple_of(self.n_key_head) {
            let why = format!("{self:?}");
            return Err(WgpuError::Mismatch { what: "a delta rule".into(), why });
        }
        Ok(())
    }
}

impl DeltaRuleBuffers<'_> {
    fn all(&self) -> [&dyn Bind; 8] {
        [self.segments, self.x, self.decay, self.beta, self.a, self.decay_bias, self.states, self.out]
    }
}

/// For each head and each token of the batch's first `runs` runs, with key `k`, query `q`, value `v`,
/// `g = exp(a softplus(decay + decay_bias))` and `b = sigmoid(beta)`:
/// `S = g S; u = b (v - k S); S = S + k^T u; out = q S`.
pub fn delta_rule(
    gpu: &WgpuDevice,
    shape: &DeltaRuleShape,
    b: &DeltaRuleBuffers<'_>,
    runs: GridExtent,
) -> Result<Dispatch, WgpuError> {
    shape.check()?;
    let tile = shape.head().scan();
    let columns = GridExtent::Fixed((shape.n_head * shape.value_dim.div_ceil(tile.columns)) as u32);
    bindings::dispatch(
        gpu,
        &shape.key(None, tile),
        &shape.bindings(None),
        &b.all(),
        [columns, runs, GridExtent::Fixed(1)],
    )
}

/// Everything between a layer's matrix products in one dispatch, for runs of few tokens: the convolution of `x` with
/// SiLU, the [`delta_rule`], and an RMSNorm of each head's result times its gate. `None` if a head does not fit a
/// workgroup.
pub fn delta_rule_step(
    gpu: &WgpuDevice,
    shape: &DeltaRuleShape,
    step: &DeltaRuleStep,
    b: &DeltaRuleBuffers<'_>,
    with: &DeltaRuleStepBuffers<'_>,
    runs: GridExtent,
) -> Result<Option<Dispatch>, WgpuError> {
    shape.check()?;
    let kept = step.width.saturating_sub(1).saturating_mul(shape.channels());
    let beyond = step.convolution_at.checked_add(kept).is_none_or(|end| end > shape.states.stride);
    if step.width == 0 || beyond || step.bias != with.bias.is_some() {
        let why = format!("{step:?} for slots of {} elements", shape.states.stride);
        return Err(WgpuError::Mismatch { what: "a step of a delta rule".into(), why });
    }
    let own = (step.width - 1) * (2 * shape.key_dim + shape.value_dim);
    let Some(tile) = shape.head().whole_on(gpu, own, 1) else { return Ok(None) };
    let mut buffers = b.all().to_vec();
    buffers.extend([with.taps, with.gate, with.norm_weight]);
    buffers.extend((shape.share() > 1).then_some(with.tickets));
    buffers.extend(with.bias);
    let grid = [GridExtent::Fixed(shape.n_head as u32), runs, GridExtent::Fixed(1)];
    bindings::dispatch(gpu, &shape.key(Some(step), tile), &shape.bindings(Some(step)), &buffers, grid).map(Some)
}

/// The inputs of the twin for one token.
#[derive(Debug, Clone, Copy)]
pub struct DeltaRuleToken<'a> {
    /// The results of the convolution.
    pub x: &'a [f64],
    /// Decays, as [`DeltaRuleShape::decay`].
    pub decay: &'a [f64],
    /// Writing strengths, as [`DeltaRuleShape::beta`].
    pub beta: &'a [f64],
    /// Decay rates, as [`DeltaRuleBuffers::a`].
    pub a: &'a [f64],
    /// Biases, as [`DeltaRuleBuffers::decay_bias`].
    pub decay_bias: &'a [f64],
}

/// The scalar twin for one token: the results `[n_head, value_dim]`. `state` is replaced by that after it.
pub fn delta_rule_twin(shape: &DeltaRuleShape, token: &DeltaRuleToken<'_>, state: &mut [f64]) -> Vec<f64> {
    let (key_dim, value_dim) = (shape.key_dim, shape.value_dim);
    let softplus = |x: f64| x.max(0.0) + (-x.abs()).exp().ln_1p();
    let normed = |x: &[f64]| -> Vec<f64> {
        let squares: f64 = x.iter().map(|x| x * x).sum();
        let factor = shape.l2_eps.map_or(1.0, |eps| 1.0 / (squares + f64::from(eps)).sqrt());
        x.iter().map(|x| x * factor).collect()
    };
    let (keys, values) = (shape.n_key_head * key_dim, &token.x[2 * shape.n_key_head * key_dim..]);
    let mut out = Vec::new();
    for h in 0..shape.n_head {
        let key_head = match shape.key_heads {
            KeyHeads::Grouped => h / shape.share(),
            KeyHeads::InTurn => h % shape.n_key_head,
        };
        let q = normed(&token.x[key_head * key_dim..][..key_dim]);
        let k = normed(&token.x[keys + key_head * key_dim..][..key_dim]);
        let beta = 1.0 / (1.0 + (-token.beta[h]).exp());
        let left = |i: usize| {
            let channel = match shape.decay_of {
                DecayGranularity::OfHeads => h,
                DecayGranularity::OfChannels => h * key_dim + i,
            };
            (token.a[h] * softplus(token.decay[channel] + token.decay_bias[channel])).exp()
        };
        let left: Vec<f64> = (0..key_dim).map(left).collect();
        for c in 0..value_dim {
            let at = |i: usize| (h * key_dim + i) * value_dim + c;
            (0..key_dim).for_each(|i| state[at(i)] *= left[i]);
            let read: f64 = (0..key_dim).map(|i| k[i] * state[at(i)]).sum();
            let u = beta * (values[h * value_dim + c] - read);
            (0..key_dim).for_each(|i| state[at(i)] += k[i] * u);
            out.push((0..key_dim).map(|i| q[i] * state[at(i)]).sum::<f64>() * f64::from(shape.scale));
        }
    }
    out
}

pub(crate) fn catalogue() -> Vec<PipelineKey> {
    let (n_head, dim) = (16, 128);
    let shape = DeltaRuleShape {
        n_head,
        n_key_head: n_head / 2,
        key_heads: KeyHeads::InTurn,
        key_dim: dim,
        value_dim: dim,
        decay_of: DecayGranularity::OfHeads,
        l2_eps: Some(1e-6),
        scale: 1.0,
        x: ColumnRange::whole(2 * n_head * dim),
        decay: ColumnRange::whole(n_head),
        beta: ColumnRange::whole(n_head),
        out: ColumnRange::whole(n_head * dim),
        states: StateRange { n_slots: 4, stride: n_head * dim * dim + 3 * 2 * n_head * dim, at: 0 },
    };
    let step = DeltaRuleStep {
        width: 4,
        bias: true,
        convolution_at: shape.state_elements(),
        norm_eps: 1e-6,
        gate_kind: GateActivation::Silu,
        gate: ColumnRange::whole(n_head * dim),
    };
    let by_channel =
        DeltaRuleShape { decay_of: DecayGranularity::OfChannels, decay: ColumnRange::whole(n_head * dim), ..shape };
    let whole = shape.head().whole_anywhere((step.width - 1) * 3 * dim, 1);
    let key = |shape: &DeltaRuleShape| shape.key(None, shape.head().scan());
    let mut keys = vec![key(&shape), key(&by_channel).named("delta_rule_by_channel")];
    keys.extend(whole.map(|tile| shape.key(Some(&step), tile)));
    keys
}
