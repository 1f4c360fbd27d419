//! The gated delta rule: projections, convolution, the recurrence, and the gated norm of its result.

use bytemuck::Zeroable;
use metal_attention_model::{DeltaGates, DeltaRuleSpec, KeySharing};

use super::layer::Given;
use super::product::Input;
use super::walk::Rule;
use super::{Step, Steps};
use crate::CudaError;
use crate::args::{
    ConvolutionArgs, DeltaRuleAloneArgs, DeltaRuleArgs, GroupNormArgs, GroupNormKind, OutputGate, RowsArgs,
};
use crate::weights::CudaDeltaRule;

/// Queries, keys and values, with what stands beside them: beta, and gate and decay of one product each; the first three after the
/// convolution; what decay and gate have before them, decay and gate, where they come of two products; the heads' results.
pub(super) fn widths(of: &DeltaRuleSpec) -> [usize; 7] {
    let (channels, values, n_head) = (of.n_channels(), of.n_values(), of.n_head_v);
    match of.gates {
        DeltaGates::OfHeads { paired: _ } => [channels + values + 2 * n_head, channels, 0, 0, 0, 0, values],
        DeltaGates::OfChannels { rank } => [channels + n_head, channels, rank, rank, of.n_decays(), values, values],
    }
}

impl Steps {
    /// The delta rule of layer `i`. Its states are the last inputs of the convolution, then a matrix for each value head.
    pub(super) fn delta_rule<'w>(
        &mut self,
        step: Step<'_>,
        i: usize,
        w: &'w CudaDeltaRule,
        input: Input,
    ) -> Result<Given<'w>, CudaError> {
        let of = &w.spec;
        let (channels, values, n_head) = (of.n_channels(), of.n_values(), of.n_head_v);
        let [inputs, conv, before_decay, before_gate, decays, gates, heads] = self.areas(step, widths(of));
        let stride = w.inputs.n_rows();
        self.store_joined(step, "queries, keys, values, gates", &w.inputs, input, inputs)?;
        let at = |first: usize| RowsArgs::new(inputs, stride, first);
        let (gate, beta, decay) = match &w.low_rank {
            None => (at(channels), at(channels + values), at(channels + values + n_head)),
            Some(low_rank) => {
                let [decay, gate] = &low_rank.before;
                self.store_all(step, "gates", [decay], input, before_decay)?;
                self.store_all(step, "gates", [gate], input, before_gate)?;
                self.store_rows(step, "gates", &low_rank.decay, before_decay, decays)?;
                self.store_rows(step, "gates", &low_rank.gate, before_gate, gates)?;
                let rows = |x: u64, stride: usize| RowsArgs::new(x, stride, 0);
                (rows(gates, values), at(channels), rows(decays, of.n_decays()))
            }
        };
        let convolution = ConvolutionArgs {
            x: at(0),
            taps: w.taps.ptr(),
            out: conv,
            channels: channels as u32,
            n_tap: of.n_tap as u32,
            block: channels as u32,
            step: channels as u32,
            ..ConvolutionArgs::zeroed()
        };
        let states = step.states.of_layer(i, (of.n_tap - 1) * channels);
        let rule = if w.low_rank.is_some() { Rule::DELTA_RULE_OF_CHANNELS } else { Rule::DELTA_RULE };
        let args = DeltaRuleArgs {
            walk: Self::walk(step, rule, states, heads, [n_head, of.key_dim, of.value_dim]),
            x: RowsArgs::new(conv, channels, 0),
            beta,
            decay,
            a: w.a.ptr(),
            dt_bias: w.dt_bias.ptr(),
            n_head_k: of.n_head_k as u32,
            heads_of_key: match of.sharing {
                KeySharing::Interleaved => 0,
                KeySharing::Grouped => (n_head / of.n_head_k) as u32,
            },
            unused: 0,
            eps: of.eps,
        };
        let norm = GroupNormArgs {
            x: heads,
            out: heads,
            weight: w.norm.ptr(),
            gate,
            n: of.value_dim as u32,
            n_group: n_head as u32,
            norm: GroupNormKind::Rms as u32,
            gate_kind: match of.gates {
                DeltaGates::OfHeads { paired: _ } => OutputGate::Silu,
                DeltaGates::OfChannels { rank: _ } => OutputGate::Sigmoid,
            } as u32,
            eps: of.eps,
            ..GroupNormArgs::zeroed()
        };
        let around = Self::convolution_of(step, i, convolution);
        if let Some(alone) = self.alone(step, rule, &args.walk, around, Some(norm)) {
            self.launch_alone(step, rule, &args.walk, &DeltaRuleAloneArgs { of: args, alone })?;
        } else {
            self.convolution(step, i, convolution)?;
            self.launch_walk(step, rule, &args.walk, &args)?;
            self.group_norm(step, &norm)?;
        }
        let input = self.rows_input(step, heads, values, None)?;
        Ok(Given::Product { what: "delta rule output", linear: &w.out, input })
    }
}
