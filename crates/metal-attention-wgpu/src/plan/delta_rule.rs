//! The gated delta rule (Qwen 3.5, Qwen3-Next; Kimi Linear), whose recurrent state is a matrix for each head and the last inputs
//! of a convolution.

use metal_attention_model::{DeltaGates, DeltaRuleSpec, KeySharing, NormKind};
use wgpu::Buffer;

use super::{Input, PlanBuilder, Product};
use crate::kernels::{
    self, ConvolutionBuffers, ConvolutionShape, Decay, DeltaRuleBuffers, DeltaRuleShape, DeltaRuleStep,
    DeltaRuleStepBuffers, GroupNormBuffers, GroupNormShape, KeyHeads, LowRankShape, MatvecOutput, OutputGate, RowsAt,
    Squash, StatesAt,
};
use crate::weights::{WgpuDeltaRule, WgpuLowRank, WgpuMixer};
use crate::{Dispatch, Extent, WgpuError};

/// Where what the projections give lies.
struct Projected<'a> {
    /// Inputs of the convolution, in `qkv`: queries, keys, values.
    channels: RowsAt,
    /// Gates of the results.
    gate: (&'a Buffer, RowsAt),
    /// What `beta` comes of.
    beta: (&'a Buffer, RowsAt),
    /// What the decay comes of.
    decay: (&'a Buffer, RowsAt),
}

/// The low-rank products of decay and gate, in this order; `None` where they are none.
pub(crate) fn low_rank_of_delta_rule(of: &DeltaRuleSpec) -> Option<LowRankShape> {
    match of.gates {
        DeltaGates::OfHeads { paired: _ } => None,
        DeltaGates::OfChannels { rank } => {
            Some(LowRankShape { width: of.n_values(), parts: vec![(rank, Squash::AsItIs); 2] })
        }
    }
}

/// What the gate of a result goes through.
fn gate_kind(of: &DeltaRuleSpec) -> OutputGate {
    match of.gates {
        DeltaGates::OfHeads { paired: _ } => OutputGate::Silu,
        DeltaGates::OfChannels { rank: _ } => OutputGate::Sigmoid,
    }
}

impl PlanBuilder<'_> {
    /// Whether layer `i` has a delta rule whose gates are projected apart.
    pub(super) fn delta_rule_gates_apart(&self, i: usize) -> bool {
        matches!(&self.weights.layers[i].mixer, WgpuMixer::DeltaRule(w) if w.gates.is_some() || w.low_rank.is_some())
    }

    /// The gated delta rule of layer `i`, up to the row that the output matrix multiplies.
    pub(super) fn delta_rule(
        &self,
        d: &mut Vec<Dispatch>,
        i: usize,
        spec: &DeltaRuleSpec,
        w: &WgpuDeltaRule,
        input: Input<'_>,
    ) -> Result<(), WgpuError> {
        let s = self.s;
        self.product_of(d, input, Product::new(&w.inputs, MatvecOutput::Store, &s.x, &s.qkv))?;
        if let Some(gates) = &w.gates {
            self.product_of(d, input, Product::new(gates, MatvecOutput::Store, &s.x, &s.kv_a))?;
        }
        if let Some((WgpuLowRank { down, up }, low_rank)) = w.low_rank.as_ref().zip(low_rank_of_delta_rule(spec)) {
            self.product_of(d, input, Product::new(down, MatvecOutput::Store, &s.x, &s.rwkv.small))?;
            self.expand(d, &low_rank, up, &s.rwkv.large)?;
        }
        let projected = self.projected(spec, w);
        if self.decodes()
            && let Some(step) = self.delta_rule_step(i, spec, w, &projected)?
        {
            d.push(step);
            return Ok(());
        }
        self.delta_rule_scan(d, i, spec, w, &projected)
    }

    fn projected(&self, spec: &DeltaRuleSpec, w: &WgpuDeltaRule) -> Projected<'_> {
        let (s, n_channels, n_head) = (self.s, spec.n_channels(), spec.n_head_v);
        let low_rank = low_rank_of_delta_rule(spec);
        // Rows of `qkv` have the gate and, unless they lie apart, what `beta` and the decay come of.
        let (n, n_gates) = match low_rank {
            None => (n_channels + spec.n_values(), 2 * n_head),
            Some(_) => (n_channels, n_head),
        };
        let apart = w.gates.is_some();
        let stride = if apart { n } else { n + n_gates };
        let (gates, stride_of_gates, first) = if apart { (&s.kv_a, n_gates, 0) } else { (&s.qkv, stride, n) };
        let (decay, gate) = match &low_rank {
            None => {
                let decay = RowsAt { stride: stride_of_gates, at: first + n_head };
                ((gates, decay), (&s.qkv, RowsAt { stride, at: n_channels }))
            }
            Some(low_rank) => ((&s.rwkv.large, low_rank.result(0)), (&s.rwkv.large, low_rank.result(1))),
        };
        Projected {
            channels: RowsAt { stride, at: 0 },
            gate,
            beta: (gates, RowsAt { stride: stride_of_gates, at: first }),
            decay,
        }
    }

    /// All between the projections and the output matrix at once; `None` where a head is too large for that.
    fn delta_rule_step(
        &self,
        i: usize,
        spec: &DeltaRuleSpec,
        w: &WgpuDeltaRule,
        projected: &Projected<'_>,
    ) -> Result<Option<Dispatch>, WgpuError> {
        let s = self.s;
        let of = self.delta_rule_shape(spec, projected.channels, projected);
        let step = DeltaRuleStep {
            width: spec.n_tap,
            bias: false,
            convolution_at: of.state_elements(),
            norm_eps: spec.eps,
            gate_kind: gate_kind(spec),
            gate: projected.gate.1,
        };
        let buffers = self.delta_rule_buffers(i, w, projected, &s.qkv, &s.att);
        let (gate, _) = projected.gate;
        let with = DeltaRuleStepBuffers { taps: &w.taps, bias: None, gate, norm_weight: &w.norm, tickets: &s.tickets };
        kernels::delta_rule_step(self.gpu, &of, &step, &buffers, &with, Extent::Runs)
    }

    /// The convolution of all tokens, then the recurrence, then the norm of its results.
    fn delta_rule_scan(
        &self,
        d: &mut Vec<Dispatch>,
        i: usize,
        spec: &DeltaRuleSpec,
        w: &WgpuDeltaRule,
        projected: &Projected<'_>,
    ) -> Result<(), WgpuError> {
        let (gpu, s) = (self.gpu, self.s);
        let (states, segments) = (self.states.of_layer(i), self.states.segments());
        let convolved = RowsAt::whole(spec.n_channels());
        let of = self.delta_rule_shape(spec, convolved, projected);
        let convolution = ConvolutionShape {
            channels: spec.n_channels(),
            width: spec.n_tap,
            bias: false,
            silu: true,
            x: projected.channels,
            out: convolved,
            states: StatesAt { at: of.state_elements(), ..of.states },
        };
        let buffers = ConvolutionBuffers { x: &s.qkv, taps: &w.taps, bias: None, states, out: &s.queries, segments };
        d.push(kernels::convolution(gpu, &convolution, &buffers, Extent::Runs)?);
        let buffers = self.delta_rule_buffers(i, w, projected, &s.queries, &s.values);
        d.push(kernels::delta_rule(gpu, &of, &buffers, Extent::Runs)?);
        let norm = GroupNormShape {
            n: spec.value_dim,
            groups: spec.n_head_v,
            kind: NormKind::Rms,
            eps: spec.eps,
            of_groups: false,
            bias: false,
            x: of.out,
            gate: Some((gate_kind(spec), projected.gate.1)),
            out: of.out,
        };
        let buffers =
            GroupNormBuffers { x: &s.values, weight: &w.norm, bias: None, gate: Some(projected.gate.0), out: &s.att };
        d.push(kernels::group_norm(gpu, &norm, &buffers)?);
        Ok(())
    }

    /// A slot of the states has the matrices first, then the convolution's last inputs.
    fn delta_rule_shape(&self, spec: &DeltaRuleSpec, x: RowsAt, projected: &Projected<'_>) -> DeltaRuleShape {
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
                DeltaGates::OfHeads { paired: _ } => Decay::OfHeads,
                DeltaGates::OfChannels { rank: _ } => Decay::OfChannels,
            },
            l2_eps: Some(spec.eps),
            scale: 1.0 / (spec.key_dim as f32).sqrt(),
            x,
            decay: projected.decay.1,
            beta: projected.beta.1,
            out: RowsAt::whole(spec.n_values()),
            states: StatesAt { n_slots: self.states.n_slots(), stride: spec.state_elements(), at: 0 },
        }
    }

    fn delta_rule_buffers<'b>(
        &'b self,
        i: usize,
        w: &'b WgpuDeltaRule,
        projected: &Projected<'b>,
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
