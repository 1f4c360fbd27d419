//! The gated delta rule (Qwen 3.5, Qwen3-Next, Kimi Linear): a short convolution of queries, keys and values, a
//! recurrence whose state is a matrix for each head, and a gated norm of the results.

use metal_attention_model::{BatchKind, DeltaGates, DeltaRuleSpec, DeltaRuleWeights, KeySharing, NormKind};
use wgpu::Buffer;

use super::rwkv::widen_for_low_rank;
use crate::activations::{ActivationWidths, widen};
use crate::kernels::{
    self, ColumnRange, ConvolutionBuffers, ConvolutionShape, DecayGranularity, DeltaRuleBuffers, DeltaRuleShape,
    DeltaRuleStep, DeltaRuleStepBuffers, GateActivation, GroupNormBuffers, GroupNormShape, KeyHeads, LowRankActivation,
    LowRankShape, MatvecOutput, StateRange,
};
use crate::plan::{BranchInput, LastProduct, PlanBuilder};
use crate::weights::{Uploads, WgpuLinear, concat, transposed};
use crate::{Dispatch, GridExtent, WgpuDevice, WgpuError};

/// A gated delta rule with its weights.
#[derive(Debug)]
pub(crate) struct WgpuDeltaRule {
    /// Its sizes.
    spec: DeltaRuleSpec,
    /// The projections to queries, keys and values, and to the gate of the results unless it is a [low-rank
    /// product](Self::low_rank), stacked; below them those of [`gates`](Self::gates) if they have the same type.
    inputs: WgpuLinear,
    /// The projections to `beta` and, unless it is a low-rank product, the decay, if the file stores them in another
    /// type than the others: one matrix of several types may not suit matrix units.
    gates: Option<WgpuLinear>,
    /// The low-rank products of decay and gate, of models that have them.
    low_rank: Option<LowRank>,
    /// Taps of the convolution, F32 `[n_tap, n_channels]`, the oldest token's first.
    taps: Buffer,
    /// Bias of the decay, F32 `[n_decays]`.
    dt_bias: Buffer,
    /// Decay rate of each head, F32 `[n_head_v]`.
    a: Buffer,
    /// Weight of the norm of the results, F32 `[value_dim]`.
    norm: Buffer,
    /// The output projection.
    out: WgpuLinear,
}

/// The low-rank products of one input, of the decay and of the gate.
#[derive(Debug)]
struct LowRank {
    /// Their sizes.
    shape: LowRankShape,
    /// Their first matrices, stacked, `[2 rank, n_embd]`.
    down: WgpuLinear,
    /// Their second matrices, transposed, one after the other, F32 `[2 rank, n_values]`.
    up: Buffer,
}

