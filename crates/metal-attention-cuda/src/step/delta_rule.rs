//! The gated delta rule: projections, convolution, the recurrence, and the gated norm of its result.

use bytemuck::Zeroable;
use metal_attention_model::{DeltaGates, DeltaRuleSpec, KeySharing};

use super::layer::Given;
use super::product::Input;
use super::walk::Rule;
use super::{Step, Steps};
use crate::CudaError;
use crate::args::{ConvolutionArgs, DeltaRuleArgs, GroupNormArgs, GroupNormKind, OutputGate, RowsArgs};
use crate::weights::CudaDeltaRule;

/// Queries, keys and values, the same after the convolution; gate, beta and decay; what decay and gate have before them; the
/// heads' results.
pub(super) fn widths(of: &DeltaRuleSpec) -> [usize; 8] {
    let (channels, values, n_head) = (of.n_channels(), of.n_values(), of.n_head_v);
    match of.gates {
        DeltaGates::OfHeads { paired: _ } => [channels, channels, values + 2 * n_head, 0, 0, 0, 0, values],
        DeltaGates::OfChannels { rank } => [channels, channels, values, n_head, of.n_decays(), rank, rank, values],
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
        let [qkv, conv, gates, betas, decays, before_decay, before_gate, heads] = self.areas(step, widths(of));
        let [q, k, v] = &w.inputs;
        self.store_all(step, "queries, keys, values", [q, k, v], input, qkv)?;
        let (gate, beta, decay) = match &w.before {
            None => {
                let stride = values + 2 * n_head;
                self.store_all(step, "gates", [&w.gate, &w.beta, &w.decay], input, gates)?;
                let at = |first: usize| RowsArgs::new(gates, stride, first);
                (at(0), at(values), at(values + n_head))
            }
            Some([decay, gate]) => {
                self.store_all(step, "gates", [&w.beta], input, betas)?;
                self.store_all(step, "gates", [decay], input, before_decay)?;
                self.store_all(step, "gates", [gate], input, before_gate)?;
                self.store_rows(step, "gates", &w.decay, before_decay, decays)?;
                self.store_rows(step, "gates", &w.gate, before_gate, gates)?;
                let rows = |x: u64, stride: usize| RowsArgs::new(x, stride, 0);
                (rows(gates, values), rows(betas, n_head), rows(decays, of.n_decays()))
            }
        };
        let args = ConvolutionArgs {
            x: RowsArgs::new(qkv, channels, 0),
            taps: w.taps.ptr(),
            out: conv,
            channels: channels as u32,
            n_tap: of.n_tap as u32,
            block: channels as u32,
            step: channels as u32,
            ..ConvolutionArgs::zeroed()
        };
        self.convolution(step, i, args)?;
        let states = step.states.of_layer(i, (of.n_tap - 1) * channels);
        let rule = if w.before.is_some() { Rule::DELTA_RULE_OF_CHANNELS } else { Rule::DELTA_RULE };
        let args = DeltaRuleArgs {
            walk: Self::walk(step, rule, states, heads, [n_head, of.key_dim, of.value_dim]),
            x: RowsArgs::new(conv, channels, 0),
            beta,
            decay,
            a: w.a.ptr(),
            dt_bias: w.dt_bias.ptr(),
            n_head_k: of.n_head_k as u32,
            heads_of_key: match of.sharing {
                KeySharing::InTurns => 0,
                KeySharing::Grouped => (n_head / of.n_head_k) as u32,
            },
            unused: 0,
            eps: of.eps,
        };
        self.launch_walk(step, rule, &args.walk, &args)?;
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
        self.group_norm(step, &norm)?;
        let input = self.rows_input(step, heads, values, None)?;
        Ok(Given::Product { what: "delta rule output", linear: &w.out, input })
    }
}
