//! The gated delta rule: input products, short convolution, the recurrence (`runner/recurrence.rs`), and the gated norm of each
//! head's result.

use bytemuck::Zeroable;
use metal_attention_model::{DeltaGates, DeltaRuleSpec, DeltaRuleWeights, KeySharing};

use crate::CudaError;
use crate::activations::{Widths, widen};
use crate::args::{
    ConvolutionArgs, DeltaRuleArgs, FusedDeltaRuleArgs, GroupNormArgs, GroupNormKind, OutputGate, RowsArgs,
};
use crate::kernels;
use crate::runner::layer::SublayerOutput;
use crate::runner::linear::LinearInput;
use crate::runner::recurrence::{RecurrenceKernel, supports_taps};
use crate::runner::{MicroBatch, ModelRunner};
use crate::slice::DeviceSlice;
use crate::weights::{CudaJoined, CudaLinear, CudaVector, Loader};

/// A gated delta rule.
#[derive(Debug)]
pub(crate) struct CudaDeltaRule {
    /// Its sizes.
    spec: DeltaRuleSpec,
    /// Queries, keys, values and, without `low_rank`, the gate; then beta and, without `low_rank`, the decay; one below the
    /// other.
    inputs: CudaJoined,
    /// Decay and gate, where these are low-rank products.
    low_rank: Option<CudaDeltaRuleGates>,
    /// Coefficients of the convolution, those of the oldest token first, `[n_tap, n_channels]`.
    taps: CudaVector,
    /// Bias of the decay, `[n_decays]`.
    dt_bias: CudaVector,
    /// Rate of the decay, negative, `[n_head_v]`.
    a: CudaVector,
    /// Weights of the norm of each head's result, `[value_dim]`.
    norm: CudaVector,
    /// Output, `[n_embd, n_values]`.
    out: CudaLinear,
}

/// Decay and gate of a delta rule as low-rank products.
#[derive(Debug)]
pub(crate) struct CudaDeltaRuleGates {
    /// The first products of decay and gate, `[rank, n_embd]` each.
    down: [CudaLinear; 2],
    /// The second product of the decay, `[n_decays, rank]`.
    decay: CudaLinear,
    /// The second product of the gate, `[n_values, rank]`.
    gate: CudaLinear,
}

impl CudaDeltaRule {
    /// Uploads the weights.
    pub(super) fn new(loader: &mut Loader<'_>, w: &DeltaRuleWeights) -> Result<Self, CudaError> {
        let (inputs, low_rank) = match &w.before {
            None => (loader.joined(&[&w.q, &w.k, &w.v, &w.gate, &w.beta, &w.decay])?, None),
            Some([decay, gate]) => {
                let before = [loader.linear(decay)?, loader.linear(gate)?];
                let (decay, gate) = (loader.linear(&w.decay)?, loader.linear(&w.gate)?);
                (loader.joined(&[&w.q, &w.k, &w.v, &w.beta])?, Some(CudaDeltaRuleGates { down: before, decay, gate }))
            }
        };
        Ok(Self {
            spec: w.spec,
            inputs,
            low_rank,
            taps: loader.vector(&w.taps)?,
            dt_bias: loader.vector(&w.dt_bias)?,
            a: loader.vector(&w.a)?,
            norm: loader.vector(&w.norm)?,
            out: loader.linear(&w.out)?,
        })
    }
}

/// Checks that there are kernels for a delta rule; the error is the part without one.
pub(crate) fn supports(spec: &DeltaRuleSpec) -> Result<(), &'static str> {
    supports_taps(spec.n_tap)?;
    RecurrenceKernel::DELTA_RULE.supports_keys(spec.key_dim)
}

/// Widens the buffers of intermediate results.
pub(super) fn widen_for_delta_rule(widths: &mut Widths, spec: &DeltaRuleSpec) {
    widen(&mut widths.n_key_head, spec.n_head_k);
    widths.widen_scratch_rows(scratch_widths(spec));
}

/// Scratch widths: the joined input product (queries, keys, values, then beta, and with gates of heads also gate and decay);
/// queries, keys and values after the convolution; with gates of channels, which come of two products each, the inner rows of
/// decay and gate, then decay and gate; the heads' results.
fn scratch_widths(spec: &DeltaRuleSpec) -> [usize; 7] {
    let (channels, values, n_head) = (spec.n_channels(), spec.n_values(), spec.n_head_v);
    match spec.gates {
        DeltaGates::OfHeads { paired: _ } => [channels + values + 2 * n_head, channels, 0, 0, 0, 0, values],
        DeltaGates::OfChannels { rank } => [channels + n_head, channels, rank, rank, spec.n_decays(), values, values],
    }
}