/// Where the projected inputs are, each in some columns of some buffer's rows.
struct DeltaRuleColumns<'a> {
    /// Queries, keys and values, the inputs of the convolution, in `projected`.
    channels: ColumnRange,
    /// Gates of the results.
    gate: (&'a Buffer, ColumnRange),
    /// The writing strength `beta`, before its sigmoid.
    beta: (&'a Buffer, ColumnRange),
    /// The decay, before its activation.
    decay: (&'a Buffer, ColumnRange),
}

/// The sizes of the low-rank products of decay and gate, in this order.
fn low_rank_shape(spec: &DeltaRuleSpec, rank: usize) -> LowRankShape {
    LowRankShape { width: spec.n_values(), parts: vec![(rank, LowRankActivation::AsItIs); 2] }
}

/// The activation of the results' gate.
fn gate_kind(shape: &DeltaRuleSpec) -> GateActivation {
    match shape.gates {
        DeltaGates::OfHeads { paired: _ } => GateActivation::Silu,
        DeltaGates::OfChannels { rank: _ } => GateActivation::Sigmoid,
    }
}

/// Checks that kernels exist for a delta rule; the error is the part without one.
pub(super) fn supports(spec: &DeltaRuleSpec) -> Result<(), &'static str> {
    match spec.gates {
        DeltaGates::OfHeads { paired: _ } => {}
        DeltaGates::OfChannels { rank: _ } if spec.n_decays() == spec.n_values() => {}
        DeltaGates::OfChannels { rank: _ } => {
            return Err("a decay for each channel of keys that are not as long as values");
        }
    }
    if spec.n_tap > ConvolutionShape::MAX_WIDTH {
        return Err("short convolutions with more taps than the kernels support");
    }
    Ok(())
}

/// Widens the scratch buffers.
pub(super) fn widen_for_delta_rule(widths: &mut ActivationWidths, spec: &DeltaRuleSpec) {
    let (n_channels, n_values) = (spec.n_channels(), spec.n_values());
    widen(&mut widths.projected, n_channels + n_values + 2 * spec.n_head_v);
    widen(&mut widths.kv_compressed, 2 * spec.n_head_v);
    widen(&mut widths.queries, n_channels);
    widen(&mut widths.head_outputs, n_values);
    widen(&mut widths.mixer_out, n_values);
    widen(&mut widths.tickets, spec.n_head_k);
    match spec.gates {
        DeltaGates::OfHeads { paired: _ } => {}
        DeltaGates::OfChannels { rank } => widen_for_low_rank(widths, &low_rank_shape(spec, rank)),
    }
}

impl WgpuDeltaRule {
    /// Uploads the weights.
    pub(super) fn new(gpu: &WgpuDevice, w: &DeltaRuleWeights, uploads: &mut Uploads) -> Result<Self, WgpuError> {
        let mut inputs = vec![&w.q, &w.k, &w.v];
        let gates = match &w.before {
            None => {
                inputs.push(&w.gate);
                vec![&w.beta, &w.decay]
            }
            Some(_) => vec![&w.beta],
        };
        let ty = inputs[inputs.len() - 1].weight.ty();
        let together = gates.iter().all(|gate| gate.weight.ty() == ty);
        if together {
            inputs.extend(&gates);
        }
        let inputs = concat(gpu, "the inputs of a delta rule", &inputs, uploads)?;
        let gates = (!together).then(|| concat(gpu, "the gates of a delta rule", &gates, uploads)).transpose()?;
        let low_rank = match &w.before {
            None => None,
            Some([decay, gate]) => Some(LowRank {
                shape: low_rank_shape(&w.spec, decay.weight.n_rows()),
                down: concat(gpu, "the low-rank matrices", &[decay, gate], uploads)?,
                up: gpu.upload("the low-rank matrices", &transposed(&[&w.decay, &w.gate]))?,
            }),
        };
        Ok(Self {
            spec: w.spec,
            inputs,
            gates,
            low_rank,
            taps: gpu.upload("the taps of a convolution", &w.taps)?,
            dt_bias: gpu.upload("the bias of a decay", &w.dt_bias)?,
            a: gpu.upload("the rates of a decay", &w.a)?,
            norm: gpu.upload("a norm", &w.norm)?,
            out: concat(gpu, "the delta rule's output matrix", &[&w.out], uploads)?,
        })
    }
}

impl<'a> PlanBuilder<'a> {
    /// Appends the gated delta rule of layer `i`. Projects `input` to `projected` and, where gates are apart, to
    /// `kv_compressed` or through low-rank matrices to `rwkv.large`; the result is in `mixer_out`.
    pub(crate) fn delta_rule(
        &self,
        dispatches: &mut Vec<Dispatch>,
        i: usize,
        w: &'a WgpuDeltaRule,
        input: BranchInput<'a>,
    ) -> Result<LastProduct<'a>, WgpuError> {
        let scratch = self.scratch;
        // Several products read the input where the gates have one of their own. With one token, computing the norm in
        // each prologue is cheaper than a norm dispatch.
        let several = w.gates.is_some() || w.low_rank.is_some();
        let input = if several && self.kind != BatchKind::One {
            BranchInput::Rows(self.rows_of(dispatches, input)?)
        } else {
            input
        };
        self.multiply_branch_input(dispatches, input, &w.inputs, MatvecOutput::Store, &scratch.projected)?;
        if let Some(gates) = &w.gates {
            self.multiply_branch_input(dispatches, input, gates, MatvecOutput::Store, &scratch.kv_compressed)?;
        }
        if let Some(LowRank { shape, down, up }) = &w.low_rank {
            self.multiply_branch_input(dispatches, input, down, MatvecOutput::Store, &scratch.rwkv.small)?;
            self.expand(dispatches, shape, up, &scratch.rwkv.large)?;
        }
        let last = LastProduct::new(&w.out, &scratch.mixer_out);
        let projected = self.delta_rule_columns(w);
        if self.uses_decode_kernels()
            && let Some(step) = self.delta_rule_step(i, w, &projected)?
        {
            dispatches.push(step);
            return Ok(last);
        }
        self.delta_rule_scan(dispatches, i, w, &projected)?;
        Ok(last)
    }

    /// Where the inputs are after the products.
    fn delta_rule_columns(&self, w: &WgpuDeltaRule) -> DeltaRuleColumns<'a> {
        let (scratch, spec) = (self.scratch, &w.spec);
        let (n_channels, n_head) = (spec.n_channels(), spec.n_head_v);
        let low_rank = w.low_rank.as_ref().map(|low_rank| &low_rank.shape);
        // Rows of `projected` also hold the gate and, unless they are projected apart, `beta` and the decay.
        let (n, n_gates) = match low_rank {
            None => (n_channels + spec.n_values(), 2 * n_head),
            Some(_) => (n_channels, n_head),
        };
        let apart = w.gates.is_some();
        let stride = if apart { n } else { n + n_gates };
        let (gates, stride_of_gates, first) =
            if apart { (&scratch.kv_compressed, n_gates, 0) } else { (&scratch.projected, stride, n) };
        let (decay, gate) = match low_rank {
            None => {
                let decay = ColumnRange { stride: stride_of_gates, first: first + n_head };
                ((gates, decay), (&scratch.projected, ColumnRange { stride, first: n_channels }))
            }
            Some(low_rank) => ((&scratch.rwkv.large, low_rank.result(0)), (&scratch.rwkv.large, low_rank.result(1))),
        };
        DeltaRuleColumns {
            channels: ColumnRange { stride, first: 0 },
            gate,
            beta: (gates, ColumnRange { stride: stride_of_gates, first }),
            decay,
        }
    }

    /// One kernel for everything between projections and output projection, for decode steps: `projected` to
    /// `mixer_out`. `None` where a head is too large for a workgroup.
    fn delta_rule_step(
        &self,
        i: usize,
        w: &WgpuDeltaRule,
        projected: &DeltaRuleColumns<'_>,
    ) -> Result<Option<Dispatch>, WgpuError> {
        let (scratch, spec) = (self.scratch, &w.spec);
        let shape = self.delta_rule_shape(i, spec, projected.channels, projected);
        let step = DeltaRuleStep {
            width: spec.n_tap,
            bias: false,
            convolution_at: shape.state_elements(),
            norm_eps: spec.eps,
            gate_kind: gate_kind(spec),
            gate: projected.gate.1,
        };
        let buffers = self.delta_rule_buffers(i, w, projected, &scratch.projected, &scratch.mixer_out);
        let (gate, _) = projected.gate;
        let with =
            DeltaRuleStepBuffers { taps: &w.taps, bias: None, gate, norm_weight: &w.norm, tickets: &scratch.tickets };
        kernels::delta_rule_step(self.gpu, &shape, &step, &buffers, &with, GridExtent::Runs)
    }

    /// Appends three kernels for longer batches: the convolution to `queries`, the recurrence to `head_outputs`, the
    /// gated norm to `mixer_out`.
    fn delta_rule_scan(
        &self,
        dispatches: &mut Vec<Dispatch>,
        i: usize,
        w: &WgpuDeltaRule,
        projected: &DeltaRuleColumns<'_>,
    ) -> Result<(), WgpuError> {
        let (gpu, scratch, spec) = (self.gpu, self.scratch, &w.spec);
        let (states, segments) = (self.states.of_layer(i), self.states.segments());
        let convolved = ColumnRange::whole(spec.n_channels());
        let shape = self.delta_rule_shape(i, spec, convolved, projected);
        let convolution = ConvolutionShape {
            channels: spec.n_channels(),
            width: spec.n_tap,
            bias: false,
            silu: true,
            x: projected.channels,
            out: convolved,
            states: StateRange { at: shape.state_elements(), ..shape.states },
        };
        let buffers = ConvolutionBuffers {
            x: &scratch.projected,
            taps: &w.taps,
            bias: None,
            states,
            out: &scratch.queries,
            segments,
        };
        dispatches.push(kernels::convolution(gpu, &convolution, &buffers, GridExtent::Runs)?);
        let buffers = self.delta_rule_buffers(i, w, projected, &scratch.queries, &scratch.head_outputs);
        dispatches.push(kernels::delta_rule(gpu, &shape, &buffers, GridExtent::Runs)?);
        let norm = GroupNormShape {
            n: spec.value_dim,
            groups: spec.n_head_v,
            kind: NormKind::Rms,
            eps: spec.eps,
            of_groups: false,
            bias: false,
            x: shape.out,
            gate: Some((gate_kind(spec), projected.gate.1)),
            out: shape.out,
        };
        let buffers = GroupNormBuffers {
            x: &scratch.head_outputs,
            weight: &w.norm,
            bias: None,
            gate: Some(projected.gate.0),
            out: &scratch.mixer_out,
        };
        dispatches.push(kernels::group_norm(gpu, &norm, &buffers)?);
        Ok(())
    }

    /// The shape of the recurrence. A slot of the states holds the heads' matrices, then the convolution's last inputs.
    fn delta_rule_shape(
        &self,
        i: usize,
        spec: &DeltaRuleSpec,
        x: ColumnRange,
        projected: &DeltaRuleColumns<'_>,
    ) -> DeltaRuleShape {
        DeltaRuleShape {
            n_head: spec.n_head_v,
            n_key_head: spec.n_head_k,
            key_heads: match spec.sharing {
                KeySharing::Interleaved => KeyHeads::InTurn,
                KeySharing::Grouped => KeyHeads::Grouped,
            },
            key_dim: spec.key_dim,
            value_dim: spec.value_dim,
            decay_of: match spec.gates {
                DeltaGates::OfHeads { paired: _ } => DecayGranularity::OfHeads,
                DeltaGates::OfChannels { rank: _ } => DecayGranularity::OfChannels,
            },
            l2_eps: Some(spec.eps),
            scale: 1.0 / (spec.key_dim as f32).sqrt(),
            x,
            decay: projected.decay.1,
            beta: projected.beta.1,
            out: ColumnRange::whole(spec.n_values()),
            states: self.states_at(i, 0),
        }
    }

    fn delta_rule_buffers<'b>(
        &'b self,
        i: usize,
        w: &'b WgpuDeltaRule,
        projected: &DeltaRuleColumns<'b>,
        x: &'b Buffer,
        out: &'b Buffer,
    ) -> DeltaRuleBuffers<'b> {
        DeltaRuleBuffers {
            x,
            decay: projected.decay.0,
            beta: projected.beta.0,
            a: &w.a,
            decay_bias: &w.dt_bias,
            states: self.states.of_layer(i),
            out,
            segments: self.states.segments(),
        }
    }
}
