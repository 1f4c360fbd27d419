//! The gated delta rule (Gated `DeltaNet`, arXiv 2412.06464), and the one whose channels decay by themselves (Kimi Linear,
//! arXiv 2510.26692), with the gates around it.

use super::bindings::{self, Bindings, RecurrentBinding, StridedRows, StridedStates};
use super::heads::{HeadShape, HeadTile};
use crate::arena::Bind;
use crate::device::WgpuDevice;
use crate::dispatch::{Dispatch, GridExtent};
use crate::error::WgpuError;
use crate::pipelines::PipelineKey;

/// Which key head a value head reads, where there are fewer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyHeads {
    /// Value heads that follow each other share one: `h / (n_head / n_key_head)`.
    Grouped,
    /// Value heads take turns: `h % n_key_head`.
    InTurn,
}

/// What decays by a gate of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DecayGranularity {
    /// A head.
    OfHeads,
    /// Each channel of a head's key.
    OfChannels,
}

/// What the gate of a result goes through before it multiplies it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GateActivation {
    /// SiLU.
    Silu,
    /// A sigmoid.
    Sigmoid,
}

/// What [`delta_rule`] computes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DeltaRuleShape {
    /// Heads of the value, of states, of gates.
    pub n_head: usize,
    /// Heads of queries and keys, a divisor.
    pub n_key_head: usize,
    /// Which of them a head reads.
    pub key_heads: KeyHeads,
    /// Elements of a query and a key.
    pub key_dim: usize,
    /// Elements of a value.
    pub value_dim: usize,
    /// What decays.
    pub decay_of: DecayGranularity,
    /// Queries and keys are divided by their length first, with this added to the sum of squares; `None`: they are as they are.
    pub l2_eps: Option<f32>,
    /// Factor on queries.
    pub scale: f32,
    /// `[n_key_head, key_dim]` queries, as many keys, `[n_head, value_dim]` values.
    pub x: StridedRows,
    /// `[n_head]`, or `[n_head, key_dim]`: before its bias and softplus.
    pub decay: StridedRows,
    /// `[n_head]`: before its sigmoid.
    pub beta: StridedRows,
    /// `[n_head, value_dim]`
    pub out: StridedRows,
    /// `[n_head, key_dim, value_dim]`
    pub states: StridedStates,
}

/// What else [`delta_rule_step`] computes: the convolution before and the norm after.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DeltaRuleStep {
    /// Tokens that a result of the convolution sees.
    pub width: usize,
    /// Whether channels have a bias.
    pub bias: bool,
    /// The first element of the convolution's last inputs in a slot of the states, `[width - 1, channels]`.
    pub convolution_at: usize,
    /// Of the norm of each head's result.
    pub norm_eps: f32,
    /// What the gate goes through.
    pub gate_kind: GateActivation,
    /// `[n_head, value_dim]`
    pub gate: StridedRows,
}

/// The buffers of [`delta_rule`].
#[derive(Debug, Clone, Copy)]
pub struct DeltaRuleBuffers<'a> {
    /// Rows with the results of the convolution, or for [`delta_rule_step`] its inputs.
    pub x: &'a dyn Bind,
    /// Rows with the gates of decays.
    pub decay: &'a dyn Bind,
    /// Rows with the writing strengths.
    pub beta: &'a dyn Bind,
    /// `[n_head]`, negative, as files hold it
    pub a: &'a dyn Bind,
    /// As many as `decay` has
    pub decay_bias: &'a dyn Bind,
    /// The states.
    pub states: &'a dyn Bind,
    /// Rows with the results.
    pub out: &'a dyn Bind,
    /// The words of [`segment_words`](super::segment_words).
    pub segments: &'a dyn Bind,
}

/// The other buffers of [`delta_rule_step`].
#[derive(Debug, Clone, Copy)]
pub struct DeltaRuleStepBuffers<'a> {
    /// `[width, channels]`, that of the token itself last
    pub taps: &'a dyn Bind,
    /// `[channels]`
    pub bias: Option<&'a dyn Bind>,
    /// Rows with the gates of results.
    pub gate: &'a dyn Bind,
    /// `[value_dim]`
    pub norm_weight: &'a dyn Bind,
    /// `[n_key_head]` zeros for each run, which are zeros again afterwards.
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

/// For each head of all tokens of the batch's first `runs` runs, with key `k`, query `q`, value `v`, `g = exp(a softplus(decay +
/// decay_bias))` and `beta` after its sigmoid: `S = g S; u = beta (v - k S); S = S + k^T u; out = q S`.
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

/// All between a layer's matrix products at once, for runs of few tokens: the convolution of `x` with SiLU, the [`delta_rule`] of
/// what comes of it, and of each head's result an RMS norm times its gate. `None` where a head is too large for a workgroup.
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

/// What the twin takes of one token.
#[derive(Debug, Clone, Copy)]
pub struct DeltaRuleToken<'a> {
    /// The results of the convolution.
    pub x: &'a [f64],
    /// As [`DeltaRuleShape::decay`].
    pub decay: &'a [f64],
    /// As [`DeltaRuleShape::beta`].
    pub beta: &'a [f64],
    /// As [`DeltaRuleBuffers::a`].
    pub a: &'a [f64],
    /// As [`DeltaRuleBuffers::decay_bias`].
    pub decay_bias: &'a [f64],
}

/// The scalar twin of one token: the results of all heads, `[n_head, value_dim]`; `state` becomes that after it.
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
        x: StridedRows::whole(2 * n_head * dim),
        decay: StridedRows::whole(n_head),
        beta: StridedRows::whole(n_head),
        out: StridedRows::whole(n_head * dim),
        states: StridedStates { n_slots: 4, stride: n_head * dim * dim + 3 * 2 * n_head * dim, at: 0 },
    };
    let step = DeltaRuleStep {
        width: 4,
        bias: true,
        convolution_at: shape.state_elements(),
        norm_eps: 1e-6,
        gate_kind: GateActivation::Silu,
        gate: StridedRows::whole(n_head * dim),
    };
    let by_channel =
        DeltaRuleShape { decay_of: DecayGranularity::OfChannels, decay: StridedRows::whole(n_head * dim), ..shape };
    let whole = shape.head().whole_anywhere((step.width - 1) * 3 * dim, 1);
    let key = |shape: &DeltaRuleShape| shape.key(None, shape.head().scan());
    let mut keys = vec![key(&shape), key(&by_channel).named("delta_rule_by_channel")];
    keys.extend(whole.map(|tile| shape.key(Some(&step), tile)));
    keys
}
