//! RWKV: the time mixes of RWKV-6 and RWKV-7 (mixers) and the channel mix (a feed-forward), whose inputs are interpolated
//! between a token and the one before it (token shift).

mod low_rank;

use bytemuck::Zeroable;
use metal_attention_model::{
    ChannelMixSpec, ChannelMixWeights, RWKV6_MIXES, Rwkv6Spec, Rwkv6Weights, Rwkv7Spec, Rwkv7Weights,
};

use low_rank::{CudaLowRank, LowRank, SideProduct};

use crate::CudaError;
use crate::activations::{Widths, widen};
use crate::args::{
    ElementwiseFunction, Epilogue, GroupNormArgs, GroupNormKind, InputFunction, OutputGate, RowsArgs, Rwkv6Args,
    Rwkv7Args, Rwkv7InputsArgs, StatesArgs, TokenShiftArgs,
};
use crate::device::CudaBuffer;
use crate::kernels;
use crate::launch::LaunchGrid;
use crate::runner::grouped::GroupedLinearOp;
use crate::runner::layer::SublayerOutput;
use crate::runner::recurrence::RecurrenceKernel;
use crate::runner::{MicroBatch, ModelRunner};
use crate::slice::{DevicePtr, DeviceSlice};
use crate::stack::CudaStack;
use crate::weights::{CudaLinear, CudaVector, Loader, ptr_or_null};

/// A time mix of RWKV-6. The mixed inputs are those of decay, keys, values, receptance and gate, in that order.
#[derive(Debug)]
pub(crate) struct CudaRwkv6 {
    /// Its sizes.
    spec: Rwkv6Spec,
    /// Interpolation weights of the input of `mix_down`, `[width]`.
    lerp_x: CudaVector,
    /// Interpolation weights of the mixed inputs, `[5, width]`.
    lerps: CudaVector,
    /// The first product of what tokens add to `lerps`, `[5 * mix_rank, n_embd]`.
    mix_down: CudaLinear,
    /// Its second product, `[5, width, mix_rank]`.
    mix_up: CudaStack,
    /// The decay.
    decay: CudaLowRank,
    /// `w0`, `[width]`.
    decay_bias: CudaVector,
    /// `u`, `[n_head, head_dim]`.
    bonus: Option<CudaVector>,
    /// Receptance, `[width, n_embd]`.
    receptance: CudaLinear,
    /// Keys, `[n_head_kv * head_dim, n_embd]`.
    key: CudaLinear,
    /// Values, of the same shape.
    value: CudaLinear,
    /// Gate, `[width, n_embd]`.
    gate: CudaLinear,
    /// Weight and bias of the norm of each head's result, `[width]` each.
    norm: Option<[CudaVector; 2]>,
    /// Output, `[n_embd, width]`.
    out: CudaLinear,
}

/// A time mix of RWKV-7. The mixed inputs are those of receptance, decay, keys, values, rate and, where there is one, gate, in
/// that order.
#[derive(Debug)]
pub(crate) struct CudaRwkv7 {
    /// Its sizes.
    spec: Rwkv7Spec,
    /// Interpolation weights of the mixed inputs, `[n_mix, width]`.
    lerps: CudaVector,
    /// Receptance, `[width, n_embd]`.
    receptance: CudaLinear,
    /// Keys, `[width, n_embd]`.
    key: CudaLinear,
    /// Values, `[width, n_embd]`.
    value: CudaLinear,
    /// The decay.
    decay: CudaLowRank,
    /// `w0`, `[width]`.
    decay_bias: CudaVector,
    /// The in-context learning rate.
    rate: CudaLowRank,
    /// `a0`, `[width]`.
    rate_bias: CudaVector,
    /// The share of the first layer's values, with its bias `v0` `[width]`; `None` in the first layer.
    first_value: Option<(CudaLowRank, CudaVector)>,
    /// The gate, where there is one.
    gate: Option<CudaLowRank>,
    /// `k_k`, `[width]`.
    removed: CudaVector,
    /// `k_a`, `[width]`.
    kept: CudaVector,
    /// `r_k`, `[width]`.
    bonus: CudaVector,
    /// Weight and bias of the norm of each head's result, `[width]` each.
    norm: Option<[CudaVector; 2]>,
    /// Output, `[n_embd, width]`.
    out: CudaLinear,
}