impl ModelRunner {
    /// Launches the delta rule of layer `i`, except its output product. The layer's state is the last inputs of the
    /// convolution, `[n_tap - 1, channels]`, then a matrix `[key_dim, value_dim]` for each value head.
    pub(crate) fn delta_rule<'w>(
        &mut self,
        batch: MicroBatch<'_>,
        i: usize,
        w: &'w CudaDeltaRule,
        input: LinearInput,
    ) -> Result<SublayerOutput<'w>, CudaError> {
        let spec = &w.spec;
        let (channels, values, n_head) = (spec.n_channels(), spec.n_values(), spec.n_head_v);
        let [inputs, conv, before_decay, before_gate, decays, gates, heads] =
            self.scratch_rows(batch, scratch_widths(spec));
        let stride = w.inputs.n_rows();
        self.store_joined(batch, "queries, keys, values, gates", &w.inputs, input, inputs)?;
        let at = |first: usize| RowsArgs::new(inputs, stride, first);
        let (gate, beta, decay) = match &w.low_rank {
            None => (at(channels), at(channels + values), at(channels + values + n_head)),
            Some(low_rank) => {
                let [decay, gate] = &low_rank.down;
                self.store_all(batch, "gates", [decay], input, before_decay)?;
                self.store_all(batch, "gates", [gate], input, before_gate)?;
                self.store_rows(batch, "gates", &low_rank.decay, before_decay, decays)?;
                self.store_rows(batch, "gates", &low_rank.gate, before_gate, gates)?;
                let rows = |x: DeviceSlice<f32>, stride: usize| RowsArgs::new(x, stride, 0);
                (rows(gates, values), at(channels), rows(decays, spec.n_decays()))
            }
        };
        let convolution = ConvolutionArgs::of_channels(at(0), w.taps.ptr(), conv.ptr(), channels, spec.n_tap);
        let states = batch.recurrent.of_layer(i, (spec.n_tap - 1) * channels);
        let (kernel, scans, fused_scans) = if w.low_rank.is_some() {
            let (scans, fused) = (kernels::DELTA_RULE_OF_CHANNELS, kernels::DELTA_RULE_OF_CHANNELS_ALONE);
            (RecurrenceKernel::DELTA_RULE_OF_CHANNELS, scans, fused)
        } else {
            (RecurrenceKernel::DELTA_RULE, kernels::DELTA_RULE, kernels::DELTA_RULE_ALONE)
        };
        let args = DeltaRuleArgs {
            scan: Self::scan_args(batch, kernel, states, heads, [n_head, spec.key_dim, spec.value_dim]),
            x: RowsArgs::new(conv, channels, 0),
            beta,
            decay,
            a: w.a.ptr(),
            dt_bias: w.dt_bias.ptr(),
            n_head_k: spec.n_head_k as u32,
            heads_of_key: match spec.sharing {
                KeySharing::Interleaved => 0,
                KeySharing::Grouped => (n_head / spec.n_head_k) as u32,
            },
            unused: 0,
            eps: spec.eps,
        };
        let norm = GroupNormArgs {
            x: heads.ptr(),
            out: heads.ptr(),
            weight: w.norm.ptr(),
            gate,
            n: spec.value_dim as u32,
            n_group: n_head as u32,
            norm: GroupNormKind::Rms as u32,
            gate_kind: match spec.gates {
                DeltaGates::OfHeads { paired: _ } => OutputGate::Silu,
                DeltaGates::OfChannels { rank: _ } => OutputGate::Sigmoid,
            } as u32,
            eps: spec.eps,
            ..GroupNormArgs::zeroed()
        };
        let around = Self::convolution_of(batch, i, convolution);
        if let Some(fused) = self.fused_decode_args(batch, kernel, &args.scan, around, Some(norm)) {
            self.launch_fused_decode(batch, kernel, fused_scans, &args.scan, &FusedDeltaRuleArgs { args, fused })?;
        } else {
            self.convolution(batch, i, convolution)?;
            self.launch_scan(batch, kernel, scans, &args.scan, &args)?;
            self.group_norm(batch, &norm)?;
        }
        let input = self.rows_input(batch, heads, values, None)?;
        Ok(SublayerOutput::Product { label: "delta rule output", linear: &w.out, input })
    }
}
