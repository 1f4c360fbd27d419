//! The gated delta rule (Qwen 3.5, Qwen3-Next, Kimi Linear): a short convolution of queries, keys and values, a
//! recurrence whose state is a matrix for each head, and a gated norm of the results.

use metal_attention_model::{DeltaGates, DeltaRuleSpec, KeySharing, NormKind};
use wgpu::Buffer;

use super::{BranchInput, PlanBuilder};
use crate::kernels::{
    self, ColumnRange, ConvolutionBuffers, ConvolutionShape, DecayGranularity, DeltaRuleBuffers, DeltaRuleShape,
    DeltaRuleStep, DeltaRuleStepBuffers, GateActivation, GroupNormBuffers, GroupNormShape, KeyHeads, LowRankActivation,
    LowRankShape, MatvecOutput, StateRange,
};
use crate::weights::{WgpuDeltaRule, WgpuLowRank, WgpuMixer};
use crate::{Dispatch, GridExtent, WgpuError};

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

/// The low-rank products of decay and gate, in this order; `None` where both are plain projections.
pub(crate) fn low_rank_of_delta_rule(shape: &DeltaRuleSpec) -> Option<LowRankShape> {
    match shape.gates {
        DeltaGates::OfHeads { paired: _ } => None,
        DeltaGates::OfChannels { rank } => {
            Some(LowRankShape { width: shape.n_values(), parts: vec![(rank, LowRankActivation::AsItIs); 2] })
        }
    }
}

/// The activation of the results' gate.
fn gate_kind(shape: &DeltaRuleSpec) -> GateActivation {
    match shape.gates {
        DeltaGates::OfHeads { paired: _ } => GateActivation::Silu,
        DeltaGates::OfChannels { rank: _ } => GateActivation::Sigmoid,
    }
}

impl PlanBuilder<'_> {
    /// Whether layer `i` is a delta rule with a product of its own for gates, in addition to that for queries, keys and
    /// values.
    pub(super) fn delta_rule_has_gate_product(&self, i: usize) -> bool {
        matches!(&self.weights.layers[i].mixer, WgpuMixer::DeltaRule(w) if w.gates.is_some() || w.low_rank.is_some())
    }

    /// Appends the gated delta rule of layer `i`. Projects `input` to `projected` and, where gates are apart, to
    /// `kv_compressed` or through low-rank matrices to `rwkv.large`; the result is in `mixer_out`.
    pub(super) fn delta_rule(
        &self,
        dispatches: &mut Vec<Dispatch>,
        i: usize,
        spec: &DeltaRuleSpec,
        w: &WgpuDeltaRule,
        input: BranchInput<'_>,
    ) -> Result<(), WgpuError> {
        let scratch = self.scratch;
        self.multiply_branch_input(dispatches, input, &w.inputs, MatvecOutput::Store, &scratch.projected)?;
        if let Some(gates) = &w.gates {
            self.multiply_branch_input(dispatches, input, gates, MatvecOutput::Store, &scratch.kv_compressed)?;
        }
        if let Some((WgpuLowRank { down, up }, low_rank)) = w.low_rank.as_ref().zip(low_rank_of_delta_rule(spec)) {
            self.multiply_branch_input(dispatches, input, down, MatvecOutput::Store, &scratch.rwkv.small)?;
            self.expand(dispatches, &low_rank, up, &scratch.rwkv.large)?;
        }
        let projected = self.projected(spec, w);
        if self.uses_decode_kernels()
            && let Some(step) = self.delta_rule_step(i, spec, w, &projected)?
        {
            dispatches.push(step);
            return Ok(());
        }
        self.delta_rule_scan(dispatches, i, spec, w, &projected)
    }

    fn projected(&self, spec: &DeltaRuleSpec, w: &WgpuDeltaRule) -> DeltaRuleColumns<'_> {
        let (scratch, n_channels, n_head) = (self.scratch, spec.n_channels(), spec.n_head_v);
        let low_rank = low_rank_of_delta_rule(spec);
        // Rows of `projected` also hold the gate and, unless they are projected apart, `beta` and the decay.
        let (n, n_gates) = match low_rank {
            None => (n_channels + spec.n_values(), 2 * n_head),
            Some(_) => (n_channels, n_head),
        };
        let apart = w.gates.is_some();
        let stride = if apart { n } else { n + n_gates };
        let (gates, stride_of_gates, first) =
            if apart { (&scratch.kv_compressed, n_gates, 0) } else { (&scratch.projected, stride, n) };
        let (decay, gate) = match &low_rank {
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
        spec: &DeltaRuleSpec,
        w: &WgpuDeltaRule,
        projected: &DeltaRuleColumns<'_>,
    ) -> Result<Option<Dispatch>, WgpuError> {
        let scratch = self.scratch;
        let shape = self.delta_rule_shape(spec, projected.channels, projected);
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
        spec: &DeltaRuleSpec,
        w: &WgpuDeltaRule,
        projected: &DeltaRuleColumns<'_>,
    ) -> Result<(), WgpuError> {
        let (gpu, scratch) = (self.gpu, self.scratch);
        let (states, segments) = (self.states.of_layer(i), self.states.segments());
        let convolved = ColumnRange::whole(spec.n_channels());
        let shape = self.delta_rule_shape(spec, convolved, projected);
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
            states: StateRange { n_slots: self.states.n_slots(), stride: spec.state_elements(), at: 0 },
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