/// A channel mix of RWKV.
#[derive(Debug)]
pub(crate) struct CudaChannelMix {
    /// Its sizes.
    spec: ChannelMixSpec,
    /// The element of the layer's state at which the channel mix's part begins, behind the mixer's.
    state: usize,
    /// Interpolation weights of the mixed inputs (keys, then receptance), `[n_mix, n_embd]`.
    lerps: CudaVector,
    /// Keys, `[width, n_embd]`.
    key: CudaLinear,
    /// Values, `[n_embd, width]`.
    value: CudaLinear,
    /// Receptance, `[n_embd, n_embd]`, where there is one.
    receptance: Option<CudaLinear>,
}

impl CudaRwkv6 {
    /// Uploads the weights.
    pub(super) fn new(loader: &mut Loader<'_>, w: &Rwkv6Weights) -> Result<Self, CudaError> {
        Ok(Self {
            spec: w.spec,
            lerp_x: loader.vector(&w.lerp_x)?,
            lerps: loader.vector(&w.lerps)?,
            mix_down: loader.linear(&w.mix_down)?,
            mix_up: loader.stack(&w.mix_up.iter().collect::<Vec<_>>())?,
            decay: CudaLowRank::new(loader, &w.decay)?,
            decay_bias: loader.vector(&w.decay_bias)?,
            bonus: loader.optional(w.bonus.as_deref())?,
            receptance: loader.linear(&w.receptance)?,
            key: loader.linear(&w.key)?,
            value: loader.linear(&w.value)?,
            gate: loader.linear(&w.gate)?,
            norm: head_norm_weights(loader, w.norm.as_ref())?,
            out: loader.linear(&w.out)?,
        })
    }
}

impl CudaRwkv7 {
    /// Uploads the weights.
    pub(super) fn new(loader: &mut Loader<'_>, w: &Rwkv7Weights) -> Result<Self, CudaError> {
        let first_value = match &w.first_value {
            Some((low_rank, bias)) => Some((CudaLowRank::new(loader, low_rank)?, loader.vector(bias)?)),
            None => None,
        };
        Ok(Self {
            spec: w.spec,
            lerps: loader.vector(&w.lerps)?,
            receptance: loader.linear(&w.receptance)?,
            key: loader.linear(&w.key)?,
            value: loader.linear(&w.value)?,
            decay: CudaLowRank::new(loader, &w.decay)?,
            decay_bias: loader.vector(&w.decay_bias)?,
            rate: CudaLowRank::new(loader, &w.rate)?,
            rate_bias: loader.vector(&w.rate_bias)?,
            first_value,
            gate: w.gate.as_ref().map(|gate| CudaLowRank::new(loader, gate)).transpose()?,
            removed: loader.vector(&w.removed)?,
            kept: loader.vector(&w.kept)?,
            bonus: loader.vector(&w.bonus)?,
            norm: head_norm_weights(loader, w.norm.as_ref())?,
            out: loader.linear(&w.out)?,
        })
    }
}

impl CudaChannelMix {
    /// Uploads the weights.
    pub(super) fn new(loader: &mut Loader<'_>, w: &ChannelMixWeights) -> Result<Self, CudaError> {
        Ok(Self {
            spec: w.spec,
            state: loader.mixer_state,
            lerps: loader.vector(&w.lerps)?,
            key: loader.linear(&w.key)?,
            value: loader.linear(&w.value)?,
            receptance: w.receptance.as_ref().map(|receptance| loader.linear(receptance)).transpose()?,
        })
    }
}

/// Uploads weight and bias of the norm of each head's result, if there is one.
fn head_norm_weights(loader: &Loader<'_>, norm: Option<&[Vec<f32>; 2]>) -> Result<Option<[CudaVector; 2]>, CudaError> {
    norm.map(|[weight, bias]| Ok([loader.vector(weight)?, loader.vector(bias)?])).transpose()
}

/// Checks that there are kernels for an RWKV-6 time mix; the error is the part without one.
pub(crate) fn supports_rwkv6(spec: &Rwkv6Spec) -> Result<(), &'static str> {
    RecurrenceKernel::RWKV6.supports_keys(spec.head_dim)
}

/// Checks that there are kernels for an RWKV-7 time mix; the error is the part without one.
pub(crate) fn supports_rwkv7(spec: &Rwkv7Spec) -> Result<(), &'static str> {
    RecurrenceKernel::RWKV7.supports_keys(spec.head_dim)
}

/// Widens the buffers of intermediate results.
pub(super) fn widen_for_rwkv6(widths: &mut Widths, spec: &Rwkv6Spec) {
    widths.widen_scratch_rows(rwkv6_widths(spec));
}

/// Widens the buffers of intermediate results.
pub(super) fn widen_for_rwkv7(widths: &mut Widths, spec: &Rwkv7Spec) {
    widen(&mut widths.first_value, spec.width);
    widths.widen_scratch_rows(rwkv7_widths(spec));
}

/// Widens the buffers of intermediate results.
pub(super) fn widen_for_channel_mix(widths: &mut Widths, spec: &ChannelMixSpec) {
    widths.widen_scratch_rows(channel_mix_widths(spec));
}

/// Scratch widths of RWKV-6: the mixed inputs; the data-dependent part of the interpolation, before and after its expansion;
/// receptance, keys, values and gate; the decay before and after its expansion; the heads' results.
fn rwkv6_widths(spec: &Rwkv6Spec) -> [usize; 10] {
    let (width, n_kv) = (spec.width, spec.n_head_kv * spec.head_dim);
    let (mixed, offsets_low) = (RWKV6_MIXES * width, RWKV6_MIXES * spec.mix_rank);
    [mixed, offsets_low, mixed, width, n_kv, n_kv, width, spec.decay_rank, width, width]
}

/// Scratch widths of RWKV-7: the mixed inputs; receptance, keys and values; the inner rows of all low-rank products; decay,
/// rate, the share of the first layer's values, and gate; removed keys; the heads' results.
fn rwkv7_widths(spec: &Rwkv7Spec) -> [usize; 11] {
    let width = spec.width;
    let ranks = [spec.decay_rank, spec.rate_rank, spec.value_rank, spec.gate_rank.unwrap_or(0)];
    let low = ranks.iter().map(|rank| rank.next_multiple_of(ALIGNED_RANK)).sum();
    [spec.n_mix() * width, width, width, width, low, width, width, width, width, width, width]
}

/// Scratch widths of the channel mix: mixed inputs, keys, receptance, result.
fn channel_mix_widths(spec: &ChannelMixSpec) -> [usize; 4] {
    [spec.n_mix() * spec.n_embd, spec.width, spec.n_embd, spec.n_embd]
}

/// Alignment of the inner row of a low-rank product, in elements, for vector loads.
const ALIGNED_RANK: usize = 4;

/// A token shift: `n_mix` interpolations between each token's normalised input and that of the token before it.
struct TokenShiftOp {
    /// The previous inputs.
    states: StatesArgs,
    /// The interpolation weights, `[n_mix, width]`.
    lerps: DeviceSlice<f32>,
    /// What is added to the interpolation weights of each token, or [`DeviceSlice::NONE`].
    offsets: DeviceSlice<f32>,
    /// The result, `[n_mix, n_tokens, width]`.
    out: DeviceSlice<f32>,
    /// Elements of a row.
    width: usize,
    /// Interpolations.
    n_mix: usize,
    /// Whether to store the last token's input as the state; false if another shift of the layer reads the old one.
    advance: bool,
}

/// The mixed inputs number `m`, `[n_tokens, width]`.
fn mix_rows(batch: MicroBatch<'_>, mixed: DeviceSlice<f32>, width: usize, m: usize) -> DeviceSlice<f32> {
    let n = batch.size.n_tokens * width;
    mixed.skip(m * n).take(n)
}

impl ModelRunner {
    /// Launches a token shift of the normalised input in `h`.
    fn shift(&mut self, batch: MicroBatch<'_>, shift: &TokenShiftOp) -> Result<(), CudaError> {
        let (runs, _) = Self::runs(batch);
        let args = TokenShiftArgs {
            runs,
            states: shift.states,
            x: self.buffers.h.ptr(),
            lerps: shift.lerps.ptr(),
            more: shift.offsets.ptr(),
            out: shift.out.ptr(),
            width: shift.width as u32,
            n_mix: shift.n_mix as u32,
            n_tokens: batch.size.n_tokens as u32,
            advance: u32::from(shift.advance),
        };
        self.launch(kernels::TOKEN_SHIFT, "", Self::channels_of_runs(batch, shift.width), &args)
    }

    /// Launches the RWKV-6 time mix of layer `i`, except its output product. The layer's state is a matrix for each head, then
    /// the input of the last token.
    pub(crate) fn rwkv6<'w>(
        &mut self,
        batch: MicroBatch<'_>,
        i: usize,
        w: &'w CudaRwkv6,
    ) -> Result<SublayerOutput<'w>, CudaError> {
        let spec = &w.spec;
        let (width, dim, n_head) = (spec.width, spec.head_dim, spec.n_head());
        let [mixed, offsets_low, offsets, r, k, v, gate, low, decay, heads] =
            self.scratch_rows(batch, rwkv6_widths(spec));
        let states = batch.recurrent.of_layer(i, width * dim);
        // The interpolation weights depend on a first interpolation, so the previous token's input is read twice, and stored
        // after the second time.
        let once = TokenShiftOp {
            states,
            lerps: w.lerp_x.slice(),
            offsets: DeviceSlice::NONE,
            out: mixed,
            width,
            n_mix: 1,
            advance: false,
        };
        self.shift(batch, &once)?;
        self.store_rows(batch, "token shift", &w.mix_down, mixed, offsets_low)?;
        self.elementwise(
            batch,
            ElementwiseFunction::Tanh,
            offsets_low,
            DeviceSlice::NONE,
            RWKV6_MIXES * spec.mix_rank,
        )?;
        let up = GroupedLinearOp {
            label: "token shift",
            first: &w.mix_up,
            second: None,
            epilogue: Epilogue::Store,
            activation: 0,
            groups: DevicePtr::NULL,
            x: offsets_low,
            items_a_row: 1,
            x_stride: spec.mix_rank,
            y: offsets,
            y_stride: width,
        };
        self.grouped_gemv(&up, RWKV6_MIXES * batch.size.n_tokens)?;
        self.shift(
            batch,
            &TokenShiftOp { lerps: w.lerps.slice(), offsets, n_mix: RWKV6_MIXES, advance: true, ..once },
        )?;
        // The mixed inputs in order: decay, keys, values, receptance, gate.
        let of_mix = |m: usize| mix_rows(batch, mixed, width, m);
        self.low_rank(batch, &w.decay, InputFunction::Tanh, [of_mix(0), low, decay])?;
        for (linear, m, y) in [(&w.key, 1, k), (&w.value, 2, v), (&w.receptance, 3, r), (&w.gate, 4, gate)] {
            self.store_rows(batch, "time mix", linear, of_mix(m), y)?;
        }
        let args = Rwkv6Args {
            scan: Self::scan_args(
                batch,
                RecurrenceKernel::RWKV6,
                batch.recurrent.of_layer(i, 0),
                heads,
                [n_head, dim, dim],
            ),
            r: r.ptr(),
            k: k.ptr(),
            v: v.ptr(),
            decay: decay.ptr(),
            decay_bias: w.decay_bias.ptr(),
            bonus: ptr_or_null(w.bonus.as_ref()),
            n_head_kv: spec.n_head_kv as u32,
            unused: 0,
        };
        self.launch_scan(batch, RecurrenceKernel::RWKV6, kernels::RWKV6, &args.scan, &args)?;
        let kind = if spec.bonus { OutputGate::Silu } else { OutputGate::Sigmoid };
        let norm = GroupNormArgs {
            x: heads.ptr(),
            out: heads.ptr(),
            ..head_norm(w.norm.as_ref(), spec.norm_eps(), n_head, dim)
        };
        let norm = GroupNormArgs { gate: RowsArgs::new(gate, width, 0), gate_kind: kind as u32, ..norm };
        self.group_norm(batch, &norm)?;
        let input = self.rows_input(batch, heads, width, None)?;
        Ok(SublayerOutput::Product { label: "time mix output", linear: &w.out, input })
    }

    /// Launches the RWKV-7 time mix of layer `i`, except its output product. Its state is laid out as that of RWKV-6.
    pub(crate) fn rwkv7<'w>(
        &mut self,
        batch: MicroBatch<'_>,
        i: usize,
        w: &'w CudaRwkv7,
    ) -> Result<SublayerOutput<'w>, CudaError> {
        let spec = &w.spec;
        let (width, dim, n_head) = (spec.width, spec.head_dim, spec.n_head());
        let [mixed, r, k, v, low, decay, rate, value_mix, gate, kappa, heads] =
            self.scratch_rows(batch, rwkv7_widths(spec));
        let states = batch.recurrent.of_layer(i, width * dim);
        let (lerps, offsets) = (w.lerps.slice(), DeviceSlice::NONE);
        self.shift(
            batch,
            &TokenShiftOp { states, lerps, offsets, out: mixed, width, n_mix: spec.n_mix(), advance: true },
        )?;
        // The mixed inputs in order: receptance, decay, keys, values, rate, gate.
        let of_mix = |m: usize| mix_rows(batch, mixed, width, m);
        let large = [(&w.receptance, 0, r), (&w.key, 2, k), (&w.value, 3, v)];
        let value = w.first_value.as_ref().map(|(low_rank, _)| low_rank);
        let small = [
            (Some(&w.decay), InputFunction::Tanh, 1, decay),
            (Some(&w.rate), InputFunction::AsItLies, 4, rate),
            (value, InputFunction::AsItLies, 3, value_mix),
            (w.gate.as_ref(), InputFunction::Sigmoid, 5, gate),
        ];
        let mut rest = low;
        let small = small.into_iter().filter_map(|(weights, function, m, y)| weights.map(|w| (w, function, m, y)));
        let small: Vec<_> = small
            .map(|(weights, function, m, y)| {
                let middle = rest;
                rest = rest.skip(weights.down.weight.n_rows.next_multiple_of(ALIGNED_RANK));
                LowRank { weights, function, x: of_mix(m), middle, y }
            })
            .collect();
        let first =
            large.map(|(linear, m, y)| SideProduct { linear, x: of_mix(m), y, function: InputFunction::AsItLies });
        let first: Vec<_> = first.into_iter().chain(small.iter().map(LowRank::first)).collect();
        let second: Vec<_> = small.iter().map(LowRank::second).collect();
        // Not in `exact` passes, whose bits may not depend on the number of tokens.
        if !self.exact && batch.size.n_tokens == 1 && first.iter().chain(&second).all(SideProduct::can_run_beside) {
            self.side_products("time mix", &first)?;
            self.side_products("low rank", &second)?;
        } else {
            for (linear, m, y) in large {
                self.store_rows(batch, "time mix", linear, of_mix(m), y)?;
            }
            for LowRank { weights, function, x, middle, y } in small {
                self.low_rank(batch, weights, function, [x, middle, y])?;
            }
        }
        let inputs = Rwkv7InputsArgs {
            decay: decay.ptr(),
            rate: rate.ptr(),
            k: k.ptr(),
            v: v.ptr(),
            kappa: kappa.ptr(),
            decay_bias: w.decay_bias.ptr(),
            rate_bias: w.rate_bias.ptr(),
            removed: w.removed.ptr(),
            kept: w.kept.ptr(),
            first_value: self.buffers.first_value.ptr(),
            value_mix: if w.first_value.is_some() { value_mix.ptr() } else { DevicePtr::NULL },
            value_bias: w.first_value.as_ref().map_or(DevicePtr::NULL, |(_, bias)| bias.ptr()),
            n_head: n_head as u32,
            head_dim: dim as u32,
        };
        let grid = LaunchGrid { blocks: [n_head.div_ceil(4), batch.size.n_tokens, 1], threads: 128, shared: 0 };
        self.launch(kernels::RWKV7_INPUTS, "", grid, &inputs)?;
        let scan =
            Self::scan_args(batch, RecurrenceKernel::RWKV7, batch.recurrent.of_layer(i, 0), heads, [n_head, dim, dim]);
        let [a, b] = [kappa, rate].map(DeviceSlice::ptr);
        let args = Rwkv7Args { scan, r: r.ptr(), decay: decay.ptr(), k: k.ptr(), v: v.ptr(), a, b };
        self.launch_scan(batch, RecurrenceKernel::RWKV7, kernels::RWKV7, &scan, &args)?;
        let norm = GroupNormArgs {
            x: heads.ptr(),
            out: heads.ptr(),
            r: r.ptr(),
            k: k.ptr(),
            v: v.ptr(),
            factor: w.bonus.ptr(),
            ..head_norm(w.norm.as_ref(), spec.norm_eps(), n_head, dim)
        };
        let kind = if w.gate.is_some() { OutputGate::AsItIs } else { OutputGate::None };
        let norm = GroupNormArgs { gate: RowsArgs::new(gate, width, 0), gate_kind: kind as u32, ..norm };
        self.group_norm(batch, &norm)?;
        let input = self.rows_input(batch, heads, width, None)?;
        Ok(SublayerOutput::Product { label: "time mix output", linear: &w.out, input })
    }

    /// Launches the channel mix of layer `i`; without a receptance, except its last product. Its state, the input of the last
    /// token, follows that of the mixer.
    pub(crate) fn channel_mix<'w>(
        &mut self,
        batch: MicroBatch<'_>,
        i: usize,
        w: &'w CudaChannelMix,
    ) -> Result<SublayerOutput<'w>, CudaError> {
        let spec = &w.spec;
        let [mixed, keys, receptance, result] = self.scratch_rows(batch, channel_mix_widths(spec));
        let states = batch.recurrent.of_layer(i, w.state);
        let (lerps, width, n_mix) = (w.lerps.slice(), spec.n_embd, spec.n_mix());
        let offsets = DeviceSlice::NONE;
        self.shift(batch, &TokenShiftOp { states, lerps, offsets, out: mixed, width, n_mix, advance: true })?;
        self.store_rows(batch, "channel mix keys", &w.key, mixed, keys)?;
        self.elementwise(batch, ElementwiseFunction::Squared, keys, DeviceSlice::NONE, spec.width)?;
        let Some(linear) = &w.receptance else {
            let input = self.rows_input(batch, keys, spec.width, None)?;
            return Ok(SublayerOutput::Product { label: "channel mix values", linear: &w.value, input });
        };
        self.store_rows(batch, "channel mix receptance", linear, mix_rows(batch, mixed, width, 1), receptance)?;
        self.store_rows(batch, "channel mix values", &w.value, keys, result)?;
        self.elementwise(batch, ElementwiseFunction::SigmoidTimes, result, receptance, spec.n_embd)?;
        Ok(SublayerOutput::Rows(result))
    }
}

/// Arguments of the norm of each head's result.
fn head_norm(norm: Option<&[CudaBuffer; 2]>, eps: f32, n_head: usize, dim: usize) -> GroupNormArgs {
    let kind = if norm.is_some() { GroupNormKind::Layer } else { GroupNormKind::None };
    let [weight, bias] = norm.map_or([DevicePtr::NULL; 2], |norm| norm.each_ref().map(CudaBuffer::ptr));
    GroupNormArgs {
        weight,
        bias,
        n: dim as u32,
        n_group: n_head as u32,
        of_groups: 1,
        norm: kind as u32,
        eps,
        ..GroupNormArgs::zeroed()
    }
}
